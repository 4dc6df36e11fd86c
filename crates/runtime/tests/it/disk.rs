//! A host disk that is full: the run ends KILLED, the machine is gone, the record is INCOMPLETE and not a pass.

use crate::lab::*;
use hotcell_decide::Verdict;
use hotcell_ledger::Capability;
use hotcell_runtime::RunReport;
use hotcell_testkit::honest;
use hotcell_wire::{GuestFrame, Request};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small file system, for as long as it lives. `None` where it can't be mounted.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, size: &str) -> Option<SmallDisk> {
        std::fs::create_dir_all(at).unwrap();
        let options = format!("size={size},mode=700");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(at).output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(SmallDisk(at.to_owned()));
        }
        eprintln!("NOT RUN: no right to mount a small file system at {}", at.display());
        None
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[track_caller]
fn assert_record_failed(lab: &Lab, report: &RunReport) {
    assert_eq!(report.verdict, Verdict::Killed, "{report:?}");
    assert!(report.kill.reasons.contains(&"record_failed".to_owned()), "{report:?}");
    assert!(report.teardown.verified, "{report:?}");
    lab.assert_all_gone();
    let dir = report.bundle.clone().unwrap();
    assert!(!dir.join("checkpoint.note").exists());
    let record = Record::read(report);
    assert_ne!(record.derived.verdict, Verdict::Allowed, "a record with a hole is no pass");
    let found = hotcell_verify::verify_bundle(&dir, &hotcell_verify::Options::default()).unwrap();
    assert_ne!(found.outcome(), hotcell_verify::Outcome::Intact);
}

#[test]
fn output_that_the_disk_does_not_take_ends_the_run() {
    let lab = Lab::honest();
    let Some(_disk) = SmallDisk::mount(&lab.runtime.out, "1m") else { return };
    let run = lab.start();
    assert!(wait(exec(&run, &["noise", "1", "30000000"])).is_err());
    assert_record_failed(&lab, &finish(run));
}

#[test]
fn a_ledger_or_object_that_the_disk_does_not_take_ends_the_run() {
    let lab = Lab::new(|guest| {
        guest.boot();
        guest.exec();
        for id in 0.. {
            // Each request another object, and its event.
            let resource = format!("/workspace/{id}");
            let capability = Capability::FileWrite as u8;
            let request =
                Request { exec: 1, capability, resource: resource.as_bytes(), justification: b"more" };
            if !guest.send(id, &GuestFrame::Request(request)) || guest.receive().is_none() {
                return;
            }
        }
    });
    let Some(_disk) = SmallDisk::mount(&lab.runtime.out, "1m") else { return };
    let run = lab.start_with(|policy| policy.capabilities.write_trees = vec!["/workspace".into()]);
    assert!(wait(exec(&run, &["x"])).is_err());
    assert_record_failed(&lab, &finish(run));
}

#[test]
fn with_room_enough_the_same_runs_end_well() {
    let lab = Lab::with(hotcell_testkit::FakeMachine::new(honest));
    let Some(_disk) = SmallDisk::mount(&lab.runtime.out, "64m") else { return };
    let run = lab.start();
    assert_eq!(wait(exec(&run, &["noise", "1", "30000000"])).unwrap().code, 0);
    assert_allowed(&lab, &finish(run));
}
