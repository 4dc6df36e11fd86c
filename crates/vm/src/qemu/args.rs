//! QEMU's command line. Pure: a plan and descriptor numbers in, arguments out.

use crate::accel::Accel;
use crate::backend::VmPlan;
use std::os::fd::RawFd;

/// Name of the virtio port that the guest's init looks for.
pub(super) const CHANNEL_NAME: &str = "org.hotcell.channel";
/// Every VMM of ours has this in its `-name`: the reaper's marker.
pub(crate) const NAME_PREFIX: &str = "hotcell-";

/// The port's name in QEMU: events of it name it.
pub(super) const CHANNEL_ID: &str = "channel";
/// What a clone opens as its memory. There is no such file: it is given the template's, by
/// [`Gift`](hotcell_sys::host::Gift).
pub(super) const CLONED_MEMORY: &std::ffi::CStr = c"/hotcell/template-ram";

/// Where the machine's first instruction comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
    /// A kernel boots.
    Boot {
        kernel: RawFd,
        initramfs: RawFd,
        tsc_khz: Option<u32>,
        /// Its memory is shared, so that it can be saved without it.
        to_be_saved: bool,
    },
    /// It goes on where the template was saved. It needs no kernel: that is in its memory.
    Clone,
}

/// Descriptor numbers that the VMM inherits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptors {
    pub(super) root: RawFd,
    pub(super) workspace: RawFd,
    pub(super) channel: RawFd,
    pub(super) qmp: RawFd,
}

/// The machine without a network: `-nodefaults` and `-no-user-config` leave only
/// what is named here.
pub(super) fn arguments(plan: &VmPlan, fds: Descriptors, origin: Origin) -> Vec<String> {
    let mut args: Vec<String> = Vec::new();
    let mut put = |words: &[&str]| args.extend(words.iter().map(|&word| word.to_owned()));
    // Stopped until it was looked at: nothing of the guest runs in a machine that is refused.
    put(&["-S"]);
    put(&["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    put(&["-name", &name(&plan.run_id)]);
    let accel = plan.acceleration.accel;
    // Without a PIT: a microvm under TCG has no second clock that the guest could
    // calibrate by, tries the PIT, fails on a busy host and hangs. The counter's
    // rate is given instead (below).
    let timers = if accel == Accel::Tcg { ",pit=off,pic=off" } else { "" };
    // Pages are not merged with other machines': who merges can be timed.
    let memory = "memory-backend=ram,mem-merge=off,dump-guest-core=off";
    put(&["-M", &format!("microvm,x-option-roms=off,isa-serial=on,rtc=on,acpi=on,{memory}{timers}")]);
    let mib = plan.memory_mib;
    put(&["-object"]);
    match origin {
        Origin::Boot { to_be_saved: false, .. } => put(&[&format!("memory-backend-ram,id=ram,size={mib}M")]),
        Origin::Boot { .. } => put(&[&format!("memory-backend-memfd,id=ram,size={mib}M,share=on")]),
        Origin::Clone => {
            let path = CLONED_MEMORY.to_string_lossy();
            put(&[&format!("memory-backend-file,id=ram,size={mib}M,share=off,mem-path={path}")]);
            put(&["-incoming", "defer"]);
        }
    }
    match accel {
        Accel::Kvm => put(&["-accel", "kvm", "-cpu", "host"]),
        // The translator executes `rep movsb` byte by byte, and with "enhanced rep movsb" the guest's kernel and libc
        // copy and clear memory by it: without, by eight bytes at a time (reading a cached file: 280 against 1600 MB/s).
        Accel::Tcg => put(&["-accel", "tcg", "-cpu", "max,erms=off"]),
    }
    put(&["-m", &plan.memory_mib.to_string(), "-smp", &plan.vcpus.to_string()]);
    put(&["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]);
    if let Origin::Boot { kernel, initramfs, tsc_khz, .. } = origin {
        put(&["-kernel", &format!("/proc/self/fd/{kernel}")]);
        put(&["-initrd", &format!("/proc/self/fd/{initramfs}")]);
        put(&["-append", &kernel_command_line(plan, tsc_khz)]);
    }
    put(&["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
    for (set, name, fd, options) in [
        (1, "root", fds.root, "read-only=on"),
        // The overlay dies with the machine: flushing it to the host's disk serves nobody, so the guest need not ask.
        (2, "overlay", fds.workspace, "read-only=off,cache.no-flush=on,discard=unmap"),
    ] {
        put(&["-add-fd", &format!("fd={fd},set={set},opaque={name}")]);
        let node =
            format!("driver=file,filename=/dev/fdset/{set},node-name={name}-file,locking=off,{options}");
        put(&["-blockdev", &node]);
        put(&["-blockdev", &format!("driver=raw,file={name}-file,node-name={name},{options}")]);
        put(&["-device", &format!("virtio-blk-device,drive={name},serial={name},write-cache=off")]);
    }
    put(&["-chardev", &format!("socket,id=channel,fd={}", fds.channel)]);
    put(&["-device", "virtio-serial-device,max_ports=2"]);
    put(&["-device", &format!("virtserialport,id={CHANNEL_ID},chardev=channel,nr=1,name={CHANNEL_NAME}")]);
    put(&["-chardev", &format!("socket,id=qmp,fd={}", fds.qmp)]);
    put(&["-mon", "chardev=qmp,mode=control"]);
    args
}

/// The machine's name, by which the reaper knows it.
pub(super) fn name(run_id: &str) -> String {
    format!("{NAME_PREFIX}{run_id}")
}

fn kernel_command_line(plan: &VmPlan, tsc_khz: Option<u32>) -> String {
    let mut line = String::from("console=ttyS0 quiet panic=-1 reboot=t");
    // Start-up work that serves nothing here (a third of the boot under TCG):
    // security modules whose policies nobody loads, the audit channel, the accounts of
    // stalls that nobody reads, self-tests of ciphers, and waiting for serial ports that do not exist.
    line.push_str(
        " lsm=landlock,yama audit=0 psi=0 cryptomgr.notests 8250.nr_uarts=1 no_timer_check noreplace-smp rcupdate.rcu_expedited=1",
    );
    if plan.acceleration.accel == Accel::Tcg
        && let Some(khz) = tsc_khz
    {
        line.push_str(&format!(" tsc_early_khz={khz} tsc=reliable"));
    }
    let (uid, gid) = plan.owner;
    line.push_str(&format!(" hotcell.owner={uid}:{gid}"));
    for word in &plan.kernel_args {
        line.push(' ');
        line.push_str(word);
    }
    line
}
