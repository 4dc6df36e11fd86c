//! The verdict: a fold over the recorded events, the same live and in a verifier.
//!
//! Every event goes in, in order, with the object that it names if the host wrote it
//! ([`Evidence::object_of`]). Gate 1 runs over all events, the judge over the host's.
//!
//! | rule | verdict |
//! |---|---|
//! | 1. the judge tripped, or Gate 1 has a fatal code | KILLED |
//! | 2. a `hotcell.failed` fact | FAILED |
//! | 3. no RUN_END, or no RUN_BEGIN, or a marker inside | INCOMPLETE |
//! | 4. something is missing that every whole run records | INCOMPLETE |
//! | 5. otherwise | ALLOWED |
//!
//! UNTERMINATED_ACTOR counts only in a record that ended: a crash leaves every actor
//! unterminated and proves nothing about them. Rule 4 asks for [`NEEDED`], and where the disk
//! was watched for its last reading: a record that says nothing is not a pass. A last reading that
//! could not see everything is rule 2. Deterministic: no clock, no map order, fixed
//! order of arithmetic.

use crate::evidence::{Evidence, Observation};
use crate::fact::{DiskMoment, ExecHow, HostFact, RESERVED_PREFIX};
use crate::judge::{Judge, Ruling, Trip};
use hotcell_ledger::gate1::{Code, GateReport, Lineage};
use hotcell_ledger::{ActorId, Capability, Digest, Event, Payload};
use hotcell_policy::{EnvironmentBaseline, PackageGrant, SealedSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What is concluded about a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Verdict {
    /// Nothing that was watched broke a rule.
    Allowed,
    /// A rule broke, or something failed in a way that nobody foresaw.
    Killed,
    /// Hotcell could not do it.
    Failed,
    /// The record does not say enough.
    Incomplete,
}

impl Verdict {
    /// As reports spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Verdict::Allowed => "ALLOWED",
            Verdict::Killed => "KILLED",
            Verdict::Failed => "FAILED",
            Verdict::Incomplete => "INCOMPLETE",
        }
    }
}

impl core::fmt::Display for Verdict {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What every whole run records, by the name that an INCOMPLETE verdict gives it.
pub const NEEDED: [&str; 9] = [
    "spec",
    "measured_kernel",
    "measured_initramfs",
    "measured_root",
    "switch_proven",
    "isolation",
    "ready",
    "measured_root_after",
    "teardown",
];

/// The observer of the disk, by the name that `armed` gives it.
const DISK_WATCHED: &str = "disk";
/// The reading of the disk at the end.
const DISK_READ: &str = "disk_read";

/// Failures that a verdict names.
const MAX_FAILED: usize = 16;

/// A failure as a reason, and for people.
fn failure(stage: &str, error: &str) -> (String, String) {
    (format!("failed {stage}"), format!("Hotcell could not do it, at {stage}: {error}."))
}

/// What a record does not say, for people.
fn unsaid(what: &str) -> String {
    format!("The record does not say enough to be judged ({what}): the run goes on still, or was cut short.")
}

/// How the first exec of a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecExit {
    /// Which exec.
    pub exec: u64,
    /// How.
    pub how: ExecHow,
    /// Exit code.
    pub code: Option<i32>,
    /// Signal.
    pub signal: Option<i32>,
}

/// What the record comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DerivedVerdict {
    /// The verdict.
    pub verdict: Verdict,
    /// Its reasons: of a kill by name, of the others in short words.
    pub reasons: Vec<String>,
    /// For people: what broke and what to do about it, one text for each reason, the first first. May quote the guest.
    pub explained: Vec<String>,
    /// Whether the run took as long as it may.
    pub timed_out: bool,
    /// The signal by which the operator stopped it.
    pub interrupted: Option<i32>,
    /// How the first exec ended; the guest said so.
    pub exit: Option<ExecExit>,
    /// What tripped the judge.
    pub trip: Option<Trip>,
    /// Everything that Gate 1 found.
    pub gate1: GateReport,
    /// Packages that the run asked for and an image rebuild may add, in order, each once.
    pub pending_rebuild: Vec<String>,
    /// What the record's own `hotcell.verdict` says, for comparison.
    pub recorded: Option<(Verdict, Vec<String>, bool)>,
}

impl DerivedVerdict {
    /// The fact to record.
    pub fn to_fact(&self) -> HostFact {
        HostFact::Verdict { verdict: self.verdict, reasons: self.reasons.clone(), timed_out: self.timed_out }
    }

