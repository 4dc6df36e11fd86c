//! The structures of an ext4 disk, read where they lie.
//!
//! ```text
//! Geometry::read(disk)          once, before anything of the workload runs: where inodes are
//!   └─ Reader::new(disk, &geometry, …) one for each reading of the disk
//!        ├─ inode(number)             checked by its checksum
//!        ├─ entries(&inode)           names of a directory, each block checked by its checksum
//!        ├─ extents(number, &inode)   where the bytes of a file lie
//!        └─ target(&inode)            of a symbolic link
//! ```
//! Why not a library: what this needs is each name's inode and generation (a rename is the same
//! inode under another name), the map of a file's blocks (a hole is not read), and a bound
//! on all work and memory that the disk can ask for. No library gives these; the
//! differential test reads the same disks with `ext4-view`.
//!
//! Guarantees: every byte may be hostile. Each loop is bounded by the disk's own size and by
//! [`MAX_METADATA_BLOCKS`]; memory by [`WINDOWS`]; nothing panics. Structures with a wrong
//! checksum are errors, so one that is read while it is written shows.
//! Not guaranteed: that the guest's kernel wrote what it was asked to.
//! Only what `mke2fs` makes for a workspace and a Linux kernel then does with it is
//! understood: no journal, no inline data, no encryption. Anything else is an error.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that are read at once, and the largest block understood.
const WINDOW: u64 = 64 * 1024;
/// Windows kept: 8 MiB.
const WINDOWS: u64 = 128;
/// Structures that one reading may look at: 200 000 files need some 400 000.
pub(super) const MAX_METADATA_BLOCKS: u64 = 1 << 20;
/// Nodes of one file's block map: an honest file on the largest disk (64 GiB) has fewer than 50 000 leaves.
const MAX_NODES: u32 = 65_536;
/// Extents of one file.
const MAX_EXTENTS: usize = 1 << 20;
/// Block groups: 64 GiB in groups of 8 MiB.
const MAX_GROUPS: u64 = 8192;
/// Longest symbolic link: the kernel's PATH_MAX.
const MAX_TARGET: u64 = 4096;

const SUPERBLOCK: u64 = 1024;
const MAGIC: u16 = 0xef53;
const EXTENT_MAGIC: u16 = 0xf30a;
const ROOT_INODE: u32 = 2;

const INCOMPAT_FILETYPE: u32 = 0x2;
const INCOMPAT_EXTENTS: u32 = 0x40;
const INCOMPAT_64BIT: u32 = 0x80;
const INCOMPAT_FLEX_BG: u32 = 0x200;
const INCOMPAT_CSUM_SEED: u32 = 0x2000;
const INCOMPAT_UNDERSTOOD: u32 =
    INCOMPAT_FILETYPE | INCOMPAT_EXTENTS | INCOMPAT_64BIT | INCOMPAT_FLEX_BG | INCOMPAT_CSUM_SEED;
const COMPAT_JOURNAL: u32 = 0x4;
const RO_COMPAT_BIGALLOC: u32 = 0x200;
const RO_COMPAT_METADATA_CSUM: u32 = 0x400;

const FLAG_EXTENTS: u32 = 0x8_0000;
/// Inline data, values of attributes, verity, encryption: none can be on a disk of ours.
const FLAGS_REFUSED: u32 = 0x1000_0000 | 0x20_0000 | 0x10_0000 | 0x800;

/// Bytes that can be read at any place.
pub trait Disk {
    /// How many there are.
    fn bytes(&self) -> u64;

    /// Fills `buffer` from `at` on.
    ///
    /// # Errors
    /// It can't be read there.
    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl Disk for File {
    fn bytes(&self) -> u64 {
        self.metadata().map_or(0, |metadata| metadata.len())
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buffer, at)
    }
}

