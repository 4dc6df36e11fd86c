//! Reads a ledger strictly: whole blocks, roots, chain, dense heights and sequences; the first fault ends it.
//!
//! Guarantees: what it yields up to a [`Entry::BlockEnd`] is exactly what a writer sealed, and the head that
//! [`LedgerReader::checkpoint`] gives commits to it. Memory is flat, over any source and any bytes.
//! Does not: say what is wrong beyond the first fault (`hotcell-verify` does), check lineages, or know whether the chain
//! is *the* chain: that takes a checkpoint.
//! Called by whoever reads a record. An event counts once its block's end has come.

use crate::block::BlockHeader;
use crate::checkpoint::Checkpoint;
use crate::digest::Digest;
use crate::event::{DecodeError, Event, Payload};
use crate::scan::{Broken, Item, Scanner, Tail};
use std::io::{self, Read};

/// Why a ledger can't be read on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The source failed.
    #[error("failed to read the ledger")]
    Io(#[source] io::Error),
    /// A block has another height than its place.
    #[error("block {expected} says that it is block {found}: blocks were removed, repeated or moved")]
    Height {
        /// Its place.
        expected: u64,
        /// What it says.
        found: u64,
    },
    /// A block does not name the one before it.
    #[error("block {0} does not follow the block before it")]
    Chain(u64),
    /// A block without events.
    #[error("block {0} has no events")]
    Empty(u64),
    /// The events are not those that were sealed.
    #[error("the events of block {0} do not have the root that its header names")]
    Root(u64),
    /// A sequence is not the next one.
    #[error("event {found} is where event {expected} belongs")]
    Sequence {
        /// The next one.
        expected: u64,
        /// What is there.
        found: u64,
    },
    /// The file ends inside a block.
    #[error("the ledger ends inside a block, {} bytes after its last whole one", .0.lost_bytes)]
    Truncated(Box<Tail>),
    /// An event that no header counts.
    #[error("event {0} stands where a block's header belongs")]
    Surplus(u64),
    /// Bytes that are no event.
    #[error("the bytes at {} are no event", .0.offset)]
    Broken(Box<Broken>, #[source] DecodeError),
    /// The file changed since it was opened.
    #[error("the ledger was changed while it was read")]
    Changed,
}

/// What a ledger has next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A block begins.
    BlockStart(BlockHeader),
    /// An event of it.
    Event(Event),
    /// It ended and fits; its digest.
    BlockEnd(Digest),
}

/// Reads a ledger from any source, streaming.
#[derive(Debug)]
pub struct LedgerReader<R> {
    scanner: Scanner<R>,
    checkpoint: Checkpoint,
    next_sequence: u64,
    sealed_events: u64,
    sealed_len: u64,
    last_is_run_end: bool,
    ended: bool,
    failed: bool,
}

impl<R: Read> LedgerReader<R> {
    /// From the start of a ledger.
    pub fn new(source: R) -> LedgerReader<R> {
        LedgerReader {
            scanner: Scanner::new(source),
            checkpoint: Checkpoint { height: 0, head: Digest::ZERO },
            next_sequence: 0,
            sealed_events: 0,
            sealed_len: 0,
            last_is_run_end: false,
            ended: false,
            failed: false,
        }
    }

    /// What comes next; `None` at the end and after an error.
    #[inline]
    pub fn next_entry(&mut self) -> Result<Option<Entry>, ReadError> {
        if self.failed {
            return Ok(None);
        }
        let item = self.scanner.next_item().map_err(ReadError::Io);
        let entry = item.and_then(|item| item.map(|item| self.admit(item)).transpose());
        self.failed = entry.is_err();
        entry
    }

    #[inline]
    fn admit(&mut self, item: Item) -> Result<Entry, ReadError> {
        let height = self.checkpoint.height;
        match item {
            Item::Block(block) if block.header.height != height => {
                Err(ReadError::Height { expected: height, found: block.header.height })
            }
            Item::Block(block) if !block.follows() => Err(ReadError::Chain(height)),
            Item::Block(block) if block.header.event_count == 0 => Err(ReadError::Empty(height)),
            Item::Block(block) => Ok(Entry::BlockStart(block.header)),
            Item::Event(event) if event.sequence != self.next_sequence => {
                Err(ReadError::Sequence { expected: self.next_sequence, found: event.sequence })
            }
            Item::Event(event) => {
                self.next_sequence = self.next_sequence.saturating_add(1);
                self.last_is_run_end = event.payload == Payload::RunEnd;
                Ok(Entry::Event(event))
            }
            Item::BlockEnd(end) if !end.fits() => Err(ReadError::Root(height)),
            Item::BlockEnd(end) => {
                self.checkpoint = Checkpoint { height: height.saturating_add(1), head: end.digest };
                self.sealed_events = self.next_sequence;
                self.sealed_len = end.next_offset;
                self.ended = self.last_is_run_end;
                Ok(Entry::BlockEnd(end.digest))
            }
            Item::Surplus(event) => Err(ReadError::Surplus(event.sequence)),
            Item::Tail(tail) => Err(ReadError::Truncated(Box::new(tail))),
            Item::Broken(broken) => Err(ReadError::Broken(Box::new(broken), broken.why)),
        }
    }

    /// The head of the whole blocks so far.
    pub fn checkpoint(&self) -> Checkpoint {
        self.checkpoint
    }

    /// How many events the whole blocks so far have.
    pub fn sealed_events(&self) -> u64 {
        self.sealed_events
    }

    /// How many bytes the whole blocks so far have.
    pub fn sealed_len(&self) -> u64 {
        self.sealed_len
    }

    /// Whether the last event of the whole blocks so far is RUN_END.
    pub fn has_ended(&self) -> bool {
        self.ended
    }
}
