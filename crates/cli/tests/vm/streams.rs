//! Streams and folders of the caller's: one that takes nothing changes no verdict, and what a first command makes is private.

use crate::harness::{Job, PATIENCE, Slot, home, hotcell, wait_until, warm_up};
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// A pipe that nobody reads.
fn unread() -> Stdio {
    let (_, writer) = std::io::pipe().unwrap();
    writer.into()
}

/// A disk that takes nothing.
fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

fn ends(mut command: Command) -> ExitStatus {
    let mut child = command.spawn().unwrap();
    wait_until("the command's end", PATIENCE, || child.try_wait().unwrap().is_some());
    child.wait().unwrap()
}

#[test]
fn streams_that_take_nothing_change_no_exit_code() {
    warm_up();
    let _slot = Slot::take();
    let out = tempfile::tempdir().unwrap();
    let run = |name: &str, stdout: Stdio, stderr: Stdio| {
        let mut command = hotcell();
        command.args(["run", "--json", "--accel", "tcg", "--name", name, "--out"]).arg(out.path());
        command.args(["--", "sh", "-c", "echo out; echo err >&2; exit 7"]).stdout(stdout).stderr(stderr);
        assert_eq!(ends(command).code(), Some(7), "{name}");
        let report: serde_json::Value =
            serde_json::from_slice(&fs::read(out.path().join(name).join("report.json")).unwrap()).unwrap();
        assert_eq!(report["verdict"], "ALLOWED", "{name}");
    };
    run("test-streams-control", Stdio::null(), Stdio::null());
    run("test-streams-full-err", Stdio::null(), full());
    run("test-streams-unread-err", Stdio::null(), unread());
    run("test-streams-full-both", full(), full());
    run("test-streams-unread-both", unread(), unread());
    let asked = |words: &[&str], stdout: Stdio, stderr: Stdio| {
        let mut command = hotcell();
        command.args(words).stdout(stdout).stderr(stderr);
        ends(command).code()
    };
    let lists: [&[&str]; 7] = [
        &["ps"],
        &["ps", "--json"],
        &["reap"],
        &["image", "ls"],
        &["image", "show", "busybox"],
        &["key"],
        &["template", "ls", "--json"],
    ];
    for words in lists {
        assert_eq!(asked(words, Stdio::null(), Stdio::null()), Some(0), "{words:?}");
        assert_eq!(
            asked(words, unread(), Stdio::null()),
            Some(0),
            "{words:?}: whoever read enough is answered"
        );
        assert_eq!(asked(words, full(), full()), Some(125), "{words:?}: what is asked for was not given");
    }
    assert_eq!(asked(&["run", "--image", "nosuch", "--", "true"], full(), full()), Some(125));
    assert_eq!(asked(&["verify", "/nonexistent"], full(), full()), Some(2));
}

/// What the command says of the guest's words is one of Hotcell's lines, whatever they hold.
#[test]
fn words_of_the_guest_are_escaped_where_hotcell_repeats_them() {
    let outcome = Job::new(["no\u{1b}[2J\r\u{202e}such\nhotcell: ALLOWED, machine gone, record: x"]).run();
    let said = outcome.err();
    assert!(!said.chars().any(|c| c != '\n' && c.is_control()) && !said.contains('\u{202e}'), "{said:?}");
    let ours = said.lines().filter(|line| line.starts_with("hotcell: ALLOWED")).count();
    assert_eq!(ours, 1, "{said:?}");
    assert!(said.contains("\\u{1b}[2J\\r"), "{said:?}");
}

/// A limit on the size of files is a disk that takes no more: the run ends with its reason, and nothing is left.
#[test]
fn a_limit_on_the_size_of_files_ends_the_run_and_not_hotcell() {
    warm_up();
    let _slot = Slot::take();
    for (blocks, code) in [("unlimited", 0), ("8", 125)] {
        let out = tempfile::tempdir().unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &format!("ulimit -f {blocks}; exec \"$0\" \"$@\"")]);
        let inner = hotcell();
        command.arg(inner.get_program()).args([
            "run",
            "--accel",
            "tcg",
            "--name",
            "test-limited-files",
            "--out",
        ]);
        command.arg(out.path()).args(["--", "true"]).env("HOTCELL_HOME", home());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let status = ends(command);
        assert_eq!((status.code(), status.signal()), (Some(code), None), "{blocks}");
        assert!(!home().join("state/live/test-limited-files").exists(), "{blocks}");
    }
}

#[test]
fn what_a_first_command_makes_is_private() {
    let commands: [&[&str]; 6] = [
        &["key"],
        &["ps"],
        &["doctor"],
        &["template", "ls"],
        &["image", "ls"],
        &["image", "build", "b", "--from", "busybox"],
    ];
    for words in commands {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("home");
        let mut command = hotcell();
        command.args(words).env("HOTCELL_HOME", &at).stdout(Stdio::null()).stderr(Stdio::null());
        ends(command);
        private_folders(&at, words);
    }
}

fn private_folders(at: &Path, words: &[&str]) {
    let Ok(entries) = fs::read_dir(at) else { return };
    let mode = at.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "{words:?} made {} with {mode:o}", at.display());
    for entry in entries {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            private_folders(&entry.path(), words);
        }
    }
}

/// A key that another user owns can be read by that user: no record is signed with it.
#[test]
fn a_key_of_another_user_signs_nothing() {
    warm_up();
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("state")).unwrap();
    symlink(home().join("cache"), dir.path().join("cache")).unwrap();
    symlink(home().join("state/images"), dir.path().join("state/images")).unwrap();
    let key = dir.path().join("state/key");
    fs::copy(home().join("state/key"), &key).unwrap();
    let own = key.metadata().unwrap().uid();
    for (owner, code) in [(own, 0), (65_534, 125)] {
        if std::os::unix::fs::chown(&key, Some(owner), None).is_err() {
            println!("NOT RUN: only root gives files away");
            return;
        }
        let output = hotcell().arg("key").env("HOTCELL_HOME", dir.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert_eq!(output.stdout.is_empty(), code != 0, "{output:?}");
    }
}
