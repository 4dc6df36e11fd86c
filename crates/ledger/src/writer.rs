//! Appends events to `ledger.ames`, sealed in blocks.
//!
//! ```text
//!  append --> open block in memory --(events | bytes | age | seal_block | close)--> one write --(cadence)--> fsync
//! ```
//! Guarantees: sequences and heights are dense from 0; a block reaches the file in one write after it is sealed, so an
//! unsealed event is never on disk and whatever a crash leaves is sealed blocks and at most one partial one. The first
//! failure of the disk is returned at once and for ever: a poisoned writer takes nothing more, and the run that it
//! records must end KILLED. Memory is one block, bounded by [`Cadence`].
//! Does not: read a clock (timestamps are the caller's), check the lineage ([`crate::gate1`]), or decide who may say
//! what. Dropping a writer without [`LedgerWriter::close`] loses the open block, as a crash would.
//! Called by the run's one driver, which owns it.

use crate::block::{BLOCK_HEADER_LEN, BlockHeader};
use crate::checkpoint::Checkpoint;
use crate::closed::ClosedLedger;
use crate::digest::Digest;
use crate::event::{ActorId, EVENT_HEADER_LEN, Event, MAX_PAYLOAD_LEN, Payload, PayloadTooLong};
use crate::merkle::EventRoots;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A block has at most this many events, whatever the cadence asks for: bounds what one crash can lose.
pub const MAX_BLOCK_EVENTS: u64 = 65_536;
/// A block has at most this many bytes, one largest event more than which is the most that is ever buffered.
pub const MAX_BLOCK_BYTES: usize = 4 << 20;

const _: () = assert!(MAX_BLOCK_BYTES > BLOCK_HEADER_LEN + EVENT_HEADER_LEN + MAX_PAYLOAD_LEN);

/// When sealed blocks are forced to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncEvery {
    /// After every block: what is sealed survives a power loss.
    Block,
    /// After so many blocks, and on close.
    Blocks(u32),
    /// On close alone: what is sealed survives the death of the process, not of the machine.
    Close,
}

/// When a block is sealed and synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cadence {
    /// Seal at this many events; lowered to [`MAX_BLOCK_EVENTS`].
    pub max_events: u64,
    /// Seal before a block gets larger than this; lowered to [`MAX_BLOCK_BYTES`].
    pub max_bytes: usize,
    /// Seal once the oldest event of the block is this old, by the caller's timestamps.
    pub max_age_ns: u64,
    /// When to fsync.
    pub sync: SyncEvery,
}

impl Default for Cadence {
    /// At most 1024 events, 1 MiB and 100 ms are not yet on disk.
    fn default() -> Cadence {
        Cadence { max_events: 1024, max_bytes: 1 << 20, max_age_ns: 100_000_000, sync: SyncEvery::Block }
    }
}

/// What a writer writes to: a file, or in tests something that fails.
pub trait Sink: Write {
    /// Forces what was written to stable storage.
    fn sync(&mut self) -> io::Result<()>;
}

impl Sink for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}

impl<S: Sink + ?Sized> Sink for &mut S {
    fn sync(&mut self) -> io::Result<()> {
        (**self).sync()
    }
}

