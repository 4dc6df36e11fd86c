//! Runs of an honest guest: what comes out is what went in, to the byte.

use crate::lab::*;
use hotcell_decide::{ExecHow, HostFact, OutputStream};
use hotcell_ledger::{ActorId, Digest, Payload};
use hotcell_runtime::{ExecError, ExecIo, ExecRequest, Stdin};
use hotcell_testkit::{Noise, Step};
use std::io::Write;
use std::os::fd::OwnedFd;

const MIB: usize = 1 << 20;

#[test]
fn an_honest_run_is_allowed_and_recorded_in_the_documented_order() {
    let lab = Lab::honest();
    let (report, result) = lab.run(&["echo", "hello"]);
    assert_eq!(result.unwrap().code, 0);
    assert_eq!(report.exit_code, Some(0));
    assert!(report.gate1.ok && report.error.is_none() && report.kill.reasons.is_empty());
    let record = assert_allowed(&lab, &report);
    let names = record.names().join(" ");
    assert_eq!(
        names,
        "spec measured measured measured switch_proven isolation ready output output exec_ended vm_exited measured teardown \
         verdict"
    );
    assert_eq!(record.output(1, OutputStream::Stdout).0, b"hello\n");
    let first: Vec<_> = record.events.iter().take(2).map(|event| event.payload.clone()).collect();
    assert!(matches!(first[..], [Payload::RunBegin, Payload::ProcessSpawn { .. }]));
    assert_eq!(record.events.last().map(|event| &event.payload), Some(&Payload::RunEnd));
    assert_eq!(lab.backend.count(Step::Start), 1);
    assert_eq!(lab.backend.count(Step::Destroy), 1);
}

#[test]
fn exit_codes_and_signals_are_told_apart_in_result_and_record() {
    let lab = Lab::honest();
    let run = lab.start();
    for (argv, how, code, recorded) in [
        (&["true"] as &[&str], ExecHow::Exited, 0, 0),
        (&["exit", "7"], ExecHow::Exited, 7, 7),
        (&["exit", "139"], ExecHow::Exited, 139, 139),
        (&["signal", "11"], ExecHow::Signalled, 139, -11),
        (&["oom"], ExecHow::Oom, 137, -9),
        (&["no-such-program"], ExecHow::FailedToStart, 127, 127),
    ] {
        let result = wait(exec(&run, argv)).unwrap();
        assert_eq!((result.how, result.code), (how, code), "{argv:?}");
        assert_eq!(result.not_started.is_some(), how == ExecHow::FailedToStart);
        let _ = recorded;
    }
    let report = finish(run);
    assert_eq!(report.exit_code, Some(0), "the first exec's");
    let record = assert_allowed(&lab, &report);
    let exits: Vec<i32> = record
        .events
        .iter()
        .filter(|event| event.actor >= ActorId::FIRST_GUEST && !event.actor.is_host_band())
        .filter_map(|event| match event.payload {
            Payload::ProcessExit { code } => Some(code),
            _ => None,
        })
        .collect();
    assert_eq!(exits, [0, 7, 139, -11, -9, 127]);
}

#[test]
fn sixty_four_mib_of_noise_arrive_to_the_byte_on_both_streams() {
    let lab = Lab::honest();
    let (stdout, stderr) = (Seen::default(), Seen::default());
    let run = lab.start();
    let bytes = 64 * MIB;
    let request = ExecRequest::new(["both", "5", &bytes.to_string()]);
    let result = wait(run.exec(request, io_of(Stdin::Empty, &stdout, &stderr))).unwrap();
    for (seen, seed, totals) in [(stdout, 5, result.stdout), (stderr, 6, result.stderr)] {
        let whole = Digest::of(&Noise::bytes(seed, bytes));
        assert_eq!(Digest::of(&seen.bytes()), whole, "what the caller got");
        let totals = totals.unwrap();
        assert_eq!((totals.total_bytes, totals.whole), (bytes as u64, whole), "what the record says");
        assert!(totals.truncated());
    }
    let report = finish(run);
    let record = assert_allowed(&lab, &report);
    let (kept, ..) = record.output(1, OutputStream::Stdout);
    assert_eq!(kept.len(), 16 * MIB, "the default limit");
}

