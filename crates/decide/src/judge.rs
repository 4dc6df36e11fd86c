//! The kill switch. It sees host-observed evidence, one piece after another, and trips or does not.
//!
//! ```text
//!             observe(&Evidence)
//!   armed ───────────────────────► armed        Ruling::Continue
//!     │
//!     └──── a rule holds ────────► tripped      Ruling::Kill, now and for ever after
//! ```
//! There is no way back, no setter and no way to leave a rule out: thresholds come
//! from the sealed spec, once. After it tripped it goes on noting further causes for
//! the report.
//!
//! Absolute rules need one occurrence ([`Reason::is_absolute`]). Two accumulating
//! signals each have a burst and an average, and either trips:
//! - **denials**: every broker decision is a sample; a denial and a deferral are bad
//!   ones. A spawn that was denied over its token is a bad sample too.
//! - **mutations**: every recorded mutation is a sample; an unexplained one is bad. Of changes
//!   that are only counted, every place is one.
//!
//! A third is a mere count: past [`MAX_DECISIONS`] decisions, allowed or not, the run asks for
//! the host's disk and not for capabilities.
//!
//! The average needs [`DENIAL_WARM_UP`] and [`MUTATION_WARM_UP`] samples before it
//! speaks; `accumulate.rs` says why. Each decision is decided again with the sealed
//! policy, and each mutation judged again, so that a record which disagrees with its
//! own policy is itself a reason.

use crate::accumulate::{ALPHA, Accumulator};
use crate::broker::{Broker, CapabilityRequest, MAX_DECISIONS};
use crate::evidence::{Evidence, EvidenceError, Observation};
use crate::fact::{Direction, DiskMoment, HostFact, ViolationKind};
use crate::monitor::{Judgement, Monitor, Mutation};
use crate::reason::Reason;
use crate::verdict::FoldError;
use hotcell_ledger::{Capability, Digest, gate1};
use hotcell_policy::{EnvironmentBaseline, SealedSpec, limits};

/// Decisions that the average of denials needs before it speaks: as many as make the default burst.
pub const DENIAL_WARM_UP: u64 = 5;
/// Mutations that the average of unexplained ones needs before it speaks: as many as make the default burst.
pub const MUTATION_WARM_UP: u64 = 3;

// One bad sample in an otherwise clean run stays below both default thresholds.
const _: () = assert!(ALPHA < limits::DENIAL_EWMA.default && ALPHA < limits::MUTATION_EWMA.default);
const _: () = assert!(limits::DENIAL_BURST.default as u64 == DENIAL_WARM_UP);
const _: () = assert!(limits::MUTATION_BURST.default as u64 == MUTATION_WARM_UP);

/// One cause, when it was first seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TripCause {
    /// Why.
    pub reason: Reason,
    /// The event that showed it.
    pub at_sequence: u64,
    /// The same in words.
    pub detail: String,
}

/// That the switch tripped, and why. Made by a judge alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trip {
    causes: Vec<TripCause>,
}

impl Trip {
    /// The event that tripped it.
    pub fn at_sequence(&self) -> u64 {
        self.causes.first().map_or(0, |cause| cause.at_sequence)
    }

    /// Every cause, in the order in which they were first seen; each reason once.
    pub fn causes(&self) -> &[TripCause] {
        &self.causes
    }

    /// The names of the reasons.
    pub fn reason_names(&self) -> Vec<String> {
        self.causes.iter().map(|cause| cause.reason.name().to_owned()).collect()
    }

    /// Whether any of the reasons is absolute.
    pub fn is_absolute(&self) -> bool {
        self.causes.iter().any(|cause| cause.reason.is_absolute())
    }

    /// The fact to record once the machine was stopped.
    pub fn to_fact(&self) -> HostFact {
        HostFact::Kill { reasons: self.reason_names(), at_sequence: self.at_sequence() }
    }
}

/// What the judge says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Ruling<'a> {
    /// Go on.
    Continue,
    /// Stop the machine first, write about it after.
    Kill(&'a Trip),
}

/// The kill switch of one run.
#[derive(Clone, Debug)]
pub struct Judge {
    spec: SealedSpec,
    spec_digest: Digest,
    monitor: Monitor,
    denials: Accumulator,
    mutations: Accumulator,
    decisions: u64,
    trip: Option<Trip>,
}

