//! What the host observed and AMES-V1 has no type for.
//!
//! A fact is recorded as a `TOOL_CALL` by HOST: the tool is `hotcell.<fact>`, the
//! arguments are the fact's object, the result is a digest that the fact is about.
//! The object is the fact as JSON in exactly the spelling that [`HostFact::to_object`]
//! writes: fields in the order of the declaration, no blanks. Reading takes nothing
//! else, so an unknown field, a repeated one or another order is refused.
//!
//! ```text
//! {"fact":"measured","what":"kernel","digest":"<64 hex>","bytes":8388608}
//! ```
//! A fact is a statement, not yet evidence: that takes its recorded event
//! ([`Evidence::read`](crate::Evidence::read)). Facts are written by the run's driver alone.

use crate::claims::{ClaimKind, RefusalCode};
use crate::spawn::SpawnDenial;
use crate::verdict::Verdict;
use hotcell_ledger::{Digest, NfcString, Payload};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The prefix of tool names that only the host may use.
pub const RESERVED_PREFIX: &str = "hotcell.";
/// Longest fact object in bytes.
pub const MAX_FACT_BYTES: usize = 64 * 1024;
/// Longest error text that [`HostFact::fault`] and [`HostFact::failed`] keep, in characters.
pub const MAX_ERROR_CHARS: usize = 4096;

/// Processes of each kind in one [`HostFact::ProcessRoll`].
pub const MAX_ROLL: usize = 1024;

// Two numbers of a process take at most 36 bytes in JSON, one 12.
const _: () = assert!(MAX_ROLL * (36 + 12) + 1024 < MAX_FACT_BYTES);
// A character takes at most six bytes in JSON.
const _: () = assert!(MAX_ERROR_CHARS * 6 + 1024 < MAX_FACT_BYTES);

