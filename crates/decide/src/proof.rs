//! The kill switch proves itself: at the start of every run, on throw-away instances.
//!
//! For each [`Reason`] one sequence of recorded events that must trip it, and a near
//! miss that must not. The instances use the thresholds of the run's own spec and
//! grant nothing. What is proven is that this build's rules fire, on this machine,
//! now; not that anything will be observed.

use crate::accumulate::run_to_exceed;
use crate::broker::{Broker, CapabilityRequest, Decision, MAX_DECISIONS, Rule};
use crate::claims::ClaimKind;
use crate::fact::{Check, HostFact, ViolationKind};
use crate::judge::{DENIAL_WARM_UP, Judge, MUTATION_WARM_UP, Ruling, violation_reason};
use crate::reason::Reason;
use crate::verdict::VerdictFold;
use hotcell_ledger::{ActorId, Capability, Digest, Event, FileOp, NfcString, Payload, Protocol, gate1};
use hotcell_policy::{PolicyDraft, RunDraft, SealedSpec};

/// Which rule did not prove itself. The run must not start: we have a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unproven {
    /// The throw-away spec could not be made.
    #[error("the kill switch could not be set up for its self-test")]
    SetUp,
    /// The rule did not fire where it must.
    #[error("the rule {0} did not fire in the self-test")]
    DidNotFire(Reason),
    /// The rule fired where it must not.
    #[error("the rule {0} fired on a near miss in the self-test")]
    FiredOnNearMiss(Reason),
    /// The switch went back.
    #[error("the switch did not stay tripped by {0} in the self-test")]
    DidNotStay(Reason),
}

enum Step {
    Fact(HostFact),
    Event(ActorId, Option<ActorId>, Payload, Option<Vec<u8>>),
    Wait(u64),
    Lineage(gate1::Code),
    Decisions(u64),
    Finish,
}

impl Judge {
    /// Trips a throw-away switch by every rule, with the thresholds of this spec. Gives the number of rules.
    pub fn prove(spec: &SealedSpec) -> Result<usize, Unproven> {
        let policy =
            PolicyDraft { thresholds: spec.policy().as_draft().thresholds.clone(), ..PolicyDraft::default() };
        let own = RunDraft::new("switch-proof", spec.image().clone(), policy)
            .seal()
            .map_err(|_| Unproven::SetUp)?;
        for reason in Reason::ALL {
            let (fires, near_miss) = script(*reason, &own);
            let (fired, stayed) = play(&own, fires, *reason)?;
            if !fired {
                return Err(Unproven::DidNotFire(*reason));
            }
            if !stayed {
                return Err(Unproven::DidNotStay(*reason));
            }
            if play(&own, near_miss, *reason)?.0 {
                return Err(Unproven::FiredOnNearMiss(*reason));
            }
        }
        Ok(Reason::ALL.len())
    }
}

/// Whether the reason was found, and whether the switch is tripped still after something harmless.
fn play(spec: &SealedSpec, steps: Vec<Step>, reason: Reason) -> Result<(bool, bool), Unproven> {
    let mut fold = VerdictFold::new(spec, None).map_err(|_| Unproven::SetUp)?;
    let (mut sequence, mut now) = (0u64, 1_000_000_000u64);
    let opening = [
        Step::Event(ActorId::HOST, None, Payload::RunBegin, None),
        Step::Event(ActorId::HOST, None, spawn(), None),
    ];
    for step in opening.into_iter().chain(steps) {
        let (actor, parent, payload, object) = match step {
            Step::Event(actor, parent, payload, object) => (actor, parent, payload, object),
            Step::Fact(fact) => {
                let (payload, object) = fact.to_payload().map_err(|_| Unproven::SetUp)?;
                (ActorId::HOST, None, payload, Some(object))
            }
            Step::Wait(ns) => {
                now = now.saturating_add(ns);
                continue;
            }
            Step::Lineage(code) => {
                let violation =
                    gate1::Violation { code, sequence, actor: ActorId::HOST, detail: String::new() };
                fold.judge_mut().lineage(&violation);
                continue;
            }
            Step::Decisions(made) => {
                fold.judge_mut().assume_decisions(made);
                continue;
            }
            Step::Finish => {
                let trip = fold.finish().trip;
                let fired = trip.is_some_and(|trip| trip.causes().iter().any(|cause| cause.reason == reason));
                return Ok((fired, true));
            }
        };
        let event = Event { sequence, timestamp_ns: now, actor, parent, payload };
        sequence += 1;
        now += 1;
        let _ = fold.event(&event, object.as_deref());
    }
    let fired = fold.judge().found(reason);
    let harmless = Event {
        sequence,
        timestamp_ns: now,
        actor: ActorId::VM,
        parent: Some(ActorId::HOST),
        payload: spawn(),
    };
    let stayed = matches!(fold.event(&harmless, None), Ruling::Kill(_)) && fold.judge().found(reason);
    Ok((fired, stayed))
}

