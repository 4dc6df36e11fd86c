//! The walls around the VMM process.
//!
//! ```text
//!  HostJail::try_out ─▶ what this host gives, and what it lacks and why (a whole jail is remembered)
//!        │ plan (one per run)                     │ promise
//!        ▼                                        ▼
//!  hotcell_sys::spawn_jailed ─▶ VMM ─/proc─▶ Measured ─ weaker than promised? ─▶ no machine
//! ```
//! What it guarantees: the level that is recorded was read from `/proc` of the
//! running VMM, not from what was asked for; a VMM with less than the host gave
//! when it was tried never executes guest code.
//! What it does not: there is no way to ask for less. A part that the host can't
//! give is named, and [`JailChoice::Required`] refuses.

mod cgroup;
mod host;
mod measure;
mod memory;
mod watch;

pub(crate) use cgroup::{RunCgroups, members_of, remove_if_ours};
pub(crate) use host::MAKE_CGROUPS;
pub use host::{HostJail, JailChoice, JailRefused};
pub use measure::Measured;
pub use watch::{Breach, VmmWatch};

use std::collections::BTreeMap;
use std::fmt;

/// A part of the jail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// A user that owns nothing on the host, or the ordinary user alone in a user namespace.
    User,
    /// A root with nothing but what the VMM needs, read-only.
    Mount,
    /// No network.
    Net,
    /// No sight of other processes; ends as a whole.
    Pid,
    /// No shared memory or queues of others.
    Ipc,
    /// A host name of its own.
    Uts,
    /// No sight of other cgroups.
    CgroupView,
    /// No program can give more rights.
    NoNewPrivileges,
    /// No capability in any set.
    NoCapabilities,
    /// System calls are filtered, by our filter and QEMU's.
    Seccomp,
    /// Memory is limited by a cgroup.
    MemoryLimit,
    /// Processor time is limited by a cgroup.
    CpuLimit,
    /// The number of processes is limited by a cgroup.
    PidsLimit,
}

impl Part {
    /// All parts.
    pub const ALL: [Part; 13] = [
        Part::User,
        Part::Mount,
        Part::Net,
        Part::Pid,
        Part::Ipc,
        Part::Uts,
        Part::CgroupView,
        Part::NoNewPrivileges,
        Part::NoCapabilities,
        Part::Seccomp,
        Part::MemoryLimit,
        Part::CpuLimit,
        Part::PidsLimit,
    ];

    /// Its short name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Part::User => "user",
            Part::Mount => "mount",
            Part::Net => "net",
            Part::Pid => "pid",
            Part::Ipc => "ipc",
            Part::Uts => "uts",
            Part::CgroupView => "cgroup view",
            Part::NoNewPrivileges => "no new privileges",
            Part::NoCapabilities => "no capabilities",
            Part::Seccomp => "seccomp",
            Part::MemoryLimit => "memory limit",
            Part::CpuLimit => "cpu limit",
            Part::PidsLimit => "pids limit",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A part that the host can't give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Which.
    pub part: Part,
    /// Why.
    pub why: String,
}

/// How a VMM is confined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Jail {
    /// Not by us; the text says what there is instead.
    Other(String),
    /// As read from `/proc` of the VMM.
    Measured {
        /// What was read.
        measured: Box<Measured>,
        /// What the host can't give.
        missing: Vec<Missing>,
    },
}

impl From<&str> for Jail {
    fn from(text: &str) -> Jail {
        Jail::Other(text.to_owned())
    }
}

impl From<String> for Jail {
    fn from(text: String) -> Jail {
        Jail::Other(text)
    }
}

impl Jail {
    /// All that was measured, by name, for the record.
    pub fn details(&self) -> BTreeMap<String, String> {
        let Jail::Measured { measured, missing } = self else { return BTreeMap::new() };
        let mut details = measured.details();
        let missing: Vec<String> =
            missing.iter().map(|missing| format!("{}: {}", missing.part, missing.why)).collect();
        details.insert("jail_missing".into(), missing.join("; "));
        details
    }
}

impl fmt::Display for Jail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Jail::Other(text) => f.write_str(text),
            Jail::Measured { measured, missing } => {
                write!(f, "{measured}")?;
                if !missing.is_empty() {
                    let names: Vec<&str> = missing.iter().map(|missing| missing.part.as_str()).collect();
                    write!(f, "; the host lacks: {}", names.join(", "))?;
                }
                Ok(())
            }
        }
    }
}
