//! Nothing crosses from one run to another.

use crate::lab::*;
use hotcell_ledger::Capability;
use hotcell_testkit::FakeGuest;
use hotcell_wire::{Claim, ClaimKind, GuestFrame, Request};

fn four_denials(guest: &mut FakeGuest) {
    if !guest.boot() || guest.exec().is_none() {
        return;
    }
    for id in 0..4 {
        let capability = Capability::NetEgress as u8;
        let request = Request { exec: 1, capability, resource: b"x", justification: b"" };
        guest.send(id, &GuestFrame::Request(request));
    }
    let claim = Claim { kind: ClaimKind::Spawn, subject: 70, parent: 1, value: 0, text: b"/bin/x" };
    guest.send(0, &GuestFrame::Claim(claim));
    let claim = Claim { kind: ClaimKind::Tool, subject: 71, parent: 1, value: 0, text: b"nobody" };
    guest.send(0, &GuestFrame::Claim(claim));
    guest.exited(1, 0);
    guest.serve();
}

#[test]
fn two_runs_of_one_runtime_begin_alike_and_count_apart() {
    let lab = Lab::new(four_denials);
    let mut records = Vec::new();
    for id in ["run-00000001", "run-00000002", "run-00000003"] {
        let run = lab.runtime.start(lab.draft(id).seal().unwrap(), lab.boot());
        assert_eq!(wait(exec(&run, &["x"])).unwrap().code, 0);
        // Five denials in one run would have killed it: twelve in three do nothing.
        records.push(assert_allowed(&lab, &finish(run)));
    }
    let shape = |record: &Record| -> Vec<_> {
        let of = |event: &hotcell_ledger::Event| {
            (event.sequence, event.actor, event.parent, event.payload.event_type())
        };
        record.events.iter().map(of).collect()
    };
    assert_eq!(shape(&records[0])[0].0, 0);
    assert_eq!(shape(&records[0]), shape(&records[1]));
    assert_eq!(shape(&records[1]), shape(&records[2]));
    assert_eq!(records[0].names(), records[1].names());
}

#[test]
fn runs_at_the_same_time_do_not_mix() {
    let lab = Lab::honest();
    let runs: Vec<_> = (0..8)
        .map(|i| lab.runtime.start(lab.draft(&format!("run-0000000{i}")).seal().unwrap(), lab.boot()))
        .collect();
    let execs: Vec<_> =
        runs.iter().enumerate().map(|(i, run)| exec(run, &["exit", &i.to_string()])).collect();
    for (i, exec) in execs.into_iter().enumerate() {
        assert_eq!(wait(exec).unwrap().code, i as i32);
    }
    for (i, run) in runs.into_iter().enumerate() {
        let report = finish(run);
        assert_eq!(report.exit_code, Some(i as i32));
        Record::of(&report);
    }
    lab.assert_all_gone();
}
