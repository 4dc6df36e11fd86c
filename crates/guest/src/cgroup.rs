//! The workload's cgroups: one for all, with the limits; one per exec, to kill by.
//!
//! ```text
//! /cgroup            init, reaper
//!  +- workload       pids.max memory.max
//!      +- 1          exec 1 and everything that it ever forked, whatever
//!      +- 2          session, group or parent that moved to
//! ```
//! Controllers stop at `workload`: an exec's cgroup costs one `mkdir`, and page
//! cache that it leaves behind does not keep a dead memory cgroup alive.

use crate::last::{Doing, Failure};
use rustix::fs::{Mode, OFlags, open};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Where boot mounts the hierarchy, out of the workload's sight.
pub(crate) const MOUNT: &str = "/cgroup";
const WORKLOAD: &str = "/cgroup/workload";

/// The cgroup of all execs.
#[derive(Debug)]
pub(crate) struct Workload {
    events: Events,
}

impl Workload {
    /// Makes it, without limits yet.
    pub(crate) fn create() -> Result<Workload, Failure> {
        let control = format!("{MOUNT}/cgroup.subtree_control");
        fs::write(&control, "+cpu +memory +pids").doing(|| format!("enable controllers in {control}"))?;
        fs::create_dir(WORKLOAD).doing(|| format!("create {WORKLOAD}"))?;
        let events = Events::open(Path::new(WORKLOAD)).doing(|| "open the workload's cgroup".into())?;
        Ok(Workload { events })
    }

    /// Sets the limits.
    pub(crate) fn limit(&self, pids: u32, memory_bytes: u64) -> Result<(), Failure> {
        // One more for the process that waits for the next exec's order.
        for (file, value) in [("pids.max", u64::from(pids) + 1), ("memory.max", memory_bytes)] {
            let path = format!("{WORKLOAD}/{file}");
            fs::write(&path, value.to_string()).doing(|| format!("write {value} to {path}"))?;
        }
        Ok(())
    }

    pub(crate) fn events_fd(&self) -> BorrowedFd<'_> {
        self.events.file.as_fd()
    }

    pub(crate) fn is_empty(&mut self) -> bool {
        self.events.is_empty()
    }

    /// Kills everything of every exec.
    pub(crate) fn kill(&self) -> io::Result<()> {
        fs::write(format!("{WORKLOAD}/cgroup.kill"), "1")
    }
}

/// The cgroup of one exec.
#[derive(Debug)]
pub(crate) struct ExecCgroup {
    path: PathBuf,
    directory: OwnedFd,
    events: Events,
}

impl ExecCgroup {
    /// Makes it, empty.
    pub(crate) fn create(exec: u32) -> io::Result<ExecCgroup> {
        let path = Path::new(WORKLOAD).join(exec.to_string());
        fs::create_dir(&path)?;
        let open = || {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            io::Result::Ok((open(&path, flags, Mode::empty())?, Events::open(&path)?))
        };
        match open() {
            Ok((directory, events)) => Ok(ExecCgroup { path, directory, events }),
            Err(error) => {
                let _ = fs::remove_dir(&path);
                Err(error)
            }
        }
    }

    /// For `clone3` to be born in.
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    pub(crate) fn events_fd(&self) -> BorrowedFd<'_> {
        self.events.file.as_fd()
    }

    /// Whether no process is alive in it. Dead ones that nobody has waited for don't count.
    pub(crate) fn is_empty(&mut self) -> bool {
        self.events.is_empty()
    }

    /// The processes in it that are alive.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Kills everything in it, also what is being forked this moment.
    pub(crate) fn kill(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.kill"), "1")
    }
}

impl Drop for ExecCgroup {
    fn drop(&mut self) {
        // Empty by then. If it is not, the directory stays; `workload` is killed as a whole at the end.
        let _ = fs::remove_dir(&self.path);
    }
}

/// A `cgroup.events` file: polls as urgent when it changes.
#[derive(Debug)]
struct Events {
    file: fs::File,
}

impl Events {
    fn open(cgroup: &Path) -> io::Result<Events> {
        Ok(Events { file: fs::File::open(cgroup.join("cgroup.events"))? })
    }

    /// Reading also arms the next event.
    fn is_empty(&mut self) -> bool {
        // The file has two short lines; one call, since it is asked at the end of every exec.
        let mut text = [0; 128];
        let count = rustix::io::pread(&self.file, &mut text, 0).unwrap_or(0);
        let text = std::str::from_utf8(text.get(..count).unwrap_or_default()).unwrap_or_default();
        value(text, "populated") == Some(0)
    }
}

/// The exec in whose cgroup a process is, by `/proc/PID/cgroup`; 0: none.
pub(crate) fn exec_of(pid: i32) -> u32 {
    // Asked before every execution: one read, and none of the file's length.
    let mut text = [0; 256];
    let path = format!("/proc/{pid}/cgroup");
    let count = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .and_then(|file| rustix::io::read(&file, &mut text));
    let text = text.get(..count.unwrap_or(0)).unwrap_or_default();
    std::str::from_utf8(text).map_or(0, exec_in)
}

fn exec_in(text: &str) -> u32 {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/workload/"));
    path.and_then(|path| path.split('/').next()?.parse().ok()).unwrap_or(0)
}

/// The number after `name` in a flat keyed file.
fn value(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_files_and_paths_are_read() {
        let events = "populated 1\nfrozen 0\n";
        assert_eq!((value(events, "populated"), value(events, "frozen")), (Some(1), Some(0)));
        assert_eq!((value("unpopulated 1\n", "populated"), value("", "populated")), (None, None));
        assert_eq!(exec_in("0::/workload/17\n"), 17);
        assert_eq!(exec_in("0::/workload/17/18\n"), 17);
        assert_eq!(exec_in("0::/\n"), 0);
        assert_eq!(exec_in("1:name=x:/workload/3\n"), 0);
    }
}
