//! A record written by hand, one event after another, and folded as it grows.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use hotcell_decide::{
    Admission, Broker, CapabilityRequest, Check, Decision, DerivedVerdict, ExecHow, HostFact, Ruling, Trip,
    VerdictFold,
};
use hotcell_ledger::{ActorId, Capability, Digest, Event, FileOp, NfcString, Payload};
use hotcell_policy::{Command, ImageRef, PolicyDraft, RunDraft, SealedSpec};
use proptest::prelude::ProptestConfig;

pub const SECOND: u64 = 1_000_000_000;

/// Failures are printed with their input; nothing is written next to the sources.
pub fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

pub fn image() -> ImageRef {
    ImageRef {
        name: "busybox".into(),
        kernel: Digest::of(b"kernel"),
        initramfs: Digest::of(b"initramfs"),
        root: Digest::of(b"root"),
    }
}

pub fn spec_with(change: impl FnOnce(&mut PolicyDraft)) -> SealedSpec {
    let mut policy = PolicyDraft::for_running_a_command();
    change(&mut policy);
    let mut draft = RunDraft::new("demo-0001", image(), policy);
    draft.command = Some(Command::new(["/bin/sh"]));
    draft.seal().unwrap()
}

pub fn spec() -> SealedSpec {
    spec_with(|_| {})
}

pub struct Script {
    pub spec: SealedSpec,
    pub fold: VerdictFold,
    pub events: Vec<(Event, Option<Vec<u8>>)>,
    pub admission: Admission,
    pub now: u64,
}

impl Script {
    /// Nothing yet.
    pub fn empty(spec: SealedSpec) -> Script {
        let fold = VerdictFold::new(&spec, None).unwrap();
        Script { spec, fold, events: Vec::new(), admission: Admission::new(), now: SECOND }
    }

    /// A run up to and with its first exec.
    pub fn started(spec: SealedSpec) -> Script {
        let mut script = Script::empty(spec);
        script.host(Payload::RunBegin);
        script.host(spawn());
        let spec = HostFact::Spec {
            run_id: script.spec.run_id().into(),
            spec: script.spec.digest(),
            layers: Vec::new(),
        };
        script.fact(spec);
        for (what, digest) in
            [("kernel", image().kernel), ("initramfs", image().initramfs), ("root", image().root)]
        {
            script.fact(HostFact::Measured { what: what.into(), digest, bytes: 1 });
        }
        script.fact(HostFact::SwitchProven { rules: 1 });
        script.push(ActorId::VM, Some(ActorId::HOST), spawn(), None);
        script.fact(HostFact::Isolation {
            backend: "fake".into(),
            accel: "none".into(),
            jail: "none".into(),
            details: Default::default(),
        });
        script.fact(HostFact::Ready { boot_ms: 1, kernel_release: "6".into() });
        script.exec(1);
        script
    }

    pub fn push(
        &mut self,
        actor: ActorId,
        parent: Option<ActorId>,
        payload: Payload,
        object: Option<Vec<u8>>,
    ) {
        let sequence = self.events.len() as u64;
        let event = Event { sequence, timestamp_ns: self.now, actor, parent, payload };
        let _ = self.fold.event(&event, object.as_deref());
        self.events.push((event, object));
        self.now += 1_000;
    }

    pub fn host(&mut self, payload: Payload) {
        self.push(ActorId::HOST, None, payload, None);
    }

    pub fn fact(&mut self, fact: HostFact) {
        let (payload, object) = fact.to_payload().unwrap();
        self.push(ActorId::HOST, None, payload, Some(object));
    }

    pub fn wait(&mut self, seconds: u64) {
        self.now += seconds * SECOND;
    }

    pub fn exec(&mut self, exec: u32) -> ActorId {
        let actor = self.admission.begin_exec(exec).unwrap();
        self.push(actor, Some(ActorId::VM), spawn(), None);
        actor
    }

    /// The broker decides, and the decision is recorded.
    pub fn ask(&mut self, capability: Capability, resource: &str) -> Decision {
        let request = CapabilityRequest::new(capability, resource, "please", ActorId::FIRST_GUEST);
        let decision = Broker::decide(self.spec.policy().capabilities(), &request);
        self.record_decision(&request, decision);
        decision
    }

