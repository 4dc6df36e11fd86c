//! System calls on memory that exists already, for a process between fork and exec: nothing here allocates.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

pub(super) fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Sends one descriptor; allocates nothing.
pub(super) fn send_descriptor(socket: RawFd, descriptor: RawFd) -> io::Result<()> {
    /// A control message with one descriptor, by cmsg(3).
    #[repr(C, align(8))]
    struct Control {
        header: libc::cmsghdr,
        descriptor: RawFd,
        padding: u32,
    }
    let control = Control {
        header: libc::cmsghdr {
            cmsg_len: size_of::<libc::cmsghdr>() + size_of::<RawFd>(),
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_RIGHTS,
        },
        descriptor,
        padding: 0,
    };
    let byte = [b'l'];
    let part = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
    // SAFETY: `msghdr` is plain data for which all zeroes is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = (&raw const part).cast_mut();
    message.msg_iovlen = 1;
    message.msg_control = (&raw const control).cast_mut().cast();
    message.msg_controllen = size_of::<Control>();
    // SAFETY: the message and all that it names live through the call, which reads them only.
    let sent = check(unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) } as _)?;
    if sent == 1 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) }
}

pub(super) fn pipe() -> io::Result<(RawFd, RawFd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` is a valid place for two ints.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }.into())?;
    let [read, write] = ends;
    Ok((read, write))
}

pub(super) fn close(descriptor: RawFd) {
    // SAFETY: called on descriptors that `pipe` made and nothing uses after.
    drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
}

pub(super) fn write_all(descriptor: RawFd, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: the bytes live through the call.
    let count = check(unsafe { libc::write(descriptor, bytes.as_ptr().cast(), bytes.len()) } as _)?;
    if count as usize == bytes.len() { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) }
}

pub(super) fn read_some(descriptor: RawFd, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        // SAFETY: `bytes` is a valid place for its length.
        let result = check(unsafe { libc::read(descriptor, bytes.as_mut_ptr().cast(), bytes.len()) } as _);
        match result {
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            other => return other.map(|count| count as usize),
        }
    }
}

pub(super) fn write_file(path: &std::ffi::CStr, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: the path lives through the call.
    let file = check(unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) }.into())?;
    let written = write_all(file as RawFd, bytes);
    close(file as RawFd);
    written
}
