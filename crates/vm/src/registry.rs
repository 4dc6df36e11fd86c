//! What exists is written down before it exists.
//!
//! ```text
//! <registry>/<run-id>/           made exclusively: a run id is taken once
//!   entry.json                   who owns it, what belongs to it
//!   lock                         flock held by the owner for as long as it lives
//!   …                            the run's own files (overlay disk, …)
//! ```
//! The lock tells a live owner from a dead one without trusting a pid: the
//! kernel drops it when the owner ends, however it ends.

use crate::process::ProcessId;
use crate::teardown::Check;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Version of `entry.json`.
const ENTRY_VERSION: u32 = 1;
/// Names of folders that are no entries yet begin with this.
pub(crate) const HIDDEN: &str = ".new-";
/// Names of folders that are entries no more.
pub(crate) const GONE: &str = ".gone-";
/// Largest `entry.json` that is read.
const MAX_ENTRY: u64 = 64 * 1024;

/// The folder of all live and orphaned runs of one user.
#[derive(Clone, Debug)]
pub struct Registry {
    dir: PathBuf,
}

/// What is written of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Format version.
    pub version: u32,
    /// The run.
    pub run_id: String,
    /// Who started it.
    pub owner: Option<ProcessId>,
    /// The VMM process, once it runs.
    pub vmm: Option<ProcessId>,
    /// Where its bundle is written.
    pub bundle: PathBuf,
    /// Its cgroups; written down before they are made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cgroups: Vec<PathBuf>,
}

/// Why a run can't be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The id is in use or was left by a run that died.
    #[error(
        "a run named `{0}` exists already; choose another name, or end what is left of it with `hotcell reap`"
    )]
    Taken(String),
    /// The folder can't be used.
    #[error("can't write the registry at {path}: {source}; nothing was started")]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A registered run: the only ticket to start a machine. It is given up only to
/// a teardown that checked everything.
#[derive(Debug)]
#[must_use = "a registration that is dropped leaves its entry for the reaper"]
pub struct Registration {
    dir: PathBuf,
    entry: Box<Entry>,
    _lock: File,
}

impl Registry {
    /// A registry in this folder; made, private to the user, where it is not there.
    ///
    /// # Errors
    /// The folder can't be made.
    pub fn open(dir: &Path) -> Result<Registry, RegistryError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io_error(dir))?;
        // VMMs are marked with it: whatever it is called, it must read the same.
        Ok(Registry { dir: dir.canonicalize().map_err(io_error(dir))? })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Takes the run id and writes the entry.
    ///
    /// # Errors
    /// The id is taken, or the disk refuses.
    pub fn register(&self, run_id: &str, bundle: &Path) -> Result<Registration, RegistryError> {
        let dir = self.dir.join(run_id);
        // Made under another name and locked before it gets its own: a reaper never
        // sees an entry whose owner has not locked it yet.
        let new = self.dir.join(format!("{HIDDEN}{}-{run_id}", std::process::id()));
        fs::DirBuilder::new().mode(0o700).create(&new).map_err(io_error(&new))?;
        let entry = Entry {
            version: ENTRY_VERSION,
            run_id: run_id.to_owned(),
            owner: ProcessId::of(std::process::id() as i32),
            vmm: None,
            // Whoever reaps works elsewhere.
            bundle: std::path::absolute(bundle).map_err(io_error(bundle))?,
            cgroups: Vec::new(),
        };
        let made = lock(&new).and_then(|lock| write_entry(&new, &entry).map(|()| lock));
        let named = made.and_then(|lock| {
            renameat_with(CWD, &new, CWD, &dir, RenameFlags::NOREPLACE)?;
            Ok(lock)
        });
        match named {
            Ok(lock) => Ok(Registration { dir, entry: Box::new(entry), _lock: lock }),
            Err(error) => {
                let _ = fs::remove_dir_all(&new);
                match error.kind() {
                    io::ErrorKind::AlreadyExists => Err(RegistryError::Taken(run_id.to_owned())),
                    _ => Err(io_error(&dir)(error)),
                }
            }
        }
    }
}

