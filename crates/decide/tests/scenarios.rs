//! The six scenarios of L0 through the composed rules, and the verdict's own rules.
mod common;

use common::{Script, spawn, spec, spec_with, teardown};
use hotcell_decide::{Decision, HostFact, Reason, Verdict, VerdictFold};
use hotcell_ledger::gate1::Code;
use hotcell_ledger::{ActorId, Capability, FileOp, Payload};

#[test]
fn clean_run() {
    let mut run = Script::started(spec());
    assert!(matches!(run.ask(Capability::FileWrite, "/workspace/out.txt"), Decision::Allow(_)));
    run.mutate(FileOp::Create, "/workspace/out.txt", b"", b"result");
    run.mutate(FileOp::Create, "/tmp/scratch", b"", b"x");
    let verdict = run.close();
    assert_eq!(verdict.verdict, Verdict::Allowed);
    assert!(verdict.gate1.is_ok() && verdict.reasons.is_empty() && verdict.trip.is_none());
    assert_eq!(verdict.exit.unwrap().code, Some(0));
}

#[test]
fn one_denial_in_a_clean_run_does_not_kill() {
    let mut run = Script::started(spec());
    assert!(matches!(run.ask(Capability::NetEgress, "example.org:443"), Decision::Deny(_)));
    assert_eq!(run.close().verdict, Verdict::Allowed);
}

#[test]
fn read_only_breach() {
    let mut run = Script::started(spec());
    run.mutate(FileOp::Write, "/usr/bin/env", b"old", b"new");
    assert_eq!(run.reasons(), ["impossible_mutation"], "at once, mid-run");
    let verdict = run.close();
    assert_eq!(verdict.verdict, Verdict::Killed);
    assert!(verdict.trip.unwrap().is_absolute());
}

#[test]
fn patient_enumeration_beats_the_burst_but_not_the_average() {
    let mut run = Script::started(spec());
    for target in 0..5 {
        assert_eq!(run.trip(), None, "before request {target}");
        run.wait(61);
        let _ = run.ask(Capability::NetEgress, &format!("10.0.0.{target}:22"));
    }
    assert_eq!(run.reasons(), ["denial_ewma"]);
    assert_eq!(run.close().verdict, Verdict::Killed);
}

#[test]
fn a_deferral_counts_as_a_denial() {
    let pin = format!("numpy==2.3.1 sha256:{}", "ab".repeat(32));
    let mut run = Script::started(spec_with(|p| p.capabilities.packages = vec![pin.clone()]));
    for _ in 0..4 {
        assert!(matches!(run.ask(Capability::PackageInstall, "numpy==2.3.1"), Decision::Defer(_)));
    }
    assert_eq!(run.trip(), None);
    let _ = run.ask(Capability::PackageInstall, "numpy==2.3.1");
    assert_eq!(run.reasons(), ["denial_burst", "denial_ewma"]);
    let verdict = run.close();
    assert_eq!(verdict.pending_rebuild, [pin], "each once, with its artifact");
}

#[test]
fn diluted_enumeration_beats_the_average_but_not_the_burst() {
    let mut run = Script::started(spec());
    for target in 0..5 {
        assert_eq!(run.trip(), None, "before request {target}");
        for _ in 0..10 {
            let _ = run.ask(Capability::ProcessSpawn, "/bin/ls");
        }
        let _ = run.ask(Capability::RawSyscall, "bpf");
    }
    assert_eq!(run.reasons(), ["denial_burst"]);
}

/// What the two rules leave open, said in SPECIFICATION.md: both a wait and much good company. With a little less
/// of either they speak.
#[test]
fn denials_that_are_slow_and_diluted_pass() {
    let played = |wait_s: u64, grants: usize| {
        let mut run = Script::started(spec());
        for _ in 0..40 {
            run.now += wait_s * common::SECOND;
            for _ in 0..grants {
                let _ = run.ask(Capability::ProcessSpawn, "/bin/ls");
            }
            let _ = run.ask(Capability::RawSyscall, "bpf");
        }
        run.reasons()
    };
    assert_eq!(played(16, 10), [""; 0]);
    assert_eq!(played(14, 10), ["denial_burst"]);
    assert_eq!(played(16, 1), ["denial_ewma"]);
}

#[test]
fn a_legitimate_multi_actor_run() {
    let mut run = Script::started(spec());
    run.exec(2);
    assert!(run.claim(1, 100, 1, 0, b"/usr/bin/make"));
    assert!(run.claim(1, 101, 100, 0, b"/usr/bin/cc"));
    assert!(run.claim(1, 102, 100, 0, b"/usr/bin/ld"));
    assert!(run.claim(3, 101, 0, 1, b"/workspace/a.o"));
    assert!(run.claim(2, 101, 0, 0, b""));
    assert!(run.claim(2, 100, 0, 0, b""), "a parent may go before its child");
    assert!(run.claim(4, 102, 0, 0, b"search"));
    let verdict = run.close();
    assert_eq!(verdict.verdict, Verdict::Allowed);
    assert!(verdict.gate1.is_ok(), "{:?}", verdict.gate1);
}

