//! Reads a ledger's bytes as they are, and goes on past what is wrong with them where the structure lets it.
//!
//! ```text
//!            88 bytes                 event_count events                 the next block
//!  Boundary ---------> Block(header) --> Event, Event, ... --> BlockEnd --> Boundary
//!     |  an event where a header belongs: Surplus                |
//!     |  fewer bytes than a header: Tail (last)                  |  the next block's header where an event belongs:
//!     '  neither: Broken (last)                                     BlockEnd, short;  end of file: Tail (last);
//!                                                                   neither: Broken (last)
//! ```
//! Guarantees: reports root, chain and counts, and judges none of them; flat memory (one buffer that grows to the largest
//! event there is, and the Merkle frontier), whatever a header claims; no bytes make it panic.
//! Events come before their block's root is known: they count once [`Item::BlockEnd`] has come with a root that fits.
//! Called by [`crate::reader`] (strict) and by verifiers that must say *what* is wrong.

use crate::block::{BLOCK_HEADER_LEN, BlockHeader};
use crate::digest::Digest;
use crate::event::{DecodeError, EVENT_HEADER_LEN, Event};
use crate::merkle::EventRoots;
use std::io::{self, Read};

/// Bytes that are read at once.
const CHUNK_LEN: usize = 64 << 10;

/// A block begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStart {
    /// Its header, as it is.
    pub header: BlockHeader,
    /// The header's BLOCK digest.
    pub digest: Digest,
    /// The digest of the header before it; zero before the first.
    pub prev_digest: Digest,
    /// Where in the file.
    pub offset: u64,
}

impl BlockStart {
    /// Whether this block names the one before it.
    pub fn follows(&self) -> bool {
        self.header.prev_hash == self.prev_digest
    }
}

/// A block ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockEnd {
    /// Its header.
    pub header: BlockHeader,
    /// Its BLOCK digest.
    pub digest: Digest,
    /// How many events there were; fewer than the header says where the next header came early.
    pub events: u64,
    /// The root over them.
    pub root: Digest,
    /// Where the next block begins.
    pub next_offset: u64,
}

impl BlockEnd {
    /// Whether the header's count and root are those of the events.
    pub fn fits(&self) -> bool {
        self.events == self.header.event_count && self.root == self.header.events_root
    }
}

/// The file ends inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Where the unfinished block begins: all before is whole blocks.
    pub offset: u64,
    /// How many bytes of it there are.
    pub lost_bytes: u64,
    /// Its header, if that is whole.
    pub header: Option<BlockHeader>,
    /// How many whole events of it there are.
    pub whole_events: u64,
    /// Whether those events have the header's root, so that it is the count that was altered, and nothing cut off.
    pub root_fits: bool,
}

/// Bytes that are neither an event nor a header. Nothing behind them is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Where.
    pub offset: u64,
    /// Where the block begins that they are in.
    pub block_offset: u64,
    /// Why they are not an event.
    pub why: DecodeError,
}

/// What comes next in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A block begins.
    Block(BlockStart),
    /// An event of it.
    Event(Event),
    /// It ends.
    BlockEnd(BlockEnd),
    /// An event that no header counts.
    Surplus(Event),
    /// The file ends inside a block. Last.
    Tail(Tail),
    /// The bytes make no sense. Last.
    Broken(Broken),
}

#[derive(Clone, Copy, Debug)]
enum State {
    Boundary,
    InBlock(BlockStart),
    Done,
}

/// Reads items from any source.
#[derive(Debug)]
pub struct Scanner<R> {
    source: R,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Position in the source of `buffer[start]`.
    offset: u64,
    block_offset: u64,
    prev_digest: Digest,
    roots: EventRoots,
    state: State,
}

impl<R: Read> Scanner<R> {
    /// From the start of a ledger.
    pub fn new(source: R) -> Scanner<R> {
        Scanner {
            source,
            buffer: Vec::new(),
            start: 0,
            end: 0,
            offset: 0,
            block_offset: 0,
            prev_digest: Digest::ZERO,
            roots: EventRoots::default(),
            state: State::Boundary,
        }
    }

    /// The next item; `None` at the end. Errors are the source's.
    #[inline]
    pub fn next_item(&mut self) -> io::Result<Option<Item>> {
        match self.state {
            State::Boundary => self.at_boundary(),
            State::InBlock(block) if self.roots.count() < block.header.event_count => self.in_block(block),
            State::InBlock(block) => Ok(Some(self.end_block(block))),
            State::Done => Ok(None),
        }
    }