fn spawn() -> Payload {
    Payload::ProcessSpawn { binary: Digest::ZERO, argv: Digest::ZERO, cwd: NfcString::new("/") }
}

fn exit() -> Payload {
    Payload::ProcessExit { code: 0 }
}

fn decided(
    capability: Capability,
    resource: &str,
    decision: impl FnOnce(Decision) -> Decision,
    spec: &SealedSpec,
) -> Step {
    let request = CapabilityRequest::new(capability, resource, "", ActorId::FIRST_GUEST);
    let ours = Broker::decide(spec.policy().capabilities(), &request);
    let (payload, object) = decision(ours).to_payload(&request);
    Step::Event(ActorId::HOST, None, payload, Some(object))
}

fn denied(spec: &SealedSpec) -> Step {
    decided(Capability::NetEgress, "example.org:443", |ours| ours, spec)
}

fn mutated(path: &str) -> Step {
    let payload = Payload::FileMutation {
        op: FileOp::Create,
        path: NfcString::new(path),
        before: Digest::ZERO,
        after: Digest::of(b"x"),
    };
    Step::Event(ActorId::HOST, None, payload, None)
}

fn teardown(gone: bool) -> Step {
    let check = Check { what: "process".to_owned(), gone, detail: String::new() };
    Step::Fact(HostFact::Teardown { verified: gone, ms: 1, checks: vec![check] })
}

/// Repeats a step, with a wait before each but the first.
fn repeat(times: u64, wait_ns: u64, mut step: impl FnMut() -> Step) -> Vec<Step> {
    (0..times).flat_map(|at| [Step::Wait(if at == 0 { 0 } else { wait_ns }), step()]).collect()
}

const GUEST: ActorId = ActorId::FIRST_GUEST;

