//! The file systems that the workload sees, built under [`ROOT`] before it exists.
//!
//! ```text
//! /           squashfs  ro nosuid nodev
//! /dev        tmpfs     ro nosuid noexec       null zero full random urandom tty, links; nothing else
//! /dev/pts    devpts    nosuid noexec          own instance
//! /dev/shm    tmpfs     nosuid nodev noexec    limited
//! /tmp        tmpfs     nosuid nodev noexec    limited
//! /run        tmpfs     nosuid nodev noexec    root's
//! /run/hotcell tmpfs    ro nosuid nodev noexec the request socket
//! /workspace  ext4      nosuid nodev [noexec]  the overlay disk
//! /sys        sysfs     ro nosuid nodev noexec
//! /proc       proc      nosuid nodev noexec    hidepid=invisible; mounted by the reaper
//! /proc/*     proc      ro nosuid nodev noexec what may be written and is no process's: settings, interrupts, buses
//! ```
//! What it guarantees: nothing of PID 1's own tree (device nodes of disks and
//! ports, cgroups, its procfs) is in it; a mount that fails is a [`Failure`].
//! What it does not: limits, which come with the host's configuration.

use crate::last::{Doing, Failure};
use crate::limits::{RUN_BYTES, TMP_BYTES, TMP_BYTES_PER_INODE};
use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Uid, chmod, chown, makedev, mknodat, open};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_bind, mount_remount};
use std::ffi::CString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

/// Where the workload's root is in PID 1's tree.
pub(crate) const ROOT: &str = "/root";
/// The workload's disk, from PID 1.
pub(crate) const WORKSPACE: &str = "/root/workspace";
/// The directory of the request socket, from PID 1.
pub(crate) const REQUEST_DIRECTORY: &str = "/root/run/hotcell";

const HARDENED: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
/// `/dev` itself needs its device nodes to work.
const DEV: MountFlags = MountFlags::NOSUID.union(MountFlags::NOEXEC);

/// Name, major, minor, of `Documentation/admin-guide/devices.txt`.
const NODES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Mounts the root image and everything on it but `/proc`.
pub(crate) fn build(root_device: &str, overlay_device: &str) -> Result<(), Failure> {
    make_directory(ROOT, 0o755)?;
    attach(root_device, ROOT, "squashfs", MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV, "")?;
    for directory in ["dev", "proc", "sys", "tmp", "run", "workspace"] {
        let path = format!("{ROOT}/{directory}");
        let there = fs::symlink_metadata(&path).doing(|| format!("find /{directory} in the root image"))?;
        if !there.is_dir() {
            return Err(Failure::new(format!("/{directory} of the root image is not a directory")));
        }
    }
    build_dev()?;
    attach("tmpfs", "/root/tmp", "tmpfs", HARDENED, &tmpfs_options(TMP_BYTES, "1777"))?;
    attach("tmpfs", "/root/run", "tmpfs", HARDENED, &tmpfs_options(RUN_BYTES, "0755"))?;
    make_directory(REQUEST_DIRECTORY, 0o755)?;
    make_directory("/root/run/lock", 0o1777)?;
    attach("sysfs", "/root/sys", "sysfs", HARDENED | MountFlags::RDONLY, "")?;
    attach(overlay_device, WORKSPACE, "ext4", HARDENED | MountFlags::NOATIME, "errors=remount-ro")
}

fn build_dev() -> Result<(), Failure> {
    attach("tmpfs", "/root/dev", "tmpfs", DEV, "mode=0755,size=64k,nr_inodes=64")?;
    for (name, major, minor) in NODES {
        let path = format!("/root/dev/{name}");
        mknodat(CWD, &path, FileType::CharacterDevice, Mode::empty(), makedev(major, minor))
            .and_then(|()| chmod(&path, Mode::from_raw_mode(0o666)))
            .doing(|| format!("make the device node {path}"))?;
    }
    for (name, target) in LINKS {
        symlink(target, format!("/root/dev/{name}")).doing(|| format!("link /dev/{name}"))?;
    }
    make_directory("/root/dev/pts", 0o755)?;
    make_directory("/root/dev/shm", 0o755)?;
    attach("tmpfs", "/root/dev/shm", "tmpfs", HARDENED, &tmpfs_options(TMP_BYTES, "1777"))?;
    attach("devpts", "/root/dev/pts", "devpts", DEV, "newinstance,ptmxmode=0666,mode=0620,max=64")?;
    mount_remount("/root/dev", DEV | MountFlags::RDONLY, "").doing(|| "make /dev read-only".into())
}

