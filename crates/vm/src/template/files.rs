//! Writing and hashing sparse files.
//!
//! The digest of a sparse part is BLAKE3 over its blocks of 4096 bytes that are
//! not all zero, in order: the block's number as 8 bytes, little-endian, then its
//! bytes (the last block may be short). So it does not depend on where the file
//! system keeps holes, and costs what is there, not what is promised.

use crate::measured::Identity;
use hotcell_ledger::Digest;
use rustix::fs::{SeekFrom, ftruncate, seek};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

const BLOCK: usize = 4096;
/// Blocks handled at once.
const BATCH: usize = 256;

/// One file of a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Part {
    digest: String,
    /// Its length in bytes.
    pub(super) bytes: u64,
    /// Bytes that are not zero, in whole blocks.
    pub(super) filled: u64,
    identity: Identity,
}

impl Part {
    /// Its digest.
    pub(super) fn digest(&self) -> Digest {
        Digest::from_hex(&self.digest).unwrap_or(Digest::ZERO)
    }

    /// Whether the open file is the one that was hashed.
    pub(super) fn is(&self, file: &File) -> bool {
        Identity::of(file).is_ok_and(|identity| identity == self.identity)
    }

    /// Of a file that has just been written: sealed, and its digest as it was computed from what was written.
    fn seal(file: &File, digest: Digest, filled: u64) -> io::Result<Part> {
        file.set_permissions(Permissions::from_mode(0o400))?;
        // On disk before the manifest names it.
        file.sync_all()?;
        let identity = Identity::of(file)?;
        Ok(Part { digest: digest.to_hex(), bytes: file.metadata()?.len(), filled, identity })
    }
}

/// The parts of a machine that was saved.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) ram: Part,
    pub(crate) state: Part,
    pub(crate) disk: Part,
    pub(crate) tsc_khz: Option<u32>,
}

/// Blocks of a sparse source that are not zero, as the bytes of which the digest is made.
struct Blocks<'a> {
    source: &'a File,
    length: u64,
    /// Where to look on.
    at: u64,
    /// The end of the stretch of data that `at` is in.
    data_end: u64,
    filled: u64,
    /// Gets every block, where it is copied.
    copy: Option<&'a File>,
    ready: Vec<u8>,
    taken: usize,
    batch: Vec<u8>,
}

impl<'a> Blocks<'a> {
    fn new(source: &'a File, copy: Option<&'a File>) -> io::Result<Blocks<'a>> {
        let length = source.metadata()?.len();
        let (ready, batch) = (Vec::with_capacity(BATCH * (BLOCK + 8)), vec![0; BATCH * BLOCK]);
        Ok(Blocks { source, length, at: 0, data_end: 0, filled: 0, copy, ready, taken: 0, batch })
    }

    /// Fills `ready` with the next blocks; it stays empty at the end.
    fn refill(&mut self) -> io::Result<()> {
        self.ready.clear();
        self.taken = 0;
        while self.ready.is_empty() {
            if self.at >= self.data_end && !self.next_stretch()? {
                return Ok(());
            }
            let want = usize::try_from(self.data_end - self.at).unwrap_or(usize::MAX).min(self.batch.len());
            let Some(part) = self.batch.get_mut(..want) else { return Ok(()) };
            self.source.read_exact_at(part, self.at)?;
            for (number, block) in part.chunks(BLOCK).enumerate() {
                if block.iter().all(|&byte| byte == 0) {
                    continue;
                }
                let at = self.at + (number * BLOCK) as u64;
                if let Some(copy) = self.copy {
                    copy.write_all_at(block, at)?;
                }
                self.ready.extend_from_slice(&(at / BLOCK as u64).to_le_bytes());
                self.ready.extend_from_slice(block);
                self.filled += block.len() as u64;
            }
            self.at += want as u64;
        }
        Ok(())
    }

    /// Goes to the next data, from the beginning of its block.
    fn next_stretch(&mut self) -> io::Result<bool> {
        let data = match seek(self.source, SeekFrom::Data(self.at)) {
            Ok(data) => data,
            // No more data.
            Err(rustix::io::Errno::NXIO) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let block = BLOCK as u64;
        self.at = data / block * block;
        let hole = seek(self.source, SeekFrom::Hole(data))?;
        self.data_end = (hole.div_ceil(block) * block).min(self.length);
        Ok(self.at < self.data_end)
    }
}

