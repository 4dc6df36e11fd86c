//! The kernel's own table of symbols, as it lies in a vmlinux without a symbol table.
//!
//! ```text
//!  to 6.3:  offsets  relative_base  num_syms  names  markers  [seqs]  token_table  token_index
//!  since:                           num_syms  names  markers  token_table  token_index  offsets  relative_base  [seqs]
//! ```
//! Names are strings of tokens (`scripts/kallsyms.c`). No symbol says where the table is, so
//! it is found by what must hold of it: the token table names the digits one by one, its index
//! agrees with it, and the markers agree with the names.

use super::{u16_at, u32_at, u64_at};
use std::collections::BTreeMap;

const MAX_SYMBOLS: usize = 1 << 20;
/// Names lie this far before their tokens at most.
const MAX_NAMES: usize = 32 << 20;
const KERNEL_HALF: u64 = 0xffff_ffff_8000_0000;

/// Every symbol: name to address; where a name comes twice, the first.
pub(crate) struct Kallsyms {
    pub(crate) by_name: BTreeMap<Vec<u8>, u64>,
    /// Addresses of everything in the kernel's text, ascending.
    pub(crate) text: Vec<u64>,
}

impl Kallsyms {
    /// Finds and reads the table in the read-only data; `text` is where the text was linked to.
    pub(crate) fn read(data: &[u8], text: u64) -> Option<Kallsyms> {
        let (table, index) = tokens(data)?;
        let tokens: Vec<&[u8]> = (0..256)
            .map(|token| {
                let at = table.checked_add(usize::from(u16_at(data, index + token * 2)?))?;
                string(data, at)
            })
            .collect::<Option<_>>()?;
        let (count, names) = names(data, table)?;
        let addresses = addresses(data, count, names, index)?;
        let mut at = names + 8;
        let (mut by_name, mut all) = (BTreeMap::new(), Vec::with_capacity(count));
        for position in 0..count {
            let (length, start) = name_length(data, at)?;
            at = start.checked_add(length)?;
            let mut name = Vec::new();
            for token in data.get(start..at)? {
                name.extend_from_slice(tokens.get(usize::from(*token))?);
            }
            // The first character is the symbol's type.
            let kind = *name.first()?;
            let address = addresses(position)?;
            if matches!(kind, b't' | b'T' | b'w' | b'W') && address >= KERNEL_HALF {
                all.push(address);
            }
            by_name.entry(name.get(1..)?.to_vec()).or_insert(address);
        }
        all.sort_unstable();
        all.dedup();
        let found = Kallsyms { by_name, text: all };
        (found.address("_text").or_else(|| found.address("_stext"))? == text).then_some(found)
    }

    pub(crate) fn address(&self, name: &str) -> Option<u64> {
        self.by_name.get(name.as_bytes()).copied()
    }
}

fn string(data: &[u8], at: usize) -> Option<&[u8]> {
    let rest = data.get(at..at.checked_add(1024)?.min(data.len()))?;
    rest.get(..rest.iter().position(|&byte| byte == 0)?)
}

/// Where the token table and its index lie.
fn tokens(data: &[u8]) -> Option<(usize, usize)> {
    const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\x00";
    let mut from = 0;
    loop {
        let zero = from + find(data.get(from..)?, DIGITS)?;
        from = zero + 1;
        // The digit zero is token 48: so many ends of strings lie between the table's start and it. Padding before the
        // table looks like empty tokens, so that more than one place fits; the index decides.
        let mut ends = 0;
        for start in (0..zero).rev() {
            ends += usize::from(data.get(start) == Some(&0));
            if ends > 48 {
                break;
            }
            if ends == 48
                && let Some(index) = index_of(data, start)
                && u16_at(data, index + 2 * 48).map(usize::from) == Some(zero - start)
            {
                return Some((start, index));
            }
        }
    }
}

/// Where the index of a table that begins here would be: behind its 256 tokens, aligned.
fn index_of(data: &[u8], table: usize) -> Option<usize> {
    let mut end = table;
    for _ in 0..256 {
        end = end.checked_add(string(data, end)?.len() + 1)?;
    }
    let index = end.next_multiple_of(8);
    (u16_at(data, index) == Some(0)).then_some(index)
}

fn find(data: &[u8], what: &[u8]) -> Option<usize> {
    data.windows(what.len()).position(|window| window == what)
}

/// Length of a name, and where it begins.
fn name_length(data: &[u8], at: usize) -> Option<(usize, usize)> {
    let first = usize::from(*data.get(at)?);
    if first & 0x80 == 0 {
        return Some((first, at + 1));
    }
    let second = usize::from(*data.get(at + 1)?);
    Some(((first & 0x7f) | (second << 7), at + 2))
}

/// How many symbols there are, and where that number lies: the names follow it.
fn names(data: &[u8], table: usize) -> Option<(usize, usize)> {
    let lowest = table.saturating_sub(MAX_NAMES);
    let mut at = table & !7;
    while at >= lowest.max(8) {
        at -= 8;
        let count = u64_at(data, at)? as usize;
        if (1000..MAX_SYMBOLS).contains(&count) && markers_agree(data, at, count, table) {
            return Some((count, at));
        }
    }
    None
}

fn markers_agree(data: &[u8], number: usize, count: usize, table: usize) -> bool {
    let begin = number + 8;
    let mut at = begin;
    let mut marks = Vec::new();
    for position in 0..count {
        if position % 256 == 0 {
            marks.push(at - begin);
        }
        match name_length(data, at) {
            Some((length, start)) if length > 0 && start + length <= table => at = start + length,
            _ => return false,
        }
    }
    let markers = at.next_multiple_of(8);
    marks
        .iter()
        .enumerate()
        .all(|(index, mark)| u32_at(data, markers + index * 4).map(|mark| mark as usize) == Some(*mark))
}

/// A function from a symbol's position to its address.
fn addresses(
    data: &[u8],
    count: usize,
    number: usize,
    index: usize,
) -> Option<impl Fn(usize) -> Option<u64>> {
    let is_base = |at: usize| u64_at(data, at).filter(|base| *base >= KERNEL_HALF);
    let length = (count * 4).next_multiple_of(8);
    let before = number.checked_sub(8).and_then(|at| Some((is_base(at)?, at.checked_sub(length)?)));
    let behind = index + 512;
    let (base, offsets) = match before {
        Some(found) => found,
        None => (is_base(behind + length)?, behind),
    };
    // With CONFIG_KALLSYMS_ABSOLUTE_PERCPU (x86 with SMP, to 6.14) positive offsets are absolute and
    // negative ones count from the base; without it all are positive.
    let signed = (0..count).any(|at| u32_at(data, offsets + at * 4).is_some_and(|offset| offset >> 31 == 1));
    Some(move |position: usize| {
        let offset = u32_at(data, offsets + position * 4)?;
        Some(match (signed, offset as i32) {
            (true, offset @ 0..) => offset as u64,
            (true, offset) => base.wrapping_sub(1).wrapping_sub(i64::from(offset) as u64),
            (false, _) => base.wrapping_add(u64::from(offset)),
        })
    })
}
