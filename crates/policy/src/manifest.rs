//! What an image contains, file by file, as its builder measured it.
//!
//! The image builder makes it; the environment baseline and the binary allowlist
//! come from it. Entries are sorted by path, each path once. A manifest says what
//! the image is, never what a run may do.

use crate::binary::{BinaryDraft, BinaryPolicy};
use crate::path::CleanPath;
use hotcell_ledger::Digest;
use std::collections::BTreeMap;

/// What a name in an image stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A file, with the digest of its bytes.
    File {
        /// Digest of the bytes.
        digest: Digest,
        /// Length in bytes.
        bytes: u64,
    },
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink {
        /// Its target, as it stands.
        target: String,
    },
}

/// One name of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// What it stands for.
    pub kind: EntryKind,
    /// Permission bits, with set-user-id, set-group-id and sticky.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl ManifestEntry {
    /// Digest of what the name holds: bytes of a file, target of a link, no bytes for a directory.
    /// Never zero: zero means that there is nothing of this name.
    pub fn content(&self) -> Digest {
        match &self.kind {
            EntryKind::File { digest, .. } => *digest,
            EntryKind::Directory => Digest::of(b""),
            EntryKind::Symlink { target } => Digest::of(target.as_bytes()),
        }
    }

    /// Whether it is a file that somebody may execute.
    pub fn is_executable(&self) -> bool {
        matches!(self.kind, EntryKind::File { .. }) && self.mode & 0o111 != 0
    }
}

/// Every name of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    entries: BTreeMap<CleanPath, ManifestEntry>,
}

impl Manifest {
    /// A manifest of these entries; a path that comes twice keeps its last entry, as in an image's layers.
    pub fn new(entries: impl IntoIterator<Item = (CleanPath, ManifestEntry)>) -> Manifest {
        Manifest { entries: entries.into_iter().collect() }
    }

    /// The entries, sorted by path.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&CleanPath, &ManifestEntry)> {
        self.entries.iter()
    }

    /// The allowlist of the image's own executables.
    pub fn binaries(&self) -> BinaryPolicy {
        let mut draft = BinaryDraft::new();
        for entry in self.entries.values().filter(|entry| entry.is_executable()) {
            draft.approve(entry.content());
        }
        draft.seal()
    }
}
