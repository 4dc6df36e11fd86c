//! Machines that do not come up: FAILED, by a deadline of their own, through teardown, on record.

use crate::lab::*;
use hotcell_decide::{HostFact, Verdict};
use hotcell_testkit::{FakeGuest, FakeMachine, StartAs, honest};
use hotcell_wire::GuestFrame;
use std::time::{Duration, Instant};

#[test]
fn a_boot_that_is_never_ready_fails_by_its_own_deadline_with_the_console_s_tail() {
    let mut lab = Lab::new(FakeGuest::ignore);
    lab.runtime.boot_deadline = Duration::from_millis(300);
    let begun = Instant::now();
    let run = lab.start();
    let early = exec(&run, &["true"]);
    let report = finish(run);
    assert!(begun.elapsed() >= Duration::from_millis(300) && begun.elapsed() < Duration::from_secs(20));
    let record = assert_failed(&lab, &report, "fake console");
    assert!(!record.has("ready"));
    let error = wait(early).unwrap_err().to_string();
    assert!(error.contains("not ready"), "the waiting exec hears why: {error}");
    assert!(record.dir.join("console.log").exists());
}

#[test]
fn a_slow_boot_within_its_deadline_is_none_of_that() {
    let mut lab = Lab::new(|guest| {
        std::thread::sleep(Duration::from_millis(300));
        honest(guest);
    });
    lab.runtime.boot_deadline = Duration::from_secs(30);
    assert_allowed(&lab, &lab.run(&["true"]).0);
}

#[test]
fn a_machine_that_dies_while_it_boots_fails_with_its_last_words() {
    let lab = Lab::new(|guest| {
        guest.configured();
        guest.die();
    });
    let report = finish(lab.start());
    assert_failed(&lab, &report, "ended while it booted");
}

#[test]
fn an_init_that_gives_up_fails_with_its_own_reason() {
    let lab = Lab::new(|guest| {
        guest.configured();
        guest.send(0, &GuestFrame::Fatal(b"no root device"));
        guest.ignore();
    });
    assert_failed(&lab, &finish(lab.start()), "no root device");
}

#[test]
fn a_guest_that_breaks_the_protocol_before_it_is_ready_fails() {
    let speak = |frame: fn() -> GuestFrame<'static>| {
        move |guest: &mut FakeGuest| {
            guest.configured();
            guest.send(0, &frame());
            guest.ignore();
        }
    };
    let early = GuestFrame::Quiesced;
    assert!(matches!(early, GuestFrame::Quiesced));
    let lab = Lab::new(speak(|| GuestFrame::Quiesced));
    assert_failed(&lab, &finish(lab.start()), "before it is ready");
    let lab = Lab::new(speak(|| GuestFrame::StdinClosed));
    assert_failed(&lab, &finish(lab.start()), "before it is ready");
    let lab = Lab::new(|guest| {
        guest.configured();
        guest.send_bytes(&[0xFF; 64]);
        guest.ignore();
    });
    assert_failed(&lab, &finish(lab.start()), "magic");
    let lab = Lab::new(|guest| {
        guest.configured();
        guest.send(0, &GuestFrame::Log(b"chatter is no breach"));
        guest.say_ready();
        guest.serve();
    });
    assert_allowed(&lab, &lab.run(&["true"]).0);
}

#[test]
fn a_start_that_is_refused_fails_through_teardown() {
    let machine = FakeMachine { start: StartAs::Refused, ..FakeMachine::new(honest) };
    let lab = Lab::with(machine);
    let run = lab.start();
    let early = exec(&run, &["true"]);
    let report = finish(run);
    let record = assert_failed(&lab, &report, "fake: refused");
    assert!(!record.has("isolation"));
    assert!(wait(early).is_err());
}

#[test]
fn a_start_that_leaves_something_is_killed_and_kept_for_the_reaper() {
    let machine = FakeMachine { start: StartAs::RefusedLeavingSomething, ..FakeMachine::new(honest) };
    let lab = Lab::with(machine);
    let report = finish(lab.start());
    assert_eq!(report.verdict, Verdict::Killed);
    assert_eq!(report.kill.reasons, ["teardown_unverified"]);
    assert!(!report.teardown.verified);
    assert_eq!(lab.registered().len(), 1);
    Record::of(&report);
}

#[test]
fn a_boot_that_is_interrupted_fails_and_says_by_what() {
    let lab = Lab::new(FakeGuest::ignore);
    let run = lab.start();
    until("the machine's start", || lab.backend.count(hotcell_testkit::Step::TakeChannel) == 1);
    run.interrupter().interrupt(15);
    let report = finish(run);
    assert_eq!(report.interrupted, Some(15));
    let record = assert_failed(&lab, &report, "stopped before the machine was ready");
    assert!(record.facts.iter().any(|(fact, ..)| *fact == HostFact::Interrupted { signal: 15 }));
}

#[test]
fn a_machine_without_a_channel_is_a_fault_of_ours() {
    let machine = FakeMachine { without_channel: true, ..FakeMachine::new(FakeGuest::ignore) };
    let lab = Lab::with(machine);
    let report = finish(lab.start());
    assert_killed(&lab, &report, &["evaluator_failure"]);
}
