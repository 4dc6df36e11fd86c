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
}

impl<'a> Space<'a> {
    /// Addresses are translated by this mapping.
    pub fn new(source: &'a dyn Source, mapping: Mapping) -> Space<'a> {
        Space { source, mapping }
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
        self.source.read(&[range], into)
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
        let first = self.physical(address)?;
        let last =
            address.checked_add((bytes as u64).saturating_sub(1)).ok_or(ReadError::Nowhere(address))?;
        let contiguous =
            address / PAGE == last / PAGE || self.physical(last)?.wrapping_sub(first) == last - address;
        if contiguous && self.is_arithmetic(address, last) {
            into.push(locate(self.source.regions(), first, bytes)?);
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

    /// Whether both ends, and so all between, are translated by one subtraction, or lie in one page.
    fn is_arithmetic(&self, first: u64, last: u64) -> bool {
        let in_image = |address: u64| address.wrapping_sub(self.mapping.text) < self.mapping.image_bytes;
        let in_direct = |address: u64| {
            let inside = address.wrapping_sub(self.mapping.direct);
            locate(self.source.regions(), inside, 1).is_ok()
        };
        first / PAGE == last / PAGE
            || (in_image(first) && in_image(last))
            || (in_direct(first) && in_direct(last))
    }

    /// Reads bytes at a kernel address.
    ///
    /// # Errors
    /// They lie in no memory, or the host can't read.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<(), ReadError> {
        let mut ranges = Vec::with_capacity(1);
        self.ranges(address, into.len(), &mut ranges)?;
        self.source.read(&ranges, into)
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
    pub fn gather(&self, places: &[(u64, usize)]) -> Result<Gathered, ReadError> {
        let mut ranges = Vec::with_capacity(places.len());
        let mut index = Vec::with_capacity(places.len());
        let mut total = 0usize;
        for &(address, bytes) in places {
            let before = ranges.len();
            match self.ranges(address, bytes, &mut ranges) {
                Ok(()) => {
                    index.push(Some((total, bytes)));
                    total = total.saturating_add(bytes);
                }
                Err(ReadError::Nowhere(_)) => {
                    ranges.truncate(before);
                    index.push(None);
                }
                Err(error) => return Err(error),
            }
        }
        let mut bytes = vec![0; total];
        if total > 0 {
            self.source.read(&ranges, &mut bytes)?;
        }
        Ok(Gathered { bytes, index })
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

/// Bytes of many places.
#[derive(Debug, Default)]
pub struct Gathered {
    bytes: Vec<u8>,
    index: Vec<Option<(usize, usize)>>,
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