impl Judge {
    /// Arms a judge with what the sealed spec says, and with the baseline that the spec names, if it names one.
    pub fn new(spec: &SealedSpec, baseline: Option<&EnvironmentBaseline>) -> Result<Judge, FoldError> {
        match (spec.baseline(), baseline.map(EnvironmentBaseline::digest)) {
            (Some(named), None) => return Err(FoldError::BaselineMissing(named)),
            (named, Some(found)) if named != Some(found) => {
                return Err(FoldError::OtherBaseline { named, found });
            }
            _ => {}
        }
        let thresholds = spec.policy().thresholds();
        Ok(Judge {
            monitor: Monitor::new(spec.policy().paths(), spec.policy().capabilities(), baseline),
            denials: Accumulator::new(
                thresholds.denial_burst,
                thresholds.denial_window_s,
                thresholds.denial_ewma,
                DENIAL_WARM_UP,
            ),
            mutations: Accumulator::new(
                thresholds.mutation_burst,
                thresholds.mutation_window_s,
                thresholds.mutation_ewma,
                MUTATION_WARM_UP,
            ),
            spec_digest: spec.digest(),
            spec: spec.clone(),
            decisions: 0,
            trip: None,
        })
    }

    /// Rules on one piece of evidence.
    pub fn observe(&mut self, evidence: &Evidence) -> Ruling<'_> {
        let at = evidence.sequence();
        let now = evidence.timestamp_ns();
        match evidence.observation() {
            Observation::Lifecycle => {}
            Observation::Fact(fact) => self.fact(fact, at, now),
            Observation::Decision { capability, granted, reason, request } => {
                self.decision(*capability, *granted, reason, request, at, now);
            }
            Observation::Mutation { op, path, before, after } => {
                match Mutation::new(*op, path, *before, *after) {
                    Err(error) => self.trip(Reason::EvaluatorFailure, at, format!("{path:?}: {error}")),
                    Ok(mutation) => {
                        let judgement = self.monitor.judge(&mutation);
                        self.judged(judgement, path, at, now);
                    }
                }
            }
            Observation::Network { destination } => {
                self.trip(Reason::NetworkSeen, at, format!("to {destination:?}"));
            }
        }
        self.ruling()
    }

    fn judged(&mut self, judgement: Judgement, path: &str, at: u64, now: u64) {
        match judgement {
            Judgement::Expected => self.mutations.good(),
            Judgement::Impossible(why) => self.trip(Reason::ImpossibleMutation, at, why),
            Judgement::Unexplained(why) => {
                let exceeded = self.mutations.bad(now);
                let detail = format!("{path:?}: {why}");
                if exceeded.burst {
                    self.trip(Reason::MutationBurst, at, detail.clone());
                }
                if exceeded.average {
                    self.trip(Reason::MutationEwma, at, detail);
                }
            }
        }
    }

    /// What it says now, without new evidence.
    pub fn ruling(&self) -> Ruling<'_> {
        self.trip.as_ref().map_or(Ruling::Continue, Ruling::Kill)
    }

    /// A host-band event could not be read as evidence: fail closed.
    pub(crate) fn unreadable(&mut self, at: u64, error: &EvidenceError) {
        self.trip(Reason::UnreadableEvidence, at, error.to_string());
    }

    /// Gate 1 found something; fatal codes trip.
    pub(crate) fn lineage(&mut self, violation: &gate1::Violation) {
        if let Some(reason) = lineage_reason(violation.code) {
            self.trip(reason, violation.sequence, violation.to_string());
        }
    }

    /// As if so many decisions had been made: for the proof, which has no time to make them.
    pub(crate) fn assume_decisions(&mut self, decisions: u64) {
        self.decisions = decisions;
    }

    /// Whether this reason was found.
    pub fn found(&self, reason: Reason) -> bool {
        self.trip.as_ref().is_some_and(|trip| trip.causes.iter().any(|cause| cause.reason == reason))
    }

    /// The recorder wrote what admission would have refused.
    pub(crate) fn recorder_failed(&mut self, at: u64, detail: &str) {
        self.trip(Reason::EvaluatorFailure, at, detail.to_owned());
    }

    fn trip(&mut self, reason: Reason, at_sequence: u64, detail: String) {
        let trip = self.trip.get_or_insert_with(|| Trip { causes: Vec::new() });
        if !trip.causes.iter().any(|cause| cause.reason == reason) {
            trip.causes.push(TripCause { reason, at_sequence, detail });
        }
    }

    fn denied(&mut self, at: u64, now: u64, detail: String) {
        let exceeded = self.denials.bad(now);
        if exceeded.burst {
            self.trip(Reason::DenialBurst, at, detail.clone());
        }
        if exceeded.average {
            self.trip(Reason::DenialEwma, at, detail);
        }
    }

    fn decision(
        &mut self,
        capability: Capability,
        granted: bool,
        reason: &str,
        request: &CapabilityRequest,
        at: u64,
        now: u64,
    ) {
        let name = capability.as_str();
        self.decisions = self.decisions.saturating_add(1);
        if self.decisions > MAX_DECISIONS {
            self.trip(
                Reason::RequestFlood,
                at,
                format!("more than {MAX_DECISIONS} decisions were asked for"),
            );
        }
        if granted {
            let never = match capability {
                Capability::NetEgress => Some(Reason::GrantedNetEgress),
                Capability::RawSyscall => Some(Reason::GrantedRawSyscall),
                Capability::PrivilegeRaise => Some(Reason::GrantedPrivilegeRaise),
                Capability::PackageInstall | Capability::FileWrite | Capability::ProcessSpawn => None,
            };
            if let Some(never) = never {
                self.trip(never, at, format!("{name} was granted"));
            }
        }
        let ours = Broker::decide(self.spec.policy().capabilities(), request);
        let text = ours.reason_text(Digest::of(&request.to_object()));
        if ours.is_granted() != granted || text != reason {
            self.trip(
                Reason::DecisionMismatch,
                at,
                format!("recorded {reason:?}, granted {granted}; the sealed policy says {text:?}"),
            );
        }
        // What was recorded is what the workload was told, so that is the sample.
        if granted {
            self.denials.good();
        } else {
            self.denied(
                at,
                now,
                format!(
                    "{name} {:?} was not granted, by the rule {}",
                    request.resource(),
                    ours.rule().name()
                ),
            );
        }
    }

    fn fact(&mut self, fact: &HostFact, at: u64, now: u64) {
        match fact {
            HostFact::Spec { run_id, spec, .. } => {
                if run_id != self.spec.run_id() || *spec != self.spec_digest {
                    self.trip(
                        Reason::SpecMismatch,
                        at,
                        format!(
                            "recorded {run_id:?} {spec}, judged by {:?} {}",
                            self.spec.run_id(),
                            self.spec_digest
                        ),
                    );
                }
            }
            HostFact::Measured { what, digest, .. } => {
                let image = self.spec.image();
                let named = match what.as_str() {
                    "kernel" => image.kernel,
                    "initramfs" => image.initramfs,
                    "root" | "root_after" => image.root,
                    _ => return,
                };
                if *digest != named {
                    let after = what == "root_after";
                    self.trip(
                        if after { Reason::RootChanged } else { Reason::ImageMismatch },
                        at,
                        format!("{what} has the digest {digest}, the spec names {named}"),
                    );
                }
            }
            HostFact::SwitchProven { rules: 0 } => {
                self.trip(Reason::EvaluatorFailure, at, "the switch was proven with no rule".to_owned());
            }
            HostFact::SpawnDenied { reason, .. } if reason.counts_as_denial() => {
                self.denied(at, now, format!("a spawn was denied: {reason:?}"));
            }
            HostFact::Fault { stage, error } => {
                self.trip(Reason::EvaluatorFailure, at, format!("{stage}: {error}"));
            }
            HostFact::ContainmentFailure { what } => {
                self.trip(Reason::ContainmentFailure, at, what.clone());
            }
            HostFact::VmExited { expected: false, status } => self.trip(Reason::VmLost, at, status.clone()),
            HostFact::Copied { direction: Direction::In, path, digest, .. } => {
                self.monitor.expect_copy(path, *digest);
            }
            // What the image holds at that path lies under the mounted disk; what the disk holds is what counts.
            HostFact::DiskRead { at: DiskMoment::Armed, .. } => self.monitor.forget(),
            // One sample for each place: what was not listed neither dilutes the average nor escapes it.
            HostFact::MutationsCounted { within, .. } => {
                if within.is_empty() {
                    let nowhere = "changes were counted and it is not said where".to_owned();
                    self.trip(Reason::EvaluatorFailure, at, nowhere);
                }
                for place in within {
                    let judgement = self.monitor.judge_counted(place);
                    self.judged(judgement, place, at, now);
                }
            }
            HostFact::Violation { kind, subject, detail } => {
                self.trip(violation_reason(*kind), at, format!("{subject}: {detail}"));
            }
            HostFact::Kill { .. } if self.trip.is_none() => {
                self.trip(
                    Reason::UnexplainedKill,
                    at,
                    "a kill was recorded without a cause before it".to_owned(),
                );
            }
            HostFact::Teardown { verified, checks, .. } => {
                let left = checks.iter().find(|check| !check.gone);
                if let Some(check) = left {
                    self.trip(Reason::TeardownUnverified, at, format!("{}: {}", check.what, check.detail));
                } else if !verified || checks.is_empty() {
                    self.trip(Reason::TeardownUnverified, at, "not verified".to_owned());
                }
            }
            HostFact::SwitchProven { .. }
            | HostFact::Isolation { .. }
            | HostFact::Ready { .. }
            | HostFact::Service { .. }
            | HostFact::Output { .. }
            | HostFact::SpawnDenied { .. }
            | HostFact::ClaimRefused { .. }
            | HostFact::Timeout { .. }
            | HostFact::Interrupted { .. }
            | HostFact::Failed { .. }
            | HostFact::VmExited { .. }
            | HostFact::ExecEnded { .. }
            | HostFact::Copied { .. }
            | HostFact::CopyEnded { .. }
            | HostFact::Armed { .. }
            | HostFact::DiskRead { .. }
            | HostFact::Processes { .. }
            | HostFact::ProcessRoll { .. }
            | HostFact::Watched { .. }
            | HostFact::Kill { .. }
            | HostFact::Verdict { .. } => {}
        }
    }
}

