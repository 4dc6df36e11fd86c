//! Files in and out of a machine: what a caller asks for, and what came of it.
//!
//! ```text
//! put   host tree ─source─▶ tar stream ─stdin─▶ the guest's own unpacker, as the workload's user
//! get   the guest's own packer ─stdout─▶ archive ─▶ stage ─(the guest says done)─▶ the target, in one step
//! ```
//! What it guarantees: going in, the caller's links are not followed and nothing but files, directories and links that
//! stay in the tree is taken; each entry is recorded before the guest has the last byte of it. Coming out, everything is
//! hostile: names are relative to what was asked for, the kernel resolves each below one open directory and through no
//! link, entries, bytes and names are bounded by the policy's limits before anything is written, and nothing has its
//! final name before all of it is there.
//! What it does not: owners, and extended attributes. Set-id bits are dropped both ways. That the guest packed what its
//! disk holds is the guest's word.
//! Who may call: [`Run::put`](crate::Run::put) and [`Run::get`](crate::Run::get).

mod archive;
mod source;
mod stage;

pub(crate) use archive::Archive;
pub use source::PutRequest;
pub(crate) use source::{Unsent, send};
pub(crate) use stage::{Stage, Staged};

use crate::exec::WORKLOAD_USER;
use hotcell_policy::{CleanPath, LimitsDraft};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Deepest tree below what is copied; the guest's packer goes no deeper either. Each level costs a descriptor.
pub(crate) const MAX_DEPTH: usize = 256;
/// Deepest path in a bundle: verifiers look no deeper, and two levels are `files/` and its parent's own.
const MAX_BUNDLE_DEPTH: usize = hotcell_ledger::bundle::MAX_DEPTH - 2;
/// Bytes of a run's note that the files of a bundle may take; the note has at most a million, and lines for other files.
const NOTE_BYTES: u64 = 900_000;
/// Names of one run's copies out, together, in bytes: they are kept until the copy is complete.
const NAME_BYTES: u64 = 16 << 20;
/// Folder of a bundle in which copies out are kept.
pub const FILES: &str = "files";

/// Why nothing was copied, or not all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// It was not begun: the caller asked for what can't be.
    #[error("not copied: {0}")]
    Refused(String),
    /// It was begun and could not be done. Coming out, nothing of it is left; going in, whole files may be.
    #[error("not copied: {0}")]
    Failed(String),
    /// The run ended first; the report says why.
    #[error("not copied, the run ended first: {0}")]
    RunEnded(String),
}

/// What was copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyResult {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes of files.
    pub bytes: u64,
    /// Entries that were not taken, in words: the first ones, and how many.
    pub left_out: Vec<String>,
    /// Where it is on the host; none for what went in.
    pub place: Option<PathBuf>,
}

/// Something to copy out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GetRequest {
    /// Absolute path in the guest: a file, or a directory with all that is in it.
    pub path: String,
    /// What it becomes on the host: a path that does not exist yet, in a directory that does. `None`: it goes into the
    /// bundle, as `files` and the guest's path, where links are left out since a record holds none.
    pub target: Option<PathBuf>,
    /// User as whom the guest reads it; never 0.
    pub uid: u32,
    /// Group; never 0.
    pub gid: u32,
}

impl GetRequest {
    /// Into the bundle, read by the workload's user.
    pub fn into_bundle(path: impl Into<String>) -> GetRequest {
        GetRequest { path: path.into(), target: None, uid: WORKLOAD_USER, gid: WORKLOAD_USER }
    }

    /// To a path of the host, read by the workload's user.
    pub fn to(path: impl Into<String>, target: impl Into<PathBuf>) -> GetRequest {
        GetRequest { target: Some(target.into()), ..GetRequest::into_bundle(path) }
    }

    /// The components of the guest's path.
    pub(crate) fn components(&self) -> Result<Vec<String>, String> {
        let clean = CleanPath::clean(&self.path).map_err(|error| format!("{:?}: {error}", self.path))?;
        let components: Vec<String> =
            clean.as_str().split('/').filter(|piece| !piece.is_empty()).map(str::to_owned).collect();
        if components.is_empty() {
            return Err("`/` is the whole machine: name a directory below it".into());
        }
        Ok(components)
    }
}

