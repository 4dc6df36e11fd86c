//! The folder that a run leaves, while it is written.
//!
//! ```text
//! <out>/<run-id>/  ledger.ames  spec.json  report.json  console.log  objects/<hex>  checkpoint.note
//! ```
//! Made exclusively: an existing folder is never written into. Objects are
//! written under another name first, so that what has an object's name is whole.

use hotcell_ledger::{Digest, bundle as names};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The spec as it was applied.
pub const SPEC: &str = "spec.json";
/// The report.
pub const REPORT: &str = "report.json";
/// The guest's console, bounded.
pub const CONSOLE: &str = "console.log";

/// A bundle that is being written.
#[derive(Clone, Debug)]
pub(crate) struct Bundle {
    dir: PathBuf,
}

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The folder is there already.
    #[error("{0} exists already: a record is never written over. Choose another `--name` or `--out`")]
    Exists(PathBuf),
    /// The disk refuses.
    #[error("can't write the bundle at {path}: {source}. Choose a writable `--out` with space left")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Bundle {
    pub(crate) fn create(out: &Path, run_id: &str) -> Result<Bundle, BundleError> {
        let dir = out.join(run_id);
        let fail = |path: &Path| {
            let path = path.to_owned();
            move |source| BundleError::Io { path: path.clone(), source }
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(out).map_err(fail(out))?;
        match fs::DirBuilder::new().mode(0o700).create(&dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(BundleError::Exists(dir));
            }
            Err(error) => return Err(fail(&dir)(error)),
        }
        let bundle = Bundle { dir };
        let made = fs::DirBuilder::new().mode(0o700).create(bundle.objects());
        if let Err(error) = made {
            bundle.discard();
            return Err(fail(&bundle.objects())(error));
        }
        Ok(bundle)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn ledger(&self) -> PathBuf {
        self.dir.join(names::LEDGER)
    }

    fn objects(&self) -> PathBuf {
        self.dir.join(names::OBJECTS)
    }

    /// Stores an object under its digest; one that is there already is left.
    pub(crate) fn put_object(&self, bytes: &[u8]) -> io::Result<Digest> {
        let digest = Digest::of(bytes);
        let path = self.objects().join(digest.to_hex());
        if !path.exists() {
            let part = self.objects().join(format!(".part-{digest}"));
            let written = (|| {
                OpenOptions::new().create(true).write(true).truncate(true).open(&part)?.write_all(bytes)?;
                fs::rename(&part, &path)
            })();
            if let Err(error) = written {
                let _ = fs::remove_file(&part);
                return Err(error);
            }
        }
        Ok(digest)
    }

    /// A file that becomes an object once its digest is known.
    pub(crate) fn begin_object(&self, label: &str) -> io::Result<PendingObject> {
        let part = self.objects().join(format!(".part-{label}"));
        let file = File::create_new(&part)?;
        Ok(PendingObject { part, objects: self.objects(), file, failed: false })
    }

    /// Writes one of the bundle's own files.
    pub(crate) fn put_file(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        File::create_new(self.dir.join(name))?.write_all(bytes)
    }

    /// Removes a bundle of a run that was refused before anything was recorded.
    pub(crate) fn discard(&self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// An object that is being written; dropped unfinished, it leaves nothing.
#[derive(Debug)]
pub(crate) struct PendingObject {
    part: PathBuf,
    objects: PathBuf,
    file: File,
    /// A write failed, and some of its bytes may be there: whose digest nobody knows.
    failed: bool,
}

impl PendingObject {
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes).inspect_err(|_| self.failed = true)
    }

    pub(crate) fn finish(self, digest: Digest) -> io::Result<()> {
        if self.failed {
            return Err(io::Error::other("an object was not written whole"));
        }
        fs::rename(&self.part, self.objects.join(digest.to_hex()))
    }
}

impl Drop for PendingObject {
    fn drop(&mut self) {
        // Renamed already, if it was finished.
        let _ = fs::remove_file(&self.part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_whose_writing_failed_gets_no_name() {
        let out = tempfile::tempdir().unwrap();
        let bundle = Bundle::create(out.path(), "run-0001").unwrap();
        let objects = || fs::read_dir(bundle.objects()).unwrap().count();
        let mut object = bundle.begin_object("whole").unwrap();
        object.write(b"all of it").unwrap();
        object.finish(Digest::of(b"all of it")).unwrap();
        assert_eq!(objects(), 1);
        let mut object = bundle.begin_object("half").unwrap();
        object.write(b"half").unwrap();
        // As a full disk does it: the next write fails, and what became of its bytes is not known.
        let full = File::open(&object.part).unwrap();
        let real = std::mem::replace(&mut object.file, full);
        object.write(b" of it").unwrap_err();
        object.file = real;
        object.write(b" of it").unwrap();
        object.finish(Digest::of(b"half of it")).unwrap_err();
        assert_eq!(objects(), 1);
    }
}
