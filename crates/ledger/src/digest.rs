//! Digests and domain-separated commitments.
//!
//! A [`Digest`] is 32 bytes of BLAKE3-256. Two kinds of digest exist and must
//! not be confused: [`Digest::of`] addresses content (objects, files), with no
//! tag; [`commit`] is what the ledger is built from, with the domain's tag put
//! before the bytes. Anyone may call both; nothing here does I/O.

use core::fmt;

/// What a commitment is over. The tag of each domain is fixed for ever by
/// AMES-V1, section "Commitment".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Domain {
    /// One event's canonical bytes.
    Event,
    /// One 32-byte Merkle leaf.
    MerkleLeaf,
    /// Left child then right child.
    MerkleNode,
    /// The 88-byte block header.
    Block,
    /// Height and head digest.
    Checkpoint,
}

impl Domain {
    /// The ASCII tag that is hashed before the bytes.
    pub const fn tag(self) -> &'static [u8] {
        match self {
            Domain::Event => b"AMES_V1_EVENT",
            Domain::MerkleLeaf => b"AMES_V1_MERKLE_LEAF",
            Domain::MerkleNode => b"AMES_V1_MERKLE_NODE",
            Domain::Block => b"AMES_V1_BLOCK",
            Domain::Checkpoint => b"AMES_V1_CHECKPOINT",
        }
    }
}

/// A BLAKE3-256 digest; by default [`Digest::ZERO`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Thirty-two zero bytes: "did not exist", "not known", genesis.
    pub const ZERO: Digest = Digest([0; 32]);

    /// The digest of content, untagged: the name of an object.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    /// The digest of all that a reader gives, with flat memory.
    ///
    /// # Errors
    /// Reading failed.
    pub fn of_reader(reader: impl std::io::Read) -> std::io::Result<Digest> {
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(reader)?;
        Ok(Digest(*hasher.finalize().as_bytes()))
    }

    /// Takes digest bytes as they are.
    pub const fn from_bytes(bytes: [u8; 32]) -> Digest {
        Digest(bytes)
    }

    /// The 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Whether this is [`Digest::ZERO`].
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 32]
    }

    /// Sixty-four lower-case hexadecimal digits.
    pub fn to_hex(&self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// Parses exactly sixty-four lower-case hexadecimal digits; anything else is `None`.
    pub fn from_hex(text: &str) -> Option<Digest> {
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return None;
        }
        blake3::Hash::from_hex(text).ok().map(|hash| Digest(*hash.as_bytes()))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

/// Up to this length tag and bytes are laid side by side and hashed in one call: an incremental hasher's set-up costs
/// as much as hashing an ordinary event.
const ONE_SHOT_LEN: usize = 256;

/// `BLAKE3-256(tag || bytes)`.
#[inline]
pub fn commit(domain: Domain, bytes: &[u8]) -> Digest {
    let tag = domain.tag();
    let mut joined = [0u8; ONE_SHOT_LEN];
    let len = tag.len() + bytes.len();
    if let Some(slots) = joined.get_mut(..len)
        && let Some((head, rest)) = slots.split_at_mut_checked(tag.len())
    {
        head.copy_from_slice(tag);
        rest.copy_from_slice(bytes);
        return Digest(*blake3::hash(slots).as_bytes());
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(tag);
    hasher.update(bytes);
    Digest(*hasher.finalize().as_bytes())
}