/// What is left of a run's limits for one direction.
#[derive(Debug)]
pub(crate) struct Budget {
    entries: AtomicU64,
    bytes: AtomicU64,
    names: AtomicU64,
    note: AtomicU64,
    limits: (u32, u32),
}

/// What a copy takes of a budget.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    pub(crate) entries: u64,
    pub(crate) bytes: u64,
    pub(crate) names: u64,
    pub(crate) note: u64,
}

impl Budget {
    pub(crate) fn new(limits: &LimitsDraft) -> Budget {
        Budget {
            entries: u64::from(limits.copy_files).into(),
            bytes: (u64::from(limits.copy_mib) << 20).into(),
            names: NAME_BYTES.into(),
            note: NOTE_BYTES.into(),
            limits: (limits.copy_mib, limits.copy_files),
        }
    }

    /// Takes all of it, or says which limit is in the way.
    pub(crate) fn take(&self, cost: Cost) -> Result<(), String> {
        let (copy_mib, copy_files) = self.limits;
        let take = |left: &AtomicU64, cost: u64| {
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(cost)).is_ok()
        };
        let mut taken = Cost::default();
        let refused = if !take(&self.entries, cost.entries) {
            format!("it has more entries than the policy's copy_files, {copy_files}, allows in a run")
        } else {
            taken.entries = cost.entries;
            if !take(&self.bytes, cost.bytes) {
                format!("it is larger than the policy's copy_mib, {copy_mib} MiB, allows in a run")
            } else {
                taken.bytes = cost.bytes;
                if !take(&self.names, cost.names) {
                    format!("its names are over {NAME_BYTES} bytes together")
                } else {
                    taken.names = cost.names;
                    if take(&self.note, cost.note) {
                        return Ok(());
                    }
                    "its names do not fit into the record's signed note: copy a smaller tree, or one file of it".into()
                }
            }
        };
        self.give_back(taken);
        Err(refused)
    }

    /// Of a copy that came to nothing.
    pub(crate) fn give_back(&self, cost: Cost) {
        self.entries.fetch_add(cost.entries, Ordering::Relaxed);
        self.bytes.fetch_add(cost.bytes, Ordering::Relaxed);
        self.names.fetch_add(cost.names, Ordering::Relaxed);
        self.note.fetch_add(cost.note, Ordering::Relaxed);
    }
}

/// Whether a symbolic link in a directory `depth` below the top leads to a place in the tree, by its text.
///
/// `..` is taken at the start only, where the directories are real ones: after a name it would be the parent of
/// wherever that name, if a link, leads.
pub(crate) fn stays_inside(depth: usize, target: &[u8]) -> bool {
    if target.is_empty() || target.first() == Some(&b'/') || target.contains(&0) {
        return false;
    }
    let mut pieces = target.split(|&byte| byte == b'/').filter(|piece| !matches!(piece, [] | [b'.']));
    let up = pieces.by_ref().take_while(|piece| *piece == b"..").count();
    up <= depth && !pieces.any(|piece| piece == b"..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_ends_exactly_where_its_limits_do_and_a_refusal_takes_nothing() {
        let limits = LimitsDraft { copy_files: 3, copy_mib: 1, ..LimitsDraft::default() };
        let nothing = Cost::default();
        let each = [
            (Cost { entries: 3, ..nothing }, Cost { entries: 1, ..nothing }, "copy_files, 3,"),
            (Cost { bytes: 1 << 20, ..nothing }, Cost { bytes: 1, ..nothing }, "copy_mib, 1 MiB,"),
            (
                Cost { names: NAME_BYTES, ..nothing },
                Cost { names: 1, ..nothing },
                "names are over 16777216 bytes",
            ),
            (Cost { note: NOTE_BYTES, ..nothing }, Cost { note: 1, ..nothing }, "signed note"),
        ];
        for (all, more, words) in each {
            let budget = Budget::new(&limits);
            budget.take(all).unwrap();
            let refused = budget.take(more).unwrap_err();
            assert!(refused.contains(words), "{refused}");
            budget.give_back(all);
            budget.take(all).unwrap();
        }
        let budget = Budget::new(&limits);
        let beyond = Cost { entries: 3, bytes: 1 << 20, names: NAME_BYTES, note: NOTE_BYTES + 1 };
        budget.take(beyond).unwrap_err();
        budget.take(Cost { note: NOTE_BYTES, ..beyond }).unwrap();
    }
}