    fn at_boundary(&mut self) -> io::Result<Option<Item>> {
        let have = self.want(BLOCK_HEADER_LEN)?;
        let Some(first) = self.bytes().first().copied() else {
            self.state = State::Done;
            return Ok(None);
        };
        // A height's first byte is 0 for the first 2^56 blocks, an event's never is.
        if first != 0 {
            return self.surplus();
        }
        self.block_offset = self.offset;
        let Some(bytes) = self.bytes().first_chunk::<BLOCK_HEADER_LEN>() else {
            let tail = Tail {
                offset: self.offset,
                lost_bytes: u64::try_from(have).unwrap_or(u64::MAX),
                header: None,
                whole_events: 0,
                root_fits: false,
            };
            self.state = State::Done;
            return Ok(Some(Item::Tail(tail)));
        };
        let header = BlockHeader::from_bytes(bytes);
        let block = BlockStart {
            header,
            digest: header.digest(),
            prev_digest: self.prev_digest,
            offset: self.offset,
        };
        self.consume(BLOCK_HEADER_LEN);
        self.roots.clear();
        self.prev_digest = block.digest;
        self.state = State::InBlock(block);
        Ok(Some(Item::Block(block)))
    }

    fn surplus(&mut self) -> io::Result<Option<Item>> {
        self.block_offset = self.offset;
        match self.event()? {
            Ok((event, len)) => {
                self.consume(len);
                Ok(Some(Item::Surplus(event)))
            }
            Err(why) => Ok(Some(self.broken(why))),
        }
    }

    #[inline]
    fn in_block(&mut self, block: BlockStart) -> io::Result<Option<Item>> {
        match self.event()? {
            Ok((event, len)) => {
                let bytes = self.buffer.get(self.start..self.start + len).unwrap_or_default();
                self.roots.push(bytes);
                self.consume(len);
                Ok(Some(Item::Event(event)))
            }
            // Short of bytes is only ever short of the file's. Where the next block's header is among those that are
            // left, it is the payload's length that was altered, and nothing was cut off.
            Err(DecodeError::ShortHeader { .. } | DecodeError::ShortPayload { .. })
                if !self.bytes().windows(32).any(|window| window == block.digest.as_bytes()) =>
            {
                let rest = u64::try_from(self.bytes().len()).unwrap_or(u64::MAX);
                let tail = Tail {
                    offset: self.block_offset,
                    lost_bytes: (self.offset - self.block_offset).saturating_add(rest),
                    header: Some(block.header),
                    whole_events: self.roots.count(),
                    root_fits: rest == 0 && self.roots.root() == block.header.events_root,
                };
                self.state = State::Done;
                Ok(Some(Item::Tail(tail)))
            }
            Err(why) => {
                self.want(BLOCK_HEADER_LEN)?;
                let next = self.bytes().first_chunk::<BLOCK_HEADER_LEN>().map(BlockHeader::from_bytes);
                if next.is_some_and(|next| next.prev_hash == block.digest) {
                    return Ok(Some(self.end_block(block)));
                }
                Ok(Some(self.broken(why)))
            }
        }
    }

    fn end_block(&mut self, block: BlockStart) -> Item {
        self.state = State::Boundary;
        Item::BlockEnd(BlockEnd {
            header: block.header,
            digest: block.digest,
            events: self.roots.count(),
            root: self.roots.root(),
            next_offset: self.offset,
        })
    }

    fn broken(&mut self, why: DecodeError) -> Item {
        self.state = State::Done;
        Item::Broken(Broken { offset: self.offset, block_offset: self.block_offset, why })
    }

    /// The event at this position, and its length; not consumed.
    #[inline]
    fn event(&mut self) -> io::Result<Result<(Event, usize), DecodeError>> {
        self.want(EVENT_HEADER_LEN)?;
        let payload_len = match Event::payload_len_of_header(self.bytes()) {
            Ok(len) => len,
            Err(why) => return Ok(Err(why)),
        };
        self.want(EVENT_HEADER_LEN + payload_len)?;
        Ok(Event::decode_prefix(self.bytes()))
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    #[inline]
    fn consume(&mut self, len: usize) {
        self.start += len;
        self.offset += u64::try_from(len).unwrap_or(0);
    }

    /// Reads until `len` bytes are at hand or the source ends; returns how many are.
    #[inline]
    fn want(&mut self, len: usize) -> io::Result<usize> {
        if self.end - self.start < len {
            self.refill(len)?;
        }
        Ok(self.end - self.start)
    }

    #[cold]
    fn refill(&mut self, len: usize) -> io::Result<()> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let room = len.max(CHUNK_LEN);
        if self.buffer.len() < room {
            self.buffer.resize(room, 0);
        }
        while self.end < len {
            match self.source.read(self.buffer.get_mut(self.end..).unwrap_or_default()) {
                Ok(0) => break,
                Ok(n) => self.end = self.end.saturating_add(n).min(self.buffer.len()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}
