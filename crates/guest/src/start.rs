//! Starting an exec: from its checked texts to a running child and our ends of its pipes.
//!
//! What it guarantees: a child that exists is in its cgroup; one that could not
//! be made leaves nothing behind; the program is looked up as a shell would,
//! in the PATH of its own environment.

use crate::cgroup::ExecCgroup;
use crate::confine::{self, Plan, Task};
use hotcell_sys::guest::{Child, ExecImage, Filter, ForkPlan, Namespaces, fork};
use hotcell_wire::{ExecText, Program, Stage};
use rustix::fs::{OFlags, fchown, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::thread::{Gid, Uid};
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// PATH where the environment has none.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Working directory where the host names none.
const DEFAULT_CWD: &[u8] = b"/workspace";
/// A pipe of one stream window: a writer is not woken for every page.
const PIPE_BYTES: usize = hotcell_wire::STREAM_WINDOW as usize;

/// What every exec of this machine starts from.
#[derive(Debug)]
pub(crate) struct Ground {
    /// `/dev/null`.
    pub(crate) null: OwnedFd,
    /// The workload's mount namespace.
    pub(crate) view: OwnedFd,
    /// The seccomp filter.
    pub(crate) filter: Filter,
}

/// What the host asked for.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) program: Program,
    pub(crate) stdin: bool,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) text: ExecText,
}

/// A child under way, and our ends of its pipes (all non-blocking).
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) child: Child,
    pub(crate) cgroup: ExecCgroup,
    pub(crate) status: OwnedFd,
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

/// Starts it.
pub(crate) fn start(ground: &Ground, exec: u32, order: Order) -> Result<Started, (Stage, Errno)> {
    let (uid, gid) = (order.uid, order.gid);
    // All ones means "leave as it is" to the kernel, which is root too.
    let is_root = |id: u32| id == 0 || id == u32::MAX;
    let allowed = match order.program {
        Program::Service => uid == 0 && gid == 0,
        Program::Argv | Program::Unpack | Program::Pack => !is_root(uid) && !is_root(gid),
    };
    if !allowed {
        return Err((Stage::Confine, Errno::PERM));
    }
    spawn(ground, exec, order, Uid::from_raw(uid), Gid::from_raw(gid)).map_err(|errno| (Stage::Spawn, errno))
}

fn spawn(ground: &Ground, exec: u32, order: Order, uid: Uid, gid: Gid) -> Result<Started, Errno> {
    let cwd = CString::new(order.text.cwd.as_deref().unwrap_or(DEFAULT_CWD)).map_err(|_| Errno::INVAL)?;
    let task = task(order.program, order.text)?;
    let cgroup =
        ExecCgroup::create(exec).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let (status, child_status) = pipe_with(PipeFlags::CLOEXEC)?;
    nonblocking(&status)?;
    let (child_stdin, stdin) = match order.stdin {
        true => {
            let (theirs, ours) = match order.program {
                Program::Unpack => socket()?,
                _ => pipe(uid, gid)?,
            };
            nonblocking(&ours)?;
            (Some(theirs), Some(ours))
        }
        false => (None, None),
    };
    let (stdout, child_stdout) = pipe(uid, gid)?;
    let (stderr, child_stderr) = pipe(uid, gid)?;
    nonblocking(&stdout)?;
    nonblocking(&stderr)?;
    let plan = Plan {
        stdin: child_stdin.as_ref().unwrap_or(&ground.null).as_fd(),
        stdout: child_stdout.as_fd(),
        stderr: child_stderr.as_fd(),
        status: child_status.as_fd(),
        view: ground.view.as_fd(),
        filter: &ground.filter,
        uid,
        gid,
        cwd,
        task,
    };
    let born_in = ForkPlan { cgroup: Some(cgroup.directory()), namespaces: Namespaces::Inherit };
    let child = fork(born_in, || confine::enter(&plan))
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(Started { child, cgroup, status, stdin, stdout, stderr })
}

fn task(program: Program, text: ExecText) -> Result<Task, Errno> {
    let strings = |list: Vec<Vec<u8>>| {
        list.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>().map_err(|_| Errno::INVAL)
    };
    Ok(match program {
        Program::Argv | Program::Service => {
            let name = text.argv.first().map(Vec::as_slice).unwrap_or_default();
            let candidates = strings(candidates(name, &text.env))?;
            Task::Program(ExecImage::new(candidates, strings(text.argv)?, strings(text.env)?))
        }
        Program::Unpack => Task::Unpack,
        Program::Pack => Task::Pack(text.argv.into_iter().skip(1).collect()),
    })
}

/// Where `name` may be: itself if it has a slash, else one per directory of PATH.
fn candidates(name: &[u8], env: &[Vec<u8>]) -> Vec<Vec<u8>> {
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

/// A pipe that the workload's user may also open again by name: /dev/stdout and
/// its like lead to the pipe's inode, and without this root would own it.
fn pipe(uid: Uid, gid: Gid) -> Result<(OwnedFd, OwnedFd), Errno> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    fchown(&write, Some(uid), Some(gid))?;
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

impl Ground {
    /// The mount namespace of the workload.
    pub(crate) fn view(&self) -> BorrowedFd<'_> {
        self.view.as_fd()
    }
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