#[test]
fn an_unattributed_action_is_refused_when_claimed() {
    let mut run = Script::started(spec());
    assert!(!run.claim(3, 777, 0, 2, b"/workspace/x"));
    let verdict = run.close();
    assert_eq!(verdict.verdict, Verdict::Allowed);
    assert!(verdict.gate1.is_ok());
}

#[test]
fn an_unattributed_action_is_fatal_when_recorded() {
    let mut run = Script::started(spec());
    let payload = Payload::MemoryMap { addr: 0, length: 1, prot: 7 };
    run.push(ActorId::new(0x4242).unwrap(), None, payload, None);
    assert_eq!(run.reasons(), ["unattributed_action"]);
    let verdict = run.close();
    assert_eq!(verdict.verdict, Verdict::Killed);
    assert_eq!(verdict.gate1.count(Code::UnattributedAction), 1);
}

#[test]
fn a_concealed_narrative_never_kills_and_never_spares() {
    // The guest tells of grants that never were, and leaves out what it was denied.
    let mut lying = Script::started(spec());
    for _ in 0..50 {
        assert!(lying.claim(6, 1, 0, 4, b"evil.example"), "a network request that the host can't have seen");
        assert!(lying.claim(5, 1, 0, 1 | 1 << 8, b"granted by HOST"));
        assert!(lying.claim(5, 1, 0, 6, b"denied"));
        assert!(lying.claim(3, 1, 0, 2, b"/etc/passwd"));
    }
    assert_eq!(lying.close().verdict, Verdict::Allowed);

    let mut praising = Script::started(spec());
    for _ in 0..4 {
        let _ = praising.ask(Capability::PrivilegeRaise, "root");
        for _ in 0..20 {
            assert!(praising.claim(5, 1, 0, 3 | 1 << 8, b"allowed"));
        }
    }
    let _ = praising.ask(Capability::PrivilegeRaise, "root");
    assert_eq!(praising.reasons(), ["denial_burst", "denial_ewma"]);
}

#[test]
fn failed_incomplete_and_killed_come_in_that_order() {
    let mut failed = Script::started(spec());
    failed.fact(HostFact::failed("copy", &"no space left"));
    let verdict = failed.close();
    assert_eq!((verdict.verdict, verdict.reasons), (Verdict::Failed, vec!["failed copy".to_owned()]));

    let mut both = Script::started(spec());
    both.fact(HostFact::failed("copy", &"no space left"));
    both.fact(HostFact::fault("collector", &"panicked"));
    assert_eq!(both.close().verdict, Verdict::Killed);

    let cut = Script::started(spec());
    let verdict = cut.refold();
    assert_eq!(
        verdict.verdict,
        Verdict::Incomplete,
        "a crash proves nothing about the actors that were live"
    );
    assert_eq!(verdict.reasons, ["no_run_end"]);
    assert!(verdict.agrees_with_record());

    let mut killed = Script::started(spec());
    killed.fact(HostFact::ContainmentFailure { what: "a wall".into() });
    assert_eq!(killed.refold().verdict, Verdict::Killed, "a kill needs no end");

    let empty = Script::empty(spec());
    assert_eq!(empty.refold().verdict, Verdict::Incomplete);
}

#[test]
fn a_record_that_says_nothing_is_not_a_pass() {
    let mut bare = Script::empty(spec());
    bare.host(Payload::RunBegin);
    bare.host(spawn());
    let verdict = bare.close_record();
    assert_eq!(verdict.verdict, Verdict::Incomplete);
    assert_eq!(verdict.reasons.len(), hotcell_decide::verdict::NEEDED.len());

    let whole = Script::started(spec());
    for skip in 0..whole.events.len() {
        let (event, _) = &whole.events[skip];
        let Payload::ToolCall { tool, .. } = &event.payload else { continue };
        let mut copy = Script::empty(spec());
        for (at, (event, object)) in whole.events.iter().enumerate() {
            if at != skip {
                copy.push(event.actor, event.parent, event.payload.clone(), object.clone());
            }
        }
        assert_eq!(copy.admission.begin_exec(1), Some(ActorId::FIRST_GUEST));
        assert_eq!(copy.close().verdict, Verdict::Incomplete, "without {tool}");
    }
}

#[test]
fn a_live_actor_at_the_end_is_a_dormant_process() {
    let mut run = Script::started(spec());
    run.fact(teardown(true));
    run.push(ActorId::VM, Some(ActorId::HOST), Payload::ProcessExit { code: 0 }, None);
    let verdict = run.close_record();
    assert_eq!(verdict.reasons, ["dormant_process"]);
}

