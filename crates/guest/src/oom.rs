//! Which processes the kernel killed for want of memory.
//!
//! The cgroup only counts such kills; its counter cannot tell an exec that was
//! killed from one that killed itself while another was starving. The kernel's
//! log names the process. The workload can't write to it, and the part of a
//! record that is read here comes before the process's name, which is its own.

use crate::last::{Doing, Failure};
use rustix::fs::{Mode, OFlags, SeekFrom, open, seek};
use rustix::io::{Errno, read};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

/// Victims that are remembered: more than execs can be alive.
const VICTIMS: usize = 2 * hotcell_wire::MAX_EXECS;
/// Longest record of `/dev/kmsg`, `CONSOLE_EXT_LOG_MAX`.
const RECORD: usize = 8192;

/// The kernel's log, and the victims that it named lately.
#[derive(Debug)]
pub(crate) struct OomLog {
    log: OwnedFd,
    victims: VecDeque<i32>,
}

impl OomLog {
    /// Listens from now on.
    pub(crate) fn open() -> Result<OomLog, Failure> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let log = open("/dev/kmsg", flags, Mode::empty()).doing(|| "open the kernel's log".into())?;
        seek(&log, SeekFrom::End(0)).doing(|| "go to the end of the kernel's log".into())?;
        Ok(OomLog { log, victims: VecDeque::new() })
    }

    /// Whether the kernel has named this process (by its pid as PID 1 sees it) as a victim.
    pub(crate) fn names(&mut self, pid: i32) -> bool {
        let mut record = [0; RECORD];
        loop {
            match read(&self.log, &mut record) {
                Ok(0) => break,
                Ok(length) => {
                    if let Some(victim) = victim(record.get(..length).unwrap_or_default()) {
                        self.victims.truncate(VICTIMS - 1);
                        self.victims.push_front(victim);
                    }
                }
                // EPIPE: records were overwritten before they were read; the next read goes on.
                Err(Errno::PIPE | Errno::INTR) => {}
                Err(_) => break,
            }
        }
        self.victims.contains(&pid)
    }
}

/// The process that a record says was killed: `prio,seq,time,flags;text`.
fn victim(record: &[u8]) -> Option<i32> {
    let at = record.iter().position(|&byte| byte == b';')?;
    let text = record.get(at + 1..)?;
    let rest =
        [b"Memory cgroup out of memory: Killed process ".as_slice(), b"Out of memory: Killed process "]
            .iter()
            .find_map(|prefix| text.strip_prefix(*prefix))?;
    let digits = rest.split(|byte| !byte.is_ascii_digit()).next()?;
    str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernels_own_words_count() {
        let record = |text: &str| victim(format!("3,1204,31824947,-;{text}\n").as_bytes());
        assert_eq!(
            record("Memory cgroup out of memory: Killed process 1103 (tail) total-vm:4kB"),
            Some(1103)
        );
        assert_eq!(record("Out of memory: Killed process 7 (x) total-vm"), Some(7));
        assert_eq!(record("traps: Out of memory: Killed process 7 (x)[9] general protection"), None);
        assert_eq!(record("Out of memory: Killed process  (x)"), None);
        assert_eq!(victim(b"no semicolon"), None);
    }
}
