//! A lying guest: floods, forged exits and spawns, claims after the end, attempts at the host's band.
mod common;

use common::{Script, spec};
use hotcell_decide::claims::{MAX_ADMITTED, MAX_CLAIM_TEXT, MAX_CLAIMED_ACTORS, MAX_RUN_EXECS};
use hotcell_decide::{Admission, ClaimKind, GuestClaim, HostFact, RefusalCode, Verdict};
use hotcell_ledger::gate1::Lineage;
use hotcell_ledger::{ActorId, Payload};
use proptest::prelude::*;

fn refused(script: &mut Script, claim: (u8, u64, u64, i32, &[u8])) -> RefusalCode {
    script.admission.admit_wire(claim, script.fold.lineage()).unwrap_err().code
}

#[test]
fn each_lie_is_refused_by_its_name() {
    let mut s = Script::started(spec());
    assert!(s.claim(1, 50, 1, 0, b"/bin/true"));
    let host = ActorId::HOST.get();
    let long = vec![b'a'; MAX_CLAIM_TEXT + 1];
    for (claim, code) in [
        ((0x7E, 1, 0, 0, b"".as_slice()), RefusalCode::NotClaimable),
        ((0x7F, 1, 0, 0, b""), RefusalCode::NotClaimable),
        ((0, 1, 0, 0, b""), RefusalCode::NotClaimable),
        ((1, host, 1, 0, b"x"), RefusalCode::HostBand),
        ((2, ActorId::VM.get(), 0, 0, b""), RefusalCode::HostBand),
        ((1, 60, host, 0, b"x"), RefusalCode::HostBand),
        ((3, u64::MAX, 0, 1, b"/x"), RefusalCode::HostBand),
        ((4, 1, 0, 0, b"hotcell.kill"), RefusalCode::ReservedName),
        ((4, 1, 0, 0, b"HotCell.Kill"), RefusalCode::ReservedName),
        ((4, 1, 0, 0, b""), RefusalCode::BadText),
        ((4, 1, 0, 0, b"a\0b"), RefusalCode::BadText),
        ((4, 1, 0, 0, b"\xff"), RefusalCode::BadText),
        ((4, 1, 0, 0, &long), RefusalCode::BadText),
        ((3, 1, 0, 0, b"/x"), RefusalCode::BadValue),
        ((3, 1, 0, 257, b"/x"), RefusalCode::BadValue),
        ((5, 1, 0, 7, b"x"), RefusalCode::BadValue),
        ((5, 1, 0, 1 | 2 << 8, b"x"), RefusalCode::BadValue),
        ((5, 1, 0, -1, b"x"), RefusalCode::BadValue),
        ((6, 1, 0, 6, b"x"), RefusalCode::BadValue),
        ((2, 1, 0, 0, b""), RefusalCode::ForgedExit),
        ((2, 61, 0, 0, b""), RefusalCode::ExitWithoutSpawn),
        ((3, 61, 0, 1, b"/x"), RefusalCode::UnknownActor),
        ((3, 0x1000, 0, 1, b"/x"), RefusalCode::UnknownActor),
        ((1, 61, 62, 0, b"x"), RefusalCode::OrphanSpawn),
        ((1, 61, 61, 0, b"x"), RefusalCode::OrphanSpawn),
        ((1, 61, 0, 0, b"x"), RefusalCode::OrphanSpawn),
        ((1, 50, 1, 0, b"x"), RefusalCode::DoubleSpawn),
        ((1, 1, 50, 0, b"x"), RefusalCode::DoubleSpawn),
    ] {
        assert_eq!(refused(&mut s, claim), code, "{claim:?}");
    }
    assert!(s.claim(2, 50, 0, 0, b""));
    assert_eq!(refused(&mut s, (2, 50, 0, 0, b"")), RefusalCode::ExitWithoutSpawn);
    assert_eq!(refused(&mut s, (3, 50, 0, 1, b"/x")), RefusalCode::AfterExit);
    assert_eq!(refused(&mut s, (1, 50, 1, 0, b"x")), RefusalCode::Respawn);
    assert_eq!(refused(&mut s, (1, 70, 50, 0, b"x")), RefusalCode::OrphanSpawn);
    let verdict = s.close();
    assert_eq!(verdict.verdict, Verdict::Allowed);
    assert!(verdict.gate1.is_ok());
}

#[test]
fn claims_after_the_exec_ended_are_refused() {
    let mut s = Script::started(spec());
    let actor = s.admission.exec_actor(1).unwrap();
    s.push(actor, Some(ActorId::VM), Payload::ProcessExit { code: 0 }, None);
    assert_eq!(refused(&mut s, (3, 1, 0, 1, b"/x")), RefusalCode::AfterExit);
    assert_eq!(refused(&mut s, (1, 9, 1, 0, b"x")), RefusalCode::OrphanSpawn);
}

#[test]
fn a_flood_of_lies_costs_two_facts_a_kind() {
    let mut s = Script::started(spec());
    let before = s.events.len();
    for i in 0..100_000u64 {
        assert!(!s.claim(2, 1, 0, 0, b""));
        assert!(!s.claim(3, 1_000_000 + i, 0, 1, b"/x"));
    }
    assert_eq!(s.events.len(), before + 2, "one fact each");
    assert_eq!(s.admission.refused(), 200_000);
    let summary = s.admission.summary();
    assert_eq!(summary.len(), 2);
    assert!(summary.contains(&HostFact::ClaimRefused {
        kind: ClaimKind::Exit,
        code: RefusalCode::ForgedExit,
        count: 99_999
    }));
    assert_eq!(s.close().verdict, Verdict::Allowed);
}

