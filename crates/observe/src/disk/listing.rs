//! What is on the disk at one time: every name with what it stands for.
//!
//! Content is digested as the environment monitor does: a file by its bytes, a link by its
//! target, a directory as no bytes; a device, pipe or socket by its kind and number.
//! A file that is mostly holes is digested by its length and the bytes that exist
//! ([`SPARSE`]), since sixteen tebibytes of zeros cost nothing to make and hours to read.
//!
//! What can't be read is named, never left out in silence:
//!
//! | why | what becomes of it |
//! |---|---|
//! | damaged, or read while it was written | it counts as unchanged; at rest the reader must refuse it |
//! | deeper, longer or more than the bounds | whatever is below is unlisted, and the judge is told where |
//! | more to hash than this reading may | the largest files wait for the next reading, unchanged until then |

use super::ext4::{Disk, DiskError, Extent, Geometry, Inode, Kind, MAX_METADATA_BLOCKS, Name, Reader};
use super::spelling::spell;
use hotcell_ledger::Digest;
use std::collections::{HashMap, HashSet};

/// Where the disk is mounted in the guest.
pub const MOUNTED_AT: &str = "/workspace";
/// Names in one listing: some 60 MB of host memory.
pub const MAX_NAMES: usize = 200_000;
/// Directories inside each other. Deepest known honest tree: nested packages, some 60.
pub const MAX_DEPTH: usize = 128;
/// Longest path in bytes: what the kernel can name at once, less what a directory's own name takes.
pub const MAX_PATH: usize = 4000;
/// Places named that can't be read; beyond, the whole disk counts as one.
pub const MAX_UNREAD: usize = 64;
/// Bytes of holes that are hashed as zeros beside as many as a file has bytes that exist. More, and it is a sparse file.
pub const MAX_HOLES: u64 = 64 * 1024;
/// Bytes hashed at once.
const CHUNK: usize = 256 * 1024;

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its kind.
    pub kind: Kind,
    /// Permission bits with setuid, setgid and sticky.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length in bytes; of a directory 0, since its blocks are the kernel's affair.
    pub size: u64,
    /// Digest of its content.
    pub content: Digest,
    /// Inode and generation: the same file under whatever name.
    pub identity: (u32, u32),
    /// Equal while nothing of the inode changed but its access time.
    pub(super) stamp: u64,
}

/// Why something can't be listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// It makes no sense, now.
    Damaged,
    /// It is beyond a bound.
    Bound,
}

/// How thorough a reading is.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Files whose inode did not change since the last listing keep their digest. A guest kernel that was taken over
    /// can change bytes and not the inode, so the last reading of a run hashes everything.
    pub trust_inodes: bool,
    /// Bytes to hash at most.
    pub hash_bytes: u64,
}

/// How much one reading may find, and look at. Whoever reads a run's disk takes the default.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Names that are listed.
    pub names: usize,
    /// Structures that are looked at.
    pub structures: u64,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { names: MAX_NAMES, structures: MAX_METADATA_BLOCKS }
    }
}

/// All names at one time, sorted.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    pub(super) names: Vec<(String, Entry)>,
    /// Places below which nothing is known, and why.
    pub(super) unread: Vec<(String, Unread)>,
    /// Files whose bytes are for a later reading.
    pub(super) later: HashSet<String>,
    /// Bytes that were hashed.
    pub(super) hashed: u64,
    /// Of the first thing that made no sense.
    pub(super) damage: Option<String>,
}

impl Listing {
    /// Reads the disk.
    ///
    /// # Errors
    /// Nothing can be read of it: the host's reading failed, or its root directory makes no sense.
    pub fn take(
        disk: &(impl Disk + ?Sized),
        geometry: &Geometry,
        last: Option<&Listing>,
        effort: Effort,
    ) -> Result<Listing, DiskError> {
        Listing::take_within(disk, geometry, last, effort, Bounds::default())
    }

