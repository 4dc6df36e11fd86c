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
    fn a_process_that_has_ended_is_named_so() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        let gone = read_process(pid, &[Range { address: 4096, bytes: 1 }], &mut [0]).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ESRCH));
    }
}
