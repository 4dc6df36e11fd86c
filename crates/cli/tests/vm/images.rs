//! What a machine makes of an image: its root services, its configuration, its user.

use crate::harness::{Job, Outcome, home, hotcell, warm_up};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Output;

/// A root of static busybox, with files of its own: path, mode, text.
pub(crate) fn folder(dir: &Path, files: &[(&str, u32, &str)]) {
    fs::create_dir_all(dir.join("bin")).unwrap();
    fs::copy("/bin/busybox", dir.join("bin/busybox"))
        .expect("busybox-static is installed: `./x test` does it");
    for name in
        ["sh", "cat", "echo", "id", "grep", "mkfifo", "sleep", "true", "kill", "ls", "mount", "stat", "touch"]
    {
        symlink("busybox", dir.join("bin").join(name)).unwrap();
    }
    for (path, mode, text) in files {
        let path = dir.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
    }
}

/// Builds an image; it is removed with this.
pub(crate) struct Built(pub(crate) String);

impl Built {
    fn try_from(name: &str, source: &str, flags: &[&str]) -> (Built, Output) {
        warm_up();
        let name = format!("test-{name}-{}", std::process::id());
        let output =
            hotcell().args(["image", "build", &name, "--from", source]).args(flags).output().unwrap();
        (Built(name), output)
    }

    pub(crate) fn from(name: &str, source: &str, flags: &[&str]) -> Built {
        let (built, output) = Built::try_from(name, source, flags);
        assert!(output.status.success(), "{output:?}");
        built
    }

    fn run(&self, job: Job) -> Outcome {
        job.flags(["--image", &self.0]).run()
    }
}

impl Drop for Built {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(home().join("state/images").join(&self.0));
    }
}

/// Runs what anybody tells it: the kind of service that a workload exploits to become root.
const RUNNER: &str = "#!/bin/sh
echo service is $(id -u):$(id -g) with $* in $(/bin/busybox pwd)
grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp:)' /proc/self/status
mount -t tmpfs none /mnt 2>/dev/null && echo SERVICE MOUNTED
mkfifo /run/commands && /bin/busybox chmod 666 /run/commands
while :; do sh </run/commands >/run/said 2>&1; echo done >>/run/said; done
";

#[test]
fn a_root_service_is_started_as_declared_and_is_root_without_capabilities() {
    let dir = tempfile::tempdir().unwrap();
    folder(
        dir.path(),
        &[("usr/sbin/runner", 0o755, RUNNER), ("etc/secret", 0o600, "only root reads this\n")],
    );
    let source = format!("dir:{}", dir.path().display());
    let image = Built::from("service", &source, &["--service", "runner=/usr/sbin/runner --loud"]);
    let ask = "
for at in $(/bin/busybox seq 200); do [ -p /run/commands ] && break; sleep 0.1; done
cat /etc/secret 2>/dev/null || echo the workload reads no secret
touch /run/mine 2>/dev/null || echo the workload writes nothing to run
echo 'id -u; cat /etc/secret; kill -9 1; /bin/busybox readlink /proc/1/exe || echo no look into the reaper' >/run/commands
for at in $(/bin/busybox seq 200); do grep -q done /run/said 2>/dev/null && break; sleep 0.1; done
cat /run/said; kill -9 $(/bin/busybox pidof runner) 2>/dev/null || echo the service stands";
    let outcome = image.run(Job::sh(ask));
    outcome.assert_allowed(0);
    let text = outcome.text();
    for line in [
        "the workload reads no secret",
        "the workload writes nothing to run",
        // The exploit: a command of the workload's runs as root, and is no more than root's user.
        "0",
        "only root reads this",
        "no look into the reaper",
        "the service stands",
    ] {
        assert!(text.lines().any(|came| came == line), "{line:?} did not come: {outcome:?}");
    }
    let record = outcome.record();
    let fact = record.fact("service");
    assert_eq!((&fact["name"], &fact["exec"]), (&"runner".into(), &1.into()), "{fact}");
    let digest = hotcell_ledger::Digest::of(RUNNER.as_bytes()).to_hex();
    assert_eq!(fact["binary"], digest.as_str());
    let spec: serde_json::Value =
        serde_json::from_slice(&fs::read(outcome.bundle().join("spec.json")).unwrap()).unwrap();
    assert_eq!(spec["services"][0]["binary"], digest.as_str());
    assert_eq!(spec["services"][0]["argv"][1], "--loud");
    // What it said is in the record, though nobody was shown it.
    let output = record.facts("output").find(|fact| fact["exec"] == 1 && fact["stream"] == "stdout").unwrap();
    let object = outcome.bundle().join("objects").join(output["kept"].as_str().unwrap());
    let said = fs::read_to_string(object).unwrap();
    let none = "0000000000000000";
    let wanted = format!(
        "service is 0:0 with --loud in /\nCapEff:\t{none}\nCapBnd:\t{none}\nNoNewPrivs:\t1\nSeccomp:\t2\n"
    );
    assert_eq!(said, wanted);
    let ended = record.facts("exec_ended").find(|fact| fact["exec"] == 1).unwrap();
    assert_eq!((&ended["how"], &ended["signal"]), (&"signalled".into(), &9.into()), "{ended}");
}

#[test]
fn a_service_that_is_none_or_does_not_start_is_said() {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path(), &[("usr/sbin/broken", 0o755, "#!/no/such/interpreter\n")]);
    let source = format!("dir:{}", dir.path().display());
    for (service, code, why) in [
        ("runner=/usr/sbin/runner", 2, "no executable of the image"),
        ("runner", 2, "NAME=PATH"),
        ("Runner=/bin/sh", 2, "a-z 0-9"),
        ("a=/bin/sh", 0, ""),
    ] {
        let (_built, output) = Built::try_from("refused", &source, &["--service", service]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && text.contains(why), "{service}: {output:?}");
    }
    let image = Built::from("broken", &source, &["--service", "broken=/usr/sbin/broken"]);
    let outcome = image.run(Job::sh("sleep 60"));
    assert_eq!(outcome.verdict(), "FAILED", "{outcome:?}");
    assert!(outcome.err().contains("service \"broken\" did not start"), "{outcome:?}");
}
