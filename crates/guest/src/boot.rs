//! From the kernel's hand-over to a machine that waits for its host.
//!
//! What it guarantees: everything heavy happens here, before the channel is
//! opened, and nothing that is particular to one run; so a machine stopped
//! while it waits is a template for any run. The VMM tells when that is: it
//! sees the guest open the port.
//! What it does not: limits, nonce, clock, entropy; see `configure`.

use crate::cgroup::{self, Workload};
use crate::configure::Prepared;
use crate::gate::Gate;
use crate::last::{Doing, Failure};
use crate::limits::{DEVICE_PATIENCE, OWNER};
use crate::oom::OomLog;
use crate::poll::{Poll, Source};
use crate::reaper::{self, Reaper};
use crate::requests;
use crate::start::Starter;
use crate::view::{self, attach, make_directory};
use crate::{confine, syscalls};
use hotcell_wire::CHANNEL_NAME;
use rustix::fs::{Mode, OFlags, open, syncfs};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::mount::MountFlags;
use rustix::process::{DumpableBehavior, set_dumpable_behavior, setpriority_process};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, remove_capability_from_bounding_set, set_capabilities_secure_bits,
    set_name, set_no_new_privs,
};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// What PID 1 mounts for itself in the initramfs; the workload's view gets none of it.
pub(crate) const OWN_MOUNTS: [&str; 4] = ["/proc", "/sys", "/dev", cgroup::MOUNT];

const MODULES: &str = "/modules";
/// PID 1 is never in the way for long, and must not wait behind the workload.
const PRIORITY: i32 = -15;

/// A machine that waits for its host.
pub(crate) struct Booted {
    pub(crate) poll: Poll,
    pub(crate) port: OwnedFd,
    pub(crate) starter: Starter,
    pub(crate) gate: Gate,
    pub(crate) reaper: Reaper,
    pub(crate) workload: Workload,
    pub(crate) prepared: Prepared,
    pub(crate) oom: OomLog,
    pub(crate) listener: OwnedFd,
}

/// Boots.
pub(crate) fn boot() -> Result<Booted, Failure> {
    mount_own()?;
    let null = reserve_low_descriptors()?;
    protect_self()?;
    load_modules()?;
    let (root, overlay) = (find_disk("root")?, find_disk("overlay")?);
    view::build(&root, &overlay)?;
    hotcell_sys::guest::loopback_up().doing(|| "bring the loopback interface up".into())?;
    harden_kernel()?;
    plain_disks(&[&root, &overlay]);
    let workload = Workload::create()?;
    let owner = owner()?;
    let prepared = Prepared::new(&workload, owner)?;
    let oom = OomLog::open()?;
    let listener = requests::listen()?;
    let filter = syscalls::filter().doing(|| "compile the system call filter".into())?;
    shed_privileges()?;
    // Before PID 1's children belong to the workload's pid namespace.
    let gate = Gate::start()?;
    let reaper = reaper::start(null.as_fd())?;
    let view = OwnedFd::from(reaper.view.try_clone().doing(|| "keep the workload's mount namespace".into())?);
    let poll = Poll::new().doing(|| "make an epoll instance".into())?;
    poll.watch(&reaper.process.pidfd, Source::Reaper)
        .and_then(|()| poll.watch(&gate.process.pidfd, Source::GateDeath))
        .and_then(|()| poll.watch(gate.control(), Source::Gate))
        .and_then(|()| poll.watch(&listener, Source::Listener))
        .and_then(|()| poll.watch(workload.events_fd(), Source::Workload))
        .doing(|| "watch the workload".into())?;
    let mut starter = Starter::new(view, filter, owner);
    starter.make_ahead(&poll);
    write_out()?;
    let port = open_channel()?;
    poll.watch(&port, Source::Channel).doing(|| "watch the channel".into())?;
    Ok(Booted { poll, port, starter, gate, reaper, workload, prepared, oom, listener })
}

fn mount_own() -> Result<(), Failure> {
    let hardened = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let dev = MountFlags::NOSUID | MountFlags::NOEXEC;
    for (target, kind, flags) in [
        ("/proc", "proc", hardened),
        ("/sys", "sysfs", hardened),
        ("/dev", "devtmpfs", dev),
        (cgroup::MOUNT, "cgroup2", hardened),
    ] {
        make_directory(target, 0o555)?;
        attach(kind, target, kind, flags, "")?;
    }
    Ok(())
}

/// Fills the descriptors that children use for their streams, so that nothing else ever gets them.
fn reserve_low_descriptors() -> Result<OwnedFd, Failure> {
    let null =
        open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).doing(|| "open /dev/null".into())?;
    let lowest = 1 + confine::ORDER_NUMBER as i32;
    loop {
        let copy = fcntl_dupfd_cloexec(&null, 0).doing(|| "reserve descriptors".into())?;
        if std::os::fd::AsRawFd::as_raw_fd(&copy) >= lowest {
            return Ok(copy);
        }
        // Reserved for good: never closed.
        std::mem::forget(copy);
    }
}

fn protect_self() -> Result<(), Failure> {
    // For its children too, until they execute: a root service of the image has their user.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).doing(|| "hide PID 1's memory".into())?;
    fs::write("/proc/self/oom_score_adj", "-1000").doing(|| "protect PID 1 from the OOM killer".into())?;
    setpriority_process(None, PRIORITY).doing(|| "raise PID 1's priority".into())?;
    set_name(c"hotcell-init").doing(|| "name PID 1".into())
}

