//! A guest that keeps the protocol, with a few programs to run.
//!
//! | argv | what it does |
//! |---|---|
//! | `true`, `exit N`, `signal N`, `missing`, `oom` | ends so |
//! | `echo WORD...`, `err WORD...` | writes the words, a newline, to stdout or stderr |
//! | `noise SEED BYTES`, `both SEED BYTES` | [`Noise`] to stdout, or to stdout and (the next seed) stderr |
//! | `cat` | stdin to stdout, until it ends |
//! | `deaf` | closes its stdin without reading a byte, and ends |
//! | `sleep WORD...` | writes the words, if any, and goes on until it is killed |
//! | the unpacker | takes its stdin, and ends when that does |
//! | `ask CAPABILITY RESOURCE` | asks (by number), writes the answer, exits 0 if it is yes |

use crate::guest::{FakeGuest, FromHost, ended};
use crate::noise::Noise;
use hotcell_wire::{Decision, ExecEnd, ExecEnded, GuestFrame, Program, Request, STREAM_CHUNK, STREAM_WINDOW};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

enum Source {
    Bytes(VecDeque<u8>),
    Noise(Noise, usize),
}

struct Exec {
    streams: [Out; 2],
    /// Passes stdin on to stdout.
    cat: bool,
    /// Takes stdin and does nothing with it: an unpacker without a disk.
    unpack: bool,
    end: Option<ExecEnded>,
}

struct Out {
    source: Source,
    credit: usize,
}

impl Out {
    fn of(bytes: &[u8]) -> Out {
        Out { source: Source::Bytes(bytes.iter().copied().collect()), credit: STREAM_WINDOW as usize }
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        let room = self.credit.min(STREAM_CHUNK);
        let chunk = match &mut self.source {
            Source::Bytes(bytes) => bytes.drain(..room.min(bytes.len())).collect(),
            Source::Noise(noise, left) => {
                let mut chunk = vec![0; (*left).min(if room < 8 { 0 } else { room & !7 })];
                noise.fill(&mut chunk);
                *left -= chunk.len();
                chunk
            }
        };
        self.credit -= chunk.len();
        (!chunk.is_empty()).then_some(chunk)
    }

    fn is_empty(&self) -> bool {
        match &self.source {
            Source::Bytes(bytes) => bytes.is_empty(),
            Source::Noise(_, left) => *left == 0,
        }
    }
}

/// Boots, serves, becomes quiet when asked, and waits for its end.
pub fn honest(guest: &mut FakeGuest) {
    if guest.boot() {
        guest.serve();
    }
}

impl FakeGuest {
    /// Is honest from here on, until the machine is gone.
    pub fn serve(&mut self) {
        let mut execs: BTreeMap<u32, Exec> = BTreeMap::new();
        loop {
            let busy = match self.push_out(&mut execs) {
                Some(busy) => busy,
                None => return,
            };
            let said = if busy { self.receive_within(Duration::ZERO) } else { self.receive() };
            match said {
                Some(said) => {
                    if !self.hear(said, &mut execs) {
                        return;
                    }
                }
                None if busy && self.is_alive() => {}
                None => return,
            }
        }
    }

    /// Sends one chunk of each stream that may; whether any was sent, `None` when the machine is gone.
    fn push_out(&mut self, execs: &mut BTreeMap<u32, Exec>) -> Option<bool> {
        let mut busy = false;
        let mut over = Vec::new();
        for (&id, exec) in execs.iter_mut() {
            let [stdout, stderr] = &mut exec.streams;
            if let Some(chunk) = stdout.next() {
                busy = true;
                self.send(id, &GuestFrame::Stdout(&chunk)).then_some(())?;
            }
            if let Some(chunk) = stderr.next() {
                busy = true;
                self.send(id, &GuestFrame::Stderr(&chunk)).then_some(())?;
            }
            if let Some(end) = exec.end.filter(|_| exec.streams.iter().all(Out::is_empty)) {
                busy = true;
                self.send(id, &GuestFrame::ExecEnded(&end)).then_some(())?;
                over.push(id);
            }
        }
        over.iter().for_each(|id| drop(execs.remove(id)));
        Some(busy)
    }

