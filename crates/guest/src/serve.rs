//! The loop: one thread, one epoll, every event handled without waiting.
//!
//! ```text
//! waiting --Configure--> serving --Quiesce--> quiescing --workload empty, disk written out and frozen--> quiet
//!                  any error, a closed channel, a dead reaper: the machine ends
//! ```
//! What it guarantees: a second `Configure`, a frame out of place or beyond
//! credit ends the machine; control is never held up by data.
//! What it does not: answer to the workload, except through `requests`.

use crate::boot::Booted;
use crate::cgroup::Workload;
use crate::channel::{Channel, Input};
use crate::configure::{self, Prepared};
use crate::exec::Exec;
use crate::gate::Gate;
use crate::last::{self, Doing, Failure};
use crate::limits::{BEFORE_READING_AHEAD, COLLECTING_BYTES, LAST_WORDS_PATIENCE, QUIESCE_PATIENCE};
use crate::oom::OomLog;
use crate::permits::Permit;
use crate::poll::{Poll, Source};
use crate::reaper::Reaper;
use crate::requests::Requests;
use crate::roll;
use crate::start::{Order, Starter};
use crate::view;
use hotcell_sys::guest::{freeze, signal};
use hotcell_wire::{
    Configure, ExecBegin, ExecEnd, ExecEnded, FrameReader, GuestFrame, HostFrame, MAX_EXEC_TEXT, MAX_EXECS,
    MAX_TEXT, Program, Ready, Stage, Stream,
};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// An exec whose texts are still coming.
#[derive(Debug)]
struct Collecting {
    program: Program,
    stdin: bool,
    uid: u32,
    gid: u32,
    last: bool,
    permit: Permit,
    text_len: usize,
    text: Vec<u8>,
    /// Refused from the start; said at its start.
    refused: Option<Errno>,
}

/// How far the end has come.
#[derive(Debug, PartialEq, Eq)]
enum Quiet {
    No,
    Wanted { deadline: Instant },
    Reached,
}

struct Init {
    poll: Poll,
    channel: Channel,
    starter: Starter,
    workload: Workload,
    oom: OomLog,
    requests: Requests,
    gate: Gate,
    prepared: Prepared,
    configured: bool,
    /// When to read ahead, if the host has said nothing by then.
    read_ahead_at: Option<Instant>,
    collecting: BTreeMap<u32, Collecting>,
    execs: BTreeMap<u32, Exec>,
    /// Those whose end was said and that are not tidied away yet.
    ended: Vec<Exec>,
    /// An exec has ended after which the host means to start another.
    more: bool,
    /// Where the next round over the execs begins, so that each gets its turn.
    turn: u32,
    quiet: Quiet,
    /// Holds the namespaces; it is never waited for while the machine runs.
    _reaper: Reaper,
}

/// Serves until the machine ends.
pub(crate) fn serve(booted: Booted) -> ! {
    let Booted { poll, port, starter, gate, reaper, workload, prepared, oom, listener } = booted;
    let mut init = Init {
        poll,
        channel: Channel::new(port),
        starter,
        workload,
        oom,
        requests: Requests::new(listener),
        gate,
        prepared,
        configured: false,
        read_ahead_at: Some(Instant::now() + BEFORE_READING_AHEAD),
        collecting: BTreeMap::new(),
        execs: BTreeMap::new(),
        ended: Vec::new(),
        more: false,
        turn: 0,
        quiet: Quiet::No,
        _reaper: reaper,
    };
    loop {
        if let Err(failure) = init.round() {
            init.stop(&failure);
        }
    }
}

impl Init {
    fn round(&mut self) -> Result<(), Failure> {
        let timeout = self.timeout();
        let sources = self.poll.wait(timeout).doing(|| "wait for events".into())?;
        for source in sources {
            self.hear(source)?;
        }
        let now = Instant::now();
        self.channel.expire(now);
        self.read_channel(now)?;
        self.read_ahead(now)?;
        self.requests.expire(now);
        self.requests.accept(&self.poll, now);
        self.requests.pump(&mut self.channel, now);
        self.pump_gate();
        self.pump_execs();
        self.end_execs();
        self.grow_quiet(now)?;
        self.channel.flush().doing(|| "write to the channel".into())?;
        self.tidy();
        Ok(())
    }

    /// What nobody waits for comes after all that somebody waits for was said; after the last exec it does not come at
    /// all, since the machine ends.
    fn tidy(&mut self) {
        if self.quiet != Quiet::No {
            return;
        }
        if self.more || !self.execs.is_empty() {
            self.ended.clear();
        }
        if std::mem::take(&mut self.more) {
            self.starter.make_ahead(&self.poll);
        }
    }

