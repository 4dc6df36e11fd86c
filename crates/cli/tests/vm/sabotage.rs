//! A VMM that attaches the root image writable, whatever it was told: `attacks/qemu.c` in QEMU's place.

use crate::attacks::built;
use crate::harness::{PATIENCE, verify, vmms_of, wait_until};
use crate::machine::Sink;
use crate::observed::{HONEST, Module, Seen, Taken, assert_seen, assert_spared};
use hotcell_ledger::Digest;
use hotcell_runtime::{ExecIo, ExecRequest};
use hotcell_vm::{JailChoice, QemuBackend};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

/// A machine under this VMM, which gets the root image from a descriptor that can write, if it needs one to do anything, or
/// can open it for writing. What it does late it does once the file that comes with it is dropped.
fn under(vmm: &str) -> (Taken, File) {
    let mut taken = Taken::new(Module::AtHand);
    let dir = taken.out.path();
    fs::set_permissions(dir, PermissionsExt::from_mode(0o755)).unwrap();
    let program = dir.join(vmm);
    fs::write(&program, built("qemu.c")).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let copy = dir.join("root");
    fs::copy(format!("/proc/self/fd/{}", taken.boot.root.file.as_raw_fd()), &copy).unwrap();
    fs::set_permissions(&copy, PermissionsExt::from_mode(0o666)).unwrap();
    let late = vmm.starts_with("qemu-late");
    if late || ["qemu-writable", "qemu-lying"].contains(&vmm) {
        taken.boot.root.file = File::options().read(true).write(!late).open(&copy).unwrap();
    }
    taken.runtime.backend = Arc::new(QemuBackend::new(program, JailChoice::Auto).unwrap());
    let held = File::open(&copy).unwrap();
    held.lock().unwrap();
    (taken, held)
}

fn run_under(vmm: &str) -> Seen {
    under(vmm).0.run(HONEST)
}

/// One that begins when the command has said its first word.
fn run_late(vmm: &str, script: &str) -> Seen {
    let (taken, held) = under(vmm);
    taken.run_and(script, move || drop(held))
}

const LONG: &str = "echo working; sleep 60; echo UNSEEN";

#[test]
fn a_vmm_that_holds_the_root_writable_is_ended_before_it_counts_as_started() {
    let seen = run_under("qemu-writable");
    assert_ne!(seen.report.verdict.as_str(), "ALLOWED", "{seen:?}");
    assert!(seen.report.error.as_ref().is_some_and(|error| error.contains("writ")), "{seen:?}");
    assert_eq!((seen.said.as_str(), seen.code), ("", None), "nothing of the guest ran: {seen:?}");
}

#[test]
fn a_vmm_that_says_read_only_and_attaches_the_root_writable_is_killed() {
    let seen = run_under("qemu-lying");
    assert_eq!(seen.report.verdict.as_str(), "KILLED", "{seen:?}");
    assert_eq!(seen.report.kill.reasons, ["writable_root"], "{seen:?}");
    assert!(seen.report.kill.absolute, "{seen:?}");
}

#[test]
fn a_device_that_nobody_asked_for_ends_the_machine_before_it_counts_as_started() {
    let seen = run_under("qemu-device");
    assert_eq!(seen.report.verdict.as_str(), "FAILED", "{seen:?}");
    assert!(seen.report.error.as_ref().is_some_and(|error| error.contains("virtio-balloon")), "{seen:?}");
    assert_eq!((seen.said.as_str(), seen.code), ("", None), "nothing of the guest ran: {seen:?}");
    assert!(seen.console.is_empty(), "the guest never began: {seen:?}");
}

