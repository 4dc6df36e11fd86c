//! Where the bytes of an image's files wait until they are written.
//!
//! One file without a name, under the cache: no name of an archive ever becomes a
//! name on the host, so that no link, `..` or device of a layer can lead
//! anywhere; and however the build ends, the kernel frees it.

use crate::error::{ImageError, at};
use hotcell_ledger::Digest;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A part of a spool: one file's bytes, measured while they were written.
#[derive(Clone, Debug)]
pub struct Slice {
    file: Arc<File>,
    offset: u64,
    len: u64,
    digest: Digest,
}

impl Slice {
    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// BLAKE3 of the bytes.
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// Reads from the first byte.
    pub(crate) fn reader(&self) -> SliceReader {
        SliceReader { file: Arc::clone(&self.file), at: self.offset, end: self.offset + self.len }
    }
}

/// Reads a [`Slice`].
pub(crate) struct SliceReader {
    file: Arc<File>,
    at: u64,
    end: u64,
}

impl Read for SliceReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        let most = left.min(into.len());
        let Some(into) = into.get_mut(..most).filter(|into| !into.is_empty()) else { return Ok(0) };
        let count = self.file.read_at(into, self.at)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += count as u64;
        Ok(count)
    }
}

/// The file.
#[derive(Debug)]
pub(crate) struct Spool {
    file: Arc<File>,
    end: u64,
    dir: PathBuf,
}

impl Spool {
    pub(crate) fn new(dir: &Path) -> Result<Spool, ImageError> {
        let file = tempfile::tempfile_in(dir).map_err(at(dir))?;
        Ok(Spool { file: Arc::new(file), end: 0, dir: dir.to_owned() })
    }

    /// Appends everything that `from` gives. The reader's own errors come back as they are.
    pub(crate) fn append(&mut self, from: impl Read) -> Result<Slice, io::Error> {
        struct Tee<'a, R> {
            from: R,
            to: &'a File,
            at: u64,
        }
        impl<R: Read> Read for Tee<'_, R> {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                let count = self.from.read(into)?;
                self.to.write_all_at(into.get(..count).unwrap_or_default(), self.at)?;
                self.at += count as u64;
                Ok(count)
            }
        }
        let offset = self.end;
        let mut tee = Tee { from, to: &self.file, at: offset };
        let digest = Digest::of_reader(&mut tee)?;
        self.end = tee.at;
        Ok(Slice { file: Arc::clone(&self.file), offset, len: self.end - offset, digest })
    }

    /// Folder that it stands in.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
}
