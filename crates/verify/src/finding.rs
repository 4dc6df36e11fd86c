//! What can be wrong with a bundle: one reason for each kind of tampering, as far as the bytes can tell them apart.
//!
//! Guarantees: reasons are stable names; a list of findings is bounded (20 for each reason, the rest counted).
//! Called by every check of this crate.

use core::fmt;
use std::collections::BTreeMap;

/// Findings that are listed for each reason.
pub(crate) const MAX_LISTED: usize = 20;

/// What a finding means for the bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth showing; the record stands.
    Notice,
    /// The run did not end, or its end is not on record.
    Incomplete,
    /// The bundle is not what the run left.
    NotIntact,
}

macro_rules! reasons {
    ($($(#[$meta:meta])* $variant:ident = $name:literal, $severity:ident;)+) => {
        /// Why a bundle is not intact, or not complete.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Reason { $($(#[$meta])* $variant),+ }

        impl Reason {
            /// Every reason.
            pub const ALL: &'static [Reason] = &[$(Reason::$variant),+];

            /// Its stable name.
            pub const fn as_str(self) -> &'static str {
                match self { $(Reason::$variant => $name),+ }
            }

            /// What it means for the bundle.
            pub const fn severity(self) -> Severity {
                match self { $(Reason::$variant => Severity::$severity),+ }
            }
        }
    };
}

reasons! {
    /// There is no `ledger.ames`.
    LedgerDeleted = "LEDGER_DELETED", NotIntact;
    /// The events of a block do not have the root that its header names, and all are there in order: bytes were altered.
    EventAltered = "EVENT_ALTERED", NotIntact;
    /// A header was altered; by one bit, where that can be told.
    HeaderAltered = "HEADER_ALTERED", NotIntact;
    /// Sequences are missing.
    EventRemoved = "EVENT_REMOVED", NotIntact;
    /// A sequence is there again.
    EventDuplicated = "EVENT_DUPLICATED", NotIntact;
    /// Sequences are out of order.
    EventReordered = "EVENT_REORDERED", NotIntact;
    /// An event that no header counts, or fewer than it counts.
    EventCount = "EVENT_COUNT", NotIntact;
    /// Heights are missing.
    BlockRemoved = "BLOCK_REMOVED", NotIntact;
    /// A block is there again.
    BlockDuplicated = "BLOCK_DUPLICATED", NotIntact;
    /// Blocks are out of order.
    BlockReordered = "BLOCK_REORDERED", NotIntact;
    /// A whole block that does not follow the one before it: of another chain, or sealed again.
    Spliced = "SPLICED", NotIntact;
    /// Bytes that are neither event nor header.
    Unreadable = "UNREADABLE", NotIntact;
    /// The ledger does not open with its marker.
    NoRunBegin = "NO_RUN_BEGIN", NotIntact;
    /// A run marker inside: events behind the end, or a second run.
    RunMarkerInside = "RUN_MARKER_INSIDE", NotIntact;
    /// The file ends inside a block.
    TruncatedTail = "TRUNCATED_TAIL", Incomplete;
    /// The ledger does not close with its marker.
    NoClosingMarker = "NO_CLOSING_MARKER", Incomplete;
    /// Fewer blocks than a checkpoint covers.
    Truncated = "TRUNCATED", NotIntact;
    /// The chain is whole and another than the checkpoint's.
    ChainRewritten = "CHAIN_REWRITTEN", NotIntact;
    /// The chain is damaged, and its block at the checkpoint is another.
    CheckpointMismatch = "CHECKPOINT_MISMATCH", NotIntact;
    /// The checkpoint is another run's.
    OtherRun = "CHECKPOINT_OF_OTHER_RUN", NotIntact;
    /// The ledger ended and there is no note.
    NoteMissing = "NOTE_MISSING", NotIntact;
    /// The note does not read as one.
    NoteUnreadable = "NOTE_UNREADABLE", NotIntact;
    /// The signature does not fit the note's text.
    BadSignature = "BAD_SIGNATURE", NotIntact;
    /// The note is signed, by another key than the one that is trusted.
    WrongKey = "WRONG_KEY", NotIntact;
    /// The note names no key and none was given.
    NoKey = "NO_KEY", NotIntact;
    /// The ledger ended after the bundle's note.
    NotCovered = "NOT_COVERED", NotIntact;
    /// An object that an event needs is not there.
    ObjectMissing = "OBJECT_MISSING", NotIntact;
    /// An object's content has another digest than its name.
    ObjectAltered = "OBJECT_ALTERED", NotIntact;
    /// An object that nothing names, in a run that ended.
    ObjectUnnamed = "OBJECT_UNNAMED", NotIntact;
    /// The same, where the run did not end: its event may have been lost.
    ObjectUnnamedYet = "OBJECT_NOT_YET_NAMED", Notice;
    /// The objects are not those that the note covers.
    ObjectSet = "OBJECT_SET_CHANGED", NotIntact;
    /// A file that the note covers is not there.
    FileMissing = "FILE_MISSING", NotIntact;
    /// A file has other content than the note covers.
    FileAltered = "FILE_ALTERED", NotIntact;
    /// A file that the note does not cover.
    FileExtra = "FILE_EXTRA", NotIntact;
    /// A link, a special file, or something too large, too deep or too many to look at.
    FileStrange = "FILE_STRANGE", NotIntact;
    /// A file in `files/` that the record does not say was copied out, or not with this content.
    CopyDisagrees = "COPY_DISAGREES", NotIntact;
    /// `spec.json` is not the one that the ledger names.
    SpecDisagrees = "SPEC_DISAGREES", NotIntact;
    /// The report, or the recorded verdict, is not what the record gives.
    VerdictDisagrees = "VERDICT_DISAGREES", NotIntact;
    /// `report.json` can't be read.
    ReportUnreadable = "REPORT_UNREADABLE", NotIntact;
    /// `reaped.json` is there: `hotcell` itself was killed, and what it left was ended later.
    Reaped = "REAPED", Notice;
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which kind.
    pub reason: Reason,
    /// Where and what, in words. May quote names out of the bundle, escaped.
    pub detail: String,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    list: Vec<Finding>,
    counts: BTreeMap<Reason, u64>,
}

impl Findings {
    /// Adds one.
    pub fn add(&mut self, reason: Reason, detail: impl Into<String>) {
        let count = self.counts.entry(reason).or_default();
        *count += 1;
        if *count <= u64::try_from(MAX_LISTED).unwrap_or(u64::MAX) {
            self.list.push(Finding { reason, detail: detail.into() });
        }
    }

    /// The listed ones, in the order in which they were found.
    pub fn list(&self) -> &[Finding] {
        &self.list
    }

    /// How many there were of each reason, listed or not.
    pub fn counts(&self) -> &BTreeMap<Reason, u64> {
        &self.counts
    }

    /// Whether there was one with this reason.
    pub fn has(&self, reason: Reason) -> bool {
        self.counts.contains_key(&reason)
    }

    /// The worst severity; `None` when nothing was found.
    pub fn worst(&self) -> Option<Severity> {
        self.counts.keys().map(|reason| reason.severity()).max()
    }

    /// How many are not listed.
    pub fn unlisted(&self) -> u64 {
        let all: u64 = self.counts.values().fold(0, |sum, n| sum.saturating_add(*n));
        all.saturating_sub(u64::try_from(self.list.len()).unwrap_or(u64::MAX))
    }

    /// Adds all of `other`'s.
    pub(crate) fn append(&mut self, other: Findings) {
        for (reason, count) in other.counts {
            *self.counts.entry(reason).or_default() += count;
        }
        self.list.extend(other.list);
    }
}
