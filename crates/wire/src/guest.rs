//! What the guest sends. Hostile until proven otherwise.

use crate::frame::{FrameHeader, Reject, encode_frame};
use crate::{MAX_JUSTIFICATION, MAX_RESOURCE, MAX_TEXT, STREAM_CHUNK};
use alloc::vec::Vec;
use zerocopy::byteorder::little_endian::{I32, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

/// The init is up and configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready<'a> {
    /// The guest kernel's release.
    pub kernel_release: &'a str,
    /// Nanoseconds from kernel start to this frame, by the guest's clock.
    pub uptime_ns: u64,
}

/// How an exec ended, as the init saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(u8)]
pub enum ExecEnd {
    /// `code` is the exit code.
    Exited = 0,
    /// `code` is the signal.
    Signalled = 1,
    /// It never started: `code` is the errno, `stage` where.
    NotStarted = 2,
    /// The kernel killed it for want of memory; `code` is the signal.
    OutOfMemory = 3,
}

/// Where the start of an exec failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(u8)]
pub enum Stage {
    /// Not at all.
    None = 0,
    /// Making the process.
    Spawn = 1,
    /// Entering its namespaces and dropping privileges.
    Confine = 2,
    /// Changing to the working directory.
    Chdir = 3,
    /// Executing the program.
    Exec = 4,
}

/// The end of an exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExecEnded {
    /// How.
    pub how: ExecEnd,
    /// Where, if it never started.
    pub stage: Stage,
    /// 1: processes of its tree were still there and were killed.
    pub stragglers: u8,
    /// Zero.
    pub reserved: u8,
    /// Exit code, signal or errno.
    pub code: I32,
}

/// A capability that something inside asks for. `id` of the frame: the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The exec on whose behalf, as the guest says; 0: unknown.
    pub exec: u32,
    /// AMES-V1 capability number; the host checks it.
    pub capability: u8,
    /// What exactly; at most 512 characters are accepted later.
    pub resource: &'a [u8],
    /// Recorded, never consulted.
    pub justification: &'a [u8],
}

/// What a claim is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(u8)]
pub enum ClaimKind {
    /// A process began: `text` is its executable.
    Spawn = 1,
    /// A process ended: `value` is its code.
    Exit = 2,
    /// A file changed: `value` is the operation, `text` the path.
    File = 3,
    /// A tool was called: `text` is its name.
    Tool = 4,
    /// A capability was asked for: `value` is `capability | granted << 8`, `text` the reason.
    Capability = 5,
    /// A network request was made: `value` is the protocol, `text` the destination.
    Network = 6,
}

/// The guest's own account of something. Testimony: recorded if it fits the
/// live lineage, compared with the evidence afterwards, never acted upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim<'a> {
    /// What about.
    pub kind: ClaimKind,
    /// Who, by a number of the guest's choosing.
    pub subject: u64,
    /// Whose child, by a number of the guest's choosing.
    pub parent: u64,
    /// See [`ClaimKind`].
    pub value: i32,
    /// See [`ClaimKind`]; at most [`MAX_RESOURCE`] bytes.
    pub text: &'a [u8],
}

/// Why a file was executed or not, as the guest says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(u8)]
pub enum ExecRule {
    /// Executed: on `/workspace`, where the policy allows it.
    Workspace = 1,
    /// Refused: its digest is not on the list.
    Unknown = 2,
    /// Refused: it is not on the root image.
    Elsewhere = 3,
    /// Refused: it could not be read.
    Unreadable = 4,
    /// Refused: the process belongs to no exec of the host's, or to one whose token is used up.
    NoToken = 5,
    /// Refused: the exec's token is bound to another file.
    BinaryMismatch = 6,
    /// Refused: the exec has ended.
    DeadParent = 7,
}

