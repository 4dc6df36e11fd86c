//! Every task of the guest's kernel, by the list that the kernel keeps itself.
//!
//! One sweep reads in four steps, each for all tasks at once: the tasks, what memory and file
//! each has, and last its credentials. Last, because a process on its way from PID 1 to the
//! workload gives up its privilege first and becomes another program after: read in this
//! order, an honest one is never seen as a privileged other program.
//!
//! The list changes while it is read. A task that is taken off keeps its link to the next for
//! a while (RCU), so most sweeps come through; one that does not is an error, and whoever
//! calls reads again.

use super::memory::ReadError;
use super::space::{Gathered, Space};
use crate::kernel::{Profile, u32_at, u64_at};
use hotcell_decide::{Executable, Life, Place, Process};
use std::collections::{BTreeMap, BTreeSet};

/// Tasks that are read at most: far above `[limits] pids` and kernel threads together.
const MAX_TASKS: usize = 8192;
/// Directories from a file up to its file system's root.
const MAX_DEPTH: usize = 64;
/// Longest name of a directory entry (NAME_MAX).
const MAX_NAME: usize = 255;
/// `PF_KTHREAD` (`include/linux/sched.h`).
const KERNEL_THREAD: u32 = 0x0020_0000;
/// `MNT_NOEXEC` (`include/linux/mount.h`).
const MOUNT_NOEXEC: u32 = 0x04;
/// `SB_I_NOEXEC` (`include/linux/fs.h`).
const SB_NOEXEC: u64 = 0x02;

/// Why a sweep has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// The list changed under the reader, or makes no sense: read again.
    #[error("{0}")]
    Torn(&'static str),
    /// Memory could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// Which file systems are which, by the addresses of their super blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The initramfs.
    pub initramfs: u64,
    /// The root image.
    pub root: u64,
    /// The overlay disk.
    pub workspace: u64,
}

/// A task and where its structures lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its address.
    pub address: u64,
    /// The address of its memory's description; 0 where it has none.
    pub mm: u64,
    /// As the rules see it.
    pub process: Process,
    /// Its pid namespace for children, mount and network namespace, by address.
    pub nsproxy: u64,
}

/// Reads tasks; keeps what makes the next sweep cheap.
#[derive(Debug, Default)]
pub struct TaskReader {
    known: Vec<u64>,
    paths: BTreeMap<(u64, u64), String>,
}

/// The bytes of one task that are read, in two places.
struct Raw {
    address: u64,
    flags: u32,
    body: Vec<u8>,
    start: u32,
}

impl Raw {
    fn u32(&self, offset: u32) -> Option<u32> {
        u32_at(&self.body, offset.checked_sub(self.start)? as usize)
    }

    fn u64(&self, offset: u32) -> Option<u64> {
        u64_at(&self.body, offset.checked_sub(self.start)? as usize)
    }
}

/// The part of `task_struct` that all fields but the flags lie in.
fn body(profile: &Profile) -> (u32, u32) {
    let o = &profile.offsets;
    let ends = [
        (o.task_tasks, 16),
        (o.task_pid, 4),
        (o.task_tgid, 4),
        (o.task_comm, 16),
        (o.task_start, 8),
        (o.task_parent, 8),
        (o.task_cred, 8),
        (o.task_mm, 8),
        (o.task_exit_state, 4),
        (o.task_seccomp, 4),
        (o.task_nsproxy, 8),
        (o.task_signal, 8),
        (o.task_thread_node, 16),
    ];
    let start = ends.iter().map(|(at, _)| *at).min().unwrap_or(0);
    let end = ends.iter().map(|(at, length)| at.saturating_add(*length)).max().unwrap_or(0);
    (start, end.saturating_sub(start).min(1 << 16))
}

impl TaskReader {
    /// One sweep over every process and every thread.
    ///
    /// # Errors
    /// The list is torn, or memory can't be read.
    pub fn sweep(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        places: &Places,
    ) -> Result<Vec<Task>, SweepError> {
        let raws = self.walk(space, profile)?;
        self.known = raws.iter().map(|raw| raw.address).collect();
        self.describe(space, profile, places, &raws)
    }

