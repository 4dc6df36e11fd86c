//! Spawn tokens: all seven denials, single use, bounds.
mod common;

use common::{Script, spec};
use hotcell_decide::spawn::MAX_OUTSTANDING;
use hotcell_decide::{Authorizer, IssueError, SpawnAttempt, SpawnDecision, SpawnDenial};
use hotcell_ledger::{ActorId, Digest, Payload};
use hotcell_policy::BinaryDraft;
use proptest::prelude::*;

fn sh() -> Digest {
    Digest::of(b"sh")
}

fn ls() -> Digest {
    Digest::of(b"ls")
}

fn authorizer() -> Authorizer {
    let mut draft = BinaryDraft::new();
    draft.approve(sh()).approve(ls());
    Authorizer::new(draft.seal())
}

fn attempt(parent: ActorId, binary: Digest, token: Option<[u8; 32]>) -> SpawnAttempt {
    SpawnAttempt { parent, binary, token }
}

#[test]
fn all_seven_denials_and_the_one_way_through() {
    let mut s = Script::started(spec());
    let other = s.exec(2);
    let parent = ActorId::FIRST_GUEST;
    let mut a = authorizer();
    let issue = |a: &mut Authorizer, s: &Script, n: u8| {
        *a.issue(parent, sh(), [n; 32], s.fold.lineage()).unwrap().as_bytes()
    };
    let lineage = |s: &Script| s.fold.lineage().clone();

    let token = issue(&mut a, &s, 1);
    let decision = a.redeem(&attempt(parent, sh(), Some(token)), &lineage(&s));
    let SpawnDecision::Allow(permit) = decision else { panic!("denied: {decision:?}") };
    assert_eq!((permit.parent(), permit.binary()), (parent, sh()));

    let denied = |a: &mut Authorizer, s: &Script, attempt: SpawnAttempt| match a.redeem(&attempt, &lineage(s))
    {
        SpawnDecision::Deny(denial) => denial,
        SpawnDecision::Allow(permit) => panic!("allowed: {permit:?}"),
    };
    assert_eq!(denied(&mut a, &s, attempt(parent, sh(), Some(token))), SpawnDenial::Replay);
    assert_eq!(denied(&mut a, &s, attempt(parent, sh(), None)), SpawnDenial::NoToken);
    assert_eq!(denied(&mut a, &s, attempt(parent, sh(), Some([99; 32]))), SpawnDenial::UnknownToken);

    let token = issue(&mut a, &s, 2);
    assert_eq!(
        denied(&mut a, &s, attempt(parent, Digest::of(b"evil"), Some(token))),
        SpawnDenial::UnknownBinary
    );
    assert_eq!(
        denied(&mut a, &s, attempt(parent, sh(), Some(token))),
        SpawnDenial::Replay,
        "used up all the same"
    );

    let token = issue(&mut a, &s, 3);
    assert_eq!(denied(&mut a, &s, attempt(other, sh(), Some(token))), SpawnDenial::ParentMismatch);
    let token = issue(&mut a, &s, 4);
    assert_eq!(denied(&mut a, &s, attempt(parent, ls(), Some(token))), SpawnDenial::BinaryMismatch);
    let token = issue(&mut a, &s, 5);
    s.push(parent, Some(ActorId::VM), Payload::ProcessExit { code: 0 }, None);
    assert_eq!(denied(&mut a, &s, attempt(parent, sh(), Some(token))), SpawnDenial::DeadParent);
    assert_eq!(a.outstanding(), 0);
}

#[test]
fn tokens_are_issued_for_what_may_run_and_in_bounds() {
    let s = Script::started(spec());
    let lineage = s.fold.lineage();
    let mut a = authorizer();
    let parent = ActorId::FIRST_GUEST;
    assert_eq!(
        a.issue(parent, Digest::of(b"evil"), [1; 32], lineage).unwrap_err(),
        IssueError::UnknownBinary(Digest::of(b"evil"))
    );
    let ghost = ActorId::new(0x7777).unwrap();
    assert_eq!(a.issue(ghost, sh(), [1; 32], lineage).unwrap_err(), IssueError::DeadParent(ghost));
    assert_eq!(a.issue(parent, sh(), [0; 32], lineage).unwrap_err(), IssueError::NotRandom);
    for n in 0..MAX_OUTSTANDING {
        let random = *Digest::of(&n.to_be_bytes()).as_bytes();
        a.issue(parent, sh(), random, lineage).unwrap();
        assert_eq!(
            a.issue(parent, sh(), random, lineage).unwrap_err(),
            if n + 1 == MAX_OUTSTANDING { IssueError::TooMany } else { IssueError::NotRandom }
        );
    }
    assert_eq!(a.outstanding(), MAX_OUTSTANDING);
}

#[test]
fn a_token_never_shows_its_bytes() {
    let s = Script::started(spec());
    let token = authorizer().issue(ActorId::FIRST_GUEST, sh(), [0xAB; 32], s.fold.lineage()).unwrap();
    assert_eq!(format!("{token:?}"), "SpawnToken(..)");
}

proptest! {
    #![proptest_config(common::cases(128))]

    #[test]
    fn no_token_is_good_twice(presented in prop::collection::vec((0..6u8, 0..2usize, 0..2usize), 0..60)) {
        let mut s = Script::started(spec());
        let parents = [ActorId::FIRST_GUEST, s.exec(2)];
        let binaries = [sh(), ls()];
        let mut a = authorizer();
        for n in 1..5u8 {
            let (parent, binary) = (parents[usize::from(n) % 2], binaries[usize::from(n) / 2 % 2]);
            a.issue(parent, binary, [n; 32], s.fold.lineage()).unwrap();
        }
        let mut allowed = std::collections::HashSet::new();
        for (n, parent, binary) in presented {
            let attempt = attempt(parents[parent], binaries[binary], Some([n; 32]));
            if let SpawnDecision::Allow(permit) = a.redeem(&attempt, s.fold.lineage()) {
                prop_assert!(allowed.insert(n), "token {} was good twice", n);
                prop_assert!((1..5).contains(&n));
                prop_assert_eq!(permit.parent(), parents[usize::from(n) % 2]);
                prop_assert_eq!(permit.binary(), binaries[usize::from(n) / 2 % 2]);
            }
        }
    }
}
