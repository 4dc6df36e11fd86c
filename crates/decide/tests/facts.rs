//! Facts: one spelling, nothing unknown, a bound; and the broker's and claims' own tables.
mod common;

use hotcell_decide::fact::{MAX_ERROR_CHARS, MAX_FACT_BYTES};
use hotcell_decide::{
    Check, ClaimKind, Direction, DiskMoment, ExecHow, FactError, HostFact, LayerState, OutputStream,
    RefusalCode, SeenProcess, SpawnDenial, Verdict, ViolationKind,
};
use hotcell_ledger::{Digest, Payload};
use std::collections::BTreeMap;

fn one_of_each() -> Vec<HostFact> {
    let text = String::from;
    let digest = Digest::of(b"x");
    vec![
        HostFact::Spec {
            run_id: text("demo-0001"),
            spec: digest,
            layers: vec![LayerState { layer: text("L7"), armed: false, basis: text("no baseline") }],
        },
        HostFact::Measured { what: text("kernel"), digest, bytes: 1 },
        HostFact::SwitchProven { rules: 1 },
        HostFact::Isolation {
            backend: text("qemu"),
            accel: text("tcg"),
            jail: text("userns"),
            details: [(text("a"), text("b"))].into(),
        },
        HostFact::Ready { boot_ms: 1, kernel_release: text("6.12") },
        HostFact::Service { exec: 1, name: text("runner"), binary: digest },
        HostFact::Output {
            exec: 1,
            stream: OutputStream::Stdout,
            total_bytes: 2,
            kept_bytes: 1,
            truncated: true,
            whole: digest,
            kept: digest,
        },
        HostFact::SpawnDenied { reason: SpawnDenial::Replay, binary: digest },
        HostFact::ClaimRefused { kind: ClaimKind::Exit, code: RefusalCode::ForgedExit, count: 2 },
        HostFact::Timeout { limit_ms: 1 },
        HostFact::Interrupted { signal: 2 },
        HostFact::failed("boot", &"no kernel"),
        HostFact::fault("boot", &"panicked"),
        HostFact::ContainmentFailure { what: text("x") },
        HostFact::VmExited { expected: true, status: text("0") },
        HostFact::ExecEnded { exec: 1, how: ExecHow::TimedOut, code: None, signal: Some(9) },
        HostFact::Copied {
            direction: Direction::In,
            path: text("/workspace/a"),
            bytes: 1,
            digest,
            mode: 0o100_644,
        },
        HostFact::CopyEnded {
            exec: 2,
            direction: Direction::Out,
            path: text("/workspace/a"),
            entries: 1,
            bytes: 1,
            left_out: 0,
            error: Some(text("x")),
        },
        HostFact::Armed { observer: text("ram"), armed: true, basis: text("x") },
        HostFact::ProcessRoll { roll: 1, processes: vec![(7, 9), (8, 10)], own: vec![1, 2], left_out: 0 },
        HostFact::Processes {
            seen: vec![SeenProcess {
                pid: 7,
                parent: 1,
                user: 1000,
                name: text("sh"),
                executable: text("/bin/sh"),
                argv: text("sh -c x"),
            }],
            left_out: 0,
            live: 60,
            total: 1,
        },
        HostFact::Watched { looks: 3, longest_gap_ms: 51, cpu_ms: 2 },
        HostFact::DiskRead {
            reading: 2,
            at: DiskMoment::Quiet,
            names: 7,
            listing: digest,
            changes: 3,
            unread: Some(text("x")),
        },
        HostFact::MutationsCounted {
            within: vec![text("/workspace")],
            changes: BTreeMap::from([(text("create"), 5)]),
            why: text("y"),
        },
        HostFact::Violation { kind: ViolationKind::ModuleLoaded, subject: text("x"), detail: text("y") },
        HostFact::Kill { reasons: vec![text("vm_lost")], at_sequence: 7 },
        HostFact::Teardown {
            verified: true,
            ms: 1,
            checks: vec![Check { what: text("process"), gone: true, detail: text("") }],
        },
        HostFact::Verdict { verdict: Verdict::Allowed, reasons: vec![], timed_out: false },
    ]
}

#[test]
fn every_fact_survives_its_object_under_its_own_name() {
    let mut names = Vec::new();
    for fact in one_of_each() {
        let object = fact.to_object().unwrap();
        assert_eq!(HostFact::from_object(&object).unwrap(), fact);
        let json: serde_json::Value = serde_json::from_slice(&object).unwrap();
        assert_eq!(format!("hotcell.{}", json["fact"].as_str().unwrap()), fact.tool_name());
        let (payload, bytes) = fact.to_payload().unwrap();
        assert_eq!(bytes, object);
        let Payload::ToolCall { tool, args, result } = payload else { panic!("not a tool call") };
        assert_eq!(
            (tool.as_str(), args, result),
            (fact.tool_name(), Digest::of(&object), fact.result_digest())
        );
        names.push(fact.tool_name());
    }
    names.dedup();
    assert_eq!(names.len(), 28);
}

#[test]
fn an_unknown_field_is_refused_in_every_fact() {
    for fact in one_of_each() {
        let mut json: serde_json::Value = serde_json::from_slice(&fact.to_object().unwrap()).unwrap();
        json.as_object_mut().unwrap().insert("extra".into(), 1.into());
        let error = HostFact::from_object(&serde_json::to_vec(&json).unwrap()).unwrap_err();
        assert!(matches!(&error, FactError::Unreadable(why) if why.contains("extra")), "{fact:?}: {error}");
    }
}

#[test]
fn nested_and_repeated_fields_are_refused_too() {
    for text in [
        r#"{"fact":"teardown","verified":true,"ms":1,"checks":[{"what":"a","gone":true,"detail":"","x":1}]}"#,
        r#"{"fact":"interrupted","signal":2,"signal":3}"#,
        r#"{"fact":"interrupted","fact":"interrupted","signal":2}"#,
        r#"{"fact":"nothing_known","signal":2}"#,
        r#"{"signal":2}"#,
        r#"{"fact":"interrupted"}"#,
        r#"[]"#,
        "",
    ] {
        assert!(matches!(HostFact::from_object(text.as_bytes()), Err(FactError::Unreadable(_))), "{text}");
    }
}

#[test]
fn another_spelling_is_refused() {
    for text in [
        r#"{"fact":"interrupted", "signal":2}"#,
        r#"{"signal":2,"fact":"interrupted"}"#,
        "{\"fact\":\"interrupted\",\"signal\":2}\n",
        r#"{"fact":"exec_ended","exec":1,"how":"exited","code":0}"#,
        r#"{"fact":"containment_failure","what":"\u0041"}"#,
    ] {
        assert_eq!(HostFact::from_object(text.as_bytes()), Err(FactError::NotCanonical), "{text}");
    }
}

#[test]
fn a_fact_is_bounded() {
    let fact = |len| HostFact::ContainmentFailure { what: "a".repeat(len) };
    let frame = fact(0).to_object().unwrap().len();
    assert_eq!(fact(MAX_FACT_BYTES - frame).to_object().unwrap().len(), MAX_FACT_BYTES);
    assert!(matches!(fact(MAX_FACT_BYTES - frame + 1).to_object(), Err(FactError::TooLong { .. })));
    assert!(matches!(HostFact::from_object(&vec![b' '; MAX_FACT_BYTES + 1]), Err(FactError::TooLong { .. })));
    let long = HostFact::fault("stage", &"\u{1}".repeat(1 << 20));
    assert!(long.to_object().unwrap().len() > MAX_ERROR_CHARS, "an error of any length can be recorded");
}
