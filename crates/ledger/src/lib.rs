//! AMES-V1 ledger.
#![forbid(unsafe_code)]

pub mod digest;
pub mod event;

pub use digest::{Digest, Domain, commit};
pub use event::{ActorId, Capability, DecodeError, Event, EventType, FileOp, NfcString, Payload, Protocol};
