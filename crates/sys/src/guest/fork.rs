//! Making a process with `clone3`, born inside a cgroup.
//!
//! What it guarantees: the child is in its cgroup before it runs one
//! instruction (no window in which it could fork outside of it), starts with
//! default signal handlers, and never returns into the caller's code.
//! What it does not: protect against locks that another thread holds. The
//! child of a process with several threads may hang in the allocator.
//! Who may call: the guest's processes, which have one thread each.

use rustix::process::Pid;
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Namespaces that the child gets new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespaces {
    /// None: those that the parent gives to its children.
    Inherit,
    /// A pid namespace, as its PID 1, and a mount namespace.
    PidAndMount,
}

/// How to fork.
#[derive(Clone, Copy, Debug)]
pub struct ForkPlan<'a> {
    /// The cgroup directory that the child is born in; `None`: the parent's.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// Namespaces.
    pub namespaces: Namespaces,
}

/// A child.
#[derive(Debug)]
pub struct Child {
    /// Its pid in the caller's pid namespace. Signals go through `pidfd`.
    pub pid: Pid,
    /// Refers to this very process for ever; close-on-exec; readable once it is dead.
    pub pidfd: OwnedFd,
}

/// Forks; the child runs `child` and nothing after it.
///
/// # Errors
/// The kernel's: out of processes, memory, or a cgroup that is going away.
pub fn fork<F: FnOnce() -> Infallible>(plan: ForkPlan<'_>, child: F) -> io::Result<Child> {
    let mut pidfd: libc::c_int = -1;
    let mut flags = (libc::CLONE_PIDFD as u64) | CLONE_CLEAR_SIGHAND;
    if plan.namespaces == Namespaces::PidAndMount {
        flags |= (libc::CLONE_NEWPID | libc::CLONE_NEWNS) as u64;
    }
    let mut cgroup = 0;
    if let Some(fd) = plan.cgroup {
        flags |= CLONE_INTO_CGROUP;
        cgroup = fd.as_raw_fd() as u64;
    }
    let args = CloneArgs {
        flags,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        cgroup,
        ..CloneArgs::default()
    };
    // SAFETY: `args` is the kernel's `struct clone_args` (its size is passed) and lives through the
    // call, as does `pidfd`, the only memory that the kernel writes to. Without CLONE_VM the child
    // has its own copy of the address space, so nothing that it does is seen by this process, and
    // with `stack` 0 it goes on on its copy of this stack.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
    match result {
        #[expect(unreachable_code, reason = "that the child never comes back is the point")]
        0 => match child() {},
        1.. => {
            let pid = Pid::from_raw(result as i32).ok_or_else(|| io::Error::from(io::ErrorKind::Other))?;
            // SAFETY: with CLONE_PIDFD the kernel stored a new descriptor there that nobody else owns.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Child { pid, pidfd })
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends signal `number` to the process.
///
/// # Errors
/// The kernel's; `ESRCH` once it has been waited for.
pub fn signal(pidfd: BorrowedFd<'_>, number: u8) -> io::Result<()> {
    // SAFETY: takes three numbers and a null pointer, which means "as kill(2) would"; touches no memory.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            libc::c_int::from(number),
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Ends this process without running destructors or exit handlers, which
/// belong to the parent whose memory was copied.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: `_exit` has no preconditions and does not return.
    unsafe { libc::_exit(code) }
}

/// `linux/sched.h`; libc's constants of these two are narrower than the field.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `struct clone_args` of `linux/sched.h`, version 2 (88 bytes).
#[derive(Default)]
#[repr(C, align(8))]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const _: () = assert!(size_of::<CloneArgs>() == 88);

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    use std::os::fd::AsFd;

    #[test]
    fn a_child_runs_apart_and_its_status_comes_back() {
        let mut seen = 1;
        let child = fork(ForkPlan { cgroup: None, namespaces: Namespaces::Inherit }, || {
            seen += 41;
            exit_now(seen)
        })
        .unwrap();
        let status = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(42));
        assert_eq!(seen, 1);
    }

    #[test]
    fn a_descriptor_that_is_no_cgroup_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let plan = ForkPlan { cgroup: Some(file.as_fd()), namespaces: Namespaces::Inherit };
        assert!(fork(plan, || exit_now(0)).is_err());
    }
}
