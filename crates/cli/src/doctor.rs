//! `hotcell doctor`: what this host can do, each point proven by trying it, and
//! how to mend what it can't. A run is possible if every point that one needs holds.

use crate::exit::Fatal;
use crate::home::{Home, OWN_HOME, find_program, find_qemu};
use crate::say;
use hotcell_ledger::SigningKey;
use hotcell_vm::{AccelChoice, HostJail, Part, Registry, Workspace};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// A program that is asked a question answers in milliseconds.
const ANSWER_DEADLINE: Duration = Duration::from_secs(20);
/// An image, a kernel and some runs.
const MIN_FREE_BYTES: u64 = 1 << 30;
/// Size of the workspace disk that is formatted for a try.
const TRIAL_DISK_MIB: u32 = 64;

/// One point.
struct Point {
    name: String,
    ok: bool,
    /// Without it there is no run.
    needed: bool,
    detail: String,
    mend: String,
}

pub(crate) fn doctor(json: bool) -> Result<ExitCode, Fatal> {
    let home = Home::named().map_err(Fatal::failed)?;
    let points = examine(&home);
    let possible = points.iter().all(|point| point.ok || !point.needed);
    if json {
        let list: Vec<_> = points
            .iter()
            .map(|point| {
                let mend = (!point.ok).then_some(&point.mend);
                serde_json::json!({
                    "name": point.name, "ok": point.ok, "needed": point.needed, "detail": point.detail, "mend": mend,
                })
            })
            .collect();
        say::json(&serde_json::json!({ "run_possible": possible, "points": list }))?;
    } else {
        for point in &points {
            let mark = match (point.ok, point.needed) {
                (true, _) => "ok",
                (false, true) => "MISSING",
                (false, false) => "without",
            };
            say::line(format_args!("{mark:8}{:26}{}", point.name, point.detail))?;
            if !point.ok {
                say::line(format_args!("{:34}to mend: {}", "", point.mend))?;
            }
        }
        say::line(if possible { "a run is possible here" } else { "no run is possible here" })?;
    }
    Ok(if possible { ExitCode::SUCCESS } else { ExitCode::from(crate::exit::FAILED) })
}

fn examine(home: &Home) -> Vec<Point> {
    let mut points = Vec::new();
    let mut point = |name: &str, needed, tried: Result<String, String>, mend: &str| {
        let ok = tried.is_ok();
        let detail = tried.unwrap_or_else(|why| why);
        points.push(Point { name: name.to_owned(), ok, needed, detail, mend: mend.to_owned() });
    };
    let qemu = find_qemu();
    let version = qemu.clone().and_then(|qemu| version_of(&qemu));
    let mend = match &qemu {
        Ok(there) => {
            format!("it is there and does not run: look at {}, or install it again", there.display())
        }
        Err(_) => "apt-get install qemu-system-x86, or name one with HOTCELL_QEMU".to_owned(),
    };
    point("QEMU", true, version, &mend);
    if let Ok(qemu) = &qemu {
        point("TCG", true, makes_a_machine(qemu), "install a QEMU that was built with TCG");
    }
    let kvm = AccelChoice::Kvm.resolve().map(|kvm| kvm.why).map_err(|error| error.why().to_owned());
    let device = File::options().read(true).write(true).open("/dev/kvm");
    let mend = match device.map_err(|error| error.kind()) {
        Err(ErrorKind::PermissionDenied) => {
            "join the group kvm (usermod -aG kvm …) and log in anew; without it TCG is used"
        }
        Err(_) => "a host with hardware virtualisation that it passes on; without it TCG is used",
        Ok(_) => "the device is there and does not serve (see why); without it TCG is used",
    };
    point("KVM", false, kvm, mend);
    if let Ok(qemu) = &qemu {
        let jail = HostJail::try_out(qemu);
        for part in Part::ALL {
            let missing = jail.missing().iter().find(|missing| missing.part == part);
            let tried = missing.map_or(Ok("tried".to_owned()), |missing| Err(missing.why.clone()));
            point(&format!("jail: {part}"), false, tried, how_to_mend(part));
        }
    }
    let busybox = hotcell_image::busybox_tree();
    let busybox = busybox.map(|_| "makes the image `busybox`".to_owned()).map_err(|error| error.to_string());
    point("busybox", false, busybox, "apt-get install busybox-static");
    point(
        "guest kernel",
        true,
        kernel(home),
        "apt-get update, on Debian or Ubuntu, with its package sources",
    );
    let folders =
        home.is_ours_alone().and_then(|()| home.writable()).map(|()| home.cache().display().to_string());
    let writable = folders.is_ok();
    point("folders", true, folders, OWN_HOME);
    if !writable {
        // What lies in them can't be tried, and would fail for this one cause.
        return points;
    }
    let disk = Workspace::blank(home.cache(), TRIAL_DISK_MIB);
    let disk = disk.map(|_| "formats a workspace disk".to_owned()).map_err(|error| error.to_string());
    let mend = match find_program("mke2fs") {
        Some(_) => "it is there and fails: free space, or install e2fsprogs again",
        None => "apt-get install e2fsprogs",
    };
    point("mke2fs", true, disk, mend);
    point(
        "disk space",
        true,
        free_space(home.cache()),
        "free a GiB, or set HOTCELL_HOME to another file system",
    );
    let registry = Registry::open(&home.registry());
    let registry = registry.map(|it| it.path().display().to_string()).map_err(|error| error.to_string());
    point("registry of runs", true, registry, OWN_HOME);
    let key = SigningKey::load_or_create(&home.key());
    let key = key.map(|_| "signs records".to_owned()).map_err(|error| error.to_string());
    point(
        "signing key",
        true,
        key,
        "do as it says: a key that was damaged or seen must be moved away by hand",
    );
    points
}

