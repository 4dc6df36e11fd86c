//! Every way in which a run ends: the machine is gone, and the record says why.

use crate::lab::*;
use hotcell_decide::{ExecHow, HostFact, OutputStream, Verdict};
use hotcell_runtime::{ExecIo, ExecRequest, Stdin};
use hotcell_testkit::{FakeMachine, FromHost, honest};
use hotcell_wire::GuestFrame;
use std::os::unix::process::CommandExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[test]
fn a_timeout_kills_the_tree_keeps_partial_output_and_says_124() {
    let kills = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&kills);
    let lab = Lab::new(move |guest| {
        if !guest.boot() {
            return;
        }
        let Some(exec) = guest.exec() else { return };
        guest.send(exec, &GuestFrame::Stdout(b"partial"));
        while let Some(said) = guest.receive() {
            match said {
                FromHost::KillTree(id) => {
                    seen.fetch_add(1, Ordering::SeqCst);
                    guest.exited(id, 0);
                }
                FromHost::Quiesce => {
                    guest.send(0, &GuestFrame::Quiesced);
                }
                _ => {}
            }
        }
    });
    let run = lab.start_with(|policy| policy.limits.timeout_s = 1);
    let stdout = Seen::default();
    let request = ExecRequest::new(["anything"]);
    let result = wait(run.exec(request, io_of(Stdin::Empty, &stdout, &Seen::default()))).unwrap();
    assert_eq!((result.how, result.code), (ExecHow::TimedOut, 124));
    assert_eq!(stdout.bytes(), b"partial");
    let report = finish(run);
    assert!(report.timed_out);
    assert_eq!(kills.load(Ordering::SeqCst), 1);
    let record = assert_allowed(&lab, &report);
    assert!(record.facts.iter().any(|(fact, ..)| *fact == HostFact::Timeout { limit_ms: 1000 }));
    assert_eq!(record.output(1, OutputStream::Stdout).0, b"partial");
}

#[test]
fn a_run_within_its_time_has_no_timeout() {
    let lab = Lab::honest();
    let run = lab.start_with(|policy| policy.limits.timeout_s = 60);
    assert_eq!(wait(exec(&run, &["true"])).unwrap().code, 0);
    let report = finish(run);
    assert!(!report.timed_out && !assert_allowed(&lab, &report).has("timeout"));
}

#[test]
fn an_exec_that_had_ended_keeps_its_code_when_the_time_is_up() {
    let mut lab = Lab::honest();
    (lab.runtime.patience.stop, lab.runtime.patience.caller) =
        (Duration::from_millis(300), Duration::from_millis(300));
    let run = lab.start_with(|policy| policy.limits.timeout_s = 1);
    let stuck = Stuck::default();
    let io = ExecIo { stdout: Some(Box::new(stuck.clone())), ..ExecIo::default() };
    let ended = run.exec(ExecRequest::new(["echo", "x"]), io);
    let report = finish(run);
    stuck.let_go();
    assert!(report.timed_out, "its caller kept it from its end");
    let result = wait(ended).unwrap();
    assert_eq!((result.how, result.code), (ExecHow::Exited, 0));
    assert_allowed(&lab, &report);
}

#[test]
fn a_timeout_that_the_guest_does_not_answer_ends_the_machine() {
    let lab = Lab::new(|guest| {
        guest.boot();
        guest.ignore();
    })
    .impatient();
    let begun = Instant::now();
    let run = lab.start_with(|policy| policy.limits.timeout_s = 1);
    let error = wait(exec(&run, &["anything"])).unwrap_err();
    let report = finish(run);
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert!(error.to_string().contains("did not become quiet"), "{error}");
    assert!(report.timed_out);
    assert_killed(&lab, &report, &["sandbox_destroyed"]);
}

#[test]
fn an_interrupt_is_recorded_and_ends_the_machine() {
    let lab = Lab::honest();
    let run = lab.start();
    let sleeper = exec(&run, &["sleep", "x"]);
    assert!(wait(exec(&run, &["true"])).is_ok(), "the machine is up");
    run.interrupter().interrupt(2);
    let result = wait(sleeper).unwrap();
    assert_eq!((result.how, result.code), (ExecHow::Signalled, 137));
    let report = finish(run);
    assert_eq!(report.interrupted, Some(2));
    assert!(assert_allowed(&lab, &report).has("interrupted"));
}

