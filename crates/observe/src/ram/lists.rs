//! The kernel's lists of modules, network devices, file systems and their mounts.

use super::memory::ReadError;
use super::space::Space;
use super::tasks::{SweepError, file_system, nowhere, path, text};
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
    /// Each mount: where, from the root of the file system that it is mounted on, and its flags.
    pub mounts: Vec<(String, u32)>,
}

impl FileSystem {
    /// Whether something of it may be written.
    pub fn is_writable(&self) -> bool {
        !self.read_only || self.mounts.iter().any(|(_, flags)| flags & MOUNT_READ_ONLY == 0)
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
pub(super) fn one(space: &Space<'_>, profile: &Profile, super_block: u64) -> Result<FileSystem, SweepError> {
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
        mounts.push((path(space, profile, point)?, u32_at(&flags, 0).unwrap_or(0)));
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
