//! A VMM that attaches the root image writable, whatever it was told: `attacks/qemu.c` in QEMU's place.

use crate::attacks::built;
use crate::observed::{HONEST, Module, Seen, Taken, assert_spared};
use hotcell_ledger::Digest;
use hotcell_vm::{JailChoice, QemuBackend};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

/// A run under this VMM, which gets the root image from a descriptor that can write: without one it could do nothing.
fn under(vmm: &str) -> Seen {
    let mut taken = Taken::new(Module::AtHand);
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let program = dir.path().join(vmm);
    fs::write(&program, built("qemu.c")).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let copy = dir.path().join("root");
    fs::copy(format!("/proc/self/fd/{}", taken.boot.root.file.as_raw_fd()), &copy).unwrap();
    fs::set_permissions(&copy, PermissionsExt::from_mode(0o666)).unwrap();
    if ["qemu-writable", "qemu-lying"].contains(&vmm) {
        taken.boot.root.file = File::options().read(true).write(true).open(&copy).unwrap();
    }
    taken.runtime.backend = Arc::new(QemuBackend::new(program, JailChoice::Auto).unwrap());
    taken.run(HONEST)
}

#[test]
fn a_vmm_that_holds_the_root_writable_is_ended_before_it_counts_as_started() {
    let seen = under("qemu-writable");
    assert_ne!(seen.report.verdict.as_str(), "ALLOWED", "{seen:?}");
    assert!(seen.report.error.as_ref().is_some_and(|error| error.contains("writ")), "{seen:?}");
    assert_eq!((seen.said.as_str(), seen.code), ("", None), "nothing of the guest ran: {seen:?}");
}

#[test]
fn a_vmm_that_says_read_only_and_attaches_the_root_writable_is_killed() {
    let seen = under("qemu-lying");
    assert_eq!(seen.report.verdict.as_str(), "KILLED", "{seen:?}");
    assert_eq!(seen.report.kill.reasons, ["writable_root"], "{seen:?}");
    assert!(seen.report.kill.absolute, "{seen:?}");
}

#[test]
fn a_device_that_nobody_asked_for_ends_the_machine_before_it_counts_as_started() {
    let seen = under("qemu-device");
    assert_eq!(seen.report.verdict.as_str(), "FAILED", "{seen:?}");
    assert!(seen.report.error.as_ref().is_some_and(|error| error.contains("virtio-balloon")), "{seen:?}");
    assert_eq!((seen.said.as_str(), seen.code), ("", None), "nothing of the guest ran: {seen:?}");
    assert!(seen.console.is_empty(), "the guest never began: {seen:?}");
}

/// A kernel that can't make one of the walls: the init says so and ends the machine, and nothing is executed.
#[test]
fn an_error_in_the_walls_ends_the_machine() {
    for without in ["cgroup_disable=pids", "cgroup_disable=memory"] {
        let seen = under(&format!("qemu-append-{without}"));
        assert_eq!(seen.report.verdict.as_str(), "FAILED", "{seen:?}");
        assert_eq!((seen.said.as_str(), seen.code), ("", None), "{without}: something ran: {seen:?}");
        let error = seen.report.error.as_deref().unwrap_or_default();
        assert!(error.contains("last words") && error.contains("failed to enable controllers"), "{error}");
    }
    // The control: with a word that takes no wall away, the same machine runs.
    assert_spared(&under("qemu-append-hotcell_test_nothing"));
}

#[test]
fn the_same_program_that_changes_nothing_is_let_be() {
    assert_spared(&under("qemu-honest"));
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
