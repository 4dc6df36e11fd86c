//! The ephemeral disk at `/workspace`.
//!
//! An empty ext4 of each size is formatted once and kept in the cache; a run
//! gets a sparse copy of it, which takes milliseconds.

use rustix::fs::{SeekFrom, ftruncate, seek};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// User and group of the workload, who own the workspace.
const WORKSPACE_OWNER: &str = "1000:1000";
/// Bytes copied at once.
const COPY_CHUNK: usize = 1 << 20;

/// An empty workspace file system of one size.
#[derive(Clone, Debug)]
pub struct Workspace {
    blank: PathBuf,
    mib: u32,
}

/// Why there is no workspace disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// A program of e2fsprogs is not to be had or fails.
    #[error("can't format the workspace disk: {0}")]
    Format(String),
    /// The file can't be written.
    #[error("can't write the workspace disk {path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Workspace {
    /// The blank of this size, formatted at first use.
    ///
    /// # Errors
    /// It can't be formatted or written.
    pub fn blank(cache: &Path, mib: u32) -> Result<Workspace, DiskError> {
        let dir = cache.join("workspace");
        let blank = dir.join(format!("ext4-v2-{mib}.img"));
        if !blank.exists() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(disk_error(&dir))?;
            let new = dir.join(format!("ext4-v2-{mib}.new.{}", std::process::id()));
            let made = format(&new, mib).and_then(|()| fs::rename(&new, &blank).map_err(disk_error(&blank)));
            if made.is_err() {
                let _ = fs::remove_file(&new);
            }
            made?;
        }
        Ok(Workspace { blank, mib })
    }

    /// Its size in MiB.
    pub fn mib(&self) -> u32 {
        self.mib
    }

    /// Writes a copy to `path`, which must not exist.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn copy_to(&self, path: &Path) -> Result<File, DiskError> {
        File::open(&self.blank).and_then(|blank| sparse_copy(&blank, path)).map_err(disk_error(path))
    }
}

fn disk_error(path: &Path) -> impl Fn(io::Error) -> DiskError {
    move |source| DiskError::Io { path: path.to_owned(), source }
}

fn not_begun(program: &str) -> impl Fn(io::Error) -> DiskError {
    move |error| match error.kind() {
        io::ErrorKind::NotFound => DiskError::Format(format!(
            "{program} is not installed. Debian, Ubuntu: apt-get install e2fsprogs"
        )),
        _ => DiskError::Format(format!("{program}: {error}")),
    }
}

fn format(path: &Path, mib: u32) -> Result<(), DiskError> {
    let file =
        OpenOptions::new().create_new(true).write(true).mode(0o600).open(path).map_err(disk_error(path))?;
    file.set_len(u64::from(mib) << 20).map_err(disk_error(path))?;
    // No journal: the disk never outlives a crash. No lazy initialisation: the
    // guest must not write what nobody asked for. No reserved blocks: no root works here.
    let options = format!("root_owner={WORKSPACE_OWNER},lazy_itable_init=0,lazy_journal_init=0,nodiscard");
    let made = Command::new("mke2fs")
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .args(["-q", "-F", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0", "-E", &options])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(not_begun("mke2fs"))?;
    if !made.status.success() {
        return Err(DiskError::Format(format!("mke2fs: {}", String::from_utf8_lossy(&made.stderr).trim())));
    }
    // Root's alone and of no use on a disk that no fsck ever sees: whoever takes all of `/workspace` stumbles over it.
    let removed = Command::new("debugfs")
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .args(["-w", "-R", "rmdir lost+found"])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(not_begun("debugfs"))?;
    // It says its version first, and exits with 0 whatever it could not do.
    let said = String::from_utf8_lossy(&removed.stderr);
    match said.lines().nth(1) {
        None if removed.status.success() => Ok(()),
        why => Err(DiskError::Format(format!("debugfs: {}", why.unwrap_or(&said).trim()))),
    }
}

/// Copies only what is not a hole.
pub(crate) fn sparse_copy(source: &File, to: &Path) -> io::Result<File> {
    let target = OpenOptions::new().create_new(true).read(true).write(true).mode(0o600).open(to)?;
    let length = source.metadata()?.len();
    ftruncate(&target, length)?;
    let mut chunk = vec![0; COPY_CHUNK];
    let mut at = 0;
    while let Ok(data) = seek(source, SeekFrom::Data(at)) {
        let end = seek(source, SeekFrom::Hole(data))?;
        let mut offset = data;
        while offset < end {
            let want = usize::try_from(end - offset).unwrap_or(COPY_CHUNK).min(COPY_CHUNK);
            let Some(part) = chunk.get_mut(..want) else { break };
            source.read_exact_at(part, offset)?;
            target.write_all_at(part, offset)?;
            offset += want as u64;
        }
        at = end;
    }
    (&target).flush()?;
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_copy_is_equal_and_as_sparse() {
        let home = tempfile::tempdir().unwrap();
        let workspace = Workspace::blank(home.path(), 256).unwrap();
        let copy = home.path().join("copy.img");
        let file = workspace.copy_to(&copy).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 256 << 20);
        assert!(file.metadata().unwrap().blocks() * 512 < 16 << 20, "the copy is not sparse");
        assert_eq!(fs::read(&copy).unwrap(), fs::read(&workspace.blank).unwrap());
        let again = workspace.copy_to(&copy).unwrap_err();
        assert!(again.to_string().contains("exists"), "{again}");
    }

    #[test]
    fn a_blank_disk_is_sound_and_nothing_is_on_it() {
        let home = tempfile::tempdir().unwrap();
        let workspace = Workspace::blank(home.path(), 32).unwrap();
        let ask = |program: &str, words: &[&str]| {
            let mut command = Command::new(program);
            command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").args(words).arg(&workspace.blank);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let root = ask("debugfs", &["-R", "ls -p /"]);
        let names: Vec<&str> = root.lines().filter_map(|line| line.split('/').nth(5)).collect();
        assert_eq!(names, [".", ".."], "{root}");
        ask("e2fsck", &["-f", "-n"]);
    }
}
