//! The kernel's text, read-only data and tables: what it is now against what it was at ready.
//!
//! The memory of a clone is a private mapping of its template's file. The host's kernel gives the VMM a page of its own at
//! the first write to it, and says of which pages it has one. So where the image was never written to is known
//! without reading it, for all of it within [`PASS`] looks. What became the VMM's own since it was last asked is read at
//! once, what was its own before within [`PASS`] looks, and so that nothing rests on this account alone, a little of the
//! rest too. A machine that was booted has all of its memory of its own, and so has any where the host does not tell.
//!
//! A fingerprint of each page is kept, not the bytes: a copy would be 23 MB for each run. The
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
//! | either, while it is changed | a breakpoint in place of its first byte, for a second |
//!
//! Alternatives, paravirtual calls and function tracing change text as well, at boot; what
//! they do later is a change like any other.

use super::memory::ReadError;
use super::space::Space;
use crate::kernel::Profile;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of one window: a page, since that is what the host's kernel knows of being written.
const WINDOW: usize = 4096;
/// Windows that are read with one call at most.
const RUN: usize = 16;
/// Looks in which all of the image that the VMM has pages of its own of is read once: 200 ms at the cadence of runs.
pub const PASS: usize = 4;
/// Bytes of the other pages, which are unchanged by the host's own account, that a look reads nevertheless.
const DISTRUST: usize = 64 << 10;
/// Longest instruction that is switched.
const SITE: usize = 5;
/// Looks for which a site may hold a breakpoint: a second. The guest switches it in microseconds, but a host that is busy
/// may stop the guest in between.
const CHANGE_PATIENCE: u64 = 20;

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
    sites: Range<usize>,
}

/// What is asked of the host about a window. Apart from the windows, since it is all that most looks need of most of them.
#[derive(Clone, Copy, Debug)]
struct Seat {
    /// Its page, from the first one of the text on.
    page: u32,
    /// Whether the VMM had a page of its own there when it was last asked.
    own: bool,
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
    /// One for each window.
    seats: Vec<Seat>,
    /// So many at the start are read by every look: tables, and where system calls enter.
    hot: usize,
    sites: Vec<Site>,
    buffer: Vec<u8>,
    /// So many bytes of the buffer are of the run that was read last.
    held: usize,
    /// The next window of the VMM's own pages, and of the others.
    next_own: usize,
    next_other: usize,
    /// The part of the image of which the next look asks which pages are the VMM's own.
    next_part: usize,
    looks: u64,
    /// Sites that held a breakpoint, and since which look.
    in_change: BTreeMap<u32, u64>,
}

impl Guard {
    /// Takes the state to compare with. `seed` is random, and for this run alone.
    ///
    /// # Errors
    /// Memory can't be read.
    pub fn new(space: &Space<'_>, profile: &Profile, seed: [u8; 32]) -> Result<Guard, ReadError> {
        let symbols = &profile.symbols;
        let sites = sites(space, profile)?;
        let (mut windows, mut seats) = (Vec::new(), Vec::new());
        let entry = symbols.entry_syscall & !0xfff;
        let parts = [
            (Part::Table, symbols.sys_call_table, symbols.sys_call_table.saturating_add(512 * 8)),
            (Part::Table, symbols.idt_table, symbols.idt_table.saturating_add(4096)),
            (Part::Text, entry, entry.saturating_add(4096).min(symbols.etext)),
            (Part::Text, symbols.stext, symbols.etext),
            (Part::ReadOnly, symbols.start_rodata, symbols.end_rodata),
        ];
        let mut hot = 0;
        for (index, (part, start, end)) in parts.into_iter().enumerate() {
            let mut address = start;
            while address < end {
                let bytes = (end - address).min(WINDOW as u64 - address % WINDOW as u64) as usize;
                let inside = address.wrapping_sub(symbols.text);
                let first = sites.partition_point(|site| u64::from(site.at) + site.length as u64 <= inside);
                let last = sites.partition_point(|site| u64::from(site.at) < inside + bytes as u64);
                let sites = if part == Part::Text { first..last.max(first) } else { 0..0 };
                windows.push(Window { part, address, bytes, fingerprint: 0, sites });
                let page = (inside / WINDOW as u64) as u32;
                seats.push(Seat { page, own: true });
                address += bytes as u64;
            }
            if index < 3 {
                hot = windows.len();
            }
        }
        let key = blake3::Hasher::new_keyed(&seed).finalize_xof();
        let mut guard = Guard {
            key: expand(key),
            hot,
            windows,
            seats,
            sites,
            buffer: Vec::new(),
            held: 0,
            next_own: hot,
            next_other: hot,
            next_part: 0,
            looks: 0,
            in_change: BTreeMap::new(),
        };
        let mut at = 0;
        while at < guard.windows.len() {
            let run = guard.run(at, |_| true);
            guard.fetch(space, symbols.text, &run)?;
            guard.blank(symbols.text, &run);
            for (at, fingerprint) in run.clone().zip(guard.fingerprints(&run)) {
                if let Some(window) = guard.windows.get_mut(at) {
                    window.fingerprint = fingerprint;
                }
            }
            at = run.end;
        }
        for _ in 0..PASS {
            guard.ask(space);
        }
        Ok(guard)
    }

