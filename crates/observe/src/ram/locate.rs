//! Finds the kernel in memory: where it lies, where it runs, how its page tables are.
//!
//! ```text
//!  version line at every 2 MiB ─▶ text_physical ─▶ phys_base ─▶ text ─▶ page_offset_base, page tables
//!                                                               └────── cross checks ◀──────┘
//! ```
//! Randomisation (KASLR) moves the text in physical memory and, apart from that, in the
//! address space, each in steps of 2 MiB. Nothing is believed that one other thing does not
//! confirm: the page tables must lead from the text's address to where it was found, the
//! direct map as well, and the first task must be called `swapper`.

use super::memory::{HOST_PAGE, ReadError, Source};
use super::space::{Mapping, Space};
use crate::kernel::Profile;

/// `CONFIG_PHYSICAL_ALIGN` of x86-64: 2 MiB at least.
const STEP: u64 = 2 << 20;
/// `__START_KERNEL_map` (`arch/x86/include/asm/page_64_types.h`).
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// `KERNEL_IMAGE_SIZE`: the address space that the image lies in.
const KERNEL_MAP_BYTES: u64 = 1 << 30;

/// Finds the kernel of this profile.
///
/// # Errors
/// It is not there, or what is there contradicts itself; the text says what.
pub fn locate(source: &dyn Source, profile: &Profile) -> Result<Mapping, LocateError> {
    let mut refused = Vec::new();
    // A kernel that has run was touched. To read what nobody has touched takes the host a page of zeros each time, for a large
    // machine half a minute.
    // Asked of all before any is read: reading touches.
    let places: Vec<(u64, bool)> = places(source)
        .map(|(physical, host, bytes)| {
            let pages = usize::try_from(bytes / HOST_PAGE).unwrap_or(0);
            (physical, source.touched(host, pages).unwrap_or(true))
        })
        .collect();
    for wanted in [true, false] {
        for &(physical, touched) in &places {
            if touched != wanted || !says_its_version(source, profile, physical)? {
                continue;
            }
            match confirm(source, profile, physical) {
                Ok(mapping) => return Ok(mapping),
                Err(LocateError::Read(error @ (ReadError::Gone | ReadError::Host(_)))) => {
                    return Err(error.into());
                }
                Err(error) => refused.push(format!("at {physical:#x}: {error}")),
            }
        }
    }
    Err(LocateError::NotFound(refused.join("; ")))
}

/// Why the kernel was not found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocateError {
    /// Nothing fits.
    #[error("the measured kernel is not in the guest's memory ({0})")]
    NotFound(String),
    /// A check failed.
    #[error("{0}")]
    Contradiction(&'static str),
    /// Memory could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// Where a kernel's text may begin: its physical address, the host's, and bytes up to the next such place.
fn places(source: &dyn Source) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
    source.regions().iter().flat_map(|region| {
        let end = region.guest.saturating_add(region.bytes);
        let first = region.guest.next_multiple_of(STEP);
        let starts = (first..end).step_by(STEP as usize);
        starts.map(move |at| (at, region.host.wrapping_add(at - region.guest), STEP.min(end - at)))
    })
}

/// Whether the version line would be right of a text at this address.
fn says_its_version(source: &dyn Source, profile: &Profile, physical: u64) -> Result<bool, ReadError> {
    let inside = profile.symbols.linux_banner.wrapping_sub(profile.symbols.text);
    let banner = profile.banner.as_bytes();
    let Some(place) = physical.checked_add(inside) else { return Ok(false) };
    let mut line = vec![0; banner.len()];
    match Space::new(source, Mapping::default()).read_physical(place, &mut line) {
        Ok(()) => Ok(line == banner),
        Err(error @ (ReadError::Gone | ReadError::Host(_))) => Err(error),
        Err(ReadError::Nowhere(_)) => Ok(false),
    }
}

fn confirm(source: &dyn Source, profile: &Profile, text_physical: u64) -> Result<Mapping, LocateError> {
    let symbols = &profile.symbols;
    let raw = Space::new(source, Mapping::default());
    let number = |linked: u64| -> Result<u64, LocateError> {
        let place =
            linked.wrapping_sub(symbols.text).checked_add(text_physical).ok_or(ReadError::Nowhere(linked))?;
        let mut bytes = [0; 8];
        raw.read_physical(place, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    };
    // `__pa_symbol(x) = x - __START_KERNEL_map + phys_base`, turned round.
    let text = text_physical.wrapping_sub(number(symbols.phys_base)?).wrapping_add(KERNEL_MAP);
    let in_place =
        text.checked_sub(KERNEL_MAP).is_some_and(|inside| inside < KERNEL_MAP_BYTES && inside % STEP == 0);
    if !in_place {
        return Err(LocateError::Contradiction("the text would run outside of the kernel's address space"));
    }
    let direct = number(symbols.page_offset_base)?;
    if direct >> 63 == 0 || direct % (1 << 30) != 0 {
        return Err(LocateError::Contradiction("there is no direct map"));
    }
    let tables = symbols.init_top_pgt.wrapping_sub(symbols.text).wrapping_add(text_physical);
    let image_bytes = symbols.end.wrapping_sub(symbols.text);
    let mapping = |levels| Mapping { text, text_physical, image_bytes, direct, tables, levels };
    let levels = [4, 5].into_iter().find(|&levels| {
        let space = Space::new(source, mapping(levels));
        let leads = |address: u64, to: u64| space.walk(tables, address).ok() == Some(to);
        leads(text, text_physical) && leads(direct.wrapping_add(text_physical), text_physical)
    });
    let levels = levels.ok_or(LocateError::Contradiction("its page tables do not lead to it"))?;
    let space = Space::new(source, mapping(levels));
    let mut comm = [0; 8];
    let first = space.at(symbols.init_task, symbols.text);
    space.read(first.wrapping_add(u64::from(profile.offsets.task_comm)), &mut comm)?;
    if !comm.starts_with(b"swapper") {
        return Err(LocateError::Contradiction("its first task has another name"));
    }
    Ok(mapping(levels))
}
