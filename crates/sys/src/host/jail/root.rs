//! The jail's root: a small read-only tmpfs that shows the places of the plan and nothing else of the host.
//!
//! Prepared by the owner, entered by the child in its own mount namespace.

use super::Place;
use super::calls::check;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};

pub(super) struct Root {
    /// Folders to make, parents first.
    folders: Vec<CString>,
    mounts: Vec<Mount>,
    links: Vec<(CString, CString)>,
}

struct Mount {
    from: CString,
    /// Relative to the new root.
    to: CString,
    folder: bool,
    attributes: u64,
    /// Its detached mount, once it is opened.
    tree: AtomicI32,
}

/// A folder that every host has; the new root is mounted over it in the jail's own namespace.
const BASE: &std::ffi::CStr = c"/tmp";

pub(super) fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

impl Root {
    pub(super) fn prepare(places: &[Place]) -> io::Result<Root> {
        let mut folders: Vec<PathBuf> = vec!["proc".into()];
        let mut root = Root { folders: Vec::new(), mounts: Vec::new(), links: Vec::new() };
        for place in places {
            let at = match place {
                Place::Folder(path) | Place::File(path) | Place::Device(path) => path,
                Place::Link { at, .. } => at,
            };
            let inside = at.strip_prefix("/").map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            let mut parents: Vec<&Path> = inside.ancestors().skip(1).collect();
            parents.pop();
            folders.extend(parents.into_iter().rev().map(Path::to_owned));
            let common = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID;
            let attributes = match place {
                Place::Folder(_) => common | libc::MOUNT_ATTR_NODEV,
                Place::File(_) => common | libc::MOUNT_ATTR_NODEV,
                Place::Device(_) => common | libc::MOUNT_ATTR_NOEXEC,
                Place::Link { to, .. } => {
                    root.links.push((c_string(to.as_os_str())?, c_string(inside.as_os_str())?));
                    continue;
                }
            };
            let folder = matches!(place, Place::Folder(_));
            if folder {
                folders.push(inside.to_owned());
            }
            root.mounts.push(Mount {
                from: c_string(at.as_os_str())?,
                to: c_string(inside.as_os_str())?,
                folder,
                attributes,
                tree: AtomicI32::new(-1),
            });
        }
        let mut made = std::collections::BTreeSet::new();
        folders.retain(|folder| made.insert(folder.clone()));
        root.folders =
            folders.iter().map(|folder| c_string(folder.as_os_str())).collect::<io::Result<_>>()?;
        Ok(root)
    }

    pub(super) fn enter(&self) -> io::Result<()> {
        let none = std::ptr::null();
        // SAFETY: every pointer is to a string that lives through its call; nothing is written through them.
        unsafe {
            libc::umask(0o022);
            let private = libc::MS_REC | libc::MS_PRIVATE;
            check(libc::mount(none, c"/".as_ptr(), none, private, none.cast()).into())?;
            // All are opened before anything is hidden by the new root.
            for mount in &self.mounts {
                mount.open()?;
            }
            let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
            let options = c"size=256k,nr_inodes=256,mode=755";
            let tmpfs = c"tmpfs".as_ptr();
            check(libc::mount(tmpfs, BASE.as_ptr(), tmpfs, flags, options.as_ptr().cast()).into())?;
            check(libc::chdir(BASE.as_ptr()).into())?;
            for folder in &self.folders {
                check(libc::mkdir(folder.as_ptr(), 0o755).into())?;
            }
            for (to, at) in &self.links {
                check(libc::symlink(to.as_ptr(), at.as_ptr()).into())?;
            }
            for mount in &self.mounts {
                mount.attach()?;
            }
            let proc = c"proc".as_ptr();
            let options = c"subset=pid";
            let flags = flags | libc::MS_RDONLY;
            check(libc::mount(proc, proc, proc, flags, options.as_ptr().cast()).into())?;
            // The old root is stacked on the new one, and then let go of.
            check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()))?;
            check(libc::umount2(c".".as_ptr(), libc::MNT_DETACH).into())?;
            check(libc::chdir(c"/".as_ptr()).into())?;
            let flags = flags | libc::MS_REMOUNT | libc::MS_BIND;
            check(libc::mount(none, c"/".as_ptr(), none, flags, none.cast()).into())?;
        }
        Ok(())
    }
}

impl Mount {
    fn open(&self) -> io::Result<()> {
        let attributes =
            libc::mount_attr { attr_set: self.attributes, attr_clr: 0, propagation: 0, userns_fd: 0 };
        let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_RECURSIVE as libc::c_uint;
        // SAFETY: the path and the attributes live through the calls.
        unsafe {
            let tree = check(libc::syscall(
                libc::SYS_open_tree,
                libc::AT_FDCWD,
                self.from.as_ptr(),
                flags as libc::c_ulong,
            ))?;
            check(libc::syscall(
                libc::SYS_mount_setattr,
                tree,
                c"".as_ptr(),
                (libc::AT_EMPTY_PATH | libc::AT_RECURSIVE) as libc::c_ulong,
                &raw const attributes,
                size_of::<libc::mount_attr>(),
            ))?;
            self.tree.store(tree as RawFd, Ordering::Relaxed);
        }
        Ok(())
    }

    fn attach(&self) -> io::Result<()> {
        /// `MOVE_MOUNT_F_EMPTY_PATH`.
        const FROM_DESCRIPTOR: libc::c_ulong = 4;
        // SAFETY: the paths live through the calls; the descriptors are this function's.
        unsafe {
            if !self.folder {
                let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY | libc::O_CLOEXEC;
                let file = check(libc::open(self.to.as_ptr(), flags, 0o444).into())?;
                libc::close(file as RawFd);
            }
            let tree = self.tree.load(Ordering::Relaxed);
            check(libc::syscall(
                libc::SYS_move_mount,
                tree,
                c"".as_ptr(),
                libc::AT_FDCWD,
                self.to.as_ptr(),
                FROM_DESCRIPTOR,
            ))?;
            libc::close(tree);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_come_first_and_once() {
        let places = [
            Place::Folder("/usr".into()),
            Place::Device("/dev/null".into()),
            Place::Device("/dev/zero".into()),
            Place::File("/etc/ld.so.cache".into()),
            Place::Folder("/opt/a/b".into()),
        ];
        let root = Root::prepare(&places).unwrap();
        let folders: Vec<&str> = root.folders.iter().map(|name| name.to_str().unwrap()).collect();
        assert_eq!(folders, ["proc", "usr", "dev", "etc", "opt", "opt/a", "opt/a/b"]);
    }
}
