//! QEMU's microvm behind [`VmBackend`].
//!
//! What it guarantees: the VMM inherits exactly the measured files, the
//! workspace disk and two socket pairs, all as open descriptors: there is no
//! socket or pipe on the file system that another process could take. Before the
//! machine counts as started, the VMM's own device list is read: a network
//! device or a writable root ends it.
//! What it does not: it does not wait for the guest.

mod args;
mod qmp;
mod saved;
mod template;

pub(crate) use args::NAME_PREFIX;
pub use qmp::QmpError;

use crate::backend::{LiveVm, StartError, StartFailed, VmBackend, VmPlan, VmmFacts};
use crate::console::{Captured, Console};
use crate::jail::{HostJail, Jail, JailChoice, JailRefused, MAKE_CGROUPS, RunCgroups, VmmWatch};
use crate::measured::FileDigests;
use crate::memory::{GuestMemory, MemoryRegion};
use crate::process::ProcessId;
use crate::registry::{Registration, Registry};
use crate::teardown::{Check, TeardownFailed, TeardownProof, TeardownReport};
use crate::template::{Template, TemplateError, TemplateStore};
use args::{Descriptors, Origin};
use hotcell_ledger::Digest;
use hotcell_sys::host::{self, Gift, JailedChild, OpenService, spawn_jailed};
use qmp::Qmp;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, pidfd_send_signal};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Seek};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The VMM's environment has this variable alone: which registry it belongs to.
pub(crate) const REGISTRY_VARIABLE: &str = "HOTCELL_REGISTRY";
/// How long the VMM may take to answer a control command. It answers in
/// milliseconds; a busy host may take long.
const CONTROL_DEADLINE: Duration = Duration::from_secs(20);
/// How long a killed VMM may take to be gone. The kernel needs milliseconds,
/// longer where it must free much memory.
const KILL_DEADLINE: Duration = Duration::from_secs(10);
/// How long a VMM whose control channel broke may take to end by itself, so that its own message can be told.
const LAST_WORDS_DEADLINE: Duration = Duration::from_millis(500);

/// What QEMU counts of each block node.
const BLOCK_STATISTICS: &str = "query-blockstats";
/// The nodes that the guest may write to.
const WRITABLE_NODES: [&str; 2] = ["overlay", "overlay-file"];

/// Starts QEMU microvms.
#[derive(Clone, Debug)]
pub struct QemuBackend {
    program: PathBuf,
    jail: HostJail,
    digests: FileDigests,
}

impl QemuBackend {
    /// A backend that starts this `qemu-system-x86_64`, in the jail that this host
    /// gives: that is found out here, by trying.
    ///
    /// # Errors
    /// The whole jail is required and the host can't give it.
    pub fn new(program: PathBuf, choice: JailChoice) -> Result<QemuBackend, JailRefused> {
        let jail = HostJail::try_out(&program).accept(choice)?;
        Ok(QemuBackend { program, jail, digests: FileDigests::default() })
    }

    /// The same; what this host gives, and the VMM's digest, are taken from memory where they are known.
    ///
    /// # Errors
    /// As [`QemuBackend::new`].
    pub fn remembering(
        program: PathBuf,
        choice: JailChoice,
        cache: &Path,
        digests: FileDigests,
    ) -> Result<QemuBackend, JailRefused> {
        let jail = HostJail::try_out_remembering(&program, cache).accept(choice)?;
        Ok(QemuBackend { program, jail, digests })
    }

    /// Digest of the VMM's executable; zero where it can't be read.
    fn executable(&self) -> Digest {
        self.digests.open(&self.program).map_or(Digest::ZERO, |input| input.digest)
    }

    /// What this host gives for a jail.
    pub fn jail(&self) -> &HostJail {
        &self.jail
    }
}

impl VmBackend for QemuBackend {
    fn name(&self) -> &'static str {
        "qemu"
    }

    fn template(
        &self,
        store: &TemplateStore,
        registry: &Registry,
        plan: &VmPlan,
        say: &mut dyn FnMut(&str),
    ) -> Result<Option<Template>, TemplateError> {
        if let Some(found) = store.find(&self.inputs(plan)) {
            return Ok(Some(found));
        }
        self.make_template(store, registry, plan, say).map(Some)
    }

    fn start(&self, registration: Registration, plan: VmPlan) -> Result<Box<dyn LiveVm>, StartFailed> {
        if plan.template.as_ref().is_some_and(|template| template.id() != self.inputs(&plan).id()) {
            return Err(StartFailed::not_begun(registration, "the template is another machine's".into()));
        }
        self.start_machine(registration, plan, false).map(|vm| Box::new(vm) as Box<dyn LiveVm>)
    }
}