/// Something that the host observed or did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fact", rename_all = "snake_case", deny_unknown_fields)]
pub enum HostFact {
    /// What is run, and which layers are armed. The first fact.
    Spec {
        /// The run's id.
        run_id: String,
        /// Digest of spec.json.
        #[serde(with = "hotcell_policy::hex")]
        spec: Digest,
        /// Every layer.
        layers: Vec<LayerState>,
    },
    /// A file was measured before boot.
    Measured {
        /// `kernel`, `initramfs`, `root`, or another part.
        what: String,
        /// Its digest.
        #[serde(with = "hotcell_policy::hex")]
        digest: Digest,
        /// Its length.
        bytes: u64,
    },
    /// The kill switch tripped where it should on a throw-away instance.
    SwitchProven {
        /// How many rules fired.
        rules: u64,
    },
    /// How the machine is isolated, as measured.
    Isolation {
        /// Which backend.
        backend: String,
        /// Which acceleration.
        accel: String,
        /// Which jail.
        jail: String,
        /// More of it.
        details: BTreeMap<String, String>,
    },
    /// The guest said ready.
    Ready {
        /// Host time from VMM start to the frame.
        boot_ms: u64,
        /// The guest kernel's release, as the guest says.
        kernel_release: String,
    },
    /// A root service of the image was started, as this exec; the spec names it too.
    Service {
        /// Which exec.
        exec: u64,
        /// The service's name.
        name: String,
        /// Digest of its program.
        #[serde(with = "hotcell_policy::hex")]
        binary: Digest,
    },
    /// A stream of an exec ended.
    Output {
        /// Which exec.
        exec: u64,
        /// Which stream.
        stream: OutputStream,
        /// Bytes that came.
        total_bytes: u64,
        /// Bytes that were kept.
        kept_bytes: u64,
        /// Whether less was kept than came.
        truncated: bool,
        /// Digest of all that came.
        #[serde(with = "hotcell_policy::hex")]
        whole: Digest,
        /// The object that holds what was kept.
        #[serde(with = "hotcell_policy::hex")]
        kept: Digest,
    },
    /// A spawn was denied.
    SpawnDenied {
        /// Why.
        reason: SpawnDenial,
        /// The executable that would have run.
        #[serde(with = "hotcell_policy::hex")]
        binary: Digest,
    },
    /// Claims of the guest were refused.
    ClaimRefused {
        /// What they claimed.
        kind: ClaimKind,
        /// Why.
        code: RefusalCode,
        /// How many since the last such fact.
        count: u64,
    },
    /// The run took as long as it may.
    Timeout {
        /// The limit.
        limit_ms: u64,
    },
    /// The operator stopped the run.
    Interrupted {
        /// The signal.
        signal: i32,
    },
    /// Hotcell could not do what was asked; nothing was violated.
    Failed {
        /// At which step.
        stage: String,
        /// What happened.
        error: String,
    },
    /// A component failed in a way that nobody foresaw: what it would have seen is unknown.
    Fault {
        /// At which step.
        stage: String,
        /// What happened.
        error: String,
    },
    /// A wall did not stand.
    ContainmentFailure {
        /// Which.
        what: String,
    },
    /// The VMM process ended.
    VmExited {
        /// Whether the host ended it or had asked the guest to end.
        expected: bool,
        /// Its status.
        status: String,
    },
    /// An exec ended.
    ExecEnded {
        /// Which.
        exec: u64,
        /// How.
        how: ExecHow,
        /// Exit code.
        code: Option<i32>,
        /// Signal.
        signal: Option<i32>,
    },
    /// A file was copied in or out.
    Copied {
        /// Which way.
        direction: Direction,
        /// Path inside the guest.
        path: String,
        /// Its length.
        bytes: u64,
        /// Its digest.
        #[serde(with = "hotcell_policy::hex")]
        digest: Digest,
        /// Type and permission bits, as `st_mode` has them: 0o100644 is a file, 0o040755 a directory, 0o120777 a link.
        mode: u32,
    },
    /// A copy ended: all that was asked for, or the error says what is missing.
    CopyEnded {
        /// The exec that the guest did it in.
        exec: u64,
        /// Which way.
        direction: Direction,
        /// Path inside the guest.
        path: String,
        /// Files, directories and links that were copied.
        entries: u64,
        /// Bytes of files that were copied.
        bytes: u64,
        /// Entries that the host did not take.
        left_out: u64,
        /// Why it was not done; none where it was.
        error: Option<String>,
    },
    /// An observer took the state that its later looks compare with, before anything of the workload ran.
    Armed {
        /// `ram`, `disk`, `vmm`.
        observer: String,
        /// Whether it can find something in this run.
        armed: bool,
        /// On what it stands, or what it lacks.
        basis: String,
    },
    /// Processes that the host saw in the guest's memory for the first time, kernel threads and the init's own apart.
    Processes {
        /// Those, at most [`MAX_SEEN`](crate::process::MAX_SEEN).
        seen: Vec<SeenProcess>,
        /// More of them that are not named.
        left_out: u64,
        /// How many processes and threads there were, of every kind.
        live: u64,
        /// How many were seen since the machine was ready, of the kind that is named.
        total: u64,
    },
    /// The host's own list of the workload's processes, read after the guest's init had told its own.
    ProcessRoll {
        /// Which roll call, from 1.
        roll: u64,
        /// Number and beginning, in ns of the guest's monotonic clock, of each; at most [`MAX_ROLL`].
        processes: Vec<(i32, u64)>,
        /// Numbers of processes of the measured initramfs's program; at most [`MAX_ROLL`].
        own: Vec<i32>,
        /// More of either that are not named.
        left_out: u64,
    },
    /// How the watch was kept, from arming to the end.
    Watched {
        /// Looks at the machine.
        looks: u64,
        /// The longest time between two of them.
        longest_gap_ms: u64,
        /// Processor time of the observing thread.
        cpu_ms: u64,
    },
    /// The workspace disk was read.
    DiskRead {
        /// Which reading, from 0, the one before the workload.
        reading: u64,
        /// When.
        at: DiskMoment,
        /// Names on it.
        names: u64,
        /// Digest of the whole list of names, modes, owners and contents; zero where there is none.
        #[serde(with = "hotcell_policy::hex")]
        listing: Digest,
        /// Changes since the reading before, recorded each or counted.
        changes: u64,
        /// What of it could not be read, and why.
        unread: Option<String>,
    },
    /// Changes of files that are not recorded one by one: more than are listed, or beyond what is listed.
    MutationsCounted {
        /// Where they lie: each was below one of these paths, or is one of them.
        within: Vec<String>,
        /// How many of each kind; none where only that there are some is known.
        changes: BTreeMap<String, u64>,
        /// Why they are not listed.
        why: String,
    },
    /// The host saw what must not be.
    Violation {
        /// Which rule.
        kind: ViolationKind,
        /// Which process, file, device or range.
        subject: String,
        /// What was seen.
        detail: String,
    },
    /// The kill switch tripped and the machine was stopped.
    Kill {
        /// The reasons known then.
        reasons: Vec<String>,
        /// The event that tripped it.
        at_sequence: u64,
    },
    /// The machine was taken down.
    Teardown {
        /// Whether everything was checked to be gone.
        verified: bool,
        /// How long it took.
        ms: u64,
        /// Every check.
        checks: Vec<Check>,
    },
    /// What the host concludes. `verify` concludes for itself and compares.
    Verdict {
        /// The verdict.
        verdict: Verdict,
        /// Its reasons.
        reasons: Vec<String>,
        /// Whether the run took as long as it may.
        timed_out: bool,
    },
}

