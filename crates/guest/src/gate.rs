//! The gate: a process of PID 1's that the kernel asks before a file is executed.
//!
//! ```text
//! execve --> kernel holds it --> gate: which file system? digest? on the list? --> yes | EPERM
//!                                  |                                  ^
//!                                  +-- decisions worth telling --> PID 1 <-- list -- host
//! ```
//! A process of its own: PID 1 starts the programs that the gate is asked
//! about, and hashing a large file must not hold up the channel.
//!
//! What it guarantees, once the host has said `ExecEnforce`: no instruction of
//! a file runs by `execve` unless the file is on the root image and its digest
//! is on the list, or it is on `/workspace` and the host allows that; and unless
//! the process belongs to an exec whose token the host has redeemed (`permits`). The root
//! image cannot change, so an answer about one of its inodes is kept. What is
//! elsewhere is never judged by content: it could change after the answer.
//! If the gate dies PID 1 ends the machine; until then the kernel waits for an
//! answer that does not come, since PID 1 has the group open too.
//! What it does not: see what an approved program maps or interprets
//! (`docs/exec-enforcement.md`).

use crate::approved::{self, Approved, List};
use crate::last::{Doing, Failure, console};
use crate::permits::{self, Denial, Permit, Permits, Table, needs_another};
use crate::view::{ROOT, WORKSPACE};
use crate::warm::{Candidate, candidates};
use crate::{cgroup, confine};
use hotcell_sys::guest::{Child, ExecEvent, ExecEvents, ForkPlan, Namespaces, SharedWords, exit_now, fork};
use hotcell_wire::{
    ExecDecision, ExecRule, FrameReader, GuestFrame, HEADER_LEN, MAX_EXEC_ALLOW, MAX_RESOURCE,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use rustix::thread::set_name;
use rustix::time::Timespec;
use std::collections::HashMap;
use std::convert::Infallible;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Everything that the workload could put a file on. Those that are mounted
/// `noexec` are marked too: the mount flag and the gate each hold alone.
const WATCHED: [&str; 6] = [ROOT, WORKSPACE, "/root/tmp", "/root/run", "/root/dev/shm", "/root/dev"];
/// Answers kept; far more than an image has programs.
const KEPT_ANSWERS: usize = 64 * 1024;
/// Bytes read of a file at once.
const READ: usize = 128 * 1024;
/// Longest message to PID 1.
const REPORT: usize = HEADER_LEN + 44 + MAX_RESOURCE;

/// The only message from PID 1: read ahead until there is something to do.
const WARM: u8 = 1;

/// PID 1's end.
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) process: Child,
    control: OwnedFd,
    /// Keeps the group in force when the gate dies: waiting, not allowing.
    group: ExecEvents,
    /// Digests sent so far; `None`: the list is complete, or there is none.
    listed: Option<usize>,
    approved: Approved,
    permits: Table,
    pub(crate) readable: bool,
}