impl Disk for [u8] {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(at).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let part = from.checked_add(buffer.len()).and_then(|to| self.get(from..to));
        buffer.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl Disk for Vec<u8> {
    fn bytes(&self) -> u64 {
        self.as_slice().bytes()
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.as_slice().read_at(at, buffer)
    }
}

/// Why a part of the disk can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The host's own reading failed.
    #[error("can't read the workspace disk: {0}")]
    Io(#[from] io::Error),
    /// The bytes make no sense: damaged, or read while they were written.
    #[error("{what} makes no sense ({detail})")]
    Damaged {
        /// Which structure.
        what: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// A file system that nobody makes here.
    #[error("the workspace disk has features that are not understood: {0}")]
    Unsupported(String),
    /// It asks for more work than any honest disk.
    #[error("the workspace disk asks for more work than {limit}")]
    TooMuch {
        /// Which bound.
        limit: &'static str,
    },
}

pub(super) fn damaged(what: &'static str, detail: impl Into<String>) -> DiskError {
    DiskError::Damaged { what, detail: detail.into() }
}

/// Where the parts of one file system lie. Read before the workload runs and then kept, so
/// that nothing written later can move them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    block: u64,
    blocks: u64,
    inode_size: u64,
    inodes: u32,
    inodes_per_group: u32,
    /// First block of each group's inode table.
    tables: Vec<u64>,
    /// Seed of the checksums, where structures have them.
    seed: Option<u32>,
}

impl Geometry {
    /// Reads superblock and group descriptors.
    ///
    /// # Errors
    /// It is no file system of ours.
    pub fn read(disk: &(impl Disk + ?Sized)) -> Result<Geometry, DiskError> {
        let mut bytes = [0; 1024];
        disk.read_at(SUPERBLOCK, &mut bytes)?;
        let sb = Bytes(&bytes, "the superblock");
        if sb.u16(0x38)? != MAGIC {
            return Err(damaged("the superblock", "no ext4"));
        }
        let (compat, incompat, ro) = (sb.u32(0x5c)?, sb.u32(0x60)?, sb.u32(0x64)?);
        if sb.u32(0x4c)? == 0
            || incompat & !INCOMPAT_UNDERSTOOD != 0
            || incompat & INCOMPAT_FILETYPE == 0
            || compat & COMPAT_JOURNAL != 0
            || ro & RO_COMPAT_BIGALLOC != 0
        {
            return Err(DiskError::Unsupported(format!(
                "compat {compat:#x} incompat {incompat:#x} ro {ro:#x}"
            )));
        }
        let seed = if ro & RO_COMPAT_METADATA_CSUM == 0 {
            None
        } else {
            let whole = crc(!0, bytes.get(..0x3fc).unwrap_or_default());
            if whole != sb.u32(0x3fc)? {
                return Err(damaged("the superblock", "checksum"));
            }
            match incompat & INCOMPAT_CSUM_SEED {
                0 => Some(crc(!0, bytes.get(0x68..0x78).unwrap_or_default())),
                _ => Some(sb.u32(0x270)?),
            }
        };
        let log = sb.u32(0x18)?;
        let inode_size = u64::from(sb.u16(0x58)?);
        if log > 5 || inode_size < 128 || !inode_size.is_power_of_two() || inode_size > 1024 << log {
            return Err(damaged(
                "the superblock",
                format!("blocks of 1024 << {log}, inodes of {inode_size}"),
            ));
        }
        let block = 1024u64 << log;
        let wide = incompat & INCOMPAT_64BIT != 0;
        let high = if wide { u64::from(sb.u32(0x150)?) } else { 0 };
        let blocks = high << 32 | u64::from(sb.u32(0x4)?);
        let first = u64::from(sb.u32(0x14)?);
        let (per_group, inodes_per_group, inodes) = (u64::from(sb.u32(0x20)?), sb.u32(0x28)?, sb.u32(0x0)?);
        if blocks.checked_mul(block).is_none_or(|bytes| bytes > disk.bytes())
            || first >= blocks
            || per_group == 0
            || inodes_per_group == 0
        {
            return Err(damaged("the superblock", "it does not fit the disk"));
        }
        let groups = (blocks - first).div_ceil(per_group);
        if groups > MAX_GROUPS || u64::from(inodes) != groups * u64::from(inodes_per_group) {
            return Err(damaged("the superblock", format!("{groups} groups, {inodes} inodes")));
        }
        let size = if wide { u64::from(sb.u16(0xfe)?) } else { 32 };
        if size < 32 || !size.is_power_of_two() || size > 1024 {
            return Err(damaged("the superblock", format!("group descriptors of {size}")));
        }
        let mut descriptors = vec![0; (groups * size) as usize];
        disk.read_at((first + 1) * block, &mut descriptors)?;
        let mut tables = Vec::with_capacity(groups as usize);
        for one in descriptors.chunks_exact(size as usize) {
            let one = Bytes(one, "a group descriptor");
            let high = if size >= 64 { u64::from(one.u32(0x28)?) } else { 0 };
            let table = high << 32 | u64::from(one.u32(0x8)?);
            let end = table.checked_add((u64::from(inodes_per_group) * inode_size).div_ceil(block));
            if table == 0 || end.is_none_or(|end| end > blocks) {
                return Err(damaged("a group descriptor", "its inode table lies outside"));
            }
            tables.push(table);
        }
        Ok(Geometry { block, blocks, inode_size, inodes, inodes_per_group, tables, seed })
    }

