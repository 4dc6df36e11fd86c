//! Gate 1: each code on its smallest stream, and properties over generated lineages.

use crate::generate::{spawn, tool};
use hotcell_ledger::gate1::check;
use hotcell_ledger::*;
use proptest::prelude::*;

/// Events of (actor, parent, payload), sequenced and timed as a recorder would.
fn stream(steps: &[(u64, Option<u64>, Payload)]) -> Vec<Event> {
    let host = ActorId::HOST.get();
    let mut all = vec![(host, None, Payload::RunBegin)];
    all.extend_from_slice(steps);
    all.push((host, None, Payload::RunEnd));
    sequenced(&all)
}

fn sequenced(steps: &[(u64, Option<u64>, Payload)]) -> Vec<Event> {
    steps
        .iter()
        .enumerate()
        .map(|(i, (actor, parent, payload))| Event {
            sequence: i as u64,
            timestamp_ns: 1000 + i as u64,
            actor: ActorId::new(*actor).unwrap(),
            parent: parent.and_then(ActorId::new),
            payload: payload.clone(),
        })
        .collect()
}

fn codes(events: &[Event]) -> Vec<Code> {
    check(events).violations.into_iter().map(|v| v.code).collect()
}

const EXIT: Payload = Payload::ProcessExit { code: 0 };

#[test]
fn each_code() {
    let s = || spawn("/");
    assert!(check(&[]).is_ok());
    assert!(check(&stream(&[])).is_ok());
    assert!(
        check(&stream(&[
            (1, None, s()),
            (2, Some(1), s()),
            (2, None, tool("t")),
            (2, None, EXIT),
            (1, None, EXIT)
        ]))
        .is_ok()
    );
    let of = |steps: &[(u64, Option<u64>, Payload)]| codes(&stream(steps));
    assert_eq!(of(&[(1, None, s()), (1, None, s()), (1, None, EXIT)]), [Code::DoubleSpawn]);
    assert_eq!(of(&[(1, None, s()), (1, None, EXIT), (1, None, s())]), [Code::RespawnAfterExit]);
    assert_eq!(of(&[(2, Some(1), s()), (2, None, EXIT)]), [Code::OrphanSpawn]);
    assert_eq!(of(&[(2, Some(2), s()), (2, None, EXIT)]), [Code::OrphanSpawn]);
    assert_eq!(
        of(&[(1, None, s()), (1, None, EXIT), (2, Some(1), s()), (2, None, EXIT)]),
        [Code::OrphanSpawn]
    );
    assert_eq!(of(&[(1, None, EXIT)]), [Code::ExitWithoutSpawn]);
    assert_eq!(of(&[(1, None, s()), (1, None, EXIT), (1, None, EXIT)]), [Code::ExitWithoutSpawn]);
    assert_eq!(of(&[(1, None, tool("t"))]), [Code::UnattributedAction]);
    assert_eq!(of(&[(1, None, s()), (1, None, EXIT), (1, None, tool("t"))]), [Code::ActionAfterExit]);
    assert_eq!(of(&[(1, None, s())]), [Code::UnterminatedActor]);
    assert_eq!(of(&[(1, None, Payload::RunBegin)]), [Code::NestedRunMarker]);
    assert_eq!(of(&[(1, None, Payload::RunEnd)]), [Code::NestedRunMarker]);

    let whole = stream(&[(1, None, s()), (1, None, EXIT)]);
    assert_eq!(codes(&whole[1..]), [Code::NoRunBegin]);
    assert_eq!(codes(&whole[..3]), [Code::NoRunEnd]);
    let mut gap = whole.clone();
    gap[3].sequence = 9;
    assert_eq!(codes(&gap), [Code::SeqGap]);
    let mut back = whole.clone();
    back[2].timestamp_ns = 0;
    assert_eq!(codes(&back), [Code::TimeRegression]);
    back[2].timestamp_ns = back[1].timestamp_ns;
    assert!(check(&back).is_ok());
}

#[test]
fn all_are_collected_and_the_list_is_bounded() {
    let steps: Vec<_> = (0..5000).map(|i| (i, Some(i + 9000), tool("t"))).collect();
    let report = check(&stream(&steps));
    assert_eq!(report.violations.len(), gate1::MAX_VIOLATIONS);
    assert_eq!(report.count(Code::UnattributedAction), 5000);
    assert_eq!(report.unlisted(), 4000);
}

