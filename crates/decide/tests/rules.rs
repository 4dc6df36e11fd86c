//! Each kill rule: one case in which it fires and one in which it just does not.
mod common;

use common::{Script, spawn, spec, spec_with, teardown};
use hotcell_decide::broker::MAX_DECISIONS;
use hotcell_decide::{
    Broker, CapabilityRequest, Check, ClaimKind, Decision, HostFact, Judge, Reason, RefusalCode, Rule,
    SpawnDenial, ViolationKind,
};
use hotcell_ledger::{ActorId, Capability, Digest, Event, FileOp, NfcString, Payload, Protocol};

fn reasons(play: impl FnOnce(&mut Script)) -> Vec<String> {
    let mut script = Script::started(spec());
    assert_eq!(script.trip(), None, "the opening is clean");
    play(&mut script);
    script.reasons()
}

fn fires(reason: Reason, play: impl FnOnce(&mut Script)) {
    assert_eq!(reasons(play), [reason.name()]);
}

fn holds(play: impl FnOnce(&mut Script)) {
    assert_eq!(reasons(play), [""; 0]);
}

#[test]
fn the_switch_proves_every_rule_under_any_thresholds() {
    assert_eq!(Judge::prove(&spec()), Ok(Reason::ALL.len()));
    for (burst, ewma) in [(1, 0.05), (100, 0.95), (2, 0.15), (50, 0.35)] {
        let spec = spec_with(|p| {
            p.thresholds.denial_burst = burst;
            p.thresholds.mutation_burst = burst;
            p.thresholds.denial_ewma = ewma;
            p.thresholds.mutation_ewma = ewma;
            p.thresholds.denial_window_s = 3600;
            p.thresholds.mutation_window_s = 1;
        });
        assert_eq!(Judge::prove(&spec), Ok(Reason::ALL.len()), "{burst} {ewma}");
    }
}

#[test]
fn containment_failure() {
    fires(Reason::ContainmentFailure, |s| s.fact(HostFact::ContainmentFailure { what: "a wall".into() }));
    holds(|s| s.fact(HostFact::Interrupted { signal: 15 }));
}

#[test]
fn a_machine_that_ended_by_itself() {
    fires(Reason::VmLost, |s| s.fact(HostFact::VmExited { expected: false, status: "exit 0".into() }));
    holds(|s| s.fact(HostFact::VmExited { expected: true, status: "signal 9".into() }));
}

#[test]
fn grants_of_what_is_never_granted() {
    for (capability, reason) in [
        (Capability::NetEgress, "granted_net_egress"),
        (Capability::RawSyscall, "granted_raw_syscall"),
        (Capability::PrivilegeRaise, "granted_privilege_raise"),
    ] {
        let request = CapabilityRequest::new(capability, "x", "", ActorId::FIRST_GUEST);
        let found = reasons(|s| s.record_decision(&request, Decision::Allow(Rule::SpawnAllowed)));
        assert_eq!(found, [reason, "decision_mismatch"]);
        holds(|s| {
            let _ = s.ask(capability, "x");
        });
    }
}

#[test]
fn a_decision_that_the_policy_does_not_make() {
    let request =
        |resource| CapabilityRequest::new(Capability::FileWrite, resource, "", ActorId::FIRST_GUEST);
    fires(Reason::DecisionMismatch, |s| {
        s.record_decision(&request("/etc/passwd"), Decision::Allow(Rule::WriteTree));
    });
    fires(Reason::DecisionMismatch, |s| {
        s.record_decision(&request("/workspace/x"), Decision::Deny(Rule::WriteNotListed));
    });
    fires(Reason::DecisionMismatch, |s| {
        s.record_decision(&request("/workspace/x"), Decision::Allow(Rule::WriteExact));
    });
    holds(|s| s.record_decision(&request("/workspace/x"), Decision::Allow(Rule::WriteTree)));
}

#[test]
fn a_granted_flag_that_its_reason_denies() {
    fires(Reason::DecisionMismatch, |s| {
        let request = CapabilityRequest::new(Capability::FileWrite, "/etc/x", "", ActorId::FIRST_GUEST);
        let decision = Broker::decide(s.spec.policy().capabilities(), &request);
        let (payload, object) = decision.to_payload(&request);
        let Payload::CapabilityRequest { capability, reason, .. } = payload else { unreachable!() };
        let flipped = Payload::CapabilityRequest { capability, granted: true, reason };
        s.push(ActorId::HOST, None, flipped, Some(object));
    });
}

#[test]
fn a_network_request_that_the_host_saw() {
    let request = || Payload::NetworkRequest {
        protocol: Protocol::Dns,
        destination: NfcString::new("example.org"),
        bytes_out: 40,
        bytes_in: 0,
    };
    fires(Reason::NetworkSeen, |s| s.host(request()));
    holds(|s| s.push(ActorId::FIRST_GUEST, Some(ActorId::VM), request(), None));
}

