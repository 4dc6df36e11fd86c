//! What the host sends.

use crate::frame::{FrameHeader, Reject, encode_frame};
use crate::{MAX_TEXT, Stream};
use alloc::vec::Vec;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

/// The first frame after boot or after a clone was started: what this guest is
/// to be. A guest that has been configured refuses a second one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Configure {
    /// Fresh random bytes of this run: kept in guest memory at a marked place,
    /// where the host looks for it to prove that this VM ran it.
    pub nonce: [u8; 32],
    /// Entropy for the guest kernel's generator.
    pub entropy: [u8; 64],
    /// Wall clock at sending, nanoseconds since 1970: right enough to begin with; [`Clock`] sets it.
    pub wall_clock_ns: U64,
    /// Size of `/tmp` in bytes.
    pub tmp_bytes: U64,
    /// Most processes and threads of the workload.
    pub pids: U32,
    /// Memory for the workload in bytes; 0: all but the init's reserve.
    pub memory_bytes: U64,
    /// Owner of `/workspace`; never 0.
    pub workspace_uid: U32,
    /// Its group; never 0.
    pub workspace_gid: U32,
    /// 1: files on `/workspace` may be executed; 0: they may not.
    pub workspace_exec: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

/// What the time is: at `uptime_ns` of the guest's own clock since boot, which it told in its `Ready`, it was
/// `wall_clock_ns`. So the way of this frame costs nothing; the way of `Ready` to the host is the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Clock {
    /// The guest's time since boot, nanoseconds.
    pub uptime_ns: U64,
    /// The host's wall clock at that moment, nanoseconds since 1970.
    pub wall_clock_ns: U64,
}

/// What runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(u8)]
pub enum Program {
    /// The program that argv names.
    Argv = 0,
    /// The init's own unpacker: a tar stream on stdin, unpacked below the
    /// working directory as the workload's user. argv: one label.
    Unpack = 1,
    /// The init's own packer: argv[1..] are paths, packed as a tar stream to
    /// stdout as the workload's user.
    Pack = 2,
    /// A root service of the image: the program that argv names, as user and
    /// group 0, without capabilities.
    Service = 3,
}

/// Begins an exec; its texts follow in `ExecText` frames, then `ExecStart`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExecBegin {
    /// What runs.
    pub program: Program,
    /// 1: stdin frames will come; 0: stdin is empty.
    pub stdin: u8,
    /// 1: the processes of its tree may execute other files; 0: its token is for one execution.
    pub spawn: u8,
    /// 1: the host means to start nothing after it, so that the guest makes nothing ready.
    pub last: u8,
    /// BLAKE3 of the file that its token is bound to; zero where the host can't know it.
    pub binary: [u8; 32],
    /// User; 0 for a service and for nothing else.
    pub uid: U32,
    /// Group; as the user.
    pub gid: U32,
    /// Length of the texts in bytes.
    pub text_len: U32,
}

/// The host's answer to a capability request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(u8)]
pub enum Decision {
    /// No.
    Deny = 0,
    /// Yes.
    Allow = 1,
    /// Not now: noted for the next image.
    Defer = 2,
}

/// A decision with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply<'a> {
    /// The decision.
    pub decision: Decision,
    /// Why, for people; at most [`MAX_TEXT`] bytes.
    pub reason: &'a str,
}

