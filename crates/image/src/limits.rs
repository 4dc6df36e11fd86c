//! What an image may cost. Sources are hostile until they are measured: each of
//! these is checked before the memory or disk that it bounds is taken.

/// Bounds of one build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Archive entries of all layers together, markers and what is left out included.
    /// A Debian with a desktop has about 300 000; each costs some 300 bytes of memory.
    pub entries: u64,
    /// Bytes of all layers after decompression: what a compression bomb can put on disk.
    pub bytes: u64,
    /// Bytes of one file: a squashfs inode of the plain kind holds 32 bits.
    pub file_bytes: u64,
    /// Bytes of all names and link targets together: they stay in memory.
    pub name_bytes: u64,
    /// Components of one path. The kernel has no bound but PATH_MAX; no honest tree goes deeper.
    pub depth: usize,
    /// Different owners and groups: squashfs numbers them with 16 bits, and its writer looks them up one by one.
    pub owners: usize,
    /// Links that are followed to place entries, all together: bounds the time that a maze takes.
    pub links: u64,
    /// Layers. Docker stops at 127.
    pub layers: usize,
}

/// Longest file name, as Linux has it (NAME_MAX).
pub(crate) const MAX_NAME: usize = 255;
/// Longest link target (PATH_MAX with its NUL).
pub(crate) const MAX_TARGET: usize = 4095;
/// Largest JSON document of an image that is read: a manifest of 256 layers has some 50 KiB.
pub(crate) const MAX_JSON: u64 = 4 << 20;
/// Largest long name or pax header of an archive entry.
pub(crate) const MAX_TAR_NOTE: u64 = 1 << 20;

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            entries: 500_000,
            bytes: 16 << 30,
            file_bytes: u32::MAX as u64,
            name_bytes: 128 << 20,
            depth: 128,
            owners: 1024,
            links: 1_000_000,
            layers: 256,
        }
    }
}

const _: () = assert!(MAX_TAR_NOTE > MAX_TARGET as u64 && MAX_TARGET > MAX_NAME);
