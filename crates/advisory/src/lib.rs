//! Opinions on runs that are over.
//!
//! Two layers give them: the fingerprint (L5: does the run ask as its reference runs
//! did?) and the drift (L6: does the guest's story fit the host's record?). Both are
//! for people. They can't stop or spare a run: [`assess`] takes a [`ClosedLedger`],
//! which exists only after the verdict, and the crate that decides can't name
//! anything of this one (`crates/testkit/tests/edges.rs` holds that for every
//! dependency edge). A signal that a guest can make by lying must never be a reason to kill.
//!
//! Guarantees: a finding depends on the ledger, the objects beside it that it names, and the sealed fingerprint alone;
//! the number of findings is bounded by the number of capabilities, two for files and two for processes. Does no I/O
//! but reading that ledger and those objects.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

mod cadence;
pub mod drift;
pub mod files;
pub mod fingerprint;
pub mod processes;

pub use drift::Drift;
pub use files::Files;
pub use fingerprint::{Fingerprint, FingerprintDraft, FingerprintError, MAX_Z};
pub use processes::Processes;

use hotcell_ledger::bundle::BundleDir;
use hotcell_ledger::{Capability, ClosedLedger, Digest, Event, ReadError};
use serde::Serialize;

/// Which layer found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Layer {
    /// The fingerprint.
    L5,
    /// The drift.
    L6,
}

/// What kind of thing was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FindingKind {
    /// L5: a capability that no reference run asked for.
    NewCapability,
    /// L5: two capabilities in an order that no reference run had.
    NewTransition,
    /// L5: another rhythm than that of the reference runs.
    Cadence,
    /// L6: the host decided more than the guest tells.
    Unnarrated,
    /// L6: the guest tells more than the host decided.
    Unconfirmed,
    /// L6: the guest tells of other outcomes.
    OutcomeMismatch,
    /// L6: the host saw changes of files that the guest, which tells of files, leaves out.
    FilesOmitted,
    /// L6: the guest tells of changes of files that the host did not see on the disk.
    FilesInvented,
    /// L6: the host saw processes that the guest's init, asked for all, leaves out.
    ProcessesOmitted,
    /// L6: the guest's init tells of processes that the host did not see.
    ProcessesInvented,
}

/// An opinion. Nothing that decides takes one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which layer.
    pub layer: Layer,
    /// What kind.
    pub kind: FindingKind,
    /// About what: a capability, two of them, or `cadence`.
    pub subject: String,
    /// The same in words, for people.
    pub detail: String,
}

/// Longest object that is read: the longest fact of the host.
const MAX_OBJECT: usize = 64 << 10;

/// What there is to say about a run that is over. Without a fingerprint, L5 has nothing to compare with.
pub fn assess(ledger: &ClosedLedger, fingerprint: Option<&Fingerprint>) -> Result<Vec<Finding>, ReadError> {
    let mut draft = FingerprintDraft::new();
    let mut drift = Drift::new();
    let mut files = Files::new();
    let mut processes = Processes::new();
    let dir = ledger.path().parent().and_then(|dir| BundleDir::open(dir).ok());
    let object = |digest: &Digest| {
        let bytes = dir.as_ref()?.read(&BundleDir::object_path(digest), MAX_OBJECT).ok()?;
        (Digest::of(&bytes) == *digest).then_some(bytes)
    };
    for event in ledger.events()? {
        let event = event?;
        draft.observe(&event);
        drift.observe(&event);
        files.observe(&event);
        processes.observe(&event, object);
    }
    let mut findings = fingerprint.map(|reference| reference.compare(&draft)).unwrap_or_default();
    findings.extend(drift.findings());
    findings.extend(files.findings());
    findings.extend(processes.findings());
    Ok(findings)
}

/// The capability that the host decided about, and whether it granted it.
fn host_decision(event: &Event) -> Option<(Capability, bool)> {
    event.actor.is_host_band().then(|| decision(event)).flatten()
}

fn decision(event: &Event) -> Option<(Capability, bool)> {
    match &event.payload {
        hotcell_ledger::Payload::CapabilityRequest { capability, granted, .. } => {
            Some((*capability, *granted))
        }
        _ => None,
    }
}