impl Registration {
    /// The folder for the run's own files; it goes with the registration.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What is written.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Ends a registration of which nothing was ever started.
    pub fn abandon(self) -> Check {
        match self.release() {
            Ok(check) => check,
            Err(kept) => kept.1,
        }
    }

    /// Writes down the VMM process: for backends, as soon as it is there.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn record_vmm(&mut self, vmm: ProcessId) -> Result<(), RegistryError> {
        self.entry.vmm = Some(vmm);
        write_entry(&self.dir, &self.entry).map_err(io_error(&self.dir))
    }

    /// Writes down the run's cgroups, before they are made.
    pub(crate) fn record_cgroups(&mut self, cgroups: Vec<PathBuf>) -> Result<(), RegistryError> {
        self.entry.cgroups = cgroups;
        write_entry(&self.dir, &self.entry).map_err(io_error(&self.dir))
    }

    /// Removes the entry and the run's files; the check says that they are gone.
    pub(crate) fn release(self) -> Result<Check, Box<(Registration, Check)>> {
        let removed = remove_folder(&self.dir);
        let gone =
            matches!(self.dir.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound);
        let detail = match removed {
            Ok(()) => "removed".to_owned(),
            Err(error) => error.to_string(),
        };
        let check = Check { what: "run folder with overlay disk".into(), gone, detail };
        if gone { Ok(check) } else { Err(Box::new((self, check))) }
    }
}

/// Removes a run's folder, which loses its name first: one that has a name has its lock, and is one run's from its first
/// moment to its last. To be called by whoever holds the lock.
pub(crate) fn remove_folder(dir: &Path) -> io::Result<()> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let gone = dir.with_file_name(format!("{GONE}{}-{name}", std::process::id()));
    fs::rename(dir, &gone)?;
    fs::remove_dir_all(&gone)
}

fn lock(dir: &Path) -> io::Result<File> {
    let lock =
        OpenOptions::new().create(true).write(true).truncate(false).mode(0o600).open(dir.join("lock"))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    Ok(lock)
}

/// Replaces `entry.json` in one step; readers see the old or the new one. Not
/// synced: it must survive the death of its owner, not of the host, which ends
/// every machine anyway.
fn write_entry(dir: &Path, entry: &Entry) -> io::Result<()> {
    let (new, path) = (dir.join("entry.json.new"), dir.join("entry.json"));
    let mut file = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&new)?;
    serde_json::to_writer_pretty(&mut file, entry)?;
    file.write_all(b"\n")?;
    fs::rename(&new, &path)
}

/// Reads an entry that anybody may have written.
pub(crate) fn read_entry(dir: &Path) -> Option<Entry> {
    let path = dir.join("entry.json");
    let metadata = path.symlink_metadata().ok()?;
    if !metadata.is_file() || metadata.len() > MAX_ENTRY {
        return None;
    }
    serde_json::from_slice(&fs::read(path).ok()?).ok().filter(|entry: &Entry| entry.version == ENTRY_VERSION)
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> RegistryError {
    move |source| RegistryError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_taken_once_and_free_after_release() {
        let home = tempfile::tempdir().unwrap();
        let registry = Registry::open(&home.path().join("live")).unwrap();
        let first = registry.register("run-00000001", Path::new("/bundle")).unwrap();
        assert!(matches!(registry.register("run-00000001", Path::new("/b")), Err(RegistryError::Taken(_))));
        let entry = read_entry(first.dir()).unwrap();
        assert_eq!((entry.run_id.as_str(), entry.bundle.as_path()), ("run-00000001", Path::new("/bundle")));
        assert!(entry.owner.unwrap().exists());
        assert!(first.release().unwrap().gone);
        let again = registry.register("run-00000001", Path::new("/b")).unwrap();
        assert!(again.release().is_ok());
    }

    #[test]
    fn a_folder_that_can_not_be_written_is_named() {
        let error = Registry::open(Path::new("/proc/hotcell/live")).unwrap_err();
        assert!(error.to_string().contains("/proc/hotcell"), "{error}");
    }
}
