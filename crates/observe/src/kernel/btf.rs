//! Where a structure has its fields: BTF, the kernel's own type information
//! (`Documentation/bpf/btf.rst`).
//!
//! Read here is what offsets need and no more: structures and unions, their members, and the
//! chain of names that leads from a member to its structure. Of the crates for it one is LGPL
//! and one unfolds every type of the kernel at once; this walks the bytes.

use super::{u16_at, u32_at};

const MAGIC: u16 = 0xeb9f;
/// Types of a kernel: distributions' have 60 000 to 150 000.
const MAX_TYPES: usize = 1 << 20;
/// Anonymous members inside anonymous members, and modifiers of modifiers.
const MAX_DEPTH: usize = 16;

const STRUCT: u32 = 4;
const UNION: u32 = 5;

pub(crate) struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    /// Where each type begins, by its number less one.
    starts: Vec<u32>,
}

impl<'a> Btf<'a> {
    pub(crate) fn read(bytes: &'a [u8]) -> Option<Btf<'a>> {
        if u16_at(bytes, 0)? != MAGIC {
            return None;
        }
        let header = u32_at(bytes, 4)? as usize;
        let part = |at: usize| {
            let start = header.checked_add(u32_at(bytes, at)? as usize)?;
            bytes.get(start..start.checked_add(u32_at(bytes, at.checked_add(4)?)? as usize)?)
        };
        let (types, strings) = (part(8)?, part(16)?);
        let mut starts = Vec::new();
        let mut at = 0usize;
        while at < types.len() {
            if starts.len() >= MAX_TYPES {
                return None;
            }
            starts.push(u32::try_from(at).ok()?);
            let info = u32_at(types, at.checked_add(4)?)?;
            let entries = (info & 0xffff) as usize;
            // Bytes behind the twelve of every type, by its kind.
            let behind = match (info >> 24) & 0x1f {
                1 | 14 | 17 => 4,
                3 => 12,
                STRUCT | UNION | 15 | 19 => entries * 12,
                6 | 13 => entries * 8,
                2 | 7..=12 | 16 | 18 => 0,
                _ => return None,
            };
            at = at.checked_add(12)?.checked_add(behind)?;
        }
        (at == types.len()).then_some(Btf { types, strings, starts })
    }

    fn name(&self, offset: u32) -> Option<&'a [u8]> {
        let rest = self.strings.get(offset as usize..)?;
        rest.get(..rest.iter().position(|&byte| byte == 0)?)
    }

    /// Start, kind and number of entries of a type.
    fn kind(&self, number: u32) -> Option<(usize, u32, usize)> {
        let at = *self.starts.get((number as usize).checked_sub(1)?)? as usize;
        let info = u32_at(self.types, at + 4)?;
        Some((at, (info >> 24) & 0x1f, (info & 0xffff) as usize))
    }

    fn structure(&self, name: &str) -> Option<u32> {
        self.starts.iter().zip(1..).find_map(|(&at, number)| {
            let info = u32_at(self.types, at as usize + 4)?;
            let fits = (info >> 24) & 0x1f == STRUCT && info & 0xffff > 0;
            (fits && self.name(u32_at(self.types, at as usize)?)? == name.as_bytes()).then_some(number)
        })
    }

    /// Byte offset of a member; a dotted path leads into members that are structures themselves.
    pub(crate) fn offset(&self, structure: &str, path: &str) -> Option<u32> {
        let mut number = self.structure(structure)?;
        let mut total = 0u32;
        for member in path.split('.') {
            let (offset, kind) = self.member(self.resolve(number)?, member.as_bytes(), 0)?;
            total = total.checked_add(offset)?;
            number = kind;
        }
        Some(total)
    }

    /// Through typedefs and qualifiers to the type itself.
    fn resolve(&self, mut number: u32) -> Option<u32> {
        for _ in 0..MAX_DEPTH {
            let (at, kind, _) = self.kind(number)?;
            match kind {
                8..=11 | 18 => number = u32_at(self.types, at + 8)?,
                _ => return Some(number),
            }
        }
        None
    }

    /// Offset and type of a member, looked for in anonymous members too.
    fn member(&self, number: u32, name: &[u8], depth: usize) -> Option<(u32, u32)> {
        let (at, kind, entries) = self.kind(number)?;
        if depth > MAX_DEPTH || (kind != STRUCT && kind != UNION) {
            return None;
        }
        let bitfields = u32_at(self.types, at + 4)? >> 31 == 1;
        let entry = |index: usize| {
            let entry = at.checked_add(12)?.checked_add(index.checked_mul(12)?)?;
            let bits = u32_at(self.types, entry.checked_add(8)?)?;
            let bits = if bitfields { bits & 0xff_ffff } else { bits };
            Some((self.name(u32_at(self.types, entry)?)?, u32_at(self.types, entry + 4)?, bits / 8))
        };
        if let Some((_, kind, offset)) = (0..entries).filter_map(entry).find(|(own, ..)| *own == name) {
            return Some((offset, kind));
        }
        (0..entries).filter_map(entry).filter(|(own, ..)| own.is_empty()).find_map(|(_, kind, offset)| {
            let (inner, kind) = self.member(self.resolve(kind)?, name, depth + 1)?;
            Some((offset.checked_add(inner)?, kind))
        })
    }
}