/// A layer and whether it has something to compare with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerState {
    /// `L1` to `L9`.
    pub layer: String,
    /// Whether it can find something in this run.
    pub armed: bool,
    /// On what it stands, or what it lacks.
    pub basis: String,
}

/// A process as the host saw it first under its executable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeenProcess {
    /// Its number in the machine's first pid namespace.
    pub pid: i32,
    /// Its parent's.
    pub parent: i32,
    /// Its effective user.
    pub user: u32,
    /// What it calls itself.
    pub name: String,
    /// The file that it runs from.
    pub executable: String,
    /// Its arguments as they stood in its memory, cut.
    pub argv: String,
}

/// A stream of an exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// How an exec ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecHow {
    /// With an exit code.
    Exited,
    /// By a signal.
    Signalled,
    /// By the run's time limit.
    TimedOut,
    /// For want of memory.
    Oom,
    /// It never ran.
    FailedToStart,
    /// The machine was gone before it was known.
    Unknown,
}

/// Which way a file was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Into the guest.
    In,
    /// Out of the guest.
    Out,
}

/// When the workspace disk was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskMoment {
    /// Before anything of the workload ran.
    Armed,
    /// At the end, after the guest had written everything out and stopped writing.
    Quiet,
    /// At the end, as the stopped machine left it.
    Dead,
}

/// One check of a teardown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What must be gone.
    pub what: String,
    /// Whether it is.
    pub gone: bool,
    /// How that was seen.
    pub detail: String,
}

/// What the host can see that must not be. Each kind is an absolute reason of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is described at the reason of its name")]
pub enum ViolationKind {
    UnexplainedPrivilege,
    UnapprovedExecutable,
    ExecutedFromNoexec,
    KernelTextChanged,
    KernelTableChanged,
    ModuleLoaded,
    NetworkDevice,
    WritableRoot,
    HiddenProcess,
    UnexplainedNamespace,
    UnexplainedMount,
    RootChanged,
    VmmOutOfJail,
    ProcessOutlivedRun,
    NotThisVm,
    SandboxDestroyed,
}

impl ViolationKind {
    /// Every kind.
    pub const ALL: &'static [ViolationKind] = &[
        ViolationKind::UnexplainedPrivilege,
        ViolationKind::UnapprovedExecutable,
        ViolationKind::ExecutedFromNoexec,
        ViolationKind::KernelTextChanged,
        ViolationKind::KernelTableChanged,
        ViolationKind::ModuleLoaded,
        ViolationKind::NetworkDevice,
        ViolationKind::WritableRoot,
        ViolationKind::HiddenProcess,
        ViolationKind::UnexplainedNamespace,
        ViolationKind::UnexplainedMount,
        ViolationKind::RootChanged,
        ViolationKind::VmmOutOfJail,
        ViolationKind::ProcessOutlivedRun,
        ViolationKind::NotThisVm,
        ViolationKind::SandboxDestroyed,
    ];
}

/// Why a fact can't be written or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FactError {
    /// More than [`MAX_FACT_BYTES`].
    #[error("the fact has {bytes} bytes, over {MAX_FACT_BYTES}: put the data into an object of its own")]
    TooLong {
        /// How many.
        bytes: usize,
    },
    /// Not JSON, not a fact that we know, or with other fields.
    #[error("not a host fact: {0}")]
    Unreadable(String),
    /// Readable, but not in the one spelling.
    #[error("the fact is not in its canonical spelling")]
    NotCanonical,
}

impl HostFact {
    /// An evaluator failure, its text cut to [`MAX_ERROR_CHARS`].
    pub fn fault(stage: &str, error: &dyn core::fmt::Display) -> HostFact {
        HostFact::Fault { stage: cut(stage, 64), error: cut(&error.to_string(), MAX_ERROR_CHARS) }
    }

