//! What a machine makes of an image: its root services, its configuration, its user.

use crate::attacks::with_probe;
use crate::harness::{Job, Outcome, home, hotcell, warm_up};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

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
        // Most are not run, and those that are make it then.
        let words = ["image", "build", &name, "--from", source, "--no-template"];
        let output = hotcell().args(words).args(flags).output().unwrap();
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

/// The kernel's settings are files of user 0: a program that the kernel starts by a path in them has every capability. So is
/// the request socket: another in its place would answer in the host's name.
#[test]
fn a_root_service_changes_no_setting_of_the_kernel_and_no_request_socket() {
    let script = ask(&["settings"]) + "hotcell-request file-write /workspace/x";
    let outcome = served("settings").run(Job::sh(&script));
    outcome.assert_allowed(0);
    assert_eq!(outcome.text(), "settings: read-only\ndone\nallow: write_tree\n", "{outcome:?}");
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

fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("NOT RUN: {program} is not installed");
    }
    found
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn an_image_runs_its_own_command_as_its_own_user_who_owns_the_workspace() {
    if !has("umoci") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let tag = format!("{}:one", path("oci"));
    let umoci = |args: &[&str]| run(Command::new("umoci").args(args));
    umoci(&["init", "--layout", &path("oci")]);
    umoci(&["new", "--image", &tag]);
    umoci(&["unpack", "--rootless", "--image", &tag, &path("bundle")]);
    folder(&dir.path().join("bundle/rootfs"), &[]);
    umoci(&["repack", "--image", &tag, &path("bundle")]);
    let own = "id -u; id -g; touch mine && stat -c %u:%g . mine; pwd";
    umoci(&[
        "config",
        "--image",
        &tag,
        "--config.user",
        "77:78",
        "--config.entrypoint",
        "/bin/sh",
        "--config.cmd",
        "-c",
        "--config.cmd",
        own,
        "--config.workingdir",
        "/workspace",
    ]);
    let image = Built::from("own-command", &format!("oci:{tag}"), &[]);
    let outcome = image.run(Job::new([]));
    outcome.assert_allowed(0);
    assert_eq!(outcome.text(), "77\n78\n77:78\n77:78\n/workspace\n");
    let outcome = image.run(Job::new(["-c", "echo named instead"]));
    outcome.assert_allowed(0);
    assert_eq!(outcome.text(), "named instead\n");
    // An image that has none says so, and nothing is started.
    let nothing = hotcell().args(["run", "--accel", "tcg"]).output().unwrap();
    let text = String::from_utf8_lossy(&nothing.stderr).into_owned();
    assert_eq!(nothing.status.code(), Some(2), "{text}");
    assert!(text.contains("neither an entrypoint nor a command") && text.contains("-- CMD"), "{text}");
}

#[test]
fn what_a_run_asked_for_and_its_policy_approved_is_in_the_next_image() {
    if !has("python3") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    // Enough of a Python for wheels to be installed for it; nothing runs it.
    folder(&root, &[("usr/bin/python3.11", 0o755, "#!/bin/sh\n"), ("etc/debian_version", 0o644, "12\n")]);
    symlink("python3.11", root.join("usr/bin/python3")).unwrap();
    let wheel = "import base64, hashlib, zipfile
files = {'tiny/__init__.py': 'x = 1\\n',
         'tiny-1.0.dist-info/METADATA': 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n',
         'tiny-1.0.dist-info/WHEEL': 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n'}
record = ''
for name, text in files.items():
    sum = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()
    record += f'{name},sha256={sum},{len(text)}\\n'
files['tiny-1.0.dist-info/RECORD'] = record
with zipfile.ZipFile('tiny-1.0-py3-none-any.whl', 'w') as wheel:
    for name, text in files.items(): wheel.writestr(name, text)
print(hashlib.sha256(open('tiny-1.0-py3-none-any.whl', 'rb').read()).hexdigest())";
    let sum = run(Command::new("python3").args(["-c", wheel]).current_dir(dir.path()));
    let pin = format!("tiny==1.0 sha256:{sum}");
    let image = Built::from("rebuilt", &format!("dir:{}", root.display()), &[]);
    let policy =
        format!("[capabilities]\nspawn = true\nwrite_trees = [\"/workspace\"]\npackages = [{pin:?}]\n");
    let ask =
        format!("hotcell-request package-install '{pin}'; hotcell-request package-install 'other==1.0'");
    let look = "ls /usr/local/lib/python3.11/dist-packages/tiny/__init__.py";
    let asked = image.run(Job::sh(&format!("{ask}; {look} || echo not in it")).policy(&policy));
    asked.assert_allowed(0);
    assert!(asked.text().ends_with("not in it\n"), "{asked:?}");
    let rebuild = |flags: &[&str]| {
        let mut command = hotcell();
        command.args(["image", "rebuild", &image.0, "--from-run"]).arg(asked.bundle()).args(flags);
        command.env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", dir.path());
        command.output().unwrap()
    };
    // Nobody said yes.
    let output = rebuild(&[]);
    assert!(
        !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("--yes"),
        "{output:?}"
    );
    let output = rebuild(&["--yes"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains(&pin) && !text.contains("other"), "{output:?}");
    let after = image.run(Job::sh(look));
    after.assert_allowed(0);
    // The record speaks of the image that was; the one that is now has what it asked for.
    let output = rebuild(&["--yes"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("another image"), "{output:?}");
}

#[test]
fn the_machine_has_randomness_and_the_right_time_from_its_first_command_on() {
    let begun = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let policy = "exec.workspace = \"allow\"\n[capabilities]\nspawn = true\nwrite_trees = [\"/workspace\"]\n";
    // getrandom that does not wait: it fails where the generator has not been seeded.
    let outcome = with_probe("./probe random; date +%s").policy(policy).run();
    outcome.assert_allowed(0);
    let ended = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let text = outcome.text();
    let (random, date) = text.trim().split_once('\n').unwrap();
    assert_eq!(random, "random-without-waiting: reached", "{outcome:?}");
    let date: u64 = date.parse().unwrap();
    assert!((begun..=ended).contains(&date), "{begun} {date} {ended}");
}
