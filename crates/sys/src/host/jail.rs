//! A child behind walls: namespaces, a root of its own, an unprivileged user, no
//! capabilities, a system call filter, limits, cgroups.
//!
//! ```text
//!  owner ──fork──▶ middle: cgroups, [user namespace], namespaces ──clone(CLONE_PARENT)──▶ child, PID 1
//!    ▲                │ "child has armed itself"? owner still there? "go"                   │ mounts, user,
//!    └──── pid ───────┘ exits                                          handshake, filter, exec ◀──┘
//! ```
//! What it guarantees: the child is a *direct* child of the calling thread (its
//! exit status, its pidfd and the parent-death signal need no helper process),
//! the PID 1 of its namespace (nothing in the jail outlives it), and gets SIGKILL
//! when the calling thread ends, also when that happens while it starts. Either
//! all that the plan asks for is in force when the program begins, or nothing is
//! executed and the error names the stage.
//! What it does not: it chooses nothing. The plan is the caller's.
//! Who may call: `hotcell-vm`.

use crate::guest::Filter;
use crate::host::opens::Opens;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::ffi::{CString, OsStr};
use std::io::{self, PipeReader, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, ChildStdout, Command};
use std::sync::atomic::{AtomicI32, Ordering};

/// A kind of namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Namespace {
    /// Users and capabilities.
    User,
    /// Mounts.
    Mount,
    /// Network devices, addresses, sockets by name.
    Net,
    /// Processes.
    Pid,
    /// System V and POSIX IPC.
    Ipc,
    /// Host name.
    Uts,
    /// View of the cgroup tree.
    Cgroup,
}

impl Namespace {
    /// All kinds.
    pub const ALL: [Namespace; 7] = [
        Namespace::User,
        Namespace::Mount,
        Namespace::Net,
        Namespace::Pid,
        Namespace::Ipc,
        Namespace::Uts,
        Namespace::Cgroup,
    ];

    /// Its name in `/proc/PID/ns`, except that `mnt` is `mount` for people.
    pub const fn as_str(self) -> &'static str {
        match self {
            Namespace::User => "user",
            Namespace::Mount => "mount",
            Namespace::Net => "net",
            Namespace::Pid => "pid",
            Namespace::Ipc => "ipc",
            Namespace::Uts => "uts",
            Namespace::Cgroup => "cgroup",
        }
    }

    const fn flag(self) -> libc::c_int {
        match self {
            Namespace::User => libc::CLONE_NEWUSER,
            Namespace::Mount => libc::CLONE_NEWNS,
            Namespace::Net => libc::CLONE_NEWNET,
            Namespace::Pid => libc::CLONE_NEWPID,
            Namespace::Ipc => libc::CLONE_NEWIPC,
            Namespace::Uts => libc::CLONE_NEWUTS,
            Namespace::Cgroup => libc::CLONE_NEWCGROUP,
        }
    }
}

/// Something of the host that the jail's root shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A folder with all below it, read-only, without devices and setuid.
    Folder(PathBuf),
    /// A file, read-only.
    File(PathBuf),
    /// A device node.
    Device(PathBuf),
    /// A symbolic link.
    Link {
        /// Where.
        at: PathBuf,
        /// To what.
        to: PathBuf,
    },
}

/// Who the child is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

/// What is asked for.
#[derive(Debug, Default)]
pub struct JailPlan {
    /// New namespaces. [`Namespace::User`] maps the child's user and group to themselves and nobody else.
    pub namespaces: Vec<Namespace>,
    /// Who the child is; `None`: the caller.
    pub identity: Option<Identity>,
    /// What the root shows, beside a `/proc` of the jail's own processes. Used with [`Namespace::Mount`] only.
    pub places: Vec<Place>,
    /// Resource limits, soft and hard alike: `RLIMIT_*` and value.
    pub limits: Vec<(u32, u64)>,
    /// System call filter.
    pub filter: Option<Filter>,
    /// `cgroup.procs` files, open for writing, that the child enters.
    pub cgroups: Vec<OwnedFd>,
    /// Open files that the child gets under their own numbers. Nothing else is inherited, beside its standard streams.
    pub inherit: Vec<OwnedFd>,
    /// Does everything but execute the program.
    pub rehearsal: bool,
}

