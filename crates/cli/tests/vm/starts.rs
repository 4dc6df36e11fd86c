//! Guests that never become ready.

use crate::harness::{SOON, Slot, home, verify, vmms_of};
use crate::machine::{busybox, runtime};
use hotcell_runtime::RunReport;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

fn assert_failed_and_gone(report: &RunReport, out: &Path) {
    assert_eq!(report.verdict.as_str(), "FAILED", "{report:?}");
    assert!(report.teardown.verified, "{report:?}");
    assert!(vmms_of(&report.run_id).is_empty());
    assert!(!home().join("state/live").join(&report.run_id).exists());
    assert_eq!(verify(&out.join(&report.run_id)), 0, "the record of a failure is a record");
}

/// One file of a `newc` archive, by cpio(5).
fn newc(name: &str, mode: u32, device: (u32, u32), bytes: &[u8]) -> Vec<u8> {
    let mut out = format!(
        "070701{:08x}{mode:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}{:08x}",
        1,
        0,
        0,
        1,
        0,
        bytes.len(),
        0,
        0,
        device.0,
        device.1,
        name.len() + 1,
        0
    )
    .into_bytes();
    out.extend(name.bytes().chain([0]));
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend(bytes);
    out.resize(out.len().next_multiple_of(4), 0);
    out
}

#[test]
fn a_guest_that_never_becomes_ready_ends_by_the_deadline_with_its_last_words() {
    let (out, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // An init that speaks on the console and then only waits: static busybox as a shell.
    let busybox_bytes = fs::read("/bin/busybox").expect("busybox-static is installed: `./x test` does it");
    let script = b"#!/busybox sh\necho the imposter is up\nwhile :; do /busybox sleep 10; done\n";
    let mut archive = newc("dev", 0o040_755, (0, 0), b"");
    archive.extend(newc("dev/console", 0o020_600, (5, 1), b""));
    archive.extend(newc("busybox", 0o100_755, (0, 0), &busybox_bytes));
    archive.extend(newc("init", 0o100_755, (0, 0), script));
    archive.extend(newc("TRAILER!!!", 0, (0, 0), b""));
    let initramfs = work.path().join("initramfs.cpio");
    fs::write(&initramfs, archive).unwrap();
    let (spec, boot) = busybox(&format!("test-imposter-{}", std::process::id()), Some(&initramfs));
    let _slot = Slot::take();
    let begun = Instant::now();
    let report = runtime(out.path(), Duration::from_secs(15)).start(spec, boot).finish();
    assert_failed_and_gone(&report, out.path());
    let error = report.error.unwrap();
    assert!(error.contains("not ready after 15") && error.contains("the imposter is up"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(15) + SOON);
}

#[test]
fn a_kernel_without_an_init_ends_at_once_with_its_last_words() {
    let (out, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let initramfs = work.path().join("initramfs.cpio");
    fs::write(&initramfs, vec![0x5a; 64 << 10]).unwrap();
    let (spec, boot) = busybox(&format!("test-rubbish-{}", std::process::id()), Some(&initramfs));
    let _slot = Slot::take();
    let report = runtime(out.path(), Duration::from_secs(120)).start(spec, boot).finish();
    assert_failed_and_gone(&report, out.path());
    let error = report.error.unwrap();
    assert!(error.contains("ended while it booted") && error.contains("panic"), "{error}");
}
