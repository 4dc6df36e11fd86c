//! The Merkle root over a block's events, and proofs that one leaf is under it.
//!
//! ```text
//!            root
//!           /    \
//!         n01     \        leaf i = MERKLE_LEAF(digest i); a node = MERKLE_NODE(left || right)
//!        /   \     \       the last node of an odd level is promoted unchanged, never duplicated: duplicating it
//!       l0   l1    l2      lets two different lists have one root (CVE-2012-2459)
//! ```
//! [`Frontier`] computes the root as leaves come, in memory logarithmic in their number: what a header claims about the
//! number of events costs nothing. Pure; anyone may call it.

use crate::digest::{Digest, Domain, commit};
use crate::lanes::{BATCH, Batch};

/// A proof has at most one sibling for each level of a tree of 2^64 leaves.
pub const MAX_PROOF_LEN: usize = 64;

fn leaf(digest: &Digest) -> Digest {
    commit(Domain::MerkleLeaf, digest.as_bytes())
}

fn node(left: &Digest, right: &Digest) -> Digest {
    let mut both = [0u8; 64];
    let (l, r) = both.split_at_mut(32);
    l.copy_from_slice(left.as_bytes());
    r.copy_from_slice(right.as_bytes());
    commit(Domain::MerkleNode, &both)
}

/// The roots of the complete subtrees over the leaves so far, largest first.
#[derive(Clone, Debug, Default)]
pub struct Frontier {
    count: u64,
    peaks: Vec<Digest>,
}

impl Frontier {
    /// A frontier over nothing.
    pub fn new() -> Frontier {
        Frontier::default()
    }

    /// Adds the next leaf, given as the digest that it stands for.
    pub fn push(&mut self, digest: &Digest) {
        self.push_subtree(leaf(digest), 0);
    }

    /// Adds the root of the next `2^height` leaves; so many must divide the count so far.
    fn push_subtree(&mut self, mut top: Digest, height: u32) {
        let mut level = self.count >> height;
        while level & 1 == 1 {
            let Some(left) = self.peaks.pop() else { break };
            top = node(&left, &top);
            level >>= 1;
        }
        self.peaks.push(top);
        self.count = self.count.wrapping_add(1 << height);
    }

    /// How many leaves there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The root over the leaves so far; [`Digest::ZERO`] over none.
    pub fn root(&self) -> Digest {
        let mut peaks = self.peaks.iter().rev();
        let Some(smallest) = peaks.next() else { return Digest::ZERO };
        peaks.fold(*smallest, |right, left| node(left, &right))
    }

    /// Forgets the leaves and keeps the memory.
    pub fn clear(&mut self) {
        self.count = 0;
        self.peaks.clear();
    }
}

/// The root over a block's events, from their canonical bytes, many hashes at a time.
#[derive(Debug, Default)]
pub(crate) struct EventRoots {
    frontier: Frontier,
    batch: Batch,
    nodes: Batch,
    level: Vec<Digest>,
    next_level: Vec<Digest>,
}

impl EventRoots {
    #[inline]
    pub(crate) fn push(&mut self, event: &[u8]) {
        self.batch.push(Domain::Event, event, b"");
        if self.batch.len() == BATCH {
            self.flush();
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.frontier.count + u64::try_from(self.batch.len()).unwrap_or(0)
    }

    pub(crate) fn root(&mut self) -> Digest {
        self.flush();
        self.frontier.root()
    }

    pub(crate) fn clear(&mut self) {
        self.frontier.clear();
        self.batch.clear();
    }

    /// A full batch is one subtree; a part of one, which only a block's end has, is one for each bit of its length.
    fn flush(&mut self) {
        self.batch.finish(&mut self.level);
        self.level.iter().for_each(|event| self.nodes.push(Domain::MerkleLeaf, event.as_bytes(), b""));
        self.nodes.finish(&mut self.level);
        let mut height = BATCH.ilog2();
        while !self.level.is_empty() {
            if self.level.len() >= 1 << height {
                let rest = self.level.split_off(1 << height);
                self.reduce(height);
                self.level = rest;
            }
            height = height.saturating_sub(1);
        }
    }

    /// Adds the subtree over `level`, which has `2^height` leaves.
    fn reduce(&mut self, height: u32) {
        while let [_, _, ..] = self.level.as_slice() {
            for pair in self.level.chunks_exact(2) {
                if let [left, right] = pair {
                    self.nodes.push(Domain::MerkleNode, left.as_bytes(), right.as_bytes());
                }
            }
            self.nodes.finish(&mut self.next_level);
            core::mem::swap(&mut self.level, &mut self.next_level);
        }
        if let Some(top) = self.level.first().copied() {
            self.frontier.push_subtree(top, height);
        }
    }
}

/// The root over these leaves; [`Digest::ZERO`] over none.
pub fn root(leaves: &[Digest]) -> Digest {
    let mut frontier = Frontier::new();
    leaves.iter().for_each(|leaf| frontier.push(leaf));
    frontier.root()
}

/// One step of an inclusion proof, from the leaf upwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The other child.
    pub sibling: Digest,
    /// Whether the sibling is the right child.
    pub sibling_is_right: bool,
}