/// A file that was executed or refused. Testimony, like all of the guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecDecision<'a> {
    /// The exec in whose tree; 0: unknown.
    pub exec: u32,
    /// Which rule decided.
    pub rule: ExecRule,
    /// Decisions before this one that were not told, for want of room.
    pub untold: u32,
    /// The file's BLAKE3; zero where it was not computed.
    pub digest: [u8; 32],
    /// Its path, as the workload sees it; at most [`MAX_RESOURCE`] bytes.
    pub path: &'a [u8],
}

#[derive(TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ExecDecisionHead {
    exec: U32,
    rule: ExecRule,
    reserved: [u8; 3],
    untold: U32,
    digest: [u8; 32],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RequestHead {
    exec: U32,
    capability: u8,
    reserved: [u8; 3],
    resource_len: U32,
}

#[derive(TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ClaimHead {
    kind: ClaimKind,
    reserved: [u8; 3],
    value: I32,
    subject: U64,
    parent: U64,
}

/// A frame from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GuestFrame<'a> {
    /// 0x41
    Ready(Ready<'a>),
    /// 0x42, id: the exec: its first process runs
    Started,
    /// 0x43, id: the exec
    Stdout(&'a [u8]),
    /// 0x44, id: the exec
    Stderr(&'a [u8]),
    /// 0x45, id: the exec: both outputs are closed or given up, and this is its end
    ExecEnded(&'a ExecEnded),
    /// 0x46, id: the exec: so many more stdin bytes may be sent
    StdinCredit(u32),
    /// 0x47, id: the exec: nobody reads its stdin any more
    StdinClosed,
    /// 0x48, id: the request
    Request(Request<'a>),
    /// 0x49
    Claim(Claim<'a>),
    /// 0x4A: the workload is gone and the disks are written out
    Quiesced,
    /// 0x4B
    Pong(&'a [u8; 32]),
    /// 0x4C: something for people; at most [`MAX_TEXT`] bytes
    Log(&'a [u8]),
    /// 0x4D: the init can't go on; at most [`MAX_TEXT`] bytes
    Fatal(&'a [u8]),
    /// 0x4E: a file was executed by exception, or refused
    ExecDecision(ExecDecision<'a>),
}

impl<'a> GuestFrame<'a> {
    /// Reads the payload of a frame that came from the guest.
    ///
    /// # Errors
    /// The guest broke the protocol.
    pub fn parse(header: FrameHeader, payload: &'a [u8]) -> Result<GuestFrame<'a>, Reject> {
        let kind = header.kind;
        let shape = Reject::Shape { kind };
        let bad = |field| Reject::Value { kind, field };
        let empty = |frame| if payload.is_empty() { Ok(frame) } else { Err(shape) };
        let data = || if payload.len() <= STREAM_CHUNK { Ok(payload) } else { Err(shape) };
        let text = || if payload.len() <= MAX_TEXT { Ok(payload) } else { Err(shape) };
        match kind {
            0x41 => {
                let (uptime, release) = payload.split_first_chunk::<8>().ok_or(shape)?;
                let kernel_release = core::str::from_utf8(release)
                    .ok()
                    .filter(|release| release.len() <= 128)
                    .ok_or(bad("kernel_release"))?;
                Ok(GuestFrame::Ready(Ready { kernel_release, uptime_ns: u64::from_le_bytes(*uptime) }))
            }
            0x42 => empty(GuestFrame::Started),
            0x43 => data().map(GuestFrame::Stdout),
            0x44 => data().map(GuestFrame::Stderr),
            0x45 => ExecEnded::try_ref_from_bytes(payload).map(GuestFrame::ExecEnded).map_err(|_| shape),
            0x46 => match payload.try_into() {
                Ok(bytes) => Ok(GuestFrame::StdinCredit(u32::from_le_bytes(bytes))),
                Err(_) => Err(shape),
            },
            0x47 => empty(GuestFrame::StdinClosed),
            0x48 => {
                let (head, rest) = RequestHead::ref_from_prefix(payload).map_err(|_| shape)?;
                let (resource, justification) =
                    rest.split_at_checked(head.resource_len.get() as usize).ok_or(shape)?;
                if resource.len() > MAX_RESOURCE {
                    return Err(bad("resource"));
                }
                if justification.len() > MAX_JUSTIFICATION {
                    return Err(bad("justification"));
                }
                Ok(GuestFrame::Request(Request {
                    exec: head.exec.get(),
                    capability: head.capability,
                    resource,
                    justification,
                }))
            }
            0x49 => {
                let (head, text) = ClaimHead::try_ref_from_prefix(payload).map_err(|_| shape)?;
                if text.len() > MAX_RESOURCE {
                    return Err(bad("text"));
                }
                Ok(GuestFrame::Claim(Claim {
                    kind: head.kind,
                    subject: head.subject.get(),
                    parent: head.parent.get(),
                    value: head.value.get(),
                    text,
                }))
            }
            0x4A => empty(GuestFrame::Quiesced),
            0x4B => payload.try_into().map(GuestFrame::Pong).map_err(|_| shape),
            0x4C => text().map(GuestFrame::Log),
            0x4D => text().map(GuestFrame::Fatal),
            0x4E => {
                let (head, path) = ExecDecisionHead::try_ref_from_prefix(payload).map_err(|_| shape)?;
                if path.len() > MAX_RESOURCE {
                    return Err(bad("path"));
                }
                Ok(GuestFrame::ExecDecision(ExecDecision {
                    exec: head.exec.get(),
                    rule: head.rule,
                    untold: head.untold.get(),
                    digest: head.digest,
                    path,
                }))
            }
            other => Err(Reject::Kind(other)),
        }
    }

    /// Appends the frame; `false`, and nothing appended, where a payload is over the limit.
    #[must_use]
    pub fn encode(&self, out: &mut Vec<u8>, id: u32, sequence: u32) -> bool {
        let mut put = |kind: u8, parts: &[&[u8]]| encode_frame(out, kind, id, sequence, parts);
        match self {
            GuestFrame::Ready(ready) => {
                put(0x41, &[&ready.uptime_ns.to_le_bytes(), ready.kernel_release.as_bytes()])
            }
            GuestFrame::Started => put(0x42, &[]),
            GuestFrame::Stdout(bytes) => put(0x43, &[bytes]),
            GuestFrame::Stderr(bytes) => put(0x44, &[bytes]),
            GuestFrame::ExecEnded(ended) => put(0x45, &[ended.as_bytes()]),
            GuestFrame::StdinCredit(bytes) => put(0x46, &[&bytes.to_le_bytes()]),
            GuestFrame::StdinClosed => put(0x47, &[]),
            GuestFrame::Request(request) => {
                let head = RequestHead {
                    exec: U32::new(request.exec),
                    capability: request.capability,
                    reserved: [0; 3],
                    resource_len: U32::new(request.resource.len() as u32),
                };
                put(0x48, &[head.as_bytes(), request.resource, request.justification])
            }
            GuestFrame::Claim(claim) => {
                let head = ClaimHead {
                    kind: claim.kind,
                    reserved: [0; 3],
                    value: I32::new(claim.value),
                    subject: U64::new(claim.subject),
                    parent: U64::new(claim.parent),
                };
                put(0x49, &[head.as_bytes(), claim.text])
            }
            GuestFrame::Quiesced => put(0x4A, &[]),
            GuestFrame::Pong(nonce) => put(0x4B, &[*nonce]),
            GuestFrame::Log(text) => put(0x4C, &[text]),
            GuestFrame::Fatal(text) => put(0x4D, &[text]),
            GuestFrame::ExecDecision(decision) => {
                let head = ExecDecisionHead {
                    exec: U32::new(decision.exec),
                    rule: decision.rule,
                    reserved: [0; 3],
                    untold: U32::new(decision.untold),
                    digest: decision.digest,
                };
                put(0x4E, &[head.as_bytes(), decision.path])
            }
        }
    }
}