    /// Whether the record's own verdict is this one. A record that ended must have one.
    pub fn agrees_with_record(&self) -> bool {
        match &self.recorded {
            Some((verdict, reasons, timed_out)) => {
                *verdict == self.verdict && *reasons == self.reasons && *timed_out == self.timed_out
            }
            None => self.verdict == Verdict::Incomplete,
        }
    }
}

/// Why a fold can't begin: the caller gave another baseline than the spec names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FoldError {
    /// The spec names a baseline that was not given.
    #[error("the spec names the baseline {0}: give its file")]
    BaselineMissing(Digest),
    /// The baseline is not the one that the spec names.
    #[error("the baseline has the digest {found}, the spec names {}", named.map_or("none".to_owned(), |d| d.to_hex()))]
    OtherBaseline {
        /// What the spec names.
        named: Option<Digest>,
        /// What was given.
        found: Digest,
    },
}

/// The state of the fold.
#[derive(Clone, Debug)]
pub struct VerdictFold {
    judge: Judge,
    spec: SealedSpec,
    lineage: Lineage,
    gate1: GateReport,
    last: Option<(u64, u64)>,
    seen: BTreeSet<&'static str>,
    /// Stage and error of each failure.
    failed: Vec<(String, String)>,
    timed_out: bool,
    interrupted: Option<i32>,
    exit: Option<ExecExit>,
    pending_rebuild: Vec<String>,
    recorded: Option<(Verdict, Vec<String>, bool)>,
}

impl VerdictFold {
    /// A fold for a run of this spec, with the baseline that the spec names, if it names one.
    pub fn new(spec: &SealedSpec, baseline: Option<&EnvironmentBaseline>) -> Result<VerdictFold, FoldError> {
        Ok(VerdictFold {
            judge: Judge::new(spec, baseline)?,
            spec: spec.clone(),
            lineage: Lineage::new(),
            gate1: GateReport::default(),
            last: None,
            seen: BTreeSet::new(),
            failed: Vec::new(),
            timed_out: false,
            interrupted: None,
            exit: None,
            pending_rebuild: Vec::new(),
            recorded: None,
        })
    }