/// The path from leaf `index` to the root; `None` when there is no such leaf. A promoted node contributes no step.
pub fn prove(leaves: &[Digest], index: usize) -> Option<Vec<Step>> {
    leaves.get(index)?;
    let mut level: Vec<Digest> = leaves.iter().map(leaf).collect();
    let mut at = index;
    let mut steps = Vec::new();
    while level.len() > 1 {
        let sibling_is_right = at & 1 == 0;
        let sibling = if sibling_is_right { at.checked_add(1) } else { at.checked_sub(1) };
        if let Some(sibling) = sibling.and_then(|i| level.get(i)) {
            steps.push(Step { sibling: *sibling, sibling_is_right });
        }
        level = level
            .chunks(2)
            .filter_map(|pair| match pair {
                [left, right] => Some(node(left, right)),
                [promoted] => Some(*promoted),
                _ => None,
            })
            .collect();
        at /= 2;
    }
    Some(steps)
}

/// Whether `digest` is a leaf under `root` by this path.
#[must_use]
pub fn verify_inclusion(digest: &Digest, path: &[Step], root: &Digest) -> bool {
    if path.len() > MAX_PROOF_LEN {
        return false;
    }
    let top = path.iter().fold(leaf(digest), |top, step| {
        if step.sibling_is_right { node(&top, &step.sibling) } else { node(&step.sibling, &top) }
    });
    top == *root
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn leaves(n: usize) -> Vec<Digest> {
        (0..n).map(|i| Digest::of(&i.to_be_bytes())).collect()
    }

    proptest! {
        #[test]
        fn every_leaf_is_proven_and_no_other(n in 1usize..70, pick: prop::sample::Index, other: prop::sample::Index) {
            let all = leaves(n);
            let (index, other) = (pick.index(n), other.index(n));
            let path = prove(&all, index).unwrap();
            prop_assert!(verify_inclusion(&all[index], &path, &root(&all)));
            prop_assert_eq!(verify_inclusion(&all[other], &path, &root(&all)), other == index);
            for cut in 0..path.len() {
                prop_assert!(!verify_inclusion(&all[index], &path[..cut], &root(&all)));
                let mut turned = path.clone();
                turned[cut].sibling_is_right = !turned[cut].sibling_is_right;
                prop_assert!(!verify_inclusion(&all[index], &turned, &root(&all)));
            }
        }
    }

    /// All sizes of a block around the batch, used twice: the batched root is the plain one.
    #[test]
    fn batches_have_the_same_root() {
        let mut roots = EventRoots::default();
        for n in (0..2 * BATCH + 3).chain([1000, 1024]) {
            let events: Vec<Vec<u8>> = (0..n).map(|i| vec![i as u8; i % 300]).collect();
            events.iter().for_each(|event| roots.push(event));
            assert_eq!(roots.count(), n as u64);
            let digests: Vec<_> = events.iter().map(|event| commit(Domain::Event, event)).collect();
            assert_eq!(roots.root(), root(&digests), "{n}");
            roots.clear();
        }
    }

    #[test]
    fn a_duplicated_last_leaf_changes_the_root() {
        let mut all = leaves(3);
        let before = root(&all);
        all.push(all[2]);
        assert_ne!(before, root(&all));
        assert_eq!(prove(&all, 4), None);
    }
}