/// The reason for a code of Gate 1, where it is fatal.
fn lineage_reason(code: gate1::Code) -> Option<Reason> {
    match code {
        gate1::Code::UnattributedAction => Some(Reason::UnattributedAction),
        gate1::Code::ActionAfterExit => Some(Reason::ActionAfterExit),
        gate1::Code::OrphanSpawn => Some(Reason::OrphanSpawn),
        gate1::Code::ExitWithoutSpawn => Some(Reason::ExitWithoutSpawn),
        gate1::Code::DoubleSpawn => Some(Reason::DoubleSpawn),
        gate1::Code::RespawnAfterExit => Some(Reason::RespawnAfterExit),
        gate1::Code::UnterminatedActor => Some(Reason::DormantProcess),
        gate1::Code::LineageFull => Some(Reason::LineageFull),
        other if other.is_fatal() => Some(Reason::EvaluatorFailure),
        _ => None,
    }
}

/// The reason of the same name.
pub(crate) const fn violation_reason(kind: ViolationKind) -> Reason {
    match kind {
        ViolationKind::UnexplainedPrivilege => Reason::UnexplainedPrivilege,
        ViolationKind::UnapprovedExecutable => Reason::UnapprovedExecutable,
        ViolationKind::ExecutedFromNoexec => Reason::ExecutedFromNoexec,
        ViolationKind::KernelTextChanged => Reason::KernelTextChanged,
        ViolationKind::KernelTableChanged => Reason::KernelTableChanged,
        ViolationKind::ModuleLoaded => Reason::ModuleLoaded,
        ViolationKind::NetworkDevice => Reason::NetworkDevice,
        ViolationKind::WritableRoot => Reason::WritableRoot,
        ViolationKind::HiddenProcess => Reason::HiddenProcess,
        ViolationKind::UnexplainedNamespace => Reason::UnexplainedNamespace,
        ViolationKind::UnexplainedMount => Reason::UnexplainedMount,
        ViolationKind::RootChanged => Reason::RootChanged,
        ViolationKind::VmmOutOfJail => Reason::VmmOutOfJail,
        ViolationKind::ProcessOutlivedRun => Reason::ProcessOutlivedRun,
        ViolationKind::NotThisVm => Reason::NotThisVm,
        ViolationKind::SandboxDestroyed => Reason::SandboxDestroyed,
    }
}