/// The stages of the way in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Nothing was begun.
    Fork = 1,
    /// Choosing the open files that it gets.
    Descriptors,
    /// Entering the cgroups.
    Cgroups,
    /// Making the user namespace.
    UserNamespace,
    /// Making the other namespaces.
    Namespaces,
    /// Making the root.
    Root,
    /// Becoming the unprivileged user.
    Identity,
    /// Giving up capabilities and new privileges.
    Privileges,
    /// Setting limits.
    Limits,
    /// Arming the death signal; the owner may have died.
    Owner,
    /// Installing the filter.
    Filter,
    /// Executing the program.
    Execute,
}

impl Stage {
    const ALL: [Stage; 12] = [
        Stage::Fork,
        Stage::Descriptors,
        Stage::Cgroups,
        Stage::UserNamespace,
        Stage::Namespaces,
        Stage::Root,
        Stage::Identity,
        Stage::Privileges,
        Stage::Limits,
        Stage::Owner,
        Stage::Filter,
        Stage::Execute,
    ];

    /// In words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Stage::Fork => "starting a process",
            Stage::Descriptors => "choosing its open files",
            Stage::Cgroups => "entering the cgroups",
            Stage::UserNamespace => "making a user namespace",
            Stage::Namespaces => "making namespaces",
            Stage::Root => "making a root of its own",
            Stage::Identity => "becoming an unprivileged user",
            Stage::Privileges => "giving up privileges",
            Stage::Limits => "setting limits",
            Stage::Owner => "tying it to its owner",
            Stage::Filter => "installing the system call filter",
            Stage::Execute => "executing the program",
        }
    }
}

/// The child was not started.
#[derive(Debug)]
pub struct JailError {
    /// Where it ended.
    pub stage: Stage,
    /// The kernel's word.
    pub source: io::Error,
}

impl std::fmt::Display for JailError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.stage.as_str(), self.source)
    }
}

impl std::error::Error for JailError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// A child in its jail. Whoever drops it without [`JailedChild::wait`] leaves a zombie.
#[derive(Debug)]
pub struct JailedChild {
    /// Its number in the caller's pid namespace.
    pub pid: i32,
    /// Refers to this very process; readable once it is dead.
    pub pidfd: OwnedFd,
    /// Its output, where the command asked for a pipe.
    pub stdout: Option<ChildStdout>,
    /// Its messages, where the command asked for a pipe.
    pub stderr: Option<ChildStderr>,
    /// Its opens, where the filter asks for them: it waits at the first one until somebody answers.
    pub opens: Option<Opens>,
}

/// Starts the command in a jail, as a child of the calling thread.
///
/// # Errors
/// Nothing was executed and no process is left.
pub fn spawn_jailed(mut command: Command, plan: JailPlan) -> Result<JailedChild, JailError> {
    let failed = |stage| move |source: io::Error| JailError { stage, source };
    let (mut told, tell) = io::pipe().map_err(failed(Stage::Fork))?;
    let (handed, hand) = UnixStream::pair().map_err(failed(Stage::Fork))?;
    let asks = plan.filter.as_ref().is_some_and(Filter::asks);
    let walls = Walls::prepare(plan, tell.into(), hand.into()).map_err(failed(Stage::Fork))?;
    // SAFETY: `enter` runs between fork and exec, in a process with one thread. It makes system calls on memory that
    // was made before the fork, allocates nothing, takes no lock, and returns in the child to be, or not at all.
    unsafe { command.pre_exec(move || walls.enter()) };
    let spawned = command.spawn();
    drop(command);
    let (pid, stage) = read_records(&mut told);
    match spawned {
        Ok(mut middle) => {
            let pipes = (middle.stdout.take(), middle.stderr.take());
            let _ = middle.wait();
            let held = pid.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound)).and_then(|pid| {
                let raw = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?;
                // Nobody waits for it but us, so the number is its own until we do.
                let pidfd = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty())?;
                let opens = if asks { Some(Opens::new(receive_descriptor(&handed)?)) } else { None };
                Ok((pid, pidfd, opens))
            });
            match held {
                Ok((pid, pidfd, opens)) => {
                    Ok(JailedChild { pid, pidfd, stdout: pipes.0, stderr: pipes.1, opens })
                }
                Err(source) => {
                    if let Some(pid) = pid {
                        end_child(pid);
                    }
                    Err(JailError { stage: Stage::Owner, source })
                }
            }
        }
        Err(source) => {
            if let Some(pid) = pid {
                end_child(pid);
            }
            Err(JailError { stage, source })
        }
    }
}

