//! The AMES-V1 ledger: the record that must still stand when all else has failed.
//!
//! | module | in one sentence |
//! |---|---|
//! | [`digest`] | digests and domain-separated commitments |
//! | [`event`], `codec` | typed events and their canonical bytes |
//! | [`merkle`] | the root over a block's events, and inclusion proofs |
//! | [`block`] | the 88-byte header, and the proof of one event against it |
//! | [`gate1`] | is the record well-formed? |
//! | [`writer`] | appends, seals and syncs `ledger.ames` |
//! | [`reader`], [`scan`] | reads it, streaming: strict, and for finding out what is wrong |
//! | [`closed`] | a ledger that ended; what a crash left of one |
//! | [`checkpoint`], [`note`], [`key`] | the head, signed (C2SP signed note, ed25519) |
//! | [`bundle`] | a run's directory: reads it as hostile input, and seals it |
//! | [`mod@file`] | files that somebody names: no waiting, nothing but files, a bound |
//!
//! Everything that decodes takes its input as hostile: no bytes make it panic, and memory is bounded by constants, never
//! by what the bytes claim. Only [`writer`], [`closed`], [`key`], [`bundle`] and [`mod@file`] touch the file system; nothing reads a
//! clock, the environment or a terminal.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod block;
pub mod bundle;
pub mod checkpoint;
pub mod closed;
mod codec;
pub mod digest;
pub mod event;
pub mod file;
pub mod gate1;
pub mod key;
mod lanes;
pub mod merkle;
pub mod note;
pub mod reader;
pub mod scan;
pub mod writer;

pub use block::{BlockHeader, EventProof};
pub use checkpoint::{Checkpoint, NoteBody};
pub use closed::{ClosedLedger, RecoveredLedger, reopen};
pub use digest::{Digest, Domain, commit};
pub use event::{
    ActorId, Capability, DecodeError, Event, EventType, FileOp, NfcString, Payload, PayloadTooLong, Protocol,
};
pub use gate1::{Code, GateReport, Lineage, Violation};
pub use key::{SigningKey, VerifierKey};
pub use reader::{LedgerReader, ReadError};
pub use writer::{Cadence, LedgerWriter, WriteError};
