//! Digests of files that are asked for at every run, remembered for as long as the file is the same.
//!
//! What it is for: kernel, root image and VMM have tens of megabytes; to hash them
//! takes longer than to start a machine from a template.
//! What it guarantees: a digest is taken from memory only where device, inode,
//! length, modification time and status-change time of the *open* file are those
//! of the file that was hashed. The kernel moves the last one forward whenever
//! the file or its inode changes, and nobody but root, by setting the clock back,
//! can put it back. A file that was changed within two seconds before it was hashed
//! is not remembered, since a second change could bear the same time.
//! What it does not: see what changes below the file system. A bad block or a
//! writer of the raw disk is found where the bytes are hashed again.

use crate::backend::BootInput;
use hotcell_ledger::Digest;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A file whose status changed less than this ago may change again without a new time: clocks of file systems tick
/// every 4 to 10 milliseconds, some only every second or two.
const SETTLED_NS: i128 = 2_000_000_000;
/// Length of a file that remembers one digest.
const MAX_MEMORY: u64 = 4096;

/// What tells that an open file is the one that was hashed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_ns: i128,
    changed_ns: i128,
}

impl Identity {
    pub(crate) fn of(file: &File) -> io::Result<Identity> {
        let metadata = file.metadata()?;
        let ns = |seconds: i64, nanos: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
        Ok(Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Whether a later change would show.
    fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i128);
        now - self.changed_ns > SETTLED_NS
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Memory {
    file: Identity,
    digest: String,
}

/// Remembers in a folder; without one it hashes each time.
#[derive(Clone, Debug, Default)]
pub struct FileDigests {
    dir: Option<PathBuf>,
}

impl FileDigests {
    /// Remembers in this folder, which is made when something is remembered.
    pub fn remembered_in(dir: &Path) -> FileDigests {
        FileDigests { dir: Some(dir.to_owned()) }
    }

    /// Opens a file and says its digest: what was hashed, now or before, is what the open file holds.
    ///
    /// # Errors
    /// It can't be read.
    pub fn open(&self, path: &Path) -> io::Result<BootInput> {
        let file = File::open(path)?;
        let digest = self.digest(&file)?;
        let bytes = file.metadata()?.len();
        Ok(BootInput { file, digest, bytes })
    }

    fn digest(&self, file: &File) -> io::Result<Digest> {
        let identity = Identity::of(file)?;
        let place =
            self.dir.as_ref().map(|dir| dir.join(format!("{:x}-{:x}", identity.device, identity.inode)));
        if let Some(known) = place.as_deref().and_then(|place| recall(place, &identity)) {
            return Ok(known);
        }
        let digest = Digest::of_reader(file)?;
        if let Some(place) = place
            && identity.is_settled()
            && Identity::of(file)? == identity
        {
            // Whoever can't remember hashes again.
            let memory = Memory { file: identity, digest: digest.to_hex() };
            let _ = serde_json::to_vec(&memory).map(|memory| remember(&place, &memory));
        }
        Ok(digest)
    }
}

fn recall(place: &Path, identity: &Identity) -> Option<Digest> {
    if fs::symlink_metadata(place).ok().filter(fs::Metadata::is_file)?.len() > MAX_MEMORY {
        return None;
    }
    let memory: Memory = serde_json::from_slice(&fs::read(place).ok()?).ok()?;
    if memory.file == *identity { Digest::from_hex(&memory.digest) } else { None }
}

/// Writes down what is to be remembered: all of it or nothing, in a folder of the user's alone.
pub(crate) fn remember(place: &Path, memory: &[u8]) -> io::Result<()> {
    let dir = place.parent().unwrap_or(place);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let new = place.with_extension(format!("new.{}", std::process::id()));
    fs::write(&new, memory)?;
    fs::rename(&new, place).inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};

    /// As if the file had last changed an hour ago: its recorded times are what counts.
    fn settled(digests: &FileDigests, path: &Path, claimed: Digest) {
        let file = File::open(path).unwrap();
        let identity = Identity::of(&file).unwrap();
        let place = digests.dir.as_ref().unwrap().join(format!("{:x}-{:x}", identity.device, identity.inode));
        let memory = Memory { file: identity, digest: claimed.to_hex() };
        remember(&place, &serde_json::to_vec(&memory).unwrap()).unwrap();
    }

    #[test]
    fn a_digest_is_remembered_until_the_file_changes_in_any_way() {
        let home = tempfile::tempdir().unwrap();
        let (path, digests) = (home.path().join("f"), FileDigests::remembered_in(&home.path().join("m")));
        fs::write(&path, b"one").unwrap();
        // A wrong digest shows whether it is taken from memory.
        let wrong = Digest::of(b"wrong");
        settled(&digests, &path, wrong);
        assert_eq!(digests.open(&path).unwrap().digest, wrong, "the control: an unchanged file is not read");
        assert_eq!(FileDigests::default().open(&path).unwrap().digest, Digest::of(b"one"));
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let mut file = File::options().read(true).write(true).open(&path).unwrap();
        file.write_all(b"two").unwrap();
        // Length and modification time as before.
        file.set_modified(modified).unwrap();
        file.rewind().unwrap();
        assert_eq!(digests.open(&path).unwrap().digest, Digest::of(b"two"));
        settled(&digests, &path, wrong);
        let other = home.path().join("g");
        fs::write(&other, b"one").unwrap();
        fs::rename(&other, &path).unwrap();
        assert_eq!(digests.open(&path).unwrap().digest, Digest::of(b"one"), "another inode");
    }

    #[test]
    fn what_has_just_changed_is_not_remembered() {
        let home = tempfile::tempdir().unwrap();
        let (path, memory) = (home.path().join("f"), home.path().join("m"));
        fs::write(&path, b"one").unwrap();
        let digests = FileDigests::remembered_in(&memory);
        digests.open(&path).unwrap();
        assert!(fs::read_dir(&memory).is_err(), "nothing was remembered");
    }
}