    /// Follows both lists: thread groups, and the threads of those that have more than one.
    fn walk(&self, space: &Space<'_>, profile: &Profile) -> Result<Vec<Raw>, SweepError> {
        let o = &profile.offsets;
        let link = |at: u32| u64::from(at);
        let mut read = self.read_known(space, profile)?;
        let mut fetch = |address: u64| -> Result<Raw, SweepError> {
            match read.remove(&address) {
                Some(raw) => Ok(raw),
                None => one(space, profile, address),
            }
        };
        let init = space.at(profile.symbols.init_task, profile.symbols.text);
        let mut raws = vec![fetch(init)?];
        let mut seen = BTreeSet::from([init]);
        let mut next = raws.first().and_then(|raw| raw.u64(o.task_tasks));
        while let Some(node) = next {
            let address = node.wrapping_sub(link(o.task_tasks));
            if address == init {
                break;
            }
            if raws.len() >= MAX_TASKS || !seen.insert(address) {
                return Err(SweepError::Torn("the list of tasks does not end"));
            }
            let raw = fetch(address)?;
            next = raw.u64(o.task_tasks);
            raws.push(raw);
        }
        // Other threads of each group.
        let signals: Vec<(u64, usize)> = raws
            .iter()
            .map(|raw| {
                (
                    raw.u64(o.task_signal).unwrap_or(0),
                    o.signal_thread_head.max(o.signal_threads) as usize + 16,
                )
            })
            .collect();
        let signals = space.gather(&signals)?;
        let mut others = Vec::new();
        for (at, raw) in raws.iter().enumerate() {
            let Some(signal) = signals.get(at) else { continue };
            if u32_at(signal, o.signal_threads as usize).unwrap_or(1) <= 1 {
                continue;
            }
            let head = raw.u64(o.task_signal).unwrap_or(0).wrapping_add(link(o.signal_thread_head));
            let mut next = u64_at(signal, o.signal_thread_head as usize);
            while let Some(node) = next.filter(|node| *node != head) {
                let address = node.wrapping_sub(link(o.task_thread_node));
                if raws.len() + others.len() >= MAX_TASKS {
                    return Err(SweepError::Torn("the list of threads does not end"));
                }
                if address == raw.address {
                    next = raw.u64(o.task_thread_node);
                    continue;
                }
                if !seen.insert(address) {
                    return Err(SweepError::Torn("a thread is in two lists"));
                }
                let other = fetch(address)?;
                next = other.u64(o.task_thread_node);
                others.push(other);
            }
        }
        raws.append(&mut others);
        Ok(raws)
    }

    /// Reads the tasks of the last sweep with few calls; most are still there.
    fn read_known(&self, space: &Space<'_>, profile: &Profile) -> Result<BTreeMap<u64, Raw>, ReadError> {
        let (start, length) = body(profile);
        let places: Vec<(u64, usize)> = self
            .known
            .iter()
            .flat_map(|&address| {
                [
                    (address.wrapping_add(u64::from(profile.offsets.task_flags)), 4),
                    (address.wrapping_add(u64::from(start)), length as usize),
                ]
            })
            .collect();
        let read = space.gather(&places)?;
        let raw = |(index, &address): (usize, &u64)| {
            let flags = u32_at(read.get(2 * index)?, 0)?;
            Some((address, Raw { address, flags, body: read.get(2 * index + 1)?.to_vec(), start }))
        };
        Ok(self.known.iter().enumerate().filter_map(raw).collect())
    }

