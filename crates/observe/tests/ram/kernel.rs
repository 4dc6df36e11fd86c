//! A kernel's memory made by hand: every structure where a made-up profile says.

use hotcell_observe::kernel::{JumpEntry, Offsets, Profile, Symbols};
use hotcell_observe::ram::{Mapping, Places, ReadError, Region, Source, locate};
use hotcell_sys::host::Range;

pub(crate) const DIRECT: u64 = 0xffff_8880_0000_0000;
pub(crate) const TEXT: u64 = 0xffff_ffff_8120_0000;
pub(crate) const LINKED: u64 = 0xffff_ffff_8100_0000;
pub(crate) const PHYSICAL: u64 = 0x20_0000;
pub(crate) const BYTES: usize = 0x60_0000;

/// Guest memory in a vector.
pub(crate) struct Memory {
    pub(crate) bytes: Vec<u8>,
    pub(crate) regions: Vec<Region>,
    /// An address outside leads to one inside, so that hostile pointers lead somewhere.
    pub(crate) wraps: bool,
    /// Pages that the VMM has of its own; `None`: the host does not tell.
    pub(crate) own: Option<Vec<u64>>,
}

impl Source for Memory {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn read(&self, ranges: &[Range], into: &mut [u8]) -> Result<(), ReadError> {
        let mut at = 0;
        for range in ranges {
            for inside in 0..range.bytes {
                let from = range.address as usize + inside;
                let from = if self.wraps { from % self.bytes.len() } else { from };
                into[at] = self.bytes[from];
                at += 1;
            }
        }
        Ok(())
    }

    fn own_pages(&self, address: u64, pages: usize) -> Option<Vec<bool>> {
        let own = self.own.as_ref()?;
        Some((0..pages as u64).map(|page| own.contains(&(address / 4096 + page))).collect())
    }
}

/// Offsets eight apart in structures of 1 KiB, so that none overlaps another.
pub(crate) fn profile() -> Profile {
    let json = serde_json::to_value(Offsets::default()).unwrap();
    let names: Vec<String> = json.as_object().unwrap().keys().cloned().collect();
    let spread: serde_json::Map<String, serde_json::Value> =
        names.iter().zip(0..).map(|(name, at)| (name.clone(), (16 + at * 16).into())).collect();
    let mut offsets: Offsets = serde_json::from_value(spread.into()).unwrap();
    // Names at the start of what holds them, and lists as deep as they are.
    (offsets.qstr_len, offsets.qstr_name) = (4, 8);
    // A node of the table of pids has 64 slots.
    offsets.xa_marks = offsets.xa_slots + 64 * 8;
    let at = |inside: u64| LINKED + inside;
    let symbols = Symbols {
        text: LINKED,
        stext: LINKED,
        etext: at(0x2_0000),
        start_rodata: at(0x2_0000),
        end_rodata: at(0x3_0000),
        end: at(0x10_0000),
        phys_base: at(0x4_0000),
        init_top_pgt: at(0x5_0000),
        page_offset_base: at(0x4_0008),
        linux_banner: at(0x2_0100),
        init_task: at(0x6_0000),
        init_pid_ns: at(0x7_0000),
        tasklist_lock: at(0x7_4000),
        runqueues: 0x2_0000,
        per_cpu_offset: at(0x7_5000),
        modules: at(0x7_1000),
        net_namespace_list: at(0x7_2000),
        super_blocks: at(0x7_3000),
        idt_table: at(0x8_0000),
        sys_call_table: at(0x2_1000),
        entry_syscall: at(0x1000),
    };
    Profile {
        offsets,
        symbols,
        banner: "Linux version 6.1.0-test (test) #1\n".into(),
        jumps: vec![JumpEntry { code: 0x100, target: 0x180 }, JumpEntry { code: 0x1_fffd, target: 0x200 }],
        calls: vec![0x300],
        functions: vec![0x400, 0x800],
    }
}

/// A kernel that runs, with one task more than it has to.
pub(crate) struct Kernel {
    pub(crate) memory: Memory,
    pub(crate) profile: Profile,
}

impl Kernel {
    pub(crate) fn new(levels: u32) -> Kernel {
        let regions = vec![Region { guest: 0, host: 0, bytes: BYTES as u64 }];
        let memory = Memory { bytes: vec![0; BYTES], regions, wraps: false, own: None };
        let mut kernel = Kernel { memory, profile: profile() };
        let symbols = kernel.profile.symbols.clone();
        let banner = kernel.profile.banner.clone();
        kernel.put(kernel.image(symbols.linux_banner), banner.as_bytes());
        // phys_base: what must be added to an address less the start of the map.
        kernel.number(kernel.image(symbols.phys_base), PHYSICAL.wrapping_sub(TEXT - 0xffff_ffff_8000_0000));
        kernel.number(kernel.image(symbols.page_offset_base), DIRECT);
        kernel.tables(kernel.image(symbols.init_top_pgt), levels);
        for head in [symbols.modules, symbols.net_namespace_list, symbols.super_blocks] {
            kernel.empty_list(kernel.image(head), TEXT + (head - LINKED));
        }
        let init = kernel.image(symbols.init_task);
        let comm = u64::from(kernel.profile.offsets.task_comm);
        kernel.put(init + comm, b"swapper/0");
        kernel.number(init + u64::from(kernel.profile.offsets.task_cred), TEXT + 0x9_0000);
        let links = u64::from(kernel.profile.offsets.task_tasks);
        kernel.empty_list(init + links, TEXT + (symbols.init_task - LINKED) + links);
        kernel
    }