/// A kernel that can't make one of the walls: the init says so and ends the machine, and nothing is executed.
#[test]
fn an_error_in_the_walls_ends_the_machine() {
    for without in ["cgroup_disable=pids", "cgroup_disable=memory"] {
        let seen = run_under(&format!("qemu-append-{without}"));
        assert_eq!(seen.report.verdict.as_str(), "FAILED", "{seen:?}");
        assert_eq!((seen.said.as_str(), seen.code), ("", None), "{without}: something ran: {seen:?}");
        let error = seen.report.error.as_deref().unwrap_or_default();
        assert!(error.contains("last words") && error.contains("failed to enable controllers"), "{error}");
    }
    // The control: with a word that takes no wall away, the same machine runs.
    assert_spared(&run_under("qemu-append-hotcell_test_nothing"));
}

#[test]
fn a_root_that_the_vmm_opens_for_writing_while_the_command_runs_is_seen() {
    assert_seen(&run_late("qemu-late-reopen", LONG), "writable_root");
}

#[test]
fn what_the_vmm_writes_elsewhere_than_to_the_workspace_is_counted_while_the_command_runs() {
    assert_seen(&run_late("qemu-late-writes", LONG), "root_changed");
}

#[test]
fn the_same_program_that_changes_nothing_is_let_be() {
    assert_spared(&run_under("qemu-honest"));
    assert_spared(&run_late("qemu-late-reads", HONEST));
}

#[test]
fn what_was_hashed_boots_whatever_its_name_leads_to_meanwhile() {
    let taken = Taken::new(Module::AtHand);
    let other = taken.out.path().join("other");
    fs::write(&other, "no initramfs").unwrap();
    fs::rename(&other, taken.out.path().join("initramfs")).unwrap();
    // The control: by its name another file would boot now, and that is refused.
    let named = Digest::of(&fs::read(taken.out.path().join("initramfs")).unwrap());
    assert_ne!(named, taken.boot.initramfs.digest);
    let seen = taken.run(HONEST);
    assert_spared(&seen);
    assert_eq!(seen.said, "working\n");
}

/// What a VMM starts can't outlive it: the VMM is the first process of a pid namespace, and the kernel ends the others with it.
#[test]
fn what_a_vmm_has_started_ends_with_it() {
    let (taken, held) = under("qemu-late-reads");
    let run_id = taken.draft.run_id.clone();
    let (tell, told) = std::sync::mpsc::channel();
    // Its child waits for the file for as long as that is held, and carries the run's mark as it does.
    let seen = taken.run_and(HONEST, move || tell.send(vmms_of(&run_id)).unwrap());
    assert_eq!(told.recv().unwrap().len(), 2, "the VMM and its child: {seen:?}");
    // That nothing with the mark is left was asserted.
    assert_spared(&seen);
    drop(held);
}

/// So a process of the host stands for one that got out of it.
#[test]
fn a_process_that_outlives_a_real_machine_is_a_kill_and_one_of_another_run_is_none() {
    for (suffix, verdict, reasons) in
        [("", "KILLED", &["process_outlived_run"] as &[&str]), ("x", "ALLOWED", &[])]
    {
        let taken = Taken::new(Module::AtHand);
        let mark = format!("hotcell-{}{suffix}", taken.draft.run_id);
        let registry = taken.runtime.registry.path().to_owned();
        let run = taken.runtime.start(taken.draft.seal().unwrap(), taken.boot);
        let said = Sink::default();
        let io = ExecIo { stdout: Some(Box::new(said.clone())), ..ExecIo::default() };
        let exec = run.exec(ExecRequest::new(["/bin/sh", "-c", "echo working; sleep 1"]), io);
        wait_until("the command", PATIENCE, || said.text() == "working\n");
        let mut left = Command::new("sh")
            .args(["-c", "read forever", "-name", &mark])
            .env("HOTCELL_REGISTRY", registry)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let ended = exec.wait();
        let report = run.finish();
        left.kill().unwrap();
        left.wait().unwrap();
        assert_eq!(ended.unwrap().code, 0, "{report:?}");
        assert_eq!(
            (report.verdict.as_str(), &report.kill.reasons[..]),
            (verdict, &reasons.iter().map(ToString::to_string).collect::<Vec<_>>()[..])
        );
        assert_eq!(verify(report.bundle.as_ref().unwrap()), 0);
    }
}