impl Gate {
    /// Starts the process, and marks the workload's file systems. It lets everything pass until [`Gate::enforce`].
    pub(crate) fn start() -> Result<Gate, Failure> {
        let events = ExecEvents::new().doing(|| "be asked about executions".into())?;
        for path in WATCHED {
            let name = CString::new(path).doing(|| format!("watch {path}"))?;
            events.watch_file_system(&name).doing(|| format!("be asked about executions on {path}"))?;
        }
        let device = |path| fs::metadata(path).map(|there| there.dev()).doing(|| format!("look at {path}"));
        let (root, workspace) = (device(ROOT)?, device(WORKSPACE)?);
        let (control, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .doing(|| "make a socket pair".into())?;
        let shared = SharedWords::new(approved::WORDS + permits::WORDS)
            .doing(|| "share memory with the gate".into())?;
        let (list, table) = shared.words().split_at(approved::WORDS);
        let (Some(approved), Some(permits)) = (Approved::new(list), Table::new(table)) else {
            return Err(Failure::new("the gate's memory has another size"));
        };
        let plan = ForkPlan { cgroup: None, namespaces: Namespaces::Inherit };
        let process = fork(plan, || {
            let judge = Judge::new(root, workspace, approved, permits);
            let ended = run(&events, &theirs, judge);
            console(&format!("the gate ends: {ended}"));
            exit_now(1)
        })
        .doing(|| "start the gate".into())?;
        // Processes of the workload are forked from now on.
        shared.keep_from_children().doing(|| "keep the permits from the workload".into())?;
        Ok(Gate { process, control, group: events, listed: Some(0), approved, permits, readable: false })
    }

    pub(crate) fn control(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// Adds digests to the list.
    pub(crate) fn allow(&mut self, digests: &[[u8; 32]]) -> Result<(), Failure> {
        let listed =
            self.listed.as_mut().ok_or_else(|| Failure::new("the list of executables is complete"))?;
        if !self.approved.add(*listed, digests) {
            return Err(Failure::new(format!("more than {MAX_EXEC_ALLOW} files may be executed")));
        }
        *listed += digests.len();
        Ok(())
    }

    /// An exec begins. Where the host has completed no list by now there is none, and executions cost nothing.
    pub(crate) fn begin(&mut self) -> Result<(), Failure> {
        if self.listed.take().is_some() {
            self.group.forget_file_systems().doing(|| "ask about no execution".into())?;
        }
        Ok(())
    }

    /// Completes the list, before the first exec: it holds from now on.
    pub(crate) fn enforce(&mut self, workspace: bool) -> Result<(), Failure> {
        let listed = self.listed.take().ok_or_else(|| {
            Failure::new("the host completed the list of executables twice, or after an exec began")
        })?;
        self.approved.complete(listed, workspace);
        Ok(())
    }

    /// What the host's token for this exec allows; before its first process has its order.
    pub(crate) fn permit(&self, exec: u32, permit: Permit) -> Result<(), Failure> {
        let granted = self.permits.grant(exec, permit);
        granted.then_some(()).ok_or_else(|| Failure::new("more execs than there may be have processes"))
    }

    /// The exec's first process has ended: nothing of its tree executes any more.
    pub(crate) fn end(&self, exec: u32) {
        self.permits.end(exec);
    }

    /// The exec has no process any more.
    pub(crate) fn gone(&self, exec: u32) {
        self.permits.gone(exec);
    }

    /// Lets it read ahead until it has something to do.
    pub(crate) fn warm(&self) -> Result<(), Failure> {
        send(&self.control, &[WARM], SendFlags::NOSIGNAL).doing(|| "tell the gate".into())?;
        Ok(())
    }

    /// Takes one report and hands it to `forward`; whether there may be more.
    pub(crate) fn report(&mut self, forward: impl FnOnce(&GuestFrame<'_>)) -> bool {
        let mut message = [0; REPORT];
        match recv(&self.control, &mut message, RecvFlags::DONTWAIT) {
            Ok((_, length @ 1..)) => {
                let mut reader = FrameReader::new();
                reader.push(message.get(..length).unwrap_or_default());
                if let Ok(Some((header, payload))) = reader.next()
                    && let Ok(frame) = GuestFrame::parse(header, payload)
                {
                    forward(&frame);
                }
                true
            }
            Err(Errno::INTR) => true,
            // A gate that has ended is noticed by its death.
            _ => {
                self.readable = false;
                false
            }
        }
    }
}

/// What the gate knows.
struct Judge {
    root: u64,
    workspace: u64,
    approved: Approved,
    permits: Permits,
    /// Answers about inodes of the root image.
    kept: HashMap<u64, Answer>,
    /// Files of the root image that were read ahead, by inode.
    known: HashMap<u64, Known>,
    /// What is still to be read ahead.
    ahead: Vec<Candidate>,
    buffer: Vec<u8>,
    untold: u32,
}

/// What a file holds.
#[derive(Clone, Copy)]
struct Known {
    digest: [u8; 32],
    /// The kernel asks for another file before it runs this one.
    follows: bool,
}

#[derive(Clone, Copy)]
struct Answer {
    allow: bool,
    /// What to tell; `None`: nothing, as for every approved file.
    rule: Option<ExecRule>,
    digest: [u8; 32],
    /// The kernel asks for another file before it runs this one.
    follows: bool,
}

impl Judge {
    fn new(root: u64, workspace: u64, approved: Approved, permits: Table) -> Judge {
        Judge {
            root,
            workspace,
            approved,
            permits: Permits::new(permits),
            kept: HashMap::new(),
            known: HashMap::new(),
            ahead: Vec::new(),
            buffer: vec![0; READ],
            untold: 0,
        }
    }

    fn learn(&mut self, message: &[u8]) {
        if message == [WARM] {
            self.ahead = candidates(Path::new(ROOT), self.root);
        }
    }

    fn judge(&mut self, event: &ExecEvent<'_>, exec: u32) -> Answer {
        let Some(list) = self.approved.list() else {
            return Answer { allow: true, rule: None, digest: [0; 32], follows: false };
        };
        let answer = self.judge_file(event, list);
        if !answer.allow {
            self.permits.refused(exec);
            return answer;
        }
        match self.permits.ask(exec, event.pid(), &answer.digest, answer.follows) {
            Ok(()) => answer,
            Err(denial) => {
                let rule = match denial {
                    Denial::NoToken => ExecRule::NoToken,
                    Denial::BinaryMismatch => ExecRule::BinaryMismatch,
                    Denial::DeadParent => ExecRule::DeadParent,
                };
                Answer { allow: false, rule: Some(rule), ..answer }
            }
        }
    }

    fn judge_file(&mut self, event: &ExecEvent<'_>, list: List) -> Answer {
        let refuse = |rule, digest| Answer { allow: false, rule: Some(rule), digest, follows: false };
        let Ok(there) = event.file().metadata() else { return refuse(ExecRule::Unreadable, [0; 32]) };
        if there.dev() == self.root {
            if let Some(&answer) = self.kept.get(&there.ino()) {
                return answer;
            }
            let known = self.known.get(&there.ino()).copied();
            let answer = match known.or_else(|| self.read(event.file())) {
                Some(Known { digest, follows }) if list.contains(&digest) => {
                    Answer { allow: true, rule: None, digest, follows }
                }
                Some(Known { digest, .. }) => refuse(ExecRule::Unknown, digest),
                None => return refuse(ExecRule::Unreadable, [0; 32]),
            };
            if self.kept.len() >= KEPT_ANSWERS {
                self.kept.clear();
            }
            self.kept.insert(there.ino(), answer);
            answer
        } else if there.dev() == self.workspace && list.workspace {
            match self.read(event.file()) {
                Some(Known { digest, follows }) => {
                    Answer { allow: true, rule: Some(ExecRule::Workspace), digest, follows }
                }
                None => refuse(ExecRule::Unreadable, [0; 32]),
            }
        } else {
            refuse(ExecRule::Elsewhere, [0; 32])
        }
    }

    /// Reads the next file ahead.
    fn read_ahead(&mut self) {
        let Some(candidate) = self.ahead.pop() else { return };
        let Some(file) = candidate.open() else { return };
        let Ok(there) = file.metadata() else { return };
        // The root image can't change, so what an inode of it holds is known for good.
        if there.dev() == self.root
            && let Some(known) = self.read(&file)
            && candidate.program
        {
            self.known.insert(there.ino(), known);
        }
    }

    fn read(&mut self, mut file: &File) -> Option<Known> {
        let mut hasher = blake3::Hasher::new();
        loop {
            match file.read(&mut self.buffer) {
                Ok(0) => {
                    let digest = *hasher.finalize().as_bytes();
                    return Some(Known { digest, follows: needs_another(file) });
                }
                Ok(count) => hasher.update(self.buffer.get(..count)?),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => return None,
            };
        }
    }

    /// Tells PID 1, if it takes it: the workload waits for nobody's bookkeeping.
    fn tell(
        &mut self,
        control: &OwnedFd,
        exec: u32,
        rule: ExecRule,
        event: &ExecEvent<'_>,
        digest: [u8; 32],
    ) {
        let path = fs::read_link(format!("/proc/self/fd/{}", event.file().as_raw_fd())).unwrap_or_default();
        let path = path.as_os_str().as_bytes();
        let path = path.get(..MAX_RESOURCE).unwrap_or(path);
        let decision = ExecDecision { exec, rule, untold: self.untold, digest, path };
        let mut message = Vec::new();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let told = GuestFrame::ExecDecision(decision).encode(&mut message, exec, 0)
            && send(control, &message, flags).is_ok();
        self.untold = if told { 0 } else { self.untold.saturating_add(1) };
    }
}

/// The gate's loop; comes back only with what failed.
fn run(events: &ExecEvents, control: &OwnedFd, mut judge: Judge) -> Failure {
    match serve(events, control, &mut judge) {
        Ok(never) => match never {},
        Err(failure) => failure,
    }
}

fn serve(events: &ExecEvents, control: &OwnedFd, judge: &mut Judge) -> Result<Infallible, Failure> {
    set_name(c"hotcell-gate").doing(|| "name the gate".into())?;
    // Events name files by descriptor, so that no capability is needed to read them.
    confine::drop_capabilities().doing(|| "drop the gate's capabilities".into())?;
    loop {
        let mut ready = [PollFd::new(events, PollFlags::IN), PollFd::new(control, PollFlags::IN)];
        let idle = !judge.ahead.is_empty();
        match poll(&mut ready, idle.then_some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(0) => judge.read_ahead(),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).doing(|| "wait for executions".into()),
        }
        // One for each round: looking whether there is a second one costs as much as asking again.
        let event = events.next().doing(|| "read an execution".into())?;
        let [_, heard] = &ready;
        if !heard.revents().is_empty() {
            listen(control, judge)?;
        }
        let Some(event) = event else { continue };
        // While one exec alone has processes, whoever asks is of its tree.
        let exec = judge.permits.only().unwrap_or_else(|| cgroup::exec_of(event.pid()));
        let answer = judge.judge(&event, exec);
        if let Some(rule) = answer.rule {
            judge.tell(control, exec, rule, &event, answer.digest);
        }
        // A process that was killed while it waited needs no answer.
        let _ = event.answer(answer.allow);
    }
}

fn listen(control: &OwnedFd, judge: &mut Judge) -> Result<(), Failure> {
    let mut message = [0; 1];
    match recv(control, &mut message, RecvFlags::DONTWAIT) {
        Ok((_, 0)) => Err(Failure::new("PID 1 has closed the gate's socket")),
        Ok((_, length)) => {
            judge.learn(message.get(..length).unwrap_or_default());
            Ok(())
        }
        Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(error) => Err(error).doing(|| "hear PID 1".into()),
    }
}
