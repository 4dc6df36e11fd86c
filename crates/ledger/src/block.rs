//! The block header, and the proof that one event is in a block.
//!
//! ```text
//! height u64 | prev_hash 32 | event_count u64 | events_root 32 | timestamp_ns u64        88 bytes, big-endian
//! ```
//! The header's BLOCK digest is the next block's `prev_hash`, so the digest of the last one fixes every event of the
//! ledger. An [`EventProof`] shows one event to somebody who has only that header, without any other event.
//! Pure; anyone may call it.

use crate::digest::{Digest, Domain, commit};
use crate::event::{DecodeError, Event};
use crate::merkle::{Step, verify_inclusion};

/// Length of a block header in bytes.
pub const BLOCK_HEADER_LEN: usize = 88;

/// A block's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// Position in the chain, dense from 0.
    pub height: u64,
    /// BLOCK digest of the header before; zero for the first.
    pub prev_hash: Digest,
    /// How many events follow; never 0.
    pub event_count: u64,
    /// Merkle root over their EVENT digests.
    pub events_root: Digest,
    /// When the block was sealed, host clock, nanoseconds.
    pub timestamp_ns: u64,
}

impl BlockHeader {
    /// The canonical bytes.
    pub fn to_bytes(&self) -> [u8; BLOCK_HEADER_LEN] {
        let mut bytes = [0u8; BLOCK_HEADER_LEN];
        let fields: [&[u8]; 5] = [
            &self.height.to_be_bytes(),
            self.prev_hash.as_bytes(),
            &self.event_count.to_be_bytes(),
            self.events_root.as_bytes(),
            &self.timestamp_ns.to_be_bytes(),
        ];
        for (slot, byte) in bytes.iter_mut().zip(fields.into_iter().flatten()) {
            *slot = *byte;
        }
        bytes
    }

    /// The header with these bytes. Every string of 88 bytes is one; whether it fits is for the reader to check.
    pub fn from_bytes(bytes: &[u8; BLOCK_HEADER_LEN]) -> BlockHeader {
        let mut rest: &[u8] = bytes;
        BlockHeader {
            height: u64::from_be_bytes(take(&mut rest)),
            prev_hash: Digest::from_bytes(take(&mut rest)),
            event_count: u64::from_be_bytes(take(&mut rest)),
            events_root: Digest::from_bytes(take(&mut rest)),
            timestamp_ns: u64::from_be_bytes(take(&mut rest)),
        }
    }

    /// The BLOCK digest.
    pub fn digest(&self) -> Digest {
        commit(Domain::Block, &self.to_bytes())
    }
}

/// The next `N` bytes. The header's length is a constant, the sum of its fields: bytes never run out.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    match rest.split_first_chunk::<N>() {
        Some((head, tail)) => {
            *rest = tail;
            *head
        }
        None => [0; N],
    }
}

/// One event, and the path from it to its block's root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventProof {
    /// The event's canonical bytes.
    pub event_bytes: Vec<u8>,
    /// From the leaf upwards.
    pub path: Vec<Step>,
}

/// Why a proof shows nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProofError {
    /// The bytes are no event.
    #[error("the proof's bytes are not an event")]
    Event(#[source] DecodeError),
    /// The path does not lead to the header's root.
    #[error("the event is not in the block with this header: its path leads to another root")]
    NotIncluded,
}

impl EventProof {
    /// Proves `event` of a block whose events are `events`; `None` when the index is not in the block.
    pub fn new(events: &[Event], index: usize) -> Option<EventProof> {
        let leaves: Option<Vec<Digest>> = events.iter().map(|event| event.digest().ok()).collect();
        let path = crate::merkle::prove(&leaves?, index)?;
        Some(EventProof { event_bytes: events.get(index)?.to_bytes().ok()?, path })
    }

    /// The proven event. The header must come from a verified chain: the proof says nothing about it.
    pub fn verify(&self, header: &BlockHeader) -> Result<Event, ProofError> {
        let event = Event::decode(&self.event_bytes).map_err(ProofError::Event)?;
        let digest = commit(Domain::Event, &self.event_bytes);
        if verify_inclusion(&digest, &self.path, &header.events_root) {
            Ok(event)
        } else {
            Err(ProofError::NotIncluded)
        }
    }
}