#[test]
fn a_flood_of_actors_is_bounded() {
    let mut s = Script::started(spec());
    let mut admitted = 0;
    for i in 0..(MAX_CLAIMED_ACTORS as u64 + 100) {
        admitted += usize::from(s.claim(1, 1000 + i, 1, 0, b"x"));
    }
    assert_eq!(admitted, MAX_CLAIMED_ACTORS);
    s.exec(2);
    assert_eq!(s.trip(), None);
    let live = s.admission.still_live(s.fold.lineage());
    assert_eq!(live.len(), MAX_CLAIMED_ACTORS + 2, "the host's own execs are not kept out");
    assert_eq!(s.close().verdict, Verdict::Allowed);
}

#[test]
fn execs_are_bounded_too() {
    let mut s = Script::started(spec());
    for exec in 2..=MAX_RUN_EXECS as u32 {
        assert!(s.admission.begin_exec(exec).is_some());
    }
    assert_eq!(s.admission.begin_exec(1_000_000), None);
}

#[test]
fn the_host_s_own_exec_wins_its_number() {
    let mut s = Script::started(spec());
    assert!(s.claim(1, 2, 1, 0, b"x"), "the guest took the number 2 before the host did");
    let exec = s.exec(2);
    assert_eq!(s.admission.exec_actor(2), Some(exec));
    assert_eq!(refused(&mut s, (2, 2, 0, 0, b"")), RefusalCode::ForgedExit);
    assert_eq!(s.close().verdict, Verdict::Allowed);
}

#[test]
fn a_claim_has_no_variant_for_markers_and_no_name_for_the_host() {
    for kind in 0..=u8::MAX {
        for number in [ActorId::HOST_BAND_START, ActorId::VM.get(), ActorId::HOST.get(), u64::MAX] {
            let kind = ClaimKind::from_byte(kind);
            assert!(GuestClaim::parse(kind, number, 1, 1, b"x").is_err());
            assert!(GuestClaim::parse(kind, 1, number, 1, b"x").is_err());
        }
    }
    let mut admission = Admission::new();
    assert!(admission.admit_wire((0x7F, 0, 0, 0, b""), &Lineage::new()).is_err());
}

#[derive(Clone, Debug)]
enum Act {
    Claim(u8, u64, u64, i32, Vec<u8>),
    Exec(u32),
    ExecExit(u32),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let number = prop_oneof![
        8 => 0..8u64,
        1 => Just(ActorId::HOST.get()),
        1 => Just(0x1000u64),
        1 => any::<u64>()
    ];
    let text = prop_oneof![
        4 => Just(b"/x".to_vec()),
        1 => Just(b"hotcell.verdict".to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..6)
    ];
    let kind = prop_oneof![10 => 1..=6u8, 1 => Just(0x7E), 1 => Just(0x7F), 1 => any::<u8>()];
    let value = prop_oneof![4 => 0..8i32, 1 => 256..264, 1 => any::<i32>()];
    let act = prop_oneof![
        12 => (kind, number.clone(), number, value, text).prop_map(|(k, s, p, v, t)| Act::Claim(k, s, p, v, t)),
        1 => (0..8u32).prop_map(Act::Exec),
        1 => (0..8u32).prop_map(Act::ExecExit)
    ];
    prop::collection::vec(act, 0..200)
}

proptest! {
    #![proptest_config(common::cases(128))]

    #[test]
    fn whatever_the_guest_claims_the_record_has_no_violation(acts in acts()) {
        let mut s = Script::started(spec());
        for act in acts {
            match act {
                Act::Claim(kind, subject, parent, value, text) => {
                    s.claim(kind, subject, parent, value, &text);
                }
                Act::Exec(exec) => {
                    if s.admission.exec_actor(exec).is_none() {
                        s.exec(exec);
                    }
                }
                Act::ExecExit(exec) => {
                    if let Some(actor) = s.admission.exec_actor(exec)
                        && s.fold.lineage().is_live(actor)
                    {
                        s.push(actor, Some(ActorId::VM), Payload::ProcessExit { code: 0 }, None);
                    }
                }
            }
            prop_assert_eq!(s.trip(), None);
        }
        let verdict = s.close();
        prop_assert!(verdict.gate1.is_ok(), "{:?}", verdict.gate1.violations);
        prop_assert_eq!(verdict.verdict, Verdict::Allowed);
    }
}

/// A guest that narrates for ever is cut off, and its last allowed word is still recorded.
#[test]
fn claims_are_bounded() {
    let mut s = Script::started(spec());
    let mut refusals = 0;
    for n in 0..=MAX_ADMITTED {
        match s.admission.admit_wire((3, 1, 0, 1, b"/workspace/x"), s.fold.lineage()) {
            Ok(_) => assert!(n < MAX_ADMITTED),
            Err(refused) => {
                assert_eq!((refused.code, n), (RefusalCode::TooManyClaims, MAX_ADMITTED));
                refusals += 1;
            }
        }
    }
    assert_eq!(refusals, 1);
}
