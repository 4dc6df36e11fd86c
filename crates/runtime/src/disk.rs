//! What the disk's observer is told of the policy.
//!
//! It bounds what it lists by what explains a change, so it asks. The judge never believes it: it
//! has the sealed policy and the recorded copies, and rules on every change for itself.

use hotcell_observe::disk::{Explain, Explained};
use hotcell_policy::{CapabilityPolicy, CleanPath, WriteGrant};
use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Paths to which the host copied something, as the record spells them. Written by the recorder, read by the observer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copied(Arc<Mutex<Paths>>);

#[derive(Debug, Default)]
struct Paths {
    all: BTreeSet<String>,
    /// Copies into the machine that are not over.
    under_way: usize,
}

impl Copied {
    /// Notes one, after it was recorded.
    pub(crate) fn add(&self, path: &str) {
        if let Ok(path) = CleanPath::clean(path) {
            self.paths().all.insert(path.to_nfc().as_str().to_owned());
        }
    }

    fn paths(&self) -> MutexGuard<'_, Paths> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy into the machine begins.
    pub(crate) fn begin(&self) {
        self.paths().under_way += 1;
    }

    /// It is over, and what the guest has of it is on its disk.
    pub(crate) fn end(&self) {
        let mut paths = self.paths();
        paths.under_way = paths.under_way.saturating_sub(1);
    }

    /// What explains a path that is one, or a directory on the way to one.
    fn explain(&self, path: &str) -> Explained {
        let paths = self.paths();
        match (paths.covers(path), paths.under_way) {
            (false, _) => Explained::No,
            (true, 0) => Explained::Copied,
            (true, _) => Explained::Copying,
        }
    }
}

impl Paths {
    fn covers(&self, path: &str) -> bool {
        let below = format!("{path}/");
        let mut later = self.all.range::<str, _>((Bound::Included(below.as_str()), Bound::Unbounded));
        self.all.contains(path) || later.next().is_some_and(|first| first.starts_with(&below))
    }
}

/// What explains a change of a path.
pub(crate) fn explain(policy: &CapabilityPolicy, copied: &Copied) -> Explain {
    let (policy, copied) = (policy.clone(), copied.clone());
    Box::new(move |text| {
        let Ok(path) = CleanPath::clean(text) else { return Explained::No };
        let tree = || policy.write_trees().iter().find(|tree| path.is_within(tree));
        match policy.write_grant(&path) {
            WriteGrant::Exact => Explained::By(path.as_str().to_owned()),
            WriteGrant::Tree => Explained::By(tree().map_or(path.as_str(), |tree| tree.as_str()).to_owned()),
            WriteGrant::None => copied.explain(text),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_policy::{ImageRef, PolicyDraft, RunDraft};

    #[test]
    fn grants_come_before_copies_and_nothing_else_explains() {
        let mut draft = PolicyDraft::default();
        draft.capabilities.write = vec!["/workspace/out.txt".into()];
        draft.capabilities.write_trees = vec!["/workspace/tree".into()];
        let some = hotcell_ledger::Digest::of(b"image");
        let image = ImageRef { name: "image".into(), kernel: some, initramfs: some, root: some };
        let spec = RunDraft::new("demo-0001", image, draft).seal().unwrap();
        let copied = Copied::default();
        copied.add("/workspace/in/a/b");
        let explain = explain(spec.policy().capabilities(), &copied);
        for (path, expected) in [
            ("/workspace/out.txt", Explained::By("/workspace/out.txt".into())),
            ("/workspace/tree", Explained::By("/workspace/tree".into())),
            ("/workspace/tree/a/b", Explained::By("/workspace/tree".into())),
            ("/workspace/in/a/b", Explained::Copied),
            ("/workspace/in/a", Explained::Copied),
            ("/workspace/in", Explained::Copied),
            ("/workspace/in/a/c", Explained::No),
            ("/workspace/i", Explained::No),
            ("/workspace", Explained::Copied),
            ("/workspace/out.txt/x", Explained::No),
        ] {
            assert_eq!(explain(path), expected, "{path}");
        }
        copied.begin();
        assert_eq!(explain("/workspace/in/a/b"), Explained::Copying);
        assert_eq!(explain("/workspace/in/a/c"), Explained::No);
        copied.end();
        assert_eq!(explain("/workspace/in/a/b"), Explained::Copied);
    }
}