    /// Takes the next event, just as it was recorded.
    pub fn event(&mut self, event: &Event, object: Option<&[u8]>) -> Ruling<'_> {
        self.last = Some((event.sequence, event.timestamp_ns));
        for violation in self.lineage.observe(event) {
            self.judge.lineage(&violation);
            self.gate1.add(violation);
        }
        match Evidence::read(event, object) {
            Ok(Some(evidence)) => {
                let _ = self.judge.observe(&evidence);
                self.note(evidence.observation());
            }
            Ok(None) => self.check_testimony(event),
            Err(error) => self.judge.unreadable(event.sequence, &error),
        }
        self.judge.ruling()
    }

    /// What the judge says now.
    pub fn ruling(&self) -> Ruling<'_> {
        self.judge.ruling()
    }

    /// The kill switch, to look at.
    pub fn judge(&self) -> &Judge {
        &self.judge
    }

    pub(crate) fn judge_mut(&mut self) -> &mut Judge {
        &mut self.judge
    }

    /// Who is live: for admission of claims and for spawn decisions.
    pub fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    /// What the verdict is if nothing follows.
    pub fn finish(mut self) -> DerivedVerdict {
        let ended = self.lineage.has_ended();
        let violations: Vec<_> = self.lineage.finish().take(hotcell_ledger::gate1::MAX_VIOLATIONS).collect();
        for violation in violations {
            if ended || violation.code != Code::UnterminatedActor {
                self.judge.lineage(&violation);
            }
            self.gate1.add(violation);
        }
        let trip = match self.judge.ruling() {
            Ruling::Continue => None,
            Ruling::Kill(trip) => Some(trip.clone()),
        };
        let mut missing: Vec<String> = [Code::NoRunBegin, Code::NestedRunMarker, Code::NoRunEnd]
            .into_iter()
            .filter(|code| self.gate1.count(*code) > 0)
            .map(|code| code.as_str().to_ascii_lowercase())
            .collect();
        if self.last.is_none() {
            missing.push("empty".to_owned());
        }
        if ended {
            let needed = NEEDED.iter().filter(|name| !self.seen.contains(**name));
            missing.extend(needed.map(|name| format!("missing {name}")));
            if self.seen.contains(DISK_WATCHED) && !self.seen.contains(DISK_READ) {
                missing.push(format!("missing {DISK_READ}"));
            }
        }
        let (verdict, reasons, explained) = match &trip {
            Some(trip) => {
                let causes = trip.causes().iter();
                let explained = causes.map(|cause| cause.reason.explained(&cause.detail)).collect();
                (Verdict::Killed, trip.reason_names(), explained)
            }
            None if !self.failed.is_empty() => {
                let failed = self.failed.into_iter();
                let (reasons, explained) = failed.map(|(stage, error)| failure(&stage, &error)).unzip();
                (Verdict::Failed, reasons, explained)
            }
            None if !missing.is_empty() => {
                let explained = missing.iter().map(|what| unsaid(what)).collect();
                (Verdict::Incomplete, missing, explained)
            }
            None => (Verdict::Allowed, Vec::new(), Vec::new()),
        };
        DerivedVerdict {
            verdict,
            reasons,
            explained,
            timed_out: self.timed_out,
            interrupted: self.interrupted,
            exit: self.exit,
            trip,
            gate1: self.gate1,
            pending_rebuild: self.pending_rebuild,
            recorded: self.recorded,
        }
    }

    /// What the verdict will be once HOST has exited and RUN_END stands: for writing
    /// `hotcell.verdict` before them. Leaves the fold as it is.
    pub fn closing(&self) -> DerivedVerdict {
        let mut fold = self.clone();
        for payload in [Payload::ProcessExit { code: 0 }, Payload::RunEnd] {
            let (sequence, timestamp_ns) =
                fold.last.map_or((0, 0), |(sequence, at)| (sequence.saturating_add(1), at));
            let event = Event { sequence, timestamp_ns, actor: ActorId::HOST, parent: None, payload };
            let _ = fold.event(&event, None);
        }
        fold.finish()
    }

    fn note(&mut self, observation: &Observation) {
        match observation {
            Observation::Fact(fact) => self.note_fact(fact),
            // The judge holds a record to its policy, so a listed package was deferred, or this run is killed.
            Observation::Decision { capability: Capability::PackageInstall, request, .. } => {
                if let PackageGrant::Listed(package) =
                    self.spec.policy().capabilities().package_grant(request.resource())
                {
                    let package = package.to_string();
                    if !self.pending_rebuild.contains(&package) {
                        self.pending_rebuild.push(package);
                    }
                }
            }
            _ => {}
        }
    }

    fn note_fact(&mut self, fact: &HostFact) {
        match fact {
            HostFact::Spec { .. } => {
                self.seen.insert("spec");
            }
            HostFact::Measured { what, .. } => {
                let name = match what.as_str() {
                    "kernel" => "measured_kernel",
                    "initramfs" => "measured_initramfs",
                    "root" => "measured_root",
                    "root_after" => "measured_root_after",
                    _ => return,
                };
                self.seen.insert(name);
            }
            HostFact::SwitchProven { .. } => {
                self.seen.insert("switch_proven");
            }
            HostFact::Isolation { .. } => {
                self.seen.insert("isolation");
            }
            HostFact::Ready { .. } => {
                self.seen.insert("ready");
            }
            HostFact::Teardown { .. } => {
                self.seen.insert("teardown");
            }
            HostFact::Armed { observer, armed: true, .. } if observer == DISK_WATCHED => {
                self.seen.insert(DISK_WATCHED);
            }
            HostFact::DiskRead { at: DiskMoment::Quiet | DiskMoment::Dead, unread, .. } => {
                self.seen.insert(DISK_READ);
                if let Some(unread) = unread {
                    self.fail(DISK_READ, unread);
                }
            }
            HostFact::Failed { stage, error } => self.fail(stage, error),
            HostFact::Timeout { .. } => self.timed_out = true,
            HostFact::Interrupted { signal } => {
                self.interrupted.get_or_insert(*signal);
            }
            HostFact::ExecEnded { exec, how, code, signal }
                if self.exit.is_none_or(|first| *exec < first.exec) =>
            {
                self.exit = Some(ExecExit { exec: *exec, how: *how, code: *code, signal: *signal });
            }
            HostFact::Verdict { verdict, reasons, timed_out } => {
                self.recorded = Some((*verdict, reasons.clone(), *timed_out));
            }
            _ => {}
        }
    }

    fn fail(&mut self, stage: &str, error: &str) {
        if self.failed.len() < MAX_FAILED {
            self.failed.push((stage.to_owned(), error.to_owned()));
        }
    }

    /// Testimony is not ruled on. But admission refuses some of it before it is recorded;
    /// where such a claim stands in the record all the same, the recorder failed.
    fn check_testimony(&mut self, event: &Event) {
        let refused = match &event.payload {
            Payload::RunBegin | Payload::RunEnd => true,
            Payload::ToolCall { tool, .. } => tool.as_str().to_ascii_lowercase().starts_with(RESERVED_PREFIX),
            _ => false,
        };
        if refused {
            let detail = format!("{:?} by {} is the host's alone", event.payload.event_type(), event.actor);
            self.judge.recorder_failed(event.sequence, &detail);
        }
    }
}