fn how_to_mend(part: Part) -> &'static str {
    match part {
        Part::MemoryLimit | Part::CpuLimit | Part::PidsLimit => {
            "start Hotcell as root, or in a delegated cgroup: systemd-run --user --scope -p Delegate=yes hotcell …"
        }
        Part::NoNewPrivileges | Part::NoCapabilities | Part::Seccomp => "a Linux kernel of 5.12 or newer",
        _ => {
            "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, \
             kernel.apparmor_restrict_unprivileged_userns=0), or start Hotcell as root"
        }
    }
}

fn version_of(program: &Path) -> Result<String, String> {
    let said = answer(Command::new(program).arg("--version"), b"")?;
    let line = said.lines().next().unwrap_or_default().to_owned();
    Ok(format!("{line} ({})", program.display()))
}

fn makes_a_machine(qemu: &Path) -> Result<String, String> {
    let words = "-nodefaults -no-user-config -display none -S -M microvm -accel tcg -m 16 -monitor stdio";
    answer(Command::new(qemu).args(words.split(' ')), b"quit\n").map(|_| "makes a microvm".into())
}

fn kernel(home: &Home) -> Result<String, String> {
    if home.cache().join("kernels/cloud/vmlinuz").is_file() {
        return Ok("in the cache".into());
    }
    for package in ["linux-image-cloud-amd64", "linux-image-virtual"] {
        if answer(Command::new("apt-cache").args(["show", package]), b"").is_ok() {
            return Ok(format!("apt knows {package}; downloaded at the first run"));
        }
    }
    Err("apt knows no kernel for virtual machines".into())
}

fn free_space(dir: &Path) -> Result<String, String> {
    let stat = rustix::fs::statvfs(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let text = format!("{} GiB free at {}", free >> 30, dir.display());
    if free >= MIN_FREE_BYTES { Ok(text) } else { Err(text) }
}

/// What a program prints; an error where it fails or does not end.
fn answer(command: &mut Command, input: &[u8]) -> Result<String, String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    if let Some(mut stdin) = child.stdin.take() {
        let _ = stdin.write_all(input);
    }
    let deadline = Instant::now() + ANSWER_DEADLINE;
    // Its answers are far shorter than a pipe is long, so it never waits for a reader.
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("no answer within {} s", ANSWER_DEADLINE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(if said.is_empty() { output.status.to_string() } else { said })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One cause is said once, with its own cure, and nobody is told to install what is there.
    #[test]
    fn folders_that_can_not_be_written_are_said_to_be_that() {
        let there = tempfile::tempdir().unwrap();
        let file = there.path().join("file");
        std::fs::write(&file, "").unwrap();
        // Root may write in any folder, but not in these.
        for home in [file.as_path(), Path::new("/proc/self")] {
            let points = examine(&Home::below(home));
            let wrong: Vec<&Point> = points.iter().filter(|point| !point.ok && point.needed).collect();
            let told: Vec<&str> = wrong.iter().map(|point| point.name.as_str()).collect();
            assert_eq!(told, ["folders"], "{}", home.display());
            assert!(
                wrong[0].mend.contains("HOTCELL_HOME") && wrong[0].detail.contains(home.to_str().unwrap())
            );
        }
        let points = examine(&Home::below(&there.path().join("home")));
        assert!(points.iter().any(|point| point.name == "folders" && point.ok));
        assert!(points.iter().any(|point| point.name == "signing key" && point.ok));
    }
}