    /// As [`Listing::take`], within other bounds.
    ///
    /// # Errors
    /// As there; and more structures were to be looked at than the bounds allow.
    pub fn take_within(
        disk: &(impl Disk + ?Sized),
        geometry: &Geometry,
        last: Option<&Listing>,
        effort: Effort,
        bounds: Bounds,
    ) -> Result<Listing, DiskError> {
        let mut walk = Walk {
            reader: Reader::new(disk, geometry, bounds.structures),
            most_names: bounds.names,
            listing: Listing::default(),
            files: Vec::new(),
            seen: HashSet::new(),
            known: HashMap::new(),
        };
        if effort.trust_inodes {
            let files = last.into_iter().flat_map(|last| &last.names);
            walk.known = files.map(|(_, entry)| (entry.identity, (entry.stamp, entry.content))).collect();
        }
        walk.tree()?;
        walk.contents(disk, effort.hash_bytes)?;
        let mut listing = walk.listing;
        listing.names.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        // Two names that are one: no kernel makes them.
        listing.names.dedup_by(|(a, _), (b, _)| a == b);
        listing.settle(last, bounds.names);
        Ok(listing)
    }

    /// Every name with what it stands for, sorted by path.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&str, &Entry)> {
        self.names.iter().map(|(path, entry)| (path.as_str(), entry))
    }

    /// What a path stands for.
    pub fn get(&self, path: &str) -> Option<&Entry> {
        let at = self.names.binary_search_by(|(name, _)| name.as_str().cmp(path)).ok()?;
        self.names.get(at).map(|(_, entry)| entry)
    }

    /// Files whose bytes are for a later reading; they count as they were last.
    pub fn later(&self) -> usize {
        self.later.len()
    }

    /// Places below which nothing is known, and why.
    pub fn unread(&self) -> &[(String, Unread)] {
        &self.unread
    }

    /// What makes no sense, where something does.
    pub fn damage(&self) -> Option<&str> {
        self.damage.as_deref()
    }

    /// Bytes that were hashed for it.
    pub fn hashed_bytes(&self) -> u64 {
        self.hashed
    }

    /// One digest of all names, modes, owners and contents: equal for equal trees.
    pub fn digest(&self) -> Digest {
        let mut text = Vec::with_capacity(self.names.len() * 64);
        for (path, entry) in &self.names {
            let Entry { kind, mode, uid, gid, size, content, .. } = entry;
            text.extend_from_slice(format!("{kind:?} {mode:o} {uid} {gid} {size} {content} ").as_bytes());
            text.extend_from_slice(path.as_bytes());
            text.push(b'\n');
        }
        Digest::of(&text)
    }

    /// Is this path, or one above it, named as one that could not be read?
    fn is_below_unread(&self, path: &str, why: impl Fn(Unread) -> bool) -> bool {
        self.unread.iter().any(|(place, kind)| why(*kind) && is_within(path, place))
    }

    /// What could not be read now counts as it was last.
    fn settle(&mut self, last: Option<&Listing>, most_names: usize) {
        if self.unread.len() > MAX_UNREAD {
            let worst = |kind| self.unread.iter().any(|(_, unread)| *unread == kind);
            let mut whole = Vec::new();
            for kind in [Unread::Damaged, Unread::Bound] {
                if worst(kind) {
                    whole.push((MOUNTED_AT.to_owned(), kind));
                }
            }
            self.unread = whole;
        }
        let carries = |kind| kind == Unread::Damaged;
        let damaged = self.unread.iter().any(|(_, kind)| carries(*kind));
        let Some(last) = last.filter(|_| damaged || !self.later.is_empty()) else { return };
        let mut carried = Vec::new();
        for (path, entry) in &last.names {
            let missed = self.later.contains(path)
                || (damaged && self.get(path).is_none() && self.is_below_unread(path, carries));
            if missed
                && !self.is_below_unread(path, |kind| kind == Unread::Bound)
                && self.names.len() + carried.len() < most_names
            {
                carried.push((path.clone(), entry.clone()));
            }
        }
        self.names.append(&mut carried);
        self.names.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    }
}

