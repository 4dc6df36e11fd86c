//! Reading another process's memory.
//!
//! Nothing is written and the process is not stopped: what is read may be torn, and may be
//! gone the next moment. The kernel decides who may read (ptrace(2), `PTRACE_MODE_ATTACH_REALCREDS`):
//! root, and the user who owns the reader and the user namespace of the process.

use std::io;

/// Most ranges of one call: the kernel's UIO_MAXIOV.
pub const MAX_RANGES: usize = 1024;

/// A range of another process's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Its first address.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: usize,
}

/// Reads the ranges one after another into `into`; gives the bytes that were read, which are fewer than asked for
/// where an address is not mapped: the rest from there on was not read.
///
/// # Errors
/// The first range can't be read at all; `ESRCH` where the process has ended.
pub fn read_process(pid: i32, ranges: &[Range], into: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    for some in ranges.chunks(MAX_RANGES) {
        let wanted: usize = some.iter().map(|range| range.bytes).sum();
        let Some(rest) = into.get_mut(done..) else { break };
        let room = rest.len();
        let local = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: room };
        let remote: Vec<libc::iovec> = some
            .iter()
            .map(|range| libc::iovec {
                iov_base: std::ptr::without_provenance_mut(range.address as usize),
                iov_len: range.bytes,
            })
            .collect();
        // SAFETY: `local` describes `rest`, which is ours to write for the whole call; the kernel writes at most its
        // length. The remote addresses are never dereferenced in this process.
        let read = unsafe { libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), remote.len() as _, 0) };
        match usize::try_from(read) {
            Ok(read) => {
                done += read;
                if read < wanted {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(done)
}

/// How long all threads of a process have been on a processor, those that have ended included, in nanoseconds. A thread that
/// is on one right now counts up to the host's last tick, at most 10 ms ago.
///
/// # Errors
/// There is no such process.
pub fn process_time(pid: i32) -> io::Result<u64> {
    /// The clock of a process by its number (`include/linux/posix-timers_types.h`): CPUCLOCK_SCHED.
    const SCHEDULED: libc::clockid_t = 2;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which is ours.
    let got = unsafe { libc::clock_gettime((!pid << 3) | SCHEDULED, &raw mut time) };
    match got {
        0 => Ok((time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(bytes: &[u8]) -> Range {
        Range { address: bytes.as_ptr() as u64, bytes: bytes.len() }
    }

    #[test]
    fn ranges_come_one_after_another_and_a_hole_ends_the_read() {
        let (one, two) = (b"first".to_vec(), b"second".to_vec());
        let pid = std::process::id() as i32;
        let mut into = [0; 16];
        assert_eq!(read_process(pid, &[own(&one), own(&two)], &mut into).unwrap(), 11);
        assert_eq!(&into[..11], b"firstsecond");
        let hole = Range { address: 8, bytes: 4 };
        assert_eq!(read_process(pid, &[own(&one), hole, own(&two)], &mut into).unwrap(), 5);
        assert_eq!(read_process(pid, &[hole], &mut into).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        // Never more than there is room for.
        assert_eq!(read_process(pid, &[own(&two)], &mut into[..3]).unwrap(), 3);
        let many = vec![own(&one[..1]); MAX_RANGES + 7];
        let mut into = vec![0; MAX_RANGES + 7];
        assert_eq!(read_process(pid, &many, &mut into).unwrap(), MAX_RANGES + 7);
        assert!(into.iter().all(|&byte| byte == b'f'));
    }

    #[test]
    fn the_time_of_a_process_stands_while_it_sleeps_and_goes_on_when_it_runs() {
        use std::io::{BufRead, BufReader, Write};
        use std::process::{Command, Stdio};
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let mut echo = |child: &mut std::process::Child| {
            let mut line = String::new();
            child.stdin.as_mut().unwrap().write_all(b"x\n").unwrap();
            answers.read_line(&mut line).unwrap();
        };
        // Asleep: the kernel says so, and it has left its processor.
        let asleep = || {
            let waits = |stat: String| stat.contains(") S ");
            while !waits(std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap()) {
                std::thread::yield_now();
            }
            let mut time = process_time(pid).unwrap();
            loop {
                std::thread::sleep(std::time::Duration::from_millis(20));
                let now = process_time(pid).unwrap();
                if now == time {
                    return now;
                }
                time = now;
            }
        };
        echo(&mut child);
        let before = asleep();
        echo(&mut child);
        assert!(asleep() > before);
        child.kill().unwrap();
        child.wait().unwrap();
        process_time(pid).unwrap_err();
    }

    #[test]
    fn a_process_that_has_ended_is_named_so() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        let gone = read_process(pid, &[Range { address: 4096, bytes: 1 }], &mut [0]).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ESRCH));
    }
}
