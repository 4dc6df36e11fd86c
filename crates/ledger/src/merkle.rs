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
    #[inline]
    pub fn push(&mut self, digest: &Digest) {
        let mut top = leaf(digest);
        let mut level = self.count;
        while level & 1 == 1 {
            let Some(left) = self.peaks.pop() else { break };
            top = node(&left, &top);
            level >>= 1;
        }
        self.peaks.push(top);
        self.count = self.count.wrapping_add(1);
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

    #[test]
    fn a_duplicated_last_leaf_changes_the_root() {
        let mut all = leaves(3);
        let before = root(&all);
        all.push(all[2]);
        assert_ne!(before, root(&all));
        assert_eq!(prove(&all, 4), None);
    }
}
