//! Disks that are full while a machine runs: the host's ends the run, the guest's is the guest's problem.

use crate::harness::{Job, Outcome, home, warm_up};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::ffi::CString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A small file system, for as long as it lives. `None` where it can't be mounted.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, size: &str) -> Option<SmallDisk> {
        fs::create_dir_all(at).unwrap();
        let options = CString::new(format!("size={size},mode=755")).unwrap();
        if mount("none", at, "tmpfs", MountFlags::empty(), options.as_c_str()).is_err() {
            println!("NOT RUN: mounting a small file system needs root");
            return None;
        }
        Some(SmallDisk(at.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

#[track_caller]
fn assert_killed_for(outcome: &Outcome, reason: &str, words: &str) {
    assert_eq!((outcome.code, outcome.verdict()), (Some(99), "KILLED"), "{outcome:?}");
    assert!(outcome.reasons().contains(&reason), "{outcome:?}");
    assert!(outcome.err().contains(words), "{outcome:?}");
    outcome.assert_gone();
}

/// `HOTCELL_HOME` with the shared cache and images, and its live runs' folders on a small file system.
fn home_with_little_room(at: &Path) {
    fs::create_dir_all(at.join("state")).unwrap();
    symlink(home().join("cache"), at.join("cache")).unwrap();
    symlink(home().join("state/images"), at.join("state/images")).unwrap();
    fs::copy(home().join("state/key"), at.join("state/key")).unwrap();
}

#[test]
fn a_bundle_that_no_longer_fits_ends_the_run_while_the_command_goes_on() {
    warm_up();
    let dir = tempfile::tempdir().unwrap();
    let script = "head -c 12000000 /dev/urandom; sleep 100; echo never";
    let Some(disk) = SmallDisk::mount(&dir.path().join("out"), "6m") else { return };
    let outcome = Job::sh(script).out_at(&disk.0).start().wait();
    assert_killed_for(&outcome, "record_failed", "space");
    assert!(!outcome.text().contains("never"));
    // What was sealed before is there, and it is no pass.
    assert!(outcome.bundle().join("ledger.ames").metadata().unwrap().len() > 0);
    assert_eq!(outcome.verify(), 3, "{outcome:?}");
    drop(disk);
    // The control: with room for it, the same output is no problem.
    let Some(disk) = SmallDisk::mount(&dir.path().join("out"), "64m") else { return };
    Job::sh("head -c 12000000 /dev/urandom").out_at(&disk.0).run().assert_allowed(0);
}

#[test]
fn a_full_host_under_the_guests_disk_ends_the_run_and_is_not_the_guests_fault() {
    warm_up();
    let dir = tempfile::tempdir().unwrap();
    home_with_little_room(dir.path());
    let script = "head -c 100000000 /dev/urandom >big; sync; sleep 100; echo never";
    for (room, fits) in [("48m", false), ("400m", true)] {
        let Some(_disk) = SmallDisk::mount(&dir.path().join("state/live"), room) else { return };
        let script = if fits { script.replace("sleep 100", "true") } else { script.to_owned() };
        let outcome = Job::sh(&script).env("HOTCELL_HOME", dir.path()).start().wait();
        if fits {
            outcome.assert_allowed(0);
            assert_eq!(outcome.text(), "never\n");
        } else {
            assert_killed_for(&outcome, "evaluator_failure", "overlay");
            assert!(!outcome.reasons().contains(&"sandbox_destroyed"), "{outcome:?}");
        }
        assert_eq!(fs::read_dir(dir.path().join("state/live")).unwrap().count(), 0, "something is left");
        assert_eq!(outcome.verify(), 0);
    }
}

#[test]
fn a_full_guest_disk_is_the_guests_problem() {
    let script = "dd if=/dev/zero of=big bs=1M count=60; echo $?; rm big; echo room >small && cat small";
    let outcome = Job::sh(script)
        .policy("[limits]\ndisk_mib = 32\n[capabilities]\nwrite_trees = [\"/workspace\"]\nspawn = true\n")
        .run();
    outcome.assert_allowed(0);
    assert_eq!(outcome.text(), "1\nroom\n");
    assert!(outcome.err().contains("No space left"), "{outcome:?}");
}