    fn describe(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        places: &Places,
        raws: &[Raw],
    ) -> Result<Vec<Task>, SweepError> {
        let o = &profile.offsets;
        let mms: Vec<u64> = raws.iter().map(|raw| raw.u64(o.task_mm).unwrap_or(0)).collect();
        let files = gather_at(space, &mms, o.mm_exe_file, 8)?;
        let files: Vec<u64> = (0..mms.len()).map(|at| files.u64(at, 0).unwrap_or(0)).collect();
        let executables = self.executables(space, profile, places, &files)?;
        // Credentials last, and threads' parents by one more read.
        let creds: Vec<u64> = raws.iter().map(|raw| raw.u64(o.task_cred).unwrap_or(0)).collect();
        let members = [
            o.cred_uid,
            o.cred_gid,
            o.cred_suid,
            o.cred_euid,
            o.cred_fsuid,
            o.cred_inheritable,
            o.cred_permitted,
            o.cred_effective,
            o.cred_ambient,
        ];
        let cred_bytes = members.into_iter().max().unwrap_or(0) as usize + 8;
        let fresh =
            gather_at(space, &raws.iter().map(|raw| raw.address).collect::<Vec<_>>(), o.task_cred, 8)?;
        let creds: Vec<(u64, usize)> = creds
            .iter()
            .enumerate()
            .map(|(at, old)| (fresh.u64(at, 0).unwrap_or(*old), cred_bytes))
            .collect();
        let creds = space.gather(&creds)?;
        let pids: BTreeMap<u64, i32> =
            raws.iter().map(|raw| (raw.address, raw.u32(o.task_tgid).unwrap_or(0) as i32)).collect();
        raws.iter()
            .enumerate()
            .map(|(at, raw)| {
                let torn = SweepError::Torn("a task without credentials");
                let cred = creds.get(at).ok_or(torn)?;
                let id = |offset: u32| u32_at(cred, offset as usize).unwrap_or(0);
                let set = |offset: u32| u64_at(cred, offset as usize).unwrap_or(0);
                let mm = mms.get(at).copied().unwrap_or(0);
                let kernel = raw.flags & KERNEL_THREAD != 0;
                let life = match (mm, kernel) {
                    (0, true) => Life::KernelThread,
                    (0, false) => Life::NoMemory,
                    _ => Life::Running(files.get(at).and_then(|file| executables.get(file)).cloned()),
                };
                let comm =
                    raw.body.get((o.task_comm.saturating_sub(raw.start)) as usize..).unwrap_or_default();
                let comm =
                    comm.get(..16).unwrap_or_default().split(|&byte| byte == 0).next().unwrap_or_default();
                let parent = raw.u64(o.task_parent).unwrap_or(0);
                Ok(Task {
                    address: raw.address,
                    mm,
                    nsproxy: raw.u64(o.task_nsproxy).unwrap_or(0),
                    process: Process {
                        pid: raw.u32(o.task_pid).unwrap_or(0) as i32,
                        tgid: raw.u32(o.task_tgid).unwrap_or(0) as i32,
                        parent: pids.get(&parent).copied().unwrap_or(-1),
                        start_ns: raw.u64(o.task_start).unwrap_or(0),
                        name: String::from_utf8_lossy(comm).into_owned(),
                        uids: [id(o.cred_uid), id(o.cred_euid), id(o.cred_suid), id(o.cred_fsuid)],
                        gid: id(o.cred_gid),
                        capabilities: set(o.cred_inheritable)
                            | set(o.cred_permitted)
                            | set(o.cred_effective)
                            | set(o.cred_ambient),
                        seccomp: raw.u32(o.task_seccomp).unwrap_or(0),
                        life,
                        argv: Vec::new(),
                    },
                })
            })
            .collect()
    }

