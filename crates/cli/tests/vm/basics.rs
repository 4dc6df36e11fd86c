//! A command runs in a machine of its own: what goes in, what comes out, how it ends.

use crate::harness::{Job, SOON};
use hotcell_ledger::{ActorId, Digest, Payload};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

fn random(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    bytes
}

/// Exit codes of processes in the guest, as the record has them.
fn guest_exits(record: &crate::record::Record) -> Vec<i32> {
    let exits = record.events.iter().filter_map(|event| match event.payload {
        Payload::ProcessExit { code } if !event.actor.is_host_band() => Some(code),
        _ => None,
    });
    exits.collect()
}

#[test]
fn a_command_runs_alone_in_its_own_kernel_and_its_record_verifies() {
    let script = "echo kernel=$(uname -r); echo nets=$(ls /sys/class/net); echo cwd=$(pwd); echo id=$(id -u)\n\
        touch made && echo writable; echo oops >&2; printf 'no newline at the end'; exit 7";
    let outcome = Job::sh(script).run();
    outcome.assert_allowed(7);
    let text = outcome.text();
    let host = rustix::system::uname();
    let host = host.release().to_str().unwrap();
    let line = |key: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {key}: {outcome:?}"))
    };
    assert!(!line("kernel").is_empty() && line("kernel") != host, "{text}");
    assert_eq!((line("nets"), line("cwd"), line("id")), ("lo", "/workspace", "1000"));
    assert!(text.contains("writable\n"), "{outcome:?}");
    // The report is a line of its own even so; `Outcome` found it.
    assert!(text.ends_with("no newline at the end\n"), "{text:?}");
    assert!(outcome.err().contains("oops\n") && outcome.err().contains("machine gone"), "{outcome:?}");
    assert_eq!(outcome.report("/exit_code"), 7);
    assert_eq!(outcome.report("/timed_out"), false);
    assert_eq!(outcome.report("/advisory"), &json!([]));
    let record = outcome.record();
    assert_eq!(record.fact("verdict")["verdict"], "ALLOWED");
    assert_eq!(record.fact("ready")["kernel_release"], line("kernel"));
    let measured: Vec<&Value> = record.facts("measured").map(|fact| &fact["what"]).collect();
    let template = ["template-ram", "template-state", "template-disk"];
    assert_eq!(measured, [&["kernel", "initramfs", "root"], &template[..], &["root_after"]].concat());
    let devices = record.fact("isolation")["details"]["devices"].as_str().unwrap().to_owned();
    assert!(devices.contains("virtio-blk-device") && !devices.contains("net"), "{devices}");
    let checks = record.fact("teardown")["checks"].as_array().unwrap().clone();
    assert!(checks.len() >= 2 && checks.iter().all(|check| check["gone"] == true), "{checks:?}");
    assert_eq!(record.events.last().unwrap().actor, ActorId::HOST);
}

#[test]
fn death_by_a_signal_and_an_exit_code_that_looks_like_it_differ_in_the_record() {
    let killed = Job::sh("kill -9 $$").run();
    killed.assert_allowed(137);
    let record = killed.record();
    assert_eq!(record.fact("exec_ended")["how"], "signalled");
    assert_eq!(record.fact("exec_ended")["signal"], 9);
    assert_eq!(guest_exits(&record), [-9]);
    let exited = Job::sh("exit 137").run();
    exited.assert_allowed(137);
    let record = exited.record();
    assert_eq!(record.fact("exec_ended")["how"], "exited");
    assert_eq!(record.fact("exec_ended")["code"], 137);
    assert_eq!(guest_exits(&record), [137]);
}

#[test]
fn sixty_four_mib_pass_byte_for_byte_and_only_the_first_are_kept() {
    let bytes = random(64 << 20);
    let script = "cat; head -c 3000000 /dev/urandom >r; sha256sum <r; cat r >&2";
    let outcome = Job::sh(script).stdin(bytes.clone()).run();
    outcome.assert_allowed(0);
    let (passed, rest) = outcome.stdout.split_at(bytes.len());
    assert!(passed == bytes, "stdout is not what went in");
    let error_bytes = &outcome.stderr[..3_000_000];
    assert!(outcome.stderr[3_000_000..].starts_with(b"hotcell: "), "{}", outcome.stderr.len());
    assert_eq!(String::from_utf8_lossy(rest), sha256sum(error_bytes));
    let record = outcome.record();
    let stdout = record.facts("output").find(|fact| fact["stream"] == "stdout").unwrap();
    let whole = Digest::of(&outcome.stdout).to_hex();
    assert_eq!(stdout["whole"], whole, "the digest is of all bytes");
    assert_eq!(stdout["total_bytes"], outcome.stdout.len());
    assert_eq!((&stdout["kept_bytes"], &stdout["truncated"]), (&json!(16 << 20), &json!(true)));
    let kept = outcome.bundle().join("objects").join(stdout["kept"].as_str().unwrap());
    assert!(std::fs::read(kept).unwrap() == bytes[..16 << 20], "what is kept is not the beginning");
    // Bounded by windows, whatever passes.
    assert!(outcome.peak_rss_kib < 96 << 10, "{} KiB", outcome.peak_rss_kib);
}

pub(crate) fn sha256sum(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
}

#[test]
fn empty_stdin_ends_and_unread_stdin_holds_nothing() {
    let empty = Job::sh("wc -c").run();
    empty.assert_allowed(0);
    assert_eq!(empty.text().trim(), "0");
    let unread = Job::sh("head -c 5; exec <&-; echo; echo out").stdin(vec![b'x'; 8 << 20]).run();
    unread.assert_allowed(0);
    assert_eq!(unread.text(), "xxxxx\nout\n");
    assert!(unread.after_ready() < SOON, "{unread:?}");
}

#[test]
fn a_timeout_ends_the_whole_tree_and_keeps_what_was_said() {
    let script = "echo a; setsid sh -c 'sleep 300' & (setsid setsid sleep 300 &) ; sleep 300; echo never";
    let outcome = Job::sh(script).flags(["--timeout", "3"]).run();
    outcome.assert_allowed(124);
    assert_eq!(outcome.text(), "a\n");
    assert_eq!(outcome.report("/timed_out"), true);
    assert!(outcome.after_ready() < Duration::from_secs(3) + SOON, "{outcome:?}");
    let record = outcome.record();
    assert_eq!(record.fact("timeout")["limit_ms"], 3000);
    assert_eq!(record.fact("exec_ended")["how"], "timed_out");
    // The guest wrote its disks out: nobody of the tree was left to hold them.
    assert!(record.facts("violation").next().is_none());
}

#[test]
fn a_grandchild_that_holds_the_pipe_does_not_hold_the_result() {
    let outcome = Job::sh("sleep 60 & setsid sleep 60 & echo done").run();
    outcome.assert_allowed(0);
    assert_eq!(outcome.text(), "done\n");
    assert!(outcome.after_ready() < SOON, "{outcome:?}");
}

#[test]
fn programs_that_are_missing_or_not_executable_are_told_apart() {
    let missing = Job::new(["/no/such/program"]).run();
    missing.assert_allowed(127);
    assert!(
        missing.err().contains("/no/such/program") && missing.err().contains("No such file"),
        "{missing:?}"
    );
    let record = missing.record();
    assert_eq!(record.fact("exec_ended")["how"], "failed_to_start");
    let data = Job::new(["/etc/passwd"]).run();
    data.assert_allowed(126);
    assert!(data.err().contains("/etc/passwd") && data.err().contains("denied"), "{data:?}");
}
