//! Recomputes a bundle and its verdict from the record alone.
//!
//! For strangers: whoever holds a bundle, and at best a checkpoint that left the run's reach in time, learns whether the
//! record is whole, what was done to it if not, and what verdict the record itself gives. `report.json` is never trusted.
//!
//! ```text
//!  bundle --> chain.rs   blocks, roots, chain, sequences: what happened to them      \
//!         --> anchors.rs checkpoint notes: truncation, rewriting, keys                \   findings, each with
//!         --> objects.rs every object whole, wanted and named                          >  its own reason
//!         --> files.rs   every other file, by the note's lines                        /
//!         --> verdict.rs the verdict, folded from the events again                   /
//! ```
//! Guarantees: a bundle is hostile input. No bytes panic; no link is followed and no special file opened; memory is
//! bounded by constants (one buffer, the lineage of [`hotcell_ledger::gate1::MAX_TRACKED`] entries, the names of at most
//! [`hotcell_ledger::bundle::MAX_FILES`] files), whatever the bundle claims. Time is not bounded by less than the bundle's
//! length. Nothing is written.
//! Does not: depend on anything of the VM side, say whose key an unknown key is, or see rewriting by whoever holds the
//! signing key, unless an older checkpoint is given.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

mod anchors;
mod chain;
mod command;
mod dense;
mod files;
mod finding;
mod objects;
mod render;
mod timeline;
mod verdict;
mod verify;

pub use anchors::{CheckedNote, Identity};
pub use command::{Answer, AskedWrongly, Question, read_keys};
pub use finding::{Finding, Findings, Reason, Severity};
pub use hotcell_decide::{SeenProcess, Verdict};
pub use objects::{ObjectFault, ObjectSource};
pub use render::{counted, to_json, to_text};
pub use timeline::{Lane, Moment, Seen, Tick, Timeline};
pub use verdict::Derived;
pub use verify::{Options, Outcome, Verification, VerifiedBundle, VerifyError, verify_bundle};
