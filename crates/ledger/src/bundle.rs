//! A run's directory: reads it as hostile input, and seals it with its note.
//!
//! ```text
//! ledger.ames   checkpoint.note   objects/<64 hex digits>   and any other file, each covered by a line of the note
//! ```
//! Attacks that this has in mind: a bundle comes from somebody else. It may have symbolic links that lead out of it (no
//! link is followed, at any depth), FIFOs and devices that block or act when opened (refused after a non-blocking open),
//! sparse files of terabytes (hashed in a fixed buffer, or refused above a cap), and more names than memory (counted and cut).
//! Does not cover: names and modes of directories, owners, times. Called by [`seal`]'s caller, the run, once it is over,
//! and by verifiers.

use crate::checkpoint::{FileLine, NoteBody, ObjectsLine};
use crate::closed::ClosedLedger;
use crate::digest::Digest;
use crate::key::SigningKey;
use crate::note::{SignError, sign};
use rustix::fs::{Dir, FileType, Mode, OFlags, openat};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// The ledger's file name.
pub const LEDGER: &str = "ledger.ames";
/// The note's file name.
pub const NOTE: &str = "checkpoint.note";
/// The objects' directory.
pub const OBJECTS: &str = "objects";
/// The note while it is written; a crash may leave it.
const NOTE_PART: &str = ".checkpoint.note.part";