    /// Bytes of the file system.
    pub fn bytes(&self) -> u64 {
        self.blocks * self.block
    }
}

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "each is the kind of its name")]
pub enum Kind {
    File,
    Directory,
    Link,
    Fifo,
    Socket,
    /// With its number.
    Character(u32),
    /// With its number.
    Block(u32),
}

/// One inode, checked.
#[derive(Clone, Debug)]
pub(super) struct Inode {
    pub(super) number: u32,
    pub(super) kind: Kind,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) size: u64,
    pub(super) generation: u32,
    /// Of everything in it but its access time: equal while nothing changed.
    pub(super) stamp: u64,
    flags: u32,
    map: [u8; 60],
    seed: Option<u32>,
}

/// One name of a directory.
pub(super) struct Name {
    pub(super) name: Vec<u8>,
    pub(super) inode: u32,
}

/// Consecutive blocks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// Byte in the file.
    pub(super) at: u64,
    pub(super) bytes: u64,
    /// Byte on the disk.
    pub(super) on_disk: u64,
}

/// Reads one file system, at one time.
pub(super) struct Reader<'a, D: Disk + ?Sized> {
    disk: &'a D,
    geometry: &'a Geometry,
    windows: Vec<Option<(u64, Vec<u8>)>>,
    metadata_left: u64,
}

impl<'a, D: Disk + ?Sized> Reader<'a, D> {
    pub(super) fn new(disk: &'a D, geometry: &'a Geometry, structures: u64) -> Self {
        let windows = (0..WINDOWS).map(|_| None).collect();
        Reader { disk, geometry, windows, metadata_left: structures }
    }

    pub(super) const ROOT: u32 = ROOT_INODE;

    /// Bytes that do not cross a window: a block or an inode.
    fn bytes(&mut self, at: u64, length: u64) -> Result<&[u8], DiskError> {
        self.metadata_left =
            self.metadata_left.checked_sub(1).ok_or(DiskError::TooMuch { limit: "MAX_METADATA_BLOCKS" })?;
        let number = at / WINDOW;
        let slot = self.windows.get_mut((number % WINDOWS) as usize);
        let slot = slot.ok_or_else(|| damaged("a window", "no slot"))?;
        if slot.as_ref().is_none_or(|(held, _)| *held != number) {
            let from = number * WINDOW;
            let mut window = slot.take().map(|(_, window)| window).unwrap_or_default();
            window.resize(self.disk.bytes().saturating_sub(from).min(WINDOW) as usize, 0);
            self.disk.read_at(from, &mut window)?;
            *slot = Some((number, window));
        }
        let from = (at % WINDOW) as usize;
        let part = slot.as_ref().and_then(|(_, window)| window.get(from..from + length as usize));
        part.ok_or_else(|| damaged("a block", format!("byte {at} lies outside the disk")))
    }

