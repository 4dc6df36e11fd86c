//! The guest kernel's address space: from its addresses to guest-physical ones.
//!
//! ```text
//!  direct map    [page_offset_base ..)          physical = address - page_offset_base
//!  kernel image  [text .. text + length)        physical = address - text + where it was found
//!  anything else                                the page tables (4 or 5 levels)
//! ```
//! Most of what is read lies in the direct map, where an address is arithmetic. All addresses
//! come from the guest and are taken so: one that leads nowhere is an error of that read.

use super::memory::{ReadError, Source, locate};
use crate::kernel::u64_at;
use hotcell_sys::host::Range;
use std::cell::RefCell;
use std::collections::BTreeMap;

const PAGE: u64 = 4096;
/// Physical address bits of a page table entry, and its flags (Intel SDM 3A, 4.5).
const FRAME: u64 = 0x000f_ffff_ffff_f000;
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;

/// How the kernel's addresses lead to memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mapping {
    /// Where the text runs.
    pub text: u64,
    /// Where the text lies.
    pub text_physical: u64,
    /// Bytes of the kernel image.
    pub image_bytes: u64,
    /// Where all memory is mapped one after another.
    pub direct: u64,
    /// The kernel's own page tables.
    pub tables: u64,
    /// 4 or 5.
    pub levels: u32,
}

/// The memory of a machine, by its kernel's addresses.
pub struct Space<'a> {
    source: &'a dyn Source,
    mapping: Mapping,
    /// What was read, where that is kept.
    log: Option<RefCell<Log>>,
}

/// Everything that a walk read.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// By host address and length: what was there.
    pub(super) reads: BTreeMap<(u64, usize), Vec<u8>>,
    /// Whether a place held one thing and then another.
    pub(super) moved: bool,
}

impl<'a> Space<'a> {
    /// Addresses are translated by this mapping.
    pub fn new(source: &'a dyn Source, mapping: Mapping) -> Space<'a> {
        Space { source, mapping, log: None }
    }

    /// The same memory, and what is read of it is kept.
    pub(super) fn logging(&self) -> Space<'a> {
        Space { source: self.source, mapping: self.mapping, log: Some(RefCell::default()) }
    }

    /// What was read.
    pub(super) fn into_log(self) -> Log {
        self.log.map(RefCell::into_inner).unwrap_or_default()
    }

    /// Reads host ranges.
    ///
    /// # Errors
    /// The host can't read.
    pub(super) fn fetch(&self, ranges: &[Range], into: &mut [u8]) -> Result<(), ReadError> {
        self.source.read(ranges, into)?;
        let Some(log) = &self.log else { return Ok(()) };
        let mut log = log.borrow_mut();
        let mut rest = &*into;
        for range in ranges {
            let Some((bytes, behind)) = rest.split_at_checked(range.bytes) else { break };
            let before = log.reads.insert((range.address, range.bytes), bytes.to_vec());
            log.moved |= before.is_some_and(|before| before != bytes);
            rest = behind;
        }
        Ok(())
    }

    /// As [`Source::own_pages`], for what lies at these addresses of the kernel's.
    pub(super) fn own_pages(&self, address: u64, pages: usize) -> Option<Vec<bool>> {
        let mut ranges = Vec::with_capacity(1);
        self.ranges(address, pages.checked_mul(PAGE as usize)?, &mut ranges).ok()?;
        match ranges.as_slice() {
            [one] => self.source.own_pages(one.address, pages),
            _ => None,
        }
    }

    /// Its mapping.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Reads guest-physical bytes.
    ///
    /// # Errors
    /// They lie in no memory, or the host can't read.
    pub fn read_physical(&self, physical: u64, into: &mut [u8]) -> Result<(), ReadError> {
        let range = locate(self.source.regions(), physical, into.len())?;
        self.fetch(&[range], into)
    }

    /// The guest-physical address of one of the kernel's.
    ///
    /// # Errors
    /// It leads to no memory.
    pub fn physical(&self, address: u64) -> Result<u64, ReadError> {
        let Mapping { text, text_physical, image_bytes, direct, tables, .. } = self.mapping;
        // The kernel has the upper half.
        if address >> 63 == 0 {
            return Err(ReadError::Nowhere(address));
        }
        if let Some(inside) = address.checked_sub(text).filter(|inside| *inside < image_bytes) {
            return text_physical.checked_add(inside).ok_or(ReadError::Nowhere(address));
        }
        if let Some(inside) = address.checked_sub(direct)
            && locate(self.source.regions(), inside, 1).is_ok()
        {
            return Ok(inside);
        }
        self.walk(tables, address)
    }

