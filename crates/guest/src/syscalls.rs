//! The system calls that the workload does not get.
//!
//! A list of refusals rather than of permissions: the workload is any program
//! at all, the guest kernel is the one that we measured, and everything newer
//! than [`NEWEST`] is not implemented. The walls are the machine, the user id
//! and the empty capability sets; this takes away what an ordinary user may
//! still reach that has a history of being a way to the kernel's inside.
//!
//! `ENOSYS` where programs look for another way when a call is missing,
//! `EPERM` where they should learn that they may not.

use hotcell_sys::guest::{Argument, Filter, FilterError, Rule, Verdict};
use libc::{EAFNOSUPPORT, ENOSYS, EPERM, c_long};

/// `set_mempolicy_home_node`, the newest call of kernel 6.1.
const NEWEST: c_long = 450;

/// Flags of clone and unshare that make a namespace: time, mount, cgroup, uts,
/// ipc, user, pid, net. (For `clone`, 0x80 is part of the exit signal.)
const NAMESPACES: u32 = 0x7E02_0000;
const NAMESPACES_AND_TIME: u32 = NAMESPACES | 0x80;
const ALL: u32 = u32::MAX;

const UNIX: u32 = libc::AF_UNIX as u32;
const INET: u32 = libc::AF_INET as u32;
const INET6: u32 = libc::AF_INET6 as u32;
const NETLINK: u32 = libc::AF_NETLINK as u32;

const fn never(call: c_long, errno: i32) -> Rule {
    Rule { call, when: &[], verdict: Verdict::Errno(errno) }
}

const fn when(call: c_long, when: &'static [Argument], errno: i32) -> Rule {
    Rule { call, when, verdict: Verdict::Errno(errno) }
}

const fn any_bit(index: u8, mask: u32) -> Argument {
    Argument { index, mask, values: &[0], among: false }
}

const fn one_of(index: u8, values: &'static [u32]) -> Argument {
    Argument { index, mask: ALL, values, among: true }
}

const fn none_of(index: u8, values: &'static [u32]) -> Argument {
    Argument { index, mask: ALL, values, among: false }
}