/// The workload's disk.
pub(crate) fn workspace() -> Result<OwnedFd, Errno> {
    open(WORKSPACE, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Resizes `/tmp` and `/dev/shm`.
pub(crate) fn resize_tmp(bytes: u64) -> Result<(), Failure> {
    for target in ["/root/tmp", "/root/dev/shm"] {
        mount_remount(target, HARDENED, tmpfs_options(bytes, "1777").as_str())
            .doing(|| format!("resize {target} to {bytes} bytes"))?;
    }
    Ok(())
}

/// Gives the workload's disk to the user that the image names.
pub(crate) fn own_workspace(uid: u32, gid: u32) -> Result<(), Failure> {
    // All ones means "leave as it is" to the kernel, which is another user's.
    if [uid, gid].iter().any(|id| matches!(*id, 0 | u32::MAX)) {
        return Err(Failure::new(format!("{uid}:{gid} may not own /workspace")));
    }
    chown(WORKSPACE, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
        .doing(|| format!("give /workspace to {uid}:{gid}"))
}

/// Lets files on `/workspace` be executed. Runs in the workload's mount
/// namespace, since the flag belongs to its copy of the mount.
pub(crate) fn allow_workspace_exec() -> Result<(), Failure> {
    let flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    mount_remount("/workspace", flags, "").doing(|| "let files on /workspace be executed".into())
}

/// What is the workload's mount namespace's own: `/proc` for the pid namespace of the calling process, and what a root
/// service, whose files these are whatever capabilities it lacks, can only read of it: the kernel's part of `/proc`, and the
/// request socket, which nobody replaces by one that answers in the host's name.
pub(crate) fn complete() -> Result<(), Failure> {
    attach("proc", "/root/proc", "proc", HARDENED, "hidepid=invisible")?;
    let fail = || "look through the workload's /proc".to_owned();
    for entry in fs::read_dir("/root/proc").doing(fail)? {
        let entry = entry.doing(fail)?;
        let (name, about) = (entry.file_name(), entry.metadata().doing(fail)?);
        // Of a process, or a link into one.
        let of_process = name.as_encoded_bytes().first().is_some_and(u8::is_ascii_digit);
        if !of_process && (about.is_dir() || about.is_file() && about.mode() & 0o222 != 0) {
            make_read_only(&entry.path())?;
        }
    }
    make_read_only(Path::new(REQUEST_DIRECTORY))
}

/// Only in this mount namespace.
fn make_read_only(path: &Path) -> Result<(), Failure> {
    mount_bind(path, path)
        .and_then(|()| mount_remount(path, MountFlags::BIND | MountFlags::RDONLY | HARDENED, ""))
        .doing(|| format!("make {} read-only", path.display()))
}

/// Mounts, and says what it was when it fails.
pub(crate) fn attach(
    source: &str,
    target: &str,
    kind: &str,
    flags: MountFlags,
    options: &str,
) -> Result<(), Failure> {
    let options = CString::new(options).doing(|| format!("mount {target}"))?;
    mount(source, target, kind, flags, options.as_c_str())
        .doing(|| format!("mount {kind} from {source} on {target}"))
}

/// Makes a directory with exactly this mode.
pub(crate) fn make_directory(path: &str, mode: u32) -> Result<(), Failure> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).doing(|| format!("create {path}"));
        }
        _ => {}
    }
    chmod(path, Mode::from_raw_mode(mode)).doing(|| format!("set the mode of {path}"))
}

fn tmpfs_options(bytes: u64, mode: &str) -> String {
    // A size of 0 would mean "no limit" to tmpfs, and no inode at all not even a root directory.
    let bytes = bytes.max(TMP_BYTES_PER_INODE);
    let inodes = (bytes / TMP_BYTES_PER_INODE).max(64);
    format!("size={bytes},nr_inodes={inodes},mode={mode}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tmpfs_is_without_a_limit() {
        assert_eq!(tmpfs_options(0, "1777"), "size=4096,nr_inodes=64,mode=1777");
        assert_eq!(tmpfs_options(1 << 20, "0755"), "size=1048576,nr_inodes=256,mode=0755");
    }
}