    /// Nothing, while something can go on at once; else until the next deadline.
    fn timeout(&self) -> Option<Duration> {
        let data = self.channel.takes_data();
        let busy = self.channel.wants_read()
            || self.channel.wants_write()
            || data && self.gate.readable
            || data && self.requests.can_pump()
            || data && self.execs.values().any(Exec::can_pump);
        if busy {
            return Some(Duration::ZERO);
        }
        let quiet = match self.quiet {
            // The kernel closes some files late and tells nobody.
            Quiet::Wanted { .. } => Some(Duration::from_millis(5)),
            _ => None,
        };
        let deadlines = [self.requests.deadline(), self.channel.deadline(), self.read_ahead_at];
        let deadline = deadlines.into_iter().flatten().min();
        let deadline = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        [quiet, deadline].into_iter().flatten().min()
    }

    /// A host whose run waits has spoken when the channel opens. One that saves this machine says nothing.
    fn read_ahead(&mut self, now: Instant) -> Result<(), Failure> {
        if self.configured {
            self.read_ahead_at = None;
        } else if self.read_ahead_at.is_some_and(|at| at <= now) {
            self.read_ahead_at = None;
            self.gate.warm()?;
        }
        Ok(())
    }

    fn hear(&mut self, source: Source) -> Result<(), Failure> {
        match source {
            Source::Channel => self.channel.wake(),
            Source::Reaper => return Err(Failure::new("the reaper of the workload's processes died")),
            Source::GateDeath => return Err(Failure::new("the gate died")),
            Source::Gate => self.gate.readable = true,
            Source::Listener => self.requests.hear_knock(),
            Source::Client(id) => self.requests.hear_client(id),
            // Looked at by `grow_quiet` in every round.
            Source::Workload => {}
            Source::Status(id) => self.with_exec(id, Exec::hear_status),
            Source::Death(id) => {
                if let Some(exec) = self.execs.get_mut(&id)
                    && exec.hear_death(&mut self.channel)
                {
                    // Before its tree is killed: what escapes that for a moment executes nothing any more.
                    self.gate.end(id);
                    exec.kill();
                }
            }
            Source::Cgroup(id) => self.with_exec(id, |exec, _| exec.hear_cgroup()),
            Source::Stdout(id) => self.with_exec(id, |exec, _| exec.hear_output(Stream::Stdout)),
            Source::Stderr(id) => self.with_exec(id, |exec, _| exec.hear_output(Stream::Stderr)),
            Source::Stdin(id) => self.with_exec(id, |exec, channel| {
                exec.hear_stdin();
                exec.feed_stdin(channel);
            }),
        }
        Ok(())
    }

    /// An exec that has ended may still have an event on its way.
    fn with_exec(&mut self, id: u32, act: impl FnOnce(&mut Exec, &mut Channel)) {
        if let Some(exec) = self.execs.get_mut(&id) {
            act(exec, &mut self.channel);
        }
    }

    fn read_channel(&mut self, now: Instant) -> Result<(), Failure> {
        // A bounded piece per round: output and events get their turn.
        if !self.channel.wants_read() {
            return Ok(());
        }
        match self.channel.fill(now).doing(|| "read from the channel".into())? {
            Input::Bytes => {}
            Input::Nothing => return Ok(()),
            Input::Gone => return Err(Failure::new("the host closed the channel")),
        }
        let mut reader = std::mem::replace(&mut self.channel.reader, FrameReader::new());
        while let Some((header, payload)) = reader.next().doing(|| "read a frame of the host".into())? {
            let frame = HostFrame::parse(header, payload).doing(|| "read a frame of the host".into())?;
            self.handle(header.id, frame)?;
        }
        self.channel.reader = reader;
        Ok(())
    }