    /// What each open file is that a process runs from.
    fn executables(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        places: &Places,
        files: &[u64],
    ) -> Result<BTreeMap<u64, Executable>, SweepError> {
        let o = &profile.offsets;
        let files: Vec<u64> =
            files.iter().copied().filter(|file| *file != 0).collect::<BTreeSet<_>>().into_iter().collect();
        let length = o.file_mnt.max(o.file_dentry).max(o.file_inode) as usize + 8;
        let read = space.gather(&files.iter().map(|file| (*file, length)).collect::<Vec<_>>())?;
        let pointer = |at: usize, offset: u32| read.u64(at, offset as usize).unwrap_or(0);
        let column = |offset: u32| (0..files.len()).map(|at| pointer(at, offset)).collect::<Vec<_>>();
        let (mounts, dentries, inodes) = (column(o.file_mnt), column(o.file_dentry), column(o.file_inode));
        let flags = gather_at(space, &mounts, o.vfsmount_flags, 4)?;
        let owners = gather_at(space, &inodes, o.inode_sb, 8)?;
        let supers: Vec<u64> = (0..files.len()).map(|at| owners.u64(at, 0).unwrap_or(0)).collect();
        let iflags = gather_at(space, &supers, o.sb_iflags, 8)?;
        let mut found = BTreeMap::new();
        for (at, file) in files.iter().enumerate() {
            let (Some(flags), Some(&super_block)) = (flags.get(at), supers.get(at)) else { continue };
            let Some(iflags) = iflags.u64(at, 0) else { continue };
            let (dentry, inode) =
                (dentries.get(at).copied().unwrap_or(0), inodes.get(at).copied().unwrap_or(0));
            let path = self.path(space, profile, dentry, inode)?;
            let place = if super_block == places.root {
                Place::Root
            } else if super_block == places.workspace {
                Place::Workspace
            } else if super_block == places.initramfs {
                Place::Initramfs
            } else {
                Place::Elsewhere(file_system(space, profile, super_block)?)
            };
            let noexec = u32_at(flags, 0).unwrap_or(0) & MOUNT_NOEXEC != 0 || iflags & SB_NOEXEC != 0;
            found.insert(*file, Executable { path, place, noexec });
        }
        Ok(found)
    }

    /// The path of a file on its file system. Names of a file that runs hardly ever change, so they are kept.
    fn path(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        dentry: u64,
        inode: u64,
    ) -> Result<String, SweepError> {
        if let Some(path) = self.paths.get(&(dentry, inode)) {
            return Ok(path.clone());
        }
        let path = path(space, profile, dentry)?;
        if self.paths.len() >= MAX_TASKS {
            self.paths.clear();
        }
        self.paths.insert((dentry, inode), path.clone());
        Ok(path)
    }
}

/// One task.
fn one(space: &Space<'_>, profile: &Profile, address: u64) -> Result<Raw, SweepError> {
    let (start, length) = body(profile);
    let places = [
        (address.wrapping_add(u64::from(profile.offsets.task_flags)), 4),
        (address.wrapping_add(u64::from(start)), length as usize),
    ];
    let read = space.gather(&places)?;
    match (read.get(0).and_then(|bytes| u32_at(bytes, 0)), read.get(1)) {
        (Some(flags), Some(body)) => Ok(Raw { address, flags, body: body.to_vec(), start }),
        _ => Err(SweepError::Torn("the list of tasks leads out of memory")),
    }
}

/// The same member of many structures.
pub(crate) fn gather_at(
    space: &Space<'_>,
    structures: &[u64],
    offset: u32,
    bytes: usize,
) -> Result<Gathered, ReadError> {
    let places: Vec<(u64, usize)> = structures
        .iter()
        // A null pointer leads nowhere, whatever is added to it.
        .map(|&address| (if address == 0 { 0 } else { address.wrapping_add(u64::from(offset)) }, bytes))
        .collect();
    space.gather(&places)
}

/// The path of a directory entry, from its file system's root.
pub(crate) fn path(space: &Space<'_>, profile: &Profile, mut dentry: u64) -> Result<String, SweepError> {
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
pub(crate) fn file_system(
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

/// A string of at most so many bytes.
pub(crate) fn text(space: &Space<'_>, address: u64, most: usize) -> Result<String, ReadError> {
    let mut bytes = vec![0; most];
    space.read(address, &mut bytes)?;
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(most);
    Ok(String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned())
}

/// An address that leads nowhere is torn; anything else is what it is.
pub(crate) fn nowhere(torn: impl Fn(u64) -> SweepError) -> impl Fn(ReadError) -> SweepError {
    move |error| match error {
        ReadError::Nowhere(address) => torn(address),
        error => error.into(),
    }
}

/// The arguments of a process as they stand in its memory: at most `most` bytes of them.
pub(crate) fn arguments(
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