    /// Bytes that are watched.
    pub fn bytes(&self) -> usize {
        self.windows.iter().map(|window| window.bytes).sum()
    }

    /// Bytes of them that lie in pages which the VMM has of its own: all, where the host does not tell.
    pub fn own_bytes(&self) -> usize {
        let own = self.windows.iter().zip(&self.seats).filter(|(_, seat)| seat.own);
        own.map(|(window, _)| window.bytes).sum()
    }

    /// Reads what is hot, what the VMM has written to since the last look, and a part of the rest; gives what has changed.
    ///
    /// # Errors
    /// Memory can't be read.
    pub fn look(&mut self, space: &Space<'_>, profile: &Profile) -> Result<Vec<Change>, ReadError> {
        let mut changes = Vec::new();
        self.looks += 1;
        let mut fresh = self.ask(space);
        fresh.extend(0..self.hot);
        fresh.sort_unstable();
        let mut rest = fresh.as_slice();
        while let Some(first) = rest.first() {
            let run = self.run(*first, |at| rest.binary_search(&at).is_ok());
            let (_, behind) = rest.split_at(rest.partition_point(|at| *at < run.end));
            rest = behind;
            self.compare(space, profile, &run, &mut changes)?;
        }
        let part = self.seats.iter().filter(|seat| seat.own).count().div_ceil(PASS) * WINDOW;
        self.next_own = self.pass(space, profile, (true, self.next_own, part), &mut changes)?;
        self.next_other = self.pass(space, profile, (false, self.next_other, DISTRUST), &mut changes)?;
        // What is new may have had its turn as well.
        changes.sort_by_key(|change| change.address);
        changes.dedup();
        Ok(changes)
    }

    /// Compares the next windows of one kind; gives where the next pass goes on.
    fn pass(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        (own, mut at, bytes): (bool, usize, usize),
        changes: &mut Vec<Change>,
    ) -> Result<usize, ReadError> {
        let (mut done, mut skipped) = (0, 0);
        while done < bytes && skipped < self.windows.len() {
            if at >= self.windows.len() {
                at = self.hot;
            }
            if self.seats.get(at).is_none_or(|seat| seat.own != own) {
                (at, skipped) = (at + 1, skipped + 1);
                continue;
            }
            let run = self.run(at, |at| self.seats.get(at).is_some_and(|seat| seat.own == own));
            self.compare(space, profile, &run, changes)?;
            done += run.len() * WINDOW;
            skipped += run.len();
            at = run.end;
        }
        Ok(at)
    }

    /// Windows from this one on that follow each other in memory and fit.
    fn run(&self, first: usize, fits: impl Fn(usize) -> bool) -> Range<usize> {
        let mut end = first + 1;
        while end - first < RUN
            && let (Some(last), Some(next)) = (self.windows.get(end - 1), self.windows.get(end))
            && last.address + last.bytes as u64 == next.address
            && last.part == next.part
            && fits(end)
        {
            end += 1;
        }
        first..end.min(self.windows.len().max(first))
    }

    /// Asks the host of the next part of the image which pages the VMM has of its own, since its kernel has to look at each;
    /// gives the windows that are new among them.
    fn ask(&mut self, space: &Space<'_>) -> Vec<usize> {
        let count = self.windows.len().saturating_sub(self.hot).div_ceil(PASS).max(1);
        let start = self.hot + self.next_part * count;
        self.next_part = (self.next_part + 1) % PASS;
        let end = self.windows.len().min(start + count);
        let seats = self.seats.get_mut(start..end).unwrap_or_default();
        let (Some(first), Some(last)) = (seats.first(), seats.last()) else { return Vec::new() };
        let (first, last) = (first.page, last.page);
        let from = space.mapping().text.wrapping_add(u64::from(first) * WINDOW as u64);
        let own = space.own_pages(from, last.saturating_sub(first) as usize + 1);
        let mut fresh = Vec::new();
        for (at, seat) in seats.iter_mut().enumerate() {
            let page = seat.page.saturating_sub(first) as usize;
            let is_own = own.as_ref().is_none_or(|own| own.get(page).copied().unwrap_or(true));
            if is_own && !seat.own {
                fresh.push(start + at);
            }
            seat.own = is_own;
        }
        fresh
    }

