//! The chain of blocks: is it whole, and if not, what was done to it?
//!
//! How causes are told apart: a header names its height and the digest of the header before it, and an event its sequence.
//! ```text
//!  names the one before | height        | it is
//!  yes                  | next          | in its place
//!  yes                  | another       | its height was altered
//!  no                   | ahead         | behind removed blocks
//!  no                   | was missing   | moved
//!  no                   | was there     | repeated, if its header was seen; else of another chain
//!  no                   | next          | behind an altered header, if one bit explains it; else of another chain
//! ```
//! Inside a block, sequences say which event was removed, repeated or moved; a wrong root with all sequences in place
//! means that bytes were altered.
//! Guarantees: one pass, flat memory. An event is handed on before its block is known to be whole; the caller runs again
//! without the tail where the file ends inside a block. Called by [`crate::verify`].

use crate::dense::{Dense, Place, range_text};
use crate::finding::{Findings, Reason};
use crate::render::counted;
use hotcell_ledger::block::BLOCK_HEADER_LEN;
use hotcell_ledger::scan::{BlockEnd, BlockStart, Item, Scanner, Tail};
use hotcell_ledger::{BlockHeader, Checkpoint, Digest, Event, Payload};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read};

/// Headers that are remembered to recognise a repeated block.
const REMEMBERED_HEADERS: usize = 1024;
/// Broken links for which a flipped bit is searched: each costs hundreds of hashes, which a hostile chain of tiny blocks
/// must not get for each.
const MAX_BIT_SEARCHES: u32 = 16;

/// What one pass over the ledger found.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    pub(crate) findings: Findings,
    pub(crate) blocks: u64,
    pub(crate) events: u64,
    pub(crate) head: Digest,
    /// Whether the last event of the last whole block is RUN_END.
    pub(crate) ended: bool,
    /// Whether every block follows the one before it and has the root that it names: if so, and the head is another than
    /// it should be, somebody sealed it again.
    pub(crate) consistent: bool,
    /// Digest of the block below each height that was asked for, by place in the file.
    pub(crate) at_height: BTreeMap<u64, Digest>,
    pub(crate) tail: Option<Tail>,
}

impl Chain {
    pub(crate) fn checkpoint(&self) -> Checkpoint {
        Checkpoint { height: self.blocks, head: self.head }
    }
}

struct Pass {
    chain: Chain,
    heights: Dense,
    sequences: Dense,
    recent: VecDeque<Digest>,
    prev_header: Option<BlockHeader>,
    /// The block before was not in its place, so that this one can't follow it.
    displaced: bool,
    /// Blocks of another chain, which began or went on inside this one.
    foreign: bool,
    /// What becomes of this block's events.
    events: Attribution,
    anomaly_in_block: bool,
    last_is_run_end: bool,
    bit_searches: u32,
}

#[derive(Clone, Copy, PartialEq)]
enum Attribution {
    /// Sequences are checked.
    Check,
    /// The next event's sequence is taken as it is: its block is behind removed ones, or of another chain.
    Rebase,
    /// The block is repeated or moved; its events with it.
    Ignore,
}

/// Reads the ledger through; `wanted` are heights of checkpoints.
pub(crate) fn read(source: impl Read, wanted: &[u64], mut each: impl FnMut(&Event)) -> io::Result<Chain> {
    let mut pass = Pass {
        chain: Chain { consistent: true, ..Chain::default() },
        heights: Dense::default(),
        sequences: Dense::default(),
        recent: VecDeque::new(),
        prev_header: None,
        displaced: false,
        foreign: false,
        events: Attribution::Check,
        anomaly_in_block: false,
        last_is_run_end: false,
        bit_searches: 0,
    };
    let mut scanner = Scanner::new(source);
    while let Some(item) = scanner.next_item()? {
        match item {
            Item::Event(event) => {
                pass.event(&event);
                each(&event);
            }
            Item::Block(block) => pass.block(&block),
            Item::BlockEnd(end) => pass.block_end(&end, wanted),
            Item::Surplus(event) => {
                pass.surplus(&event);
                each(&event);
            }
            Item::Tail(tail) => pass.tail(tail),
            Item::Broken(broken) => {
                pass.chain.consistent = false;
                let detail = format!(
                    "the bytes at {} (block {}) are neither event nor header: {}; nothing behind them was read",
                    broken.offset, pass.chain.blocks, broken.why
                );
                pass.chain.findings.add(Reason::Unreadable, detail);
            }
        }
    }
    for gap in pass.sequences.missing() {
        pass.chain.findings.add(Reason::EventRemoved, format!("event {} is missing", range_text(gap)));
    }
    for gap in pass.heights.missing() {
        pass.chain.findings.add(Reason::BlockRemoved, format!("block {} is missing", range_text(gap)));
    }
    Ok(pass.chain)
}