    fn handle(&mut self, id: u32, frame: HostFrame<'_>) -> Result<(), Failure> {
        if let HostFrame::Configure(configure) = frame {
            return self.configure(configure);
        }
        if !self.configured {
            return Err(Failure::new("the host sent a frame before it configured this machine"));
        }
        match frame {
            HostFrame::ExecBegin(begin) => self.begin(id, begin)?,
            HostFrame::ExecText(bytes) => self.collect(id, bytes)?,
            HostFrame::ExecStart => self.start(id)?,
            // The rest may cross the exec's end on its way; then it means nothing.
            HostFrame::Stdin(bytes) => {
                if let Some(exec) = self.execs.get_mut(&id) {
                    exec.take_stdin(bytes, &mut self.channel)
                        .map_err(|_| Failure::new("the host sent more stdin than it was allowed"))?;
                }
            }
            HostFrame::StdinEof => self.with_exec(id, Exec::end_stdin),
            HostFrame::Signal(number) => {
                if let Some(process) = self.execs.get(&id).and_then(Exec::first_process) {
                    // A process that has just died needs no signal.
                    let _ = signal(process.as_fd(), number);
                }
            }
            HostFrame::KillTree => self.with_exec(id, |exec, _| exec.kill()),
            HostFrame::Credit { stream, bytes } => {
                self.with_exec(id, |exec, _| exec.credit(stream, bytes));
            }
            HostFrame::CloseOutput(stream) => self.with_exec(id, |exec, _| exec.close_output(stream)),
            HostFrame::Reply(reply) => {
                self.requests.reply(id, &reply, &mut self.channel, Instant::now());
            }
            HostFrame::Clock(clock) => configure::set_clock(clock)?,
            HostFrame::RollCall => roll::answer(id, configure::uptime_ns(), &self.execs, &mut self.channel),
            HostFrame::Quiesce => self.quiesce()?,
            HostFrame::ExecAllow(digests) => self.gate.allow(digests)?,
            HostFrame::ExecEnforce { workspace } => self.gate.enforce(workspace)?,
            HostFrame::Ping(nonce) => self.channel.send(0, &GuestFrame::Pong(nonce)),
            _ => return Err(Failure::new("the host sent a frame that this init does not know")),
        }
        Ok(())
    }

    fn configure(&mut self, configure: &Configure) -> Result<(), Failure> {
        if self.configured {
            return Err(Failure::new("the host configured this machine twice"));
        }
        self.prepared.apply(configure, &self.workload, self.starter.view())?;
        self.configured = true;
        let ready =
            Ready { kernel_release: &self.prepared.kernel_release, uptime_ns: configure::uptime_ns() };
        self.channel.send(0, &GuestFrame::Ready(ready));
        Ok(())
    }

    fn begin(&mut self, id: u32, begin: &ExecBegin) -> Result<(), Failure> {
        if self.collecting.contains_key(&id) || self.execs.contains_key(&id) {
            return Err(Failure::new(format!("the host began exec {id} twice")));
        }
        let text_len = begin.text_len.get() as usize;
        if text_len > MAX_EXEC_TEXT || self.collecting.len() >= MAX_EXECS {
            return Err(Failure::new(format!("the host began exec {id} beyond a limit")));
        }
        let promised: usize = self.collecting.values().map(|other| other.text_len).sum();
        let refused = if self.quiet != Quiet::No {
            Some(Errno::SHUTDOWN)
        } else if promised + text_len > COLLECTING_BYTES
            || self.collecting.len() + self.execs.len() >= MAX_EXECS
        {
            Some(Errno::AGAIN)
        } else {
            None
        };
        let collecting = Collecting {
            program: begin.program,
            stdin: begin.stdin != 0,
            uid: begin.uid.get(),
            gid: begin.gid.get(),
            last: begin.last != 0,
            permit: Permit { binary: begin.binary, spawn: begin.spawn != 0 },
            text_len: if refused.is_some() { 0 } else { text_len },
            text: Vec::new(),
            refused,
        };
        self.collecting.insert(id, collecting);
        Ok(())
    }

    fn collect(&mut self, id: u32, bytes: &[u8]) -> Result<(), Failure> {
        let unknown = || Failure::new(format!("the host sent texts for exec {id} that it did not begin"));
        let collecting = self.collecting.get_mut(&id).ok_or_else(unknown)?;
        if collecting.refused.is_some() {
            return Ok(());
        }
        if collecting.text.len() + bytes.len() > collecting.text_len {
            return Err(Failure::new(format!("the texts of exec {id} are longer than the host said")));
        }
        collecting.text.extend_from_slice(bytes);
        Ok(())
    }

    fn start(&mut self, id: u32) -> Result<(), Failure> {
        let Some(collecting) = self.collecting.remove(&id) else {
            return Err(Failure::new(format!("the host started exec {id} that it did not begin")));
        };
        if let Err((stage, errno)) = self.try_start(id, collecting)? {
            self.gate.gone(id);
            let ended = ExecEnded {
                how: ExecEnd::NotStarted,
                stage,
                stragglers: 0,
                reserved: 0,
                code: errno.raw_os_error().into(),
            };
            self.channel.send(id, &GuestFrame::ExecEnded(&ended));
        }
        Ok(())
    }