/// Why an event is not in the record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The ledger's file could not be made.
    #[error("failed to create the ledger {path}: choose an output directory that is new and writable")]
    Create {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The disk failed: the run must end KILLED.
    #[error(
        "failed to write the ledger after {sealed_events} sealed events: end the run, then free or mend the disk"
    )]
    Io {
        /// How many events had reached the file.
        sealed_events: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An earlier call failed, so that the record has ended.
    #[error("the ledger failed before ({0:?}) and takes nothing more: end the run")]
    Poisoned(io::ErrorKind),
    /// The event does not fit; nothing was recorded and the writer goes on.
    #[error(transparent)]
    PayloadTooLong(#[from] PayloadTooLong),
    /// The ledger has its closing marker.
    #[error("the ledger has its RUN_END: nothing can follow it")]
    Ended,
    /// The ledger lacks its closing marker.
    #[error("the ledger has no RUN_END: append it before closing")]
    NotEnded,
}

/// Appends to one ledger.
#[derive(Debug)]
pub struct LedgerWriter<S: Sink = File> {
    sink: S,
    path: PathBuf,
    cadence: Cadence,
    /// Room for the header, then the open block's events.
    block: Vec<u8>,
    scratch_start_ns: u64,
    last_ns: u64,
    roots: EventRoots,
    sequence: u64,
    sealed_events: u64,
    height: u64,
    head: Digest,
    blocks_unsynced: u32,
    ended: bool,
    poisoned: Option<io::ErrorKind>,
}

impl LedgerWriter<File> {
    /// Makes a new ledger; an existing file is never touched. The directory entry is synced, so that the ledger itself
    /// survives a power loss.
    pub fn create(path: impl Into<PathBuf>, cadence: Cadence) -> Result<LedgerWriter, WriteError> {
        let path = path.into();
        let create = |path: &Path| -> io::Result<File> {
            let file = File::options().write(true).create_new(true).open(path)?;
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(parent)?.sync_all()?;
            Ok(file)
        };
        match create(&path) {
            Ok(file) => Ok(LedgerWriter { path, ..LedgerWriter::over(file, cadence) }),
            Err(source) => Err(WriteError::Create { path, source }),
        }
    }

    /// Seals what is open, syncs, and gives the ledger that ended. Refused before RUN_END.
    pub fn close(mut self) -> Result<ClosedLedger, WriteError> {
        let checkpoint = self.finish()?;
        let path = std::mem::take(&mut self.path);
        Ok(ClosedLedger::from_writer(path, checkpoint, self.sequence))
    }
}

impl<S: Sink> LedgerWriter<S> {
    /// A ledger into any sink.
    pub fn over(sink: S, cadence: Cadence) -> LedgerWriter<S> {
        let mut block = Vec::with_capacity(BLOCK_HEADER_LEN + 4096);
        block.resize(BLOCK_HEADER_LEN, 0);
        LedgerWriter {
            sink,
            path: PathBuf::new(),
            cadence: Cadence {
                max_events: cadence.max_events.clamp(1, MAX_BLOCK_EVENTS),
                max_bytes: cadence.max_bytes.min(MAX_BLOCK_BYTES),
                ..cadence
            },
            block,
            scratch_start_ns: 0,
            last_ns: 0,
            roots: EventRoots::default(),
            sequence: 0,
            sealed_events: 0,
            height: 0,
            head: Digest::ZERO,
            blocks_unsynced: 0,
            ended: false,
            poisoned: None,
        }
    }

    /// Records an event, with the next sequence, and returns it as recorded. It is on disk once its block is sealed.
    pub fn append(
        &mut self,
        actor: ActorId,
        parent: Option<ActorId>,
        payload: Payload,
        timestamp_ns: u64,
    ) -> Result<Event, WriteError> {
        self.check_alive()?;
        if self.ended {
            return Err(WriteError::Ended);
        }
        let len = EVENT_HEADER_LEN + payload.encoded_len();
        if self.roots.count() > 0 && self.block.len() + len > self.cadence.max_bytes {
            self.seal_block(self.last_ns)?;
        }
        let event = Event { sequence: self.sequence, timestamp_ns, actor, parent, payload };
        let start = self.block.len();
        event.encode_into(&mut self.block)?;
        if self.roots.count() == 0 {
            self.scratch_start_ns = timestamp_ns;
        }
        self.roots.push(self.block.get(start..).unwrap_or_default());
        self.sequence += 1;
        self.last_ns = timestamp_ns;
        self.ended = event.payload == Payload::RunEnd;
        if self.roots.count() >= self.cadence.max_events || self.is_due(timestamp_ns) {
            self.seal_block(timestamp_ns)?;
        }
        Ok(event)
    }

    /// Seals the open block if it is as old as the cadence allows: for a caller whose run is quiet.
    pub fn tick(&mut self, timestamp_ns: u64) -> Result<(), WriteError> {
        self.check_alive()?;
        if self.is_due(timestamp_ns) { self.seal_block(timestamp_ns) } else { Ok(()) }
    }

    fn is_due(&self, now_ns: u64) -> bool {
        self.roots.count() > 0 && now_ns.saturating_sub(self.scratch_start_ns) >= self.cadence.max_age_ns
    }

    /// Seals the open block now and writes it; with nothing open, does nothing.
    pub fn seal_block(&mut self, timestamp_ns: u64) -> Result<(), WriteError> {
        self.check_alive()?;
        if self.roots.count() == 0 {
            return Ok(());
        }
        let header = BlockHeader {
            height: self.height,
            prev_hash: self.head,
            event_count: self.roots.count(),
            events_root: self.roots.root(),
            timestamp_ns,
        };
        if let Some(slot) = self.block.first_chunk_mut::<BLOCK_HEADER_LEN>() {
            *slot = header.to_bytes();
        }
        self.sink.write_all(&self.block).map_err(|e| self.poison(e))?;
        self.blocks_unsynced += 1;
        let due = match self.cadence.sync {
            SyncEvery::Block => true,
            SyncEvery::Blocks(n) => self.blocks_unsynced >= n,
            SyncEvery::Close => false,
        };
        if due {
            self.sync()?;
        }
        self.head = header.digest();
        self.height += 1;
        self.sealed_events = self.sequence;
        self.block.truncate(BLOCK_HEADER_LEN);
        self.roots.clear();
        Ok(())
    }

    /// Seals and syncs a ledger that has its RUN_END, and gives its head.
    pub fn finish(&mut self) -> Result<Checkpoint, WriteError> {
        self.check_alive()?;
        if !self.ended {
            return Err(WriteError::NotEnded);
        }
        self.seal_block(self.last_ns)?;
        self.sync()?;
        Ok(self.checkpoint())
    }

    /// The head of what is sealed so far.
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint { height: self.height, head: self.head }
    }

    /// How many events were recorded, sealed or not.
    pub fn events(&self) -> u64 {
        self.sequence
    }

    /// Whether a failure ended this record.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.is_some()
    }

    fn sync(&mut self) -> Result<(), WriteError> {
        self.blocks_unsynced = 0;
        // A failed fsync may drop the dirty pages and succeed when tried again: never try again.
        self.sink.flush().and_then(|()| self.sink.sync()).map_err(|e| self.poison(e))
    }

    fn check_alive(&self) -> Result<(), WriteError> {
        self.poisoned.map_or(Ok(()), |kind| Err(WriteError::Poisoned(kind)))
    }

    fn poison(&mut self, source: io::Error) -> WriteError {
        self.poisoned = Some(source.kind());
        WriteError::Io { sealed_events: self.sealed_events, source }
    }
}