impl Pass {
    fn block(&mut self, block: &BlockStart) {
        let height = block.header.height;
        let index = self.chain.blocks;
        let place = self.heights.place(height);
        self.chain.consistent &= block.follows() && place == Place::Next;
        let was_displaced = std::mem::replace(&mut self.displaced, false);
        self.events = Attribution::Check;
        self.anomaly_in_block = false;
        let after_prev = self.prev_header.map_or(0, |prev| prev.height.saturating_add(1));
        self.foreign &= block.follows() && height == after_prev;
        if self.foreign {
            self.events = Attribution::Ignore;
        } else if block.follows() {
            if place != Place::Next {
                let detail =
                    format!("block {index} says that it is block {height}, and follows the one before it");
                self.chain.findings.add(Reason::HeaderAltered, detail);
                self.displaced = true;
            }
            self.heights.take(self.heights.next());
        } else {
            match place {
                Place::Ahead => {
                    self.heights.take(height);
                    self.events = Attribution::Rebase;
                }
                Place::Late => {
                    self.heights.take(height);
                    self.chain.findings.add(
                        Reason::BlockReordered,
                        format!("block {height} stands at place {index}, behind a later one"),
                    );
                    self.displaced = true;
                    self.events = Attribution::Ignore;
                }
                Place::Again if self.recent.contains(&block.digest) => {
                    self.chain.findings.add(
                        Reason::BlockDuplicated,
                        format!("block {height} is there again, at place {index}"),
                    );
                    self.displaced = true;
                    self.events = Attribution::Ignore;
                }
                Place::Again => {
                    let what = if block.header.prev_hash.is_zero() { "begins" } else { "goes on" };
                    let detail = format!("at place {index} another chain {what}, with its block {height}");
                    self.chain.findings.add(Reason::Spliced, detail);
                    self.displaced = true;
                    self.foreign = true;
                    self.events = Attribution::Ignore;
                }
                Place::Next => {
                    self.heights.take(height);
                    if !was_displaced {
                        self.broken_link(block);
                        self.events = Attribution::Rebase;
                    }
                }
            }
        }
        if block.header.event_count == 0 {
            self.chain.findings.add(Reason::EventCount, format!("block {height} says that it has no events"));
        }
        self.recent.push_back(block.digest);
        if self.recent.len() > REMEMBERED_HEADERS {
            self.recent.pop_front();
        }
        self.prev_header = Some(block.header);
    }

    /// A block at its height that does not name the header before it.
    fn broken_link(&mut self, block: &BlockStart) {
        let height = block.header.height;
        self.bit_searches += 1;
        let search = self.bit_searches <= MAX_BIT_SEARCHES;
        let (reason, detail) = if differs_by_one_bit(&block.header.prev_hash, &block.prev_digest) {
            (Reason::HeaderAltered, format!("one bit of block {height}'s prev_hash is flipped"))
        } else if let Some(bit) =
            self.prev_header.filter(|_| search).and_then(|prev| flipped_bit(&prev, &block.header.prev_hash))
        {
            let before = height.saturating_sub(1);
            (Reason::HeaderAltered, format!("bit {bit} of block {before}'s header is flipped"))
        } else {
            let detail = format!(
                "block {height} does not follow the block before it: it is of another chain, or the one before was sealed again"
            );
            (Reason::Spliced, detail)
        };
        self.chain.findings.add(reason, detail);
    }