    fn hear(&mut self, said: FromHost, execs: &mut BTreeMap<u32, Exec>) -> bool {
        match said {
            FromHost::Exec { id, program: Program::Unpack, .. } => {
                self.send(id, &GuestFrame::Started);
                let streams = [Out::of(b""), Out::of(b"")];
                execs.insert(id, Exec { streams, cat: false, unpack: true, end: None });
            }
            FromHost::Exec { id, text, .. } => {
                let words: Vec<String> =
                    text.argv.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect();
                self.send(id, &GuestFrame::Started);
                let exec = self.begin(id, &words);
                execs.insert(id, exec);
            }
            FromHost::Stdin(id, bytes) => {
                let count = bytes.len() as u32;
                if execs.get(&id).is_some_and(|exec| exec.unpack) {
                    return self.send(id, &GuestFrame::StdinCredit(count));
                }
                if let Some(exec) = execs.get_mut(&id)
                    && exec.cat
                    && let Source::Bytes(out) = &mut exec.streams[0].source
                {
                    out.extend(bytes);
                    return self.send(id, &GuestFrame::StdinCredit(count));
                }
            }
            FromHost::StdinEof(id) => {
                if let Some(exec) = execs.get_mut(&id).filter(|exec| exec.cat || exec.unpack) {
                    exec.end = Some(ended(ExecEnd::Exited, 0));
                }
            }
            FromHost::KillTree(id) => {
                if let Some(exec) = execs.get_mut(&id) {
                    exec.end.get_or_insert(ended(ExecEnd::Signalled, 9));
                }
            }
            FromHost::Credit(id, stream, bytes) => {
                if let Some(exec) = execs.get_mut(&id) {
                    exec.streams[stream as usize - 1].credit += bytes as usize;
                }
            }
            FromHost::CloseOutput(id, stream) => {
                if let Some(exec) = execs.get_mut(&id) {
                    let out = &mut exec.streams[stream as usize - 1];
                    if !out.is_empty() {
                        exec.end = Some(ended(ExecEnd::Signalled, 13));
                    }
                    *out = Out::of(b"");
                }
            }
            FromHost::Reply(id, decision, reason) => {
                // Requests of `ask` carry the number of their exec.
                if let Some(exec) = execs.get_mut(&id) {
                    let verb = match decision {
                        Decision::Allow => "allow",
                        Decision::Deny => "deny",
                        Decision::Defer => "defer",
                    };
                    exec.streams[0] = Out::of(format!("{verb} {reason}\n").as_bytes());
                    exec.end = Some(ended(ExecEnd::Exited, i32::from(decision != Decision::Allow)));
                }
            }
            FromHost::Quiesce => return self.send(0, &GuestFrame::Quiesced),
            FromHost::Configure(_) => panic!("configured twice"),
            FromHost::Other => {}
        }
        true
    }

    fn begin(&mut self, id: u32, words: &[String]) -> Exec {
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        let line = || format!("{}\n", words[1..].join(" ")).into_bytes();
        let noise = |seed: u64| Out {
            source: Source::Noise(Noise::new(seed), number(2) as usize),
            credit: STREAM_WINDOW as usize,
        };
        let exited = |code: i32| Some(ended(ExecEnd::Exited, code));
        let mut exec =
            Exec { streams: [Out::of(b""), Out::of(b"")], cat: false, unpack: false, end: exited(0) };
        match words[0].as_str() {
            "true" => {}
            "exit" => exec.end = exited(number(1) as i32),
            "signal" => exec.end = Some(ended(ExecEnd::Signalled, number(1) as i32)),
            "oom" => exec.end = Some(ended(ExecEnd::OutOfMemory, 9)),
            "echo" => exec.streams[0] = Out::of(&line()),
            "err" => exec.streams[1] = Out::of(&line()),
            "noise" => exec.streams[0] = noise(number(1)),
            "both" => exec.streams = [noise(number(1)), noise(number(1) + 1)],
            "cat" => (exec.cat, exec.end) = (true, None),
            "deaf" => {
                self.send(id, &GuestFrame::StdinClosed);
            }
            "sleep" => {
                exec.end = None;
                if words.len() > 1 {
                    exec.streams[0] = Out::of(&line());
                }
            }
            "ask" => {
                exec.end = None;
                self.send(
                    id,
                    &GuestFrame::Request(Request {
                        exec: id,
                        capability: number(1) as u8,
                        resource: words[2].as_bytes(),
                        justification: b"the task needs it",
                    }),
                );
            }
            _ => exec.end = Some(ended(ExecEnd::NotStarted, 2)),
        }
        exec
    }
}
