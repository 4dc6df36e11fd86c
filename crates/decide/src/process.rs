//! Which processes may be there: every one that the host sees is judged by whose it is and from which file it runs.
//!
//! | process | may have privilege | explained by |
//! |---|---|---|
//! | kernel thread | yes | it has no memory of its own, and the kernel's mark |
//! | of the measured initramfs's program | yes | PID 1, its gate, its reaper; every exec before it gives up what it has and becomes another program |
//! | without memory: it is ending, or has not begun | yes, where its parent may | the parent |
//! | of a root service's program: that file, or its interpreter with that file as first argument | yes | the image's own declaration |
//! | anything else | no | |
//!
//! | file | may run |
//! |---|---|
//! | in the initramfs | yes: measured, one program |
//! | in the root image | if its path is that of an approved program |
//! | on /workspace | if the policy lets the workspace execute |
//! | elsewhere | never |
//!
//! Privilege is a user id 0 of any of the four kinds, or any capability in any set but the bounding one.
//! Pure: whoever reads the processes brings them here, each as one consistent value.

use crate::fact::{SeenProcess, ViolationKind, cut};
use std::collections::BTreeSet;
use std::fmt;

/// Processes that one fact names at most.
pub const MAX_SEEN: usize = 16;
/// Characters of a text of one of them that are kept.
pub const MAX_SEEN_CHARS: usize = 200;

// Three texts of each; a character takes at most six bytes in JSON.
const _: () = assert!(MAX_SEEN * (3 * MAX_SEEN_CHARS * 6 + 256) < crate::fact::MAX_FACT_BYTES);

/// A process or thread, as the host read it from the guest's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number in the machine's first pid namespace.
    pub pid: i32,
    /// The number of its thread group.
    pub tgid: i32,
    /// The number of its parent's thread group.
    pub parent: i32,
    /// When it began, in ns of the guest's monotonic clock.
    pub start_ns: u64,
    /// What it calls itself.
    pub name: String,
    /// Real, effective, saved and file system user.
    pub uids: [u32; 4],
    /// Real group.
    pub gid: u32,
    /// Inheritable, permitted, effective and ambient capabilities, joined.
    pub capabilities: u64,
    /// 0 none, 1 strict, 2 filter.
    pub seccomp: u32,
    /// What it is.
    pub life: Life,
    /// Its first arguments as they stand in its memory, which it may change; read where a rule asks for them.
    pub argv: Vec<String>,
}

/// What a process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Life {
    /// A part of the kernel.
    KernelThread,
    /// It has no memory: ending, ended, or made by the kernel to become a program.
    NoMemory,
    /// It runs from this file; `None`: from none that can be told.
    Running(Option<Executable>),
}

/// The file that a process runs from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Executable {
    /// Its path on its file system.
    pub path: String,
    /// Where that is.
    pub place: Place,
    /// Whether the mount or the file system says that nothing may be executed on it.
    pub noexec: bool,
}

/// A file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The measured initramfs.
    Initramfs,
    /// The measured root image.
    Root,
    /// The overlay disk.
    Workspace,
    /// Another one, by its type.
    Elsewhere(String),
}

impl fmt::Display for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Initramfs => write!(f, "initramfs:{}", self.path),
            Place::Root => write!(f, "{}", self.path),
            Place::Workspace => write!(f, "/workspace{}", self.path),
            Place::Elsewhere(kind) => write!(f, "{kind}:{}", self.path),
        }
    }
}

impl Process {
    /// Whether it has more than an ordinary user.
    pub fn is_privileged(&self) -> bool {
        self.uids.contains(&0) || self.capabilities != 0
    }

    /// How a record names it; `None` for what runs from no file.
    pub fn seen(&self) -> Option<SeenProcess> {
        let [_, user, ..] = self.uids;
        Some(SeenProcess {
            pid: self.pid,
            parent: self.parent,
            user,
            name: cut(&self.name, MAX_SEEN_CHARS),
            executable: cut(&self.executable()?.to_string(), MAX_SEEN_CHARS),
            argv: cut(&self.argv.join(" "), MAX_SEEN_CHARS),
        })
    }

    /// The file that it runs from.
    pub fn executable(&self) -> Option<&Executable> {
        match &self.life {
            Life::Running(executable) => executable.as_ref(),
            _ => None,
        }
    }

    fn is_of(&self, place: &Place) -> bool {
        self.executable().is_some_and(|executable| executable.place == *place)
    }
}

/// What must not be, of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which rule.
    pub kind: ViolationKind,
    /// Which process.
    pub subject: String,
    /// What was seen.
    pub detail: String,
}

/// What may be there, in one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessRules {
    /// Paths in the root image of programs that are approved; `None`: the image has no list, and its measured root is all
    /// that is approved.
    pub approved: Option<BTreeSet<String>>,
    /// Paths in the root image of the root services that the image declares.
    pub services: BTreeSet<String>,
    /// Whether the policy lets the workspace execute.
    pub workspace_executes: bool,
}

impl ProcessRules {
    /// Judges one process; `parent` where it was seen as well.
    pub fn judge(&self, process: &Process, parent: Option<&Process>) -> Option<Finding> {
        let finding = |kind, detail: String| {
            let subject = format!("process {} {:?}", process.pid, process.name);
            Some(Finding { kind, subject, detail })
        };
        if process.is_privileged() && !self.explains(process, parent) {
            let [real, effective, saved, file] = process.uids;
            let from = process.executable().map_or_else(|| "no file".to_owned(), Executable::to_string);
            let detail = format!(
                "users {real} {effective} {saved} {file}, capabilities {:#x}, running from {from}, parent {}",
                process.capabilities, process.parent
            );
            return finding(ViolationKind::UnexplainedPrivilege, detail);
        }
        let Life::Running(executable) = &process.life else { return None };
        let Some(executable) = executable else {
            return finding(ViolationKind::UnapprovedExecutable, "it runs from no file".into());
        };
        let kind = match &executable.place {
            Place::Initramfs => return None,
            Place::Root if self.approved.as_ref().is_none_or(|all| all.contains(&executable.path)) => {
                return None;
            }
            Place::Root => ViolationKind::UnapprovedExecutable,
            Place::Workspace if self.workspace_executes => return None,
            Place::Workspace => ViolationKind::ExecutedFromNoexec,
            Place::Elsewhere(_) if executable.noexec => ViolationKind::ExecutedFromNoexec,
            Place::Elsewhere(_) => ViolationKind::UnapprovedExecutable,
        };
        finding(kind, format!("it runs from {executable}"))
    }

    /// Whether something approved explains its privilege.
    fn explains(&self, process: &Process, parent: Option<&Process>) -> bool {
        match &process.life {
            Life::KernelThread => true,
            Life::NoMemory => parent.is_some_and(|parent| match &parent.life {
                Life::KernelThread => true,
                Life::NoMemory => parent.pid == 0,
                Life::Running(_) => parent.is_of(&Place::Initramfs) || self.is_service(parent),
            }),
            Life::Running(_) => process.is_of(&Place::Initramfs) || self.is_service(process),
        }
    }

    /// Whether a rule asks for this one's arguments.
    pub fn asks_for_argv(&self, process: &Process) -> bool {
        !self.services.is_empty() && process.is_of(&Place::Root) && process.is_privileged()
    }

    fn is_service(&self, process: &Process) -> bool {
        let Some(executable) = process.executable().filter(|executable| executable.place == Place::Root)
        else {
            return false;
        };
        // What interprets a script has the script's path as its first argument (execve(2)).
        let script = process.argv.get(1).is_some_and(|script| self.services.contains(script));
        self.services.contains(&executable.path) || script
    }
}