impl QemuBackend {
    fn start_machine(
        &self,
        mut registration: Registration,
        plan: VmPlan,
        to_be_saved: bool,
    ) -> Result<QemuVm, StartFailed> {
        let begun = Instant::now();
        let mut cgroups = RunCgroups::default();
        let started = match Parts::spawn(self, &mut registration, &mut cgroups, &plan, to_be_saved) {
            Err(error) => {
                let mut checks = vec![Check::never_started()];
                checks.extend(cgroups.remove());
                let ms = begun.elapsed().as_millis() as u64;
                let report = TeardownReport { checks, ms };
                Err(StartFailed { error, teardown: registration.conclude(report) })
            }
            Ok(parts) => parts.finish_start(registration, cgroups, plan),
        };
        started.map_err(|failed| StartFailed { error: self.jail_failed(failed.error), ..failed })
    }

    /// A host that gives less than it did is tried anew by whoever starts next.
    fn jail_failed(&self, error: StartError) -> StartError {
        let of_jail = match &error {
            StartError::Jail(_) | StartError::WeakJail(_) => true,
            StartError::Io { doing, .. } => *doing == MAKE_CGROUPS,
            _ => false,
        };
        if of_jail && self.jail.forget() {
            let why = "this host gave more when it was tried out; that is forgotten, so run it again";
            return StartError::NotBegun(format!("{error}: {why}"));
        }
        error
    }
}