/// Whether `path` is `place` or lies below it.
pub(super) fn is_within(path: &str, place: &str) -> bool {
    path.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A file whose bytes must be hashed.
struct Unhashed {
    path: String,
    entry: Entry,
    extents: Vec<Extent>,
}

/// One reading as it goes.
struct Walk<'a, D: Disk + ?Sized> {
    reader: Reader<'a, D>,
    most_names: usize,
    listing: Listing,
    files: Vec<Unhashed>,
    /// Directories that were entered: one that appears twice would never end.
    seen: HashSet<u32>,
    known: HashMap<(u32, u32), (u64, Digest)>,
}

impl<D: Disk + ?Sized> Walk<'_, D> {
    fn tree(&mut self) -> Result<(), DiskError> {
        let root = self.reader.inode(Reader::<D>::ROOT)?;
        if root.kind != Kind::Directory {
            return Err(super::ext4::damaged("the root directory", "it is none"));
        }
        self.seen.insert(root.number);
        self.note(MOUNTED_AT.to_owned(), &root, Digest::of(b""));
        let mut open = vec![(MOUNTED_AT.to_owned(), root, 0)];
        while let Some((path, directory, depth)) = open.pop() {
            if depth >= MAX_DEPTH {
                self.unread(path, Unread::Bound);
                continue;
            }
            let mut names: Vec<Name> = Vec::new();
            let room = self.most_names.saturating_sub(self.listing.names.len() + self.files.len());
            let mut over = false;
            let read = self.reader.entries(&directory, |name| {
                over |= names.len() >= room;
                if !over {
                    names.push(name);
                }
                Ok(())
            });
            match read {
                Err(error) if path == MOUNTED_AT => return Err(error),
                Err(error) => self.unreadable(path.clone(), error)?,
                Ok(()) if over => self.unread(MOUNTED_AT.to_owned(), Unread::Bound),
                Ok(()) => {}
            }
            for Name { name, inode } in names {
                let below = format!("{path}/{}", spell(&name));
                if below.len() > MAX_PATH {
                    self.unread(path.clone(), Unread::Bound);
                    continue;
                }
                match self.one(below.clone(), inode) {
                    Ok(Some(directory)) => open.push((below, directory, depth + 1)),
                    Ok(None) => {}
                    Err(error) => self.unreadable(below, error)?,
                }
            }
        }
        Ok(())
    }

    /// One name; its inode where it is a directory to enter.
    fn one(&mut self, path: String, number: u32) -> Result<Option<Inode>, DiskError> {
        let inode = self.reader.inode(number)?;
        match inode.kind {
            Kind::Directory => {
                if !self.seen.insert(number) {
                    return Err(super::ext4::damaged("a directory", format!("inode {number} has two names")));
                }
                self.note(path, &inode, Digest::of(b""));
                return Ok(Some(inode));
            }
            Kind::Link => {
                let target = self.reader.target(&inode)?;
                self.note(path, &inode, Digest::of(&target));
            }
            Kind::File => match self.known.get(&(inode.number, inode.generation)) {
                Some((stamp, content)) if *stamp == inode.stamp => {
                    let content = *content;
                    self.note(path, &inode, content);
                }
                _ => {
                    let extents = self.reader.extents(&inode)?;
                    let entry = entry(&inode, Digest::ZERO);
                    self.files.push(Unhashed { path, entry, extents });
                }
            },
            Kind::Fifo | Kind::Socket | Kind::Character(_) | Kind::Block(_) => {
                let kind = inode.kind;
                self.note(path, &inode, Digest::of(format!("{kind:?}").as_bytes()));
            }
        }
        Ok(None)
    }

    fn note(&mut self, path: String, inode: &Inode, content: Digest) {
        self.listing.names.push((path, entry(inode, content)));
    }

    fn unread(&mut self, path: String, why: Unread) {
        // One more than the bound says that there are more.
        let named = |(place, kind): &(String, Unread)| *kind == why && *place == path;
        if self.listing.unread.len() <= MAX_UNREAD && !self.listing.unread.iter().any(named) {
            self.listing.unread.push((path, why));
        }
    }

    /// What makes no sense is noted; that the host can't read, or works too much, ends the reading.
    fn unreadable(&mut self, path: String, error: DiskError) -> Result<(), DiskError> {
        match error {
            DiskError::Io(_) | DiskError::TooMuch { .. } => Err(error),
            DiskError::Damaged { .. } | DiskError::Unsupported(_) => {
                self.listing.damage.get_or_insert_with(|| format!("{path}: {error}"));
                self.unread(path, Unread::Damaged);
                Ok(())
            }
        }
    }

    /// Hashes files, the smallest first; the first is hashed whatever it costs, within the disk's own size.
    fn contents(&mut self, disk: &D, budget: u64) -> Result<(), DiskError> {
        let mut files = std::mem::take(&mut self.files);
        files.sort_by_key(|file| file.extents.iter().map(|extent| extent.bytes).sum::<u64>());
        let mut done: HashMap<(u32, u32), Digest> = HashMap::new();
        let mut buffer = vec![0; CHUNK];
        let mut later = false;
        for Unhashed { path, mut entry, extents } in files {
            if let Some(content) = done.get(&entry.identity) {
                entry.content = *content;
                self.listing.names.push((path, entry));
                continue;
            }
            let (sparse, cost) = cost(entry.size, &extents);
            later |= self.listing.hashed > 0 && self.listing.hashed.saturating_add(cost) > budget;
            if later {
                self.listing.later.insert(path);
                continue;
            }
            entry.content = digest(disk, entry.size, &extents, sparse, &mut buffer)?;
            self.listing.hashed = self.listing.hashed.saturating_add(cost);
            done.insert(entry.identity, entry.content);
            self.listing.names.push((path, entry));
        }
        Ok(())
    }
}

