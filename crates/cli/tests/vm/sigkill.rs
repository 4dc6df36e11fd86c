//! SIGKILL of Hotcell at twenty points of a run: after `hotcell reap` nothing of it is left but its record.
//!
//! A point is a state of the run that can be seen from outside and a time after it, drawn from a seed that is printed
//! (`HOTCELL_TEST_SEED` sets it). The table is printed too.

use crate::harness::{Job, Live, PATIENCE, SLOTS, SOON, home, hotcell, vmms_of, wait_until, warm_up};
use rustix::process::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

/// What is waited for, and how long after it the signal may come at most, milliseconds.
const POINTS: [(&str, u64); 20] = [
    ("bundle begun", 5),
    ("registry entry", 5),
    ("ledger begun", 20),
    ("disk copied", 5),
    ("VMM there", 5),
    ("VMM there", 50),
    ("VMM written down", 20),
    ("VMM written down", 300),
    ("VMM written down", 1000),
    ("VMM written down", 3000),
    ("first output", 10),
    ("first output", 200),
    ("first output", 800),
    ("first output", 2000),
    ("copy under way", 5),
    ("copy under way", 100),
    ("copied out", 50),
    ("VMM gone", 1),
    ("VMM gone", 20),
    ("report there", 1),
];

fn is_there(point: &str, live: &Live, had_vmm: &mut bool) -> bool {
    let (entry, bundle) = (live.registry_entry(), live.bundle());
    let has = |dir: &Path, part: &str| {
        fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .any(|file| file.file_name().to_string_lossy().contains(part))
    };
    match point {
        "bundle begun" => bundle.exists(),
        "registry entry" => entry.exists(),
        "ledger begun" => bundle.join("ledger.ames").exists(),
        "disk copied" => entry.join("workspace.img").exists(),
        "VMM there" => !live.vmms().is_empty(),
        "VMM written down" => {
            let text = fs::read_to_string(entry.join("entry.json")).unwrap_or_default();
            text.contains("\"vmm\": {")
        }
        "first output" => live.has_said("up\n"),
        "copy under way" => has(&bundle, ".hotcell-part"),
        "copied out" => bundle.join("files").exists(),
        "VMM gone" => {
            let there = !live.vmms().is_empty();
            *had_vmm |= there;
            *had_vmm && !there
        }
        "report there" => bundle.join("report.json").exists(),
        other => panic!("no point {other}"),
    }
}

/// Folders with the run's name in theirs, some levels down: its cgroups.
fn named(dir: &Path, run_id: &str, depth: usize, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if entry.file_name().to_string_lossy().contains(run_id) {
            found.push(entry.path());
        } else if depth > 0 {
            named(&entry.path(), run_id, depth - 1, found);
        }
    }
}

/// What of a run is left on this host.
pub(crate) fn left(run_id: &str) -> Vec<String> {
    let mut left: Vec<String> = vmms_of(run_id).iter().map(|pid| format!("VMM {pid}")).collect();
    let mut folders = Vec::new();
    named(Path::new("/sys/fs/cgroup"), run_id, 6, &mut folders);
    named(&home().join("state/live"), run_id, 0, &mut folders);
    named(Path::new("/dev/shm"), run_id, 1, &mut folders);
    left.extend(folders.iter().map(|path| path.display().to_string()));
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    left.extend(mounts.lines().filter(|line| line.contains(run_id)).map(str::to_owned));
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    left.extend(sockets.lines().filter(|line| line.contains(run_id)).map(str::to_owned));
    // Memory files and everything else that a process holds open or has mapped.
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let pid = process.file_name().to_string_lossy().into_owned();
        if !pid.bytes().all(|byte| byte.is_ascii_digit()) || pid == std::process::id().to_string() {
            continue;
        }
        for fd in fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
            let target = fs::read_link(fd.path()).unwrap_or_default();
            if target.to_string_lossy().contains(run_id) {
                left.push(format!("process {pid} holds {}", target.display()));
            }
        }
    }
    left
}