#[test]
fn a_second_interrupt_ends_the_machine_at_once() {
    let mut lab = Lab::new(|guest| {
        guest.boot();
        guest.ignore();
    });
    lab.runtime.patience.stop = HANG;
    let run = lab.start();
    let sleeper = exec(&run, &["sleep"]);
    until("the machine's start", || {
        std::fs::metadata(lab.home.path().join("out/run-00000001/objects/.part-1-stdout")).is_ok()
    });
    run.interrupter().interrupt(2);
    run.interrupter().interrupt(2);
    let begun = Instant::now();
    let report = finish(run);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(wait(sleeper).is_err());
    assert_allowed(&lab, &report);
}

#[test]
fn dropping_a_run_ends_its_machine_at_once_and_says_so_on_record() {
    let lab = Lab::honest();
    let run = lab.start();
    let sleeper = exec(&run, &["sleep", "x"]);
    let quick = exec(&run, &["true"]);
    assert!(wait(quick).is_ok(), "the machine is up");
    soon("drop", move || drop(run));
    lab.assert_all_gone();
    assert!(wait(sleeper).is_err());
    let mut report = lab.run(&["true"]).0;
    assert_eq!(report.verdict, Verdict::Failed, "the dropped run's record stands in the way");
    report.bundle = Some(lab.home.path().join("out/run-00000001"));
    let record = Record::read(&report);
    assert!(record.facts.iter().any(|(fact, ..)| *fact == HostFact::Interrupted { signal: 0 }));
    assert_eq!(record.derived.verdict, Verdict::Allowed);
    assert!(record.derived.agrees_with_record());
}

#[test]
fn a_machine_that_dies_while_it_runs_is_a_destroyed_sandbox() {
    let lab = Lab::new(|guest| {
        guest.boot();
        guest.exec();
        guest.die();
    });
    let run = lab.start();
    assert!(wait(exec(&run, &["x"])).is_err());
    assert_killed(&lab, &finish(run), &["sandbox_destroyed"]);
}

#[test]
fn what_the_guest_said_before_its_death_is_heard() {
    let lab = Lab::new(|guest| {
        guest.boot();
        let Some(exec) = guest.exec() else { return };
        guest.send(exec, &GuestFrame::Stdout(b"last words"));
        guest.exited(exec, 4);
        guest.die();
    });
    let run = lab.start();
    assert_eq!(wait(exec(&run, &["x"])).unwrap().code, 4);
    let report = finish(run);
    assert_eq!(report.exit_code, Some(4));
    let record = assert_killed(&lab, &report, &["sandbox_destroyed"]);
    assert_eq!(record.output(1, OutputStream::Stdout).0, b"last words");
}

#[test]
fn a_machine_that_ends_once_it_is_quiet_did_as_it_was_told() {
    for _ in 0..20 {
        let lab = Lab::new(|guest| {
            guest.boot();
            while let Some(said) = guest.receive() {
                if matches!(said, FromHost::Quiesce) {
                    guest.send(0, &GuestFrame::Quiesced);
                    return;
                }
            }
        });
        assert_allowed(&lab, &finish(lab.start()));
    }
}

#[test]
fn a_teardown_that_is_not_verified_is_killed_and_its_entry_stays_for_the_reaper() {
    let machine = FakeMachine { survives_kill: true, ..FakeMachine::new(honest) };
    let lab = Lab::with(machine);
    let (report, result) = lab.run(&["true"]);
    assert_eq!(result.unwrap().code, 0);
    assert_eq!(report.verdict, Verdict::Killed);
    assert_eq!(report.kill.reasons, ["teardown_unverified"]);
    assert!(!report.teardown.verified);
    assert_eq!(lab.registered().len(), 1);
    Record::of(&report);
    // The name stays taken until somebody reaped it.
    let mut again = lab.runtime.clone();
    again.out = lab.home.path().join("again");
    let report = finish(again.start(lab.spec(|_| {}), lab.boot()));
    assert_eq!(report.verdict, Verdict::Failed);
    assert!(report.error.unwrap().contains("hotcell reap"));
}

#[test]
fn bytes_written_to_the_root_image_kill() {
    for (bytes, reasons) in [(Some(0), &[] as &[&str]), (None, &[]), (Some(512), &["root_changed"])] {
        let machine = FakeMachine { root_bytes_written: bytes, ..FakeMachine::new(honest) };
        let lab = Lab::with(machine);
        let report = lab.run(&["true"]).0;
        if reasons.is_empty() {
            assert_allowed(&lab, &report);
        } else {
            assert_killed(&lab, &report, reasons);
        }
    }
}