/// What must trip the rule, and what must not.
fn script(reason: Reason, spec: &SealedSpec) -> (Vec<Step>, Vec<Step>) {
    let thresholds = spec.policy().thresholds();
    let apart = |window_s: u32| (u64::from(window_s) + 1) * 1_000_000_000;
    let fact = |fact: HostFact| vec![Step::Fact(fact)];
    let by_host = |payload: Payload| Step::Event(ActorId::HOST, None, payload, None);
    let by_vm = |payload: Payload| Step::Event(ActorId::VM, Some(ActorId::HOST), payload, None);
    let by_guest = |payload: Payload| Step::Event(GUEST, Some(ActorId::HOST), payload, None);
    let action = || Payload::MemoryMap { addr: 0, length: 0, prot: 0 };
    let text = |text: &str| text.to_owned();
    let granted = |capability: Capability| {
        let yes = decided(capability, "x", |_| Decision::Allow(Rule::NeverGranted), spec);
        (vec![yes], vec![decided(capability, "x", |ours| ours, spec)])
    };
    let measured = |digest: Digest| HostFact::Measured { what: "kernel".to_owned(), digest, bytes: 1 };
    let violation = |kind: ViolationKind| {
        let seen = HostFact::Violation { kind, subject: String::new(), detail: String::new() };
        let other = HostFact::ClaimRefused {
            kind: ClaimKind::Spawn,
            code: crate::claims::RefusalCode::OrphanSpawn,
            count: 1,
        };
        (fact(seen), fact(other))
    };
    let exited = |expected| HostFact::VmExited { expected, status: String::new() };
    match reason {
        Reason::ContainmentFailure => (
            fact(HostFact::ContainmentFailure { what: text("self-test") }),
            fact(HostFact::Failed { stage: text("self-test"), error: String::new() }),
        ),
        Reason::VmLost => (fact(exited(false)), fact(exited(true))),
        Reason::GrantedNetEgress => granted(Capability::NetEgress),
        Reason::GrantedRawSyscall => granted(Capability::RawSyscall),
        Reason::GrantedPrivilegeRaise => granted(Capability::PrivilegeRaise),
        Reason::NetworkSeen => {
            let request = || Payload::NetworkRequest {
                protocol: Protocol::Tcp,
                destination: NfcString::new("x"),
                bytes_out: 1,
                bytes_in: 0,
            };
            (vec![by_host(request())], vec![by_guest(spawn()), by_guest(request())])
        }
        Reason::ImageMismatch => {
            (fact(measured(Digest::of(b"another"))), fact(measured(spec.image().kernel)))
        }
        Reason::ImpossibleMutation => (vec![mutated("/etc/x")], vec![mutated("/tmp/x")]),
        Reason::UnattributedAction => (vec![by_guest(action())], vec![by_guest(spawn()), by_guest(action())]),
        Reason::ActionAfterExit => (
            vec![by_guest(spawn()), by_guest(exit()), by_guest(action())],
            vec![by_guest(spawn()), by_guest(action()), by_guest(exit())],
        ),
        Reason::OrphanSpawn => {
            let orphan = || Step::Event(GUEST, Some(ActorId::VM), spawn(), None);
            (vec![orphan()], vec![by_vm(spawn()), orphan()])
        }
        Reason::ExitWithoutSpawn => (vec![by_guest(exit())], vec![by_guest(spawn()), by_guest(exit())]),
        Reason::DoubleSpawn => (vec![by_guest(spawn()), by_guest(spawn())], vec![by_guest(spawn())]),
        Reason::RespawnAfterExit => (
            vec![by_guest(spawn()), by_guest(exit()), by_guest(spawn())],
            vec![by_guest(spawn()), by_guest(exit())],
        ),
        Reason::DormantProcess => {
            let end = |with_exit: bool| {
                let exit = with_exit.then(|| by_host(exit()));
                exit.into_iter().chain([by_host(Payload::RunEnd), Step::Finish]).collect()
            };
            (end(false), end(true))
        }
        Reason::LineageFull => (
            vec![Step::Lineage(gate1::Code::LineageFull)],
            vec![Step::Lineage(gate1::Code::SeqGap), Step::Lineage(gate1::Code::TimeRegression)],
        ),
        Reason::EvaluatorFailure => (
            fact(HostFact::Fault { stage: text("self-test"), error: String::new() }),
            fact(HostFact::Failed { stage: text("self-test"), error: String::new() }),
        ),
        Reason::UnreadableEvidence => {
            let request = CapabilityRequest::new(Capability::NetEgress, "x", "", GUEST);
            let (payload, _) = Broker::decide(spec.policy().capabilities(), &request).to_payload(&request);
            (vec![by_host(payload)], vec![denied(spec)])
        }
        Reason::DecisionMismatch => {
            let allowed = |_| Decision::Allow(Rule::WriteTree);
            let step = |decision: fn(Decision) -> Decision| {
                vec![decided(Capability::FileWrite, "/workspace/x", decision, spec)]
            };
            (step(allowed), step(|ours| ours))
        }
        Reason::SpecMismatch => {
            let named = |digest| HostFact::Spec {
                run_id: spec.run_id().to_owned(),
                spec: digest,
                layers: Vec::new(),
            };
            (fact(named(Digest::of(b"another"))), fact(named(spec.digest())))
        }
        Reason::UnexplainedKill => (
            fact(HostFact::Kill { reasons: Vec::new(), at_sequence: 0 }),
            fact(HostFact::Interrupted { signal: 2 }),
        ),
        Reason::TeardownUnverified => (vec![teardown(false)], vec![teardown(true)]),
        Reason::RequestFlood => {
            let after = |made: u64| vec![Step::Decisions(made), denied(spec)];
            (after(MAX_DECISIONS), after(MAX_DECISIONS - 1))
        }
        Reason::DenialBurst => {
            let burst = u64::from(thresholds.denial_burst);
            (repeat(burst, 0, || denied(spec)), repeat(burst - 1, 0, || denied(spec)))
        }
        Reason::DenialEwma => {
            let run = run_to_exceed(thresholds.denial_ewma, DENIAL_WARM_UP);
            let wait = apart(thresholds.denial_window_s);
            (repeat(run, wait, || denied(spec)), repeat(run - 1, wait, || denied(spec)))
        }
        Reason::MutationBurst => {
            let burst = u64::from(thresholds.mutation_burst);
            let mut at = 0;
            let mut step = || {
                at += 1;
                mutated(&format!("/workspace/{at}"))
            };
            (repeat(burst, 0, &mut step), repeat(burst - 1, 0, &mut step))
        }
        Reason::MutationEwma => {
            let run = run_to_exceed(thresholds.mutation_ewma, MUTATION_WARM_UP);
            let wait = apart(thresholds.mutation_window_s);
            let mut at = 0;
            let mut step = || {
                at += 1;
                mutated(&format!("/workspace/{at}"))
            };
            (repeat(run, wait, &mut step), repeat(run - 1, wait, &mut step))
        }
        Reason::UnexplainedPrivilege
        | Reason::UnapprovedExecutable
        | Reason::ExecutedFromNoexec
        | Reason::KernelTextChanged
        | Reason::KernelTableChanged
        | Reason::ModuleLoaded
        | Reason::NetworkDevice
        | Reason::WritableRoot
        | Reason::HiddenProcess
        | Reason::UnexplainedNamespace
        | Reason::UnexplainedMount
        | Reason::RootChanged
        | Reason::VmmOutOfJail
        | Reason::ProcessOutlivedRun
        | Reason::NotThisVm
        | Reason::SandboxDestroyed => {
            match ViolationKind::ALL.iter().find(|kind| violation_reason(**kind) == reason) {
                Some(kind) => violation(*kind),
                None => (Vec::new(), Vec::new()),
            }
        }
    }
}
