//! Starting an exec: a process that was forked ahead gets its order.
//!
//! ```text
//! fork ─▶ confined, with user and filter ─▶ waits ─order─▶ working directory ─▶ program
//!                                              └─ no order: ends
//! ```
//! What it guarantees: a child that exists was born in its exec's cgroup; one that could not
//! be made leaves nothing behind; the program is looked up as a shell would,
//! in the PATH of its own environment.

use crate::cgroup::ExecCgroup;
use crate::confine::{self, Plan, errno_of};
use crate::poll::{Poll, Source};
use hotcell_sys::guest::{Child, Filter, ForkPlan, Namespaces, fork, signal};
use hotcell_wire::{ExecText, MAX_EXEC_TEXT, Program, Stage};
use rustix::fs::{OFlags, fchown, fcntl_setfl};
use rustix::io::{Errno, write};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus, waitid};
use rustix::thread::{Gid, Uid};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// PATH where the environment has none.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// A pipe of one stream window: a writer is not woken for every page.
const PIPE_BYTES: usize = hotcell_wire::STREAM_WINDOW as usize;
/// Bytes of an order before its texts: program, stdin.
const ORDER_HEAD: usize = 2;
/// What a pipe takes as it is made (pipe(7)).
const SMALL_PIPE: usize = 64 * 1024;
/// A pipe that takes the largest order at once, so that PID 1 never waits for a child to read.
const ORDER_PIPE: usize = (ORDER_HEAD + MAX_EXEC_TEXT).next_power_of_two();

/// User and group.
pub(crate) type User = (u32, u32);

/// What the host asked for.
#[derive(Debug)]
pub(crate) struct Order<Text = ExecText> {
    pub(crate) program: Program,
    pub(crate) stdin: bool,
    pub(crate) text: Text,
}

/// A child under way, and our ends of its pipes (all non-blocking). What they have to say is watched for.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) child: Child,
    pub(crate) cgroup: ExecCgroup,
    pub(crate) status: OwnedFd,
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

/// A child that waits for its order.
#[derive(Debug)]
struct Waiting {
    exec: u32,
    user: User,
    child: Child,
    cgroup: ExecCgroup,
    order: OwnedFd,
    status: OwnedFd,
    stdin: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
}

/// Starts execs.
#[derive(Debug)]
pub(crate) struct Starter {
    /// The workload's mount namespace.
    view: OwnedFd,
    /// The seccomp filter.
    filter: Filter,
    /// Whose process is forked ahead.
    usual: User,
    waiting: Option<Waiting>,
    /// The highest number of an exec that was started.
    last: u32,
}

impl Starter {
    pub(crate) fn new(view: OwnedFd, filter: Filter, usual: User) -> Starter {
        Starter { view, filter, usual, waiting: None, last: 0 }
    }

    pub(crate) fn view(&self) -> BorrowedFd<'_> {
        self.view.as_fd()
    }

    /// Forks the process of the exec that the host will ask for next. Where that fails, the exec's start says why.
    pub(crate) fn make_ahead(&mut self, poll: &Poll) {
        if self.waiting.is_none() {
            self.waiting = self.fork(self.last.saturating_add(1), self.usual, false, poll).ok();
        }
    }

    /// Starts an exec.
    pub(crate) fn start(
        &mut self,
        exec: u32,
        user: User,
        order: &Order<Vec<u8>>,
        poll: &Poll,
    ) -> Result<Started, (Stage, Errno)> {
        // All ones means "leave as it is" to the kernel, which is root too.
        let is_root = |id: u32| id == 0 || id == u32::MAX;
        let (uid, gid) = user;
        let allowed = match order.program {
            Program::Service => uid == 0 && gid == 0,
            Program::Argv | Program::Unpack | Program::Pack => !is_root(uid) && !is_root(gid),
        };
        if !allowed {
            return Err((Stage::Confine, Errno::PERM));
        }
        self.last = self.last.max(exec);
        let unpacker = order.program == Program::Unpack;
        let waiting = match self.waiting.take() {
            Some(waiting) if (waiting.exec, waiting.user) == (exec, user) && !unpacker && waiting.lives() => {
                waiting
            }
            other => {
                if let Some(other) = other {
                    other.discard();
                }
                self.fork(exec, user, unpacker, poll).map_err(|errno| (Stage::Spawn, errno))?
            }
        };
        waiting.give(order).map_err(|errno| (Stage::Spawn, errno))
    }

    /// `unpacker`: our own, which reads from a socket. What is watched is so until it is closed.
    fn fork(&self, exec: u32, user: User, unpacker: bool, poll: &Poll) -> Result<Waiting, Errno> {
        let cgroup = ExecCgroup::create(exec).map_err(|error| errno_of(&error))?;
        let (status, child_status) = pipe_with(PipeFlags::CLOEXEC)?;
        nonblocking(&status)?;
        let (child_order, order) = pipe_with(PipeFlags::CLOEXEC)?;
        let (child_stdin, stdin) = if unpacker { socket()? } else { pipe(user)? };
        let (stdout, child_stdout) = pipe(user)?;
        let (stderr, child_stderr) = pipe(user)?;
        for ours in [&stdin, &stdout, &stderr] {
            nonblocking(ours)?;
        }
        let plan = Plan {
            stdin: child_stdin.as_fd(),
            stdout: child_stdout.as_fd(),
            stderr: child_stderr.as_fd(),
            status: child_status.as_fd(),
            order: child_order.as_fd(),
            view: self.view(),
            filter: &self.filter,
            user,
        };
        let born_in = ForkPlan { cgroup: Some(cgroup.directory()), namespaces: Namespaces::Inherit };
        let child = fork(born_in, || confine::enter(&plan)).map_err(|error| errno_of(&error))?;
        let waiting = Waiting { exec, user, child, cgroup, order, status, stdin, stdout, stderr };
        match waiting.watch(poll) {
            Ok(()) => Ok(waiting),
            Err(errno) => {
                waiting.discard();
                Err(errno)
            }
        }
    }
}

