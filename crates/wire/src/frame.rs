//! Frame header, encoding, and the incremental reader.
//!
//! [`FrameReader`] holds at most one frame: it is given bytes as they come and
//! hands out whole frames. A reject is final: there is no resynchronising with
//! a peer that sends rubbish.

use alloc::vec::Vec;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Protocol version; both sides must have the same.
pub const VERSION: u8 = 1;
/// Bytes of a header.
pub const HEADER_LEN: usize = 16;
/// Largest payload of any frame in bytes.
pub const MAX_PAYLOAD: usize = 64 * 1024;

const MAGIC: [u8; 2] = *b"HC";

/// The header as it lies on the wire.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 2],
    version: u8,
    kind: u8,
    id: U32,
    sequence: U32,
    length: U32,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_LEN);

/// A checked header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the payload is; see the frame enumerations.
    pub kind: u8,
    /// The exec or request.
    pub id: u32,
    /// Position in its direction, from 0.
    pub sequence: u32,
    /// Payload bytes, at most [`MAX_PAYLOAD`].
    pub length: u32,
}

/// Why bytes are refused. Always the peer's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reject {
    /// A header that does not begin with the magic.
    Magic([u8; 2]),
    /// Another protocol version.
    Version(u8),
    /// A payload over [`MAX_PAYLOAD`].
    TooLong(u32),
    /// A frame that was lost, repeated or reordered.
    Sequence {
        /// The number that was due.
        due: u32,
        /// The number that came.
        came: u32,
    },
    /// A kind that this direction does not have.
    Kind(u8),
    /// A payload whose fields do not fill it exactly.
    Shape {
        /// The kind.
        kind: u8,
    },
    /// A field with a value that it may not have.
    Value {
        /// The kind.
        kind: u8,
        /// The field.
        field: &'static str,
    },
}

impl core::fmt::Display for Reject {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Reject::Magic(magic) => write!(f, "a frame begins with {magic:02x?}, not with the magic"),
            Reject::Version(version) => write!(f, "protocol version {version}, not {VERSION}"),
            Reject::TooLong(length) => write!(f, "a frame of {length} bytes, over {MAX_PAYLOAD}"),
            Reject::Sequence { due, came } => write!(f, "frame {came} where frame {due} was due"),
            Reject::Kind(kind) => write!(f, "frame kind {kind:#04x} does not exist in this direction"),
            Reject::Shape { kind } => write!(f, "the payload of a frame of kind {kind:#04x} is malformed"),
            Reject::Value { kind, field } => {
                write!(f, "a frame of kind {kind:#04x} has a bad value in `{field}`")
            }
        }
    }
}

impl core::error::Error for Reject {}

/// Appends one frame to `out`; `false`, and nothing appended, when the payload is over [`MAX_PAYLOAD`].
#[must_use]
pub fn encode_frame(out: &mut Vec<u8>, kind: u8, id: u32, sequence: u32, payload: &[&[u8]]) -> bool {
    let length: usize = payload.iter().map(|part| part.len()).sum();
    if length > MAX_PAYLOAD {
        return false;
    }
    let header = RawHeader {
        magic: MAGIC,
        version: VERSION,
        kind,
        id: U32::new(id),
        sequence: U32::new(sequence),
        length: U32::new(length as u32),
    };
    out.reserve(HEADER_LEN + length);
    out.extend_from_slice(header.as_bytes());
    for part in payload {
        out.extend_from_slice(part);
    }
    true
}

/// Cuts a byte stream into frames. Holds at most one frame's bytes and what of
/// the next one came with it: memory is bounded by `HEADER_LEN + MAX_PAYLOAD`
/// plus one read.
#[derive(Debug, Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
    start: usize,
    next_sequence: u32,
    rejected: Option<Reject>,
}

impl FrameReader {
    /// An empty reader, due to see frame 0.
    pub const fn new() -> FrameReader {
        FrameReader { buffer: Vec::new(), start: 0, next_sequence: 0, rejected: None }
    }

