//! One exec from its start to its end: streams, credit, death, the last output.
//!
//! ```text
//! ExecStart -> Starting --status pipe closes--> Running --first process dies-->
//!   kill the rest of the cgroup -> (empty) -> read both outputs to their end -> ExecEnded
//! ```
//! What it guarantees: output is read only against the host's credit; nothing
//! of an exec outlives its first process; `ExecEnded` follows the last byte of
//! output; a pipe that a stranger keeps open does not hold the end back, since
//! once the cgroup is empty an empty pipe is a finished one.
//! What it does not: time anything. Patience is the host's.

use crate::cgroup::ExecCgroup;
use crate::channel::Channel;
use crate::confine::REPORT_LEN;
use crate::limits::STDIN_CREDIT_STEP;
use crate::oom::OomLog;
use crate::start::Started;
use hotcell_sys::guest::Child;
use hotcell_wire::{ExecEnd, ExecEnded, GuestFrame, STREAM_WINDOW, Stage, Stream};
use rustix::io::{Errno, ioctl_fionread, read, write};
use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus, waitid};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

/// A live exec.
#[derive(Debug)]
pub(crate) struct Exec {
    id: u32,
    child: Child,
    cgroup: ExecCgroup,
    status: Option<OwnedFd>,
    /// Where its start failed, by its own report.
    failed: Option<(u8, i32)>,
    stdin: Stdin,
    outputs: [Output; 2],
    death: Option<WaitIdStatus>,
    stragglers: bool,
    cgroup_empty: bool,
    /// It runs the init's own packer or unpacker.
    own: bool,
    last: bool,
}

#[derive(Debug)]
struct Stdin {
    pipe: Option<OwnedFd>,
    writable: bool,
    buffer: VecDeque<u8>,
    eof: bool,
    /// What the host may still send.
    allowance: u32,
    /// What was taken and not yet credited again.
    uncredited: u32,
}

#[derive(Debug)]
struct Output {
    pipe: Option<OwnedFd>,
    stream: Stream,
    readable: bool,
    credit: u32,
}

/// The host sent what it may not send.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BeyondCredit;

impl Exec {
    /// Takes over a started child.
    pub(crate) fn new(id: u32, started: Started, own: bool, last: bool) -> Exec {
        let output =
            |pipe, stream| Output { pipe: Some(pipe), stream, readable: true, credit: STREAM_WINDOW };
        Exec {
            id,
            child: started.child,
            cgroup: started.cgroup,
            status: Some(started.status),
            failed: None,
            stdin: Stdin {
                pipe: started.stdin,
                writable: true,
                buffer: VecDeque::new(),
                eof: false,
                allowance: STREAM_WINDOW,
                uncredited: 0,
            },
            outputs: [output(started.stdout, Stream::Stdout), output(started.stderr, Stream::Stderr)],
            death: None,
            stragglers: false,
            cgroup_empty: false,
            own,
            last,
        }
    }

    /// Whether it runs the init's own program for good.
    pub(crate) fn is_own(&self) -> bool {
        self.own
    }

    /// Whether the host means to start nothing after it.
    pub(crate) fn is_last(&self) -> bool {
        self.last
    }

    /// Every process of its tree.
    pub(crate) fn processes(&self) -> Vec<i32> {
        self.cgroup.processes()
    }

    /// Its first process, while it may still be signalled.
    pub(crate) fn first_process(&self) -> Option<&OwnedFd> {
        self.death.is_none().then_some(&self.child.pidfd)
    }

    /// Kills everything that belongs to it.
    pub(crate) fn kill(&self) {
        // Fails only for a cgroup that is gone, and then there is nobody to kill.
        let _ = self.cgroup.kill();
    }

    /// The status pipe has something: it started, or says why not.
    pub(crate) fn hear_status(&mut self, channel: &mut Channel) {
        let Some(status) = &self.status else { return };
        let mut report = [0; REPORT_LEN];
        match read(status, &mut report) {
            Ok(REPORT_LEN) => {
                let [stage, errno @ ..] = report;
                self.failed = Some((stage, i32::from_le_bytes(errno)));
            }
            Ok(_) => channel.send(self.id, &GuestFrame::Started),
            Err(_) => return,
        }
        self.status = None;
    }

