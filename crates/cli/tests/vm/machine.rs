//! Runs of the library over real machines, for what the command line can't ask for.

use crate::harness::{Slot, home, verify, vmms_of, warm_up};
use crate::record::Record;
use hotcell_image::{Guest, Image, Kernel, KernelKind, Store};
use hotcell_ledger::SigningKey;
use hotcell_policy::{EnvironmentBaseline, ImageRef, Manifest, PolicyDraft, RunDraft, SealedSpec};
use hotcell_runtime::{
    Exec, ExecIo, ExecRequest, ExecResult, MeasuredBoot, Patience, Run, RunReport, Runtime, Stdin,
};
use hotcell_vm::{AccelChoice, FileDigests, QemuBackend, Registry};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) const GUEST: Guest =
    Guest { init: include_bytes!(env!("HOTCELL_INIT")), request: include_bytes!(env!("HOTCELL_REQUEST")) };

pub(crate) fn qemu() -> PathBuf {
    let places = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/libexec"];
    let named = std::env::var_os("HOTCELL_QEMU").map(PathBuf::from);
    let all = named.into_iter().chain(places.iter().map(|place| Path::new(place).join("qemu-system-x86_64")));
    all.into_iter().find(|path| path.is_file()).expect("QEMU is installed: `./x test` does it")
}

/// The images and kernels of the shared home.
pub(crate) fn store() -> Store {
    Store::new(&home().join("cache"), &home().join("state/images"), GUEST)
}

pub(crate) fn kernel() -> Kernel {
    store().kernel(KernelKind::Cloud, &mut |_| {}).unwrap()
}

/// A run of an image of the store with this initramfs, or the kernel's own; `contents`: what is told of the image.
pub(crate) fn drafted(
    run_id: String,
    (image, contents): (&Image, Manifest),
    policy: PolicyDraft,
    initramfs: Option<&Path>,
) -> (RunDraft, MeasuredBoot) {
    let kernel = kernel();
    let own = store().initramfs(&kernel).unwrap().path;
    let mut boot = MeasuredBoot::open(&kernel.vmlinuz(), initramfs.unwrap_or(&own), &image.root).unwrap();
    let reference = ImageRef {
        name: image.name.to_string(),
        kernel: boot.kernel.digest,
        initramfs: boot.initramfs.digest,
        root: boot.root.digest,
    };
    let mut draft = RunDraft::new(run_id, reference, policy);
    draft.baseline = Some(EnvironmentBaseline::from_manifest(&contents).digest());
    draft.binaries = Some(contents.binaries().digest());
    boot.contents = Some(contents);
    (draft, boot)
}

pub(crate) fn runtime(out: &Path, boot_deadline: Duration) -> Runtime {
    Runtime {
        registry: Registry::open(&home().join("state/live")).unwrap(),
        backend: Arc::new(QemuBackend::new(qemu(), hotcell_vm::JailChoice::Auto).unwrap()),
        acceleration: AccelChoice::Tcg.resolve().unwrap(),
        out: out.to_owned(),
        cache: home().join("cache"),
        digests: FileDigests::remembered_in(&home().join("cache/digests")),
        key: Arc::new(SigningKey::load_or_create(&home().join("state/key")).unwrap()),
        clock: Runtime::host_clock(),
        boot_deadline,
        patience: Patience::default(),
        advisor: None,
    }
}

/// The busybox image with this initramfs, or its own.
pub(crate) fn busybox(run_id: &str, initramfs: Option<&Path>) -> (SealedSpec, MeasuredBoot) {
    busybox_with(run_id, PolicyDraft::for_running_a_command(), initramfs)
}

fn busybox_with(run_id: &str, policy: PolicyDraft, initramfs: Option<&Path>) -> (SealedSpec, MeasuredBoot) {
    warm_up();
    let image = store().image("busybox", &mut |_| {}).unwrap();
    let (draft, boot) = drafted(run_id.to_owned(), (&image, image.manifest.clone()), policy, initramfs);
    (draft.seal().unwrap(), boot)
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

impl Sink {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.bytes()).unwrap()
    }
}

/// A run of the library that is at work.
pub(crate) struct Machine {
    pub(crate) run: Run,
    pub(crate) out: tempfile::TempDir,
    _slot: Slot,
}

/// An exec that goes on.
pub(crate) struct Going {
    pub(crate) exec: Exec,
    pub(crate) stdout: Sink,
    pub(crate) stderr: Sink,
}

/// An exec that has ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) result: ExecResult,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

impl Going {
    pub(crate) fn wait(self) -> Done {
        let result = self.exec.wait().unwrap();
        Done { result, stdout: self.stdout.bytes(), stderr: self.stderr.bytes() }
    }
}

impl Done {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }
}

/// A run id that no other test has.
pub(crate) fn fresh_id(name: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("test-{name}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

impl Machine {
    pub(crate) fn start(name: &str, change: impl FnOnce(&mut PolicyDraft)) -> Machine {
        let mut policy = PolicyDraft::for_running_a_command();
        change(&mut policy);
        let (spec, boot) = busybox_with(&fresh_id(name), policy, None);
        let slot = Slot::take();
        let out = tempfile::tempdir().unwrap();
        let run = runtime(out.path(), Duration::from_secs(120)).start(spec, boot);
        Machine { run, out, _slot: slot }
    }

    pub(crate) fn begin(&self, request: ExecRequest, stdin: Stdin) -> Going {
        let (stdout, stderr) = (Sink::default(), Sink::default());
        let io =
            ExecIo { stdin, stdout: Some(Box::new(stdout.clone())), stderr: Some(Box::new(stderr.clone())) };
        Going { exec: self.run.exec(request, io), stdout, stderr }
    }

    pub(crate) fn exec(&self, request: ExecRequest, stdin: Stdin) -> Done {
        self.begin(request, stdin).wait()
    }

    pub(crate) fn sh(&self, script: &str) -> Done {
        self.exec(ExecRequest::new(["/bin/sh", "-c", script]), Stdin::Empty)
    }

    /// Ends the run; it passed, nothing is left, and its record verifies.
    pub(crate) fn finish(self) -> (RunReport, Record) {
        let report = self.run.finish();
        assert_eq!(report.verdict.as_str(), "ALLOWED", "{report:?}");
        assert_gone(&report);
        let bundle = self.out.path().join(&report.run_id);
        assert_eq!(verify(&bundle), 0);
        let record = Record::read(&bundle);
        (report, record)
    }
}

/// No VMM, no registry entry; and the report says so.
#[track_caller]
pub(crate) fn assert_gone(report: &RunReport) {
    assert!(report.teardown.verified, "{report:?}");
    assert!(vmms_of(&report.run_id).is_empty(), "a VMM is left: {report:?}");
    assert!(!home().join("state/live").join(&report.run_id).exists(), "an entry is left: {report:?}");
}