    pub fn record_decision(&mut self, request: &CapabilityRequest, decision: Decision) {
        let (payload, object) = decision.to_payload(request);
        self.push(ActorId::HOST, None, payload, Some(object));
    }

    pub fn mutate(&mut self, op: FileOp, path: &str, before: &[u8], after: &[u8]) {
        let digest = |bytes: &[u8]| if bytes.is_empty() { Digest::ZERO } else { Digest::of(bytes) };
        self.host(Payload::FileMutation {
            op,
            path: NfcString::new(path),
            before: digest(before),
            after: digest(after),
        });
    }

    /// A claim arrives as the wire carries it, and is recorded if it is admitted, or reported if not.
    pub fn claim(&mut self, kind: u8, subject: u64, parent: u64, value: i32, text: &[u8]) -> bool {
        match self.admission.admit_wire((kind, subject, parent, value, text), self.fold.lineage()) {
            Ok(admitted) => {
                self.push(admitted.actor, admitted.parent, admitted.payload, admitted.object);
                true
            }
            Err(refusal) => {
                if let Some(fact) = refusal.fact {
                    self.fact(fact);
                }
                false
            }
        }
    }

    /// The exec ended, the machine is taken down, the record is closed.
    pub fn close(mut self) -> DerivedVerdict {
        self.finish_machine();
        self.close_record()
    }

    pub fn finish_machine(&mut self) {
        if let Some(actor) = self.admission.exec_actor(1)
            && self.fold.lineage().is_live(actor)
        {
            self.push(actor, Some(ActorId::VM), Payload::ProcessExit { code: 0 }, None);
            self.fact(HostFact::ExecEnded { exec: 1, how: ExecHow::Exited, code: Some(0), signal: None });
        }
        for fact in self.admission.summary() {
            self.fact(fact);
        }
        self.fact(HostFact::VmExited { expected: true, status: "signal 9".into() });
        self.fact(HostFact::Measured { what: "root_after".into(), digest: image().root, bytes: 1 });
        self.fact(teardown(true));
        for (actor, parent) in self.admission.still_live(self.fold.lineage()) {
            self.push(actor, Some(parent), Payload::ProcessExit { code: -9 }, None);
        }
        self.push(ActorId::VM, Some(ActorId::HOST), Payload::ProcessExit { code: 0 }, None);
    }

    pub fn close_record(mut self) -> DerivedVerdict {
        let closing = self.fold.closing();
        self.fact(closing.to_fact());
        self.host(Payload::ProcessExit { code: 0 });
        self.host(Payload::RunEnd);
        let verdict = self.fold.clone().finish();
        assert_eq!(verdict.verdict, closing.verdict, "closing foretold another verdict");
        assert_eq!(verdict.reasons, closing.reasons);
        assert!(verdict.agrees_with_record());
        assert_eq!(self.refold(), verdict, "a stranger concludes otherwise");
        verdict
    }

    /// The same record, folded again from nothing.
    pub fn refold(&self) -> DerivedVerdict {
        let spec = RunDraft::from_spec_json(&self.spec.to_json()).unwrap().seal().unwrap();
        let mut fold = VerdictFold::new(&spec, None).unwrap();
        for (event, object) in &self.events {
            let _ = fold.event(event, object.as_deref());
        }
        fold.finish()
    }

    pub fn trip(&self) -> Option<Trip> {
        match self.fold.ruling() {
            Ruling::Continue => None,
            Ruling::Kill(trip) => Some(trip.clone()),
        }
    }

    pub fn reasons(&self) -> Vec<String> {
        self.trip().map(|trip| trip.reason_names()).unwrap_or_default()
    }
}

pub fn spawn() -> Payload {
    Payload::ProcessSpawn {
        binary: Digest::of(b"binary"),
        argv: Digest::of(b"argv"),
        cwd: NfcString::new("/"),
    }
}

pub fn teardown(gone: bool) -> HostFact {
    HostFact::Teardown {
        verified: gone,
        ms: 3,
        checks: vec![Check { what: "VMM process".into(), gone, detail: "waited for".into() }],
    }
}