/// Loads what `/modules/order` lists, then frees the files: they lie in RAM.
fn load_modules() -> Result<(), Failure> {
    let order = format!("{MODULES}/order");
    let names = match fs::read_to_string(&order) {
        Ok(names) => names,
        // A kernel with everything built in comes without.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).doing(|| format!("read {order}")),
    };
    for name in names.lines().filter(|name| !name.is_empty()) {
        let path = format!("{MODULES}/{name}");
        let file =
            open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).doing(|| format!("open {path}"))?;
        rustix::system::finit_module(&file, c"", 0).doing(|| format!("load {path}"))?;
    }
    fs::remove_dir_all(MODULES).doing(|| format!("remove {MODULES}"))
}

/// The disk whose serial the VMM set to `serial`.
fn find_disk(serial: &str) -> Result<String, Failure> {
    wait_for(&format!("a disk with the serial {serial}"), || {
        let name = find_named("/sys/block", "serial", serial)?;
        let device = format!("/dev/{name}");
        fs::exists(&device).unwrap_or(false).then_some(device)
    })
}

/// What boot changed on the workload's disk is written now, and not by every machine that goes on from here.
fn write_out() -> Result<(), Failure> {
    view::workspace().and_then(syncfs).doing(|| "write /workspace out".into())
}

/// Whose the workload's disk will be, as the host said when it started the machine.
fn owner() -> Result<(u32, u32), Failure> {
    let line = fs::read_to_string("/proc/cmdline").doing(|| "read the kernel command line".into())?;
    let named = line.split_ascii_whitespace().find_map(|word| word.strip_prefix("hotcell.owner="));
    let Some(named) = named else { return Ok(OWNER) };
    let numbers = named.split_once(':').and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)));
    numbers.ok_or_else(|| Failure::new(format!("hotcell.owner={named} is not UID:GID")))
}

/// No queueing in the guest for disks that the host queues: each request would go through two more layers.
fn plain_disks(devices: &[&str]) {
    for name in devices.iter().filter_map(|device| device.strip_prefix("/dev/")) {
        for (setting, value) in [("scheduler", "none"), ("wbt_lat_usec", "0")] {
            // A kernel that has no such setting has no such layer.
            let _ = fs::write(format!("/sys/block/{name}/queue/{setting}"), value);
        }
    }
}

fn open_channel() -> Result<OwnedFd, Failure> {
    let device = wait_for(&format!("a port named {CHANNEL_NAME}"), || {
        let name = find_named("/sys/class/virtio-ports", "name", CHANNEL_NAME)?;
        let device = format!("/dev/{name}");
        fs::exists(&device).unwrap_or(false).then_some(device)
    })?;
    open(&device, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
        .doing(|| format!("open {device}"))
}

/// The entry of `directory` whose file `attribute` holds `value`.
fn find_named(directory: &str, attribute: &str, value: &str) -> Option<String> {
    fs::read_dir(directory).ok()?.flatten().find_map(|entry| {
        let text = fs::read_to_string(entry.path().join(attribute)).ok()?;
        (text.trim_end() == value).then(|| entry.file_name().to_string_lossy().into_owned())
    })
}

/// Devices appear by the kernel's own work queue.
fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> Result<T, Failure> {
    let start = Instant::now();
    loop {
        if let Some(found) = find() {
            return Ok(found);
        }
        if start.elapsed() > DEVICE_PATIENCE {
            return Err(Failure::new(format!("found no {what} within {DEVICE_PATIENCE:?}")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Kernel settings. "Must" ones exist in every kernel that the guest supports.
fn harden_kernel() -> Result<(), Failure> {
    const MUST: [(&str, &str); 6] = [
        ("user/max_user_namespaces", "0"),
        ("kernel/dmesg_restrict", "1"),
        ("kernel/kptr_restrict", "2"),
        ("fs/protected_symlinks", "1"),
        ("fs/protected_hardlinks", "1"),
        ("fs/protected_fifos", "1"),
    ];
    // Depend on the kernel's configuration; what they switch off is also refused by the filter, or
    // needs capabilities.
    const MAY: [(&str, &str); 8] = [
        ("kernel/modules_disabled", "1"),
        ("kernel/kexec_load_disabled", "1"),
        ("kernel/unprivileged_bpf_disabled", "1"),
        ("kernel/perf_event_paranoid", "3"),
        ("kernel/yama/ptrace_scope", "3"),
        ("kernel/sysrq", "0"),
        ("kernel/io_uring_disabled", "2"),
        ("vm/memfd_noexec", "2"),
    ];
    for (name, value) in MUST {
        fs::write(format!("/proc/sys/{name}"), value).doing(|| format!("set {name} to {value}"))?;
    }
    for (name, value) in MAY {
        let _ = fs::write(format!("/proc/sys/{name}"), value);
    }
    fs::write("/proc/sys/kernel/hostname", "hotcell").doing(|| "set the host name".into())
}

/// Gives up, for PID 1 and so for all its children, what only execve could ever
/// use: PID 1 never executes anything, and keeps its own permitted set.
fn shed_privileges() -> Result<(), Failure> {
    set_no_new_privs(true).doing(|| "set no-new-privileges".into())?;
    let bits = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    set_capabilities_secure_bits(bits).doing(|| "set secure bits".into())?;
    let last: u32 = fs::read_to_string("/proc/sys/kernel/cap_last_cap")
        .doing(|| "read the number of capabilities".into())?
        .trim_end()
        .parse()
        .doing(|| "read the number of capabilities".into())?;
    for number in 0..=last.min(63) {
        remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number))
            .doing(|| format!("drop capability {number} from the bounding set"))?;
    }
    Ok(())
}