/// Files in a bundle that are looked at; more are an error, so that names can't fill memory.
pub const MAX_FILES: usize = 100_000;
/// Bytes of all paths together.
pub const MAX_PATH_BYTES: usize = 16 << 20;
/// Directories below the bundle.
pub const MAX_DEPTH: usize = 32;
/// Length of one file or object: above it a verifier would hash for minutes.
pub const MAX_FILE_LEN: u64 = 16 << 30;

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileFault {
    /// There is none.
    #[error("does not exist")]
    Missing,
    /// A link, device, FIFO, socket, or a directory where a file belongs.
    #[error("is not a regular file: links and special files are never followed or opened")]
    NotRegular,
    /// Larger than asked for.
    #[error("has {len} bytes, over {cap}")]
    TooLarge {
        /// Its length.
        len: u64,
        /// The most that is read.
        cap: u64,
    },
    /// The bundle has more files, longer names or deeper directories than are looked at.
    #[error("is one too many: over {MAX_FILES} files, {MAX_PATH_BYTES} bytes of names or {MAX_DEPTH} levels")]
    TooMany,
    /// The disk failed.
    #[error("can't be read")]
    Io(#[source] io::Error),
}

impl From<Errno> for FileFault {
    fn from(errno: Errno) -> FileFault {
        match errno {
            Errno::NOENT => FileFault::Missing,
            // What O_NOFOLLOW and O_DIRECTORY say of a link, and what opening a socket says.
            Errno::LOOP | Errno::NOTDIR | Errno::NXIO => FileFault::NotRegular,
            other => FileFault::Io(other.into()),
        }
    }
}

/// What a bundle has, besides its ledger and note.
#[derive(Debug, Default)]
pub struct Listing {
    /// Names of the files in `objects/` that are names of objects, ascending.
    pub objects: Vec<Digest>,
    /// Paths of all others, ascending.
    pub files: Vec<Vec<u8>>,
    /// What is neither, and why.
    pub strange: Vec<(Vec<u8>, FileFault)>,
}

/// A bundle's directory, held open.
#[derive(Debug)]
pub struct BundleDir {
    fd: OwnedFd,
}

const DIR_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl BundleDir {
    /// Opens it. The path itself may be a link: it is the caller's.
    pub fn open(path: &Path) -> io::Result<BundleDir> {
        Ok(BundleDir { fd: openat(rustix::fs::CWD, path, DIR_FLAGS, Mode::empty())? })
    }

    /// Opens a regular file of at most `cap` bytes by its path in the bundle; returns its length too.
    pub fn open_file(&self, path: &[u8], cap: u64) -> Result<(File, u64), FileFault> {
        let (dirs, name) = match path.iter().rposition(|b| *b == b'/') {
            Some(at) => path.split_at_checked(at).map(|(d, n)| (Some(d), n.get(1..).unwrap_or_default())),
            None => Some((None, path)),
        }
        .ok_or(FileFault::Missing)?;
        let mut dir: Option<OwnedFd> = None;
        for part in dirs.into_iter().flat_map(|dirs| dirs.split(|b| *b == b'/')) {
            let at = dir.as_ref().unwrap_or(&self.fd);
            dir = Some(openat(at, component(part)?, DIR_FLAGS | OFlags::NOFOLLOW, Mode::empty())?);
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file =
            File::from(openat(dir.as_ref().unwrap_or(&self.fd), component(name)?, flags, Mode::empty())?);
        let meta = file.metadata().map_err(FileFault::Io)?;
        if !meta.is_file() {
            return Err(FileFault::NotRegular);
        }
        if meta.len() > cap {
            return Err(FileFault::TooLarge { len: meta.len(), cap });
        }
        Ok((file, meta.len()))
    }

    /// A file's bytes, at most `cap` of them.
    pub fn read(&self, path: &[u8], cap: usize) -> Result<Vec<u8>, FileFault> {
        let cap = u64::try_from(cap).unwrap_or(u64::MAX);
        let (file, _) = self.open_file(path, cap)?;
        let mut bytes = Vec::new();
        // One more than the cap, for a file that grows while it is read.
        file.take(cap.saturating_add(1)).read_to_end(&mut bytes).map_err(FileFault::Io)?;
        match u64::try_from(bytes.len()).unwrap_or(u64::MAX) {
            len if len > cap => Err(FileFault::TooLarge { len, cap }),
            _ => Ok(bytes),
        }
    }

    /// A file's digest and length, in flat memory.
    pub fn measure(&self, path: &[u8]) -> Result<(Digest, u64), FileFault> {
        let (file, _) = self.open_file(path, MAX_FILE_LEN)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(file.take(MAX_FILE_LEN)).map_err(FileFault::Io)?;
        Ok((Digest::from_bytes(*hasher.finalize().as_bytes()), hasher.count()))
    }

    /// An object's path.
    pub fn object_path(name: &Digest) -> Vec<u8> {
        format!("{OBJECTS}/{name}").into_bytes()
    }

    /// All that the bundle has but ledger and note.
    pub fn list(&self) -> io::Result<Listing> {
        let mut listing = Listing::default();
        let mut budget = Budget { files: MAX_FILES, bytes: MAX_PATH_BYTES };
        let top = openat(&self.fd, ".", DIR_FLAGS, Mode::empty())?;
        walk(top, b"", 0, &mut budget, &mut listing)?;
        listing.objects.sort_unstable();
        listing.files.sort_unstable();
        Ok(listing)
    }
}

fn component(part: &[u8]) -> Result<&[u8], FileFault> {
    if matches!(part, b"" | b"." | b"..") || part.contains(&0) { Err(FileFault::Missing) } else { Ok(part) }
}

struct Budget {
    files: usize,
    bytes: usize,
}

impl Budget {
    fn spend(&mut self, path: &[u8]) -> bool {
        match (self.files.checked_sub(1), self.bytes.checked_sub(path.len())) {
            (Some(files), Some(bytes)) => {
                *self = Budget { files, bytes };
                true
            }
            _ => false,
        }
    }
}

fn walk(fd: OwnedFd, prefix: &[u8], depth: usize, budget: &mut Budget, out: &mut Listing) -> io::Result<()> {
    let dir = Dir::read_from(&fd)?;
    for entry in dir {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        let path = if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() };
        if !budget.spend(&path) || depth >= MAX_DEPTH {
            out.strange.push((path, FileFault::TooMany));
            return Ok(());
        }
        let kind = match entry.file_type() {
            FileType::Unknown => {
                let stat = rustix::fs::statat(&fd, entry.file_name(), rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(stat.st_mode)
            }
            known => known,
        };
        match kind {
            FileType::Directory => {
                match openat(&fd, entry.file_name(), DIR_FLAGS | OFlags::NOFOLLOW, Mode::empty()) {
                    Ok(inner) => walk(inner, &path, depth + 1, budget, out)?,
                    Err(errno) => out.strange.push((path, errno.into())),
                }
            }
            FileType::RegularFile
                if prefix.is_empty() && matches!(name, b"ledger.ames" | b"checkpoint.note") => {}
            FileType::RegularFile if prefix == OBJECTS.as_bytes() => {
                match core::str::from_utf8(name).ok().and_then(Digest::from_hex) {
                    Some(digest) => out.objects.push(digest),
                    None => out.files.push(path),
                }
            }
            FileType::RegularFile => out.files.push(path),
            _ => out.strange.push((path, FileFault::NotRegular)),
        }
    }
    Ok(())
}

/// Why a bundle can't be sealed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// A file can't be covered.
    #[error("{} can't be sealed: it {fault}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        fault: FileFault,
    },
    /// The note can't be made.
    #[error(transparent)]
    Sign(#[from] SignError),
    /// The disk failed.
    #[error("failed to write the checkpoint note in {}: free or mend the disk", dir.display())]
    Io {
        /// Where.
        dir: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Covers every file of a finished bundle with a signed note, and writes the note; returns its bytes. To be called once,
/// when nothing writes to the bundle any more; `run_id` becomes the origin `hotcell/<run_id>`.
pub fn seal(dir: &Path, run_id: &str, ledger: &ClosedLedger, key: &SigningKey) -> Result<Vec<u8>, SealError> {
    let io_fault = |source| SealError::Io { dir: dir.to_owned(), source };
    let bundle = BundleDir::open(dir).map_err(io_fault)?;
    let listing = bundle.list().map_err(io_fault)?;
    let file_fault =
        |path: &[u8], fault| SealError::File { path: dir.join(std::ffi::OsStr::from_bytes(path)), fault };
    if let Some((path, fault)) = listing.strange.into_iter().next() {
        return Err(file_fault(&path, fault));
    }
    let mut files = Vec::with_capacity(listing.files.len());
    for path in listing.files {
        let (digest, len) = bundle.measure(&path).map_err(|fault| file_fault(&path, fault))?;
        files.push(FileLine { path, digest, len });
    }
    let body = NoteBody {
        origin: format!("hotcell/{run_id}"),
        checkpoint: ledger.checkpoint(),
        key: None,
        objects: Some(ObjectsLine::over(listing.objects)),
        files,
    };
    let note = sign(body, key)?;
    let part = dir.join(NOTE_PART);
    let write = || -> io::Result<()> {
        let mut file = File::options().write(true).create_new(true).open(&part)?;
        file.write_all(&note)?;
        file.sync_all()?;
        std::fs::rename(&part, dir.join(NOTE))?;
        File::open(dir)?.sync_all()
    };
    write().map_err(|source| {
        let _ = std::fs::remove_file(&part);
        io_fault(source)
    })?;
    Ok(note)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At the limit everything is listed; one file more is said to be one too many, and no more is read.
    #[test]
    fn a_listing_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let objects = dir.path().join(OBJECTS);
        std::fs::create_dir(&objects).unwrap();
        // The folder counts as well.
        for n in 0..MAX_FILES - 1 {
            std::os::unix::fs::symlink("x", objects.join(n.to_string())).unwrap();
        }
        let faults = || {
            let listing = BundleDir::open(dir.path()).unwrap().list().unwrap();
            assert!(listing.strange.len() <= MAX_FILES);
            let too_many = |(_, fault): &&(Vec<u8>, FileFault)| matches!(fault, FileFault::TooMany);
            listing.strange.iter().filter(too_many).count()
        };
        assert_eq!(faults(), 0);
        std::os::unix::fs::symlink("x", objects.join("last")).unwrap();
        assert_eq!(faults(), 1);
    }
}