    /// Takes bytes from the channel. Call [`FrameReader::next`] until it gives
    /// `None` before pushing more.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.rejected.is_some() {
            return;
        }
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, if one is there.
    ///
    /// # Errors
    /// The peer broke the protocol; every later call gives the same error.
    #[expect(clippy::should_implement_trait, reason = "lends from itself, which an Iterator can't")]
    pub fn next(&mut self) -> Result<Option<(FrameHeader, &[u8])>, Reject> {
        if let Some(reject) = self.rejected {
            return Err(reject);
        }
        let header = match self.due() {
            Ok(Some(header)) => header,
            Ok(None) => return Ok(None),
            Err(reject) => {
                self.rejected = Some(reject);
                self.buffer = Vec::new();
                return Err(reject);
            }
        };
        let first = self.start + HEADER_LEN;
        let Some(payload) = self.buffer.get(first..first + header.length as usize) else { return Ok(None) };
        self.start = first + payload.len();
        self.next_sequence = self.next_sequence.wrapping_add(1);
        Ok(Some((header, payload)))
    }

    /// The header of the frame that begins at `start`, checked; `None` while it is not whole.
    fn due(&self) -> Result<Option<FrameHeader>, Reject> {
        let pending = self.buffer.get(self.start..).unwrap_or_default();
        let Ok((raw, _)) = RawHeader::ref_from_prefix(pending) else { return Ok(None) };
        let header = FrameHeader {
            kind: raw.kind,
            id: raw.id.get(),
            sequence: raw.sequence.get(),
            length: raw.length.get(),
        };
        if raw.magic != MAGIC {
            Err(Reject::Magic(raw.magic))
        } else if raw.version != VERSION {
            Err(Reject::Version(raw.version))
        } else if header.length as usize > MAX_PAYLOAD {
            Err(Reject::TooLong(header.length))
        } else if header.sequence != self.next_sequence {
            Err(Reject::Sequence { due: self.next_sequence, came: header.sequence })
        } else {
            Ok(Some(header))
        }
    }

    /// Bytes of a frame that has begun and not ended.
    pub fn pending(&self) -> usize {
        self.buffer.len().saturating_sub(self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(sequence: u32, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        assert!(encode_frame(&mut out, 7, 9, sequence, &[payload]));
        out
    }

    #[test]
    fn frames_survive_any_chunking() {
        let mut bytes = frame(0, b"abc");
        bytes.extend(frame(1, b""));
        bytes.extend(frame(2, &[5; 1000]));
        for chunk in 1..bytes.len() {
            let mut reader = FrameReader::new();
            let mut seen = Vec::new();
            for part in bytes.chunks(chunk) {
                reader.push(part);
                while let Some((header, payload)) = reader.next().unwrap() {
                    seen.push((header.sequence, payload.len()));
                }
            }
            assert_eq!(seen, [(0, 3), (1, 0), (2, 1000)]);
            assert_eq!(reader.pending(), 0);
        }
    }

    #[test]
    fn a_reject_is_final_and_frees_the_bytes() {
        let mut reader = FrameReader::new();
        let mut bytes = frame(0, b"x");
        bytes[0] = b'X';
        reader.push(&bytes);
        assert_eq!(reader.next(), Err(Reject::Magic([b'X', b'C'])));
        reader.push(&frame(0, b"good"));
        assert_eq!(reader.next(), Err(Reject::Magic([b'X', b'C'])));
        assert_eq!(reader.pending(), 0);
    }

    #[test]
    fn a_length_over_the_limit_is_refused_from_the_header_alone() {
        let mut bytes = frame(0, b"");
        bytes[12..16].copy_from_slice(&(MAX_PAYLOAD as u32 + 1).to_le_bytes());
        let mut reader = FrameReader::new();
        reader.push(&bytes);
        assert_eq!(reader.next(), Err(Reject::TooLong(MAX_PAYLOAD as u32 + 1)));
        let mut out = Vec::new();
        assert!(!encode_frame(&mut out, 1, 0, 0, &[&[0; MAX_PAYLOAD + 1]]));
        assert!(out.is_empty());
    }

    #[test]
    fn lost_and_repeated_frames_show() {
        for came in [0, 2] {
            let mut reader = FrameReader::new();
            reader.push(&frame(0, b""));
            reader.push(&frame(came, b""));
            assert!(reader.next().unwrap().is_some());
            assert_eq!(reader.next(), Err(Reject::Sequence { due: 1, came }));
        }
    }
}