    fn block(&mut self, number: u64) -> Result<&[u8], DiskError> {
        if number == 0 || number >= self.geometry.blocks {
            return Err(damaged("a block number", number.to_string()));
        }
        let block = self.geometry.block;
        self.bytes(number * block, block)
    }

    pub(super) fn inode(&mut self, number: u32) -> Result<Inode, DiskError> {
        let geometry = self.geometry;
        let index = number.checked_sub(1).filter(|_| number <= geometry.inodes);
        let index = index.ok_or_else(|| damaged("an inode number", number.to_string()))?;
        let table = geometry.tables.get((index / geometry.inodes_per_group) as usize);
        let table = *table.ok_or_else(|| damaged("an inode number", number.to_string()))?;
        let at = table * geometry.block + u64::from(index % geometry.inodes_per_group) * geometry.inode_size;
        let seed = geometry.seed;
        let bytes = self.bytes(at, geometry.inode_size)?;
        parse_inode(number, bytes, seed)
    }

    /// The names in a directory, without `.` and `..`. `more` says whether another may be added.
    pub(super) fn entries(
        &mut self,
        inode: &Inode,
        mut more: impl FnMut(Name) -> Result<(), DiskError>,
    ) -> Result<(), DiskError> {
        let size = self.geometry.block;
        if inode.size == 0 || !inode.size.is_multiple_of(size) || inode.size > self.geometry.bytes() {
            return Err(damaged("a directory", format!("inode {}: {} bytes", inode.number, inode.size)));
        }
        let checked = self.geometry.seed.is_some();
        let mut at = 0;
        for extent in self.extents(inode)? {
            if extent.at != at {
                return Err(damaged("a directory", format!("inode {}: a hole at {at}", inode.number)));
            }
            for block in 0..extent.bytes / size {
                if at >= inode.size {
                    break;
                }
                let bytes = self.block(extent.on_disk / size + block)?;
                if checked {
                    check_directory_block(inode, bytes, at == 0)?;
                }
                names(inode.number, bytes, &mut more)?;
                at += size;
            }
        }
        if at < inode.size {
            return Err(damaged("a directory", format!("inode {}: a hole at {at}", inode.number)));
        }
        Ok(())
    }

    /// The target of a symbolic link.
    pub(super) fn target(&mut self, inode: &Inode) -> Result<Vec<u8>, DiskError> {
        let wrong = || damaged("a symbolic link", format!("inode {}: {} bytes", inode.number, inode.size));
        if inode.size == 0 || inode.size > MAX_TARGET {
            return Err(wrong());
        }
        if inode.size < 60 && inode.flags & FLAG_EXTENTS == 0 {
            return inode.map.get(..inode.size as usize).map(<[u8]>::to_vec).ok_or_else(wrong);
        }
        let mut target = Vec::new();
        for extent in self.extents(inode)? {
            if extent.at != target.len() as u64 {
                return Err(wrong());
            }
            for block in 0..extent.bytes / self.geometry.block {
                let bytes = self.block(extent.on_disk / self.geometry.block + block)?;
                target.extend_from_slice(bytes);
                if target.len() as u64 >= inode.size {
                    target.truncate(inode.size as usize);
                    return Ok(target);
                }
            }
        }
        Err(wrong())
    }

    /// Where a file's bytes lie, in order; what is not named is a hole. Never beyond the disk.
    pub(super) fn extents(&mut self, inode: &Inode) -> Result<Vec<Extent>, DiskError> {
        let mut map = Map { extents: Vec::new(), next: 0, nodes: MAX_NODES };
        if inode.flags & FLAG_EXTENTS != 0 {
            self.extent_node(inode, &inode.map, None, &mut map)?;
        } else {
            let pointers: Vec<u32> = words(&inode.map).collect();
            let (direct, indirect) = pointers.split_at(12.min(pointers.len()));
            let mut at = 0;
            for &pointer in direct {
                self.pointed(inode, pointer, 0, &mut at, &mut map)?;
            }
            for (level, &pointer) in (1..=3).zip(indirect) {
                self.pointed(inode, pointer, level, &mut at, &mut map)?;
            }
        }
        Ok(map.extents)
    }