    fn event(&mut self, event: &Event) {
        self.chain.events = self.chain.events.saturating_add(1);
        self.last_is_run_end = event.payload == Payload::RunEnd;
        let (reason, what) = match self.events {
            Attribution::Ignore => return,
            Attribution::Rebase => {
                self.events = Attribution::Check;
                self.sequences.rebase(event.sequence);
                return;
            }
            Attribution::Check => match self.sequences.take(event.sequence) {
                Place::Next => return,
                Place::Ahead => {
                    self.anomaly_in_block = true;
                    return;
                }
                Place::Late => (Reason::EventReordered, "stands behind a later one"),
                Place::Again => (Reason::EventDuplicated, "is there again"),
            },
        };
        self.anomaly_in_block = true;
        let detail = format!("event {} {what}, in block {}", event.sequence, self.chain.blocks);
        self.chain.findings.add(reason, detail);
    }

    fn surplus(&mut self, event: &Event) {
        self.chain.consistent = false;
        let explained = self.anomaly_in_block;
        self.event(event);
        if !explained && !self.anomaly_in_block {
            let detail = format!("event {} stands behind block {}'s last", event.sequence, self.last_block());
            self.chain.findings.add(Reason::EventCount, detail);
        }
        self.last_is_run_end = false;
    }

    fn last_block(&self) -> u64 {
        self.chain.blocks.saturating_sub(1)
    }

    fn block_end(&mut self, end: &BlockEnd, wanted: &[u64]) {
        let height = self.chain.blocks;
        self.chain.consistent &= end.fits();
        if end.events < end.header.event_count {
            let detail = format!(
                "block {height} has {} where its header says {}",
                counted(end.events, "event"),
                end.header.event_count
            );
            self.chain.findings.add(Reason::EventCount, detail);
        } else if !end.fits() && !self.anomaly_in_block {
            let detail = format!(
                "block {height} has {} in order, without the root that its header names",
                counted(end.events, "event")
            );
            self.chain.findings.add(Reason::EventAltered, detail);
        }
        self.chain.blocks = height.saturating_add(1);
        self.chain.head = end.digest;
        self.chain.ended = self.last_is_run_end;
        if wanted.contains(&self.chain.blocks) {
            self.chain.at_height.insert(self.chain.blocks, end.digest);
        }
    }

    fn tail(&mut self, tail: Tail) {
        let height = self.chain.blocks;
        if tail.root_fits {
            let says = tail.header.map_or(0, |header| header.event_count);
            let has = counted(tail.whole_events, "event");
            let detail = format!("block {height} has {has} where its header says {says}");
            self.chain.findings.add(Reason::EventCount, detail);
        } else {
            let detail = format!(
                "the file ends inside block {height}, which is lost: {} with {}",
                counted(tail.lost_bytes, "byte"),
                counted(tail.whole_events, "whole event")
            );
            self.chain.findings.add(Reason::TruncatedTail, detail);
        }
        self.chain.tail = Some(tail);
        // Events of an unfinished block are no part of the record.
        self.chain.events = self.chain.events.saturating_sub(tail.whole_events);
    }
}

fn differs_by_one_bit(a: &Digest, b: &Digest) -> bool {
    a.as_bytes().iter().zip(b.as_bytes()).map(|(x, y)| (x ^ y).count_ones()).sum::<u32>() == 1
}

/// The one bit whose flip gives a header with this digest.
fn flipped_bit(header: &BlockHeader, digest: &Digest) -> Option<usize> {
    let bytes = header.to_bytes();
    (0..BLOCK_HEADER_LEN * 8).find(|bit| {
        let mut flipped = bytes;
        if let Some(byte) = flipped.get_mut(bit / 8) {
            *byte ^= 1 << (bit % 8);
        }
        BlockHeader::from_bytes(&flipped).digest() == *digest
    })
}
