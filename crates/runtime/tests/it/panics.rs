//! A panic in any component, at every step: KILLED in the report, and the machine gone.

use crate::lab::*;
use hotcell_decide::Verdict;
use hotcell_runtime::{ExecIo, ExecRequest, RunReport};
use hotcell_testkit::{FakeGuest, FakeMachine, Step, honest};
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

#[track_caller]
fn assert_ended_by_panic(lab: &Lab, report: &RunReport) {
    assert_eq!(report.verdict, Verdict::Killed, "{report:?}");
    assert_eq!(lab.backend.alive(), 0, "{report:?}");
    let error = report.error.as_deref().unwrap_or_default();
    assert!(error.contains("panic"), "{error:?}");
}

#[test]
fn a_panic_in_any_call_of_the_backend() {
    for step in Step::ALL {
        // The last words are asked for only when a boot comes to nothing.
        let script: fn(&mut FakeGuest) = if step == Step::LastWords { FakeGuest::ignore } else { honest };
        let machine = FakeMachine { panics_in: Some(step), ..FakeMachine::new(script) };
        let mut lab = Lab::with(machine);
        if step == Step::LastWords {
            lab.runtime.boot_deadline = Duration::from_millis(100);
        }
        let report = lab.run(&["true"]).0;
        assert!(lab.backend.count(step) > 0, "{step:?} was never called");
        assert_ended_by_panic(&lab, &report);
        let verified = !matches!(step, Step::Start | Step::Destroy);
        assert_eq!(report.teardown.verified, verified, "{step:?}: {report:?}");
        let record = Record::of(&report);
        assert!(record.has("fault"), "{step:?}: {:?}", record.names());
    }
}

#[test]
fn without_a_panic_all_these_calls_end_well() {
    let lab = Lab::honest();
    assert_allowed(&lab, &lab.run(&["true"]).0);
    for step in Step::ALL.into_iter().filter(|step| *step != Step::LastWords) {
        assert!(lab.backend.count(step) > 0, "{step:?} is not part of an honest run");
    }
}

#[test]
fn a_panic_in_the_clock_at_every_time_that_is_asked_for() {
    let at = |nth: u64, for_ever: bool| {
        let home = tempfile::tempdir().unwrap();
        Lab::at(home, FakeMachine::new(honest), TestClock::new(nth, for_ever))
    };
    let control = at(0, false);
    assert_allowed(&control, &control.run(&["true"]).0);
    let asked = control.clock.asked();
    assert!(asked > 20, "{asked}");
    for for_ever in [false, true] {
        // How often a run asks depends on how often it wakes up; the last ones may not come in each.
        let mut reached = 0;
        for nth in 1..=asked {
            let lab = at(nth, for_ever);
            let report = lab.run(&["true"]).0;
            if lab.clock.asked() >= nth {
                reached += 1;
                assert_ended_by_panic(&lab, &report);
                assert!(report.teardown.verified, "{nth}: {report:?}");
                lab.assert_all_gone();
                let sealed = report.bundle.as_ref().is_some_and(|dir| dir.join("checkpoint.note").exists());
                if sealed {
                    // Without its first events it is not well formed; a pass it is in no case.
                    let record = Record::read(&report);
                    assert_eq!(record.derived.verdict, Verdict::Killed);
                    record.assert_no_parts();
                }
            }
        }
        assert!(reached >= 20, "{reached}");
    }
}

struct Panics;

impl Write for Panics {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        panic!("asked to panic in the writer");
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Refuses;

impl Write for Refuses {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_panic_in_the_caller_s_writer() {
    let lab = Lab::honest();
    let run = lab.start();
    let io = ExecIo { stdout: Some(Box::new(Panics)), ..ExecIo::default() };
    assert!(wait(run.exec(ExecRequest::new(["echo", "x"]), io)).is_err() || lab.backend.alive() == 0);
    let report = finish(run);
    assert_ended_by_panic(&lab, &report);
    assert_killed(&lab, &report, &["evaluator_failure"]);
}

#[test]
fn a_writer_that_refuses_ends_its_stream_in_the_guest_and_changes_no_verdict() {
    let lab = Lab::honest();
    let run = lab.start();
    let io = ExecIo { stdout: Some(Box::new(Refuses)), ..ExecIo::default() };
    let result = wait(run.exec(ExecRequest::new(["noise", "1", "3000000"]), io)).unwrap();
    // The command is told as by a pipe that nobody reads: it wrote what was on its way, and not the rest.
    let total = result.stdout.unwrap().total_bytes;
    assert!((1..3_000_000).contains(&total), "{total}");
    assert_allowed(&lab, &finish(run));
}

#[test]
fn a_panic_in_the_advisor_leaves_nothing_signed() {
    let mut lab = Lab::honest();
    lab.runtime.advisor = Some(Arc::new(|_| panic!("asked to panic in the advisor")));
    let report = lab.run(&["true"]).0;
    assert_ended_by_panic(&lab, &report);
    assert_eq!(report.kill.reasons, ["evaluator_failure"]);
    lab.assert_all_gone();
    let dir = report.bundle.unwrap();
    assert!(!dir.join("checkpoint.note").exists() && !dir.join("report.json").exists());
}

#[test]
fn an_advisor_with_opinions_changes_no_verdict() {
    let mut lab = Lab::honest();
    lab.runtime.advisor = Some(Arc::new(|closed| {
        let detail = format!("{} events", closed.event_count());
        vec![hotcell_runtime::Opinion { layer: "L6".into(), kind: "odd".into(), subject: "x".into(), detail }]
    }));
    let report = lab.run(&["true"]).0;
    assert_eq!(report.advisory.len(), 1);
    assert_allowed(&lab, &report);
}
