//! Hotcell is told to stop, or is killed itself.

use crate::harness::{Job, Live, SOON, hotcell, verify, wait_until};
use rustix::process::Signal;
use std::time::{Duration, Instant};

fn running() -> Live {
    let live = Job::sh("echo up; sleep 170; echo never").start();
    live.wait_for("up\n");
    assert_eq!(live.vmms().len(), 1, "the search for VMMs finds none where one lives");
    assert!(live.registry_entry().join("entry.json").exists());
    live
}

fn interrupted(signal: Signal) {
    let live = running();
    let told = Instant::now();
    live.signal(signal);
    // A second one must not disturb the ending.
    live.signal(signal);
    let outcome = live.wait();
    outcome.assert_gone();
    assert!(told.elapsed() < SOON, "{outcome:?}");
    assert_eq!(outcome.code, Some(128 + signal.as_raw()), "{outcome:?}");
    assert_eq!(outcome.report("/interrupted"), signal.as_raw());
    assert_eq!(outcome.text(), "up\n");
    let record = outcome.record();
    let facts: Vec<_> = record.facts("interrupted").collect();
    assert!(!facts.is_empty() && facts.iter().all(|fact| fact["signal"] == signal.as_raw()), "{facts:?}");
    assert_eq!(outcome.verify(), 0);
}

#[test]
fn sigint_closes_the_record_with_the_reason() {
    interrupted(Signal::INT);
}

#[test]
fn sigterm_closes_the_record_with_the_reason() {
    interrupted(Signal::TERM);
}

#[test]
fn sighup_closes_the_record_with_the_reason() {
    interrupted(Signal::HUP);
}

#[test]
fn a_signal_during_boot_ends_the_machine_too() {
    let live = Job::new(["true"]).start();
    wait_until("the VMM", SOON, || !live.vmms().is_empty());
    live.signal(Signal::INT);
    let outcome = live.wait();
    outcome.assert_gone();
    assert_eq!(outcome.code, Some(130), "{outcome:?}");
    assert_eq!(outcome.report("/interrupted"), 2);
}

#[test]
fn a_killed_hotcell_leaves_no_machine_and_an_incomplete_record() {
    let live = running();
    // While a name is in use, nobody else gets it, whatever its record's folder.
    let elsewhere = tempfile::tempdir().unwrap();
    let second = hotcell()
        .args(["run", "--accel", "tcg", "--name", &live.run_id, "--out"])
        .arg(elsewhere.path())
        .args(["--", "true"])
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&second.stderr).contains("choose another name"), "{second:?}");
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0, "the refused run left something");

    let bundle = live.bundle();
    live.signal(Signal::KILL);
    let killed = Instant::now();
    wait_until("the VMM's end", Duration::from_secs(5), || live.vmms().is_empty());
    println!("VMM gone {:?} after SIGKILL of its owner", killed.elapsed());
    // The last block is sealed within its time, so the record reaches until shortly before.
    assert_eq!(verify(&bundle), 3, "not INCOMPLETE");
    let outcome = live.wait();
    assert_eq!((outcome.signal, outcome.report.is_none()), (Some(9), true), "{outcome:?}");
    // Also every start reaps, so that another test's may have come first.
    let reaped = hotcell().arg("reap").output().unwrap();
    assert!(reaped.status.success(), "{reaped:?}");
    outcome.assert_gone();
    assert_eq!(outcome.verify(), 3);
}
