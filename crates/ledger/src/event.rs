//! Events and their canonical bytes.
//!
//! ```text
//! event_type u8 | sequence u64 | timestamp_ns u64 | actor_id u64 | parent_id u64 | payload_len u32 | reserved u32 = 0 | payload
//! ```
//! All integers are big-endian. Encoding is total and canonical: one event has
//! exactly one byte string, and decoding accepts exactly those strings.
//! Strings are brought to Unicode NFC when they are *made* ([`NfcString::new`]);
//! a decoder takes the bytes as they are, so that verifiers built on different
//! Unicode versions never disagree. The encoding itself is in `codec.rs`.

use crate::digest::Digest;
use core::fmt;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// Length of an event's header in bytes.
pub const EVENT_HEADER_LEN: usize = 41;
/// Longest payload in bytes (AMES-V1): anything larger is content-addressed.
pub const MAX_PAYLOAD_LEN: usize = 1 << 20;
/// The `parent_id` that marks a root; no actor may have this id.
pub const NO_PARENT: u64 = u64::MAX;

/// An actor. Never [`NO_PARENT`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ActorId(u64);

impl ActorId {
    /// The host's supervisor.
    pub const HOST: ActorId = ActorId(0xFFFF_FFFF_FFFF_FFFE);
    /// The virtual machine, as the host sees it.
    pub const VM: ActorId = ActorId(0xFFFF_FFFF_FFFF_FFFD);
    /// The first id that the host assigns to an actor inside the guest.
    pub const FIRST_GUEST: ActorId = ActorId(0x1000);
    /// The first id of the host-observed band.
    pub const HOST_BAND_START: u64 = 0xFFFF_FFFF_FFFF_FF00;

    /// Any id but [`NO_PARENT`].
    pub const fn new(id: u64) -> Option<ActorId> {
        if id == NO_PARENT { None } else { Some(ActorId(id)) }
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Whether events by this actor are host-observed (evidence).
    pub const fn is_host_band(self) -> bool {
        self.0 >= Self::HOST_BAND_START
    }
}

impl fmt::Debug for ActorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ActorId::HOST => f.write_str("HOST"),
            ActorId::VM => f.write_str("VM"),
            ActorId(id) => write!(f, "{id:#x}"),
        }
    }
}

impl fmt::Display for ActorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A string in Unicode NFC (when made here) or as a record has it (when decoded).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct NfcString(String);

impl NfcString {
    /// Normalises to NFC.
    pub fn new(text: &str) -> NfcString {
        match is_nfc_quick(text.chars()) {
            IsNormalized::Yes => NfcString(text.to_owned()),
            _ => NfcString(text.nfc().collect()),
        }
    }

    /// The text as a record has it, normalised or not.
    pub(crate) fn as_recorded(text: &str) -> NfcString {
        NfcString(text.to_owned())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for NfcString {
    fn from(text: &str) -> NfcString {
        NfcString::new(text)
    }
}

impl fmt::Debug for NfcString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for NfcString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! byte_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $value:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $name { $($(#[$vmeta])* $variant = $value),+ }

        impl $name {
            /// Every value, in the order of the numbers.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The value with this number; the numbers are fixed for ever by AMES-V1.
            pub const fn from_byte(byte: u8) -> Option<$name> {
                match byte { $($value => Some($name::$variant),)+ _ => None }
            }

            /// The number.
            pub const fn byte(self) -> u8 { self as u8 }
        }
    };
}

byte_enum! {
    /// The kind of an event.
    EventType {
        /// An actor begins.
        ProcessSpawn = 0x01,
        /// An actor ends.
        ProcessExit = 0x02,
        /// A file changed.
        FileMutation = 0x03,
        /// A network request.
        NetworkRequest = 0x04,
        /// A tool call; in the host band under a reserved `hotcell.*` name, a host fact.
        ToolCall = 0x05,
        /// A capability was asked for and decided.
        CapabilityRequest = 0x06,
        /// A memory mapping.
        MemoryMap = 0x07,
        /// The run begins; the host's alone.
        RunBegin = 0x7E,
        /// The run ends; the host's alone.
        RunEnd = 0x7F,
    }
}

byte_enum! {
    /// What was done to a file.
    FileOp {
        /// It came into being.
        Create = 1,
        /// Its bytes changed.
        Write = 2,
        /// It went.
        Delete = 3,
        /// Its mode or owner changed.
        Chmod = 4,
        /// It is a link that came or changed.
        Symlink = 5,
        /// It has another name.
        Rename = 6,
    }
}

byte_enum! {
    /// A network protocol.
    Protocol {
        /// None of the others.
        Other = 0,
        /// TCP.
        Tcp = 1,
        /// UDP.
        Udp = 2,
        /// HTTP.
        Http = 3,
        /// HTTPS.
        Https = 4,
        /// DNS.
        Dns = 5,
    }
}

byte_enum! {
    /// A capability that a workload may ask for.
    Capability {
        /// A connection out of the machine; never granted.
        NetEgress = 1,
        /// A package; at best deferred to an image rebuild.
        PackageInstall = 2,
        /// Writing a file.
        FileWrite = 3,
        /// Starting a process.
        ProcessSpawn = 4,
        /// A system call outside the filter; never granted.
        RawSyscall = 5,
        /// More privilege; never granted.
        PrivilegeRaise = 6,
    }
}

impl Capability {
    /// The name that AMES-V1 gives it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Capability::NetEgress => "NET_EGRESS",
            Capability::PackageInstall => "PACKAGE_INSTALL",
            Capability::FileWrite => "FILE_WRITE",
            Capability::ProcessSpawn => "PROCESS_SPAWN",
            Capability::RawSyscall => "RAW_SYSCALL",
            Capability::PrivilegeRaise => "PRIVILEGE_RAISE",
        }
    }

    /// The capability of this name.
    pub fn from_name(name: &str) -> Option<Capability> {
        Capability::ALL.iter().copied().find(|capability| capability.as_str() == name)
    }
}

/// What an event says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Payload {
    /// 0x01
    ProcessSpawn {
        /// Digest of the executable file; zero where it is not known.
        binary: Digest,
        /// Digest of the argv object.
        argv: Digest,
        /// Working directory.
        cwd: NfcString,
    },
    /// 0x02: the exit code, negative for a signal.
    ProcessExit {
        /// Exit code; `-n` for a death by signal n.
        code: i32,
    },
    /// 0x03
    FileMutation {
        /// What was done.
        op: FileOp,
        /// Which file.
        path: NfcString,
        /// Content before; zero: did not exist.
        before: Digest,
        /// Content after; zero: does not exist.
        after: Digest,
    },
    /// 0x04
    NetworkRequest {
        /// Which protocol.
        protocol: Protocol,
        /// Where to.
        destination: NfcString,
        /// Bytes sent.
        bytes_out: u64,
        /// Bytes received.
        bytes_in: u64,
    },
    /// 0x05
    ToolCall {
        /// The tool's name.
        tool: NfcString,
        /// Digest of the arguments object.
        args: Digest,
        /// Digest of the result.
        result: Digest,
    },
    /// 0x06
    CapabilityRequest {
        /// What was asked for.
        capability: Capability,
        /// Whether it was granted.
        granted: bool,
        /// Why.
        reason: NfcString,
    },
    /// 0x07
    MemoryMap {
        /// Start address.
        addr: u64,
        /// Length in bytes.
        length: u64,
        /// Protection bits.
        prot: u8,
    },
    /// 0x7E
    RunBegin,
    /// 0x7F
    RunEnd,
}