    fn extent_node(
        &mut self,
        inode: &Inode,
        node: &[u8],
        depth: Option<u16>,
        map: &mut Map,
    ) -> Result<(), DiskError> {
        let wrong = |detail: &str| damaged("an extent tree", format!("inode {}: {detail}", inode.number));
        map.nodes = map.nodes.checked_sub(1).ok_or(DiskError::TooMuch { limit: "MAX_NODES" })?;
        let head = Bytes(node, "an extent tree");
        let (count, here) = (head.u16(2)?, head.u16(6)?);
        if head.u16(0)? != EXTENT_MAGIC || here > 5 || depth.is_some_and(|depth| depth != here) {
            return Err(wrong("its header"));
        }
        if usize::from(count) * 12 + 12 > node.len() || count > head.u16(4)? {
            return Err(wrong("more entries than fit"));
        }
        let block = self.geometry.block;
        for entry in node.get(12..).unwrap_or_default().chunks_exact(12).take(count.into()) {
            let entry = Bytes(entry, "an extent");
            let logical = u64::from(entry.u32(0)?);
            if here > 0 {
                let child = u64::from(entry.u16(8)?) << 32 | u64::from(entry.u32(4)?);
                let bytes = self.block(child)?.to_vec();
                check_extent_block(inode, &bytes)?;
                self.extent_node(inode, &bytes, Some(here - 1), map)?;
                continue;
            }
            let (length, unwritten) = match entry.u16(4)? {
                long @ 0x8001.. => (u64::from(long - 0x8000), true),
                length => (u64::from(length), false),
            };
            let start = u64::from(entry.u16(6)?) << 32 | u64::from(entry.u32(8)?);
            if length == 0 || logical < map.next {
                return Err(wrong("extents out of order"));
            }
            if start == 0 || start.checked_add(length).is_none_or(|end| end > self.geometry.blocks) {
                return Err(wrong("an extent outside the disk"));
            }
            map.next = logical + length;
            if !unwritten {
                map.push(Extent { at: logical * block, bytes: length * block, on_disk: start * block })?;
            }
        }
        Ok(())
    }

    /// The older map, which the owner of a file may still choose: blocks named one by one.
    fn pointed(
        &mut self,
        inode: &Inode,
        pointer: u32,
        level: u32,
        at: &mut u64,
        map: &mut Map,
    ) -> Result<(), DiskError> {
        let block = self.geometry.block;
        let span = (block / 4).pow(level) * block;
        // Nothing beyond the end is looked at: a map of zeros is walked in four steps a level.
        if pointer == 0 || *at >= inode.size {
            *at = at.saturating_add(span);
            return Ok(());
        }
        if u64::from(pointer) >= self.geometry.blocks {
            return Err(damaged("a block map", format!("inode {}: block {pointer}", inode.number)));
        }
        if level == 0 {
            let extent = Extent { at: *at, bytes: block, on_disk: u64::from(pointer) * block };
            *at += block;
            return map.push(extent);
        }
        map.nodes = map.nodes.checked_sub(1).ok_or(DiskError::TooMuch { limit: "MAX_NODES" })?;
        let bytes = self.block(pointer.into())?.to_vec();
        for pointer in words(&bytes) {
            self.pointed(inode, pointer, level - 1, at, map)?;
        }
        Ok(())
    }
}

/// A block map as it is walked.
struct Map {
    extents: Vec<Extent>,
    /// Block that the next extent may begin at.
    next: u64,
    nodes: u32,
}

