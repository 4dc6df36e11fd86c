//! The sections of a vmlinux, by name.

use super::{u16_at, u32_at, u64_at};

/// Most sections that are looked at; kernels have some forty.
const MAX_SECTIONS: usize = 512;

/// A section that lies in the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Section<'a> {
    /// Its address as linked.
    pub(crate) address: u64,
    /// Its bytes.
    pub(crate) bytes: &'a [u8],
}

/// An ELF file for x86-64.
pub(crate) struct Elf<'a> {
    file: &'a [u8],
    headers: Vec<(u32, u64, u64, u64, bool)>,
    names: &'a [u8],
}

impl<'a> Elf<'a> {
    pub(crate) fn read(file: &'a [u8]) -> Option<Elf<'a>> {
        // 64 bits, little-endian, EM_X86_64.
        if file.get(..6)? != b"\x7fELF\x02\x01" || u16_at(file, 18)? != 62 {
            return None;
        }
        let (table, size) = (u64_at(file, 40)? as usize, usize::from(u16_at(file, 58)?));
        let (count, names) = (usize::from(u16_at(file, 60)?), usize::from(u16_at(file, 62)?));
        if size < 64 || count > MAX_SECTIONS {
            return None;
        }
        let mut headers = Vec::new();
        for index in 0..count {
            let at = table.checked_add(index.checked_mul(size)?)?;
            let held = u32_at(file, at.checked_add(4)?)? != 8;
            headers.push((
                u32_at(file, at)?,
                u64_at(file, at + 16)?,
                u64_at(file, at + 24)?,
                u64_at(file, at + 32)?,
                held,
            ));
        }
        let &(_, _, offset, length, _) = headers.get(names)?;
        let names = file.get(offset as usize..(offset as usize).checked_add(length as usize)?)?;
        Some(Elf { file, headers, names })
    }

    pub(crate) fn section(&self, name: &str) -> Option<Section<'a>> {
        self.headers.iter().find_map(|&(at, address, offset, length, held)| {
            let rest = self.names.get(at as usize..)?;
            let own = rest.get(..name.len())? == name.as_bytes() && rest.get(name.len()) == Some(&0);
            let bytes = self.file.get(offset as usize..(offset as usize).checked_add(length as usize)?)?;
            (own && held).then_some(Section { address, bytes })
        })
    }

    /// The bytes at an address as linked.
    pub(crate) fn at(&self, address: u64, length: usize) -> Option<&'a [u8]> {
        self.headers.iter().find_map(|&(_, start, offset, bytes, held)| {
            let inside = address.checked_sub(start).filter(|inside| held && start != 0 && *inside < bytes)?;
            if inside.checked_add(length as u64)? > bytes {
                return None;
            }
            let at = offset.checked_add(inside)? as usize;
            self.file.get(at..at.checked_add(length)?)
        })
    }
}
