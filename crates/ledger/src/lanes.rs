//! Many short commitments at once.
//!
//! A block's root takes three hashes for each event: the event, its leaf, and one node. Each is a few dozen bytes, and
//! BLAKE3's stable interface hashes one message at a time: on our reference machine 5 compressions of 65 ns and 20 ns of
//! set-up for each message, some 430 ns an event, which leaves nothing for encoding at 2 million events a second. The
//! same crate's own kernels do 8 first blocks in the time of two. They are reached through `blake3::platform`, which is
//! public and exempt from its promise of stability; so this file is the only one that names it, the version is held by
//! the manifest to one minor release, and the tests below hold every length to the stable interface's answer.
//!
//! ```text
//! slot:  tag || message || zeros      first whole blocks: hash_many, several messages at once
//!        '--64--''--64--''--64--'     last block, 1 to 64 bytes: one compression, with its true length
//! ```
//! Called by [`crate::merkle`] alone.

use crate::digest::{Digest, Domain, commit};
use blake3::platform::Platform;
use blake3::{BLOCK_LEN, IncrementCounter};

/// Messages in one batch: a power of two, so that a full batch is one subtree of the Merkle tree; few enough that two
/// batches stay in a core's first cache.
pub(crate) const BATCH: usize = 32;
/// Tag and message that fit a slot; longer ones are hashed by the stable interface.
const SLOT_LEN: usize = 4 * BLOCK_LEN;

const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const ROOT: u8 = 8;
/// BLAKE3's initial chaining value (that of SHA-256).
const IV: [u32; 8] =
    [0x6A09_E667, 0xBB67_AE85, 0x3C6E_F372, 0xA54F_F53A, 0x510E_527F, 0x9B05_688C, 0x1F83_D9AB, 0x5BE0_CD19];

const _: () = assert!(SLOT_LEN == 4 * BLOCK_LEN && BATCH.is_power_of_two() && SLOT_LEN < blake3::CHUNK_LEN);

#[derive(Clone)]
struct Slot {
    bytes: [u8; SLOT_LEN],
    /// Of tag and message; more than [`SLOT_LEN`] where `digest` is the answer already.
    len: usize,
    digest: Digest,
}

impl Slot {
    /// Whole blocks before the last one.
    fn first_blocks(&self) -> usize {
        self.len.saturating_sub(1) / BLOCK_LEN
    }
}

/// Up to [`BATCH`] messages of one domain.
#[derive(Clone)]
pub(crate) struct Batch {
    platform: Platform,
    slots: Vec<Slot>,
    used: usize,
    /// A bit for each number of whole blocks that some message has before its last one.
    lengths: u8,
}

impl core::fmt::Debug for Batch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Batch({})", self.used)
    }
}

impl Default for Batch {
    fn default() -> Batch {
        Batch { platform: Platform::detect(), slots: Vec::new(), used: 0, lengths: 0 }
    }
}

impl Batch {
    pub(crate) fn len(&self) -> usize {
        self.used
    }

    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.lengths = 0;
    }

    /// Adds a message, given in two parts. Inlined, so that leaves and nodes are copied by their constant lengths.
    #[inline(always)]
    pub(crate) fn push(&mut self, domain: Domain, head: &[u8], rest: &[u8]) {
        if self.used == self.slots.len() {
            self.slots.push(Slot { bytes: [0; SLOT_LEN], len: 0, digest: Digest::ZERO });
        }
        let Some(slot) = self.slots.get_mut(self.used) else { return };
        self.used += 1;
        let tag = domain.tag();
        slot.len = tag.len() + head.len() + rest.len();
        let written = slot.bytes.split_at_mut_checked(tag.len()).and_then(|(tag_slot, after)| {
            tag_slot.copy_from_slice(tag);
            let (head_slot, after) = after.split_at_mut_checked(head.len())?;
            head_slot.copy_from_slice(head);
            let (rest_slot, after) = after.split_at_mut_checked(rest.len())?;
            rest_slot.copy_from_slice(rest);
            // Zeros up to the end of the last block.
            after.get_mut(..slot.len.next_multiple_of(BLOCK_LEN) - slot.len)?.fill(0);
            Some(())
        });
        if written.is_none() {
            slot.len = SLOT_LEN + 1;
            slot.digest = commit(domain, &[head, rest].concat());
        } else {
            self.lengths |= 1 << slot.first_blocks();
        }
    }

    /// Hashes them all, forgets them, and gives the digests in order.
    pub(crate) fn finish(&mut self, out: &mut Vec<Digest>) {
        let platform = self.platform;
        let slots = self.slots.get_mut(..self.used).unwrap_or_default();
        let lengths = core::mem::take(&mut self.lengths);
        for group in slots.chunks_mut(BATCH) {
            for blocks in (0..4).filter(|blocks| lengths >> blocks & 1 == 1) {
                match blocks {
                    0 => last_blocks(platform, group, 0, |_| IV),
                    1 => first_then_last::<{ BLOCK_LEN }>(platform, group),
                    2 => first_then_last::<{ 2 * BLOCK_LEN }>(platform, group),
                    _ => first_then_last::<{ 3 * BLOCK_LEN }>(platform, group),
                }
            }
        }
        out.clear();
        out.extend(slots.iter().map(|slot| slot.digest));
        self.used = 0;
    }
}

