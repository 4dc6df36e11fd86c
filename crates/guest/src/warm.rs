//! Reading ahead, while a machine waits for a host that does not come at once: the machine that is saved as a template.
//!
//! What it is for: programs of the root image are then in the page cache of every
//! clone, and the gate knows their digests: a clone neither unpacks nor hashes them.
//! What it guarantees: nothing of the image is executed, no link is followed, and
//! only regular files are read. What is read is bounded.
//! What it does not: happen in a machine that boots for a run; its host has spoken before.

use rustix::fs::{Mode, OFlags, open};
use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where programs are, below the root.
const PROGRAMS: [&str; 6] = ["bin", "usr/bin", "usr/local/bin", "sbin", "usr/sbin", "usr/local/sbin"];
/// Where the libraries are that most of them need.
const LIBRARIES: [&str; 6] =
    ["lib", "lib64", "usr/lib64", "lib/x86_64-linux-gnu", "usr/lib", "usr/lib/x86_64-linux-gnu"];
/// What most runs start, and so comes first.
const FIRST: [&str; 6] = ["busybox", "sh", "dash", "bash", "env", "python3"];
/// Largest file that is read ahead: a clone must not wait for one that it may not need.
const MAX_FILE: u64 = 8 << 20;
/// All of it together: it stays in the template's memory and on the host's disk.
const MAX_BYTES: u64 = 48 << 20;

/// A file to be read.
#[derive(Debug)]
pub(crate) struct Candidate {
    path: PathBuf,
    /// A program: its digest will be asked for.
    pub(crate) program: bool,
}

impl Candidate {
    /// Opens it, if it is what it was.
    pub(crate) fn open(&self) -> Option<File> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::from(open(&self.path, flags, Mode::empty()).ok()?);
        file.metadata().is_ok_and(|there| there.is_file()).then_some(file)
    }
}

/// What to read, the last first. `device`: the root image's.
pub(crate) fn candidates(root: &Path, device: u64) -> Vec<Candidate> {
    let mut seen = HashSet::new();
    let mut found: Vec<(bool, bool, u64, PathBuf)> = Vec::new();
    for (folders, program) in [(PROGRAMS, true), (LIBRARIES, false)] {
        for folder in folders {
            let folder = root.join(folder);
            // A folder by a link may be anywhere.
            if !fs::symlink_metadata(&folder).is_ok_and(|there| there.is_dir() && there.dev() == device) {
                continue;
            }
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let Ok(there) = entry.metadata() else { continue };
                if there.is_symlink() {
                    // The kernel keeps where it leads.
                    let _ = fs::read_link(entry.path());
                }
                let name = entry.file_name();
                let name = name.to_string_lossy();
                let wanted = if program { there.mode() & 0o111 != 0 } else { name.contains(".so") };
                let fits = there.len() <= MAX_FILE && there.dev() == device;
                if there.is_file() && wanted && fits && seen.insert(there.ino()) {
                    let first = FIRST.iter().any(|first| name.starts_with(first));
                    found.push((first, program, there.len(), entry.path()));
                }
            }
        }
    }
    // What is wanted first, then by size: many small programs rather than a few large ones.
    found.sort_by_key(|(first, _, length, _)| (!first, *length));
    let mut left = MAX_BYTES;
    let mut chosen: Vec<Candidate> = found
        .into_iter()
        .take_while(|(_, _, length, _)| {
            left = left.saturating_sub(*length);
            left > 0
        })
        .map(|(_, program, _, path)| Candidate { path, program })
        .collect();
    chosen.reverse();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn programs_and_libraries_are_chosen_once_and_no_link_leads_away() {
        let home = tempfile::tempdir().unwrap();
        let (root, outside) = (home.path().join("root"), home.path().join("outside"));
        for folder in [root.join("usr/bin"), root.join("usr/lib"), outside.clone()] {
            fs::create_dir_all(folder).unwrap();
        }
        let program = |path: &Path| {
            fs::write(path, "x").unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        for name in ["zz", "sh", "not-executable"] {
            program(&root.join("usr/bin").join(name));
        }
        fs::set_permissions(root.join("usr/bin/not-executable"), fs::Permissions::from_mode(0o644)).unwrap();
        fs::hard_link(root.join("usr/bin/zz"), root.join("usr/bin/zy")).unwrap();
        fs::write(root.join("usr/lib/libc.so.6"), "y").unwrap();
        program(&outside.join("stray"));
        symlink(&outside, root.join("bin")).unwrap();
        symlink(outside.join("stray"), root.join("usr/bin/link")).unwrap();
        let device = fs::metadata(&root).unwrap().dev();
        let chosen = candidates(&root, device);
        let names: Vec<&str> =
            chosen.iter().map(|one| one.path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!((names.len(), names.last()), (3, Some(&"sh")), "{names:?}");
        assert!(names.contains(&"libc.so.6") && names.iter().any(|name| name.starts_with('z')));
        assert_eq!(chosen.iter().filter(|one| one.program).count(), 2);
        assert!(candidates(&root, device + 1).is_empty());
        let link = Candidate { path: root.join("usr/bin/link"), program: true };
        assert!(link.open().is_none());
    }

    #[test]
    fn what_is_read_ahead_is_bounded_each_and_together() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("usr/bin");
        fs::create_dir_all(&folder).unwrap();
        let program = |name: &str, bytes: u64| {
            let file = File::create(folder.join(name)).unwrap();
            file.set_len(bytes).unwrap();
            file.set_permissions(fs::Permissions::from_mode(0o755)).unwrap();
        };
        let device = fs::metadata(root.path()).unwrap().dev();
        let bytes = || -> Vec<u64> {
            let chosen = candidates(root.path(), device);
            chosen.iter().map(|one| one.path.metadata().unwrap().len()).collect()
        };
        program("largest", MAX_FILE);
        program("larger", MAX_FILE + 1);
        assert_eq!(bytes(), [MAX_FILE]);
        let most = MAX_BYTES / MAX_FILE;
        for number in 0..2 * most {
            program(&format!("p{number}"), MAX_FILE);
        }
        // The smallest come first, so that a few large ones leave room for them.
        program("small", 1);
        let (all, small): (Vec<u64>, u64) = (bytes(), 1);
        let total: u64 = all.iter().sum();
        assert!(all.contains(&small) && total < MAX_BYTES && total > MAX_BYTES - 2 * MAX_FILE, "{all:?}");
    }
}
