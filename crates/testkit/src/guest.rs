//! The far end of the channel, as a script sees it.
//!
//! A script can be honest (`serve`), can leave out or repeat whatever it likes (`send`), and can write bytes that are no
//! frames at all (`send_bytes`). All calls return as soon as the machine is gone.

use crate::backend::Machine;
use hotcell_wire::{
    Configure, Decision, ExecEnd, ExecEnded, ExecText, FrameReader, GuestFrame, HostFrame, Program, Ready,
    Stage, Stream,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the host sent.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FromHost {
    /// What this guest is to be.
    Configure(Box<Configure>),
    /// Start this; the texts came whole.
    Exec {
        /// Which.
        id: u32,
        /// A program of the image, or one of the init's own.
        program: Program,
        /// What.
        text: ExecText,
    },
    /// Bytes for its stdin.
    Stdin(u32, Vec<u8>),
    /// Its stdin ends.
    StdinEof(u32),
    /// Kill it and all that it started.
    KillTree(u32),
    /// So many more bytes of a stream may be sent.
    Credit(u32, Stream, u32),
    /// Nobody reads this output any more.
    CloseOutput(u32, Stream),
    /// The answer to a request.
    Reply(u32, Decision, String),
    /// Become quiet.
    Quiesce,
    /// Anything else.
    Other,
}

/// The guest's end of the channel.
pub struct FakeGuest {
    socket: UnixStream,
    machine: Arc<Machine>,
    reader: FrameReader,
    sequence: u32,
    texts: Vec<u8>,
    program: Program,
}

impl FakeGuest {
    pub(crate) fn new(socket: UnixStream, machine: Arc<Machine>) -> FakeGuest {
        FakeGuest {
            socket,
            machine,
            reader: FrameReader::new(),
            sequence: 0,
            texts: Vec::new(),
            program: Program::Argv,
        }
    }

    /// Whether the machine is still there.
    pub fn is_alive(&self) -> bool {
        !self.machine.is_dead()
    }

    /// The VMM ends now.
    pub fn die(&self) {
        self.machine.die();
    }

    /// Closes the channel; the machine goes on.
    pub fn close_channel(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Reads nothing and says nothing until the machine is gone.
    pub fn hang(&self) {
        while self.is_alive() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Reads and ignores whatever comes, says nothing, until the machine is gone.
    pub fn ignore(&mut self) {
        while self.receive().is_some() {}
    }

    /// The next thing that the host says; `None` when the machine is gone.
    pub fn receive(&mut self) -> Option<FromHost> {
        self.receive_until(None)
    }

    /// The same, `None` also when nothing came in that time.
    pub fn receive_within(&mut self, limit: Duration) -> Option<FromHost> {
        self.receive_until(Some(Instant::now() + limit))
    }

    fn receive_until(&mut self, end: Option<Instant>) -> Option<FromHost> {
        loop {
            match self.reader.next() {
                Ok(None) => {}
                Ok(Some((header, payload))) => {
                    let frame = HostFrame::parse(header, payload).expect("the host speaks as it should");
                    if let Some(said) = assemble(header.id, frame, &mut self.texts, &mut self.program) {
                        return Some(said);
                    }
                    continue;
                }
                Err(reject) => panic!("the host broke the protocol: {reject}"),
            }
            if let Some(end) = end {
                let left = end.saturating_duration_since(Instant::now());
                let timeout =
                    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
                let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
                if !matches!(poll(&mut fds, Some(&timeout)), Ok(1..)) {
                    return None;
                }
            }
            let mut chunk = [0; 16 * 1024];
            match self.socket.read(&mut chunk) {
                Ok(count @ 1..) => self.reader.push(&chunk[..count]),
                _ => return None,
            }
        }
    }

    /// Sends a frame; `false` when the machine or the channel is gone.
    pub fn send(&mut self, id: u32, frame: &GuestFrame<'_>) -> bool {
        let mut bytes = Vec::new();
        assert!(frame.encode(&mut bytes, id, self.sequence), "the frame is too long");
        self.sequence = self.sequence.wrapping_add(1);
        self.send_bytes(&bytes)
    }

    /// The bytes of a frame with a sequence number of the script's choosing.
    pub fn frame_at(sequence: u32, id: u32, frame: &GuestFrame<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        assert!(frame.encode(&mut bytes, id, sequence), "the frame is too long");
        bytes
    }

    /// The number that the next frame should have.
    pub fn sequence(&self) -> u32 {
        self.sequence
    }

    /// Sends bytes as they are.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> bool {
        self.socket.write_all(bytes).is_ok()
    }

    /// Waits to be configured.
    pub fn configured(&mut self) -> Option<Box<Configure>> {
        match self.receive() {
            Some(FromHost::Configure(configure)) => Some(configure),
            None => None,
            Some(other) => panic!("the host's first word is {other:?}"),
        }
    }

    /// Says ready.
    pub fn say_ready(&mut self) -> bool {
        self.send(0, &GuestFrame::Ready(Ready { kernel_release: "6.1.0-fake", uptime_ns: 1 }))
    }

    /// Waits to be configured and says ready; `false` when the machine is gone.
    pub fn boot(&mut self) -> bool {
        self.configured().is_some() && self.say_ready()
    }

    /// Waits for an exec, ignoring all else; `None` when the machine is gone.
    pub fn exec(&mut self) -> Option<u32> {
        loop {
            if let FromHost::Exec { id, .. } = self.receive()? {
                return Some(id);
            }
        }
    }

    /// Says that an exec ended with a code.
    pub fn exited(&mut self, exec: u32, code: i32) -> bool {
        self.send(exec, &GuestFrame::ExecEnded(&ended(ExecEnd::Exited, code)))
    }
}

/// An end.
pub(crate) fn ended(how: ExecEnd, code: i32) -> ExecEnded {
    let stage = if how == ExecEnd::NotStarted { Stage::Exec } else { Stage::None };
    ExecEnded { how, stage, stragglers: 0, reserved: 0, code: code.into() }
}

fn assemble(id: u32, frame: HostFrame<'_>, texts: &mut Vec<u8>, program: &mut Program) -> Option<FromHost> {
    Some(match frame {
        HostFrame::Configure(configure) => FromHost::Configure(Box::new(*configure)),
        HostFrame::ExecBegin(begin) => {
            *program = begin.program;
            texts.clear();
            return None;
        }
        HostFrame::ExecText(part) => {
            texts.extend_from_slice(part);
            return None;
        }
        HostFrame::ExecStart => {
            let text = ExecText::decode(texts).expect("the host sends good texts");
            FromHost::Exec { id, program: *program, text }
        }
        HostFrame::Stdin(bytes) => FromHost::Stdin(id, bytes.to_vec()),
        HostFrame::StdinEof => FromHost::StdinEof(id),
        HostFrame::KillTree => FromHost::KillTree(id),
        HostFrame::Credit { stream, bytes } => FromHost::Credit(id, stream, bytes),
        HostFrame::CloseOutput(stream) => FromHost::CloseOutput(id, stream),
        HostFrame::Reply(reply) => FromHost::Reply(id, reply.decision, reply.reason.to_owned()),
        HostFrame::Quiesce => FromHost::Quiesce,
        _ => FromHost::Other,
    })
}
