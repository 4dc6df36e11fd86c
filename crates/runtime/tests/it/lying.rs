//! What the guest says is testimony: no story of it causes a kill, and none prevents one.

use crate::lab::*;
use hotcell_decide::HostFact;
use hotcell_ledger::{ActorId, Capability};
use hotcell_testkit::FakeGuest;
use hotcell_wire::{Claim, ClaimKind, GuestFrame, Request};

const EACH: u64 = 3000;

/// Says everything that must be refused, many times, and something that may be said.
fn lie(guest: &mut FakeGuest) -> bool {
    let claim = |kind, subject, parent, value, text: &'static [u8]| {
        GuestFrame::Claim(Claim { kind, subject, parent, value, text })
    };
    let mut said = true;
    said &= guest.send(0, &claim(ClaimKind::Spawn, 500, 1, 0, b"/bin/child"));
    said &= guest.send(0, &claim(ClaimKind::Exit, 500, 1, 0, b""));
    for turn in 0..EACH {
        for frame in [
            // A forged exit of the host's own exec, and of nobody.
            claim(ClaimKind::Exit, 1, 0, 0, b""),
            claim(ClaimKind::Exit, 999_999, 0, 0, b""),
            // Claims after an exit, a second life, a child of the dead and of nobody.
            claim(ClaimKind::Tool, 500, 1, 0, b"bash"),
            claim(ClaimKind::Spawn, 500, 1, 0, b"/bin/child"),
            claim(ClaimKind::Spawn, 10_000 + turn, 500, 0, b"/bin/orphan"),
            claim(ClaimKind::Spawn, 20_000 + turn, 888_888, 0, b"/bin/orphan"),
            // In the host's band, in the host's words.
            claim(ClaimKind::Tool, ActorId::HOST.get(), 0, 0, b"bash"),
            claim(ClaimKind::Spawn, 30_000 + turn, ActorId::VM.get(), 0, b"/bin/x"),
            claim(ClaimKind::Tool, 1, 0, 0, b"hotcell.kill"),
            claim(ClaimKind::Tool, 1, 0, 0, b"HotCell.teardown"),
            // Not what it says it is.
            claim(ClaimKind::File, 1, 0, 99, b"/etc/passwd"),
            claim(ClaimKind::Tool, 1, 0, 0, b"\xff"),
            // Confessions: recorded as such, and nothing else.
            claim(ClaimKind::Network, 1, 0, 1, b"evil.example:443"),
        ] {
            said &= guest.send(0, &frame);
        }
        if !said {
            return false;
        }
    }
    let granted = Capability::PrivilegeRaise as i32 | 1 << 8;
    guest.send(0, &claim(ClaimKind::Capability, 1, 0, granted, b"root, please"))
}

#[test]
fn a_lying_guest_causes_no_kill_and_its_lies_are_counted() {
    let lab = Lab::new(|guest| {
        if guest.boot() && guest.exec().is_some() && lie(guest) {
            guest.exited(1, 0);
            guest.serve();
        }
    });
    let run = lab.start();
    assert_eq!(wait(exec(&run, &["liar"])).unwrap().code, 0);
    let report = finish(run);
    assert_eq!(report.exit_code, Some(0), "the host's own account of the exec");
    let record = assert_allowed(&lab, &report);
    let mut refused = std::collections::BTreeMap::new();
    for (fact, ..) in &record.facts {
        if let HostFact::ClaimRefused { code, count, .. } = fact {
            *refused.entry(format!("{code:?}")).or_insert(0) += count;
        }
    }
    let count = |code: &str| refused.get(code).copied().unwrap_or(0);
    assert_eq!(count("ForgedExit"), EACH, "{refused:?}");
    assert_eq!(count("ExitWithoutSpawn"), EACH);
    assert_eq!(count("AfterExit"), EACH);
    assert_eq!(count("Respawn"), EACH);
    assert_eq!(count("OrphanSpawn"), 2 * EACH);
    assert_eq!(count("HostBand"), 2 * EACH);
    assert_eq!(count("ReservedName"), 2 * EACH);
    assert_eq!(count("BadValue"), EACH);
    assert_eq!(count("BadText"), EACH);
    // Two facts for each pair at most: lies cost the record little.
    let facts = record.names().iter().filter(|name| **name == "claim_refused").count();
    assert!(facts <= 2 * 12, "{facts} facts");
    let testimony = record.events.iter().filter(|event| !event.actor.is_host_band()).count() as u64;
    assert_eq!(
        testimony,
        EACH + 3 + 2,
        "the confessions, the child, the claimed grant, and the exec's own two"
    );
}

#[test]
fn the_truthful_twin_has_the_same_verdict() {
    let lab = Lab::honest();
    let (report, result) = lab.run(&["true"]);
    assert_eq!(result.unwrap().code, 0);
    let record = assert_allowed(&lab, &report);
    assert!(!record.has("claim_refused"));
}

#[test]
fn no_story_prevents_a_kill() {
    let lab = Lab::new(|guest| {
        if !guest.boot() || guest.exec().is_none() {
            return;
        }
        // The same story, and five requests that are denied, between claims that they were granted.
        for id in 0..5 {
            let granted = Capability::NetEgress as i32 | 1 << 8;
            let claim =
                Claim { kind: ClaimKind::Capability, subject: 1, parent: 0, value: granted, text: b"allow" };
            guest.send(0, &GuestFrame::Claim(claim));
            let capability = Capability::NetEgress as u8;
            let request = Request { exec: 1, capability, resource: b"x", justification: b"trust me" };
            guest.send(id, &GuestFrame::Request(request));
        }
        lie(guest);
        guest.ignore();
    });
    let run = lab.start();
    assert!(wait(exec(&run, &["liar"])).is_err());
    assert_killed(&lab, &finish(run), &["denial_burst", "denial_ewma"]);
}
