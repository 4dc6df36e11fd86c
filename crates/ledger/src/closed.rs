//! A ledger that ended, and what a crash left of one that did not.
//!
//! Guarantees: a [`ClosedLedger`] exists only through [`crate::LedgerWriter::close`], which demands RUN_END, or through
//! reading a whole file, strictly, that ends in it; so whoever holds one holds a run that is over. Its events are read
//! from the file, streaming, and checked again each time. [`reopen`] keeps every sealed block and says what was lost; it
//! changes nothing on disk.
//! Does not: prove that this is the chain that was written; that takes a checkpoint (`hotcell-verify`).
//! Called by the run at its end, by advisory findings, by reports.

use crate::checkpoint::Checkpoint;
use crate::event::Event;
use crate::file::open_regular;
use crate::reader::{Entry, LedgerReader, ReadError};
use std::fs::File;
use std::io::{self, Read as _, Take};
use std::path::{Path, PathBuf};

/// A run's ledger, closed.
#[derive(Debug)]
pub struct ClosedLedger {
    path: PathBuf,
    checkpoint: Checkpoint,
    events: u64,
}

/// Why a file is no closed ledger.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenClosedError {
    /// It can't be read, or is not whole.
    #[error("{path} is not a whole ledger: `hotcell verify` says what is wrong with it")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: ReadError,
    },
    /// It is whole and has no closing marker.
    #[error("{0} has no RUN_END: the run did not end, or goes on")]
    NotEnded(PathBuf),
}

impl ClosedLedger {
    pub(crate) fn from_writer(path: PathBuf, checkpoint: Checkpoint, events: u64) -> ClosedLedger {
        ClosedLedger { path, checkpoint, events }
    }

    /// Reads the file through.
    pub fn open(path: impl Into<PathBuf>) -> Result<ClosedLedger, OpenClosedError> {
        let path = path.into();
        let through = |path: &Path| {
            let file = open_regular(path).map_err(ReadError::Io)?;
            let mut reader = LedgerReader::new(file);
            while reader.next_entry()?.is_some() {}
            Ok(reader)
        };
        match through(&path) {
            Ok(reader) if reader.has_ended() => {
                Ok(ClosedLedger { path, checkpoint: reader.checkpoint(), events: reader.sealed_events() })
            }
            Ok(_) => Err(OpenClosedError::NotEnded(path)),
            Err(source) => Err(OpenClosedError::Read { path, source }),
        }
    }

    /// The head.
    pub fn checkpoint(&self) -> Checkpoint {
        self.checkpoint
    }

    /// How many events it has.
    pub fn event_count(&self) -> u64 {
        self.events
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its events in order, from the file. Ends with [`ReadError::Changed`] if the file is no longer what it was.
    pub fn events(&self) -> Result<Events, ReadError> {
        Events::open(&self.path, u64::MAX, self.checkpoint)
    }
}

/// The events of a ledger whose head is known.
#[derive(Debug)]
pub struct Events {
    reader: LedgerReader<Take<File>>,
    expected: Checkpoint,
    done: bool,
}

impl Events {
    fn open(path: &Path, len: u64, expected: Checkpoint) -> Result<Events, ReadError> {
        let file = open_regular(path).map_err(ReadError::Io)?;
        Ok(Events { reader: LedgerReader::new(file.take(len)), expected, done: false })
    }
}

impl Iterator for Events {
    type Item = Result<Event, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.done {
            match self.reader.next_entry() {
                Ok(Some(Entry::Event(event))) => return Some(Ok(event)),
                Ok(Some(_)) => {}
                Ok(None) => {
                    self.done = true;
                    return (self.reader.checkpoint() != self.expected).then_some(Err(ReadError::Changed));
                }
                Err(error) => {
                    self.done = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

/// What is left of a ledger.
#[derive(Debug)]
pub struct RecoveredLedger {
    path: PathBuf,
    /// The head of the blocks that are whole.
    pub checkpoint: Checkpoint,
    /// How many events they have.
    pub event_count: u64,
    /// How many bytes they have.
    pub sealed_len: u64,
    /// How many bytes follow them and are lost.
    pub lost_bytes: u64,
    /// Why reading ended there; `None` when nothing is lost.
    pub fault: Option<ReadError>,
    /// Whether the last event is RUN_END: if not, the run is INCOMPLETE.
    pub ended: bool,
}

impl RecoveredLedger {
    /// The events of the whole blocks.
    pub fn events(&self) -> Result<Events, ReadError> {
        Events::open(&self.path, self.sealed_len, self.checkpoint)
    }
}

/// Reads what is left of a ledger after a crash: every sealed block, and what was lost. Errors are the disk's.
pub fn reopen(path: impl Into<PathBuf>) -> io::Result<RecoveredLedger> {
    let path = path.into();
    let file = open_regular(&path)?;
    let file_len = file.metadata()?.len();
    let mut reader = LedgerReader::new(file);
    let fault = loop {
        match reader.next_entry() {
            Ok(Some(_)) => {}
            Ok(None) => break None,
            Err(ReadError::Io(error)) => return Err(error),
            Err(fault) => break Some(fault),
        }
    };
    let sealed_len = reader.sealed_len();
    Ok(RecoveredLedger {
        path,
        checkpoint: reader.checkpoint(),
        event_count: reader.sealed_events(),
        sealed_len,
        lost_bytes: file_len.saturating_sub(sealed_len),
        fault,
        ended: reader.has_ended(),
    })
}
