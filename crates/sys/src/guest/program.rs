//! The last steps of a child on its way to another program.
//!
//! A child may allocate: whoever forks has one thread, so that no other holds the allocator's lock.

use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// Programs to try, arguments and environment in the form that `execve` takes.
#[derive(Debug)]
pub struct ExecImage {
    candidates: Vec<CString>,
    argv: Pointers,
    envp: Pointers,
}

impl ExecImage {
    /// Prepares. `candidates` are tried in order, as `execvp` tries its path.
    pub fn new(candidates: Vec<CString>, argv: Vec<CString>, envp: Vec<CString>) -> ExecImage {
        ExecImage { candidates, argv: Pointers::new(argv), envp: Pointers::new(envp) }
    }

    /// Executes the first candidate that can be; comes back only with the reason why none could.
    ///
    /// A candidate that does not exist or may not be executed lets the next one
    /// be tried; "may not" outweighs "does not exist", as in a shell.
    pub fn execute(&self) -> Errno {
        let mut worst = Errno::NOENT;
        for program in &self.candidates {
            // To ask first is cheap; an execve that fails has made a new address space before it looks.
            if self.candidates.len() > 1 && is_absent(program) {
                continue;
            }
            match self.execute_one(program) {
                Errno::NOENT | Errno::NOTDIR => {}
                Errno::ACCESS => worst = Errno::ACCESS,
                other => return other,
            }
        }
        worst
    }

    fn execute_one(&self, program: &CStr) -> Errno {
        // SAFETY: `program` is terminated; both arrays end with a null pointer and their other
        // pointers are to terminated strings that `self` owns and never changes.
        unsafe { libc::execve(program.as_ptr(), self.argv.as_ptr(), self.envp.as_ptr()) };
        Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
    }
}

/// Whether there is nothing of this name; whatever else is wrong with it, execve says.
fn is_absent(program: &CStr) -> bool {
    // SAFETY: `program` is terminated, and the call writes no memory.
    let there = unsafe { libc::access(program.as_ptr(), libc::F_OK) };
    there < 0 && matches!(io::Error::last_os_error().raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

/// A null-terminated array of pointers into strings that it owns.
#[derive(Debug)]
struct Pointers {
    /// Where the pointers point; never touched after construction.
    _strings: Vec<CString>,
    pointers: Vec<*const libc::c_char>,
}

impl Pointers {
    fn new(strings: Vec<CString>) -> Pointers {
        // A CString's bytes lie on the heap: moving the CString does not move them.
        let pointers = strings.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect();
        Pointers { _strings: strings, pointers }
    }

    fn as_ptr(&self) -> *const *const libc::c_char {
        self.pointers.as_ptr()
    }
}

/// Makes `fds` the descriptors 0, 1, 2, … of this process, without close-on-exec.
///
/// # Errors
/// The kernel's. Descriptors of `fds` must be above their own number, else a
/// later one could already be overwritten: `InvalidInput`.
pub fn adopt_stdio(fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    for (target, fd) in fds.iter().enumerate() {
        if fd.as_raw_fd() < fds.len() as RawFd {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: both are plain numbers to the kernel. The target numbers are those of the standard
        // streams (and the few after them that the caller lists), which no Rust object of this
        // process owns: PID 1 reserves them at its start.
        if unsafe { libc::dup2(fd.as_raw_fd(), target as RawFd) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Gives a program the signal state that it expects: nothing blocked, and
/// SIGPIPE, which Rust's runtime ignores and `execve` would hand on, as usual.
pub fn default_signals() {
    // SAFETY: SIG_DFL is not a handler that could run; an empty set is a valid mask, and a set of
    // zeroes is made valid by `sigemptyset` before it is used.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Lets the kernel wait for this process's children, also those that it will
/// inherit: none becomes a zombie, and their status is lost.
pub fn reap_automatically() {
    // SAFETY: SIG_IGN is not a handler that could run.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Sets close-on-exec on a descriptor by its number.
///
/// # Errors
/// The kernel's.
pub fn close_on_exec(number: RawFd) -> io::Result<()> {
    // SAFETY: changes a flag of a descriptor and no memory; a number that is not open gives EBADF.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Writes to a descriptor by its number, for a child whose owners of
/// descriptors were left behind by [`adopt_stdio`].
///
/// # Errors
/// The kernel's.
pub fn write_raw(number: RawFd, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the kernel reads `bytes.len()` bytes from `bytes`; a number that is not open gives EBADF.
    let count = unsafe { libc::write(number, bytes.as_ptr().cast(), bytes.len()) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Reads a descriptor by its number to its end, for the same kind of child.
///
/// # Errors
/// The kernel's.
pub fn read_raw(number: RawFd) -> io::Result<Vec<u8>> {
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        // SAFETY: the kernel writes at most `chunk.len()` bytes to `chunk`; a number that is not open gives EBADF.
        let count = unsafe { libc::read(number, chunk.as_mut_ptr().cast(), chunk.len()) };
        match usize::try_from(count) {
            Ok(0) => return Ok(bytes),
            Ok(count) => bytes.extend_from_slice(chunk.get(..count).unwrap_or_default()),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Closes every descriptor from `first` on.
///
/// Only for a child that never again touches a descriptor that it inherited:
/// the owners of these numbers still exist in its copy of memory, and are
/// never dropped, since the child ends by `execve` or [`super::exit_now`].
///
/// # Errors
/// The kernel's.
pub fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: closing descriptors touches no memory. That no owner uses them afterwards is the
    // caller's side, stated above; a violation gives EBADF or a wrong file, not memory unsafety.
    if unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
