//! The system calls that a VMM never needs.
//!
//! QEMU's own filter (`-sandbox`) is installed by the program that it is to
//! hold, late in its start. This one is in force before the first instruction of
//! the program, on all its threads. It names what is refused and not what is
//! allowed: what a VMM calls changes with its version and the C library's.

use crate::guest::{Argument, Filter, FilterError, Rule, Verdict};

/// `mseal`: newer calls are not implemented, as far as the VMM can tell.
const NEWEST: libc::c_long = 462;

const NAMESPACE_FLAGS: u32 = (libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP) as u32;

/// Kernel surface without use for a VMM: namespaces and mounts, other processes'
/// memory, loadable code, keys, clocks, and the interfaces that most local
/// exploits of recent years went through.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_syslog,
    libc::SYS_quotactl,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_personality,
    libc::SYS_vhangup,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_uselib,
    // An ordinary user's VMM owns the same files as its caller: what it was given to read it must not be able to make
    // writable.
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_chown,
    libc::SYS_fchown,
    libc::SYS_lchown,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
];

/// `fchmodat2`, of Linux 6.6.
const FCHMODAT2: libc::c_long = 452;

/// What opens a file by its name: asked for while the VMM starts, and not to be had after.
const OPENS: [libc::c_long; 4] = [libc::SYS_open, libc::SYS_openat, libc::SYS_openat2, libc::SYS_creat];

/// Compiles the table.
///
/// # Errors
/// The table is wrong: a mistake of ours.
pub fn vmm_filter() -> Result<Filter, FilterError> {
    let eperm = Verdict::Errno(libc::EPERM);
    let mut rules: Vec<Rule> = REFUSED.iter().map(|&call| Rule { call, when: &[], verdict: eperm }).collect();
    // Any socket that is not local.
    rules.push(Rule {
        call: libc::SYS_socket,
        when: &[Argument { index: 0, mask: !0, values: &[libc::AF_UNIX as u32], among: false }],
        verdict: Verdict::Errno(libc::EAFNOSUPPORT),
    });
    // A process or thread, but no namespace. The flags of clone3 can't be seen by a filter; the C library falls back.
    rules.push(Rule {
        call: libc::SYS_clone,
        when: &[Argument { index: 0, mask: NAMESPACE_FLAGS, values: &[0], among: false }],
        verdict: eperm,
    });
    rules.extend(OPENS.map(|call| Rule { call, when: &[], verdict: Verdict::Ask }));
    rules.push(Rule { call: libc::SYS_clone3, when: &[], verdict: Verdict::Errno(libc::ENOSYS) });
    Filter::compile(NEWEST, &rules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{JailPlan, OpenService, spawn_jailed};
    use std::process::Command;

    #[test]
    fn the_filter_holds_what_it_names_and_lets_a_program_run() {
        // `unshare -U` succeeds or fails by the host's settings without the filter; with it, it always fails.
        let filtered = |argv: &[&str]| {
            let mut command = Command::new(argv[0]);
            command.args(&argv[1..]);
            let plan = JailPlan { filter: Some(vmm_filter().unwrap()), ..JailPlan::default() };
            let mut child = spawn_jailed(command, plan).unwrap();
            let service = OpenService::start(child.opens.take().unwrap(), None).unwrap();
            let status = child.wait().unwrap();
            service.end();
            status
        };
        assert!(filtered(&["/bin/sh", "-c", "true | cat"]).success());
        assert!(!filtered(&["/usr/bin/unshare", "--user", "true"]).success());
        let own = tempfile::NamedTempFile::new().unwrap();
        let chmod = ["/bin/chmod", "400", own.path().to_str().unwrap()];
        assert!(Command::new(chmod[0]).args(&chmod[1..]).status().unwrap().success(), "the control");
        assert!(!filtered(&chmod).success());
    }
}
