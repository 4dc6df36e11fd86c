//! What a machine makes of an image: its root services, its configuration, its user.

use crate::harness::{Job, Outcome, home, hotcell, warm_up};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Output;
use std::sync::OnceLock;

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

/// An image with the service of `attacks/service.c`.
fn served(name: &str) -> Built {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path(), &[("etc/secret", 0o600, "only root reads this\n")]);
    let program = dir.path().join("usr/sbin/served");
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    fs::write(&program, service()).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let source = format!("dir:{}", dir.path().display());
    Built::from(name, &source, &["--service", "served=/usr/sbin/served --loud"])
}

fn service() -> &'static [u8] {
    static SERVICE: OnceLock<Vec<u8>> = OnceLock::new();
    SERVICE.get_or_init(|| crate::attacks::built("service.c"))
}

/// Waits for the service, tells it lines, and waits until it has answered each.
fn ask(lines: &[&str]) -> String {
    let told: String = lines.iter().map(|line| format!("echo '{line}' >/run/service\n")).collect();
    format!(
        "for at in $(/bin/busybox seq 200); do [ -p /run/service ] && break; sleep 0.1; done
{told}for at in $(/bin/busybox seq 200); do [ \"$(grep -c done /run/answers 2>/dev/null)\" = {} ] && break; sleep 0.1; done
cat /run/answers
",
        lines.len()
    )
}

#[test]
fn a_root_service_is_started_as_declared_and_is_root_without_capabilities() {
    let image = served("service");
    let script = format!(
        "cat /etc/secret 2>/dev/null || echo the workload reads no secret
touch /run/mine 2>/dev/null || echo the workload writes nothing to run
{}kill -9 $(/bin/busybox pidof served) 2>/dev/null || echo the service stands",
        ask(&["hello agent", "read /etc/secret", "harm"])
    );
    let outcome = image.run(Job::sh(&script));
    outcome.assert_allowed(0);
    let text = outcome.text();
    for line in [
        "the workload reads no secret",
        "the workload writes nothing to run",
        "good day, agent, says user 0",
        "only root reads this",
        "no look into the reaper",
        "the service stands",
    ] {
        assert!(text.lines().any(|came| came == line), "{line:?} did not come: {outcome:?}");
    }
    assert!(!text.contains("SERVICE MOUNTED"), "{outcome:?}");
    let record = outcome.record();
    let fact = record.fact("service");
    assert_eq!((&fact["name"], &fact["exec"]), (&"served".into(), &1.into()), "{fact}");
    let digest = hotcell_ledger::Digest::of(service()).to_hex();
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

/// The service makes a command of what the workload says: another program of the image runs as root, which nobody declared.
#[test]
fn a_root_service_that_the_workload_takes_over_is_seen() {
    let script = format!("echo working\n{}sleep 60; echo UNSEEN", ask(&["log $(sleep 30)"]));
    let outcome = served("exploited").run(Job::sh(&script));
    outcome.assert_killed(&["unexplained_privilege"]);
    assert_eq!(outcome.text(), "working\n", "the command was running: {outcome:?}");
    let record = outcome.record();
    let violation = record.facts("violation").next().unwrap();
    assert!(violation["detail"].as_str().unwrap().contains("running from /bin/busybox"), "{violation}");
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
