//! Children that can't outlive their owner and inherit exactly what they are given.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the child get SIGKILL as soon as the *thread* that starts it ends.
///
/// The kernel ties the signal to the parent thread, not to the process, so the
/// caller must start the child from the thread that owns it for life (Hotcell:
/// the run's driver thread). An owner that died between fork and the call is
/// noticed by the changed parent, and the child ends itself.
pub fn die_with_owner(command: &mut Command) {
    let owner = std::process::id();
    // SAFETY: the closure runs between fork and exec in the child. It calls only
    // prctl and getppid, both async-signal-safe system calls without memory
    // arguments, and builds an io::Error from a raw number, which allocates nothing.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            if libc::getppid() as u32 != owner {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// Lets the child inherit these descriptors under their own numbers. They stay
/// close-on-exec in the parent, so that no other child gets them.
pub fn inherit(command: &mut Command, descriptors: Vec<OwnedFd>) {
    // SAFETY: the closure runs between fork and exec in the child and calls only
    // fcntl on descriptors that it owns (moved in, so they are open for as long
    // as the command exists); it allocates nothing.
    unsafe {
        command.pre_exec(move || {
            for descriptor in &descriptors {
                if libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFD, 0) != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
}
