//! The files that processes run from, and what lies in a process's own memory.

use super::memory::ReadError;
use super::space::{Gathered, Space};
use super::tasks::{MAX_TASKS, Places, SweepError, nowhere, text};
use crate::kernel::{Profile, u32_at};
use hotcell_decide::{Executable, Place};
use std::collections::{BTreeMap, HashMap};

/// Directories from a file up to its file system's root.
const MAX_DEPTH: usize = 64;
/// Longest name of a directory entry (NAME_MAX).
const MAX_NAME: usize = 255;
/// `MNT_NOEXEC` (`include/linux/mount.h`).
const MOUNT_NOEXEC: u32 = 0x04;
/// `SB_I_NOEXEC` (`include/linux/fs.h`).
const SB_NOEXEC: u64 = 0x02;

/// What is read of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileFacts {
    dentry: u64,
    inode: u64,
    super_block: u64,
    noexec: bool,
}

/// Reads the files that processes run from; keeps their names, which hardly ever change while they run.
#[derive(Debug, Default)]
pub(super) struct Files {
    paths: BTreeMap<(u64, u64), String>,
    small: Gathered,
}

impl Files {
    /// What each of these open files is; one that leads nowhere is not there.
    pub(super) fn read(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        files: &[u64],
    ) -> Result<HashMap<u64, FileFacts>, SweepError> {
        let o = &profile.offsets;
        let files = distinct(files.iter().copied());
        let small = &mut self.small;
        let start = o.file_mnt.min(o.file_dentry).min(o.file_inode);
        let bytes = (o.file_mnt.max(o.file_dentry).max(o.file_inode) - start) as usize + 8;
        space.gather_again(files.iter().map(|file| (file.wrapping_add(u64::from(start)), bytes)), small)?;
        let column = |offset: u32| -> Vec<u64> {
            (0..files.len()).map(|at| small.u64(at, (offset - start) as usize).unwrap_or(0)).collect()
        };
        let (mounts, dentries, inodes) = (column(o.file_mnt), column(o.file_dentry), column(o.file_inode));
        let flags = members(space, small, &mounts, o.vfsmount_flags, 4)?;
        let owners = members(space, small, &inodes, o.inode_sb, 8)?;
        let supers: Vec<u64> = inodes.iter().map(|inode| owners.get(inode).copied().unwrap_or(0)).collect();
        let iflags = members(space, small, &supers, o.sb_iflags, 8)?;
        let facts = files.iter().zip(mounts).zip(dentries.into_iter().zip(inodes)).zip(supers);
        let facts = facts.filter_map(|(((file, mount), (dentry, inode)), super_block)| {
            let (flags, iflags) = (*flags.get(&mount)?, *iflags.get(&super_block)?);
            let noexec = flags as u32 & MOUNT_NOEXEC != 0 || iflags & SB_NOEXEC != 0;
            Some((*file, FileFacts { dentry, inode, super_block, noexec }))
        });
        Ok(facts.collect())
    }

    /// A file as the rules see it.
    pub(super) fn describe(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        places: &Places,
        file: &FileFacts,
    ) -> Result<Executable, SweepError> {
        let path = match self.paths.get(&(file.dentry, file.inode)) {
            Some(path) => path.clone(),
            None => {
                let path = path(space, profile, file.dentry)?;
                if self.paths.len() >= MAX_TASKS {
                    self.paths.clear();
                }
                self.paths.insert((file.dentry, file.inode), path.clone());
                path
            }
        };
        let place = if file.super_block == places.root {
            Place::Root
        } else if file.super_block == places.workspace {
            Place::Workspace
        } else if file.super_block == places.initramfs {
            Place::Initramfs
        } else {
            Place::Elsewhere(file_system(space, profile, file.super_block)?)
        };
        Ok(Executable { path, place, noexec: file.noexec })
    }
}

/// Each address once, without the null pointer, which leads nowhere whatever is added to it.
fn distinct(addresses: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut all: Vec<u64> = addresses.filter(|address| *address != 0).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The same member of many structures, by the structure's address.
pub(super) fn members(
    space: &Space<'_>,
    small: &mut Gathered,
    structures: &[u64],
    offset: u32,
    bytes: usize,
) -> Result<HashMap<u64, u64>, SweepError> {
    let structures = distinct(structures.iter().copied());
    let places = structures.iter().map(|address| (address.wrapping_add(u64::from(offset)), bytes));
    space.gather_again(places, small)?;
    let number = |at: usize| match small.get(at)? {
        held if bytes == 4 => u32_at(held, 0).map(u64::from),
        _ => small.u64(at, 0),
    };
    Ok(structures.iter().enumerate().filter_map(|(at, address)| Some((*address, number(at)?))).collect())
}

/// The path of a directory entry, from its file system's root.
pub(super) fn path(space: &Space<'_>, profile: &Profile, mut dentry: u64) -> Result<String, SweepError> {
    let o = &profile.offsets;
    let torn = |_| SweepError::Torn("a path leads out of memory");
    let mut parts: Vec<String> = Vec::new();
    for _ in 0..MAX_DEPTH {
        let parent = space.u64(dentry.wrapping_add(u64::from(o.dentry_parent))).map_err(nowhere(torn))?;
        if parent == dentry {
            parts.reverse();
            return Ok(format!("/{}", parts.join("/")));
        }
        let name = dentry.wrapping_add(u64::from(o.dentry_name));
        let length =
            space.u64(name.wrapping_add(u64::from(o.qstr_len))).map_err(nowhere(torn))? as u32 as usize;
        let pointer = space.u64(name.wrapping_add(u64::from(o.qstr_name))).map_err(nowhere(torn))?;
        if length > MAX_NAME {
            return Err(SweepError::Torn("a name without end"));
        }
        let mut bytes = vec![0; length];
        space.read(pointer, &mut bytes).map_err(nowhere(torn))?;
        parts.push(String::from_utf8_lossy(&bytes).into_owned());
        dentry = parent;
    }
    Err(SweepError::Torn("a path without end"))
}

/// The type of a file system.
pub(super) fn file_system(
    space: &Space<'_>,
    profile: &Profile,
    super_block: u64,
) -> Result<String, SweepError> {
    let o = &profile.offsets;
    let torn = |_| SweepError::Torn("a file system without a type");
    let kind = space.u64(super_block.wrapping_add(u64::from(o.sb_type))).map_err(nowhere(torn))?;
    let name = space.u64(kind.wrapping_add(u64::from(o.fs_name))).map_err(nowhere(torn))?;
    text(space, name, 32).map_err(nowhere(torn))
}

/// The arguments of a process as they stand in its memory: at most `most` bytes of them.
pub(super) fn arguments(
    space: &Space<'_>,
    profile: &Profile,
    mm: u64,
    most: usize,
) -> Result<Vec<String>, ReadError> {
    let o = &profile.offsets;
    let member = |offset: u32| space.u64(mm.wrapping_add(u64::from(offset)));
    let found = (|| {
        let (start, end) = (member(o.mm_arg_start)?, member(o.mm_arg_end)?);
        let tables = space.physical(member(o.mm_pgd)?)?;
        let length = usize::try_from(end.saturating_sub(start)).unwrap_or(most).min(most);
        space.user(tables, start, length)
    })();
    match found {
        Ok(bytes) => {
            let words = bytes.strip_suffix(b"\0").unwrap_or(&bytes).split(|&byte| byte == 0);
            Ok(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect())
        }
        Err(ReadError::Nowhere(_)) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}