impl Read for Blocks<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.taken == self.ready.len() {
            self.refill()?;
        }
        let rest = self.ready.get(self.taken..).unwrap_or_default();
        let count = rest.len().min(into.len());
        let (Some(to), Some(from)) = (into.get_mut(..count), rest.get(..count)) else { return Ok(0) };
        to.copy_from_slice(from);
        self.taken += count;
        Ok(count)
    }
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().create_new(true).read(true).write(true).mode(0o600).open(path)
}

/// Copies a sparse file, without its blocks of zeros, and seals the copy.
pub(crate) fn copy_blocks(source: &File, to: &Path) -> io::Result<Part> {
    let target = create(to)?;
    let mut blocks = Blocks::new(source, Some(&target))?;
    ftruncate(&target, blocks.length)?;
    let digest = Digest::of_reader(&mut blocks)?;
    Part::seal(&target, digest, blocks.filled)
}

/// Writes bytes and seals the file; their digest is that of the whole.
pub(crate) fn write_whole(bytes: &[u8], to: &Path) -> io::Result<Part> {
    let mut target = create(to)?;
    target.write_all(bytes)?;
    Part::seal(&target, Digest::of(bytes), bytes.len() as u64)
}

/// The digest of a sparse file's blocks.
pub(super) fn digest_of_blocks(file: &File) -> io::Result<Digest> {
    Digest::of_reader(Blocks::new(file, None)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_copy_has_the_same_bytes_and_a_digest_that_holes_do_not_move() {
        let home = tempfile::tempdir().unwrap();
        let (a, b) = (home.path().join("a"), home.path().join("b"));
        let source = create(&a).unwrap();
        source.set_len(64 << 20).unwrap();
        source.write_all_at(b"first", 3).unwrap();
        // Zeros that are written out are no hole to the file system and none to us.
        source.write_all_at(&[0; 3 * BLOCK], 1 << 20).unwrap();
        source.write_all_at(&[7; 2 * BLOCK], (5 << 20) + 100).unwrap();
        source.write_all_at(b"last", (64 << 20) - 4).unwrap();
        let part = copy_blocks(&source, &b).unwrap();
        assert_eq!(std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
        let copy = File::open(&b).unwrap();
        assert!(copy.metadata().unwrap().blocks() * 512 <= 8 * BLOCK as u64);
        assert_eq!((part.bytes, part.filled), (64 << 20, 5 * BLOCK as u64));
        assert_eq!(digest_of_blocks(&source).unwrap(), part.digest());
        assert_eq!(digest_of_blocks(&copy).unwrap(), part.digest());
        // By the definition, with nothing of the code above.
        let whole = std::fs::read(&b).unwrap();
        let mut said = Vec::new();
        for (number, block) in (0u64..).zip(whole.chunks(4096)) {
            if block.iter().any(|&byte| byte != 0) {
                said.extend(number.to_le_bytes());
                said.extend(block);
            }
        }
        assert_eq!(Digest::of(&said), part.digest());
        assert!(part.is(&copy));
        assert_eq!(copy.metadata().unwrap().mode() & 0o777, 0o400);
    }

    #[test]
    fn any_change_of_a_part_shows_without_reading_it() {
        let home = tempfile::tempdir().unwrap();
        let (a, b) = (home.path().join("a"), home.path().join("b"));
        let source = create(&a).unwrap();
        source.write_all_at(&[1; 10_000], 0).unwrap();
        let part = copy_blocks(&source, &b).unwrap();
        assert!(part.is(&File::open(&b).unwrap()));
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::set_permissions(&b, Permissions::from_mode(0o600)).unwrap();
        assert!(!part.is(&File::open(&b).unwrap()), "a changed mode");
        let part = copy_blocks(&source, &home.path().join("c")).unwrap();
        assert!(!part.is(&File::open(&b).unwrap()), "another file with the same bytes");
        assert_ne!(digest_of_blocks(&source).unwrap(), Digest::ZERO);
        source.write_all_at(&[2], 5000).unwrap();
        assert_ne!(digest_of_blocks(&source).unwrap(), part.digest());
    }
}