    /// The first process is dead; whether it left others, which the caller kills.
    pub(crate) fn hear_death(&mut self, channel: &mut Channel) -> bool {
        if self.death.is_some() {
            return false;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let Ok(Some(status)) = waitid(WaitId::PidFd(self.child.pidfd.as_fd()), options) else { return false };
        self.hear_status(channel);
        self.death = Some(status);
        self.stdin.pipe = None;
        self.stdin.buffer = VecDeque::new();
        self.hear_cgroup();
        self.stragglers = !self.cgroup_empty;
        self.stragglers
    }

    /// The cgroup may have become empty.
    pub(crate) fn hear_cgroup(&mut self) {
        // Read in any case: reading arms the next event.
        let empty = self.cgroup.is_empty();
        if self.death.is_some() && empty && !self.cgroup_empty {
            self.cgroup_empty = true;
            // What was written is in the pipes now: one more look at each finds its end.
            for output in &mut self.outputs {
                output.readable = true;
            }
        }
    }

    pub(crate) fn hear_stdin(&mut self) {
        self.stdin.writable = true;
    }

    pub(crate) fn hear_output(&mut self, stream: Stream) {
        for output in self.outputs.iter_mut().filter(|output| output.stream == stream) {
            output.readable = true;
        }
    }

    /// The host allows more output.
    pub(crate) fn credit(&mut self, stream: Stream, bytes: u32) {
        for output in self.outputs.iter_mut().filter(|output| output.stream == stream) {
            output.credit = output.credit.saturating_add(bytes);
            output.readable = true;
        }
    }

    /// Nobody reads this output any more: whoever writes to it gets SIGPIPE, as with any pipe.
    pub(crate) fn close_output(&mut self, stream: Stream) {
        for output in self.outputs.iter_mut().filter(|output| output.stream == stream) {
            output.pipe = None;
        }
    }

    /// Bytes for stdin.
    pub(crate) fn take_stdin(&mut self, bytes: &[u8], channel: &mut Channel) -> Result<(), BeyondCredit> {
        let count = u32::try_from(bytes.len()).map_err(|_| BeyondCredit)?;
        self.stdin.allowance = self.stdin.allowance.checked_sub(count).ok_or(BeyondCredit)?;
        // Straight into the pipe, as long as nothing waits before it.
        let mut rest = bytes;
        if self.stdin.buffer.is_empty() {
            while let Some(pipe) =
                self.stdin.pipe.as_ref().filter(|_| self.stdin.writable && !rest.is_empty())
                && let Ok(count) = write(pipe, rest)
            {
                rest = rest.get(count..).unwrap_or_default();
                self.stdin.uncredited =
                    self.stdin.uncredited.saturating_add(u32::try_from(count).unwrap_or(0));
            }
        }
        if self.stdin.pipe.is_some() {
            self.stdin.buffer.extend(rest);
            self.feed_stdin(channel);
        }
        Ok(())
    }

    pub(crate) fn end_stdin(&mut self, channel: &mut Channel) {
        self.stdin.eof = true;
        self.feed_stdin(channel);
    }

    /// Writes what the process takes, and hands credit back.
    pub(crate) fn feed_stdin(&mut self, channel: &mut Channel) {
        let stdin = &mut self.stdin;
        while let Some(pipe) = stdin.pipe.as_ref().filter(|_| stdin.writable) {
            let (bytes, _) = stdin.buffer.as_slices();
            if bytes.is_empty() {
                break;
            }
            match write(pipe, bytes) {
                Ok(count) => {
                    stdin.buffer.drain(..count);
                    stdin.uncredited = stdin.uncredited.saturating_add(u32::try_from(count).unwrap_or(0));
                }
                Err(Errno::AGAIN) => stdin.writable = false,
                Err(Errno::INTR) => {}
                Err(_) => {
                    stdin.pipe = None;
                    stdin.buffer = VecDeque::new();
                    channel.send(self.id, &GuestFrame::StdinClosed);
                }
            }
        }
        if stdin.buffer.is_empty() && stdin.eof {
            stdin.pipe = None;
        }
        let due = stdin.uncredited >= STDIN_CREDIT_STEP || (stdin.buffer.is_empty() && stdin.uncredited > 0);
        if due && stdin.pipe.is_some() {
            channel.send(self.id, &GuestFrame::StdinCredit(stdin.uncredited));
            stdin.allowance = stdin.allowance.saturating_add(stdin.uncredited);
            stdin.uncredited = 0;
        }
    }

    /// Whether [`Exec::pump`] would move something now.
    pub(crate) fn can_pump(&self) -> bool {
        self.status.is_none() && self.outputs.iter().any(|output| output.can_move(self.cgroup_empty))
    }

    /// Moves at most one chunk of each output to the channel.
    pub(crate) fn pump(&mut self, channel: &mut Channel) {
        // "Started" comes first.
        if self.status.is_some() {
            return;
        }
        for output in &mut self.outputs {
            if channel.takes_data() {
                output.pump(self.id, channel, self.cgroup_empty);
            }
        }
    }

    /// Whether everything is said but how it ended.
    pub(crate) fn is_over(&self) -> bool {
        self.cgroup_empty && self.outputs.iter().all(|output| output.pipe.is_none())
    }

    /// How it ended, once everything is said but that.
    pub(crate) fn ended(&self, oom: &mut OomLog) -> Option<ExecEnded> {
        let death = self.death.as_ref().filter(|_| self.is_over())?;
        let (how, stage, code) = match (self.failed, death.terminating_signal()) {
            (Some((stage, errno)), _) => (ExecEnd::NotStarted, stage_of(stage), errno),
            (None, Some(signal)) => {
                let starved = signal == libc::SIGKILL && oom.names(self.child.pid.as_raw_nonzero().get());
                let how = if starved { ExecEnd::OutOfMemory } else { ExecEnd::Signalled };
                (how, Stage::None, signal)
            }
            (None, None) => (ExecEnd::Exited, Stage::None, death.exit_status().unwrap_or(-1)),
        };
        let stragglers = u8::from(self.stragglers);
        Some(ExecEnded { how, stage, stragglers, reserved: 0, code: code.into() })
    }
}

impl Output {
    fn can_move(&self, finished: bool) -> bool {
        self.pipe.is_some() && self.readable && (self.credit > 0 || finished)
    }

    fn pump(&mut self, id: u32, channel: &mut Channel, finished: bool) {
        let Some(pipe) = self.pipe.as_ref().filter(|_| self.can_move(finished)) else { return };
        if self.credit == 0 {
            // The end of a stream needs no credit, and the host need not give any for it.
            match ioctl_fionread(pipe) {
                Ok(1..) => self.readable = false,
                _ => self.pipe = None,
            }
            return;
        }
        match channel.relay(id, self.stream, pipe, self.credit as usize) {
            Ok(count @ 1..) => {
                self.credit = self.credit.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if !finished => self.readable = false,
            // Its end, or empty with nobody left who could be meant to write.
            _ => self.pipe = None,
        }
    }
}

fn stage_of(byte: u8) -> Stage {
    match byte {
        1 => Stage::Spawn,
        3 => Stage::Chdir,
        4 => Stage::Exec,
        _ => Stage::Confine,
    }
}
