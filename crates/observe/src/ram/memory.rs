//! A machine's memory: guest-physical bytes, read from the VMM process.

use hotcell_sys::host::{Range, process_time, read_process};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// A range of guest-physical memory, and where it is mapped in the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first guest-physical address.
    pub guest: u64,
    /// The same byte's address in the VMM process.
    pub host: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Why bytes could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The VMM process has ended: whoever waits for it will know.
    #[error("the VMM has ended")]
    Gone,
    /// The address is in no memory: a pointer that points nowhere, or was torn.
    #[error("{0:#x} is no memory of the guest")]
    Nowhere(u64),
    /// The host refuses, or has another problem.
    #[error(
        "can't read the memory of the VMM: {0}. Reading needs the user who owns the VMM's user namespace, or root"
    )]
    Host(std::io::Error),
}

/// Where bytes of the guest come from. Tests and fuzzing have their own.
pub trait Source: Send {
    /// Ranges of guest-physical memory, disjoint and ascending.
    fn regions(&self) -> &[Region];

    /// Reads whole ranges of host addresses, one after another. Each lies in one region.
    ///
    /// # Errors
    /// Not everything could be read.
    fn read(&self, ranges: &[Range], into: &mut [u8]) -> Result<(), ReadError>;

    /// For each host page from this address on, whether the VMM has a copy of its own, which it gets by its first write.
    /// Without one the page is that of the file which the memory was mapped from, unchanged. `None` where the host does
    /// not tell.
    fn own_pages(&self, address: u64, pages: usize) -> Option<Vec<bool>> {
        let _ = (address, pages);
        None
    }

    /// Whether the VMM or its guest has touched any of the host pages from this address on. `None` where the host does not
    /// tell.
    fn touched(&self, address: u64, pages: usize) -> Option<bool> {
        let _ = (address, pages);
        None
    }

    /// How long the VMM has been on a processor so far, all of its threads together: while it was on none, nothing changed
    /// the memory. `None` where the host does not tell, or tells it late.
    fn ran(&self) -> Option<u64> {
        None
    }
}

/// The memory of a live VMM.
#[derive(Clone, Debug)]
pub struct VmmMemory {
    pid: i32,
    regions: Vec<Region>,
    /// `/proc/PID/pagemap`, where it can be opened.
    pagemap: Option<Arc<File>>,
    /// Whether the host counts a running thread's time at every tick.
    timed: bool,
}

/// Bytes of a host page, on the one architecture that there is.
pub(crate) const HOST_PAGE: u64 = 4096;
/// Entries of a page map (`Documentation/admin-guide/mm/pagemap.rst`): the page is in memory, is on a swap device, is of a
/// file or shared.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_A_FILE: u64 = 1 << 61;

impl VmmMemory {
    /// The memory of this process, which must not be reaped while this is used.
    pub fn new(pid: i32, mut regions: Vec<Region>) -> VmmMemory {
        regions.sort_unstable_by_key(|region| region.guest);
        let pagemap = File::open(format!("/proc/{pid}/pagemap")).ok().map(Arc::new);
        VmmMemory { pid, regions, pagemap, timed: every_processor_ticks() }
    }

    /// What the host's page map says of the pages from this address on.
    fn entries(&self, address: u64, pages: usize) -> Option<Vec<u64>> {
        let mut bytes = vec![0; pages.checked_mul(8)?];
        self.pagemap.as_ref()?.read_exact_at(&mut bytes, address / HOST_PAGE * 8).ok()?;
        let (entries, _) = bytes.as_chunks::<8>();
        Some(entries.iter().map(|entry| u64::from_le_bytes(*entry)).collect())
    }
}

impl Source for VmmMemory {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn read(&self, ranges: &[Range], into: &mut [u8]) -> Result<(), ReadError> {
        let wanted: usize = ranges.iter().map(|range| range.bytes).sum();
        match read_process(self.pid, ranges, into) {
            Ok(count) if count == wanted => Ok(()),
            // Guest memory is mapped for as long as the process lives, so a short read means that it is ending.
            Ok(_) => Err(ReadError::Gone),
            Err(error) if error.raw_os_error() == Some(NO_SUCH_PROCESS) => Err(ReadError::Gone),
            Err(error) => Err(ReadError::Host(error)),
        }
    }

    fn own_pages(&self, address: u64, pages: usize) -> Option<Vec<bool>> {
        let own = |entry: u64| entry & (PRESENT | SWAPPED) != 0 && entry & OF_A_FILE == 0;
        Some(self.entries(address, pages)?.into_iter().map(own).collect())
    }

    fn ran(&self) -> Option<u64> {
        self.timed.then(|| process_time(self.pid).ok()).flatten()
    }

    fn touched(&self, address: u64, pages: usize) -> Option<bool> {
        Some(self.entries(address, pages)?.into_iter().any(|entry| entry & (PRESENT | SWAPPED) != 0))
    }
}

/// Whether a thread that runs is interrupted by its processor's tick. On those of `nohz_full=` it may run for a second
/// before its time is counted.
fn every_processor_ticks() -> bool {
    let tickless = std::fs::read_to_string("/sys/devices/system/cpu/nohz_full").unwrap_or_default();
    matches!(tickless.trim(), "" | "(null)")
}

/// `ESRCH`, which std has no kind for.
const NO_SUCH_PROCESS: i32 = 3;

/// The host range of some guest-physical bytes.
pub(crate) fn locate(regions: &[Region], physical: u64, bytes: usize) -> Result<Range, ReadError> {
    let after = regions.partition_point(|region| region.guest <= physical);
    let region = after.checked_sub(1).and_then(|at| regions.get(at)).ok_or(ReadError::Nowhere(physical))?;
    let inside = physical - region.guest;
    let fits = inside.checked_add(bytes as u64).is_some_and(|end| end <= region.bytes);
    let host = region.host.checked_add(inside).filter(|_| fits).ok_or(ReadError::Nowhere(physical))?;
    Ok(Range { address: host, bytes })
}
