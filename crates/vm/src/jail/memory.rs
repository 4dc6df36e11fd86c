//! That a host gives the whole jail is remembered: to try it out takes as long as half a VMM's start.
//!
//! What it guarantees: only the whole jail is remembered, never a part of one, and only for the very
//! process surroundings it was tried in: boot, user, namespaces, rights, cgroups, program. It weakens
//! nothing: each VMM's jail is read from `/proc` before its guest runs and held against the whole jail.
//! Where the host gives less meanwhile no machine starts, and what was remembered is forgotten.

use super::cgroup::Base;
use crate::measured::remember;
use crate::process::boot_id;
use std::fs;
use std::path::{Path, PathBuf};

/// Where it is remembered, and under which surroundings.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    file: PathBuf,
    surroundings: String,
}

impl Memory {
    /// `None`: these surroundings can't be named.
    pub(super) fn new(cache: &Path, program: &Path, bases: &[Base]) -> Option<Memory> {
        let mut surroundings = format!("{} {} {bases:?}", boot_id()?, program.display());
        for name in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"] {
            let namespace = fs::read_link(format!("/proc/self/ns/{name}")).ok()?;
            surroundings.push_str(&format!(" {}", namespace.display()));
        }
        let status = fs::read_to_string("/proc/self/status").ok()?;
        for line in status.lines() {
            if ["Uid:", "Gid:", "Cap", "NoNewPrivs:", "Seccomp:"].iter().any(|head| line.starts_with(head)) {
                surroundings.push_str(&format!(" {line}"));
            }
        }
        Some(Memory { file: cache.join("whole-jail"), surroundings })
    }

    /// Whether the whole jail was given here.
    pub(super) fn is_whole(&self) -> bool {
        fs::read_to_string(&self.file).is_ok_and(|known| known == self.surroundings)
    }

    /// Whoever can't remember tries again.
    pub(super) fn remember(&self) {
        let _ = remember(&self.file, self.surroundings.as_bytes());
    }

    pub(super) fn forget(&self) {
        let _ = fs::remove_file(&self.file);
    }
}