fn kill_at(point: &str, after: Duration, source: &Path) -> String {
    let mut put = source.as_os_str().to_owned();
    put.push(":/workspace/in");
    let script = "echo up; i=0; while [ $i -lt 40 ]; do echo $i; i=$((i+1)); done; sleep 1; echo down";
    let mut live = Job::sh(script).flag("--put", put).flag("--get", "/workspace/in").start();
    let run_id = live.run_id.clone();
    let end = Instant::now() + PATIENCE;
    let mut had_vmm = false;
    while !is_there(point, &live, &mut had_vmm) && !live.is_over() {
        assert!(Instant::now() < end, "{point} never came");
        std::thread::sleep(Duration::from_micros(300));
    }
    if point == "first output" && !live.is_over() {
        // The control: what is looked for afterwards is found while it is there, which a second later it may not be.
        let there = left(&run_id);
        for part in ["VMM ", "state/live", "holds "] {
            assert!(there.iter().any(|found| found.contains(part)), "{part} is not found: {there:?}");
        }
    }
    let due = Instant::now() + after;
    while Instant::now() < due && !live.is_over() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let late = live.is_over();
    if !late {
        live.signal(Signal::KILL);
    }
    let bundle = live.bundle();
    let outcome = live.wait();
    let killed = outcome.signal == Some(9);
    assert!(killed || late || outcome.code.is_some());
    let told = Instant::now();
    wait_until("the VMM's end", SOON, || vmms_of(&run_id).is_empty());
    let vmm_gone = told.elapsed();
    // Every start reaps as well: another test's may be at it this moment, and then this one passes it by.
    wait_until("nothing to be left", SOON, || {
        let reaped = hotcell().arg("reap").output().unwrap();
        assert!(reaped.status.success(), "{reaped:?}");
        left(&run_id).is_empty()
    });
    let record = if !bundle.join("ledger.ames").exists() {
        // Before the first event there is no record to be incomplete.
        assert!(!bundle.join("report.json").exists());
        "none yet".to_owned()
    } else {
        let output = hotcell().arg("verify").arg(&bundle).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        match output.status.code() {
            Some(0) if !killed || bundle.join("checkpoint.note").exists() => "intact: it had ended".into(),
            Some(3) => {
                let reason = fs::read_to_string(bundle.join("reaped.json")).unwrap_or_default();
                // Where the owner died after its entry was gone, there was nothing to reap.
                let said = reason.contains("owner died") || point == "VMM gone" || point == "report there";
                assert!(said, "no reason in {}: {text}", bundle.display());
                format!("INCOMPLETE{}", if reason.is_empty() { "" } else { ", reason in reaped.json" })
            }
            // Ended, and nobody had signed it yet: never a pass.
            Some(1) if text.contains("NOTE_MISSING") => "ended, not signed: not intact".into(),
            other => panic!("verify exits {other:?} at {point}: {text}"),
        }
    };
    assert!(killed || record.starts_with("intact"), "{outcome:?}");
    let after = after.as_millis();
    format!(
        "| {point} + {after} ms | {} | {} ms | {record} |",
        if killed { "killed" } else { "had ended" },
        vmm_gone.as_millis()
    )
}

#[test]
fn at_twenty_points_nothing_is_left_after_reaping() {
    warm_up();
    let given = std::env::var("HOTCELL_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos();
    let seed: u64 = given.unwrap_or_else(|| u64::from(now()) | 1);
    println!("HOTCELL_TEST_SEED={seed}");
    let host = tempfile::tempdir().unwrap();
    fs::write(host.path().join("file"), vec![7; 8 << 20]).unwrap();
    let todo = Mutex::new(POINTS.iter().enumerate().rev().collect::<Vec<_>>());
    let rows = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..SLOTS {
            scope.spawn(|| {
                loop {
                    let Some((number, (point, most))) = todo.lock().unwrap().pop() else { return };
                    // xorshift: every point its own number of the one seed.
                    let mut drawn = seed.wrapping_mul(2 * number as u64 + 1);
                    drawn ^= drawn << 13;
                    drawn ^= drawn >> 7;
                    drawn ^= drawn << 17;
                    let row = kill_at(point, Duration::from_millis(drawn % (most + 1)), host.path());
                    rows.lock().unwrap().push((number, row));
                }
            });
        }
    });
    let mut rows = rows.into_inner().unwrap();
    rows.sort();
    println!("| SIGKILL at | Hotcell | VMM gone after | record |\n|---|---|---|---|");
    rows.iter().for_each(|(_, row)| println!("{row}"));
    assert_eq!(rows.len(), POINTS.len());
    let killed = rows.iter().filter(|(_, row)| row.contains("| killed |")).count();
    assert!(killed >= 16, "only {killed} of the signals found somebody: the points are too late");
}