    fn compare(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        run: &Range<usize>,
        changes: &mut Vec<Change>,
    ) -> Result<(), ReadError> {
        self.fetch(space, profile.symbols.text, run)?;
        self.judge_sites(profile, run, changes);
        self.blank(profile.symbols.text, run);
        for (at, now) in run.clone().zip(self.fingerprints(run)) {
            let Some(window) = self.windows.get(at).filter(|window| window.fingerprint != now) else {
                continue;
            };
            let detail = format!("{} bytes from {:#x} are not what they were", window.bytes, window.address);
            changes.push(Change { part: window.part, address: window.address, detail });
        }
        Ok(())
    }

    fn judge_sites(&mut self, profile: &Profile, run: &Range<usize>, changes: &mut Vec<Change>) {
        for (site, place) in self.sites_of(profile.symbols.text, run) {
            // One that begins in the window before was judged there.
            let Some(bytes) =
                usize::try_from(place).ok().and_then(|at| self.buffer.get(at..self.held)?.get(..site.length))
            else {
                continue;
            };
            let mut held = [0; SITE];
            held.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            let bad = match judge(&site, held, profile) {
                Held::Legal => {
                    self.in_change.remove(&site.at);
                    false
                }
                Held::Changing => {
                    let since = *self.in_change.entry(site.at).or_insert(self.looks);
                    self.looks.saturating_sub(since) >= CHANGE_PATIENCE
                }
                Held::Illegal => true,
            };
            if bad {
                let address = profile.symbols.text.wrapping_add(u64::from(site.at));
                let detail = format!("{:02x?} at {address:#x}", &held.get(..site.length).unwrap_or_default());
                changes.push(Change { part: Part::Text, address, detail });
            }
        }
    }

    /// The sites of a run of windows, each with its place in the buffer, before it where it begins before.
    fn sites_of(&self, text: u64, run: &Range<usize>) -> Vec<(Site, i64)> {
        let windows = self.windows.get(run.clone()).unwrap_or_default();
        let (Some(first), Some(last)) = (windows.first(), windows.last()) else { return Vec::new() };
        let inside = first.address.wrapping_sub(text) as i64;
        let sites = self.sites.get(first.sites.start..last.sites.end).unwrap_or_default();
        sites.iter().map(|site| (*site, i64::from(site.at) - inside)).collect()
    }

    /// Reads a run of windows into the buffer, with a few bytes of the next.
    fn fetch(&mut self, space: &Space<'_>, text: u64, run: &Range<usize>) -> Result<(), ReadError> {
        let windows = self.windows.get(run.clone()).unwrap_or_default();
        let Some(first) = windows.first() else { return Ok(()) };
        // A site may reach over the window's end; so far the image always goes on there.
        let more = if first.part == Part::Text { SITE } else { 0 };
        self.held = windows.iter().map(|window| window.bytes).sum::<usize>() + more;
        if self.buffer.len() < self.held {
            self.buffer.resize(self.held, 0);
        }
        let into = self.buffer.get_mut(..self.held).unwrap_or_default();
        space.read(space.at(first.address, text), into)
    }

    /// Takes the sites out of the buffer.
    fn blank(&mut self, text: u64, run: &Range<usize>) {
        for (site, place) in self.sites_of(text, run) {
            let (start, end) = (place.max(0), place.saturating_add(site.length as i64).max(0));
            let end = (end as usize).min(self.held);
            if let Some(bytes) = self.buffer.get_mut(start as usize..end) {
                bytes.fill(0);
            }
        }
    }

    fn fingerprints(&self, run: &Range<usize>) -> Vec<u64> {
        let mut rest = self.buffer.get(..self.held).unwrap_or_default();
        let windows = self.windows.get(run.clone()).unwrap_or_default();
        let fingerprint = |window: &Window| {
            let (bytes, behind) = rest.split_at_checked(window.bytes).unwrap_or_default();
            rest = behind;
            nh(&self.key, bytes)
        };
        windows.iter().map(fingerprint).collect()
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
        let read = space.gather(places.iter().copied())?;
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
