//! The nonce: what the host sent to this machine's init is in this VMM's memory.
//!
//! PID 1 writes mark and nonce to the start of a locked page of its own. It is looked for in
//! the pages that PID 1's page tables name, which are a few hundred, not in all memory.

use super::memory::ReadError;
use super::space::Space;

const PAGE: usize = 4096;
/// Pages of PID 1 that are looked at; it has some 500.
const MAX_PAGES: usize = 65_536;
/// Page tables that are read; tables that lead back to themselves would have no end.
const MAX_TABLES: usize = 4096;
const FRAME: u64 = 0x000f_ffff_ffff_f000;
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;

/// The guest-physical address of a page of these page tables that begins with `marked`.
///
/// # Errors
/// The host can't read.
pub fn find(space: &Space<'_>, tables: u64, marked: &[u8]) -> Result<Option<u64>, ReadError> {
    let mut pages = Vec::new();
    let mut left = MAX_TABLES;
    collect(space, tables & FRAME, space.mapping().levels.min(5), &mut left, &mut pages)?;
    let mut head = vec![0; marked.len().min(PAGE)];
    for page in pages {
        match space.read_physical(page, &mut head) {
            Ok(()) if head == marked => return Ok(Some(page)),
            Ok(()) | Err(ReadError::Nowhere(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Pages of the lower half, which is the process's own.
fn collect(
    space: &Space<'_>,
    table: u64,
    level: u32,
    left: &mut usize,
    pages: &mut Vec<u64>,
) -> Result<(), ReadError> {
    let Some(fewer) = left.checked_sub(1) else { return Ok(()) };
    *left = fewer;
    let mut entries = vec![0; PAGE];
    match space.read_physical(table, &mut entries) {
        Ok(()) => {}
        Err(ReadError::Nowhere(_)) => return Ok(()),
        Err(error) => return Err(error),
    }
    let used = if level == space.mapping().levels { PAGE / 2 } else { PAGE };
    for entry in entries.get(..used).unwrap_or_default().chunks_exact(8) {
        let entry = crate::kernel::u64_at(entry, 0).unwrap_or(0);
        if entry & PRESENT == 0 || pages.len() >= MAX_PAGES || (level > 1 && entry & LARGE != 0) {
            continue;
        }
        if level == 1 {
            pages.push(entry & FRAME);
        } else {
            collect(space, entry & FRAME, level - 1, left, pages)?;
        }
    }
    Ok(())
}
