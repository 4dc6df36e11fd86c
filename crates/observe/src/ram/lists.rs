//! The kernel's lists of modules, network devices, file systems and their mounts.

use super::files::{file_system, path};
use super::memory::ReadError;
use super::space::Space;
use super::tasks::{SweepError, nowhere, text};
use crate::kernel::{Profile, u32_at};

/// Nodes of one list at most: a guest of ours has some ten modules, thirty file systems and one network device.
const MAX_NODES: usize = 512;
/// `MODULE_NAME_LEN` is 64 less a pointer; `IFNAMSIZ` is 16.
const MAX_NAME: usize = 64;
/// `ARPHRD_LOOPBACK` (`include/uapi/linux/if_arp.h`).
const LOOPBACK: u32 = 772;
/// `SB_RDONLY` (`include/linux/fs.h`).
const SB_READ_ONLY: u64 = 1;
/// `MNT_READONLY` (`include/linux/mount.h`).
const MOUNT_READ_ONLY: u32 = 0x40;
/// Bit `GD_READ_ONLY` of `gendisk.state` (`include/linux/blkdev.h`): set where the device itself says so.
const DISK_READ_ONLY: u64 = 1 << 1;

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetDevice {
    /// Its name.
    pub name: String,
    /// Whether it is a loopback device.
    pub loopback: bool,
}

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// The address of its super block.
    pub super_block: u64,
    /// Its type.
    pub kind: String,
    /// Whether it is mounted read-only as a whole.
    pub read_only: bool,
    /// Whether its disk says that it can't be written; `None` where it has no disk.
    pub disk_read_only: Option<bool>,
    /// Its mounts.
    pub mounts: Vec<Mount>,
}

/// A mount of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Its address.
    pub address: u64,
    /// Where, from the root of the file system that it is mounted on.
    pub path: String,
    /// Its flags.
    pub flags: u32,
    /// The address of its mount namespace; one of the kernel's own has none.
    pub namespace: u64,
}

/// What a mount forbids.
const RESTRICTIONS: [(u32, &str); 4] =
    [(0x01, "nosuid"), (0x02, "nodev"), (0x04, "noexec"), (MOUNT_READ_ONLY, "ro")];

impl Mount {
    /// Whether it is in a namespace. The kernel's own have a null or an error there.
    fn is_attached(&self) -> bool {
        const MAX_ERROR: u64 = 4095;
        self.namespace != 0 && self.namespace < 0u64.wrapping_sub(MAX_ERROR)
    }
}

/// What is mounted now and was not, or not so freely, at ready: the mount, and what is wrong with it. That the root stays
/// read-only is a rule of its own.
pub fn mount_changes(ready: &[FileSystem], now: &[FileSystem], root: u64) -> Vec<(String, String)> {
    let find = |address: u64, path: &str| {
        let mounts = ready.iter().flat_map(|one| one.mounts.iter().map(move |mount| (one, mount)));
        mounts.into_iter().find(|(_, mount)| mount.address == address && mount.path == path)
    };
    let mut changes = Vec::new();
    for one in now {
        for mount in one.mounts.iter().filter(|mount| mount.is_attached()) {
            let subject = || format!("{} on {}", one.kind, mount.path);
            match find(mount.address, &mount.path).filter(|(before, _)| before.super_block == one.super_block)
            {
                None => changes.push((subject(), "it was not mounted at ready".into())),
                Some((before, was)) => {
                    let own_rule = |flag: u32| one.super_block == root && flag == MOUNT_READ_ONLY;
                    let is_lost =
                        |flag: u32| was.flags & flag != 0 && mount.flags & flag == 0 && !own_rule(flag);
                    let lost = RESTRICTIONS.iter().filter(|(flag, _)| is_lost(*flag));
                    let mut lost: Vec<&str> = lost.map(|(_, name)| *name).collect();
                    if before.read_only && !one.read_only && one.super_block != root {
                        lost.push("ro of the file system");
                    }
                    if !lost.is_empty() {
                        changes.push((subject(), format!("it is no longer {}", lost.join(", "))));
                    }
                }
            }
        }
    }
    changes
}

impl FileSystem {
    /// Whether something of it may be written.
    pub fn is_writable(&self) -> bool {
        !self.read_only || self.mounts.iter().any(|mount| mount.flags & MOUNT_READ_ONLY == 0)
    }
}