/// Does the messages with exactly `N` bytes of whole blocks before the last one.
fn first_then_last<const N: usize>(platform: Platform, slots: &mut [Slot]) {
    let blocks = N / BLOCK_LEN;
    let none = [0u8; N];
    let mut inputs = [&none; BATCH];
    let fitting = slots.iter().filter(|slot| slot.len <= SLOT_LEN && slot.first_blocks() == blocks);
    let mut count = 0;
    for (input, slot) in inputs.iter_mut().zip(fitting) {
        if let Some(first) = slot.bytes.first_chunk::<N>() {
            *input = first;
            count += 1;
        }
    }
    if count == 0 {
        return;
    }
    let mut chained = [0u8; 32 * BATCH];
    let inputs = inputs.get(..count).unwrap_or_default();
    platform.hash_many(inputs, &IV, 0, IncrementCounter::No, 0, CHUNK_START, 0, &mut chained);
    last_blocks(platform, slots, blocks, |index| {
        let mut words = [0u32; 8];
        let bytes = chained.get(32 * index..).unwrap_or_default();
        for (word, four) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = four.first_chunk().map_or(0, |four| u32::from_le_bytes(*four));
        }
        words
    });
}

/// The last block of each message with so many before it; `chained` gives the value after those, by the message's place
/// among its like.
fn last_blocks(platform: Platform, slots: &mut [Slot], blocks: usize, chained: impl Fn(usize) -> [u32; 8]) {
    let flags = CHUNK_END | ROOT | if blocks == 0 { CHUNK_START } else { 0 };
    let like = slots.iter_mut().filter(|slot| slot.len <= SLOT_LEN && slot.first_blocks() == blocks);
    for (index, slot) in like.enumerate() {
        let mut words = chained(index);
        let start = blocks * BLOCK_LEN;
        let (Some(block), Ok(len)) = (
            slot.bytes.get(start..).and_then(|rest| rest.first_chunk::<BLOCK_LEN>()),
            u8::try_from(slot.len - start),
        ) else {
            continue;
        };
        platform.compress_in_place(&mut words, block, len, 0, flags);
        let mut digest = [0u8; 32];
        for (four, word) in digest.chunks_exact_mut(4).zip(words) {
            four.copy_from_slice(&word.to_le_bytes());
        }
        slot.digest = Digest::from_bytes(digest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each length up to well past a slot, alone and among others, in every domain.
    #[test]
    fn every_length_is_as_the_stable_interface_has_it() {
        let bytes: Vec<u8> = (0..600u32).map(|i| (i * 7 % 251) as u8).collect();
        for domain in [Domain::Event, Domain::MerkleLeaf, Domain::MerkleNode] {
            let mut batch = Batch::default();
            let mut out = Vec::new();
            for len in 0..bytes.len() {
                batch.push(domain, &bytes[..len / 3], &bytes[len / 3..len]);
                batch.finish(&mut out);
                assert_eq!(out, [commit(domain, &bytes[..len])], "{len}");
            }
            for stride in [1, 3, 64, 97] {
                let lens: Vec<usize> = (0..BATCH).map(|i| i * stride % bytes.len()).collect();
                lens.iter().for_each(|len| batch.push(domain, &bytes[..*len], b""));
                batch.finish(&mut out);
                let expected: Vec<_> = lens.iter().map(|len| commit(domain, &bytes[..*len])).collect();
                assert_eq!(out, expected, "{stride}");
            }
        }
    }
}
