//! The library over real machines: what the command line can't ask for. A guest
//! that never becomes ready, and many execs in one run.

use crate::harness::{SOON, Slot, home, verify, vmms_of, warm_up};
use hotcell_image::{Guest, Store};
use hotcell_ledger::SigningKey;
use hotcell_policy::{EnvironmentBaseline, ImageRef, PolicyDraft, RunDraft, SealedSpec};
use hotcell_runtime::{ExecIo, ExecRequest, MeasuredBoot, Patience, RunReport, Runtime, Stdin};
use hotcell_vm::{AccelChoice, QemuBackend, Registry};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) const GUEST: Guest =
    Guest { init: include_bytes!(env!("HOTCELL_INIT")), request: include_bytes!(env!("HOTCELL_REQUEST")) };

fn qemu() -> PathBuf {
    let places = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/libexec"];
    let found =
        places.iter().map(|place| Path::new(place).join("qemu-system-x86_64")).find(|path| path.is_file());
    found.expect("QEMU is installed: `./x test` does it")
}

pub(crate) fn runtime(out: &Path, boot_deadline: Duration) -> Runtime {
    Runtime {
        registry: Registry::open(&home().join("state/live")).unwrap(),
        backend: Arc::new(QemuBackend::new(qemu(), hotcell_vm::JailChoice::Auto).unwrap()),
        acceleration: AccelChoice::Tcg.resolve().unwrap(),
        out: out.to_owned(),
        cache: home().join("cache"),
        key: Arc::new(SigningKey::load_or_create(&home().join("state/key")).unwrap()),
        clock: Runtime::host_clock(),
        boot_deadline,
        patience: Patience::default(),
        advisor: None,
    }
}

/// The busybox image with this initramfs, or its own.
pub(crate) fn busybox(run_id: &str, initramfs: Option<&Path>) -> (SealedSpec, MeasuredBoot) {
    warm_up();
    let store = Store::new(&home().join("cache"), &home().join("state/images"), GUEST);
    let mut say = |_: &str| {};
    let image = store.image("busybox", &mut say).unwrap();
    let kernel = store.kernel(&mut say).unwrap();
    let own = store.initramfs(&kernel).unwrap();
    let mut boot = MeasuredBoot::open(&kernel.vmlinuz(), initramfs.unwrap_or(&own), &image.root).unwrap();
    let reference = ImageRef {
        name: "busybox".into(),
        kernel: boot.kernel.digest,
        initramfs: boot.initramfs.digest,
        root: boot.root.digest,
    };
    let mut draft = RunDraft::new(run_id.to_owned(), reference, PolicyDraft::for_running_a_command());
    draft.baseline = Some(EnvironmentBaseline::from_manifest(&image.manifest).digest());
    draft.binaries = Some(image.manifest.binaries().digest());
    boot.contents = Some(image.manifest);
    (draft.seal().unwrap(), boot)
}

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

/// Collects a stream.
#[derive(Clone, Default)]
pub(crate) struct Sink(pub(crate) Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn execs_in_one_run_keep_arguments_environment_and_streams_apart() {
    let out = tempfile::tempdir().unwrap();
    let (spec, boot) = busybox(&format!("test-execs-{}", std::process::id()), None);
    let _slot = Slot::take();
    let run = runtime(out.path(), Duration::from_secs(120)).start(spec, boot);
    let exec = |request: ExecRequest, stdin: Stdin| {
        let (stdout, stderr) = (Sink::default(), Sink::default());
        let io =
            ExecIo { stdin, stdout: Some(Box::new(stdout.clone())), stderr: Some(Box::new(stderr.clone())) };
        let result = run.exec(request, io).wait().unwrap();
        let text = |sink: Sink| String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        (result, text(stdout), text(stderr))
    };
    let words = ["", "two\nlines", "it's \"quoted\" \\ $HOME `id`", "", "-n", "ünï", ""];
    let print = "for word in \"$@\"; do printf '<%s>' \"$word\"; done; echo err >&2";
    let argv = ["/bin/sh", "-c", print, "sh"].into_iter().chain(words);
    let (result, stdout, stderr) = exec(ExecRequest::new(argv), Stdin::Empty);
    assert_eq!(result.code, 0);
    assert_eq!(stdout, words.map(|word| format!("<{word}>")).concat());
    assert_eq!(stderr, "err\n");

    let long = "x".repeat(64 << 10);
    let mut request =
        ExecRequest::new(["/bin/sh", "-c", "printf '%s|%s|%s|' \"$A\" \"$B\" ${#C}; pwd; env | wc -l"]);
    request.env = [("A", "1=2=3"), ("B", "line\n\"quote'"), ("C", &long), ("PATH", "/bin")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
    request.cwd = "/tmp".into();
    let (_, stdout, _) = exec(request, Stdin::Empty);
    assert!(stdout.starts_with("1=2=3|line\n\"quote'|65536|/tmp\n"), "{stdout}");

    let (result, stdout, _) = exec(ExecRequest::new(["/bin/cat"]), Stdin::Bytes(b"a\0b\xc3\xa9".to_vec()));
    assert_eq!((result.code, stdout.as_bytes()), (0, "a\0bé".as_bytes()));
    let mut request = ExecRequest::new(["/bin/true"]);
    request.cwd = "/nowhere".into();
    let (result, _, _) = exec(request, Stdin::Empty);
    assert!(result.not_started.unwrap().contains("/nowhere"));

    // Eight at once, each with its own stream.
    let execs: Vec<_> = (0..8)
        .map(|number| {
            let sink = Sink::default();
            let script = format!("for i in $(seq 200); do echo {number}; done; exit {number}");
            let io = ExecIo { stdout: Some(Box::new(sink.clone())), ..ExecIo::default() };
            (number, sink, run.exec(ExecRequest::new(["/bin/sh", "-c", &script]), io))
        })
        .collect();
    for (number, sink, exec) in execs {
        assert_eq!(exec.wait().unwrap().code, number);
        assert_eq!(*sink.0.lock().unwrap(), format!("{number}\n").repeat(200).into_bytes());
    }
    let report = run.finish();
    assert_eq!(report.verdict.as_str(), "ALLOWED", "{report:?}");
    assert_eq!(verify(&out.path().join(&report.run_id)), 0);
}