#[test]
fn an_image_that_is_not_the_measured_one() {
    let measured = |what: &str, bytes: &[u8]| HostFact::Measured {
        what: what.into(),
        digest: Digest::of(bytes),
        bytes: 1,
    };
    fires(Reason::RootChanged, |s| s.fact(measured("root_after", b"another")));
    holds(|s| s.fact(measured("root_after", b"root")));
    for what in ["kernel", "initramfs", "root"] {
        fires(Reason::ImageMismatch, |s| s.fact(measured(what, b"another")));
        holds(|s| s.fact(measured(what, what.as_bytes())));
    }
    holds(|s| s.fact(measured("vmm", b"anything")));
}

#[test]
fn mutations_where_nothing_can_change() {
    for path in [
        "/etc/passwd",
        "/usr/lib/x",
        "/opt/x",
        "/workspace/../etc/passwd",
        "/workspacefoo",
        "relative",
        "/..",
    ] {
        fires(Reason::ImpossibleMutation, |s| s.mutate(FileOp::Create, path, b"", b"x"));
    }
    for path in ["/workspace/x", "/tmp/x", "/run/x", "/dev/shm/x", "//workspace/./x"] {
        holds(|s| s.mutate(FileOp::Create, path, b"", b"x"));
    }
}

#[test]
fn unexplained_mutations_by_burst_and_by_average() {
    let bare = || Script::started(spec_with(|p| p.capabilities.write_trees.clear()));
    let mut burst = bare();
    burst.mutate(FileOp::Create, "/workspace/1", b"", b"x");
    burst.mutate(FileOp::Create, "/workspace/2", b"", b"x");
    assert_eq!(burst.trip(), None, "two are not three");
    burst.mutate(FileOp::Create, "/workspace/3", b"", b"x");
    assert_eq!(burst.reasons(), ["mutation_burst", "mutation_ewma"]);

    let mut patient = bare();
    for name in 1..=2 {
        patient.mutate(FileOp::Create, &format!("/workspace/{name}"), b"", b"x");
        patient.wait(61);
    }
    assert_eq!(patient.trip(), None);
    patient.mutate(FileOp::Create, "/workspace/3", b"", b"x");
    assert_eq!(patient.reasons(), ["mutation_ewma"]);

    let mut diluted = bare();
    for name in 1..=3 {
        assert_eq!(diluted.trip(), None);
        for scratch in 0..10 {
            diluted.mutate(FileOp::Create, &format!("/tmp/{name}-{scratch}"), b"", b"x");
        }
        diluted.mutate(FileOp::Create, &format!("/workspace/{name}"), b"", b"x");
    }
    assert_eq!(diluted.reasons(), ["mutation_burst"]);
}

#[test]
fn lineage_breaks_of_the_recorder() {
    let actor = |id| ActorId::new(id).unwrap();
    let exit = || Payload::ProcessExit { code: 0 };
    let act = || Payload::MemoryMap { addr: 0, length: 0, prot: 0 };
    let vm = Some(ActorId::VM);
    fires(Reason::UnattributedAction, |s| s.push(actor(0x2000), vm, act(), None));
    fires(Reason::ExitWithoutSpawn, |s| s.push(actor(0x2000), vm, exit(), None));
    fires(Reason::OrphanSpawn, |s| s.push(actor(0x2000), Some(actor(0x3000)), spawn(), None));
    fires(Reason::DoubleSpawn, |s| s.push(ActorId::FIRST_GUEST, vm, spawn(), None));
    fires(Reason::RespawnAfterExit, |s| {
        s.push(ActorId::FIRST_GUEST, vm, exit(), None);
        s.push(ActorId::FIRST_GUEST, vm, spawn(), None);
    });
    fires(Reason::ActionAfterExit, |s| {
        s.push(ActorId::FIRST_GUEST, vm, exit(), None);
        s.push(ActorId::FIRST_GUEST, vm, act(), None);
    });
    holds(|s| {
        s.push(actor(0x2000), vm, spawn(), None);
        s.push(actor(0x2000), vm, act(), None);
        s.push(actor(0x2000), vm, exit(), None);
    });
}

#[test]
fn gaps_and_falling_clocks_are_recorded_and_not_fatal() {
    let mut script = Script::started(spec());
    script.now = 1;
    script.fact(HostFact::Interrupted { signal: 2 });
    assert_eq!(script.trip(), None);
    assert!(!script.refold().gate1.is_ok());
}

#[test]
fn evaluator_failures() {
    fires(Reason::EvaluatorFailure, |s| s.fact(HostFact::fault("observer", &"panicked")));
    fires(Reason::EvaluatorFailure, |s| s.fact(HostFact::SwitchProven { rules: 0 }));
    fires(Reason::EvaluatorFailure, |s| s.mutate(FileOp::Write, "/workspace/x", b"same", b"same"));
    fires(Reason::EvaluatorFailure, |s| s.mutate(FileOp::Delete, "/workspace/x", b"", b"x"));
    fires(Reason::EvaluatorFailure, |s| {
        let tool = NfcString::new("hotcell.teardown");
        let payload = Payload::ToolCall { tool, args: Digest::ZERO, result: Digest::ZERO };
        s.push(ActorId::FIRST_GUEST, Some(ActorId::VM), payload, None);
    });
    holds(|s| s.fact(HostFact::failed("copy", &"no space")));
}

