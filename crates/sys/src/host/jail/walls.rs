//! The way in: from the forked process to the child behind its walls.
//!
//! Runs between fork and exec in a process with one thread: it uses what [`Walls::prepare`] made before the fork,
//! allocates nothing and takes no lock.

use super::calls::{check, close, pipe, read_some, send_descriptor, write_all, write_file};
use super::root::{Root, c_string};
use super::{Identity, JailPlan, Namespace, Stage};
use crate::guest::Filter;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// The plan in a form that needs no allocation after the fork.
pub(super) struct Walls {
    tell: OwnedFd,
    /// Through which the filter's listener goes to the owner.
    hand: OwnedFd,
    owner: libc::pid_t,
    user_namespace: Option<Maps>,
    namespaces: libc::c_int,
    identity: Option<Identity>,
    root: Option<Root>,
    limits: Vec<(u32, u64)>,
    filter: Option<Filter>,
    cgroups: Vec<OwnedFd>,
    inherit: Vec<OwnedFd>,
    rehearsal: bool,
}

struct Maps {
    uid: CString,
    gid: CString,
}

const HOST_NAME: &[u8] = b"hotcell";

impl Walls {
    pub(super) fn prepare(plan: JailPlan, tell: OwnedFd, hand: OwnedFd) -> io::Result<Walls> {
        let wants = |kind| plan.namespaces.contains(&kind);
        let user_namespace = if wants(Namespace::User) {
            let (uid, gid) = match &plan.identity {
                Some(identity) => (identity.uid, identity.gid),
                None => (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
            };
            let map = |id: u32| c_string(OsStr::new(&format!("{id} {id} 1")));
            Some(Maps { uid: map(uid)?, gid: map(gid)? })
        } else {
            None
        };
        let namespaces = plan
            .namespaces
            .iter()
            .filter(|kind| **kind != Namespace::User)
            .fold(0, |flags, kind| flags | kind.flag());
        let root = if wants(Namespace::Mount) { Some(Root::prepare(&plan.places)?) } else { None };
        Ok(Walls {
            tell,
            hand,
            owner: std::process::id() as libc::pid_t,
            user_namespace,
            namespaces,
            identity: plan.identity,
            root,
            limits: plan.limits,
            filter: plan.filter,
            cgroups: plan.cgroups,
            inherit: plan.inherit,
            rehearsal: plan.rehearsal,
        })
    }

    /// From the forked process to the child in its jail; in the middle process it does not return.
    pub(super) fn enter(&self) -> io::Result<()> {
        self.stage(Stage::Descriptors);
        self.choose_descriptors()?;
        self.stage(Stage::Cgroups);
        for entrance in &self.cgroups {
            write_all(entrance.as_raw_fd(), b"0")?;
        }
        if let Some(maps) = &self.user_namespace {
            self.stage(Stage::Identity);
            // Where root may not make namespaces, it can still become somebody who may.
            self.become_identity()?;
            self.stage(Stage::UserNamespace);
            // SAFETY: plain system calls. Changing the user made this process's /proc files root's.
            check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) }.into())?;
            // SAFETY: as above; this process has one thread.
            check(unsafe { libc::unshare(libc::CLONE_NEWUSER) }.into())?;
            write_file(c"/proc/self/setgroups", b"deny")?;
            write_file(c"/proc/self/uid_map", maps.uid.as_bytes())?;
            write_file(c"/proc/self/gid_map", maps.gid.as_bytes())?;
        }
        self.stage(Stage::Namespaces);
        // SAFETY: a plain system call; this process has one thread.
        check(unsafe { libc::unshare(self.namespaces) }.into())?;
        self.stage(Stage::Fork);
        let (armed, arm) = pipe()?;
        let (go, let_go) = pipe()?;
        // SAFETY: without CLONE_VM the child has its own copy of everything and goes on on its copy of this stack.
        // CLONE_PARENT makes it a child of this process's parent, the owner's thread.
        let child = check(unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_PARENT, 0, 0, 0, 0) })?;
        if child != 0 {
            self.middle(child as i32, [armed, arm, go, let_go]);
        }
        close(armed);
        close(let_go);
        self.inside()?;
        self.stage(Stage::Owner);
        // Changing the user clears the death signal, so it is set after.
        // SAFETY: a plain system call.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) }.into())?;
        write_all(arm, b"a")?;
        let mut byte = [0];
        if read_some(go, &mut byte)? != 1 {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        self.stage(Stage::Filter);
        match &self.filter {
            Some(filter) if filter.asks() => {
                let listener = filter.install_asking()?;
                send_descriptor(self.hand.as_raw_fd(), listener)?;
                close(listener);
            }
            Some(filter) => filter.install()?,
            None => {}
        }
        self.stage(Stage::Execute);
        if self.rehearsal {
            return Err(io::Error::from_raw_os_error(libc::ECANCELED));
        }
        Ok(())
    }

    /// Whoever started Hotcell may have left files open in it that are none of the child's business.
    fn choose_descriptors(&self) -> io::Result<()> {
        // SAFETY: plain system calls; the descriptors are open for as long as the plan exists.
        unsafe {
            check(libc::syscall(
                libc::SYS_close_range,
                3 as libc::c_ulong,
                libc::c_uint::MAX as libc::c_ulong,
                libc::CLOSE_RANGE_CLOEXEC as libc::c_ulong,
            ))?;
            for descriptor in &self.inherit {
                check(libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFD, 0).into())?;
            }
        }
        Ok(())
    }

    /// Tells the owner the child's pid; lets the child go once it has armed its
    /// death signal and the owner is still this process's parent.
    fn middle(&self, child: i32, [armed, arm, go, let_go]: [RawFd; 4]) -> ! {
        self.record(b'p', child);
        close(arm);
        close(go);
        let mut byte = [0];
        let is_armed = matches!(read_some(armed, &mut byte), Ok(1));
        // SAFETY: plain system calls; `_exit` runs no handlers.
        unsafe {
            if is_armed && libc::getppid() == self.owner {
                let _ = write_all(let_go, b"g");
            }
            libc::_exit(0)
        }
    }

    /// What the child does to itself.
    fn inside(&self) -> io::Result<()> {
        if let Some(root) = &self.root {
            self.stage(Stage::Root);
            root.enter()?;
        }
        if self.namespaces & libc::CLONE_NEWUTS != 0 {
            // SAFETY: the name lives through the call.
            check(unsafe { libc::sethostname(HOST_NAME.as_ptr().cast(), HOST_NAME.len()) }.into())?;
        }
        self.stage(Stage::Privileges);
        drop_bounding_set()?;
        if self.user_namespace.is_none() {
            self.stage(Stage::Identity);
            self.become_identity()?;
            self.stage(Stage::Privileges);
        }
        drop_capabilities()?;
        // SAFETY: a plain system call.
        check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
        self.stage(Stage::Limits);
        for &(resource, value) in &self.limits {
            let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: `limit` lives through the calls.
            unsafe {
                check(libc::getrlimit64(resource as _, &raw mut limit).into())?;
                // Nobody without privileges can raise a hard limit, and a lower one holds no less.
                let value = value.min(limit.rlim_max);
                limit = libc::rlimit64 { rlim_cur: value, rlim_max: value };
                check(libc::setrlimit64(resource as _, &raw const limit).into())?;
            }
        }
        Ok(())
    }

    fn become_identity(&self) -> io::Result<()> {
        let Some(Identity { uid, gid, groups }) = &self.identity else { return Ok(()) };
        // SAFETY: `groups` lives through the call. The raw system calls change this thread, the only one.
        unsafe {
            check(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()))?;
            check(libc::syscall(libc::SYS_setresgid, *gid, *gid, *gid))?;
            check(libc::syscall(libc::SYS_setresuid, *uid, *uid, *uid))?;
        }
        Ok(())
    }

    fn stage(&self, stage: Stage) {
        self.record(b's', stage as i32);
    }

    fn record(&self, tag: u8, value: i32) {
        let [a, b, c, d] = value.to_le_bytes();
        let _ = write_all(self.tell.as_raw_fd(), &[tag, a, b, c, d]);
    }
}