#[test]
fn the_output_limit_holds_at_exactly_n_bytes() {
    let lab = Lab::honest();
    let run = lab.start_with(|policy| policy.limits.output_mib = 1);
    for bytes in [MIB - 8, MIB, MIB + 8] {
        let result = wait(exec(&run, &["noise", "9", &bytes.to_string()])).unwrap();
        let totals = result.stdout.unwrap();
        assert_eq!(totals.total_bytes, bytes as u64);
        assert_eq!(totals.kept_bytes, bytes.min(MIB) as u64);
        assert_eq!(totals.truncated(), bytes > MIB);
    }
    let report = finish(run);
    let record = assert_allowed(&lab, &report);
    for (exec, bytes) in [(1, MIB - 8), (2, MIB), (3, MIB + 8)] {
        let (kept, total, truncated, whole) = record.output(exec, OutputStream::Stdout);
        let all = Noise::bytes(9, bytes);
        assert_eq!(kept, all[..bytes.min(MIB)]);
        assert_eq!((total, truncated, whole), (bytes as u64, bytes > MIB, Digest::of(&all)));
    }
}

#[test]
fn stdin_is_streamed_to_its_end() {
    let lab = Lab::honest();
    let run = lab.start();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let noise = Noise::bytes(3, 4 * MIB);
    let sent = noise.clone();
    std::thread::spawn(move || sent.chunks(10_007).try_for_each(|part| writer.write_all(part)));
    let (stdout, stderr) = (Seen::default(), Seen::default());
    let stdin = Stdin::Descriptor(OwnedFd::from(reader));
    let result = wait(run.exec(ExecRequest::new(["cat"]), io_of(stdin, &stdout, &stderr))).unwrap();
    assert_eq!(result.code, 0);
    assert!(stdout.bytes() == noise, "{} bytes came back", stdout.bytes().len());
    let bytes = Seen::default();
    let stdin = Stdin::Bytes(noise[..1000].to_vec());
    wait(run.exec(ExecRequest::new(["cat"]), io_of(stdin, &bytes, &stderr))).unwrap();
    assert_eq!(bytes.bytes(), noise[..1000]);
    assert_allowed(&lab, &finish(run));
}

#[test]
fn empty_stdin_ends_at_once() {
    let lab = Lab::honest();
    let (report, result) = lab.run(&["cat"]);
    assert_eq!(result.unwrap().stdout.unwrap().total_bytes, 0);
    assert_allowed(&lab, &report);
}

#[test]
fn a_guest_that_closes_stdin_is_not_waited_for_by_its_writer() {
    let lab = Lab::honest();
    let run = lab.start();
    // The writer's end stays open: nobody ends this stdin.
    let (reader, _writer) = std::io::pipe().unwrap();
    let io = ExecIo { stdin: Stdin::Descriptor(OwnedFd::from(reader)), ..ExecIo::default() };
    assert_eq!(wait(run.exec(ExecRequest::new(["deaf"]), io)).unwrap().code, 0);
    assert_allowed(&lab, &finish(run));
}

#[test]
fn many_execs_at_once_each_get_their_own_output() {
    let lab = Lab::honest();
    let run = lab.start();
    let all: Vec<_> = (0..100)
        .map(|seed| {
            let seen = Seen::default();
            let request = ExecRequest::new(["noise", &seed.to_string(), "40000"]);
            (seed, seen.clone(), run.exec(request, io_of(Stdin::Empty, &seen, &Seen::default())))
        })
        .collect();
    for (seed, seen, exec) in all {
        assert_eq!(wait(exec).unwrap().code, 0);
        assert!(seen.bytes() == Noise::bytes(seed, 40_000), "exec {seed}");
    }
    assert_allowed(&lab, &finish(run));
}

