//! `dir:PATH`: a folder of the host becomes the root.
//!
//! Opened step by step with descriptors, links never followed, so that a folder
//! that changes meanwhile can't lead out of itself. Everything is root's: whoever
//! checked the folder out owns it on the host, which says nothing about the image.

use crate::error::{ImageError, at};
use crate::progress::Progress;
use crate::stage::{Meta, Stage, refuse};
use rustix::fs::{Dir, FileType, Mode, OFlags, fstat, openat, readlinkat};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

pub(crate) fn apply(stage: &mut Stage, path: &Path, progress: &mut dyn Progress) -> Result<(), ImageError> {
    stage.next_layer()?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| at(path)(errno.into()))?;
    walk(stage, &root, &mut Vec::new(), progress)
}

fn walk(
    stage: &mut Stage,
    dir: &OwnedFd,
    here: &mut Vec<u8>,
    progress: &mut dyn Progress,
) -> Result<(), ImageError> {
    let fault =
        |here: &[u8], errno: rustix::io::Errno| refuse(&String::from_utf8_lossy(here), errno.to_string());
    let mut names = Vec::new();
    for entry in Dir::read_from(dir).map_err(|errno| fault(here, errno))? {
        let entry = entry.map_err(|errno| fault(here, errno))?;
        let name = entry.file_name();
        if name.to_bytes() != b"." && name.to_bytes() != b".." {
            // Counted when listed: a folder of a million names is not kept first.
            stage.count()?;
            names.push(name.to_owned());
        }
    }
    names.sort();
    for name in names {
        let back = here.len();
        here.push(b'/');
        here.extend(name.to_bytes());
        let path = stage.name(here)?;
        // O_PATH tells what it is without opening a FIFO or a device.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let handle = openat(dir, &name, flags, Mode::empty()).map_err(|errno| fault(here, errno))?;
        let stat = fstat(&handle).map_err(|errno| fault(here, errno))?;
        let meta = Meta { mode: stat.st_mode & 0o7777, uid: 0, gid: 0, mtime: stat.st_mtime as u64 };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                stage.directory(&path, meta)?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let below = openat(dir, &name, flags, Mode::empty()).map_err(|errno| fault(here, errno))?;
                walk(stage, &below, here, progress)?;
            }
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = openat(dir, &name, flags, Mode::empty()).map_err(|errno| fault(here, errno))?;
                let stat = fstat(file.as_fd()).map_err(|errno| fault(here, errno))?;
                let size = u64::try_from(stat.st_size).unwrap_or_default();
                let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
                if !is_file || size > stage.bytes_left() {
                    return Err(refuse(path.as_str(), "it is too large, or changed meanwhile".into()));
                }
                stage.spend_bytes(size);
                stage.file(&path, meta, size, File::from(file))?;
                progress.bytes(size, None);
            }
            FileType::Symlink => {
                let target = readlinkat(dir, &name, Vec::new()).map_err(|errno| fault(here, errno))?;
                stage.symlink(&path, target.as_bytes(), meta)?;
            }
            FileType::CharacterDevice | FileType::BlockDevice => stage.leave_out("device nodes"),
            FileType::Fifo => stage.leave_out("FIFOs"),
            FileType::Socket => stage.leave_out("sockets"),
            FileType::Unknown => return Err(refuse(path.as_str(), "it is of an unknown kind".into())),
        }
        here.truncate(back);
    }
    Ok(())
}
