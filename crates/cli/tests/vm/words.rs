//! What the command says to people: what broke and what to do, records by their names, and no more than was asked for.

use crate::harness::{Job, home, hotcell};
use std::fs;
use std::process::{Output, Stdio};

fn asked(words: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = hotcell().args(words).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (status.code().unwrap(), text(stdout), text(stderr))
}

#[test]
fn a_run_that_is_not_allowed_ends_with_what_broke_what_to_do_and_where_to_see_it() {
    let many = "for i in 1 2 3 4; do echo $i >/workspace/f$i; done; sync; sleep 100";
    let killed = Job::sh(many).policy("[capabilities]\nspawn = true\n").run();
    assert_eq!(killed.code, Some(99), "{killed:?}");
    let err = killed.err();
    let last = err.lines().last().unwrap();
    for word in
        ["files changed", "/workspace/f", "no grant covers it", "[capabilities] write", "hotcell report"]
    {
        assert!(last.contains(word), "{word}: {err}");
    }
    assert!(
        last.contains(killed.bundle().to_str().unwrap()),
        "a record elsewhere is named by its folder: {err}"
    );
    let explained = killed.report("/explained")[0].as_str().unwrap();
    assert!(last.contains(explained), "{killed:?}");
    // The same out of the record, for people and as a page.
    let (_, verified, _) = asked(&["verify", killed.bundle().to_str().unwrap()]);
    assert!(verified.contains(explained), "{verified}");
    let (_, page, _) = asked(&["report", killed.bundle().to_str().unwrap()]);
    assert!(page.contains("no grant covers it). Grant the files"), "{page}");

    let failed = Job::new(["true"]).flags(["--get", "/workspace/no/such"]).run();
    assert_eq!(failed.code, Some(125), "{failed:?}");
    let err = failed.err();
    let last = err.lines().last().unwrap();
    let why = "at get: /workspace/no/such: not copied: the guest says: /workspace/no/such: No such file";
    assert!(last.contains(why) && last.contains("hotcell report"), "{err}");
    assert_eq!(err.matches("not copied").count(), 1, "said once: {err}");

    // The control has nothing to explain, and ends with its verdict.
    let allowed = Job::new(["true"]).run();
    allowed.assert_allowed(0);
    assert!(allowed.err().lines().last().unwrap().starts_with("hotcell: ALLOWED"), "{allowed:?}");
}

#[test]
fn a_program_that_does_not_start_is_told_why_and_a_file_that_came_out_where_it_is() {
    let script = tempfile::NamedTempFile::new().unwrap();
    fs::write(script.path(), "#!/bin/sh\necho hi\n").unwrap();
    let put = format!("{}:/workspace/s.sh", script.path().display());
    for (argv, code, hint) in [
        (["python3", "-V"], 127, "The image busybox has no such program"),
        (["uname -r", ""], 127, "leave the quotes out"),
        (["/workspace/s.sh", ""], 126, "[exec] workspace = \"allow\""),
    ] {
        let outcome = Job::new(argv).flags(["--put", &put]).run();
        outcome.assert_allowed(code);
        assert!(outcome.err().contains(hint), "{outcome:?}");
    }
    let slow = Job::new(["sleep", "100"]).flags(["--timeout", "1"]).run();
    assert!(slow.code == Some(124) && slow.err().contains("--timeout, or [limits] timeout_s"), "{slow:?}");
    let hungry = "a=xxxxxxxxxxxxxxxx; while :; do a=$a$a; done";
    let hungry = Job::sh(hungry).policy("[limits]\nmemory_mib = 128\n[capabilities]\nspawn = true\n").run();
    hungry.assert_allowed(137);
    assert!(hungry.err().contains("[limits] memory_mib"), "{hungry:?}");
    let outcome = Job::sh("sh s.sh >out").flags(["--put", &put, "--get", "/workspace/out"]).run();
    outcome.assert_allowed(0);
    let place = outcome.bundle().join("files/workspace/out");
    assert!(outcome.err().contains(&format!("get /workspace/out: {}", place.display())), "{outcome:?}");
    assert_eq!(fs::read(place).unwrap(), b"hi\n");
}

