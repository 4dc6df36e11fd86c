//! What must be known of a kernel before a machine's memory can be read: where its
//! structures have their fields, where its objects lie, and which of its instructions it
//! changes itself.
//!
//! ```text
//!  vmlinuz ──unpack──▶ vmlinux ──elf──▶ sections ──btf──────▶ offsets ─┐
//!                                             └───kallsyms──▶ symbols ─┴▶ Profile ──▶ cache, by the kernel's digest
//! ```
//! Everything comes from the measured file, nothing from the guest's memory. A kernel
//! without type information or symbols gives an error that says which is missing.

mod btf;
mod elf;
mod kallsyms;
mod profile;
mod unpack;

pub use profile::{JumpEntry, Offsets, Profile, Symbols};

/// Why a kernel can't be observed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Not a kernel image that we know.
    #[error("the kernel is not a bzImage: {0}")]
    NotBzImage(&'static str),
    /// Compressed in a way that is not unpacked here.
    #[error("the kernel is compressed with {0}, which Hotcell does not unpack: lz4, zstd and gzip are known")]
    Compression(&'static str),
    /// It does not unpack.
    #[error("the kernel does not unpack: {0}")]
    Corrupt(String),
    /// It says nothing about its structures.
    #[error("the kernel has no type information: use one that was built with CONFIG_DEBUG_INFO_BTF")]
    NoBtf,
    /// It does not say where its objects lie.
    #[error("the kernel has no symbols: use one that was built with CONFIG_KALLSYMS and CONFIG_KALLSYMS_ALL")]
    NoSymbols,
    /// A structure or object that is needed is missing.
    #[error("the kernel has no {0}: Hotcell knows the structures of Linux 6.1 to 6.12 on x86-64")]
    Lacks(String),
    /// The file can't be read.
    #[error("can't read the kernel: {0}")]
    Io(#[from] std::io::Error),
}

/// Byte offset of a member, in a section of type information.
pub fn type_offset(btf: &[u8], structure: &str, path: &str) -> Option<u32> {
    btf::Btf::read(btf)?.offset(structure, path)
}

/// Address of a symbol, in read-only data that holds the kernel's own table; `text` is where its text was linked to.
pub fn symbol_address(data: &[u8], text: u64, name: &str) -> Option<u64> {
    kallsyms::Kallsyms::read(data, text)?.address(name)
}

/// A little-endian number at an offset.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|chunk| u16::from_le_bytes(*chunk))
}

/// A little-endian number at an offset.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|chunk| u32::from_le_bytes(*chunk))
}

/// A little-endian number at an offset.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|chunk| u64::from_le_bytes(*chunk))
}
