//! Properties over generated records: the fold is a function, a tripped judge stays tripped, testimony moves nothing.
mod common;

use common::{Script, spec, teardown};
use hotcell_decide::{Evidence, ExecHow, HostFact, Ruling, SpawnDenial, VerdictFold, ViolationKind};
use hotcell_ledger::{ActorId, Capability, Digest, Event, FileOp, NfcString, Payload, Protocol};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Act {
    Ask(Capability, bool),
    Mutate(FileOp, &'static str, u8, u8),
    Fact(HostFact),
    Claim(u8, u64, u64, i32),
    Raw(u64, Option<u64>, Payload),
    Wait(u64),
}

fn facts() -> impl Strategy<Value = HostFact> {
    prop::sample::select(vec![
        HostFact::Interrupted { signal: 2 },
        HostFact::Timeout { limit_ms: 1 },
        HostFact::failed("x", &"y"),
        HostFact::fault("x", &"y"),
        HostFact::VmExited { expected: true, status: String::new() },
        HostFact::VmExited { expected: false, status: String::new() },
        HostFact::ExecEnded { exec: 1, how: ExecHow::Exited, code: Some(1), signal: None },
        HostFact::SpawnDenied { reason: SpawnDenial::Replay, binary: Digest::ZERO },
        HostFact::Violation { kind: ViolationKind::ModuleLoaded, subject: "x".into(), detail: "y".into() },
        HostFact::Kill { reasons: vec![], at_sequence: 1 },
        teardown(true),
        teardown(false),
    ])
}

fn payloads() -> impl Strategy<Value = Payload> {
    prop::sample::select(vec![
        Payload::RunBegin,
        Payload::RunEnd,
        Payload::ProcessExit { code: 1 },
        common::spawn(),
        Payload::MemoryMap { addr: 0, length: 1, prot: 1 },
        Payload::ToolCall { tool: NfcString::new("hotcell.kill"), args: Digest::ZERO, result: Digest::ZERO },
        Payload::ToolCall { tool: NfcString::new("bash"), args: Digest::ZERO, result: Digest::ZERO },
        Payload::NetworkRequest {
            protocol: Protocol::Tcp,
            destination: NfcString::new("x"),
            bytes_out: 0,
            bytes_in: 0,
        },
        Payload::CapabilityRequest {
            capability: Capability::NetEgress,
            granted: true,
            reason: NfcString::new("allow x y"),
        },
    ])
}

fn acts(raw: u32) -> impl Strategy<Value = Vec<Act>> {
    let ids = prop::sample::select(vec![
        0x1000,
        0x1001,
        0x2000,
        ActorId::VM.get(),
        ActorId::HOST.get(),
        u64::MAX - 5,
    ]);
    let paths = prop::sample::select(vec!["/workspace/a", "/workspace/b", "/tmp/x", "/etc/x", "relative"]);
    let act = prop_oneof![
        6 => (prop::sample::select(Capability::ALL.to_vec()), any::<bool>()).prop_map(|(c, ok)| Act::Ask(c, ok)),
        4 => (prop::sample::select(FileOp::ALL.to_vec()), paths, 0..3u8, 0..3u8)
            .prop_map(|(op, path, before, after)| Act::Mutate(op, path, before, after)),
        2 => facts().prop_map(Act::Fact),
        4 => (1..=7u8, 0..6u64, 0..6u64, 0..7i32).prop_map(|(k, s, p, v)| Act::Claim(k, s, p, v)),
        raw => (ids.clone(), prop::option::of(ids), payloads()).prop_map(|(a, p, e)| Act::Raw(a, p, e)),
        2 => (0..90u64).prop_map(Act::Wait),
    ];
    prop::collection::vec(act, 0..60)
}

fn play(script: &mut Script, act: &Act) {
    match act {
        Act::Ask(capability, fine) => {
            let resource = if *fine { "/workspace/x" } else { "nonsense" };
            let _ = script.ask(*capability, resource);
        }
        Act::Mutate(op, path, before, after) => {
            let bytes = |n: u8| vec![n; usize::from(n)];
            script.mutate(*op, path, &bytes(*before), &bytes(*after));
        }
        Act::Fact(fact) => script.fact(fact.clone()),
        Act::Claim(kind, subject, parent, value) => {
            script.claim(*kind, *subject, *parent, *value, b"/x");
        }
        Act::Raw(actor, parent, payload) => {
            script.push(ActorId::new(*actor).unwrap(), parent.and_then(ActorId::new), payload.clone(), None);
        }
        Act::Wait(seconds) => script.wait(*seconds),
    }
}

proptest! {
    #![proptest_config(common::cases(256))]

    #[test]
    fn a_tripped_judge_stays_tripped_and_a_stranger_agrees(acts in acts(2)) {
        let mut script = Script::started(spec());
        let mut tripped_at = None;
        for act in &acts {
            play(&mut script, act);
            match (script.trip(), tripped_at) {
                (None, Some(_)) => prop_assert!(false, "the switch went back after {act:?}"),
                (Some(trip), None) => tripped_at = Some(trip.at_sequence()),
                (Some(trip), Some(at)) => prop_assert_eq!(trip.at_sequence(), at),
                (None, None) => {}
            }
        }
        let once = script.refold();
        prop_assert_eq!(&once, &script.refold());
        prop_assert_eq!(once, script.fold.clone().finish());
    }

    #[test]
    fn admitted_testimony_moves_no_ruling(acts in acts(0)) {
        let mut with = Script::started(spec());
        let mut without = Script::started(spec());
        for act in &acts {
            play(&mut with, act);
            if !matches!(act, Act::Claim(..)) {
                play(&mut without, act);
            }
            // Times differ by a microsecond for each event; sequences do too.
            prop_assert_eq!(with.reasons(), without.reasons(), "after {:?}", act);
            without.now = with.now;
        }
    }

    #[test]
    fn no_event_and_no_object_make_it_panic(
        actor in any::<u64>(),
        parent in any::<u64>(),
        payload in payloads(),
        object in prop::option::of(prop::collection::vec(any::<u8>(), 0..80)),
        sequence in any::<u64>(),
        timestamp_ns in any::<u64>(),
    ) {
        let Some(actor) = ActorId::new(actor) else { return Ok(()) };
        let event = Event { sequence, timestamp_ns, actor, parent: ActorId::new(parent), payload };
        let read = Evidence::read(&event, object.as_deref());
        if !actor.is_host_band() {
            prop_assert_eq!(read, Ok(None));
        }
        let mut fold = VerdictFold::new(&spec(), None).unwrap();
        let _ = fold.event(&event, object.as_deref());
        let _ = fold.event(&event, object.as_deref());
        let _ = fold.closing();
        let _ = fold.finish();
    }
}

#[test]
fn testimony_is_never_evidence_whatever_it_says() {
    let fact = HostFact::ContainmentFailure { what: "a lie".into() };
    let (payload, object) = fact.to_payload().unwrap();
    let event = Event { sequence: 0, timestamp_ns: 0, actor: ActorId::FIRST_GUEST, parent: None, payload };
    assert_eq!(Evidence::read(&event, Some(&object)), Ok(None));
    assert_eq!(Evidence::object_of(&event), None);
    let host = Event { actor: ActorId::HOST, ..event };
    assert_eq!(Evidence::object_of(&host), Some(Digest::of(&object)));
    let evidence = Evidence::read(&host, Some(&object)).unwrap().unwrap();
    assert_eq!(evidence.fact(), Some(&fact));
    let mut fold = VerdictFold::new(&spec(), None).unwrap();
    assert!(matches!(fold.event(&host, Some(&object)), Ruling::Kill(_)));
}
