//! The list of files that may be executed, in memory that PID 1 writes and the gate reads.
//!
//! What it guarantees: the gate sees a list that is complete, or none. It is completed once.
//! What it does not: say who may execute (see `permits`).
//! Who may call: PID 1, which writes it; the gate, which reads it.

use hotcell_wire::MAX_EXEC_ALLOW;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of a digest.
pub(crate) const DIGEST: usize = 4;
/// Words that the list takes: how many digests, with two flags, and the digests.
pub(crate) const WORDS: usize = 1 + MAX_EXEC_ALLOW * DIGEST;

/// In the first word above the number of digests: the list is complete and holds.
const HOLDS: u64 = 1 << 32;
/// Files on `/workspace` may be executed.
const WORKSPACE: u64 = 1 << 33;

/// The list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Approved {
    state: &'static AtomicU64,
    digests: &'static [AtomicU64],
}

/// The list as it holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    digests: &'static [AtomicU64],
    /// Whether files on `/workspace` may be executed.
    pub(crate) workspace: bool,
}

impl Approved {
    /// An empty one in [`WORDS`] words that are all zero; `None` where they are fewer.
    pub(crate) fn new(words: &'static [AtomicU64]) -> Option<Approved> {
        let (state, digests) = words.split_first()?;
        (words.len() == WORDS).then_some(Approved { state, digests })
    }

    /// PID 1: adds digests behind the first `listed`. Whether they fit.
    pub(crate) fn add(self, listed: usize, digests: &[[u8; 32]]) -> bool {
        let room = self.digests.get(listed * DIGEST..(listed + digests.len()) * DIGEST);
        for (word, bytes) in room.into_iter().flatten().zip(digests.as_flattened().as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        room.is_some()
    }

    /// PID 1: the list is the first `listed` digests, and holds from now on.
    pub(crate) fn complete(self, listed: usize, workspace: bool) {
        let flags = HOLDS | if workspace { WORKSPACE } else { 0 };
        self.state.store(flags | listed as u64, Ordering::Release);
    }

    /// The gate: the list, once it holds.
    pub(crate) fn list(self) -> Option<List> {
        let state = self.state.load(Ordering::Acquire);
        let digests = self.digests.get(..(state as u32 as usize).checked_mul(DIGEST)?).unwrap_or_default();
        (state & HOLDS != 0).then_some(List { digests, workspace: state & WORKSPACE != 0 })
    }
}

impl List {
    /// Whether it has this digest. Asked once for each file, since the gate keeps its answers.
    pub(crate) fn contains(self, digest: &[u8; 32]) -> bool {
        self.digests.chunks_exact(DIGEST).any(|words| read(words) == *digest)
    }
}

/// A digest's words, as its bytes.
pub(crate) fn read(words: &[AtomicU64]) -> [u8; 32] {
    let mut digest = [0; 32];
    for (bytes, word) in digest.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.load(Ordering::Relaxed).to_le_bytes();
    }
    digest
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_sys::guest::SharedWords;

    #[test]
    fn a_list_holds_once_it_is_complete_and_as_it_was_given() {
        let approved = Approved::new(SharedWords::new(WORDS).unwrap().words()).unwrap();
        assert!(approved.add(0, &[[1; 32], [2; 32]]) && approved.add(2, &[[3; 32]]));
        assert!(approved.list().is_none());
        approved.complete(3, true);
        let list = approved.list().unwrap();
        assert!(list.workspace);
        assert!([1, 2, 3].iter().all(|byte| list.contains(&[*byte; 32])));
        assert!(!list.contains(&[0; 32]), "what was not given is not on it");
        assert!(!list.contains(&[4; 32]));
    }

    #[test]
    fn an_empty_list_approves_nothing_and_none_is_longer_than_its_room() {
        let words = SharedWords::new(WORDS).unwrap().words();
        assert!(Approved::new(&words[1..]).is_none());
        let approved = Approved::new(words).unwrap();
        assert!(approved.add(MAX_EXEC_ALLOW - 1, &[[1; 32]]));
        assert!(!approved.add(MAX_EXEC_ALLOW - 1, &[[1; 32]; 2]));
        approved.complete(0, false);
        let list = approved.list().unwrap();
        assert!(!list.workspace && !list.contains(&[0; 32]) && !list.contains(&[1; 32]));
    }
}
