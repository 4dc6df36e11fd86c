//! A run from a program: `embed KERNEL INITRAMFS ROOT STATE`, in a scratch folder STATE.

use hotcell_ledger::SigningKey;
use hotcell_policy::{Command, ImageRef, PolicyDraft, RunDraft};
use hotcell_runtime::{ExecIo, MeasuredBoot, Patience, Runtime};
use hotcell_vm::{AccelChoice, FileDigests, JailChoice, QemuBackend, Registry};
use std::path::PathBuf;
use std::{sync::Arc, time::Duration};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut paths = std::env::args().skip(1).map(PathBuf::from);
    let mut next = || paths.next().ok_or("usage: embed KERNEL INITRAMFS ROOT STATE");
    let boot = MeasuredBoot::open(&next()?, &next()?, &next()?)?;
    let state = next()?;
    let image = ImageRef {
        name: "mine".into(),
        kernel: boot.kernel.digest,
        initramfs: boot.initramfs.digest,
        root: boot.root.digest,
    };
    // As a library nothing is granted that is not named here.
    let mut draft = RunDraft::new(format!("example-{}", std::process::id()), image, PolicyDraft::default());
    draft.command = Some(Command::new(["/bin/uname", "-r"]));
    let spec = draft.seal()?;
    let runtime = Runtime {
        registry: Registry::open(&state.join("live"))?,
        backend: Arc::new(QemuBackend::new("/usr/bin/qemu-system-x86_64".into(), JailChoice::Auto)?),
        acceleration: AccelChoice::Auto.resolve()?,
        out: state.join("runs"),
        cache: state.join("cache"),
        digests: FileDigests::remembered_in(&state.join("cache/digests")),
        key: Arc::new(SigningKey::load_or_create(&state.join("key"))?),
        clock: Runtime::host_clock(),
        boot_deadline: Duration::from_secs(120),
        patience: Patience::default(),
        advisor: None,
    };
    let io = ExecIo { stdout: Some(Box::new(std::io::stdout())), ..ExecIo::default() };
    let (report, _) = runtime.execute(spec, boot, io);
    println!("{} {:?} {:?}", report.verdict, report.exit_code, report.bundle);
    report.error.map_or(Ok(()), |error| Err(error.into()))
}