/// A spawned VMM that has not been checked yet.
struct Parts {
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
    fn spawn(
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

    fn finish_start(
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

/// The VMM process; ended when it is dropped, whoever drops it.
struct Vmm {
    child: JailedChild,
}

impl Vmm {
    fn kill(&self) {
        let _ = pidfd_send_signal(&self.child.pidfd, Signal::KILL);
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.kill();
        if wait_readable(&self.child.pidfd, KILL_DEADLINE) {
            let _ = self.child.wait();
        }
    }
}

struct QemuVm {
    vmm: Vmm,
    /// While it starts; a VMM whose guest runs opens nothing by name.
    opens: Option<OpenService>,
    cgroups: RunCgroups,
    console: Console,
    messages: Console,
    disk: File,
    watch: Option<VmmWatch>,
    channel: Option<UnixStream>,
    qmp: Option<Qmp>,
    memory: Option<GuestMemory>,
    facts: VmmFacts,
    registration: Registration,
}

impl QemuVm {
    /// Asks the VMM what machine it made and `/proc` how it is held, and refuses
    /// what was not asked for. Only then the machine executes its first instruction.
    fn inspect(
        &mut self,
        stream: UnixStream,
        jail: &HostJail,
        template: Option<&Template>,
        root: &File,
    ) -> Result<(), StartError> {
        let answer = Qmp::open(stream, CONTROL_DEADLINE).and_then(|(mut qmp, version)| {
            if let Some(template) = template {
                saved::restore(&mut qmp, template)?;
            }
            let mut devices = Vec::new();
            for place in
                ["/machine", "/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached"]
            {
                devices.extend(children(&qmp.call("qom-list", json!({"path": place}))?));
            }
            let root = qmp.call("query-named-block-nodes", json!({"flat": true}))?;
            let memory = memory_of(&mut qmp)?;
            Ok((qmp, version, devices, root, memory))
        });
        let (qmp, version, mut devices, nodes, regions) = match answer {
            Ok(answer) => answer,
            Err(error) => return Err(self.control_failed(error)),
        };
        let node = |name: &str| nodes.as_array().and_then(|all| all.iter().find(|n| n["node-name"] == name));
        self.facts.root_read_only =
            ["root", "root-file"].iter().all(|name| node(name).is_some_and(|node| node["ro"] == true));
        devices.sort();
        self.facts.unexpected_devices = devices.iter().filter(|kind| !is_expected(kind)).cloned().collect();
        self.facts.devices = devices;
        self.facts.version = version;
        self.qmp = Some(qmp);
        self.memory = Some(GuestMemory { pid: self.facts.process.pid, regions });
        if !self.facts.unexpected_devices.is_empty() {
            return Err(StartError::UnexpectedDevice(self.facts.unexpected_devices.join(", ")));
        }
        if !self.facts.root_read_only {
            return Err(StartError::WritableRoot);
        }
        self.facts.jail = jail.measure(&self.facts.process)?;
        let watch = VmmWatch::begin(self.facts.process.clone(), Some(root));
        let doing = "look at the VMM process";
        self.watch = Some(watch.map_err(|source| StartError::Io { doing, source })?);
        if let Some(opens) = self.opens.take() {
            opens.end();
        }
        let started = self.qmp.as_mut().map(|qmp| qmp.call("cont", json!({})));
        match started {
            Some(Err(error)) => Err(self.control_failed(error)),
            _ => Ok(()),
        }
    }

    fn control_failed(&mut self, error: QmpError) -> StartError {
        if !wait_readable(&self.vmm.child.pidfd, LAST_WORDS_DEADLINE) {
            return StartError::Control(error.to_string());
        }
        let status = match self.vmm.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        // The process is gone, so its end of the pipe is closed and the reader ends.
        let deadline = Instant::now() + LAST_WORDS_DEADLINE;
        let mut stderr = self.messages.last_lines(3);
        while stderr.is_empty() && Instant::now() < deadline {
            std::thread::yield_now();
            stderr = self.messages.last_lines(3);
        }
        StartError::Died { status, stderr }
    }
}

impl LiveVm for QemuVm {
    fn facts(&self) -> &VmmFacts {
        &self.facts
    }

    fn take_channel(&mut self) -> Option<UnixStream> {
        self.channel.take()
    }

    fn exit_event(&self) -> io::Result<OwnedFd> {
        self.vmm.child.pidfd.try_clone()
    }

    fn console(&self) -> Captured {
        self.console.captured()
    }

    fn last_words(&self) -> String {
        let (messages, console) = (self.messages.last_lines(5), self.console.last_lines(15));
        format!("{messages}\n{console}").trim().to_owned()
    }

    fn memory(&self) -> Option<GuestMemory> {
        self.memory.clone()
    }

    fn root_bytes_written(&mut self) -> Option<u64> {
        written_elsewhere(&self.qmp.as_mut()?.call(BLOCK_STATISTICS, json!({"query-nodes": true})).ok()?)
    }

    fn root_bytes_so_far(&mut self) -> Option<u64> {
        written_elsewhere(&self.qmp.as_mut()?.ask(BLOCK_STATISTICS, json!({"query-nodes": true}))?)
    }

    fn held_back(&mut self) -> Option<String> {
        let event = self.qmp.as_mut()?.take_event(|event| {
            event["event"] == "STOP"
                || event["event"] == "BLOCK_IO_ERROR" && event["data"]["action"] == "stop"
        })?;
        let data = &event["data"];
        Some(match (data["node-name"].as_str(), data["reason"].as_str()) {
            (Some(node), Some(reason)) => {
                format!("the file behind its disk {node:?} takes no more: {reason}")
            }
            _ => "it does not say why".to_owned(),
        })
    }

    fn disk(&self) -> io::Result<Option<File>> {
        self.disk.try_clone().map(Some)
    }

    fn take_watch(&mut self) -> Option<VmmWatch> {
        self.watch.take()
    }

    fn kill(&self) {
        self.vmm.kill();
    }

    fn destroy(self: Box<Self>) -> Result<TeardownProof, TeardownFailed> {
        let begun = Instant::now();
        self.kill();
        let QemuVm {
            vmm, opens, cgroups, console, messages, disk, channel, qmp, facts, registration, ..
        } = *self;
        let ended = wait_readable(&vmm.child.pidfd, KILL_DEADLINE);
        let reaped = ended.then(|| vmm.child.wait());
        let exists = facts.process.exists();
        let process = Check {
            what: format!("VMM process {}", facts.process.pid),
            gone: !exists,
            detail: match reaped {
                Some(Ok(status)) => format!("reaped, {status}"),
                Some(Err(error)) => format!("can't be reaped: {error}"),
                None => format!("still there {} s after SIGKILL", KILL_DEADLINE.as_secs()),
            },
        };
        let mut checks = vec![process];
        checks.extend(cgroups.remove());
        // Both sockets are ends of pairs: with ours dropped, nothing of them is left
        // to name; that the far end is closed shows that no other process holds it.
        if let Some(channel) = channel {
            checks.push(closed("channel", &channel));
        }
        drop((qmp, disk));
        if let Some(opens) = opens {
            opens.end();
        }
        if !exists {
            console.finish();
            messages.finish();
        }
        let report = TeardownReport { checks, ms: begun.elapsed().as_millis() as u64 };
        registration.conclude(report)
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

/// The far end of a socket pair is closed when reading ends.
fn closed(what: &str, stream: &UnixStream) -> Check {
    let mut byte = [0; 4096];
    let mut left = 1024;
    let outcome = loop {
        if let Err(error) = stream.set_nonblocking(true) {
            break Err(error);
        }
        match io::Read::read(&mut &*stream, &mut byte) {
            Ok(0) => break Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break Ok(()),
            Ok(_) if left > 0 => left -= 1,
            Ok(_) => break Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => break Err(error),
        }
    };
    let (gone, detail) = match outcome {
        Ok(()) => (true, "far end closed".to_owned()),
        Err(error) => (false, format!("far end still open: {error}")),
    };
    Check { what: what.into(), gone, detail }
}

fn wait_readable(fd: &OwnedFd, deadline: Duration) -> bool {
    let end = Instant::now() + deadline;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout =
            rustix::time::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Where the guest's memory lies in the VMM. The monitor's commands for people are the only ones that say it.
fn memory_of(qmp: &mut Qmp) -> Result<Vec<MemoryRegion>, QmpError> {
    let mut say = |line: String| {
        let answer = qmp.call("human-monitor-command", json!({ "command-line": line }))?;
        Ok::<_, QmpError>(answer.as_str().unwrap_or_default().to_owned())
    };
    let mut regions = Vec::new();
    for (first, last) in GuestMemory::ranges(&say("info mtree -f".into())?) {
        let host = GuestMemory::host_address(&say(format!("gpa2hva {first:#x}"))?)
            .ok_or_else(|| QmpError::Protocol("gpa2hva".into()))?;
        regions.push(MemoryRegion { guest: first, host, bytes: last - first + 1 });
    }
    if regions.is_empty() {
        return Err(QmpError::Protocol("info mtree".into()));
    }
    Ok(regions)
}

/// Types of the objects in one place of QEMU's object tree.
fn children(list: &Value) -> impl Iterator<Item = String> {
    list.as_array().into_iter().flatten().filter_map(|property| {
        let kind = property["type"].as_str()?;
        Some(kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned())
    })
}

/// Types that a machine of ours consists of, as QEMU 7.2 to 10 name them. Anything
/// else, a network card above all, was not asked for.
const EXPECTED_DEVICES: &[&str] = &[
    "x86_64-cpu",
    "acpi-ged",
    "acpi-ged-x86",
    "apic",
    "container",
    "fw_cfg_io",
    "i8042",
    "i8259",
    "i8254",
    "ioapic",
    "irq",
    "isa-i8259",
    "isa-pit",
    "isa-serial",
    "isabus-bridge",
    "ISA",
    "kvmvapic",
    "kvm-apic",
    "kvm-i8259",
    "kvm-ioapic",
    "kvm-pit",
    "kvmclock",
    "mc146818rtc",
    "memory-backend-file",
    "memory-backend-memfd",
    "memory-backend-ram",
    "memory-region",
    "microvm-machine",
    "nvic",
    "System",
    "virtio-blk-device",
    "virtio-bus",
    "virtio-mmio",
    "virtio-mmio-bus",
    "virtio-serial-bus",
    "virtio-serial-device",
    "virtserialport",
];

fn is_expected(kind: &str) -> bool {
    EXPECTED_DEVICES.contains(&kind) || kind.ends_with("-x86_64-cpu")
}

/// How far into any node but the workspace's something was written. Of a node QEMU counts no bytes, but where its
/// last written one lies.
fn written_elsewhere(statistics: &Value) -> Option<u64> {
    let nodes = statistics.as_array()?.iter();
    let others = nodes.filter(|node| !WRITABLE_NODES.iter().any(|name| node["node-name"] == *name));
    others
        .map(|node| node["stats"]["wr_highest_offset"].as_u64())
        .try_fold(0, |most, one| Some(most.max(one?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_to_any_node_but_the_workspace_counts() {
        let node = |name: &str, end: u64| json!({"node-name": name, "stats": {"wr_bytes": 0, "wr_highest_offset": end}});
        let all = |root: u64, other: u64| {
            json!([node("overlay", 9), node("overlay-file", 9), node("root", root), node("x", other)])
        };
        for (root, other, counted) in [(0, 0, 0), (512, 0, 512), (0, 4608, 4608)] {
            assert_eq!(written_elsewhere(&all(root, other)), Some(counted));
        }
        assert_eq!(written_elsewhere(&json!([{"node-name": "root", "stats": {}}])), None);
        assert_eq!(written_elsewhere(&json!("no")), None);
    }

    #[test]
    fn no_network_card_of_qemu_is_expected() {
        for kind in [
            "virtio-net-device",
            "virtio-net-pci",
            "e1000",
            "e1000e",
            "i82550",
            "i82559er",
            "ne2k_pci",
            "ne2k_isa",
            "pcnet",
            "pvrdma",
            "rocker",
            "rtl8139",
            "tulip",
            "usb-net",
            "vmxnet3",
            "vhost-vsock-device",
            "vhost-user-vsock-device",
            "virtio-9p-device",
            "vhost-user-fs-device",
        ] {
            assert!(!is_expected(kind), "{kind}");
        }
        assert!(is_expected("max-x86_64-cpu") && is_expected("virtio-blk-device"));
    }
}
