//! Three ioctl families: the random device, network interface flags, file systems.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most entropy that one call credits, in bytes.
const MAX_ENTROPY: usize = 64;
/// `RNDADDENTROPY` of `linux/random.h`: `_IOW('R', 0x03, int[2])`.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// `RNDRESEEDCRNG` of `linux/random.h`: `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// `FIFREEZE` of `linux/fs.h`: `_IOWR('X', 119, int)`.
const FIFREEZE: libc::c_ulong = 0xC004_5877;

/// `struct rand_pool_info` with room for [`MAX_ENTROPY`] bytes.
#[repr(C)]
struct RandPool {
    entropy_count_bits: libc::c_int,
    buf_size: libc::c_int,
    buf: [u8; MAX_ENTROPY],
}

/// Mixes `bytes` into the kernel's generator, credits all their bits, and
/// makes the generator reseed now. Without the reseed two clones of one
/// template would go on with the same key for up to a minute.
///
/// # Errors
/// No such device, or the caller is not root.
pub fn credit_entropy(random: &File, bytes: &[u8; MAX_ENTROPY]) -> io::Result<()> {
    let pool = RandPool {
        entropy_count_bits: (MAX_ENTROPY * 8) as libc::c_int,
        buf_size: MAX_ENTROPY as libc::c_int,
        buf: *bytes,
    };
    // SAFETY: RNDADDENTROPY reads a `rand_pool_info` of `buf_size` bytes, which `pool` is, and writes nothing.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY as _, &raw const pool) })?;
    // SAFETY: RNDRESEEDCRNG takes no argument.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG as _) })
}

/// Writes out the file system that this file is on and stops every change of it from then on: whoever
/// wants to change something waits.
///
/// # Errors
/// The file system can't be written out or can't be stopped, or the caller is not root.
pub fn freeze(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: FIFREEZE ignores its argument and touches no memory.
    check(unsafe { libc::ioctl(file.as_raw_fd(), FIFREEZE as _, 0) })
}

/// Brings the loopback interface up; the kernel then gives it its addresses.
///
/// # Errors
/// The kernel's; there is none to be expected for root.
pub fn loopback_up() -> io::Result<()> {
    let socket = std::net::UdpSocket::bind(("0.0.0.0", 0))?;
    // SAFETY: `ifreq` is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads an `ifreq` with a terminated name and flags, which `request` is.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
