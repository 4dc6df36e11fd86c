//! L5: does the run ask as its reference runs did?
//!
//! A profile is made from reference runs, over host-recorded capability decisions
//! only: which capabilities were asked for, which directly followed which *within
//! one run*, and how far apart decisions lie. It is sealed, and is then a file that
//! a policy names.
//!
//! ```text
//! {"format":"hotcell-fingerprint-1","sources":["<head digest>",…],"capabilities":["FILE_WRITE",…],
//!  "transitions":[["FILE_WRITE","PROCESS_SPAWN"],…],"intervals":{"count":3,"sum_us":"300","squares":"30200"}}
//! ```
//! One line, without blanks, lists sorted: one profile has one file and one digest.

use crate::cadence::Intervals;
use crate::{Finding, FindingKind, Layer, host_decision};
use hotcell_ledger::{Capability, ClosedLedger, Digest, Event, ReadError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Standard deviations from the reference rhythm that are still usual.
pub const MAX_Z: f64 = 4.0;
/// Reference runs that one profile may have.
pub const MAX_SOURCES: usize = 10_000;
/// Bytes of a profile's file.
pub const MAX_FILE_BYTES: usize = 1 << 20;

const FORMAT: &str = "hotcell-fingerprint-1";

/// Why bytes are not a fingerprint, or a run can't be absorbed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FingerprintError {
    /// The ledger can't be read.
    #[error("the reference run can't be read: `hotcell verify` says what is wrong with it")]
    Ledger(#[from] ReadError),
    /// The run was absorbed before.
    #[error("the run with the head {0} was absorbed before: each run counts once")]
    Twice(Digest),
    /// More runs than one profile may have.
    #[error("a profile has at most {MAX_SOURCES} reference runs")]
    TooMany,
    /// A profile of nothing.
    #[error("no reference run was absorbed: a profile of nothing would find everything new")]
    Empty,
    /// Not in the format.
    #[error("not a fingerprint file: make it again with `hotcell profile absorb`")]
    Format,
}

/// A profile that still grows; also what one run looks like.
#[derive(Clone, Debug, Default)]
pub struct FingerprintDraft {
    sources: BTreeSet<Digest>,
    capabilities: BTreeSet<Capability>,
    transitions: BTreeSet<(Capability, Capability)>,
    intervals: Intervals,
    last: Option<(Capability, u64)>,
}

impl FingerprintDraft {
    /// A profile of nothing yet.
    pub fn new() -> FingerprintDraft {
        FingerprintDraft::default()
    }

    /// Takes in a reference run, once.
    pub fn absorb(&mut self, ledger: &ClosedLedger) -> Result<(), FingerprintError> {
        let head = ledger.checkpoint().digest();
        if self.sources.contains(&head) {
            return Err(FingerprintError::Twice(head));
        }
        if self.sources.len() >= MAX_SOURCES {
            return Err(FingerprintError::TooMany);
        }
        // Read through before anything is kept: half a run is no reference.
        let mut run = FingerprintDraft::new();
        for event in ledger.events()? {
            run.observe(&event?);
        }
        self.sources.insert(head);
        self.capabilities.extend(run.capabilities);
        self.transitions.extend(run.transitions);
        self.intervals.add_all(&run.intervals);
        Ok(())
    }

    /// Takes in one event of one run. What is not the host's decision is ignored.
    pub(crate) fn observe(&mut self, event: &Event) {
        let Some((capability, _)) = host_decision(event) else { return };
        self.capabilities.insert(capability);
        if let Some((before, at)) = self.last {
            self.transitions.insert((before, capability));
            self.intervals.add_ns(event.timestamp_ns.saturating_sub(at));
        }
        self.last = Some((capability, event.timestamp_ns));
    }

    /// Seals the profile.
    pub fn seal(self) -> Result<Fingerprint, FingerprintError> {
        if self.sources.is_empty() {
            return Err(FingerprintError::Empty);
        }
        Ok(Fingerprint {
            sources: self.sources,
            capabilities: self.capabilities,
            transitions: self.transitions,
            intervals: self.intervals,
        })
    }
}

/// A sealed profile. Never changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    sources: BTreeSet<Digest>,
    capabilities: BTreeSet<Capability>,
    transitions: BTreeSet<(Capability, Capability)>,
    intervals: Intervals,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: String,
    sources: Vec<String>,
    capabilities: Vec<String>,
    transitions: Vec<(String, String)>,
    intervals: FileIntervals,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileIntervals {
    count: u64,
    sum_us: String,
    squares: String,
}

impl Fingerprint {
    /// How many runs it was made from.
    pub fn runs(&self) -> usize {
        self.sources.len()
    }

    /// The heads of the ledgers that it was made from.
    pub fn sources(&self) -> impl Iterator<Item = &Digest> {
        self.sources.iter()
    }

    /// The file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let file = File {
            format: FORMAT.to_owned(),
            sources: self.sources.iter().map(Digest::to_hex).collect(),
            capabilities: self.capabilities.iter().map(|c| c.as_str().to_owned()).collect(),
            transitions: self
                .transitions
                .iter()
                .map(|(a, b)| (a.as_str().to_owned(), b.as_str().to_owned()))
                .collect(),
            intervals: FileIntervals {
                count: self.intervals.count,
                sum_us: self.intervals.sum_us.to_string(),
                squares: self.intervals.squares.to_string(),
            },
        };
        // Texts, a number and lists of them: nothing that JSON can't say.
        let mut bytes = serde_json::to_vec(&file).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// The digest of the file: what a spec names.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_bytes())
    }

    /// Reads a file, in its one spelling.
    pub fn from_bytes(bytes: &[u8]) -> Result<Fingerprint, FingerprintError> {
        let read = || {
            if bytes.len() > MAX_FILE_BYTES {
                return None;
            }
            let file: File = serde_json::from_slice(bytes).ok()?;
            let capability = |text: &String| Capability::from_name(text);
            let fingerprint = Fingerprint {
                sources: file.sources.iter().map(|text| Digest::from_hex(text)).collect::<Option<_>>()?,
                capabilities: file.capabilities.iter().map(capability).collect::<Option<_>>()?,
                transitions: file
                    .transitions
                    .iter()
                    .map(|(a, b)| Some((capability(a)?, capability(b)?)))
                    .collect::<Option<_>>()?,
                intervals: Intervals {
                    count: file.intervals.count,
                    sum_us: file.intervals.sum_us.parse().ok()?,
                    squares: file.intervals.squares.parse().ok()?,
                },
            };
            let whole = file.format == FORMAT
                && (1..=MAX_SOURCES).contains(&fingerprint.sources.len())
                && fingerprint.to_bytes() == bytes;
            whole.then_some(fingerprint)
        };
        read().ok_or(FingerprintError::Format)
    }

    /// What of a run is not as in the reference runs.
    pub(crate) fn compare(&self, run: &FingerprintDraft) -> Vec<Finding> {
        let finding =
            |kind, subject: String, detail: String| Finding { layer: Layer::L5, kind, subject, detail };
        let runs = self.runs();
        let mut findings = Vec::new();
        for capability in run.capabilities.difference(&self.capabilities) {
            let subject = capability.as_str().to_owned();
            let detail = format!("asked for {subject}, which none of {runs} reference runs did");
            findings.push(finding(FindingKind::NewCapability, subject, detail));
        }
        for (before, after) in run.transitions.difference(&self.transitions) {
            let subject = format!("{} -> {}", before.as_str(), after.as_str());
            let detail = format!("an order that none of {runs} reference runs had");
            findings.push(finding(FindingKind::NewTransition, subject, detail));
        }
        if let Some(z) = run.intervals.z_against(&self.intervals)
            && z > MAX_Z
        {
            let milliseconds = |intervals: &Intervals| intervals.mean_us().unwrap_or(0.0) / 1000.0;
            let detail = format!(
                "{:.1} ms between decisions where {:.1} ms are usual, z = {z:.1}",
                milliseconds(&run.intervals),
                milliseconds(&self.intervals)
            );
            findings.push(finding(FindingKind::Cadence, "cadence".to_owned(), detail));
        }
        findings
    }
}
