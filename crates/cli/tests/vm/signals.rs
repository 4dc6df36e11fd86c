//! Hotcell is told to stop, or is killed itself.

use crate::harness::{Job, Live, SOON, home, hotcell, verify, vmms_of, wait_until};
use rustix::process::Signal;
use std::fs;
use std::path::{Path, PathBuf};
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
    // Every start reaps as well: another test's may be at it this moment, and then this one passes it by.
    let entry = home().join("state/live").join(&outcome.run_id);
    wait_until("the end of the entry", SOON, || {
        let reaped = hotcell().arg("reap").output().unwrap();
        assert!(reaped.status.success(), "{reaped:?}");
        !entry.exists()
    });
    outcome.assert_gone();
    assert_eq!(outcome.verify(), 3);
}

/// A cgroup whose processes no signal reaches, as it is with one that hangs in the kernel.
struct Frozen(PathBuf);

impl Frozen {
    /// `None` where the host has no freezer of version 1: that of version 2 lets SIGKILL through.
    fn process(pid: i32) -> Option<Frozen> {
        let dir = Path::new("/sys/fs/cgroup/freezer").join(format!("hotcell-test-{pid}"));
        fs::create_dir(&dir).ok()?;
        let frozen = Frozen(dir);
        fs::write(frozen.0.join("cgroup.procs"), pid.to_string()).ok()?;
        frozen.set("FROZEN");
        Some(frozen)
    }

    fn set(&self, state: &str) {
        let file = self.0.join("freezer.state");
        fs::write(&file, state).unwrap();
        wait_until("the freezer", SOON, || fs::read_to_string(&file).unwrap().trim() == state);
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_vmm_that_does_not_die_is_said_to_be_there_and_is_reaped_later() {
    let live = running();
    let pid = live.vmms()[0];
    let Some(frozen) = Frozen::process(pid) else {
        println!("NOT RUN: no freezer of version 1, or not root");
        return;
    };
    let entry = live.registry_entry();
    live.signal(Signal::INT);
    let ledger = live.bundle().join("ledger.ames");
    let before = fs::metadata(&ledger).unwrap().len();
    wait_until("the first signal on record", SOON, || fs::metadata(&ledger).unwrap().len() > before);
    live.signal(Signal::INT);
    let outcome = live.wait();
    assert_eq!((outcome.code, outcome.verdict()), (Some(99), "KILLED"), "{outcome:?}");
    assert_eq!(outcome.report("/teardown/verified"), false, "{outcome:?}");
    assert!(outcome.err().contains("MACHINE NOT KNOWN TO BE GONE"), "{outcome:?}");
    // Killed already, and it goes as soon as it can.
    assert!(entry.join("entry.json").exists(), "its entry is what the reaper has");
    frozen.set("THAWED");
    wait_until("the VMM's end", SOON, || vmms_of(&outcome.run_id).is_empty());
    let reaped = hotcell().arg("reap").output().unwrap();
    assert!(reaped.status.success(), "{reaped:?}");
    assert!(!entry.exists());
    assert_eq!(outcome.verify(), 0, "{outcome:?}");
}
