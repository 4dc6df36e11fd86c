//! Readings of the disk: what is only counted, what must have been read, what could not be.
mod common;

use common::{Script, spec, spec_with};
use hotcell_decide::{DiskMoment, HostFact, Verdict};
use hotcell_ledger::{Digest, FileOp};
use std::collections::BTreeMap;

fn counted(within: &[&str]) -> HostFact {
    HostFact::MutationsCounted {
        within: within.iter().map(|&place| place.to_owned()).collect(),
        changes: BTreeMap::from([("create".to_owned(), 7)]),
        why: "more than are listed".into(),
    }
}

fn read(at: DiskMoment, unread: Option<&str>) -> HostFact {
    HostFact::DiskRead {
        reading: 1,
        at,
        names: 2,
        listing: Digest::of(b"list"),
        changes: 0,
        unread: unread.map(str::to_owned),
    }
}

fn watched() -> Script {
    let mut run = Script::started(spec());
    run.fact(read(DiskMoment::Armed, None));
    run.fact(HostFact::Armed { observer: "disk".into(), armed: true, basis: "the disk".into() });
    run
}

#[test]
fn what_is_counted_is_judged_where_it_lies() {
    let two = || Script::started(spec_with(|p| p.capabilities.write_trees = vec!["/workspace/out".into()]));
    let mut granted = two();
    for _ in 0..5 {
        granted.fact(counted(&["/workspace/out", "/workspace/out/deep"]));
    }
    assert_eq!(granted.reasons(), [""; 0]);
    let mut elsewhere = two();
    elsewhere.fact(counted(&["/workspace/a", "/workspace/out", "/workspace/b"]));
    assert_eq!(elsewhere.reasons(), [""; 0]);
    elsewhere.fact(counted(&["/workspace"]));
    assert_eq!(elsewhere.reasons(), ["mutation_burst", "mutation_ewma"]);
    let mut impossible = two();
    impossible.fact(counted(&["/etc"]));
    assert_eq!(impossible.reasons(), ["impossible_mutation"]);
    let mut nowhere = two();
    nowhere.fact(counted(&[]));
    assert_eq!(nowhere.reasons(), ["evaluator_failure"]);
}

#[test]
fn what_was_counted_breaks_no_chain() {
    let mut run = Script::started(spec());
    for name in ["a", "b", "c"] {
        run.mutate(FileOp::Create, &format!("/workspace/{name}"), b"", b"old");
    }
    // Without the count the next change does not continue what was last said.
    for name in ["a", "b", "c"] {
        run.mutate(FileOp::Write, &format!("/workspace/{name}"), b"other", b"new");
    }
    assert_eq!(run.reasons(), ["mutation_burst", "mutation_ewma"]);
    let mut told = Script::started(spec());
    for name in ["a", "b", "c"] {
        told.mutate(FileOp::Create, &format!("/workspace/{name}"), b"", b"old");
    }
    told.fact(counted(&["/workspace"]));
    for name in ["a", "b", "c"] {
        told.mutate(FileOp::Write, &format!("/workspace/{name}"), b"other", b"new");
    }
    assert_eq!(told.close().verdict, Verdict::Allowed);
}

#[test]
fn a_watched_disk_must_have_been_read_at_the_end() {
    let unread = watched().close();
    assert_eq!((unread.verdict, unread.reasons), (Verdict::Incomplete, vec!["missing disk_read".to_owned()]));
    for at in [DiskMoment::Quiet, DiskMoment::Dead] {
        let mut run = watched();
        run.fact(read(at, None));
        assert_eq!(run.close().verdict, Verdict::Allowed, "{at:?}");
    }
    // A machine whose disk nobody can watch says so, and is not asked.
    let mut without = Script::started(spec());
    without.fact(HostFact::Armed { observer: "disk".into(), armed: false, basis: "no disk".into() });
    assert_eq!(without.close().verdict, Verdict::Allowed);
}

#[test]
fn a_disk_that_could_not_be_read_is_no_pass() {
    let mut run = watched();
    run.fact(read(DiskMoment::Dead, Some("an inode makes no sense")));
    let verdict = run.close();
    assert_eq!((verdict.verdict, verdict.reasons), (Verdict::Failed, vec!["failed disk_read".to_owned()]));
    let mut killed = watched();
    killed.fact(HostFact::ContainmentFailure { what: "a wall".into() });
    killed.fact(read(DiskMoment::Dead, Some("an inode makes no sense")));
    assert_eq!(killed.close().verdict, Verdict::Killed);
}
