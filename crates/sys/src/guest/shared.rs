//! Memory that a process shares with the one that it forks next, and with no other.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Words that two processes see. They are there for as long as either process.
#[derive(Clone, Copy, Debug)]
pub struct SharedWords {
    words: &'static [AtomicU64],
}

impl SharedWords {
    /// So many words, all zero.
    ///
    /// # Errors
    /// No memory.
    pub fn new(count: usize) -> io::Result<SharedWords> {
        let bytes = count.checked_mul(size_of::<AtomicU64>()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: an anonymous mapping at an address of the kernel's choosing overlaps nothing.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let first = NonNull::new(address.cast::<AtomicU64>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the mapping has `count` words, is aligned to a page, zeroed by the kernel, never unmapped, and whoever
        // has it reaches it by these atomics alone.
        let words = unsafe { std::slice::from_raw_parts(first.as_ptr(), count) };
        Ok(SharedWords { words })
    }

    /// Whoever is forked from now on does not have them.
    ///
    /// # Errors
    /// The kernel's.
    pub fn keep_from_children(self) -> io::Result<()> {
        let address = self.words.as_ptr().cast_mut().cast();
        // SAFETY: the range is the mapping made by `new`; the call changes nothing of it in this process.
        match unsafe { libc::madvise(address, size_of_val(self.words), libc::MADV_DONTFORK) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The words.
    pub fn words(self) -> &'static [AtomicU64] {
        self.words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::{ForkPlan, Namespaces, exit_now, fork};
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    use std::os::fd::AsFd;
    use std::sync::atomic::Ordering;

    #[test]
    fn the_next_child_shares_it_and_a_later_one_has_it_not() {
        let shared = SharedWords::new(600).unwrap();
        let ended = |value: u64| {
            let plan = ForkPlan { cgroup: None, namespaces: Namespaces::Inherit };
            let child = fork(plan, || {
                shared.words()[599].store(value, Ordering::Release);
                exit_now(7)
            })
            .unwrap();
            let status = WaitIdOptions::EXITED;
            waitid(WaitId::PidFd(child.pidfd.as_fd()), status).unwrap().unwrap()
        };
        assert_eq!(ended(5).exit_status(), Some(7));
        assert_eq!(shared.words()[599].load(Ordering::Acquire), 5);
        shared.keep_from_children().unwrap();
        assert_eq!(ended(6).terminating_signal(), Some(libc::SIGSEGV));
        assert_eq!(shared.words()[599].load(Ordering::Acquire), 5);
    }
}
