//! The child's way from PID 1's memory to the workload's program.
//!
//! What it guarantees: when the program's first instruction runs, the process
//! is in its exec's cgroup (born there), the workload's pid and mount
//! namespaces and its own session; has the exec's user and group and no other;
//! no capability in any set, no way to gain one, the seccomp filter; only the
//! descriptors 0, 1, 2; and default signals, limits and priority. Any step
//! that fails ends the child, and its number and errno go to PID 1.
//! Who may call: `start` and `reaper`, in a fresh child.

use crate::limits::OPEN_FILES;
use crate::start::{Order, User, candidates};
use hotcell_sys::guest::{
    ExecImage, Filter, adopt_stdio, close_from, default_signals, exit_now, read_raw, write_raw,
};
use hotcell_wire::{ExecText, Program, Stage};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::{Errno, write};
use rustix::process::{Resource, Rlimit, chdir, setpriority_process, setrlimit, setsid, umask};
use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, LinkNameSpaceType, Uid, clear_ambient_capability_set,
    move_into_link_name_space, set_capabilities, set_name, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use std::convert::Infallible;
use std::ffi::{CStr, CString};
use std::os::fd::BorrowedFd;

/// The descriptor on which a child reports, after its standard streams.
pub(crate) const STATUS_NUMBER: u32 = 3;
/// The descriptor from which it reads its order; closed before the program is executed.
pub(crate) const ORDER_NUMBER: u32 = 4;
/// Working directory where the host names none.
const DEFAULT_CWD: &[u8] = b"/workspace";
/// Bytes of a report: stage, errno.
pub(crate) const REPORT_LEN: usize = 5;
/// Exit code of a child that reported; nobody looks at it.
const NOT_STARTED: i32 = 127;

/// What a process is forked with.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) stdin: BorrowedFd<'a>,
    pub(crate) stdout: BorrowedFd<'a>,
    pub(crate) stderr: BorrowedFd<'a>,
    pub(crate) status: BorrowedFd<'a>,
    /// From which it reads its [`Order`].
    pub(crate) order: BorrowedFd<'a>,
    pub(crate) view: BorrowedFd<'a>,
    pub(crate) filter: &'a Filter,
    pub(crate) user: User,
}

/// Confines this process, waits for its order, and runs it.
pub(crate) fn enter(plan: &Plan<'_>) -> Infallible {
    let (stage, errno) = match begin(plan) {
        Ok(None) => exit_now(NOT_STARTED),
        Ok(Some(order)) => match settle(&order) {
            Ok(()) => run(order),
            Err(failed) => failed,
        },
        Err(failed) => failed,
    };
    let [a, b, c, d] = errno.raw_os_error().to_le_bytes();
    tell(&[stage as u8, a, b, c, d]);
    exit_now(NOT_STARTED)
}

/// `None`: there will be no order.
fn begin(plan: &Plan<'_>) -> Result<Option<Order>, (Stage, Errno)> {
    confine(plan).map_err(|errno| (Stage::Confine, errno))?;
    let bytes = read_raw(ORDER_NUMBER as i32).map_err(|error| (Stage::Spawn, errno_of(&error)))?;
    if bytes.is_empty() {
        return Ok(None);
    }
    Order::decode(&bytes).map(Some).ok_or((Stage::Spawn, Errno::INVAL))
}

fn run(order: Order) -> (Stage, Errno) {
    let strings = |list: Vec<Vec<u8>>| list.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>();
    let ExecText { argv, env, .. } = order.text;
    match order.program {
        Program::Argv | Program::Service => {
            let name = argv.first().map(Vec::as_slice).unwrap_or_default();
            let candidates = strings(candidates(name, &env));
            match (candidates, strings(argv), strings(env)) {
                (Ok(candidates), Ok(argv), Ok(env)) => {
                    (Stage::Exec, ExecImage::new(candidates, argv, env).execute())
                }
                _ => (Stage::Spawn, Errno::INVAL),
            }
        }
        Program::Unpack => run_own(c"hotcell-unpack", crate::unpack::run),
        Program::Pack => {
            let paths: Vec<Vec<u8>> = argv.into_iter().skip(1).collect();
            run_own(c"hotcell-pack", || crate::pack::run(&paths))
        }
    }
}

/// Reports to PID 1; whether it went through.
pub(crate) fn tell(bytes: &[u8]) -> bool {
    write_raw(STATUS_NUMBER as i32, bytes).is_ok()
}

/// Runs code of this binary as the confined process, in place of a program.
fn run_own(name: &CStr, run: impl FnOnce() -> i32) -> ! {
    let _ = set_name(name);
    // Closing the pipe says "started", as execve would by close-on-exec.
    let _ = close_from(STATUS_NUMBER);
    exit_now(run())
}

/// What its order says of where it runs; and lets go of the order.
fn settle(order: &Order) -> Result<(), (Stage, Errno)> {
    close_from(ORDER_NUMBER).map_err(|error| (Stage::Confine, errno_of(&error)))?;
    let cwd = order.text.cwd.as_deref().unwrap_or(DEFAULT_CWD);
    chdir(cwd).map_err(|errno| (Stage::Chdir, errno))
}

fn confine(plan: &Plan<'_>) -> Result<(), Errno> {
    move_into_link_name_space(plan.view, Some(LinkNameSpaceType::Mount))?;
    adopt_stdio(&[plan.stdin, plan.stdout, plan.stderr, plan.status, plan.order])
        .map_err(|error| errno_of(&error))?;
    close_from(ORDER_NUMBER + 1).map_err(|error| errno_of(&error))?;
    close_status_on_exec()?;
    default_signals();
    setsid()?;
    // PID 1's protection is not for its children. Written with CAP_SYS_RESOURCE still there: it also
    // sets the floor below which the process can't lower its score again.
    let score = openat(CWD, c"/proc/self/oom_score_adj", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    write(&score, b"0")?;
    drop(score);
    setpriority_process(None, 0)?;
    let (soft, hard) = OPEN_FILES;
    setrlimit(Resource::Nofile, Rlimit { current: Some(soft), maximum: Some(hard) })?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    umask(Mode::from_raw_mode(0o022));
    set_thread_groups(&[])?;
    become_user(plan.user)?;
    // Last: nothing that is refused by it is needed from here on, and the kernel takes long to compile it.
    plan.filter.install().map_err(|error| errno_of(&error))
}

fn become_user((uid, gid): User) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_res_gid(gid, gid, gid)?;
    // From root to another user the kernel clears the effective and permitted sets, and makes the
    // process undumpable until it executes: nobody can trace it while it holds PID 1's memory.
    set_thread_res_uid(uid, uid, uid)?;
    drop_capabilities()
}

/// Empties the sets that a process has of its own. The bounding set was emptied
/// and no-new-privileges set by PID 1 for itself and all its children.
pub(crate) fn drop_capabilities() -> Result<(), Errno> {
    clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}

fn close_status_on_exec() -> Result<(), Errno> {
    hotcell_sys::guest::close_on_exec(STATUS_NUMBER as i32).map_err(|error| errno_of(&error))
}

pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
