//! PID 1 of the workload's pid namespace: takes in orphans and waits for them.
//!
//! What it guarantees: no zombie stays; it outlives every exec, so that they
//! all share one pid namespace; it has no capability, no file and no handler
//! that the workload could use, and the kernel drops signals from inside its
//! namespace. If it dies, the kernel kills the namespace and PID 1 of the
//! machine stops everything.

use crate::confine;
use crate::last::{Doing, Failure};
use crate::view::{self, ROOT};
use hotcell_sys::guest::{
    Child, ForkPlan, Namespaces, adopt_stdio, close_from, exit_now, fork, reap_automatically,
};
use rustix::event::pause;
use rustix::io::{read, write};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, mount_move, unmount};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{chdir, chroot};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space, set_name};
use std::convert::Infallible;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The running reaper, and the namespaces that it holds.
#[derive(Debug)]
pub(crate) struct Reaper {
    pub(crate) process: Child,
    /// The mount namespace that every exec enters.
    pub(crate) view: File,
}

/// Starts the reaper and makes every later child of this process one of its pid namespace.
pub(crate) fn start(null: BorrowedFd<'_>) -> Result<Reaper, Failure> {
    let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC).doing(|| "make a pipe".into())?;
    let plan = ForkPlan { cgroup: None, namespaces: Namespaces::PidAndMount };
    let process = fork(plan, || run(null, &theirs)).doing(|| "start the reaper".into())?;
    drop(theirs);
    // One byte: the view stands. Anything else is what failed.
    let mut answer = [0; 512];
    let count = read(&ours, &mut answer).doing(|| "hear from the reaper".into())?;
    match answer.get(..count).unwrap_or_default() {
        [READY] => {}
        [] => return Err(Failure::new("the reaper died while it built the workload's view")),
        text => return Err(Failure::new(String::from_utf8_lossy(text))),
    }
    let pid = process.pid.as_raw_nonzero();
    let namespace = |name| {
        let path = format!("/proc/{pid}/ns/{name}");
        File::open(&path).doing(|| format!("open {path}"))
    };
    let view = namespace("mnt")?;
    move_into_link_name_space(namespace("pid")?.as_fd(), Some(LinkNameSpaceType::ProcessID))
        .doing(|| "enter the workload's pid namespace".into())?;
    Ok(Reaper { process, view })
}

const READY: u8 = 0;

fn run(null: BorrowedFd<'_>, answer: &OwnedFd) -> Infallible {
    let told = match become_reaper(null, answer.as_fd()) {
        Ok(()) => confine::tell(&[READY]),
        Err(failure) => {
            let _ = write(answer, failure.to_string().as_bytes());
            false
        }
    };
    if !told {
        exit_now(1);
    }
    let _ = close_from(confine::STATUS_NUMBER);
    // From here the kernel itself lets every orphan go the moment it dies.
    reap_automatically();
    loop {
        pause();
    }
}

fn become_reaper(null: BorrowedFd<'_>, answer: BorrowedFd<'_>) -> Result<(), Failure> {
    set_name(c"hotcell-reaper").doing(|| "name the reaper".into())?;
    enter_view()?;
    confine::drop_capabilities().doing(|| "drop the reaper's capabilities".into())?;
    adopt_stdio(&[null, null, null, answer]).doing(|| "replace the reaper's files".into())?;
    close_from(confine::STATUS_NUMBER + 1).doing(|| "close the reaper's files".into())
}

/// Makes [`ROOT`] the root of this mount namespace and lets go of the rest.
fn enter_view() -> Result<(), Failure> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .doing(|| "make mounts private".into())?;
    view::complete()?;
    for own in crate::boot::OWN_MOUNTS {
        unmount(own, UnmountFlags::DETACH).doing(|| format!("unmount {own} from the workload's view"))?;
    }
    // The initramfs cannot be pivoted away from; moving over it is what every switch_root does.
    chdir(ROOT)
        .and_then(|()| mount_move(".", "/"))
        .and_then(|()| chroot("."))
        .and_then(|()| chdir("/"))
        .doing(|| "switch to the root image".into())
}
