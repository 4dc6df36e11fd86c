//! A kernel's profile: offsets, symbols and the instructions that it changes itself.

use super::btf::Btf;
use super::elf::Elf;
use super::kallsyms::Kallsyms;
use super::{KernelError, u64_at, unpack};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

/// Largest kernel file.
const MAX_KERNEL: u64 = 256 << 20;
/// Of the cached form; another number, another file name.
const VERSION: u32 = 3;

macro_rules! offsets {
    ($($(#[$meta:meta])* $field:ident = $structure:literal . $path:literal,)+) => {
        /// Byte offsets of members in their structures.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[allow(missing_docs, reason = "each is the member that its name says")]
        pub struct Offsets { $($(#[$meta])* pub $field: u32,)+ }

        impl Offsets {
            /// `modular`: whether the kernel can load modules; one that can't has no structure for them.
            fn read(btf: &Btf<'_>, modular: bool) -> Result<Offsets, KernelError> {
                let find = |structure: &str, path: &str| match btf.offset(structure, path) {
                    Some(offset) => Ok(offset),
                    None if structure == "module" && !modular => Ok(0),
                    None => Err(KernelError::Lacks(format!("{structure}.{path}"))),
                };
                Ok(Offsets { $($field: find($structure, $path)?,)+ })
            }
        }
    };
}

offsets! {
    task_tasks = "task_struct"."tasks",
    task_flags = "task_struct"."flags",
    task_pid = "task_struct"."pid",
    task_tgid = "task_struct"."tgid",
    task_comm = "task_struct"."comm",
    task_start = "task_struct"."start_time",
    task_parent = "task_struct"."real_parent",
    task_cred = "task_struct"."cred",
    task_mm = "task_struct"."mm",
    task_exit_state = "task_struct"."exit_state",
    task_seccomp = "task_struct"."seccomp.mode",
    task_nsproxy = "task_struct"."nsproxy",
    task_signal = "task_struct"."signal",
    task_number = "task_struct"."thread_pid",
    task_exec_id = "task_struct"."self_exec_id",
    task_thread_node = "task_struct"."thread_node",
    signal_thread_head = "signal_struct"."thread_head",
    cred_uid = "cred"."uid",
    cred_gid = "cred"."gid",
    cred_suid = "cred"."suid",
    cred_euid = "cred"."euid",
    cred_fsuid = "cred"."fsuid",
    cred_inheritable = "cred"."cap_inheritable",
    cred_permitted = "cred"."cap_permitted",
    cred_effective = "cred"."cap_effective",
    cred_ambient = "cred"."cap_ambient",
    cred_user_ns = "cred"."user_ns",
    mm_exe_file = "mm_struct"."exe_file",
    mm_pgd = "mm_struct"."pgd",
    mm_arg_start = "mm_struct"."arg_start",
    mm_arg_end = "mm_struct"."arg_end",
    file_mnt = "file"."f_path.mnt",
    file_dentry = "file"."f_path.dentry",
    file_inode = "file"."f_inode",
    dentry_parent = "dentry"."d_parent",
    dentry_name = "dentry"."d_name",
    dentry_inode = "dentry"."d_inode",
    qstr_len = "qstr"."len",
    qstr_name = "qstr"."name",
    inode_ino = "inode"."i_ino",
    inode_sb = "inode"."i_sb",
    sb_dev = "super_block"."s_dev",
    sb_flags = "super_block"."s_flags",
    sb_iflags = "super_block"."s_iflags",
    sb_type = "super_block"."s_type",
    fs_name = "file_system_type"."name",
    vfsmount_flags = "vfsmount"."mnt_flags",
    vfsmount_sb = "vfsmount"."mnt_sb",
    vfsmount_root = "vfsmount"."mnt_root",
    mount_mnt = "mount"."mnt",
    mount_parent = "mount"."mnt_parent",
    mount_mountpoint = "mount"."mnt_mountpoint",
    mount_instance = "mount"."mnt_instance",
    mount_ns = "mount"."mnt_ns",
    sb_mounts = "super_block"."s_mounts",
    sb_bdev = "super_block"."s_bdev",
    bdev_disk = "block_device"."bd_disk",
    disk_state = "gendisk"."state",
    sb_list = "super_block"."s_list",
    nsproxy_uts = "nsproxy"."uts_ns",
    nsproxy_ipc = "nsproxy"."ipc_ns",
    nsproxy_mnt = "nsproxy"."mnt_ns",
    nsproxy_pid = "nsproxy"."pid_ns_for_children",
    nsproxy_net = "nsproxy"."net_ns",
    nsproxy_time = "nsproxy"."time_ns",
    nsproxy_time_for_children = "nsproxy"."time_ns_for_children",
    nsproxy_cgroup = "nsproxy"."cgroup_ns",
    pid_ns_idr = "pid_namespace"."idr.idr_rt.xa_head",
    xa_shift = "xa_node"."shift",
    xa_slots = "xa_node"."slots",
    /// Where the slots end.
    xa_marks = "xa_node"."marks",
    pid_tasks = "pid"."tasks",
    task_pid_links = "task_struct"."pid_links",
    rq_curr = "rq"."curr",
    rq_idle = "rq"."idle",
    module_list = "module"."list",
    module_name = "module"."name",
    net_list = "net"."list",
    net_devices = "net"."dev_base_head",
    device_list = "net_device"."dev_list",
    device_name = "net_device"."name",
    device_type = "net_device"."type",
}

/// Addresses as linked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "each is the kernel's symbol of its name")]
pub struct Symbols {
    pub text: u64,
    pub stext: u64,
    pub etext: u64,
    pub start_rodata: u64,
    pub end_rodata: u64,
    pub end: u64,
    pub phys_base: u64,
    pub init_top_pgt: u64,
    pub page_offset_base: u64,
    pub linux_banner: u64,
    pub init_task: u64,
    pub init_pid_ns: u64,
    /// Held for writing while a process appears or goes.
    pub tasklist_lock: u64,
    /// Of one processor, from where that one's own data begin.
    pub runqueues: u64,
    pub per_cpu_offset: u64,
    /// The list of modules; 0 in a kernel that can't load any.
    pub modules: u64,
    pub net_namespace_list: u64,
    pub super_blocks: u64,
    pub idt_table: u64,
    pub sys_call_table: u64,
    /// Where the processor enters for a system call.
    pub entry_syscall: u64,
}

/// A branch that the kernel turns on and off by changing an instruction (`Documentation/staging/static-keys.rst`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JumpEntry {
    /// Address of the instruction, from the start of the text.
    pub code: u32,
    /// Where it jumps to if it does.
    pub target: u32,
}

/// All that is known of one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Fields of structures.
    pub offsets: Offsets,
    /// Addresses.
    pub symbols: Symbols,
    /// Its version line, which lies in its read-only data.
    pub banner: String,
    /// Its switched branches, ascending.
    pub jumps: Vec<JumpEntry>,
    /// Calls and trampolines whose target it switches, ascending, from the start of the text.
    pub calls: Vec<u32>,
    /// Functions, ascending, from the start of the text: what a switched call may go to.
    pub functions: Vec<u32>,
}

impl Profile {
    /// The profile of this kernel file: from the cache folder, or made and put there.
    ///
    /// # Errors
    /// The kernel does not say what must be known of it. That a profile can't be kept is none.
    pub fn load(kernel: &File, digest: &str, cache: &Path) -> Result<Profile, KernelError> {
        let folder = cache.join("kernel-profiles");
        let kept = folder.join(format!("v{VERSION}-{digest}.json"));
        if let Some(profile) = fs::read(&kept).ok().and_then(|bytes| Profile::from_kept(&bytes)) {
            return Ok(profile);
        }
        let mut image = Vec::new();
        let mut file = kernel;
        std::io::Seek::rewind(&mut file)?;
        file.take(MAX_KERNEL).read_to_end(&mut image)?;
        let profile = Profile::read(image)?;
        // Another run may write it at the same time: each writes its own and renames.
        if fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).is_ok() {
            let own = folder.join(format!(".{digest}-{}", std::process::id()));
            let written = fs::write(&own, profile.to_kept()).and_then(|()| fs::rename(&own, &kept));
            if written.is_err() {
                let _ = fs::remove_file(&own);
            }
        }
        Ok(profile)
    }

    /// A kept profile is the operator's own file; the digest before it finds a file that was cut short.
    fn from_kept(bytes: &[u8]) -> Option<Profile> {
        let (digest, json) = bytes.split_first_chunk::<32>()?;
        if blake3::hash(json).as_bytes() != digest {
            return None;
        }
        serde_json::from_slice(json).ok()
    }

    fn to_kept(&self) -> Vec<u8> {
        // Numbers and texts: nothing that JSON can't say.
        let json = serde_json::to_vec(self).unwrap_or_default();
        [blake3::hash(&json).as_bytes().as_slice(), &json].concat()
    }

    /// Makes the profile of a kernel image, a bzImage or an ELF file.
    ///
    /// # Errors
    /// It does not say what must be known of it.
    pub fn read(image: Vec<u8>) -> Result<Profile, KernelError> {
        let vmlinux = unpack::vmlinux(image)?;
        let elf =
            Elf::read(&vmlinux).ok_or(KernelError::NotBzImage("what is in it is no ELF file for x86-64"))?;
        let btf =
            elf.section(".BTF").and_then(|section| Btf::read(section.bytes)).ok_or(KernelError::NoBtf)?;
        let text = elf.section(".text").ok_or(KernelError::NoSymbols)?;
        let rodata = elf.section(".rodata").ok_or(KernelError::NoSymbols)?;
        let symbols = Kallsyms::read(rodata.bytes, text.address).ok_or(KernelError::NoSymbols)?;
        let modules = symbols.address("modules").unwrap_or(0);
        let offsets = Offsets::read(&btf, modules != 0)?;
        let address =
            |name: &str| symbols.address(name).ok_or_else(|| KernelError::Lacks(format!("symbol {name}")));
        let own = Symbols {
            text: address("_text").or_else(|_| address("_stext"))?,
            stext: address("_stext")?,
            etext: address("_etext")?,
            start_rodata: address("__start_rodata")?,
            end_rodata: address("__end_rodata")?,
            end: address("_end")?,
            phys_base: address("phys_base")?,
            init_top_pgt: address("init_top_pgt").or_else(|_| address("swapper_pg_dir"))?,
            page_offset_base: address("page_offset_base")?,
            linux_banner: address("linux_banner")?,
            init_task: address("init_task")?,
            init_pid_ns: address("init_pid_ns")?,
            tasklist_lock: address("tasklist_lock")?,
            runqueues: address("runqueues")?,
            per_cpu_offset: address("__per_cpu_offset")?,
            modules,
            net_namespace_list: address("net_namespace_list")?,
            super_blocks: address("super_blocks")?,
            idt_table: address("idt_table")?,
            sys_call_table: address("sys_call_table")?,
            entry_syscall: address("entry_SYSCALL_64")?,
        };
        let banner = elf
            .at(own.linux_banner, 512)
            .and_then(|bytes| bytes.split(|&byte| byte == 0).next())
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
            .filter(|banner| banner.starts_with("Linux version "))
            .ok_or_else(|| KernelError::Lacks("version line".into()))?;
        let from_text = |address: u64| {
            let inside = address.checked_sub(own.text).filter(|_| address < own.etext)?;
            u32::try_from(inside).ok()
        };
        // Both tables hold addresses relative to where they themselves lie.
        let relative = |at: u64, bytes: &[u8]| {
            let offset = super::u32_at(bytes, 0)? as i32;
            Some(at.wrapping_add(i64::from(offset) as u64))
        };
        let table = |start: &str, stop: &str| {
            let (start, stop) = (symbols.address(start)?, symbols.address(stop)?);
            let length = usize::try_from(stop.checked_sub(start)?).ok()?;
            Some((start, elf.at(start, length)?))
        };
        let mut jumps = Vec::new();
        if let Some((start, bytes)) = table("__start___jump_table", "__stop___jump_table") {
            for (at, entry) in (start..).step_by(16).zip(bytes.chunks_exact(16)) {
                let code = relative(at, entry);
                let target = entry.get(4..).and_then(|entry| relative(at + 4, entry));
                if let (Some(code), Some(target)) = (code.and_then(from_text), target.and_then(from_text)) {
                    jumps.push(JumpEntry { code, target });
                }
            }
        }
        jumps.sort_unstable_by_key(|entry| entry.code);
        let mut calls: Vec<u32> = Vec::new();
        if let Some((start, bytes)) = table("__start_static_call_sites", "__stop_static_call_sites") {
            for (at, entry) in (start..).step_by(8).zip(bytes.chunks_exact(8)) {
                calls.extend(relative(at, entry).and_then(from_text));
            }
        }
        let trampolines =
            symbols.by_name.range(b"__SCT__".to_vec()..).take_while(|(name, _)| name.starts_with(b"__SCT__"));
        calls.extend(trampolines.filter_map(|(_, address)| from_text(*address)));
        calls.sort_unstable();
        calls.dedup();
        let functions = symbols.text.iter().filter_map(|address| from_text(*address)).collect();
        if jumps.is_empty() && u64_at(rodata.bytes, 0).is_none() {
            return Err(KernelError::NoSymbols);
        }
        Ok(Profile { offsets, symbols: own, banner, jumps, calls, functions })
    }
}