#[test]
fn a_timeout_is_no_kill() {
    let mut run = Script::started(spec());
    run.fact(HostFact::Timeout { limit_ms: 1000 });
    let verdict = run.close();
    assert!(verdict.timed_out);
    assert_eq!(verdict.verdict, Verdict::Allowed);
}

#[test]
fn what_the_host_copied_in_is_explained_and_nothing_else() {
    let copied = |name: &str| HostFact::Copied {
        direction: hotcell_decide::Direction::In,
        path: format!("/workspace/in/{name}"),
        bytes: 1,
        digest: hotcell_ledger::Digest::of(name.as_bytes()),
        mode: 0o644,
    };
    let nothing_granted = || Script::started(spec_with(|p| p.capabilities.write_trees.clear()));
    let mut run = nothing_granted();
    // The last is spelt with a combining accent; a record spells it composed.
    let names = ["a", "b", "c", "e\u{301}"];
    names.iter().for_each(|name| run.fact(copied(name)));
    run.host(Payload::FileMutation {
        op: FileOp::Create,
        path: "/workspace/in".into(),
        before: hotcell_ledger::Digest::ZERO,
        after: hotcell_ledger::Digest::of(b""),
    });
    for name in names {
        run.mutate(FileOp::Create, &format!("/workspace/in/{name}"), b"", name.as_bytes());
    }
    assert_eq!(run.close().verdict, Verdict::Allowed);

    let mut changed = nothing_granted();
    for name in ["a", "b", "c"] {
        changed.fact(copied(name));
        changed.mutate(FileOp::Create, &format!("/workspace/in/{name}"), b"", b"something else");
    }
    assert_eq!(changed.reasons(), ["mutation_burst", "mutation_ewma"]);
}

#[test]
fn a_grant_holds_however_its_accents_are_spelt() {
    for spelt in ["/workspace/e\u{301}", "/workspace/\u{e9}"] {
        let mut run = Script::started(spec_with(|p| p.capabilities.write_trees = vec![spelt.into()]));
        for name in 0..5 {
            assert!(matches!(run.ask(Capability::FileWrite, "/workspace/e\u{301}/x"), Decision::Allow(_)));
            run.mutate(FileOp::Create, &format!("/workspace/e\u{301}/{name}"), b"", b"x");
        }
        assert_eq!(run.close().verdict, Verdict::Allowed);
    }
}

#[test]
fn a_record_of_another_run_is_not_judged_by_this_spec() {
    let run = Script::started(spec());
    let other = spec_with(|p| p.thresholds.denial_burst = 100);
    let mut fold = VerdictFold::new(&other, None).unwrap();
    for (event, object) in &run.events {
        let _ = fold.event(event, object.as_deref());
    }
    assert!(fold.judge().found(Reason::SpecMismatch));
}

#[test]
fn the_verdict_that_the_record_states_is_compared() {
    let mut run = Script::started(spec());
    run.mutate(FileOp::Write, "/usr/bin/env", b"old", b"new");
    run.finish_machine();
    run.fact(HostFact::Verdict { verdict: Verdict::Allowed, reasons: vec![], timed_out: false });
    run.host(Payload::ProcessExit { code: 0 });
    run.host(Payload::RunEnd);
    let verdict = run.refold();
    assert_eq!(verdict.verdict, Verdict::Killed);
    assert!(!verdict.agrees_with_record());
}

/// Every verdict but ALLOWED says why in words, reason by reason.
#[test]
fn a_verdict_says_why_in_words() {
    let mut killed = Script::started(spec());
    killed.mutate(FileOp::Write, "/usr/bin/env", b"old", b"new");
    let killed = killed.close();
    assert_eq!(killed.explained.len(), killed.reasons.len());
    assert!(
        killed.explained[0].contains("/usr/bin/env lies in the read-only root"),
        "{:?}",
        killed.explained
    );

    // Of very many failures a bounded number is named.
    let mut failed = Script::started(spec());
    for number in 0..40 {
        failed.fact(HostFact::failed("get", &format!("no file {number}")));
    }
    let failed = failed.close();
    assert_eq!((failed.verdict, failed.reasons.len(), failed.explained.len()), (Verdict::Failed, 16, 16));
    assert_eq!(failed.explained[3], "Hotcell could not do it, at get: no file 3.");

    let unended = Script::started(spec());
    let unended = unended.refold();
    assert_eq!(unended.verdict, Verdict::Incomplete);
    assert!(unended.explained.iter().any(|why| why.contains("(no_run_end)")), "{:?}", unended.explained);
    assert!(Script::started(spec()).close().explained.is_empty());
}