impl Payload {
    /// The kind of event that carries this payload.
    pub const fn event_type(&self) -> EventType {
        match self {
            Payload::ProcessSpawn { .. } => EventType::ProcessSpawn,
            Payload::ProcessExit { .. } => EventType::ProcessExit,
            Payload::FileMutation { .. } => EventType::FileMutation,
            Payload::NetworkRequest { .. } => EventType::NetworkRequest,
            Payload::ToolCall { .. } => EventType::ToolCall,
            Payload::CapabilityRequest { .. } => EventType::CapabilityRequest,
            Payload::MemoryMap { .. } => EventType::MemoryMap,
            Payload::RunBegin => EventType::RunBegin,
            Payload::RunEnd => EventType::RunEnd,
        }
    }
}

/// One event of a run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// Position in the ledger, dense from 0.
    pub sequence: u64,
    /// Host clock, nanoseconds.
    pub timestamp_ns: u64,
    /// Who.
    pub actor: ActorId,
    /// Whose child the actor is; `None` for a root.
    pub parent: Option<ActorId>,
    /// What.
    pub payload: Payload,
}

/// Why bytes are not an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Fewer bytes than a header.
    #[error("{have} bytes where an event's header needs {EVENT_HEADER_LEN}")]
    ShortHeader {
        /// Bytes at hand.
        have: usize,
    },
    /// The reserved field is not zero.
    #[error("the reserved field is {0:#x}, not 0")]
    Reserved(u32),
    /// The type byte is unknown.
    #[error("unknown event type {0:#04x}")]
    UnknownType(u8),
    /// The actor has the reserved id.
    #[error("the actor id is the reserved NO_PARENT")]
    ReservedActor,
    /// The payload is longer than AMES-V1 allows.
    #[error("a payload of {0} bytes, over {MAX_PAYLOAD_LEN}")]
    PayloadTooLong(usize),
    /// Fewer payload bytes follow than the header says.
    #[error("{have} payload bytes where the header says {says}")]
    ShortPayload {
        /// What the header says.
        says: usize,
        /// What is there.
        have: usize,
    },
    /// Bytes follow the event.
    #[error("{0} bytes after the event")]
    Trailing(usize),
    /// The payload's own fields do not fill it exactly.
    #[error("the payload's fields do not match its length")]
    PayloadShape,
    /// A value that the enumeration does not have.
    #[error("{value} is no {field}")]
    UnknownValue {
        /// Which field.
        field: &'static str,
        /// The byte.
        value: u8,
    },
    /// A string that is not UTF-8.
    #[error("a string is not UTF-8")]
    NotUtf8,
}

/// Why an event can't be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the payload has {0} bytes, over {MAX_PAYLOAD_LEN}: put the data into an object and name its digest")]
pub struct PayloadTooLong(pub usize);