    fn try_start(&mut self, id: u32, order: Collecting) -> Result<Result<(), (Stage, Errno)>, Failure> {
        if let Some(errno) = order.refused {
            return Ok(Err((Stage::Spawn, errno)));
        }
        if order.text.len() != order.text_len {
            return Err(Failure::new(format!("the texts of exec {id} are shorter than the host said")));
        }
        let Collecting { program, stdin, uid, gid, last, permit, text, .. } = order;
        // Before the process has its order, so that the gate knows it when it executes.
        self.gate.begin()?;
        self.gate.permit(id, permit)?;
        let started = match self.starter.start(id, (uid, gid), &Order { program, stdin, text }, &self.poll) {
            Ok(started) => started,
            Err(failed) => return Ok(Err(failed)),
        };
        let own = matches!(program, Program::Pack | Program::Unpack);
        self.execs.insert(id, Exec::new(id, started, own, last));
        Ok(Ok(()))
    }

    /// Reports of the gate, as far as the channel takes them.
    fn pump_gate(&mut self) {
        while self.gate.readable && self.channel.takes_data() {
            let channel = &mut self.channel;
            let forward = |frame: &GuestFrame<'_>| {
                if let GuestFrame::ExecDecision(decision) = frame {
                    channel.send(decision.exec, frame);
                }
            };
            if !self.gate.report(forward) {
                break;
            }
        }
    }

    /// Chunks of all streams in turn while the channel takes them, beginning
    /// after where the last round stopped.
    fn pump_execs(&mut self) {
        while self.execs.values().any(Exec::can_pump) {
            let (lower, upper) = (self.execs.range(..self.turn), self.execs.range(self.turn..));
            let ids: Vec<u32> = upper.chain(lower).map(|(&id, _)| id).collect();
            for id in ids {
                if !self.channel.takes_data() {
                    self.turn = id;
                    return;
                }
                self.with_exec(id, Exec::pump);
            }
        }
    }

    fn end_execs(&mut self) {
        let waiting = self.execs.values().any(Exec::is_over);
        if !waiting {
            return;
        }
        for (&id, _) in self.execs.iter().filter(|(_, exec)| exec.is_over()) {
            self.gate.gone(id);
        }
        for (id, exec) in std::mem::take(&mut self.execs) {
            match exec.ended(&mut self.oom) {
                Some(ended) => {
                    self.channel.send(id, &GuestFrame::ExecEnded(&ended));
                    self.more |= !exec.is_last();
                    self.ended.push(exec);
                }
                None => {
                    self.execs.insert(id, exec);
                }
            }
        }
    }

    fn quiesce(&mut self) -> Result<(), Failure> {
        if self.quiet == Quiet::No {
            self.quiet = Quiet::Wanted { deadline: Instant::now() + QUIESCE_PATIENCE };
            if !self.workload.is_empty() {
                self.workload.kill().doing(|| "kill the workload".into())?;
            }
        }
        Ok(())
    }

    /// Once nobody is left to write: disk written out, frozen, and said.
    fn grow_quiet(&mut self, now: Instant) -> Result<(), Failure> {
        let Quiet::Wanted { deadline } = self.quiet else { return Ok(()) };
        if self.workload.is_empty() {
            seal_workspace().doing(|| "write /workspace out".into())?;
            self.quiet = Quiet::Reached;
            self.channel.send(0, &GuestFrame::Quiesced);
            return Ok(());
        }
        if now > deadline {
            return Err(Failure::new("failed to quiesce: the workload did not go away"));
        }
        Ok(())
    }

    /// Says why, if the host still listens, and ends the machine.
    fn stop(&mut self, failure: &Failure) -> ! {
        let _ = self.workload.kill();
        let text = failure.to_string();
        last::console(&text);
        let text = text.as_bytes();
        self.channel.send(0, &GuestFrame::Fatal(text.get(..MAX_TEXT).unwrap_or(text)));
        let end = Instant::now() + LAST_WORDS_PATIENCE;
        while !self.channel.is_gone() && Instant::now() < end {
            self.channel.wake();
            if self.channel.flush().is_err() || self.channel.waiting() == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = seal_workspace();
        last::restart()
    }
}

/// Writes the workload's disk out and lets nobody change it any more. That is done by one call, whose way through the
/// kernel is half as long as that of making it read-only: a clone's VMM translates it for every run.
fn seal_workspace() -> io::Result<()> {
    freeze(view::workspace()?.as_fd())
}