const RULES: &[Rule] = &[
    // Namespaces: a user namespace gives capabilities over a large part of the kernel. clone3 has its
    // flags behind a pointer; without it, libc falls back to clone.
    when(libc::SYS_clone, &[any_bit(0, NAMESPACES)], EPERM),
    never(libc::SYS_clone3, ENOSYS),
    when(libc::SYS_unshare, &[any_bit(0, NAMESPACES_AND_TIME)], EPERM),
    never(libc::SYS_setns, EPERM),
    // Mounts and roots.
    never(libc::SYS_mount, EPERM),
    never(libc::SYS_umount2, EPERM),
    never(libc::SYS_pivot_root, EPERM),
    never(libc::SYS_chroot, EPERM),
    never(libc::SYS_move_mount, EPERM),
    never(libc::SYS_open_tree, EPERM),
    never(libc::SYS_fsopen, EPERM),
    never(libc::SYS_fsconfig, EPERM),
    never(libc::SYS_fsmount, EPERM),
    never(libc::SYS_fspick, EPERM),
    never(libc::SYS_mount_setattr, EPERM),
    never(libc::SYS_quotactl, EPERM),
    never(libc::SYS_quotactl_fd, EPERM),
    never(libc::SYS_swapon, EPERM),
    never(libc::SYS_swapoff, EPERM),
    // Files by handle pass over directory permissions.
    never(libc::SYS_open_by_handle_at, EPERM),
    never(libc::SYS_name_to_handle_at, EPERM),
    // Code in the kernel.
    never(libc::SYS_init_module, EPERM),
    never(libc::SYS_finit_module, EPERM),
    never(libc::SYS_delete_module, EPERM),
    never(libc::SYS_kexec_load, EPERM),
    never(libc::SYS_kexec_file_load, EPERM),
    never(libc::SYS_bpf, EPERM),
    never(libc::SYS_perf_event_open, EPERM),
    // Large attack surfaces that programs do without.
    never(libc::SYS_io_uring_setup, ENOSYS),
    never(libc::SYS_io_uring_enter, ENOSYS),
    never(libc::SYS_io_uring_register, ENOSYS),
    never(libc::SYS_userfaultfd, EPERM),
    never(libc::SYS_add_key, EPERM),
    never(libc::SYS_request_key, EPERM),
    never(libc::SYS_keyctl, EPERM),
    never(libc::SYS_fanotify_init, EPERM),
    never(libc::SYS_fanotify_mark, EPERM),
    never(libc::SYS_lookup_dcookie, EPERM),
    never(libc::SYS_modify_ldt, EPERM),
    never(libc::SYS_vmsplice, EPERM),
    // Files that exist nowhere can't be judged before they are executed (exec enforcement); programs
    // use a temporary file instead.
    never(libc::SYS_memfd_create, ENOSYS),
    never(libc::SYS_memfd_secret, ENOSYS),
    // Other processes' inside. No tracing at all: what runs must be what was started.
    never(libc::SYS_ptrace, EPERM),
    never(libc::SYS_process_vm_readv, EPERM),
    never(libc::SYS_process_vm_writev, EPERM),
    never(libc::SYS_process_madvise, EPERM),
    never(libc::SYS_pidfd_getfd, EPERM),
    never(libc::SYS_kcmp, EPERM),
    // The machine.
    never(libc::SYS_reboot, EPERM),
    never(libc::SYS_iopl, EPERM),
    never(libc::SYS_ioperm, EPERM),
    never(libc::SYS_settimeofday, EPERM),
    never(libc::SYS_clock_settime, EPERM),
    never(libc::SYS_clock_adjtime, EPERM),
    never(libc::SYS_adjtimex, EPERM),
    never(libc::SYS_sethostname, EPERM),
    never(libc::SYS_setdomainname, EPERM),
    never(libc::SYS_syslog, EPERM),
    never(libc::SYS_acct, EPERM),
    never(libc::SYS_vhangup, EPERM),
    never(libc::SYS_uselib, ENOSYS),
    never(libc::SYS__sysctl, ENOSYS),
    never(libc::SYS_ustat, ENOSYS),
    never(libc::SYS_sysfs, ENOSYS),
    // READ_IMPLIES_EXEC and old ABIs. Asking (all ones), the default, and no address randomisation,
    // which some builds use, are left.
    when(libc::SYS_personality, &[none_of(0, &[ALL, 0, 0x0004_0000])], EPERM),
    // Typing into a terminal, and its console twin.
    when(libc::SYS_ioctl, &[one_of(1, &[0x5412, 0x541C])], EPERM),
    // Sockets: the loopback's protocols, local ones, and reading interfaces and routes (libc's
    // getifaddrs and many runtimes do). AF_PACKET, AF_VSOCK, AF_ALG, AF_XDP and the rest are not there.
    when(libc::SYS_socket, &[none_of(0, &[UNIX, INET, INET6, NETLINK])], EAFNOSUPPORT),
    when(libc::SYS_socket, &[one_of(0, &[NETLINK]), any_bit(2, ALL)], EAFNOSUPPORT),
    when(
        libc::SYS_socket,
        &[
            one_of(0, &[INET, INET6]),
            Argument {
                index: 1,
                mask: 0xf,
                values: &[libc::SOCK_STREAM as u32, libc::SOCK_DGRAM as u32],
                among: false,
            },
        ],
        EPERM,
    ),
    when(libc::SYS_socketpair, &[none_of(0, &[UNIX])], EAFNOSUPPORT),
];

/// The table as a filter.
pub(crate) fn filter() -> Result<Filter, FilterError> {
    Filter::compile(NEWEST, RULES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_compiles_and_names_each_unconditional_call_once() {
        assert!(filter().is_ok());
        let mut calls: Vec<c_long> =
            RULES.iter().filter(|rule| rule.when.is_empty()).map(|rule| rule.call).collect();
        let count = calls.len();
        calls.sort_unstable();
        calls.dedup();
        assert_eq!(calls.len(), count);
        assert!(RULES.iter().all(|rule| (0..=NEWEST).contains(&rule.call)));
    }
}
