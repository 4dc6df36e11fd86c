//! From a plan to a VMM process that has what it needs and nothing more.

use super::args::{self, Descriptors, Origin};
use super::machine::{QemuVm, Vmm};
use super::{QemuBackend, REGISTRY_VARIABLE};
use crate::backend::{LiveVm, StartError, StartFailed, VmPlan, VmmFacts};
use crate::console::Console;
use crate::jail::{HostJail, Jail, RunCgroups};
use crate::process::ProcessId;
use crate::registry::Registration;
use hotcell_ledger::Digest;
use hotcell_sys::host::{self, Gift, JailedChild, OpenService, spawn_jailed};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Seek};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A spawned VMM that has not been checked yet.
pub(super) struct Parts {
    child: JailedChild,
    opens: Option<OpenService>,
    process: ProcessId,
    console: Console,
    messages: Console,
    disk: File,
    channel: UnixStream,
    qmp: UnixStream,
    program: PathBuf,
    executable: Digest,
    argv: Vec<String>,
    jail: HostJail,
}

impl Parts {
    pub(super) fn spawn(
        backend: &QemuBackend,
        registration: &mut Registration,
        cgroups: &mut RunCgroups,
        plan: &VmPlan,
        to_be_saved: bool,
    ) -> Result<Parts, StartError> {
        let program = backend.program.as_path();
        let dir = registration.dir().to_owned();
        let io_error = |doing| move |source: io::Error| StartError::Io { doing, source };
        let overlay = dir.join("workspace.img");
        let workspace = match &plan.template {
            Some(template) => template.copy_disk(&overlay).map_err(io_error("copy the template's disk"))?,
            None => plan.workspace.copy_to(&overlay)?,
        };
        // Opened anew: whoever observes can't write.
        let disk = File::open(&overlay).map_err(io_error("open the workspace disk to read"))?;
        let (channel, channel_far) = UnixStream::pair().map_err(io_error("make the channel"))?;
        let (qmp, qmp_far) = UnixStream::pair().map_err(io_error("make the control channel"))?;
        let given = |file: &File| file.try_clone().map_err(io_error("duplicate a descriptor"));
        let by_name = |name: &str, file: &File| {
            for_everybody(file, &dir.join(name)).map_err(io_error("give the VMM a file that it can open"))
        };
        let mut inherit: Vec<OwnedFd> = Vec::new();
        let origin = if plan.template.is_some() {
            Origin::Clone
        } else {
            // The VMM opens kernel and initramfs anew, as a user that owns nothing.
            let kernel = by_name("kernel", &plan.kernel.file)?;
            let initramfs = by_name("initramfs", &plan.initramfs.file)?;
            let (number, of_initramfs) = (kernel.as_raw_fd(), initramfs.as_raw_fd());
            inherit.extend([kernel.into(), initramfs.into()]);
            let tsc_khz = host::tsc_khz();
            Origin::Boot { kernel: number, initramfs: of_initramfs, tsc_khz, to_be_saved }
        };
        let root = given(&plan.root.file)?;
        let fds = Descriptors {
            root: root.as_raw_fd(),
            workspace: workspace.as_raw_fd(),
            channel: channel_far.as_raw_fd(),
            qmp: qmp_far.as_raw_fd(),
        };
        let argv = args::arguments(plan, fds, origin);
        let mut command = Command::new(program);
        // A process group of its own: a terminal's interrupt is for Hotcell, which ends the machine itself.
        command.args(&argv).env_clear().current_dir("/").process_group(0);
        command.env(REGISTRY_VARIABLE, dir.parent().unwrap_or(&dir));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (mut walls, made) = backend.jail.plan(program, registration, plan)?;
        *cgroups = made;
        inherit.extend([root.into(), workspace.into(), channel_far.into(), qmp_far.into()]);
        walls.inherit = inherit;
        let gift = match &plan.template {
            Some(template) => {
                let file = template.ram().map_err(io_error("duplicate a descriptor"))?;
                Some(Gift { path: args::CLONED_MEMORY.into(), file })
            }
            None => None,
        };
        let mut child = spawn_jailed(command, walls).map_err(|error| match error.stage {
            host::Stage::Execute => StartError::NoVmm { program: program.to_owned(), source: error.source },
            _ => StartError::Jail(error),
        })?;
        let pipes = child.stdout.take().zip(child.stderr.take());
        let opens = child.opens.take().map(|opens| OpenService::start(opens, gift)).transpose();
        match (ProcessId::of(child.pid), pipes, opens) {
            (Some(process), Some((stdout, stderr)), Ok(opens)) => Ok(Parts {
                child,
                opens,
                process,
                console: Console::drain(stdout),
                messages: Console::drain(stderr),
                disk,
                channel,
                qmp,
                program: program.to_owned(),
                executable: backend.executable(),
                argv,
                jail: backend.jail.clone(),
            }),
            _ => {
                drop(Vmm { child });
                let source = io::ErrorKind::NotFound.into();
                Err(StartError::Io { doing: "identify the VMM process", source })
            }
        }
    }

    pub(super) fn finish_start(
        self,
        mut registration: Registration,
        cgroups: RunCgroups,
        plan: VmPlan,
    ) -> Result<QemuVm, StartFailed> {
        let Parts {
            child,
            opens,
            process,
            console,
            messages,
            disk,
            channel,
            qmp,
            program,
            executable,
            argv,
            jail,
        } = self;
        let recorded = registration.record_vmm(process.clone());
        let mut vm = QemuVm {
            vmm: Vmm { child },
            opens,
            cgroups,
            console,
            messages,
            disk,
            watch: None,
            channel: Some(channel),
            qmp: None,
            memory: None,
            facts: VmmFacts {
                process,
                executable,
                argv: std::iter::once(program.display().to_string()).chain(argv).collect(),
                backend: "qemu",
                version: String::new(),
                acceleration: plan.acceleration,
                jail: Jail::Other("not measured yet".into()),
                devices: Vec::new(),
                unexpected_devices: Vec::new(),
                root_read_only: false,
            },
            registration,
        };
        let inspected = recorded.map_err(StartError::from);
        match inspected.and_then(|()| vm.inspect(qmp, &jail, plan.template.as_ref(), &plan.root.file)) {
            Ok(()) => Ok(vm),
            Err(error) => Err(StartFailed { error, teardown: Box::new(vm).destroy() }),
        }
    }
}

/// A descriptor of the same bytes that any user may open by `/proc/self/fd`: the
/// file itself where its mode lets others read, else a copy in the run's folder.
fn for_everybody(file: &File, copy: &Path) -> io::Result<File> {
    let metadata = file.metadata()?;
    if metadata.permissions().mode() & 0o004 != 0 || !rustix::process::geteuid().is_root() {
        return file.try_clone();
    }
    let mut options = OpenOptions::new();
    let mut to = options.create_new(true).write(true).mode(0o444).open(copy)?;
    to.set_permissions(Permissions::from_mode(0o444))?;
    let mut from = file.try_clone()?;
    from.rewind()?;
    let copied = io::copy(&mut from.take(metadata.len()), &mut to)?;
    if copied != metadata.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    File::open(copy)
}
