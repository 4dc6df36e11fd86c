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

mod calls;
mod root;
mod walls;

use crate::guest::Filter;
use crate::host::opens::Opens;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{self, PipeReader, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, ChildStdout, Command};
use walls::Walls;

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
    /// Resource limits, soft and hard alike: `RLIMIT_*` and value. Where the hard limit that is there is lower, that one.
    pub limits: Vec<(u32, u64)>,
    /// System call filter.
    pub filter: Option<Filter>,
    /// Files of cgroups, open for writing, by each of which a process enters that writes `0` to it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::process::Stdio;

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
    fn a_limit_that_is_lower_already_stays() {
        let limit_of = |jailed: Option<u64>| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", "ulimit -Hn"]).stdout(Stdio::piped());
            let limits = jailed.map(|asked| (libc::RLIMIT_NOFILE, asked)).into_iter().collect();
            let mut child = spawn_jailed(command, JailPlan { limits, ..JailPlan::default() }).unwrap();
            let mut said = String::new();
            child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
            child.wait().unwrap();
            said.trim().parse::<u64>().unwrap()
        };
        assert_eq!(limit_of(Some(100)), 100);
        // More open files than any kernel allows, which not even root can ask for.
        assert_eq!(limit_of(Some(u64::MAX)), limit_of(None));
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
