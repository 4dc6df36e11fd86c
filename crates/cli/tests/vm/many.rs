//! Many runs: one after another in one process, many at once, and many stopped together.

use crate::harness::{PATIENCE, SOON, Slot, home, hotcell, verify, wait_until, warm_up};
use crate::machine::{Sink, assert_gone, busybox, fresh_id, runtime};
use crate::sigkill::left;
use hotcell_runtime::{ExecIo, ExecRequest, GetRequest, PutRequest, Run, Stdin};
use hotcell_vm::TemplateStore;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How many runs [`in_this_process`] makes.
const RUNS: &str = "HOTCELL_TEST_RUNS";
/// Few, and still enough for as many runs as a host of two processors has at once.
const FILES: u32 = 256;

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A clone of busybox's template, made where there is none.
fn started(id: &str, out: &Path) -> Run {
    let (spec, mut boot) = busybox(id, None);
    let runtime = runtime(out, Duration::from_secs(120));
    let store = TemplateStore::in_cache(&home().join("cache"));
    boot.template = runtime.template(&store, &spec, &boot, &mut |_| {}).unwrap();
    runtime.start(spec, boot)
}

/// Everything that a run opens: streams, a copy in, a copy out.
fn work_and_finish(run: Run, out: &Path, source: &Path) {
    let said = Sink::default();
    let io = ExecIo { stdout: Some(Box::new(said.clone())), ..ExecIo::default() };
    if let Err(error) = run.put(PutRequest::new(source, "/workspace/in").unwrap()) {
        panic!("{error}: {:?}", run.finish());
    }
    let result = run.exec(ExecRequest::new(["/bin/cat", "/workspace/in"]), io).wait().unwrap();
    assert_eq!((result.code, said.text().as_str()), (0, "input"));
    run.get(GetRequest::into_bundle("/workspace/in")).unwrap();
    let report = run.finish();
    assert_eq!(report.verdict.as_str(), "ALLOWED", "{report:?}");
    assert_gone(&report);
    // The verifier is a process: it would count while it runs, and not after.
    assert_eq!(verify(&out.join(&report.run_id)), 0);
}

#[test]
#[ignore = "not by itself: the two tests below start it, in a process of its own with few open files"]
fn in_this_process() {
    let runs: usize = std::env::var(RUNS).expect("started by another test").parse().unwrap();
    let (out, source) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
    fs::write(source.path(), "input").unwrap();
    let _slot = Slot::take();
    let mut counts = Vec::new();
    for number in 0..runs {
        let id = fresh_id("files");
        work_and_finish(started(&id, out.path()), out.path(), source.path());
        fs::remove_dir_all(out.path().join(&id)).unwrap();
        if number > 0 {
            // A thread that has just ended may close its own a moment later.
            let first = counts.first().copied();
            wait_until("no more descriptors than after the first runs", SOON, || {
                first.is_none_or(|first| descriptors() <= first)
            });
            counts.push(descriptors());
        }
    }
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    println!("open files after each of {runs} runs: {least} to {most}, limit {FILES}");
    // And as many at once as a small host has.
    let ids: Vec<String> = (0..4).map(|_| fresh_id("files")).collect();
    let runs: Vec<Run> = ids.iter().map(|id| started(id, out.path())).collect();
    for run in runs {
        let open = descriptors();
        work_and_finish(run, out.path(), source.path());
        assert!(open <= FILES as usize);
    }
}

