//! Two listings of one disk become the changes between them.
//!
//! | seen | changes |
//! |---|---|
//! | a new name | CREATE, of a link SYMLINK |
//! | a name that is gone | DELETE |
//! | the same inode and generation under a new name, the old one gone | two RENAMEs: old name to zero, new name from zero |
//! | other bytes under a name | WRITE, of a link SYMLINK |
//! | another mode or owner | CHMOD |
//! | another kind of thing under a name | DELETE and CREATE |
//!
//! Each change continues what was last said of its name, so the chain of before and after
//! that the judge follows has no gap. What could not be read is no change
//! (`listing.rs`). What came and went between two listings left nothing to see.

use super::ext4::Kind;
use super::listing::{Entry, Listing, Unread};
use hotcell_decide::metadata_digest;
use hotcell_ledger::{Digest, FileOp};
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};

/// One change of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What was done.
    pub op: FileOp,
    /// To which path of the guest.
    pub path: String,
    /// What was there; zero: nothing.
    pub before: Digest,
    /// What is there; zero: nothing.
    pub after: Digest,
}

/// What became of the disk from one listing to the next, in the order in which it is to be recorded.
pub fn changes(before: &Listing, after: &Listing) -> Vec<Change> {
    let (mut gone, mut new, mut both) = (Vec::new(), Vec::new(), Vec::new());
    let (mut old, mut now) = (before.names.iter().peekable(), after.names.iter().peekable());
    loop {
        let order = match (old.peek(), now.peek()) {
            (Some((a, _)), Some((b, _))) => a.cmp(b),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => break,
        };
        match order {
            Ordering::Less => gone.extend(old.next()),
            Ordering::Greater => new.extend(now.next()),
            Ordering::Equal => both.extend(old.next().zip(now.next())),
        }
    }
    // Below a bound nothing is known: what is not listed there is not gone.
    let bounds: Vec<&str> = after.bounds().collect();
    gone.retain(|(path, _)| !bounds.iter().any(|place| super::listing::is_within(path, place)));
    let mut changes = Changes(Vec::new());
    // Names in path order, each old name used once: one inode may have several.
    let mut moved: HashMap<(u32, u32, Kind), Vec<usize>> = HashMap::new();
    for (at, (_, entry)) in gone.iter().enumerate().rev() {
        moved.entry((entry.identity.0, entry.identity.1, entry.kind)).or_default().push(at);
    }
    let mut renamed = vec![false; gone.len()];
    let mut created = Vec::new();
    for (path, entry) in new {
        let key = (entry.identity.0, entry.identity.1, entry.kind);
        let from = moved.get_mut(&key).and_then(Vec::pop).and_then(|at| Some((at, gone.get(at)?)));
        match from {
            Some((at, (old_path, old))) => {
                if let Some(renamed) = renamed.get_mut(at) {
                    *renamed = true;
                }
                changes.push(FileOp::Rename, old_path, old.content, Digest::ZERO);
                changes.push(FileOp::Rename, path, Digest::ZERO, old.content);
                changes.same_name(path, old, entry);
            }
            None => created.push((path, entry)),
        }
    }
    for ((path, entry), renamed) in gone.into_iter().zip(renamed) {
        if !renamed {
            changes.push(FileOp::Delete, path, entry.content, Digest::ZERO);
        }
    }
    for ((path, old), (_, now)) in both {
        if std::mem::discriminant(&old.kind) == std::mem::discriminant(&now.kind) {
            changes.same_name(path, old, now);
        } else {
            changes.push(FileOp::Delete, path, old.content, Digest::ZERO);
            changes.create(path, now);
        }
    }
    for (path, entry) in created {
        changes.create(path, entry);
    }
    changes.0
}

impl Listing {
    /// Places below which only the fact that something is there is known.
    pub fn bounds(&self) -> impl Iterator<Item = &str> {
        self.unread.iter().filter(|(_, why)| *why == Unread::Bound).map(|(place, _)| place.as_str())
    }

    /// Leaves what is held as it was before. Says whether any of it was another.
    pub(super) fn hold(&mut self, before: &Listing, held: impl Fn(&str) -> bool) -> bool {
        let changed: BTreeSet<String> =
            changes(before, self).into_iter().map(|change| change.path).filter(|path| held(path)).collect();
        if changed.is_empty() {
            return false;
        }
        let old = before.names.iter().filter(|(path, _)| changed.contains(path)).cloned();
        let mut names: Vec<_> =
            std::mem::take(&mut self.names).into_iter().filter(|(path, _)| !changed.contains(path)).collect();
        names.extend(old);
        names.sort_by(|(a, _), (b, _)| a.cmp(b));
        self.names = names;
        true
    }

    /// Names that only the guest's root can have made: a device node, or a program that runs as root.
    /// A whiteout (character device 0) is anybody's.
    pub fn privileged(&self) -> impl Iterator<Item = (&str, String)> {
        self.names.iter().filter_map(|(path, entry)| {
            let what = match entry.kind {
                Kind::Character(number) if number != 0 => format!("character device {number:#x}"),
                Kind::Block(number) => format!("block device {number:#x}"),
                Kind::File if entry.mode & 0o4000 != 0 && entry.uid == 0 => {
                    format!("a file of user 0 with mode {:o}", entry.mode)
                }
                _ => return None,
            };
            Some((path.as_str(), what))
        })
    }
}

struct Changes(Vec<Change>);

impl Changes {
    fn push(&mut self, op: FileOp, path: &str, before: Digest, after: Digest) {
        self.0.push(Change { op, path: path.to_owned(), before, after });
    }

    fn create(&mut self, path: &str, entry: &Entry) {
        let op = if entry.kind == Kind::Link { FileOp::Symlink } else { FileOp::Create };
        self.push(op, path, Digest::ZERO, entry.content);
    }

    fn same_name(&mut self, path: &str, old: &Entry, now: &Entry) {
        if old.content != now.content {
            let op = if now.kind == Kind::Link { FileOp::Symlink } else { FileOp::Write };
            self.push(op, path, old.content, now.content);
        }
        let of = |entry: &Entry| metadata_digest(entry.mode, entry.uid, entry.gid);
        if (old.mode, old.uid, old.gid) != (now.mode, now.uid, now.gid) {
            self.push(FileOp::Chmod, path, of(old), of(now));
        }
    }
}