    /// Where something of the image lies.
    pub(crate) fn image(&self, linked: u64) -> u64 {
        linked - LINKED + PHYSICAL
    }

    pub(crate) fn put(&mut self, physical: u64, bytes: &[u8]) {
        self.memory.bytes[physical as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn number(&mut self, physical: u64, number: u64) {
        self.put(physical, &number.to_le_bytes());
    }

    pub(crate) fn empty_list(&mut self, physical: u64, address: u64) {
        self.number(physical, address);
    }

    /// Page tables that map the image and the direct map's first GiB with large pages.
    pub(crate) fn tables(&mut self, root: u64, levels: u32) {
        let mut next = 0x40_0000;
        for address in [TEXT, DIRECT] {
            let mut table = root;
            for level in (3..=levels).rev() {
                let at = table + ((address >> (12 + 9 * (level - 1))) & 0x1ff) * 8;
                let held = u64::from_le_bytes(self.memory.bytes[at as usize..][..8].try_into().unwrap());
                table = if held & 1 == 1 { held & !0xfff } else { next };
                if held & 1 == 0 {
                    self.number(at, next | 1);
                    next += 0x1000;
                }
            }
            let pages: Vec<(u64, u64)> = match address {
                TEXT => vec![(TEXT, PHYSICAL)],
                _ => (0..3).map(|page| (DIRECT + (page << 21), page << 21)).collect(),
            };
            for (address, physical) in pages {
                self.number(table + ((address >> 21) & 0x1ff) * 8, physical | 1 | 1 << 7);
            }
        }
    }

    pub(crate) fn mapping(&self) -> Mapping {
        locate(&self.memory, &self.profile).unwrap()
    }

    /// Adds a task behind the first; gives its address.
    pub(crate) fn task(&mut self, at: u64, pid: u32, uid: u32) -> u64 {
        let o = self.profile.offsets.clone();
        let address = DIRECT + at;
        let init = self.image(self.profile.symbols.init_task);
        let links = u64::from(o.task_tasks);
        let head = TEXT + (self.profile.symbols.init_task - LINKED) + links;
        let behind =
            u64::from_le_bytes(self.memory.bytes[(init + links) as usize..][..8].try_into().unwrap());
        self.number(init + links, address + links);
        self.number(at + links, behind);
        self.number(at + links + 8, head);
        if behind != head {
            self.number(behind - DIRECT + 8, address + links);
        }
        // A thread group of one, in a structure that the list of its threads goes through.
        let signal = DIRECT + at + 0x7c00;
        self.number(at + u64::from(o.task_signal), signal);
        for side in [0, 8] {
            self.number(at + u64::from(o.task_thread_node) + side, signal + u64::from(o.signal_thread_head));
        }
        self.put(at + u64::from(o.task_pid), &pid.to_le_bytes());
        self.put(at + u64::from(o.task_tgid), &pid.to_le_bytes());
        self.put(at + u64::from(o.task_comm), b"sh\0");
        let (cred, mm, file) = (at + 0x1000, at + 0x2000, at + 0x3000);
        self.number(at + u64::from(o.task_cred), DIRECT + cred);
        for offset in [o.cred_uid, o.cred_euid, o.cred_suid, o.cred_fsuid] {
            self.put(cred + u64::from(offset), &uid.to_le_bytes());
        }
        self.number(at + u64::from(o.task_mm), DIRECT + mm);
        self.number(mm + u64::from(o.mm_exe_file), DIRECT + file);
        let (mount, dentry, inode, super_block) = (at + 0x4000, at + 0x5000, at + 0x6000, 0x30_0000);
        self.number(file + u64::from(o.file_mnt), DIRECT + mount);
        self.number(file + u64::from(o.file_dentry), DIRECT + dentry);
        self.number(file + u64::from(o.file_inode), DIRECT + inode);
        self.number(inode + u64::from(o.inode_sb), DIRECT + super_block);
        // /sh, in the root of its file system.
        let root = at + 0x7000;
        self.number(dentry + u64::from(o.dentry_parent), DIRECT + root);
        self.number(root + u64::from(o.dentry_parent), DIRECT + root);
        let name = dentry + u64::from(o.dentry_name);
        self.put(name + 4, &2u32.to_le_bytes());
        self.number(name + 8, DIRECT + at + 0x7800);
        self.put(at + 0x7800, b"sh");
        address
    }
}

pub(crate) const PLACES: Places = Places { initramfs: 0, root: DIRECT + 0x30_0000, workspace: 0 };

pub(crate) const NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];

/// A kernel with the instructions that it may switch.
pub(crate) fn with_sites() -> Kernel {
    let mut kernel = Kernel::new(4);
    kernel.put(PHYSICAL + 0x100, &NOP);
    kernel.put(PHYSICAL + 0x1_fffd, &[0x66, 0x90]);
    kernel.put(PHYSICAL + 0x300, &[0xe8, 0xfb, 0x00, 0x00, 0x00]);
    kernel
}