fn entry(inode: &Inode, content: Digest) -> Entry {
    Entry {
        kind: inode.kind,
        mode: inode.mode,
        uid: inode.uid,
        gid: inode.gid,
        size: if inode.kind == Kind::Directory { 0 } else { inode.size },
        content,
        identity: (inode.number, inode.generation),
        stamp: inode.stamp,
    }
}

/// Whether it is a sparse file, and the bytes to hash.
fn cost(size: u64, extents: &[Extent]) -> (bool, u64) {
    let held = extents.iter().map(|extent| extent.bytes.min(size.saturating_sub(extent.at))).sum::<u64>();
    let sparse = size.saturating_sub(held) > held + MAX_HOLES;
    (sparse, if sparse { held } else { size })
}

/// The digest of a file's bytes; of a sparse one as [`SPARSE`] says.
fn digest(
    disk: &(impl Disk + ?Sized),
    size: u64,
    extents: &[Extent],
    sparse: bool,
    buffer: &mut [u8],
) -> Result<Digest, DiskError> {
    let mut hasher = blake3::Hasher::new();
    if sparse {
        hasher.update(SPARSE);
        hasher.update(&size.to_le_bytes());
    }
    let mut at = 0;
    for extent in extents.iter().take_while(|extent| extent.at < size) {
        let bytes = extent.bytes.min(size - extent.at);
        if sparse {
            hasher.update(&extent.at.to_le_bytes());
            hasher.update(&bytes.to_le_bytes());
        } else {
            zeros(&mut hasher, extent.at.saturating_sub(at));
        }
        let mut done = 0;
        while done < bytes {
            let part = buffer.len().min(usize::try_from(bytes - done).unwrap_or(usize::MAX));
            let Some(part) = buffer.get_mut(..part) else { break };
            disk.read_at(extent.on_disk + done, part)?;
            hasher.update(part);
            done += part.len() as u64;
        }
        at = extent.at + bytes;
    }
    if !sparse {
        zeros(&mut hasher, size.saturating_sub(at));
    }
    Ok(Digest::from_bytes(*hasher.finalize().as_bytes()))
}

/// Begins the digest of a sparse file, one with more bytes of holes than bytes that exist and [`MAX_HOLES`]: this, its
/// length, and of each piece that exists place, length and bytes; numbers are 64 bits, little-endian.
pub const SPARSE: &[u8] = b"hotcell sparse file 1\n";

fn zeros(hasher: &mut blake3::Hasher, mut count: u64) {
    static ZEROS: [u8; 65_536] = [0; 65_536];
    while count > 0 {
        let part = count.min(ZEROS.len() as u64);
        hasher.update(ZEROS.get(..part as usize).unwrap_or_default());
        count -= part;
    }
}
