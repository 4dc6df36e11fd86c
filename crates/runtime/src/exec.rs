//! One exec: what is asked for, and what came of it.

use crate::stream::StreamTotals;
use hotcell_decide::ExecHow;
use hotcell_policy::Command;
use hotcell_wire::{ExecEnd, ExecEnded, ExecText, Stage};

/// User and group that an exec gets where none is named: the image's `agent`.
pub const WORKLOAD_USER: u32 = 1000;

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecRequest {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment, in order; nothing is inherited.
    pub env: Vec<(String, String)>,
    /// Absolute working directory.
    pub cwd: String,
    /// User; never 0.
    pub uid: u32,
    /// Group; never 0.
    pub gid: u32,
    /// Nothing is meant to be started after it, so that the guest makes nothing ready for that. What is started all the
    /// same starts later by that much.
    pub last: bool,
}

impl ExecRequest {
    /// A command in `/workspace`, as the workload's user.
    pub fn new(argv: impl IntoIterator<Item = impl Into<String>>) -> ExecRequest {
        ExecRequest {
            argv: argv.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            cwd: "/workspace".into(),
            uid: WORKLOAD_USER,
            gid: WORKLOAD_USER,
            last: false,
        }
    }

    pub(crate) fn text(&self) -> ExecText {
        ExecText {
            argv: self.argv.iter().map(|arg| arg.clone().into_bytes()).collect(),
            env: self.env.iter().map(|(name, value)| format!("{name}={value}").into_bytes()).collect(),
            cwd: Some(self.cwd.clone().into_bytes()),
        }
    }
}

impl From<&Command> for ExecRequest {
    /// Values that are known by their digest only are left out; a spec that was
    /// sealed in this process has them all.
    fn from(command: &Command) -> ExecRequest {
        let env =
            command.env.iter().filter_map(|(name, value)| Some((name.clone(), value.reveal()?.to_owned())));
        ExecRequest { env: env.collect(), cwd: command.cwd.clone(), ..ExecRequest::new(command.argv.clone()) }
    }
}

/// What came of an exec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecResult {
    /// How it ended.
    pub how: ExecHow,
    /// Exit code, as a shell would say it: 128+n for a signal, 127 for a program
    /// that is not there, 126 for one that can't be executed, 124 for a timeout.
    pub code: i32,
    /// Why it never ran.
    pub not_started: Option<String>,
    /// Standard output; none where the host could not keep it.
    pub stdout: Option<StreamTotals>,
    /// Standard error.
    pub stderr: Option<StreamTotals>,
    /// Processes of its tree were still there when its first process ended, and were ended.
    pub stragglers: bool,
}

/// The guest's word for the end of an exec, in the record's terms: how, exit code, signal.
pub(crate) fn ending(ended: &ExecEnded) -> (ExecHow, Option<i32>, Option<i32>) {
    let code = ended.code.get();
    match ended.how {
        ExecEnd::Exited => (ExecHow::Exited, Some(code & 0xFF), None),
        ExecEnd::Signalled => (ExecHow::Signalled, None, Some(code.clamp(1, 64))),
        ExecEnd::OutOfMemory => (ExecHow::Oom, None, Some(code.clamp(1, 64))),
        ExecEnd::NotStarted => (ExecHow::FailedToStart, Some(not_started_code(code)), None),
    }
}

/// ENOENT, ENOTDIR: 127; everything else: 126.
fn not_started_code(errno: i32) -> i32 {
    match rustix::io::Errno::from_raw_os_error(errno) {
        rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR => 127,
        _ => 126,
    }
}

/// Why it never ran, for people.
pub(crate) fn not_started(ended: &ExecEnded, argv: &[String], cwd: &str) -> Option<String> {
    if ended.how != ExecEnd::NotStarted {
        return None;
    }
    let errno = rustix::io::Errno::from_raw_os_error(ended.code.get());
    let program = argv.first().map(String::as_str).unwrap_or_default();
    Some(match ended.stage {
        Stage::Chdir => format!("can't change to {cwd}: {errno}"),
        Stage::Exec => format!("can't execute {program}: {errno}"),
        Stage::Confine => format!("can't confine {program}: {errno}"),
        Stage::Spawn | Stage::None => format!("can't start {program}: {errno}"),
    })
}