#[test]
fn evidence_that_cannot_be_read() {
    let fact = HostFact::Interrupted { signal: 2 };
    let (payload, object) = fact.to_payload().unwrap();
    let push = |payload: Payload, object: Option<Vec<u8>>| {
        move |s: &mut Script| s.push(ActorId::HOST, None, payload, object)
    };
    fires(Reason::UnreadableEvidence, push(payload.clone(), None));
    fires(Reason::UnreadableEvidence, push(payload.clone(), Some(b"{}".to_vec())));
    let other = Payload::ToolCall {
        tool: NfcString::new("hotcell.kill"),
        args: Digest::of(&object),
        result: Digest::ZERO,
    };
    fires(Reason::UnreadableEvidence, push(other, Some(object.clone())));
    let about = Payload::ToolCall {
        tool: NfcString::new("hotcell.interrupted"),
        args: Digest::of(&object),
        result: Digest::of(b"x"),
    };
    fires(Reason::UnreadableEvidence, push(about, Some(object.clone())));
    let plain = Payload::ToolCall { tool: NfcString::new("bash"), args: Digest::ZERO, result: Digest::ZERO };
    fires(Reason::UnreadableEvidence, push(plain, None));
    fires(Reason::UnreadableEvidence, push(Payload::MemoryMap { addr: 0, length: 0, prot: 0 }, None));
    fires(Reason::UnreadableEvidence, |s| {
        let mark = |sequence| Event {
            sequence,
            timestamp_ns: s.now,
            actor: ActorId::new(ActorId::HOST_BAND_START).unwrap(),
            parent: None,
            payload: spawn(),
        };
        let event = mark(s.events.len() as u64);
        let _ = s.fold.event(&event, None);
    });
    holds(push(payload, Some(object)));
}

#[test]
fn a_kill_without_a_cause() {
    let kill = || HostFact::Kill { reasons: vec!["containment_failure".into()], at_sequence: 3 };
    fires(Reason::UnexplainedKill, |s| s.fact(kill()));
    fires(Reason::ContainmentFailure, |s| {
        s.fact(HostFact::ContainmentFailure { what: "a wall".into() });
        s.fact(kill());
    });
}

#[test]
fn teardown_must_be_proven() {
    fires(Reason::TeardownUnverified, |s| s.fact(teardown(false)));
    fires(Reason::TeardownUnverified, |s| {
        s.fact(HostFact::Teardown { verified: true, ms: 1, checks: vec![] })
    });
    fires(Reason::TeardownUnverified, |s| {
        let check = |gone| Check { what: "cgroup".into(), gone, detail: String::new() };
        s.fact(HostFact::Teardown { verified: true, ms: 1, checks: vec![check(true), check(false)] });
    });
    holds(|s| s.fact(teardown(true)));
}

#[test]
fn what_the_host_sees_inside_each_by_its_own_name() {
    for kind in ViolationKind::ALL {
        let fact = HostFact::Violation { kind: *kind, subject: "pid 7".into(), detail: "seen".into() };
        let name = serde_json::to_value(kind).unwrap();
        assert_eq!(reasons(|s| s.fact(fact)), [name.as_str().unwrap()]);
    }
    holds(|s| {
        s.fact(HostFact::ClaimRefused {
            kind: ClaimKind::Exit,
            code: RefusalCode::ForgedExit,
            count: 1_000_000,
        });
    });
}

#[test]
fn denied_spawns_count_unless_the_binary_is_merely_unknown() {
    let denied = |reason| HostFact::SpawnDenied { reason, binary: Digest::of(b"x") };
    for reason in SpawnDenial::ALL {
        let found = reasons(|s| (0..5).for_each(|_| s.fact(denied(*reason))));
        if *reason == SpawnDenial::UnknownBinary {
            assert!(found.is_empty());
            holds(|s| (0..500).for_each(|_| s.fact(denied(*reason))));
        } else {
            assert_eq!(found, ["denial_burst", "denial_ewma"]);
            holds(|s| (0..4).for_each(|_| s.fact(denied(*reason))));
        }
    }
}

#[test]
fn tripped_stays_tripped_whatever_follows() {
    let mut script = Script::started(spec());
    script.fact(HostFact::fault("x", &"y"));
    let first = script.trip().unwrap();
    for _ in 0..1000 {
        let _ = script.ask(Capability::FileWrite, "/workspace/x");
    }
    script.fact(HostFact::SwitchProven { rules: 40 });
    script.fact(teardown(false));
    let later = script.trip().unwrap();
    assert_eq!(later.at_sequence(), first.at_sequence());
    assert_eq!(
        later.reason_names(),
        ["evaluator_failure", "teardown_unverified"],
        "and further causes are noted"
    );
}

#[test]
fn even_allowed_requests_are_bounded() {
    let asked = |times: u64| {
        reasons(|s| {
            for _ in 0..times {
                assert!(s.ask(Capability::FileWrite, "/workspace/x").is_granted());
            }
        })
    };
    assert_eq!(asked(MAX_DECISIONS), [""; 0]);
    assert_eq!(asked(MAX_DECISIONS + 1), ["request_flood"]);
}