    /// A failure of the host, its text cut to [`MAX_ERROR_CHARS`].
    pub fn failed(stage: &str, error: &dyn core::fmt::Display) -> HostFact {
        HostFact::Failed { stage: cut(stage, 64), error: cut(&error.to_string(), MAX_ERROR_CHARS) }
    }

    /// `hotcell.<fact>`.
    pub const fn tool_name(&self) -> &'static str {
        match self {
            HostFact::Spec { .. } => "hotcell.spec",
            HostFact::Measured { .. } => "hotcell.measured",
            HostFact::SwitchProven { .. } => "hotcell.switch_proven",
            HostFact::Isolation { .. } => "hotcell.isolation",
            HostFact::Ready { .. } => "hotcell.ready",
            HostFact::Service { .. } => "hotcell.service",
            HostFact::Output { .. } => "hotcell.output",
            HostFact::SpawnDenied { .. } => "hotcell.spawn_denied",
            HostFact::ClaimRefused { .. } => "hotcell.claim_refused",
            HostFact::Timeout { .. } => "hotcell.timeout",
            HostFact::Interrupted { .. } => "hotcell.interrupted",
            HostFact::Failed { .. } => "hotcell.failed",
            HostFact::Fault { .. } => "hotcell.fault",
            HostFact::ContainmentFailure { .. } => "hotcell.containment_failure",
            HostFact::VmExited { .. } => "hotcell.vm_exited",
            HostFact::ExecEnded { .. } => "hotcell.exec_ended",
            HostFact::Copied { .. } => "hotcell.copied",
            HostFact::CopyEnded { .. } => "hotcell.copy_ended",
            HostFact::Armed { .. } => "hotcell.armed",
            HostFact::Processes { .. } => "hotcell.processes",
            HostFact::ProcessRoll { .. } => "hotcell.process_roll",
            HostFact::Watched { .. } => "hotcell.watched",
            HostFact::DiskRead { .. } => "hotcell.disk_read",
            HostFact::MutationsCounted { .. } => "hotcell.mutations_counted",
            HostFact::Violation { .. } => "hotcell.violation",
            HostFact::Kill { .. } => "hotcell.kill",
            HostFact::Teardown { .. } => "hotcell.teardown",
            HostFact::Verdict { .. } => "hotcell.verdict",
        }
    }

    /// The digest that the fact is about; zero where there is none.
    pub const fn result_digest(&self) -> Digest {
        match self {
            HostFact::Spec { spec: digest, .. }
            | HostFact::Measured { digest, .. }
            | HostFact::Output { whole: digest, .. }
            | HostFact::Copied { digest, .. }
            | HostFact::Service { binary: digest, .. }
            | HostFact::DiskRead { listing: digest, .. }
            | HostFact::SpawnDenied { binary: digest, .. } => *digest,
            _ => Digest::ZERO,
        }
    }

    /// Objects beside its own that the fact names: what a bundle must hold for it.
    pub fn named_objects(&self) -> Option<Digest> {
        match self {
            HostFact::Output { kept, .. } => Some(*kept),
            _ => None,
        }
    }

    /// The canonical bytes of the fact's object.
    pub fn to_object(&self) -> Result<Vec<u8>, FactError> {
        let bytes = serde_json::to_vec(self).map_err(|error| FactError::Unreadable(error.to_string()))?;
        if bytes.len() > MAX_FACT_BYTES {
            return Err(FactError::TooLong { bytes: bytes.len() });
        }
        Ok(bytes)
    }

    /// The payload to record, and the object to store before it.
    pub fn to_payload(&self) -> Result<(Payload, Vec<u8>), FactError> {
        let object = self.to_object()?;
        let payload = Payload::ToolCall {
            tool: NfcString::new(self.tool_name()),
            args: Digest::of(&object),
            result: self.result_digest(),
        };
        Ok((payload, object))
    }

    /// Reads an object, in its one spelling.
    pub fn from_object(bytes: &[u8]) -> Result<HostFact, FactError> {
        if bytes.len() > MAX_FACT_BYTES {
            return Err(FactError::TooLong { bytes: bytes.len() });
        }
        let fact: HostFact =
            serde_json::from_slice(bytes).map_err(|error| FactError::Unreadable(error.to_string()))?;
        if fact.to_object()? != bytes {
            return Err(FactError::NotCanonical);
        }
        Ok(fact)
    }
}

/// The first characters of a text.
pub(crate) fn cut(text: &str, chars: usize) -> String {
    text.chars().take(chars).collect()
}
