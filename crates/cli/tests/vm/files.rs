//! Files into a real machine and out of it again; and what else a command is given: environment, directory, user.

use crate::harness::{Job, PATIENCE, Slot, home, hotcell, warm_up};
use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

fn put(source: &Path, target: &str) -> std::ffi::OsString {
    let mut value = source.as_os_str().to_owned();
    value.push(format!(":{target}"));
    value
}

#[test]
fn all_of_the_workspace_comes_out_and_nothing_else_is_in_it() {
    let outcome = Job::sh("ls -A /workspace; mkdir d; echo x >d/f").flag("--get", "/workspace").run();
    outcome.assert_allowed(0);
    assert_eq!(outcome.text(), "", "{outcome:?}");
    assert_eq!(fs::read(outcome.bundle().join("files/workspace/d/f")).unwrap(), b"x\n");
}

#[test]
fn a_tree_goes_in_and_comes_out_byte_for_byte_with_modes_times_and_links() {
    let host = tempfile::tempdir().unwrap();
    let tree = host.path().join("tree");
    fs::create_dir_all(tree.join("sub/deep")).unwrap();
    let mut noise = vec![0; 20_000_001];
    fs::File::open("/dev/urandom").unwrap().read_exact(&mut noise).unwrap();
    fs::write(tree.join("noise"), &noise).unwrap();
    fs::write(tree.join("empty"), b"").unwrap();
    // Holes around a few bytes, to a length that is no multiple of anything.
    let holes = fs::File::create(tree.join("holes")).unwrap();
    holes.write_all_at(b"between holes", 20_000_003).unwrap();
    holes.set_len(41_000_001).unwrap();
    fs::write(tree.join("sub/deep/odd \n\"name'"), b"x").unwrap();
    fs::hard_link(tree.join("noise"), tree.join("sub/same")).unwrap();
    symlink("deep", tree.join("sub/link")).unwrap();
    fs::write(tree.join("sub/deep/script"), b"#!/bin/sh\n").unwrap();
    fs::set_permissions(tree.join("sub/deep/script"), PermissionsExt::from_mode(0o751)).unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::new(981_173_106, 123_456_789);
    fs::File::open(tree.join("sub/deep/script")).unwrap().set_modified(then).unwrap();
    let big = "=\n'\"".repeat(16 * 1024);
    let script = "cd /workspace/in/t; ls -ld sub/link; stat -c '%a %h %s' noise sub/deep/script; sha256sum <noise\n\
        mkfifo sub/fifo; ln -s /etc/passwd sub/out; echo new >sub/deep/new\n\
        echo \"id=$(id -u):$(id -g) cwd=$OLDPWD big=${#BIG} odd=$ODD args=$#\"; printf '<%s>' \"$@\"";
    let outcome = Job::new(["/bin/sh", "-c", script, "sh", "", "a b", ""])
        .flag("--put", put(&tree, "/workspace/in/t"))
        .flag("--put", put(&tree.join("empty"), "/tmp/one"))
        .flag("--get", "/workspace/in/t")
        .flag("--env", format!("BIG={big}"))
        .flag("--env", "ODD=a=b \"c'\nd")
        .flags(["--cwd", "/tmp", "--user", "1000:1000"])
        .run();
    outcome.assert_allowed(0);
    let text = outcome.text();
    assert!(text.contains("751 1 10\n") && text.contains("644 2 20000001\n"), "{text}");
    assert!(text.contains("id=1000:1000 cwd=/tmp big=65536 odd=a=b \"c'\nd args=3"), "{text}");
    assert!(text.ends_with("<><a b><>\n"), "{text}");
    let out = outcome.bundle().join("files/workspace/in/t");
    assert!(fs::read(out.join("noise")).unwrap() == noise, "what came out is not what went in");
    assert_eq!(
        fs::metadata(out.join("sub/same")).unwrap().ino(),
        fs::metadata(out.join("noise")).unwrap().ino()
    );
    let script = fs::metadata(out.join("sub/deep/script")).unwrap();
    assert_eq!((script.permissions().mode() & 0o7777, script.modified().unwrap()), (0o751, then));
    assert_eq!(fs::read(out.join("sub/deep/odd \n\"name'")).unwrap(), b"x");
    assert_eq!(fs::read(out.join("sub/deep/new")).unwrap(), b"new\n");
    assert_eq!(fs::read(out.join("empty")).unwrap(), b"");
    assert!(fs::read(out.join("holes")).unwrap() == fs::read(tree.join("holes")).unwrap(), "holes");
    for name in ["sub/link", "sub/out", "sub/fifo"] {
        assert!(out.join(name).symlink_metadata().is_err(), "{name} is in the record");
        assert!(outcome.err().contains(name), "{name} was not said: {}", outcome.err());
    }
    let record = outcome.record();
    let of = |direction: &str| record.facts("copied").filter(|fact| fact["direction"] == direction).count();
    assert_eq!((of("in"), of("out")), (10 + 1, 10));
    assert!(record.facts("copy_ended").all(|fact| fact["error"].is_null()));
    // The control for what the verifier says of it: one bit of what came out.
    let mut changed = noise;
    changed[10] ^= 1;
    fs::write(out.join("noise"), changed).unwrap();
    assert_eq!(outcome.verify(), 1);
}

#[test]
fn what_can_not_be_copied_fails_the_run_before_or_after_and_is_said() {
    let missing = Job::new(["true"]).flag("--get", "/workspace/none").start().wait();
    assert_eq!((missing.code, missing.verdict()), (Some(125), "FAILED"), "{missing:?}");
    assert!(missing.err().contains("/none") || missing.err().contains("workspace/none"), "{missing:?}");
    missing.assert_gone();
    assert_eq!(missing.verify(), 0, "the record of a failure is a record");
    // A disk that is full is the guest's: the command is not started on half of its files.
    let host = tempfile::tempdir().unwrap();
    fs::write(host.path().join("big"), vec![1; 40 << 20]).unwrap();
    let full = Job::sh("echo started")
        .policy("[limits]\ndisk_mib = 24\n")
        .flag("--put", put(&host.path().join("big"), "/workspace/big"))
        .start()
        .wait();
    assert_eq!((full.code, full.verdict()), (Some(125), "FAILED"), "{full:?}");
    assert!(full.err().contains("No space left") && !full.text().contains("started"), "{full:?}");
    full.assert_gone();
    // And nothing at all is made for a source that can't be copied.
    let fifo = host.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let refused = Job::new(["true"]).flag("--put", put(host.path(), "/workspace/x")).start().wait();
    assert_eq!(refused.code, Some(125));
    assert!(refused.err().contains("fifo") && !refused.bundle().exists(), "{refused:?}");
}

#[test]
fn a_caller_who_closes_stdout_ends_an_endless_writer_as_a_pipe_would() {
    warm_up();
    let _slot = Slot::take();
    let out = tempfile::tempdir().unwrap();
    let mut child = hotcell()
        .args(["run", "--accel", "tcg", "--name", &format!("test-{}-yes", std::process::id()), "--out"])
        .arg(out.path())
        .args(["--", "yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut first = [0; 4];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"y\ny\n");
    let end = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > end => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("yes went on without a reader");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    // SIGPIPE, as `yes | head` in a shell. The policy's time is 300 s: only its end ends it so soon.
    assert_eq!(status.code(), Some(141));
    assert!(home().join("state").is_dir());
}
