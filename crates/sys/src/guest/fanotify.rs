//! Asking before a file is executed: fanotify's `FAN_OPEN_EXEC_PERM`.
//!
//! What it guarantees: an event that is dropped without an answer is denied.
//! The kernel holds each `execve` (and each interpreter or loader that one
//! needs) until it is answered; if the last descriptor of a group is closed,
//! it allows everything that waits. So whoever must fail closed keeps the
//! group in a process that outlives the answering one as well.
//! What it does not: see files that are mapped, not executed (`ld.so FILE`,
//! libraries), nor files of mounts that can't be marked (memfd).
//! Who may call: the guest's gate.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};

/// A group that is asked about executions.
#[derive(Debug)]
pub struct ExecEvents {
    group: File,
}

/// One execution that waits for an answer.
#[derive(Debug)]
pub struct ExecEvent<'a> {
    file: File,
    pid: i32,
    group: &'a ExecEvents,
    answered: bool,
}

impl ExecEvents {
    /// A new group without marks. Reading does not block.
    ///
    /// # Errors
    /// Not root, or a kernel without permission events.
    pub fn new() -> io::Result<ExecEvents> {
        // Unlimited: the queue is bounded by the number of processes, each of which waits.
        let flags = libc::FAN_CLASS_CONTENT
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_UNLIMITED_MARKS;
        let file_flags = libc::O_RDONLY | libc::O_LARGEFILE | libc::O_CLOEXEC;
        // SAFETY: takes two numbers and touches no memory.
        let group = unsafe { libc::fanotify_init(flags, file_flags as libc::c_uint) };
        if group < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        Ok(ExecEvents { group: unsafe { File::from_raw_fd(group) } })
    }

    /// Asks about every file of the file system that `path` is on, through whichever mount.
    ///
    /// # Errors
    /// The kernel's; some internal file systems can't be marked.
    pub fn watch_file_system(&self, path: &CStr) -> io::Result<()> {
        // SAFETY: `path` is terminated and lives through the call.
        let result = unsafe {
            libc::fanotify_mark(
                self.group.as_raw_fd(),
                libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM,
                libc::FAN_OPEN_EXEC_PERM,
                libc::AT_FDCWD,
                path.as_ptr(),
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Asks about no file system any more.
    ///
    /// # Errors
    /// The kernel's.
    pub fn forget_file_systems(&self) -> io::Result<()> {
        let flags = libc::FAN_MARK_FLUSH | libc::FAN_MARK_FILESYSTEM;
        // SAFETY: with FAN_MARK_FLUSH the kernel reads neither mask nor path.
        let result =
            unsafe { libc::fanotify_mark(self.group.as_raw_fd(), flags, 0, libc::AT_FDCWD, c"/".as_ptr()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The next execution that waits; `None`: none for now.
    ///
    /// # Errors
    /// The kernel's, or an event that this code does not know.
    pub fn next(&self) -> io::Result<Option<ExecEvent<'_>>> {
        let mut bytes = [0; size_of::<libc::fanotify_event_metadata>()];
        // Room for one event: the kernel hands out only whole ones.
        match (&self.group).read(&mut bytes) {
            Ok(count) if count == bytes.len() => {}
            Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        // SAFETY: the metadata is plain numbers, for which any bytes are a valid value; the source has its size.
        let event: libc::fanotify_event_metadata = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
        if event.vers != libc::FANOTIFY_METADATA_VERSION || event.fd < 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: the kernel opened this descriptor for the reader of the event, who owns it.
        let file = unsafe { File::from_raw_fd(event.fd) };
        Ok(Some(ExecEvent { file, pid: event.pid, group: self, answered: false }))
    }

    fn answer(&self, event: &File, allow: bool) -> io::Result<()> {
        let response = if allow { libc::FAN_ALLOW } else { libc::FAN_DENY };
        let [a, b, c, d] = event.as_raw_fd().to_ne_bytes();
        let [e, f, g, h] = response.to_ne_bytes();
        // `struct fanotify_response`: the event's descriptor, the response.
        (&self.group).write_all(&[a, b, c, d, e, f, g, h])
    }
}

impl AsFd for ExecEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.group.as_fd()
    }
}

impl ExecEvent<'_> {
    /// The file that is to be executed, open for reading.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Who wants to execute it, in the pid namespace of this process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Lets it be executed, or not (`EPERM`).
    ///
    /// # Errors
    /// The kernel's; the process has gone in the meantime.
    pub fn answer(mut self, allow: bool) -> io::Result<()> {
        self.answered = true;
        self.group.answer(&self.file, allow)
    }
}

impl Drop for ExecEvent<'_> {
    fn drop(&mut self) {
        if !self.answered {
            let _ = self.group.answer(&self.file, false);
        }
    }
}