fn with_few_files(runs: usize, patience: Duration) {
    warm_up();
    let test = std::env::current_exe().unwrap();
    let mut child = Command::new("/bin/sh")
        .args(["-c", &format!("ulimit -n {FILES} && exec \"$0\" \"$@\"")])
        .arg(test)
        .args(["--exact", "many::in_this_process", "--ignored", "--nocapture", "--test-threads", "1"])
        .env(RUNS, runs.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + patience;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > end => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    let said = std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
    assert!(status.is_some_and(|status| status.success()), "{status:?}: {said}");
    assert!(said.contains("1 passed") && said.contains("open files after"), "{said}");
    println!("{}", said.lines().find(|line| line.contains("open files after")).unwrap());
}

#[test]
fn ten_runs_in_one_process_leave_no_file_open_and_256_are_enough() {
    with_few_files(10, PATIENCE * 3);
}

#[test]
#[ignore = "minutes"]
fn two_hundred_runs_in_one_process_leave_no_file_open() {
    with_few_files(200, PATIENCE * 40);
}

/// Starts so many at once, every third by one and the same name.
fn start_at_once(count: usize) {
    const SAME: usize = 3;
    warm_up();
    let _slots = Slot::take_all();
    let out = tempfile::tempdir().unwrap();
    let same = fresh_id("same");
    let runs: Vec<_> = (0..count)
        .map(|number| {
            let name = if number % SAME == 0 { same.clone() } else { fresh_id("once") };
            let child = hotcell()
                .args(["run", "--json", "--accel", "tcg", "--name", &name, "--out"])
                .arg(out.path())
                .args(["--", "/bin/echo", &number.to_string()])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            (number, name, child, Instant::now())
        })
        .collect();
    let (mut ran, mut refused, mut took) = (Vec::new(), 0, Vec::new());
    for (number, name, child, begun) in runs {
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        let text = String::from_utf8(output.stdout).unwrap();
        match output.status.code() {
            Some(0) => {
                let (said, report) = text.trim_end().rsplit_once('\n').unwrap();
                let report: Value = serde_json::from_str(report).unwrap();
                // Its own machine, its own output.
                assert_eq!(said, number.to_string());
                assert_eq!(
                    (&report["run_id"], &report["verdict"]),
                    (&name.as_str().into(), &"ALLOWED".into())
                );
                assert_eq!(report["teardown"]["verified"], true);
                took.push(begun.elapsed());
                ran.push(name);
            }
            Some(125) => {
                assert_eq!(name, same, "{err}");
                assert!(err.contains("choose another name") || err.contains("--name"), "{err}");
                refused += 1;
            }
            other => panic!("{name} ended with {other:?}: {text}{err}"),
        }
    }
    let of_same = count.div_ceil(SAME);
    assert_eq!((ran.iter().filter(|name| **name == same).count(), refused), (1, of_same - 1));
    assert_eq!(ran.len(), count - of_same + 1);
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), ran.len(), "a refused run left something");
    for name in &ran {
        assert_eq!(left(name), Vec::<String>::new());
        assert_eq!(verify(&out.path().join(name)), 0);
    }
    println!(
        "{count} starts at once: {} ran, {refused} of one name refused, nothing left, all records intact; the last ended after {:.1} s",
        ran.len(),
        took.iter().max().unwrap().as_secs_f64()
    );
}

#[test]
fn six_starts_at_once_are_unique_or_refused() {
    start_at_once(6);
}

#[test]
#[ignore = "fifty machines at once"]
fn fifty_starts_at_once_are_unique_or_refused() {
    start_at_once(50);
}

#[test]
fn many_runs_are_stopped_together_each_with_its_own_signal_and_record() {
    let signals = [Signal::INT, Signal::TERM, Signal::HUP, Signal::TERM];
    let out = tempfile::tempdir().unwrap();
    let _slots = Slot::take_all();
    let runs: Vec<_> = signals
        .iter()
        .map(|&signal| {
            let run = started(&fresh_id("stopped"), out.path());
            let said = Sink::default();
            let script = "trap '' INT TERM HUP; echo up; sleep 170 & wait; echo never; sleep 170";
            let request = ExecRequest::new(["/bin/sh", "-c", script]);
            let io =
                ExecIo { stdin: Stdin::Empty, stdout: Some(Box::new(said.clone())), ..ExecIo::default() };
            let exec = run.exec(request, io);
            (signal, run, exec, said)
        })
        .collect();
    for (.., said) in &runs {
        wait_until("the command", PATIENCE, || said.text() == "up\n");
    }
    let told = Instant::now();
    // The first signal of each, then a second: neither waits for a machine.
    for round in 0..2 {
        for (signal, run, ..) in &runs {
            run.interrupter().interrupt(signal.as_raw());
        }
        assert!(told.elapsed() < SOON, "telling all in round {round} took {:?}", told.elapsed());
    }
    for (signal, run, exec, said) in runs {
        let ended = exec.wait();
        let report = run.finish();
        assert_eq!(report.interrupted, Some(signal.as_raw()), "{report:?}");
        assert_gone(&report);
        assert_eq!(said.text(), "up\n", "{ended:?}");
        assert_eq!(verify(&out.path().join(&report.run_id)), 0);
    }
    // Together, not one after another: each by itself has this long.
    assert!(told.elapsed() < SOON, "{:?}", told.elapsed());
}