/// The structures on a list whose head is at `head` and whose links are `link` bytes into each.
fn list(space: &Space<'_>, head: u64, link: u32, what: &'static str) -> Result<Vec<u64>, SweepError> {
    let torn = |_| SweepError::Torn(what);
    let mut nodes = Vec::new();
    let mut node = space.u64(head).map_err(nowhere(torn))?;
    while node != head {
        if nodes.len() >= MAX_NODES {
            return Err(SweepError::Torn(what));
        }
        nodes.push(node.wrapping_sub(u64::from(link)));
        node = space.u64(node).map_err(nowhere(torn))?;
    }
    Ok(nodes)
}

/// Names of the loaded modules, newest first.
///
/// # Errors
/// The list is torn, or memory can't be read.
pub(super) fn modules(space: &Space<'_>, profile: &Profile) -> Result<Vec<String>, SweepError> {
    if profile.symbols.modules == 0 {
        return Ok(Vec::new());
    }
    let (o, head) = (&profile.offsets, space.at(profile.symbols.modules, profile.symbols.text));
    let all = list(space, head, o.module_list, "the list of modules does not end")?;
    let torn = |_| SweepError::Torn("a module leads out of memory");
    all.into_iter()
        .map(|module| {
            text(space, module.wrapping_add(u64::from(o.module_name)), MAX_NAME - 8).map_err(nowhere(torn))
        })
        .collect()
}

/// The network devices of every network namespace.
///
/// # Errors
/// The list is torn, or memory can't be read.
pub fn net_devices(space: &Space<'_>, profile: &Profile) -> Result<Vec<NetDevice>, SweepError> {
    let (o, head) = (&profile.offsets, space.at(profile.symbols.net_namespace_list, profile.symbols.text));
    let torn = |_| SweepError::Torn("a network device leads out of memory");
    let mut found = Vec::new();
    for net in list(space, head, o.net_list, "the list of network namespaces does not end")? {
        let head = net.wrapping_add(u64::from(o.net_devices));
        for device in list(space, head, o.device_list, "the list of network devices does not end")? {
            let name =
                text(space, device.wrapping_add(u64::from(o.device_name)), 16).map_err(nowhere(torn))?;
            let mut kind = [0; 2];
            space.read(device.wrapping_add(u64::from(o.device_type)), &mut kind).map_err(nowhere(torn))?;
            if found.len() >= MAX_NODES {
                return Err(SweepError::Torn("the lists of network devices do not end"));
            }
            found.push(NetDevice { name, loopback: u32::from(u16::from_le_bytes(kind)) == LOOPBACK });
        }
    }
    Ok(found)
}

/// Every mounted file system.
///
/// # Errors
/// A list is torn, or memory can't be read.
pub(super) fn file_systems(space: &Space<'_>, profile: &Profile) -> Result<Vec<FileSystem>, SweepError> {
    let (o, head) = (&profile.offsets, space.at(profile.symbols.super_blocks, profile.symbols.text));
    let all = list(space, head, o.sb_list, "the list of file systems does not end")?;
    all.into_iter().map(|super_block| one(space, profile, super_block)).collect()
}

/// One mounted file system.
///
/// # Errors
/// A list is torn, or memory can't be read.
fn one(space: &Space<'_>, profile: &Profile, super_block: u64) -> Result<FileSystem, SweepError> {
    let o = &profile.offsets;
    let torn = |_| SweepError::Torn("a file system leads out of memory");
    let number =
        |address: u64, offset: u32| space.u64(address.wrapping_add(u64::from(offset))).map_err(nowhere(torn));
    let head = super_block.wrapping_add(u64::from(o.sb_mounts));
    let mut mounts = Vec::new();
    for mount in list(space, head, o.mount_instance, "the list of mounts does not end")? {
        let mut flags = [0; 4];
        let own = mount.wrapping_add(u64::from(o.mount_mnt)).wrapping_add(u64::from(o.vfsmount_flags));
        space.read(own, &mut flags).map_err(nowhere(torn))?;
        let point = number(mount, o.mount_mountpoint)?;
        mounts.push(Mount {
            address: mount,
            path: path(space, profile, point)?,
            flags: u32_at(&flags, 0).unwrap_or(0),
            namespace: number(mount, o.mount_ns)?,
        });
    }
    let disk_read_only = match number(super_block, o.sb_bdev)? {
        0 => None,
        device => {
            let disk = number(device, o.bdev_disk)?;
            Some(number(disk, o.disk_state)? & DISK_READ_ONLY != 0)
        }
    };
    Ok(FileSystem {
        super_block,
        kind: file_system(space, profile, super_block)?,
        read_only: number(super_block, o.sb_flags)? & SB_READ_ONLY != 0,
        disk_read_only,
        mounts,
    })
}

/// Whether the host can't read at all, so that reading again is in vain.
pub(super) fn is_final(error: &SweepError) -> bool {
    matches!(error, SweepError::Read(ReadError::Gone | ReadError::Host(_)))
}
