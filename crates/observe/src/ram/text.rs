//! The kernel's text, read-only data and tables: what it is now against what it was at ready.
//!
//! A fingerprint of each window is kept, not the bytes: a copy would be 23 MB for each run. The
//! fingerprint is NH, the universal hash of UMAC (RFC 4418, 5.2), under a key that is drawn for
//! the run and never leaves this process: two windows that differ have the same one with a
//! probability of 2^-32, whatever the differences are, as long as nobody knows the key.
//!
//! Linux changes its own instructions at two kinds of places, also long after boot: branches
//! that are switched (jump entries) and calls whose target is switched (static calls). Where
//! they lie and what may stand there is known from the measured file, so those bytes are left
//! out of the fingerprint and judged one by one:
//!
//! | place | may hold |
//! |---|---|
//! | jump entry | the no-op of its length, or the jump to its target |
//! | static call | call or jump to the start of a function, a no-op, `xor eax,eax`, or a return |
//! | either, while it is changed | a breakpoint in place of its first byte, for one look |
//!
//! Alternatives, paravirtual calls and function tracing change text as well, at boot; what
//! they do later is a change like any other.

use super::memory::ReadError;
use super::space::Space;
use crate::kernel::Profile;

/// Bytes of one window: short enough that a look can stop between two.
const WINDOW: usize = 64 << 10;
/// Longest instruction that is switched.
const SITE: usize = 5;

/// What a range holds, for the reason that its change gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text.
    Text,
    /// Read-only data.
    ReadOnly,
    /// System call or interrupt table.
    Table,
}

/// A change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Of what.
    pub part: Part,
    /// Where, as linked.
    pub address: u64,
    /// What was seen.
    pub detail: String,
}

#[derive(Debug)]
struct Window {
    part: Part,
    /// As linked.
    address: u64,
    bytes: usize,
    fingerprint: u64,
    /// Positions in `Guard::sites`.
    sites: std::ops::Range<usize>,
}

/// A place that the kernel changes itself.
#[derive(Clone, Copy, Debug)]
struct Site {
    /// From the start of the text.
    at: u32,
    /// The target, for a switched branch; a switched call has none of its own.
    target: Option<u32>,
    /// Its length, known from what stood there at ready.
    length: usize,
}

/// Keeps watch over the kernel's image.
pub struct Guard {
    key: Vec<u32>,
    windows: Vec<Window>,
    /// Windows that every look reads, by position: tables, and where system calls enter.
    hot: Vec<usize>,
    sites: Vec<Site>,
    next: usize,
    buffer: Vec<u8>,
    passes: u64,
    /// Sites that held a breakpoint when they were last looked at.
    in_change: Vec<u32>,
}

impl Guard {
    /// Takes the state to compare with. `key` is random, and for this run alone.
    ///
    /// # Errors
    /// Memory can't be read.
    pub fn new(space: &Space<'_>, profile: &Profile, seed: [u8; 32]) -> Result<Guard, ReadError> {
        let symbols = &profile.symbols;
        let sites = sites(space, profile)?;
        let mut windows = Vec::new();
        let tables = [
            (Part::Table, symbols.sys_call_table, symbols.sys_call_table.saturating_add(512 * 8)),
            (Part::Table, symbols.idt_table, symbols.idt_table.saturating_add(4096)),
        ];
        let entry = symbols.entry_syscall & !0xfff;
        let rest = [
            (Part::Text, entry, entry.saturating_add(4096).min(symbols.etext)),
            (Part::Text, symbols.stext, symbols.etext),
            (Part::ReadOnly, symbols.start_rodata, symbols.end_rodata),
        ];
        for (part, start, end) in tables.into_iter().chain(rest) {
            let mut address = start;
            while address < end {
                let bytes = (end - address).min(WINDOW as u64) as usize;
                let inside = address.wrapping_sub(symbols.text);
                let first = sites.partition_point(|site| u64::from(site.at) + site.length as u64 <= inside);
                let last = sites.partition_point(|site| u64::from(site.at) < inside + bytes as u64);
                let sites = if part == Part::Text { first..last.max(first) } else { 0..0 };
                windows.push(Window { part, address, bytes, fingerprint: 0, sites });
                address += bytes as u64;
            }
        }
        let key = blake3::Hasher::new_keyed(&seed).finalize_xof();
        let mut guard = Guard {
            key: expand(key),
            hot: (0..3).collect(),
            windows,
            sites,
            next: 3,
            buffer: Vec::new(),
            passes: 0,
            in_change: Vec::new(),
        };
        for at in 0..guard.windows.len() {
            let fingerprint = guard.fingerprint(space, symbols.text, at)?;
            if let Some(window) = guard.windows.get_mut(at) {
                window.fingerprint = fingerprint;
            }
        }
        Ok(guard)
    }