    /// Follows page tables.
    ///
    /// # Errors
    /// The address is not mapped.
    pub fn walk(&self, tables: u64, address: u64) -> Result<u64, ReadError> {
        let nowhere = ReadError::Nowhere(address);
        let mut table = tables & FRAME;
        for level in (1..=self.mapping.levels.min(5)).rev() {
            let shift = 12 + 9 * (level - 1);
            let index = (address >> shift) & 0x1ff;
            let mut entry = [0; 8];
            self.read_physical(table.checked_add(index * 8).ok_or(ReadError::Nowhere(address))?, &mut entry)?;
            let entry = u64::from_le_bytes(entry);
            if entry & PRESENT == 0 {
                return Err(nowhere);
            }
            let page = 1u64 << shift;
            if level == 1 || (level <= 3 && entry & LARGE != 0) {
                return Ok((entry & FRAME & !(page - 1)) | (address & (page - 1)));
            }
            table = entry & FRAME;
        }
        Err(nowhere)
    }

    /// The host ranges of some bytes, which are one range unless they cross pages that lie apart.
    fn ranges(&self, address: u64, bytes: usize, into: &mut Vec<Range>) -> Result<(), ReadError> {
        let last =
            address.checked_add((bytes as u64).saturating_sub(1)).ok_or(ReadError::Nowhere(address))?;
        // Both ends, and so all between, are translated by one subtraction.
        let Mapping { text, text_physical, image_bytes, direct, .. } = self.mapping;
        if address >> 63 == 1 && last.wrapping_sub(text) < image_bytes && address >= text {
            into.push(locate(self.source.regions(), text_physical.wrapping_add(address - text), bytes)?);
            return Ok(());
        }
        if address >> 63 == 1
            && address.wrapping_sub(text) >= image_bytes
            && let Some(inside) = address.checked_sub(direct)
            && let Ok(range) = locate(self.source.regions(), inside, bytes)
        {
            into.push(range);
            return Ok(());
        }
        let (mut at, mut left) = (address, bytes as u64);
        while left > 0 {
            let some = left.min(PAGE - at % PAGE);
            into.push(locate(self.source.regions(), self.physical(at)?, some as usize)?);
            at = at.checked_add(some).ok_or(ReadError::Nowhere(address))?;
            left -= some;
        }
        Ok(())
    }