/// Not even a setuid program could get one back. Where it may not be dropped there is nothing to drop.
fn drop_bounding_set() -> io::Result<()> {
    for capability in 0..64 {
        // SAFETY: plain system calls.
        unsafe {
            if libc::prctl(libc::PR_CAPBSET_READ, capability, 0, 0, 0) != 1 {
                continue;
            }
            if libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) != 0 {
                let error = io::Error::last_os_error();
                // Without CAP_SETPCAP; no-new-privileges then makes the set meaningless.
                return if error.raw_os_error() == Some(libc::EPERM) { Ok(()) } else { Err(error) };
            }
        }
    }
    Ok(())
}

fn drop_capabilities() -> io::Result<()> {
    /// `_LINUX_CAPABILITY_VERSION_3`, for this process; two sets of three words.
    const HEADER: [u32; 2] = [0x2008_0522, 0];
    const NONE: [u32; 6] = [0; 6];
    // SAFETY: header and data have the kernel's layout for version 3 and live through the call, which reads them (a
    // wrong version would be written to the header: this one is every kernel's since 2.6.26, and the copy is ours).
    unsafe {
        let header = HEADER;
        check(libc::syscall(libc::SYS_capset, header.as_ptr(), NONE.as_ptr()))?;
        check(
            libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as libc::c_ulong, 0, 0, 0)
                .into(),
        )?;
    }
    Ok(())
}
