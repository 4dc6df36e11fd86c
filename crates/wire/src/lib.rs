//! The frames between host and guest.
//!
//! What it is for: one byte channel (virtio-serial) carries everything between
//! the host's driver and the guest's PID 1, as frames:
//!
//! ```text
//! magic 0x48 0x43 | version u8 | kind u8 | id u32 | sequence u32 | length u32 | payload (length bytes)
//! ```
//! All integers are little-endian. `id` names the exec or request that a frame
//! belongs to (0: none), `sequence` counts frames per direction from 0 so that a
//! lost or repeated frame shows, `length` is at most [`MAX_PAYLOAD`].
//!
//! What it guarantees: bounds are checked before anything is allocated or
//! copied; parsing borrows and never panics, whatever the bytes; each kind has
//! one payload shape and nothing may follow it.
//! What it does not: truth. A frame from the guest is testimony.
//! Who may call: the host's channel collector and the guest's init.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

extern crate alloc;

mod frame;
mod guest;
mod host;
mod text;

pub use frame::{FrameHeader, FrameReader, HEADER_LEN, MAX_PAYLOAD, Reject, VERSION, encode_frame};
pub use guest::{
    Claim, ClaimKind, ExecDecision, ExecEnd, ExecEnded, ExecRule, GuestFrame, Ready, Request, Stage,
};
pub use host::{Clock, Configure, Decision, ExecBegin, HostFrame, Program, Reply};
pub use text::{ExecText, ExecTextError, FieldTag, MAX_EXEC_TEXT};

/// Which output of an exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stream {
    /// Standard output.
    Stdout = 1,
    /// Standard error.
    Stderr = 2,
}

impl Stream {
    const fn from_byte(byte: u8) -> Option<Stream> {
        match byte {
            1 => Some(Stream::Stdout),
            2 => Some(Stream::Stderr),
            _ => None,
        }
    }
}

/// Bytes of one stream that may be under way unacknowledged: what a sender may
/// send before it has been given credit for more. It bounds the receiver's
/// memory and keeps control frames from waiting behind data.
pub const STREAM_WINDOW: u32 = 256 * 1024;

/// Largest data payload of one stream frame. Each frame costs the guest a turn of its loop and a process that wakes; an
/// urgent one waits behind a millisecond of it.
pub const STREAM_CHUNK: usize = 64 * 1024;

/// Longest resource of a capability request in bytes: 512 characters (`layers.md`, L2) of at most 4 bytes.
pub const MAX_RESOURCE: usize = 512 * 4;
/// Longest justification in bytes: 4096 characters (`layers.md`, L2) of at most 4 bytes.
pub const MAX_JUSTIFICATION: usize = 4096 * 4;
/// Longest free text of a log or failure frame in bytes.
pub const MAX_TEXT: usize = 1024;
/// Most digests in one `ExecAllow` frame.
pub const EXEC_ALLOW_FRAME: usize = MAX_PAYLOAD / 32;
/// Most digests on the list of files that may be executed.
pub const MAX_EXEC_ALLOW: usize = 128 * 1024;
/// Most execs alive at once in one guest.
pub const MAX_EXECS: usize = 256;

/// What lies in the init's memory directly before the 32 bytes of
/// [`Configure::nonce`]: where the host looks for them in the guest's RAM.
pub const NONCE_MARK: [u8; 16] = *b"HOTCELL-NONCE\0\0\0";
/// The name of the virtio-serial port that carries the frames.
pub const CHANNEL_NAME: &str = "org.hotcell.channel";

const _: () = assert!(STREAM_CHUNK <= MAX_PAYLOAD);
const _: () = assert!(MAX_RESOURCE + MAX_JUSTIFICATION + 16 <= MAX_PAYLOAD);
const _: () = assert!(STREAM_WINDOW as usize >= 4 * STREAM_CHUNK);