    /// Reads bytes at a kernel address.
    ///
    /// # Errors
    /// They lie in no memory, or the host can't read.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<(), ReadError> {
        let mut ranges = Vec::with_capacity(1);
        self.ranges(address, into.len(), &mut ranges)?;
        self.fetch(&ranges, into)
    }

    /// Reads a number.
    ///
    /// # Errors
    /// As [`Space::read`].
    pub fn u64(&self, address: u64) -> Result<u64, ReadError> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads many places with few calls of the kernel. A place that leads nowhere is empty; the others are there.
    ///
    /// # Errors
    /// The host can't read at all.
    pub fn gather(&self, places: impl IntoIterator<Item = (u64, usize)>) -> Result<Gathered, ReadError> {
        let mut all = Gathered::default();
        self.gather_again(places, &mut all)?;
        Ok(all)
    }

    /// As [`Space::gather`], into what held the places of another time.
    pub(super) fn gather_again(
        &self,
        places: impl IntoIterator<Item = (u64, usize)>,
        all: &mut Gathered,
    ) -> Result<(), ReadError> {
        all.ranges.clear();
        all.index.clear();
        let mut total = 0usize;
        for (address, bytes) in places {
            let before = all.ranges.len();
            match self.ranges(address, bytes, &mut all.ranges) {
                Ok(()) => {
                    all.index.push(Some((total, bytes)));
                    total = total.saturating_add(bytes);
                }
                Err(ReadError::Nowhere(_)) => {
                    all.ranges.truncate(before);
                    all.index.push(None);
                }
                Err(error) => return Err(error),
            }
        }
        all.bytes.resize(total, 0);
        if total > 0 {
            self.fetch(&all.ranges, &mut all.bytes)?;
        }
        Ok(())
    }

    /// As [`Space::gather_again`], for small places of which many lie close together: those are read as one.
    pub(super) fn gather_near(
        &self,
        places: impl IntoIterator<Item = (u64, usize)>,
        all: &mut Gathered,
    ) -> Result<(), ReadError> {
        let mut ranges = Vec::new();
        let mut index = Vec::new();
        for (address, bytes) in places {
            let before = ranges.len();
            match self.ranges(address, bytes, &mut ranges) {
                // Parts of one place must stay together, and hardly any place has some.
                Ok(()) if ranges.len() == before + 1 => index.push(Some(before)),
                Ok(()) | Err(ReadError::Nowhere(_)) => {
                    ranges.truncate(before);
                    index.push(None);
                }
                Err(error) => return Err(error),
            }
        }
        let offsets = merge(&ranges, &mut all.ranges);
        let total = all.ranges.iter().map(|range| range.bytes).sum();
        all.bytes.resize(total, 0);
        if total > 0 {
            self.fetch(&all.ranges, &mut all.bytes)?;
        }
        let place = |at: usize| Some((*offsets.get(at)?, ranges.get(at)?.bytes));
        all.index.clear();
        all.index.extend(index.into_iter().map(|at| at.and_then(place)));
        Ok(())
    }

    /// Reads bytes of a process, by its own page tables; what is not in memory ends it.
    ///
    /// # Errors
    /// The host can't read at all.
    pub fn user(&self, tables: u64, address: u64, bytes: usize) -> Result<Vec<u8>, ReadError> {
        let mut out = Vec::with_capacity(bytes);
        let mut at = address;
        while out.len() < bytes {
            let some = (bytes - out.len()).min((PAGE - at % PAGE) as usize);
            let mut page = vec![0; some];
            let read = self.walk(tables, at).and_then(|physical| self.read_physical(physical, &mut page));
            match read {
                Ok(()) => out.extend_from_slice(&page),
                Err(ReadError::Nowhere(_)) => break,
                Err(error) => return Err(error),
            }
            let Some(next) = at.checked_add(some as u64) else { break };
            at = next;
        }
        Ok(out)
    }

    /// Where the text runs, of an address as linked.
    pub fn at(&self, linked: u64, text: u64) -> u64 {
        linked.wrapping_sub(text).wrapping_add(self.mapping.text)
    }
}

/// Bytes between two places that are read as well, rather than to begin anew.
const NEAR: u64 = 512;

/// Joins ranges of one page that lie close together; gives where in the bytes of the joined ones each begins.
pub(super) fn merge(ranges: &[Range], into: &mut Vec<Range>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    let address = |at: usize| ranges.get(at).map_or(0, |range| range.address);
    order.sort_unstable_by_key(|at| address(*at));
    into.clear();
    let mut offsets = vec![0; ranges.len()];
    let mut total = 0;
    for at in order {
        let Some(&Range { address, bytes }) = ranges.get(at) else { continue };
        let end = address.saturating_add(bytes as u64);
        let joined = into.last_mut().filter(|last| {
            let last_end = last.address.saturating_add(last.bytes as u64);
            address / PAGE == last.address / PAGE && address <= last_end.saturating_add(NEAR)
        });
        let start = match joined {
            Some(last) => {
                let start = total - last.bytes + (address - last.address) as usize;
                let longer = (end.saturating_sub(last.address) as usize).max(last.bytes);
                total += longer - last.bytes;
                last.bytes = longer;
                start
            }
            None => {
                into.push(Range { address, bytes });
                total += bytes;
                total - bytes
            }
        };
        if let Some(offset) = offsets.get_mut(at) {
            *offset = start;
        }
    }
    offsets
}

/// Bytes of many places.
#[derive(Debug, Default)]
pub struct Gathered {
    bytes: Vec<u8>,
    index: Vec<Option<(usize, usize)>>,
    ranges: Vec<Range>,
}

impl Gathered {
    /// The bytes of a place; `None` where it led nowhere.
    pub fn get(&self, place: usize) -> Option<&[u8]> {
        let (start, length) = (*self.index.get(place)?)?;
        self.bytes.get(start..start.checked_add(length)?)
    }

    /// A number in the bytes of a place.
    pub fn u64(&self, place: usize, offset: usize) -> Option<u64> {
        u64_at(self.get(place)?, offset)
    }
}