#[test]
fn one_exec_too_many_at_once_is_refused_and_the_run_goes_on() {
    let lab = Lab::honest();
    let run = lab.start();
    let sleepers: Vec<_> = (0..256).map(|_| exec(&run, &["sleep"])).collect();
    let error = wait(exec(&run, &["true"])).unwrap_err();
    assert_eq!(error, ExecError::Refused("256 execs run already".into()));
    run.interrupter().interrupt(15);
    for sleeper in sleepers {
        assert_eq!(wait(sleeper).unwrap().code, 137);
    }
    assert_allowed(&lab, &finish(run));
}

#[test]
fn what_can_not_be_executed_is_refused_and_the_run_goes_on() {
    let lab = Lab::honest();
    let run = lab.start();
    let with = |change: fn(&mut ExecRequest)| {
        let mut request = ExecRequest::new(["true"]);
        change(&mut request);
        request
    };
    for (request, words) in [
        (with(|r| r.argv.push("x".repeat(MIB))), "over 1 MiB"),
        (with(|r| r.argv.push("a\0b".into())), "NUL"),
        (with(|r| r.argv.clear()), "no program"),
        (with(|r| r.env.push((String::new(), "x".into()))), "name"),
        (with(|r| r.cwd = "relative".into()), "absolute"),
        (with(|r| r.cwd = format!("/{}", "x".repeat(5000))), "5001 bytes"),
        (with(|r| r.uid = 0), "user"),
        (with(|r| r.gid = 0), "group"),
    ] {
        let error = wait(run.exec(request, ExecIo::default())).unwrap_err();
        assert!(matches!(&error, ExecError::Refused(why) if why.contains(words)), "{words}: {error}");
    }
    let long = with(|r| r.env.push(("BIG".into(), "=\n\"".repeat(20_000))));
    assert_eq!(wait(run.exec(long, ExecIo::default())).unwrap().code, 0, "the twin that can");
    let record = assert_allowed(&lab, &finish(run));
    let execs = record.facts.iter().filter(|(fact, ..)| matches!(fact, HostFact::ExecEnded { .. }));
    assert_eq!(execs.count(), 1, "a refused exec leaves nothing in the record");
}

#[test]
fn finish_while_booting_waits_and_runs_what_was_asked_for() {
    let lab = Lab::new(|guest| {
        std::thread::sleep(std::time::Duration::from_millis(200));
        hotcell_testkit::honest(guest);
    });
    let run = lab.start();
    let early = exec(&run, &["exit", "3"]);
    let report = finish(run);
    assert_eq!(wait(early).unwrap().code, 3);
    assert_eq!(report.exit_code, Some(3));
    assert_allowed(&lab, &report);
}

#[test]
fn a_caller_that_does_not_read_costs_no_byte_of_the_record_and_can_not_touch_it_later() {
    let mut lab = Lab::honest();
    (lab.runtime.patience.stop, lab.runtime.patience.caller) =
        (std::time::Duration::from_millis(300), std::time::Duration::from_millis(300));
    let run = lab.start();
    let stuck = Stuck::default();
    let io = ExecIo { stdout: Some(Box::new(stuck.clone())), ..ExecIo::default() };
    let sleeper = exec(&run, &["sleep", "once"]);
    let noisy = run.exec(ExecRequest::new(["noise", "1", "2000000"]), io);
    until("the guest's first byte", || {
        entries(&lab.home.path().join("out/run-00000001/objects")).iter().any(|path| {
            path.to_string_lossy().contains(".part-2-stdout") && path.metadata().is_ok_and(|m| m.len() > 0)
        })
    });
    run.interrupter().interrupt(15);
    let report = finish(run);
    assert!(wait(sleeper).is_ok());
    let _ = wait(noisy);
    let record = assert_allowed(&lab, &report);
    let (kept, total, truncated, whole) = record.output(2, OutputStream::Stdout);
    assert!(!kept.is_empty() && kept.len() as u64 == total && !truncated);
    assert_eq!(kept, Noise::bytes(1, 2_000_000)[..kept.len()]);
    assert_eq!(whole, Digest::of(&kept));
    stuck.let_go();
    std::thread::sleep(std::time::Duration::from_millis(50));
    Record::of(&report);
}