impl Waiting {
    fn watch(&self, poll: &Poll) -> Result<(), Errno> {
        poll.watch(&self.child.pidfd, Source::Death(self.exec))?;
        poll.watch(self.cgroup.events_fd(), Source::Cgroup(self.exec))?;
        poll.watch(&self.status, Source::Status(self.exec))?;
        poll.watch(&self.stdin, Source::Stdin(self.exec))?;
        poll.watch(&self.stdout, Source::Stdout(self.exec))?;
        poll.watch(&self.stderr, Source::Stderr(self.exec))
    }

    fn lives(&self) -> bool {
        let changes =
            WaitIdOptions::EXITED | WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::PidFd(self.child.pidfd.as_fd()), changes) {
            Ok(None) => true,
            // Whoever may signal it, a root service of the image, may have stopped it.
            Ok(Some(change)) if WaitIdStatus::stopped(&change) => {
                signal(self.child.pidfd.as_fd(), libc::SIGCONT as u8).is_ok()
            }
            _ => false,
        }
    }

    /// Ends it. Its cgroup goes with it.
    fn discard(self) {
        let _ = signal(self.child.pidfd.as_fd(), libc::SIGKILL as u8);
        let _ = waitid(WaitId::PidFd(self.child.pidfd.as_fd()), WaitIdOptions::EXITED);
    }

    fn give(self, order: &Order<Vec<u8>>) -> Result<Started, Errno> {
        let Waiting { child, cgroup, order: pipe, status, stdin, stdout, stderr, .. } = self;
        let bytes = order.encode();
        if bytes.len() > SMALL_PIPE {
            fcntl_setpipe_size(&pipe, ORDER_PIPE)?;
        }
        let mut left = bytes.as_slice();
        while !left.is_empty() {
            let count = write(&pipe, left)?;
            left = left.get(count..).unwrap_or_default();
        }
        // A program without stdin reads its end at once.
        Ok(Started { child, cgroup, status, stdin: order.stdin.then_some(stdin), stdout, stderr })
    }
}

impl Order<Vec<u8>> {
    fn encode(&self) -> Vec<u8> {
        let head = [self.program as u8, u8::from(self.stdin)];
        [&head[..], &self.text].concat()
    }
}

impl Order {
    /// What PID 1 wrote to the pipe.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Order> {
        let (&[program, stdin], text) = bytes.split_first_chunk::<ORDER_HEAD>()?;
        let programs = [Program::Argv, Program::Unpack, Program::Pack, Program::Service];
        Some(Order {
            program: programs.into_iter().find(|known| *known as u8 == program)?,
            stdin: stdin != 0,
            text: ExecText::decode(text).ok()?,
        })
    }
}

/// Where `name` may be: itself if it has a slash, else one per directory of PATH.
pub(crate) fn candidates(name: &[u8], env: &[Vec<u8>]) -> Vec<Vec<u8>> {
    if name.contains(&b'/') {
        return vec![name.to_vec()];
    }
    let path = env.iter().rev().find_map(|entry| entry.strip_prefix(b"PATH=")).unwrap_or(DEFAULT_PATH);
    let join = |directory: &[u8]| match directory {
        // An empty entry is the working directory, by POSIX.
        [] => name.to_vec(),
        _ => [directory, b"/", name].concat(),
    };
    path.split(|&byte| byte == b':').map(join).collect()
}

/// A pipe that the exec's user owns: who opens `/dev/stdout` anew needs that.
fn pipe((uid, gid): User) -> Result<(OwnedFd, OwnedFd), Errno> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    fchown(&write, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    fcntl_setpipe_size(&write, PIPE_BYTES)?;
    Ok((read, write))
}

/// For our own unpacker, whose stdin nobody opens by name: the kernel takes 32 KiB at a time for a socket, and each page by
/// itself for a pipe, which under TCG costs half of a copy's time.
fn socket() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

fn nonblocking(fd: &OwnedFd) -> Result<(), Errno> {
    fcntl_setfl(fd, OFlags::NONBLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_looked_up_in_their_own_path() {
        let env = |path: &str| vec![b"A=b".to_vec(), [b"PATH=", path.as_bytes()].concat()];
        assert_eq!(candidates(b"./x", &env("/bin")), [b"./x".to_vec()]);
        assert_eq!(candidates(b"x", &env("/a:/b")), [b"/a/x".to_vec(), b"/b/x".to_vec()]);
        assert_eq!(candidates(b"x", &env(":/b")), [b"x".to_vec(), b"/b/x".to_vec()]);
        assert_eq!(candidates(b"x", &[]).len(), 6);
    }
}
