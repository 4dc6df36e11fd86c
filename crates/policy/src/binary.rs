//! Which executables may run: an allowlist of digests, sealed.
//!
//! No removal, no update, no pattern. Membership takes the same time wherever in
//! the list the digest is, and whether it is there at all: the guest must not
//! learn the list by timing its execs.

use hotcell_ledger::Digest;
use subtle::{Choice, ConstantTimeEq};

/// An allowlist that still grows.
#[derive(Clone, Debug, Default)]
pub struct BinaryDraft {
    digests: Vec<Digest>,
}

impl BinaryDraft {
    /// An empty list.
    pub fn new() -> BinaryDraft {
        BinaryDraft::default()
    }

    /// Approves an executable. The zero digest stands for "not known" and is never approved.
    pub fn approve(&mut self, digest: Digest) -> &mut BinaryDraft {
        if !digest.is_zero() {
            self.digests.push(digest);
        }
        self
    }

    /// Seals the list.
    pub fn seal(mut self) -> BinaryPolicy {
        self.digests.sort_unstable();
        self.digests.dedup();
        BinaryPolicy { digests: self.digests.into_boxed_slice() }
    }
}

/// Whether an executable is approved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Membership {
    /// It is in the list.
    Approved,
    /// It is not.
    Unknown,
}

/// The sealed allowlist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BinaryPolicy {
    digests: Box<[Digest]>,
}

impl BinaryPolicy {
    /// Whether the executable with this digest may run; in constant time for a list of this length.
    pub fn membership(&self, digest: &Digest) -> Membership {
        let mut found = Choice::from(0);
        for approved in &self.digests {
            found |= approved.as_bytes().ct_eq(digest.as_bytes());
        }
        if bool::from(found) { Membership::Approved } else { Membership::Unknown }
    }

    /// How many executables are approved.
    pub fn len(&self) -> usize {
        self.digests.len()
    }

    /// Whether nothing is approved.
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    /// What is approved, sorted: for the guest's gate.
    pub fn digests(&self) -> impl ExactSizeIterator<Item = &Digest> {
        self.digests.iter()
    }

    /// The list as a file: one hexadecimal digest a line, sorted.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = String::with_capacity(self.digests.len() * 65);
        for digest in &self.digests {
            text.push_str(&digest.to_hex());
            text.push('\n');
        }
        text.into_bytes()
    }

    /// Reads such a file; anything but sorted, unique, non-zero digests is `None`.
    pub fn from_bytes(bytes: &[u8]) -> Option<BinaryPolicy> {
        let mut draft = BinaryDraft::new();
        for line in core::str::from_utf8(bytes).ok()?.lines() {
            draft.approve(Digest::from_hex(line)?);
        }
        let policy = draft.seal();
        (policy.to_bytes() == bytes).then_some(policy)
    }

    /// The digest of that file: what a spec names.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_approved_is_a_member() {
        let mut draft = BinaryDraft::new();
        draft
            .approve(Digest::of(b"sh"))
            .approve(Digest::of(b"ls"))
            .approve(Digest::of(b"sh"))
            .approve(Digest::ZERO);
        let policy = draft.seal();
        assert_eq!(policy.len(), 2);
        assert_eq!(policy.membership(&Digest::of(b"sh")), Membership::Approved);
        assert_eq!(policy.membership(&Digest::of(b"cp")), Membership::Unknown);
        assert_eq!(policy.membership(&Digest::ZERO), Membership::Unknown);
        assert_eq!(BinaryDraft::new().seal().membership(&Digest::ZERO), Membership::Unknown);
    }

    #[test]
    fn the_file_has_one_spelling() {
        let mut draft = BinaryDraft::new();
        draft.approve(Digest::of(b"a")).approve(Digest::of(b"b"));
        let policy = draft.seal();
        let bytes = policy.to_bytes();
        assert_eq!(BinaryPolicy::from_bytes(&bytes), Some(policy));
        let mut swapped = bytes[65..].to_vec();
        swapped.extend_from_slice(&bytes[..65]);
        assert_eq!(BinaryPolicy::from_bytes(&swapped), None);
        assert_eq!(BinaryPolicy::from_bytes(&bytes[..64]), None);
        assert_eq!(BinaryPolicy::from_bytes(b"\n"), None);
        assert!(BinaryPolicy::from_bytes(b"").is_some());
    }
}