#[test]
fn a_root_image_with_another_digest_after_the_run_kills() {
    for changed in [false, true] {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().join("root");
        let machine = FakeMachine::new(move |guest| {
            if changed {
                std::fs::write(&root, b"another image").unwrap();
            }
            honest(guest);
        });
        let lab = Lab::at(home, machine, TestClock::new(u64::MAX, false));
        let report = lab.run(&["true"]).0;
        if changed {
            assert_killed(&lab, &report, &["root_changed"]);
        } else {
            let record = assert_allowed(&lab, &report);
            let after = |(fact, ..): &(HostFact, _, _)| matches!(fact, HostFact::Measured { what, .. } if what == "root_after");
            assert!(record.facts.iter().any(after));
        }
    }
}

/// A sabotaged VMM: a shell stands for it that opens a file, or starts a process, once its guest runs.
#[test]
fn a_vmm_that_gets_more_than_it_had_is_killed_while_its_guest_runs() {
    for (does, reasons) in [
        ("true", &[] as &[&str]),
        ("exec 9</etc/passwd", &["vmm_out_of_jail"]),
        ("sleep 1000 >/dev/null 2>&1 & disown", &["vmm_out_of_jail"]),
    ] {
        let stand_in = SabotagedVmm::start(does);
        let go = Arc::clone(&stand_in);
        let sabotaged = !reasons.is_empty();
        let script = move |guest: &mut hotcell_testkit::FakeGuest| {
            if !sabotaged {
                go.does_it();
                return honest(guest);
            }
            if guest.boot() && guest.exec().is_some() {
                go.does_it();
                // The command runs on: only the kill ends it.
                guest.ignore();
            }
        };
        let process = stand_in.process();
        let watch = move || hotcell_vm::VmmWatch::begin(process.clone(), None).unwrap();
        let machine = FakeMachine { vmm_stand_in: Some(Arc::new(watch)), ..FakeMachine::new(script) };
        let lab = Lab::with(machine);
        let report = lab.run(&["anything"]).0;
        if reasons.is_empty() {
            assert_allowed(&lab, &report);
        } else {
            assert_killed(&lab, &report, reasons);
        }
    }
}

#[test]
fn a_machine_that_is_not_observed_in_time_fails_before_anything_runs() {
    for arm in [std::time::Duration::ZERO, HANG] {
        let process = SabotagedVmm::start("true");
        let watched = Arc::clone(&process);
        let watch = move || hotcell_vm::VmmWatch::begin(watched.process(), None).unwrap();
        let machine = FakeMachine { vmm_stand_in: Some(Arc::new(watch)), ..FakeMachine::new(honest) };
        let mut lab = Lab::with(machine);
        lab.runtime.patience.arm = arm;
        let (report, result) = lab.run(&["true"]);
        if arm == HANG {
            assert_allowed(&lab, &report);
        } else {
            assert_eq!(report.verdict, Verdict::Failed, "{report:?}");
            assert!(report.error.as_ref().unwrap().contains("could not be observed within"), "{report:?}");
            assert!(result.is_err(), "nothing ran: {result:?}");
        }
    }
}

struct SabotagedVmm(std::sync::Mutex<std::process::Child>);

impl SabotagedVmm {
    fn start(does: &str) -> Arc<SabotagedVmm> {
        let script = format!("read go; {does}; echo done; read end");
        let child = std::process::Command::new("bash")
            .args(["-c", &script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .process_group(0)
            .spawn();
        Arc::new(SabotagedVmm(std::sync::Mutex::new(child.unwrap())))
    }

    fn process(&self) -> hotcell_vm::ProcessId {
        hotcell_vm::ProcessId::of(self.0.lock().unwrap().id() as i32).unwrap()
    }

    fn does_it(&self) {
        let mut child = self.0.lock().unwrap();
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"go\n").unwrap();
        let mut done = [0; 5];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut done).unwrap();
        assert_eq!(&done, b"done\n");
    }
}

impl Drop for SabotagedVmm {
    fn drop(&mut self) {
        let child = self.0.get_mut().unwrap();
        // Its group, with what it started.
        let group = rustix::process::Pid::from_child(child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = child.wait();
    }
}

#[test]
fn a_process_that_carries_the_runs_mark_and_outlives_it_is_a_kill_and_another_runs_is_none() {
    for (marked, verdict) in [("run-00000001", "KILLED"), ("run-00000002", "ALLOWED")] {
        let lab = Lab::honest();
        let mut left = std::process::Command::new("sh")
            .args(["-c", "read forever", "-name", &format!("hotcell-{marked}")])
            .env("HOTCELL_REGISTRY", lab.runtime.registry.path())
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let (report, _) = lab.run(&["true"]);
        left.kill().unwrap();
        left.wait().unwrap();
        assert_eq!(report.verdict.as_str(), verdict, "{report:?}");
        let reasons: &[&str] = if verdict == "KILLED" { &["process_outlived_run"] } else { &[] };
        assert_eq!(report.kill.reasons, reasons, "{report:?}");
    }
}
