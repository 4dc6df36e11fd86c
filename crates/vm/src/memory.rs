//! Where a machine's memory lies in its VMM.

/// A range of guest-physical memory, and where it is mapped in the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Its first guest-physical address.
    pub guest: u64,
    /// The same byte's address in the VMM process.
    pub host: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A machine's memory, as the VMM said before the guest's first instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestMemory {
    /// The VMM process; it is ours and not reaped before the machine is destroyed, so the number is not reused.
    pub pid: i32,
    /// Disjoint, ascending by `guest`.
    pub regions: Vec<MemoryRegion>,
}

impl GuestMemory {
    /// Reads QEMU's `info mtree -f`: the ranges of RAM in the address space of the processors, without their host
    /// addresses, as (first, last).
    ///
    /// ```text
    ///   0000000000100000-000000001fffffff (prio 0, ram): microvm.ram @0000000000100000
    /// ```
    pub(crate) fn ranges(flat_views: &str) -> Vec<(u64, u64)> {
        let processors = flat_views.split("FlatView #").find(|view| view.contains("AS \"cpu-memory-0\""));
        let lines = processors.unwrap_or_default().lines();
        lines
            .filter_map(|line| {
                let (range, rest) = line.trim().split_once(' ')?;
                // Firmware is RAM to QEMU as well; nothing of the guest's kernel lies in it.
                if !rest.contains(", ram): ") || rest.contains("pc.bios") || rest.contains("/rom@") {
                    return None;
                }
                let (first, last) = range.split_once('-')?;
                Some((u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()?))
            })
            .filter(|(first, last)| first < last)
            .collect()
    }

    /// Reads QEMU's answer to `gpa2hva`: `Host virtual address for 0x0 (microvm.ram) is 0x7f…`.
    pub(crate) fn host_address(answer: &str) -> Option<u64> {
        let (_, address) = answer.trim().rsplit_once(" is 0x")?;
        u64::from_str_radix(address, 16).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VIEWS: &str = "FlatView #0\n AS \"memory\", root: system\n AS \"cpu-memory-0\", root: system\n \
        Root memory region: system\n  0000000000000000-00000000000effff (prio 0, ram): ram\n  \
        00000000000f0000-00000000000fffff (prio 0, ram): pc.bios\n  \
        0000000000100000-00000000bfffffff (prio 0, ram): ram @0000000000100000\n  \
        00000000feb00000-00000000feb001ff (prio 0, i/o): virtio-mmio\n  \
        0000000100000000-00000001787fffff (prio 0, ram): ram @00000000c0000000\n\nFlatView #1\n AS \"I/O\", root: io\n  \
        0000000000000000-000000000000006f (prio 0, ram): io\n";

    #[test]
    fn the_ranges_are_those_of_the_processors() {
        let expected = [(0, 0xe_ffff), (0x10_0000, 0xbfff_ffff), (0x1_0000_0000, 0x1_787f_ffff)];
        assert_eq!(GuestMemory::ranges(VIEWS), expected);
        assert_eq!(GuestMemory::ranges("rubbish"), []);
    }

    #[test]
    fn an_address_is_read_from_its_sentence_alone() {
        let said = "Host virtual address for 0x0 (microvm.ram) is 0x7f34fbe00000\r\n";
        assert_eq!(GuestMemory::host_address(said), Some(0x7f34_fbe0_0000));
        assert_eq!(GuestMemory::host_address("No memory is mapped at address 0x0"), None);
    }
}