impl Map {
    /// Adds one, joined to the last where it goes on from there.
    fn push(&mut self, extent: Extent) -> Result<(), DiskError> {
        if let Some(last) = self.extents.last_mut()
            && last.at + last.bytes == extent.at
            && last.on_disk + last.bytes == extent.on_disk
        {
            last.bytes += extent.bytes;
            return Ok(());
        }
        if self.extents.len() >= MAX_EXTENTS {
            return Err(DiskError::TooMuch { limit: "MAX_EXTENTS" });
        }
        self.extents.push(extent);
        Ok(())
    }
}

fn parse_inode(number: u32, bytes: &[u8], seed: Option<u32>) -> Result<Inode, DiskError> {
    let wrong = |detail: String| damaged("an inode", format!("number {number}: {detail}"));
    let raw = Bytes(bytes, "an inode");
    let generation = raw.u32(0x64)?;
    let seed = seed.map(|seed| crc(crc(seed, &number.to_le_bytes()), &generation.to_le_bytes()));
    if let Some(seed) = seed {
        // Both halves of the checksum count as zero; the upper one exists only where the inode is long enough.
        let long = bytes.len() > 128 && raw.u16(0x80)? >= 4;
        let part = |from, to| bytes.get(from..to).unwrap_or_default();
        let mut sum = crc(crc(crc(seed, part(0, 0x7c)), &[0; 2]), part(0x7e, 128));
        let mut told = u32::from(raw.u16(0x7c)?);
        if long {
            sum = crc(crc(crc(sum, part(128, 0x82)), &[0; 2]), part(0x84, bytes.len()));
            told |= u32::from(raw.u16(0x82)?) << 16;
        } else {
            sum = crc(sum, part(128, bytes.len())) & 0xffff;
        }
        if sum != told {
            return Err(wrong("checksum".into()));
        }
    }
    let (mode, links, flags) = (raw.u16(0)?, raw.u16(0x1a)?, raw.u32(0x20)?);
    let map: [u8; 60] =
        bytes.get(0x28..0x64).and_then(|map| map.try_into().ok()).ok_or_else(|| wrong("too short".into()))?;
    if links == 0 {
        return Err(wrong("no name has it".into()));
    }
    if flags & FLAGS_REFUSED != 0 {
        return Err(wrong(format!("flags {flags:#x}")));
    }
    let device = match (raw.u32(0x28)?, raw.u32(0x2c)?) {
        (0, new) => new,
        (old, _) => old,
    };
    let kind = match mode >> 12 {
        0x1 => Kind::Fifo,
        0x2 => Kind::Character(device),
        0x4 => Kind::Directory,
        0x6 => Kind::Block(device),
        0x8 => Kind::File,
        0xa => Kind::Link,
        0xc => Kind::Socket,
        _ => return Err(wrong(format!("mode {mode:o}"))),
    };
    Ok(Inode {
        number,
        kind,
        mode: u32::from(mode & 0o7777),
        uid: u32::from(raw.u16(0x78)?) << 16 | u32::from(raw.u16(0x2)?),
        gid: u32::from(raw.u16(0x7a)?) << 16 | u32::from(raw.u16(0x18)?),
        size: u64::from(raw.u32(0x6c)?) << 32 | u64::from(raw.u32(0x4)?),
        generation,
        stamp: stamp(bytes),
        flags,
        map,
        seed,
    })
}

/// Of all bytes but the access time and the checksum, which covers it.
fn stamp(bytes: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    for (from, to) in [(0, 0x8), (0xc, 0x7c), (0x7e, 0x82), (0x84, 0x8c), (0x90, bytes.len())] {
        hasher.write(bytes.get(from..to).unwrap_or_default());
    }
    hasher.finish()
}