/// A home that can't be written is said to be one, whatever fails first for it.
#[test]
fn a_home_that_can_not_be_written_is_named_with_what_to_do() {
    let (file, there) = (tempfile::NamedTempFile::new().unwrap(), tempfile::tempdir().unwrap());
    let commands: [&[&str]; 5] = [
        &["run", "--accel", "tcg", "--", "true"],
        &["ps"],
        &["key"],
        &["image", "build", "any", "--from", "busybox"],
        &["image", "show", "any"],
    ];
    for words in commands {
        let output = hotcell().env("HOTCELL_HOME", file.path()).args(words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{words:?}: {said}");
        assert!(said.contains("set HOTCELL_HOME to a folder that you may write"), "{words:?}: {said}");
    }
    // Whoever asked wrongly gets no folders made for it.
    let wrong = hotcell().env("HOTCELL_HOME", there.path()).args(["verify", "nosuch"]).output().unwrap();
    assert_eq!((wrong.status.code(), fs::read_dir(there.path()).unwrap().count()), (Some(2), 0));
    // The control: a failure with another cause.
    let output = hotcell().env("HOTCELL_HOME", there.path()).args(["image", "show", "any"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("HOTCELL_HOME"), "{output:?}");
}

/// Whoever reads one line and goes is no failure, and no panic.
#[test]
fn a_reader_who_has_enough_ends_a_command_quietly() {
    let outcome = Job::new(["true"]).run();
    let bundle = outcome.bundle();
    let bundle = bundle.to_str().unwrap();
    for words in [
        &["report", bundle][..],
        &["verify", bundle],
        &["ps", "--all"],
        &["doctor"],
        &["--help"],
        &["run", "--help"],
    ] {
        let mut child = hotcell().args(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(0), "{words:?}: {ended:?}");
        assert!(ended.stderr.is_empty(), "{words:?}: {ended:?}");
    }
    // The control: a disk that takes nothing is one.
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let ended = hotcell().args(["report", bundle]).stdout(full).output().unwrap();
    assert_eq!(ended.status.code(), Some(125), "{ended:?}");
}

#[test]
fn a_record_is_found_by_its_runs_name_and_a_folder_of_records_is_no_record() {
    let runs = home().join("state/runs");
    let outcome = Job::new(["true"]).out_at(&runs).run();
    let id = outcome.run_id.as_str();
    let (_, listed, _) = asked(&["ps", "--all"]);
    let (_, living, _) = asked(&["ps"]);
    assert!(!living.contains(" over "), "{living}");
    let row =
        listed.lines().find(|line| line.starts_with(&format!("{id} "))).unwrap_or_else(|| panic!("{listed}"));
    assert!(row.contains("over") && row.contains("ALLOWED, says its report"), "{row}");
    let (code, text, err) = asked(&["verify", id]);
    assert_eq!(code, 0, "{err}");
    assert!(text.contains("INTACT") && text.contains(runs.join(id).to_str().unwrap()), "{text}");
    assert_eq!(asked(&["report", id]).0, 0);
    let (code, _, err) = asked(&["verify", runs.to_str().unwrap()]);
    assert!(code == 2 && err.contains("is a folder of"), "{code} {err}");
    let (code, _, err) = asked(&["report", "no-such-run-at-all"]);
    assert!(code == 2 && err.contains("ps --all"), "{code} {err}");
    // A record that lost its ledger stays one.
    fs::remove_file(runs.join(id).join("ledger.ames")).unwrap();
    let (code, text, _) = asked(&["verify", id]);
    assert!(code == 1 && text.contains("LEDGER_DELETED"), "{code} {text}");
    fs::remove_dir_all(runs.join(id)).unwrap();
}