    /// Bytes that are watched.
    pub fn bytes(&self) -> usize {
        self.windows.iter().map(|window| window.bytes).sum()
    }

    /// Whole passes so far.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// Reads the hot windows and the next `bytes` of the others; gives what has changed.
    ///
    /// # Errors
    /// Memory can't be read.
    pub fn look(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        bytes: usize,
    ) -> Result<Vec<Change>, ReadError> {
        let mut changes = Vec::new();
        for at in self.hot.clone() {
            self.compare(space, profile, at, &mut changes)?;
        }
        let (mut done, mut left) = (0, self.windows.len().saturating_sub(self.hot.len()));
        while done < bytes && left > 0 {
            left -= 1;
            let at = self.next;
            done += self.windows.get(at).map_or(1, |window| window.bytes);
            self.compare(space, profile, at, &mut changes)?;
            self.next += 1;
            if self.next >= self.windows.len() {
                self.next = self.hot.len();
                self.passes += 1;
            }
        }
        Ok(changes)
    }

    fn compare(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        at: usize,
        changes: &mut Vec<Change>,
    ) -> Result<(), ReadError> {
        let now = self.fingerprint(space, profile.symbols.text, at)?;
        let Some(window) = self.windows.get(at) else { return Ok(()) };
        if now != window.fingerprint {
            let detail = format!("{} bytes from {:#x} are not what they were", window.bytes, window.address);
            changes.push(Change { part: window.part, address: window.address, detail });
        }
        let inside = window.address.wrapping_sub(profile.symbols.text);
        let mut in_change = Vec::new();
        for site in self.sites.get(window.sites.clone()).unwrap_or_default() {
            // One that begins in the window before was judged there.
            let Some(start) = u64::from(site.at).checked_sub(inside) else { continue };
            let Some(bytes) = self.buffer.get(start as usize..).and_then(|rest| rest.get(..site.length))
            else {
                continue;
            };
            let mut held = [0; SITE];
            held.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            match judge(site, held, profile) {
                Held::Legal => {}
                Held::Changing if !self.in_change.contains(&site.at) => in_change.push(site.at),
                Held::Changing | Held::Illegal => {
                    let address = profile.symbols.text.wrapping_add(u64::from(site.at));
                    let detail =
                        format!("{:02x?} at {address:#x}", &held.get(..site.length).unwrap_or_default());
                    changes.push(Change { part: Part::Text, address, detail });
                }
            }
        }
        let sites =
            window.address.wrapping_sub(profile.symbols.text)..inside.wrapping_add(window.bytes as u64);
        self.in_change.retain(|at| !sites.contains(&u64::from(*at)));
        self.in_change.append(&mut in_change);
        Ok(())
    }

    /// Reads a window into the buffer, with a few bytes of the next, and digests it without its sites.
    fn fingerprint(&mut self, space: &Space<'_>, text: u64, at: usize) -> Result<u64, ReadError> {
        let Some(window) = self.windows.get(at) else { return Ok(0) };
        // A site may reach over the window's end; so far the image always goes on there.
        let more = if window.part == Part::Text { SITE } else { 0 };
        self.buffer.resize(window.bytes + more, 0);
        space.read(space.at(window.address, text), &mut self.buffer)?;
        let inside = window.address.wrapping_sub(text);
        let mut blanks = Vec::new();
        for site in self.sites.get(window.sites.clone()).unwrap_or_default() {
            let start = i64::from(site.at) - inside as i64;
            let range =
                (start.max(0) as usize)..((start + site.length as i64).max(0) as usize).min(window.bytes);
            if let Some(bytes) = self.buffer.get_mut(range.clone()) {
                let mut held = [0; SITE];
                held.iter_mut().zip(bytes.iter()).for_each(|(to, from)| *to = *from);
                blanks.push((range, held));
                bytes.fill(0);
            }
        }
        let digest = nh(&self.key, self.buffer.get(..window.bytes).unwrap_or_default());
        // The judgement of the sites needs them back.
        for (range, held) in blanks {
            if let Some(bytes) = self.buffer.get_mut(range) {
                bytes.iter_mut().zip(held).for_each(|(to, from)| *to = from);
            }
        }
        Ok(digest)
    }
}

