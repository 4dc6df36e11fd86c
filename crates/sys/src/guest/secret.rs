//! One page that stays in this process's RAM: never swapped, never copied by fork.

use std::io;
use std::ptr::NonNull;

/// A locked page with a value in it.
///
/// It is zeroed in children (`MADV_WIPEONFORK`), so that a marker written here
/// is found at one place of the guest's memory: in the process that wrote it.
#[derive(Debug)]
pub struct LockedPage {
    page: NonNull<u8>,
}

/// Bytes of a page on every machine that the guest runs on.
const PAGE: usize = 4096;

impl LockedPage {
    /// A new page, all zero.
    ///
    /// # Errors
    /// No memory.
    pub fn new() -> io::Result<LockedPage> {
        // SAFETY: an anonymous private mapping at an address of the kernel's choosing overlaps nothing.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let page = NonNull::new(address.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let page = LockedPage { page };
        // SAFETY: the range is the mapping made above, owned by `page`; neither call changes its content.
        let locked = unsafe {
            libc::mlock(address, PAGE) == 0 && libc::madvise(address, PAGE, libc::MADV_WIPEONFORK) == 0
        };
        if !locked {
            return Err(io::Error::last_os_error());
        }
        Ok(page)
    }

    /// Writes `content` to its beginning.
    ///
    /// # Errors
    /// `content` is longer than a page.
    pub fn fill(&mut self, content: &[u8]) -> io::Result<()> {
        if content.len() > PAGE {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: source and target are valid for `content.len() <= PAGE` bytes; they are apart from each other, since
        // nobody but `self`, which is borrowed mutably, has the mapping.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), self.page.as_ptr(), content.len()) };
        Ok(())
    }

    /// The page.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is PAGE readable bytes, zeroed by the kernel or written by `fill`, lives
        // as long as `self`, and is not written to while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.page.as_ptr(), PAGE) }
    }
}

impl Drop for LockedPage {
    fn drop(&mut self) {
        // SAFETY: unmaps the mapping that this value made and alone owns.
        unsafe { libc::munmap(self.page.as_ptr().cast(), PAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::{ForkPlan, Namespaces, exit_now, fork};
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    use std::os::fd::AsFd;

    #[test]
    fn a_child_does_not_inherit_the_content() {
        let mut page = LockedPage::new().unwrap();
        page.fill(b"marker").unwrap();
        assert!(page.bytes().starts_with(b"marker\0"));
        let plan = ForkPlan { cgroup: None, namespaces: Namespaces::Inherit };
        let child = fork(plan, || exit_now(i32::from(page.bytes().iter().any(|&byte| byte != 0)))).unwrap();
        let status = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(0));
        assert!(page.fill(&[0; PAGE + 1]).is_err());
    }
}