/// The checksum at the end of a block of names, or of an index over such blocks.
fn check_directory_block(inode: &Inode, bytes: &[u8], first: bool) -> Result<(), DiskError> {
    let wrong = |detail: &str| damaged("a directory", format!("inode {}: {detail}", inode.number));
    let Some(seed) = inode.seed else { return Ok(()) };
    let block = Bytes(bytes, "a directory");
    let tail = bytes.len().saturating_sub(12);
    let is_tail = block.u32(tail)? == 0 && block.u16(tail + 4)? == 12 && block.u16(tail + 6)? == 0xde00;
    if is_tail {
        let names = bytes.get(..tail).unwrap_or_default();
        return if crc(seed, names) == block.u32(tail + 8)? { Ok(()) } else { Err(wrong("checksum")) };
    }
    // An index: its names are `.` and `..` alone, or none.
    let root = first && block.u16(4)? == 12 && usize::from(block.u16(16)?) == bytes.len() - 12;
    let node = !first && block.u32(0)? == 0 && usize::from(block.u16(4)?) == bytes.len();
    let from = if root { 32 } else { 8 };
    if !root && !node {
        return Err(wrong("neither names nor an index"));
    }
    let (limit, count) = (usize::from(block.u16(from)?), usize::from(block.u16(from + 2)?));
    let (used, end) = (from + count * 8, from + limit * 8);
    if count > limit || end + 8 > bytes.len() {
        return Err(wrong("an index of more than fits"));
    }
    let reserved = bytes.get(end..end + 4).unwrap_or_default();
    let sum = crc(crc(crc(seed, bytes.get(..used).unwrap_or_default()), reserved), &[0; 4]);
    if sum == block.u32(end + 4)? { Ok(()) } else { Err(wrong("checksum of its index")) }
}

fn check_extent_block(inode: &Inode, bytes: &[u8]) -> Result<(), DiskError> {
    let Some(seed) = inode.seed else { return Ok(()) };
    let block = Bytes(bytes, "an extent tree");
    let tail = (usize::from(block.u16(4)?) + 1) * 12;
    let covered = bytes.get(..tail).ok_or_else(|| damaged("an extent tree", "its size"))?;
    if crc(seed, covered) == block.u32(tail)? {
        return Ok(());
    }
    Err(damaged("an extent tree", format!("inode {}: checksum", inode.number)))
}

/// Every name in one block.
fn names(
    directory: u32,
    bytes: &[u8],
    more: &mut impl FnMut(Name) -> Result<(), DiskError>,
) -> Result<(), DiskError> {
    let wrong = |detail: &str| damaged("a directory", format!("inode {directory}: {detail}"));
    let mut at = 0;
    while at < bytes.len() {
        let rest = bytes.get(at..).unwrap_or_default();
        let entry = Bytes(rest, "a directory");
        let (inode, length) = (entry.u32(0)?, usize::from(entry.u16(4)?));
        let name_length = usize::from(*rest.get(6).ok_or_else(|| wrong("cut off"))?);
        if length < 8 || !length.is_multiple_of(4) || length > rest.len() || name_length + 8 > length {
            return Err(wrong("an entry that does not fit"));
        }
        let name = rest.get(8..8 + name_length).unwrap_or_default();
        at += length;
        if inode == 0 || name == b"." || name == b".." {
            continue;
        }
        if name.is_empty() || name.iter().any(|&byte| byte == b'/' || byte == 0) {
            return Err(wrong("a name that can't be one"));
        }
        more(Name { name: name.to_vec(), inode })?;
    }
    Ok(())
}

/// ext4's use of CRC-32C: neither side is inverted.
fn crc(seed: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, bytes)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_le_bytes))
}

/// Little-endian numbers out of a structure that may be too short.
struct Bytes<'a>(&'a [u8], &'static str);

impl Bytes<'_> {
    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N], DiskError> {
        let part = at.checked_add(N).and_then(|end| self.0.get(at..end)?.try_into().ok());
        part.ok_or_else(|| damaged(self.1, "too short"))
    }

    fn u16(&self, at: usize) -> Result<u16, DiskError> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize) -> Result<u32, DiskError> {
        self.array(at).map(u32::from_le_bytes)
    }
}