fn expand(mut stream: blake3::OutputReader) -> Vec<u32> {
    let mut bytes = vec![0; WINDOW];
    stream.fill(&mut bytes);
    bytes.chunks_exact(4).map(|word| crate::kernel::u32_at(word, 0).unwrap_or(0)).collect()
}

/// NH: the sum of products of sums, over pairs of words.
fn nh(key: &[u32], bytes: &[u8]) -> u64 {
    let mut sum = bytes.len() as u64;
    let word = |chunk: &[u8]| chunk.first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
    let (pairs, rest) = bytes.as_chunks::<8>();
    for (pair, key) in pairs.iter().zip(key.as_chunks::<2>().0) {
        let [a, b] = *key;
        let [p, q, r, s, t, u, v, w] = *pair;
        let first = u32::from_le_bytes([p, q, r, s]).wrapping_add(a);
        let second = u32::from_le_bytes([t, u, v, w]).wrapping_add(b);
        sum = sum.wrapping_add(u64::from(first).wrapping_mul(u64::from(second)));
    }
    if !rest.is_empty() {
        let mut last = [0; 8];
        last.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        let (first, second) = last.split_at(4);
        let at = pairs.len() * 2;
        let key = |at: usize| key.get(at % key.len().max(1)).copied().unwrap_or(1);
        let product = u64::from(word(first).wrapping_add(key(at)))
            .wrapping_mul(u64::from(word(second).wrapping_add(key(at + 1))));
        sum = sum.wrapping_add(product);
    }
    sum
}

/// Every place that may change, with the length of what stands there now.
fn sites(space: &Space<'_>, profile: &Profile) -> Result<Vec<Site>, ReadError> {
    let jumps = profile.jumps.iter().map(|jump| (jump.code, Some(jump.target)));
    let calls = profile.calls.iter().map(|&call| (call, None));
    let mut sites: Vec<(u32, Option<u32>)> = jumps.chain(calls).collect();
    sites.sort_unstable();
    sites.dedup_by_key(|(at, _)| *at);
    let places: Vec<(u64, usize)> =
        sites.iter().map(|(at, _)| (space.mapping().text.wrapping_add(u64::from(*at)), 1)).collect();
    let mut found = Vec::with_capacity(sites.len());
    for (sites, places) in sites.chunks(1024).zip(places.chunks(1024)) {
        let read = space.gather(places)?;
        for (at, (site, target)) in sites.iter().enumerate() {
            let first = read.get(at).and_then(|bytes| bytes.first().copied()).unwrap_or(0);
            // A branch is switched with two bytes where its target is near.
            let length = if target.is_some() && matches!(first, 0xeb | 0x66) { 2 } else { SITE };
            found.push(Site { at: *site, target: *target, length });
        }
    }
    Ok(found)
}

enum Held {
    Legal,
    Changing,
    Illegal,
}

fn judge(site: &Site, held: [u8; SITE], profile: &Profile) -> Held {
    /// `x86_nops` of five and two bytes, and the other instructions that a switched call may become
    /// (`arch/x86/kernel/static_call.c`).
    const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
    const SHORT_NOP: [u8; 2] = [0x66, 0x90];
    const ZERO: [u8; 5] = [0x2e, 0x2e, 0x2e, 0x31, 0xc0];
    const RETURN: [[u8; 5]; 2] = [[0xc3, 0xcc, 0xcc, 0xcc, 0xcc], [0xc3, 0x90, 0x90, 0x90, 0x90]];
    const BREAKPOINT: u8 = 0xcc;

    let [first, a, b, c, d] = held;
    let goes_to = |next: u32, relative: i32| next.wrapping_add(relative as u32);
    let far = goes_to(site.at.wrapping_add(5), i32::from_le_bytes([a, b, c, d]));
    let near = goes_to(site.at.wrapping_add(2), i32::from(a as i8));
    let legal = |first: u8| match (site.target, site.length) {
        (Some(target), 2) => (first == 0xeb && near == target) || [first, a] == SHORT_NOP,
        (Some(target), _) => (first == 0xe9 && far == target) || [first, a, b, c, d] == NOP,
        (None, _) => {
            let whole = [first, a, b, c, d];
            let to_function = profile.functions.binary_search(&far).is_ok();
            (matches!(first, 0xe8 | 0xe9) && to_function)
                || whole == NOP
                || whole == ZERO
                || RETURN.contains(&whole)
        }
    };
    if legal(first) {
        Held::Legal
    } else if first == BREAKPOINT && [0xeb, 0x66, 0xe9, 0x0f, 0xe8, 0x2e, 0xc3].into_iter().any(legal) {
        Held::Changing
    } else {
        Held::Illegal
    }
}
