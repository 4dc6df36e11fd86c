//! Naming a process so that its number can't be mistaken.
//!
//! A pid is reused; a pid with its start time and the boot it belongs to is not.

use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// A process, for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessId {
    /// The number.
    pub pid: i32,
    /// Start time in clock ticks since boot (field 22 of `/proc/PID/stat`, proc(5)).
    pub start_ticks: u64,
    /// The boot that `start_ticks` counts from.
    pub boot_id: String,
}

impl ProcessId {
    /// The live process with this number; `None` where there is none.
    pub fn of(pid: i32) -> Option<ProcessId> {
        Some(ProcessId { pid, start_ticks: start_ticks(pid)?, boot_id: boot_id()? })
    }

    /// Whether this very process has ended and only its parent has not asked yet.
    pub fn is_zombie(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        let state = stat.rfind(')').and_then(|end| stat.get(end + 1..)?.split_ascii_whitespace().next());
        state == Some("Z") && self.exists()
    }

    /// Whether this very process still exists (a zombie does).
    pub fn exists(&self) -> bool {
        boot_id().as_deref() == Some(&self.boot_id) && start_ticks(self.pid) == Some(self.start_ticks)
    }
}

/// The text of a file of `/proc`, in a buffer that is used again and again. A file there is made anew for each
/// call that reads, and many small calls cost more than it does.
pub(crate) fn proc_text<'a>(path: &Path, buffer: &'a mut Vec<u8>) -> io::Result<&'a str> {
    /// As much as a mapping's list gives at once.
    const CHUNK: usize = 16 * 1024;
    let mut file = File::open(path)?;
    let mut length = 0;
    loop {
        buffer.resize(buffer.len().max(length + CHUNK), 0);
        match file.read(buffer.get_mut(length..).unwrap_or_default()) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let text = buffer.get(..length).unwrap_or_default();
    std::str::from_utf8(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// This boot's id.
pub fn boot_id() -> Option<String> {
    Some(fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned())
}

fn start_ticks(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name is in parentheses and may contain anything, also parentheses.
    let after_name = stat.get(stat.rfind(')')? + 1..)?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_more_than_its_number() {
        let me = ProcessId::of(std::process::id() as i32).unwrap();
        assert!(me.exists());
        assert!(!ProcessId { start_ticks: me.start_ticks + 1, ..me.clone() }.exists());
        assert!(!me.is_zombie());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = ProcessId::of(child.id() as i32).unwrap();
        while !ended.is_zombie() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!ended.is_zombie() && !ended.exists());
        assert!(!ProcessId { boot_id: "another".into(), ..me }.exists());
        assert_eq!(ProcessId::of(i32::MAX), None);
    }
}
