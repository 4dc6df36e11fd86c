//! Was this change to be expected? Every mutation is judged against regions, grants and baseline.
//!
//! | region | change | judgement |
//! |---|---|---|
//! | immutable, or no region | any | IMPOSSIBLE: the root is read-only by device, so a wall did not stand |
//! | ephemeral | any | EXPECTED |
//! | mutable | made by the host's own copying in | EXPECTED |
//! | mutable | granted by exact path or tree, and it continues what was known | EXPECTED |
//! | mutable | not granted | UNEXPLAINED |
//! | mutable | granted, but the content before is not what was last known | UNEXPLAINED |
//!
//! What a name held is known from the baseline and from earlier mutations; where
//! neither knows it there is nothing to compare with. Content is digested as the
//! manifest does: a file by its bytes, a link by its target, a directory as no
//! bytes; zero: nothing of that name. For a CHMOD both sides are
//! [`metadata_digest`]s. A rename is two RENAMEs: the old name to zero, the new one
//! from zero. Something that changes nothing is no mutation and can't be made one.
//!
//! Paths are compared in NFC, as a record spells them.
//!
//! Mutations come from the host's reading of the disk, never from the guest. The
//! monitor remembers at most [`MAX_TRACKED`] names; more are judged without memory.

use hotcell_ledger::{Digest, FileOp};
use hotcell_policy::{CapabilityPolicy, CleanPath, EnvironmentBaseline, PathPolicy, Region, WriteGrant};
use std::collections::BTreeMap;
use std::ops::Bound;

/// Names whose last content is remembered. At PATH_MAX each this is 256 MiB at worst, and some 8 MiB in practice.
pub const MAX_TRACKED: usize = 65_536;

/// The digest that stands for a file's mode and owners in a CHMOD.
pub fn metadata_digest(mode: u32, uid: u32, gid: u32) -> Digest {
    Digest::of(format!("{mode:o} {uid} {gid}").as_bytes())
}

/// A change that the host saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutation {
    op: FileOp,
    path: Result<CleanPath, String>,
    before: Digest,
    after: Digest,
}

/// Why this is no mutation: the observer has a bug, or somebody invents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MutationError {
    /// Both sides are equal.
    #[error("a mutation that changes nothing")]
    NoOp,
    /// The sides do not fit the operation.
    #[error("a {0:?} whose before and after do not fit it")]
    Shape(FileOp),
}

impl Mutation {
    /// A change of one name.
    pub fn new(op: FileOp, path: &str, before: Digest, after: Digest) -> Result<Mutation, MutationError> {
        if before == after {
            return Err(MutationError::NoOp);
        }
        let fits = match op {
            FileOp::Create => before.is_zero(),
            FileOp::Delete => after.is_zero(),
            FileOp::Write | FileOp::Chmod => !before.is_zero() && !after.is_zero(),
            FileOp::Symlink => !after.is_zero(),
            FileOp::Rename => before.is_zero() || after.is_zero(),
        };
        if !fits {
            return Err(MutationError::Shape(op));
        }
        let path =
            CleanPath::clean(path).map(|path| path.to_nfc()).map_err(|error| format!("{path:?}: {error}"));
        Ok(Mutation { op, path, before, after })
    }
}

/// What the monitor says of a change, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Judgement {
    /// To be expected.
    Expected,
    /// Nothing explains it: counts into the accumulating rule.
    Unexplained(&'static str),
    /// It can't have happened while the walls stood: an absolute violation.
    Impossible(String),
}

/// Judges the mutations of one run.
#[derive(Clone, Debug)]
pub struct Monitor {
    paths: PathPolicy,
    capabilities: CapabilityPolicy,
    known: BTreeMap<CleanPath, Digest>,
    copied_in: BTreeMap<String, Digest>,
}

impl Monitor {
    /// A monitor over sealed policies and, where the image has one, its baseline.
    pub fn new(
        paths: &PathPolicy,
        capabilities: &CapabilityPolicy,
        baseline: Option<&EnvironmentBaseline>,
    ) -> Monitor {
        // Only names that can change at all need a memory; the rest of the image is impossible to change.
        let known = baseline
            .into_iter()
            .flat_map(EnvironmentBaseline::entries)
            .filter(|(path, _)| paths.region(path) == Region::Mutable)
            .take(MAX_TRACKED)
            .map(|(path, entry)| (path.to_nfc(), entry.content))
            .collect();
        Monitor {
            paths: paths.clone(),
            capabilities: capabilities.clone(),
            known,
            copied_in: BTreeMap::new(),
        }
    }

    /// The host itself put this content there.
    pub fn expect_copy(&mut self, path: &str, content: Digest) {
        if let Ok(path) = CleanPath::clean(path)
            && self.copied_in.len() < MAX_TRACKED
        {
            self.copied_in.insert(path.to_nfc().as_str().to_owned(), content);
        }
    }

    /// Nothing is known any more of what a name holds: the disk is about to be read for the first time.
    pub fn forget(&mut self) {
        self.known.clear();
    }

    /// Judges one change and remembers it.
    pub fn judge(&mut self, mutation: &Mutation) -> Judgement {
        let path = match &mutation.path {
            Ok(path) => path,
            Err(why) => return Judgement::Impossible(why.clone()),
        };
        match self.paths.region(path) {
            Region::Immutable => return Judgement::Impossible(format!("{path} lies in the read-only root")),
            Region::Ephemeral => return Judgement::Expected,
            Region::Mutable => {}
        }
        let chained = mutation.op == FileOp::Chmod
            || self.known.get(path).is_none_or(|known| *known == mutation.before);
        if mutation.op != FileOp::Chmod && (self.known.contains_key(path) || self.known.len() < MAX_TRACKED) {
            self.known.insert(path.clone(), mutation.after);
        }
        if self.is_copied_in(path, mutation.after) {
            return Judgement::Expected;
        }
        match (self.capabilities.write_grant(path), chained) {
            (WriteGrant::None, _) => Judgement::Unexplained("no grant covers it"),
            (WriteGrant::Exact | WriteGrant::Tree, false) => {
                Judgement::Unexplained("its content before is not what was last seen there")
            }
            (WriteGrant::Exact | WriteGrant::Tree, true) => Judgement::Expected,
        }
    }

    /// Judges changes that are only counted, all of them at or below one place. What was known there is known no more.
    pub fn judge_counted(&mut self, place: &str) -> Judgement {
        let place = match CleanPath::clean(place) {
            Ok(place) => place.to_nfc(),
            Err(error) => return Judgement::Impossible(format!("{place:?}: {error}")),
        };
        match self.paths.region(&place) {
            Region::Immutable => return Judgement::Impossible(format!("{place} lies in the read-only root")),
            Region::Ephemeral => return Judgement::Expected,
            Region::Mutable => {}
        }
        self.known.retain(|path, _| !path.is_within(&place));
        match self.capabilities.write_grant(&place) {
            WriteGrant::None => Judgement::Unexplained("no grant covers it"),
            WriteGrant::Exact | WriteGrant::Tree => Judgement::Expected,
        }
    }

    /// Whether the host's copying explains it: the content itself, or a directory on the way to it.
    fn is_copied_in(&self, path: &CleanPath, after: Digest) -> bool {
        let below = format!("{path}/");
        let on_the_way = || {
            let mut later =
                self.copied_in.range::<str, _>((Bound::Included(below.as_str()), Bound::Unbounded));
            later.next().is_some_and(|(copied, _)| copied.starts_with(&below))
        };
        self.copied_in.get(path.as_str()) == Some(&after) || (after == Digest::of(b"") && on_the_way())
    }
}