#[test]
fn which_codes_are_fatal() {
    let fatal: Vec<_> = Code::ALL.into_iter().filter(|c| c.is_fatal()).map(Code::as_str).collect();
    let expected = [
        "DOUBLE_SPAWN",
        "RESPAWN_AFTER_EXIT",
        "ORPHAN_SPAWN",
        "EXIT_WITHOUT_SPAWN",
        "UNATTRIBUTED_ACTION",
        "ACTION_AFTER_EXIT",
        "UNTERMINATED_ACTOR",
        "LINEAGE_FULL",
    ];
    assert_eq!(fatal, expected);
    // A record that was cut short has not left anybody unterminated.
    let cut = &stream(&[(1, None, spawn("/"))])[..2];
    assert_eq!(codes(cut), [Code::NoRunEnd, Code::UnterminatedActor]);
    assert_eq!(check(cut).fatal().count(), 0);
}

/// A legal forest: each step spawns under a live actor or as a root, acts, or ends a live one; at the end all exit.
fn forest() -> impl Strategy<Value = Vec<(u64, Option<u64>, Payload)>> {
    prop::collection::vec((0u8..4, any::<prop::sample::Index>(), any::<bool>()), 1..60).prop_map(|choices| {
        let (mut live, mut steps, mut next) = (Vec::new(), Vec::new(), 0x1000u64);
        for (choice, pick, root) in choices {
            if live.is_empty() || choice < 2 {
                let parent = (!root && !live.is_empty()).then(|| live[pick.index(live.len())]);
                steps.push((next, parent, spawn("/")));
                live.push(next);
                next += 1;
            } else if choice == 2 {
                steps.push((live[pick.index(live.len())], None, tool("t")));
            } else {
                steps.push((live.swap_remove(pick.index(live.len())), None, EXIT));
            }
        }
        steps.extend(live.into_iter().map(|actor| (actor, None, EXIT)));
        steps
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn legal_forests_pass(steps in forest()) {
        prop_assert_eq!(codes(&stream(&steps)), []);
        let mut lineage = Lineage::new();
        for event in stream(&steps).iter().filter(|e| !matches!(e.payload, Payload::RunBegin | Payload::RunEnd)) {
            prop_assert_eq!(lineage.would_break(event), None);
            lineage.observe(event);
        }
    }

    /// Also with the sequences made dense again: it is the lineage that shows it.
    #[test]
    fn removing_or_duplicating_any_spawn_shows(steps in forest(), later in any::<prop::sample::Index>()) {
        let spawns = (0..steps.len()).filter(|i| matches!(steps[*i].2, Payload::ProcessSpawn { .. }));
        for index in spawns {
            let mut removed = steps.clone();
            let gone = removed.remove(index);
            prop_assert!(check(&stream(&removed)).fatal().next().is_some());
            let mut twice = steps.clone();
            twice.insert(index + 1 + later.index(steps.len() - index), gone);
            prop_assert!(check(&stream(&twice)).fatal().next().is_some());
        }
    }

    /// A claim that `would_break` lets pass never makes a fatal violation; one that it refuses always does.
    #[test]
    fn would_break_foretells(steps in prop::collection::vec((0u64..6, any::<Option<u8>>(), 0u8..4), 0..60)) {
        let mut lineage = Lineage::new();
        let steps: Vec<_> = steps.into_iter().map(|(actor, parent, kind)| {
            let payload = match kind { 0 | 1 => spawn("/"), 2 => EXIT, _ => tool("t") };
            (actor, parent.map(|p| u64::from(p % 6)), payload)
        }).collect();
        for event in stream(&steps).iter().take(steps.len() + 1) {
            let foretold = if event.payload == Payload::RunBegin { None } else { lineage.would_break(event) };
            let found: Vec<_> = lineage.observe(event).into_iter().map(|v| v.code).collect();
            prop_assert_eq!(foretold, found.first().copied());
            prop_assert_eq!(foretold.is_some(), found.iter().any(|c| c.is_fatal()));
        }
    }
}