/// A frame from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostFrame<'a> {
    /// 0x01
    Configure(&'a Configure),
    /// 0x02, id: the exec
    ExecBegin(&'a ExecBegin),
    /// 0x03, id: the exec: the next bytes of its texts
    ExecText(&'a [u8]),
    /// 0x04, id: the exec: texts are complete, start
    ExecStart,
    /// 0x05, id: the exec: bytes for its stdin, within the guest's credit
    Stdin(&'a [u8]),
    /// 0x06, id: the exec: stdin ends
    StdinEof,
    /// 0x07, id: the exec: a signal for its first process
    Signal(u8),
    /// 0x08, id: the exec: kill its whole tree, whatever session or group its processes moved to
    KillTree,
    /// 0x09, id: the exec: so many more bytes of this stream may be sent
    Credit {
        /// Which stream.
        stream: Stream,
        /// How many bytes more.
        bytes: u32,
    },
    /// 0x0A, id: the request
    Reply(Reply<'a>),
    /// 0x0B: kill every process of the workload, write all file systems out, make them read-only, then say so
    Quiesce,
    /// 0x0C: answer with the same 32 bytes
    Ping(&'a [u8; 32]),
    /// 0x0D: more digests (BLAKE3) of files that may be executed; before [`HostFrame::ExecEnforce`]
    ExecAllow(&'a [[u8; 32]]),
    /// 0x0E: the list is complete: from now on a file of the root image is
    /// executed only if its digest is on it, and a file anywhere else never,
    /// except, with `workspace`, on `/workspace`. Once.
    ExecEnforce {
        /// Files on `/workspace` are executed whatever their digest, and each is told.
        workspace: bool,
    },
    /// 0x10: set the clock; once, after `Ready` and before the first exec
    Clock(&'a Clock),
    /// 0x11, id: a number of the host's: tell of every process of the workload, in claims
    RollCall,
    /// 0x0F, id: the exec: nobody reads this output any more; who writes to it is told so, as with any pipe
    CloseOutput(Stream),
}

impl<'a> HostFrame<'a> {
    /// Reads the payload of a frame that came from the host.
    ///
    /// # Errors
    /// The frame is not one that a host sends.
    pub fn parse(header: FrameHeader, payload: &'a [u8]) -> Result<HostFrame<'a>, Reject> {
        let kind = header.kind;
        let shape = Reject::Shape { kind };
        let empty = |frame| if payload.is_empty() { Ok(frame) } else { Err(shape) };
        match kind {
            0x01 => Configure::ref_from_bytes(payload).map(HostFrame::Configure).map_err(|_| shape),
            0x02 => ExecBegin::try_ref_from_bytes(payload).map(HostFrame::ExecBegin).map_err(|_| shape),
            0x03 => Ok(HostFrame::ExecText(payload)),
            0x04 => empty(HostFrame::ExecStart),
            0x05 => Ok(HostFrame::Stdin(payload)),
            0x06 => empty(HostFrame::StdinEof),
            0x07 => match payload {
                [signal @ 1..=64] => Ok(HostFrame::Signal(*signal)),
                [_] => Err(Reject::Value { kind, field: "signal" }),
                _ => Err(shape),
            },
            0x08 => empty(HostFrame::KillTree),
            0x09 => {
                let (stream, bytes) = parse_credit(payload).ok_or(shape)?;
                Ok(HostFrame::Credit { stream, bytes })
            }
            0x0A => {
                let (&decision, reason) = payload.split_first().ok_or(shape)?;
                let decision = Decision::try_read_from_bytes(&[decision])
                    .map_err(|_| Reject::Value { kind, field: "decision" })?;
                let reason = core::str::from_utf8(reason)
                    .ok()
                    .filter(|reason| reason.len() <= MAX_TEXT)
                    .ok_or(Reject::Value { kind, field: "reason" })?;
                Ok(HostFrame::Reply(Reply { decision, reason }))
            }
            0x0B => empty(HostFrame::Quiesce),
            0x0C => payload.try_into().map(HostFrame::Ping).map_err(|_| shape),
            0x0D => match payload.as_chunks::<32>() {
                (digests, []) => Ok(HostFrame::ExecAllow(digests)),
                _ => Err(shape),
            },
            0x0E => match payload {
                [0] => Ok(HostFrame::ExecEnforce { workspace: false }),
                [1] => Ok(HostFrame::ExecEnforce { workspace: true }),
                [_] => Err(Reject::Value { kind, field: "workspace" }),
                _ => Err(shape),
            },
            0x11 => empty(HostFrame::RollCall),
            0x10 => Clock::ref_from_bytes(payload).map(HostFrame::Clock).map_err(|_| shape),
            0x0F => match payload {
                [stream] => Stream::from_byte(*stream)
                    .map(HostFrame::CloseOutput)
                    .ok_or(Reject::Value { kind, field: "stream" }),
                _ => Err(shape),
            },
            other => Err(Reject::Kind(other)),
        }
    }

    /// Appends the frame; `false`, and nothing appended, where a payload is over the limit.
    #[must_use]
    pub fn encode(&self, out: &mut Vec<u8>, id: u32, sequence: u32) -> bool {
        let mut put = |kind: u8, parts: &[&[u8]]| encode_frame(out, kind, id, sequence, parts);
        match self {
            HostFrame::Configure(configure) => put(0x01, &[configure.as_bytes()]),
            HostFrame::ExecBegin(begin) => put(0x02, &[begin.as_bytes()]),
            HostFrame::ExecText(bytes) => put(0x03, &[bytes]),
            HostFrame::ExecStart => put(0x04, &[]),
            HostFrame::Stdin(bytes) => put(0x05, &[bytes]),
            HostFrame::StdinEof => put(0x06, &[]),
            HostFrame::Signal(signal) => put(0x07, &[&[*signal]]),
            HostFrame::KillTree => put(0x08, &[]),
            HostFrame::Credit { stream, bytes } => put(0x09, &[&[*stream as u8], &bytes.to_le_bytes()]),
            HostFrame::Reply(reply) => put(0x0A, &[&[reply.decision as u8], reply.reason.as_bytes()]),
            HostFrame::Quiesce => put(0x0B, &[]),
            HostFrame::Ping(nonce) => put(0x0C, &[*nonce]),
            HostFrame::ExecAllow(digests) => put(0x0D, &[digests.as_flattened()]),
            HostFrame::Clock(clock) => put(0x10, &[clock.as_bytes()]),
            HostFrame::RollCall => put(0x11, &[]),
            HostFrame::ExecEnforce { workspace } => put(0x0E, &[&[u8::from(*workspace)]]),
            HostFrame::CloseOutput(stream) => put(0x0F, &[&[*stream as u8]]),
        }
    }
}

/// `stream u8 | bytes u32`; the same in both directions.
pub(crate) fn parse_credit(payload: &[u8]) -> Option<(Stream, u32)> {
    let (&stream, bytes) = payload.split_first()?;
    Some((Stream::from_byte(stream)?, u32::from_le_bytes(bytes.try_into().ok()?)))
}