/// Tries the plan without executing anything.
///
/// # Errors
/// The host can't give what was asked for.
pub fn rehearse(program: &Path, plan: JailPlan) -> Result<(), JailError> {
    let mut command = Command::new(program);
    command.env_clear().current_dir("/");
    match spawn_jailed(command, JailPlan { rehearsal: true, ..plan }) {
        Err(JailError { stage: Stage::Execute, source })
            if source.raw_os_error() == Some(libc::ECANCELED) =>
        {
            Ok(())
        }
        Err(error) => Err(error),
        Ok(child) => {
            end_child(child.pid);
            Err(JailError { stage: Stage::Execute, source: io::ErrorKind::Other.into() })
        }
    }
}

impl JailedChild {
    /// Waits for its end; the status as `waitpid` gives it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self) -> io::Result<std::process::ExitStatus> {
        let mut status = 0;
        loop {
            // SAFETY: `status` is a valid place for one int.
            let result = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
            if result == self.pid {
                return Ok(std::os::unix::process::ExitStatusExt::from_raw(status));
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

/// Kills and reaps a child of ours that never became a jailed program.
fn end_child(pid: i32) {
    // SAFETY: plain system calls; the number is a child's that nobody has waited for, so it names that child.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
}

const RECORD: usize = 5;

/// What the way in told: the child's pid, and the stage that it was in last.
fn read_records(told: &mut PipeReader) -> (Option<i32>, Stage) {
    let mut bytes = [0; RECORD * 32];
    let count = told.read(&mut bytes).unwrap_or(0);
    let (mut pid, mut stage) = (None, Stage::Fork);
    for record in bytes.get(..count).unwrap_or_default().chunks_exact(RECORD) {
        let Some((&tag, value)) = record.split_first() else { continue };
        let Ok(value) = <[u8; 4]>::try_from(value) else { continue };
        let value = i32::from_le_bytes(value);
        match tag {
            b'p' => pid = Some(value),
            _ => stage = Stage::ALL.into_iter().find(|stage| *stage as i32 == value).unwrap_or(stage),
        }
    }
    (pid, stage)
}

/// The plan in a form that needs no allocation after the fork.
struct Walls {
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

struct Root {
    /// Folders to make, parents first.
    folders: Vec<CString>,
    mounts: Vec<Mount>,
    links: Vec<(CString, CString)>,
}

struct Mount {
    from: CString,
    /// Relative to the new root.
    to: CString,
    folder: bool,
    attributes: u64,
    /// Its detached mount, once it is opened.
    tree: AtomicI32,
}

/// A folder that every host has; the new root is mounted over it in the jail's own namespace.
const BASE: &std::ffi::CStr = c"/tmp";
const HOST_NAME: &[u8] = b"hotcell";

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

impl Root {
    fn prepare(places: &[Place]) -> io::Result<Root> {
        let mut folders: Vec<PathBuf> = vec!["proc".into()];
        let mut root = Root { folders: Vec::new(), mounts: Vec::new(), links: Vec::new() };
        for place in places {
            let at = match place {
                Place::Folder(path) | Place::File(path) | Place::Device(path) => path,
                Place::Link { at, .. } => at,
            };
            let inside = at.strip_prefix("/").map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            let mut parents: Vec<&Path> = inside.ancestors().skip(1).collect();
            parents.pop();
            folders.extend(parents.into_iter().rev().map(Path::to_owned));
            let common = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID;
            let attributes = match place {
                Place::Folder(_) => common | libc::MOUNT_ATTR_NODEV,
                Place::File(_) => common | libc::MOUNT_ATTR_NODEV,
                Place::Device(_) => common | libc::MOUNT_ATTR_NOEXEC,
                Place::Link { to, .. } => {
                    root.links.push((c_string(to.as_os_str())?, c_string(inside.as_os_str())?));
                    continue;
                }
            };
            let folder = matches!(place, Place::Folder(_));
            if folder {
                folders.push(inside.to_owned());
            }
            root.mounts.push(Mount {
                from: c_string(at.as_os_str())?,
                to: c_string(inside.as_os_str())?,
                folder,
                attributes,
                tree: AtomicI32::new(-1),
            });
        }
        let mut made = std::collections::BTreeSet::new();
        folders.retain(|folder| made.insert(folder.clone()));
        root.folders =
            folders.iter().map(|folder| c_string(folder.as_os_str())).collect::<io::Result<_>>()?;
        Ok(root)
    }
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Walls {
    fn prepare(plan: JailPlan, tell: OwnedFd, hand: OwnedFd) -> io::Result<Walls> {
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
    fn enter(&self) -> io::Result<()> {
        self.stage(Stage::Descriptors);
        self.choose_descriptors()?;
        self.stage(Stage::Cgroups);
        for procs in &self.cgroups {
            write_all(procs.as_raw_fd(), b"0")?;
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
            let limit = libc::rlimit64 { rlim_cur: value, rlim_max: value };
            // SAFETY: `limit` lives through the call.
            check(unsafe { libc::setrlimit64(resource as _, &raw const limit) }.into())?;
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

impl Root {
    fn enter(&self) -> io::Result<()> {
        let none = std::ptr::null();
        // SAFETY: every pointer is to a string that lives through its call; nothing is written through them.
        unsafe {
            libc::umask(0o022);
            let private = libc::MS_REC | libc::MS_PRIVATE;
            check(libc::mount(none, c"/".as_ptr(), none, private, none.cast()).into())?;
            // All are opened before anything is hidden by the new root.
            for mount in &self.mounts {
                mount.open()?;
            }
            let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
            let options = c"size=256k,nr_inodes=256,mode=755";
            let tmpfs = c"tmpfs".as_ptr();
            check(libc::mount(tmpfs, BASE.as_ptr(), tmpfs, flags, options.as_ptr().cast()).into())?;
            check(libc::chdir(BASE.as_ptr()).into())?;
            for folder in &self.folders {
                check(libc::mkdir(folder.as_ptr(), 0o755).into())?;
            }
            for (to, at) in &self.links {
                check(libc::symlink(to.as_ptr(), at.as_ptr()).into())?;
            }
            for mount in &self.mounts {
                mount.attach()?;
            }
            let proc = c"proc".as_ptr();
            let options = c"subset=pid";
            let flags = flags | libc::MS_RDONLY;
            check(libc::mount(proc, proc, proc, flags, options.as_ptr().cast()).into())?;
            // The old root is stacked on the new one, and then let go of.
            check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()))?;
            check(libc::umount2(c".".as_ptr(), libc::MNT_DETACH).into())?;
            check(libc::chdir(c"/".as_ptr()).into())?;
            let flags = flags | libc::MS_REMOUNT | libc::MS_BIND;
            check(libc::mount(none, c"/".as_ptr(), none, flags, none.cast()).into())?;
        }
        Ok(())
    }
}

impl Mount {
    fn open(&self) -> io::Result<()> {
        let attributes =
            libc::mount_attr { attr_set: self.attributes, attr_clr: 0, propagation: 0, userns_fd: 0 };
        let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_RECURSIVE as libc::c_uint;
        // SAFETY: the path and the attributes live through the calls.
        unsafe {
            let tree = check(libc::syscall(
                libc::SYS_open_tree,
                libc::AT_FDCWD,
                self.from.as_ptr(),
                flags as libc::c_ulong,
            ))?;
            check(libc::syscall(
                libc::SYS_mount_setattr,
                tree,
                c"".as_ptr(),
                (libc::AT_EMPTY_PATH | libc::AT_RECURSIVE) as libc::c_ulong,
                &raw const attributes,
                size_of::<libc::mount_attr>(),
            ))?;
            self.tree.store(tree as RawFd, Ordering::Relaxed);
        }
        Ok(())
    }

    fn attach(&self) -> io::Result<()> {
        /// `MOVE_MOUNT_F_EMPTY_PATH`.
        const FROM_DESCRIPTOR: libc::c_ulong = 4;
        // SAFETY: the paths live through the calls; the descriptors are this function's.
        unsafe {
            if !self.folder {
                let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY | libc::O_CLOEXEC;
                let file = check(libc::open(self.to.as_ptr(), flags, 0o444).into())?;
                libc::close(file as RawFd);
            }
            let tree = self.tree.load(Ordering::Relaxed);
            check(libc::syscall(
                libc::SYS_move_mount,
                tree,
                c"".as_ptr(),
                libc::AT_FDCWD,
                self.to.as_ptr(),
                FROM_DESCRIPTOR,
            ))?;
            libc::close(tree);
        }
        Ok(())
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

/// Sends one descriptor; allocates nothing.
fn send_descriptor(socket: RawFd, descriptor: RawFd) -> io::Result<()> {
    /// A control message with one descriptor, by cmsg(3).
    #[repr(C, align(8))]
    struct Control {
        header: libc::cmsghdr,
        descriptor: RawFd,
        padding: u32,
    }
    let control = Control {
        header: libc::cmsghdr {
            cmsg_len: size_of::<libc::cmsghdr>() + size_of::<RawFd>(),
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_RIGHTS,
        },
        descriptor,
        padding: 0,
    };
    let byte = [b'l'];
    let part = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
    // SAFETY: `msghdr` is plain data for which all zeroes is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = (&raw const part).cast_mut();
    message.msg_iovlen = 1;
    message.msg_control = (&raw const control).cast_mut().cast();
    message.msg_controllen = size_of::<Control>();
    // SAFETY: the message and all that it names live through the call, which reads them only.
    let sent = check(unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) } as _)?;
    if sent == 1 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) }
}

/// Takes the descriptor that the child has sent before it executed anything.
fn receive_descriptor(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    recvmsg(socket, &mut [io::IoSliceMut::new(&mut byte)], &mut control, flags)?;
    let mut received = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    received.next().and_then(|mut rights| rights.next()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn pipe() -> io::Result<(RawFd, RawFd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` is a valid place for two ints.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }.into())?;
    let [read, write] = ends;
    Ok((read, write))
}

fn close(descriptor: RawFd) {
    // SAFETY: called on descriptors that `pipe` made and nothing uses after.
    drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
}

fn write_all(descriptor: RawFd, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: the bytes live through the call.
    let count = check(unsafe { libc::write(descriptor, bytes.as_ptr().cast(), bytes.len()) } as _)?;
    if count as usize == bytes.len() { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) }
}

fn read_some(descriptor: RawFd, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        // SAFETY: `bytes` is a valid place for its length.
        let result = check(unsafe { libc::read(descriptor, bytes.as_mut_ptr().cast(), bytes.len()) } as _);
        match result {
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            other => return other.map(|count| count as usize),
        }
    }
}

fn write_file(path: &std::ffi::CStr, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: the path lives through the call.
    let file = check(unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) }.into())?;
    let written = write_all(file as RawFd, bytes);
    close(file as RawFd);
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn parents_come_first_and_once() {
        let places = [
            Place::Folder("/usr".into()),
            Place::Device("/dev/null".into()),
            Place::Device("/dev/zero".into()),
            Place::File("/etc/ld.so.cache".into()),
            Place::Folder("/opt/a/b".into()),
        ];
        let root = Root::prepare(&places).unwrap();
        let folders: Vec<&str> = root.folders.iter().map(|name| name.to_str().unwrap()).collect();
        assert_eq!(folders, ["proc", "usr", "dev", "etc", "opt", "opt/a", "opt/a/b"]);
    }

    #[test]
    fn a_child_without_walls_is_a_direct_child_with_no_new_privileges() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "grep NoNewPrivs /proc/self/status; exit 7"]).stdout(Stdio::piped());
        let mut child = spawn_jailed(command, JailPlan::default()).unwrap();
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said.trim(), "NoNewPrivs:\t1");
        assert_eq!(child.wait().unwrap().code(), Some(7));
    }

    #[test]
    fn only_what_is_given_is_inherited() {
        let (given, stray) = (io::pipe().unwrap().0, io::pipe().unwrap().0);
        rustix::io::fcntl_setfd(&stray, rustix::io::FdFlags::empty()).unwrap();
        let numbers = (given.as_raw_fd(), stray.as_raw_fd());
        let listing = |jailed: bool, given: OwnedFd| {
            let mut command = Command::new("/bin/ls");
            command.arg("/proc/self/fd").stdout(Stdio::piped());
            let mut said = String::new();
            if jailed {
                let plan = JailPlan { inherit: vec![given], ..JailPlan::default() };
                let mut child = spawn_jailed(command, plan).unwrap();
                child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
                child.wait().unwrap();
            } else {
                said = String::from_utf8(command.output().unwrap().stdout).unwrap();
            }
            said.lines().map(|line| line.parse::<i32>().unwrap()).collect::<Vec<_>>()
        };
        let control = listing(false, given.try_clone().unwrap().into());
        assert!(control.contains(&numbers.1), "a plain child gets the stray file: {control:?}");
        let jailed = listing(true, given.into());
        assert!(jailed.contains(&numbers.0) && !jailed.contains(&numbers.1), "{jailed:?}");
    }

    #[test]
    fn the_stage_that_fails_is_named() {
        let plan = JailPlan { limits: vec![(u32::MAX, 1)], ..JailPlan::default() };
        let error = rehearse(Path::new("/bin/true"), plan).unwrap_err();
        assert_eq!(error.stage, Stage::Limits);
        let absent = spawn_jailed(Command::new("/nowhere/program"), JailPlan::default()).unwrap_err();
        assert_eq!((absent.stage, absent.source.kind()), (Stage::Execute, io::ErrorKind::NotFound));
        rehearse(Path::new("/bin/true"), JailPlan::default()).unwrap();
    }
}
