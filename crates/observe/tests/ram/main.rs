//! The reader of guest memory over memories made by hand.

mod kernel;
mod look;

use hotcell_decide::{Life, Place};
use hotcell_observe::ram::{
    FileSystem, Guard, Mapping, Mount, PASS, Part, Places, Processors, ReadError, Region, Source, Space,
    Suspect, SweepError, TaskReader, Views, find_nonce, in_both, locate, mount_changes, net_devices,
};
use hotcell_sys::host::Range;
use kernel::{DIRECT, Kernel, LINKED, Memory, PHYSICAL, PLACES, TEXT, profile, with_sites};
use proptest::prelude::*;

#[test]
fn the_kernel_is_found_with_four_and_with_five_levels() {
    for levels in [4, 5] {
        let mapping = Kernel::new(levels).mapping();
        assert_eq!((mapping.text, mapping.text_physical, mapping.direct), (TEXT, PHYSICAL, DIRECT));
        assert_eq!(mapping.levels, levels);
    }
}

type Damage = fn(&mut Kernel);

#[test]
fn a_kernel_that_contradicts_itself_is_not_believed() {
    let damage: [(&str, Damage); 4] = [
        ("version line", |kernel| {
            kernel.put(kernel.image(kernel.profile.symbols.linux_banner), b"Linux version 5")
        }),
        ("direct map", |kernel| {
            kernel.number(kernel.image(kernel.profile.symbols.page_offset_base), DIRECT + 1)
        }),
        ("page tables", |kernel| {
            kernel.number(kernel.image(kernel.profile.symbols.init_top_pgt) + 511 * 8, 0)
        }),
        ("name", |kernel| {
            let comm =
                kernel.image(kernel.profile.symbols.init_task) + u64::from(kernel.profile.offsets.task_comm);
            kernel.put(comm, b"nothing");
        }),
    ];
    for (what, damage) in damage {
        let mut kernel = Kernel::new(4);
        damage(&mut kernel);
        assert!(locate(&kernel.memory, &kernel.profile).is_err(), "{what}");
    }
}

#[test]
fn a_task_is_read_with_its_user_and_its_file() {
    let mut kernel = Kernel::new(5);
    kernel.task(0x28_0000, 42, 1000);
    let space = Space::new(&kernel.memory, kernel.mapping());
    let mut reader = TaskReader::default();
    // The second sweep reads what the first one knows with fewer calls, and sees the same.
    let first = reader.sweep(&space, &kernel.profile, &PLACES).unwrap().to_vec();
    assert_eq!(first, reader.sweep(&space, &kernel.profile, &PLACES).unwrap());
    let process = &first[1].process;
    assert_eq!((process.pid, process.uids, process.name.as_str()), (42, [1000; 4], "sh"));
    let Life::Running(Some(executable)) = &process.life else { panic!("{process:?}") };
    assert_eq!((executable.path.as_str(), &executable.place), ("/sh", &Place::Root));
    let elsewhere = reader.sweep(&space, &kernel.profile, &Places::default());
    assert!(matches!(elsewhere, Err(SweepError::Torn(_))), "a file system without a type: {elsewhere:?}");
}

#[test]
fn a_list_that_does_not_end_or_leads_nowhere_is_torn() {
    for next in [0x28_0000 + DIRECT, 8, u64::MAX] {
        let mut kernel = Kernel::new(4);
        kernel.task(0x28_0000, 42, 1000);
        let links = u64::from(kernel.profile.offsets.task_tasks);
        let target = if next == 0x28_0000 + DIRECT { next + links } else { next };
        kernel.number(0x28_0000 + links, target);
        let space = Space::new(&kernel.memory, kernel.mapping());
        let mut reader = TaskReader::default();
        let swept = reader.sweep(&space, &kernel.profile, &PLACES);
        assert!(matches!(swept, Err(SweepError::Torn(_))), "{next:#x}: {swept:?}");
    }
}

/// A machine with two tasks, both in the table of pids, after one sweep; then something changes.
fn suspects(change: impl FnOnce(&mut Kernel)) -> Vec<(i32, &'static str)> {
    suspects_among(64, change)
}

/// The same, of a kernel whose table has so many slots in a node.
fn suspects_among(slots: u32, change: impl FnOnce(&mut Kernel)) -> Vec<(i32, &'static str)> {
    const QUEUE: u64 = 0x38_0000;
    let mut kernel = Kernel::new(4);
    kernel.profile.offsets.xa_marks = kernel.profile.offsets.xa_slots + slots * 8;
    let o = kernel.profile.offsets.clone();
    for (at, pid, number) in [(0x28_0000, 42, NUMBER), (0x29_0000, 43, NUMBER + 0x1000)] {
        kernel.task(at, pid, 1000);
        kernel.number(at + u64::from(o.task_number), DIRECT + number);
        kernel.number(number + u64::from(o.pid_tasks), DIRECT + at + u64::from(o.task_pid_links));
    }
    // The table: one node, in which the two are at their numbers; of small nodes one of its slots leads to the second.
    let table = kernel.image(kernel.profile.symbols.init_pid_ns) + u64::from(o.pid_ns_idr);
    kernel.number(table, DIRECT + NODE + 2);
    let (node, first) = if slots == 64 { (NODE, 42) } else { (NODE + 0x1000, 42 % 16) };
    if slots == 16 {
        kernel.number(NODE + u64::from(o.xa_slots) + 42 / 16 * 8, DIRECT + node + 2);
        // What lies behind a node's slots is no entry.
        kernel.number(NODE + u64::from(o.xa_slots) + 16 * 8, DIRECT + NUMBER + 0x2000);
    }
    kernel.number(node + u64::from(o.xa_slots) + first * 8, DIRECT + NUMBER);
    kernel.number(node + u64::from(o.xa_slots) + (first + 1) * 8, DIRECT + NUMBER + 0x1000);
    // One processor, which idles.
    let offsets = kernel.image(kernel.profile.symbols.per_cpu_offset);
    let init = TEXT + (kernel.profile.symbols.init_task - LINKED);
    kernel.number(offsets, DIRECT + QUEUE - kernel.profile.symbols.runqueues);
    kernel.number(QUEUE + u64::from(o.rq_idle), init);
    kernel.number(QUEUE + u64::from(o.rq_curr), init);
    let mut reader = TaskReader::default();
    let profile = kernel.profile.clone();
    let mapping = kernel.mapping();
    let processors = {
        let space = Space::new(&kernel.memory, mapping);
        reader.sweep(&space, &profile, &PLACES).unwrap();
        Processors::find(&space, &profile).unwrap()
    };
    assert_eq!(processors.count(), 1);
    change(&mut kernel);
    let space = Space::new(&kernel.memory, mapping);
    let mut look = |views: Views| -> Vec<Suspect> {
        reader.sweep(&space, &profile, &PLACES).unwrap();
        views.suspects(&space, &profile, reader.tasks()).unwrap()
    };
    let views = Views::read(&space, &profile, &processors, &[]).unwrap();
    let first = look(views);
    let second = look(Views::read(&space, &profile, &processors, &[]).unwrap());
    let both = in_both(&first, second);
    both.into_iter().map(|suspect| (suspect.pid, suspect.how)).collect()
}

const NUMBER: u64 = 0x2a_0000;
const NODE: u64 = 0x2b_0000;

#[test]
fn a_task_that_one_view_lacks_is_a_suspect() {
    let o = profile().offsets;
    let off_the_list = |kernel: &mut Kernel| {
        let links = u64::from(kernel.profile.offsets.task_tasks);
        let init = kernel.image(kernel.profile.symbols.init_task);
        let head = TEXT + (kernel.profile.symbols.init_task - LINKED) + links;
        kernel.number(init + links, DIRECT + 0x28_0000 + links);
        kernel.number(0x28_0000 + links + 8, head);
    };
    let out_of_the_table = |kernel: &mut Kernel| {
        kernel.number(NODE + u64::from(kernel.profile.offsets.xa_slots) + 43 * 8, 0);
    };
    let runs = |kernel: &mut Kernel| kernel.number(0x38_0000 + u64::from(o.rq_curr), DIRECT + 0x29_0000);
    assert_eq!(suspects(|_| {}), []);
    assert_eq!(suspects_among(16, |_| {}), []);
    assert_eq!(suspects(runs), []);
    let only = "it is in the table of pids and not on the list of tasks";
    assert_eq!(suspects(off_the_list), [(43, only)]);
    assert_eq!(suspects_among(16, off_the_list), [(43, only)]);
    let other = "it is on the list of tasks and not in the table of pids";
    assert_eq!(suspects(out_of_the_table), [(43, other)]);
    let both = |kernel: &mut Kernel| {
        off_the_list(kernel);
        out_of_the_table(kernel);
    };
    assert_eq!(suspects(both), [], "an honest process that has ended");
    let running = "a processor runs it and it is not on the list of tasks";
    let hidden = |kernel: &mut Kernel| {
        both(kernel);
        runs(kernel);
    };
    assert_eq!(suspects(hidden), [(43, running)]);
    // One that is ending runs for a moment more.
    let ending = |kernel: &mut Kernel| {
        hidden(kernel);
        kernel.number(0x29_0000 + u64::from(o.task_exit_state), 16);
    };
    assert_eq!(suspects(ending), []);
    // While one appears or goes, nothing is said about the table.
    let locked = |kernel: &mut Kernel| {
        out_of_the_table(kernel);
        kernel.put(kernel.image(kernel.profile.symbols.tasklist_lock), &[0xff]);
    };
    assert_eq!(suspects(locked), []);
}

#[test]
fn a_mount_that_appears_or_loses_a_restriction_is_a_change() {
    const RESTRICTED: u32 = 0x47;
    let mount = |address, path: &str, flags| Mount { address, path: path.into(), flags, namespace: DIRECT };
    let system = |super_block, mounts| FileSystem {
        super_block,
        kind: "tmpfs".into(),
        read_only: false,
        disk_read_only: None,
        mounts,
    };
    let ready =
        [system(1, vec![mount(10, "/tmp", RESTRICTED)]), system(2, vec![mount(20, "/root", RESTRICTED)])];
    let changes = |now: &[FileSystem]| {
        let changes = mount_changes(&ready, now, 2);
        changes.into_iter().map(|(_, detail)| detail).collect::<Vec<_>>()
    };
    assert_eq!(changes(&ready), [""; 0]);
    assert_eq!(changes(&[]), [""; 0], "one that went");
    let kernels = Mount { namespace: 0u64.wrapping_sub(22), ..mount(30, "/", 0) };
    assert_eq!(changes(&[system(1, vec![kernels])]), [""; 0], "the kernel's own");
    for (flags, lost) in
        [(0x46, "nosuid"), (0x45, "nodev"), (0x43, "noexec"), (0x07, "ro"), (0x03, "noexec, ro")]
    {
        assert_eq!(
            changes(&[system(1, vec![mount(10, "/tmp", flags)])]),
            [format!("it is no longer {lost}")]
        );
    }
    assert_eq!(changes(&[system(2, vec![mount(20, "/root", 0x07)])]), [""; 0], "a rule of its own");
    for other in [mount(11, "/tmp", RESTRICTED), mount(10, "/etc", RESTRICTED)] {
        assert_eq!(changes(&[system(1, vec![other])]), ["it was not mounted at ready"]);
    }
    assert_eq!(changes(&[system(3, vec![mount(10, "/tmp", RESTRICTED)])]), ["it was not mounted at ready"]);
}

#[test]
fn a_network_device_is_seen() {
    let mut kernel = Kernel::new(4);
    let o = kernel.profile.offsets.clone();
    let head = kernel.profile.symbols.net_namespace_list;
    let (net, device) = (0x28_0000, 0x28_8000);
    kernel.number(kernel.image(head), DIRECT + net + u64::from(o.net_list));
    kernel.number(net + u64::from(o.net_list), TEXT + (head - LINKED));
    let devices = net + u64::from(o.net_devices);
    kernel.number(devices, DIRECT + device + u64::from(o.device_list));
    kernel.number(device + u64::from(o.device_list), DIRECT + devices);
    kernel.put(device + u64::from(o.device_name), b"eth0\0");
    let kind = device + u64::from(o.device_type);
    for (number, loopback) in [(1u16, false), (772, true)] {
        kernel.put(kind, &number.to_le_bytes());
        let space = Space::new(&kernel.memory, kernel.mapping());
        let found = net_devices(&space, &kernel.profile).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].loopback), ("eth0", loopback));
    }
}

#[test]
fn the_nonce_is_found_in_its_process_alone() {
    let mut kernel = Kernel::new(4);
    let (root, page) = (0x50_0000, 0x58_0000);
    for (table, next) in
        [(root, 0x50_1000), (0x50_1000, 0x50_2000), (0x50_2000, 0x50_3000), (0x50_3000, page)]
    {
        kernel.number(table + 5 * 8, next | 1);
    }
    kernel.put(page, b"mark and nonce");
    // The same in memory that is nobody's of this process.
    kernel.put(0x59_0000, b"mark and another");
    let space = Space::new(&kernel.memory, kernel.mapping());
    assert_eq!(find_nonce(&space, root, b"mark and nonce").unwrap(), Some(page));
    assert_eq!(find_nonce(&space, root, b"mark and another").unwrap(), None);
}

/// What the looks of one pass find.
fn guarded(change: impl FnOnce(&mut Kernel)) -> Vec<Part> {
    let mut kernel = with_sites();
    let mapping = kernel.mapping();
    let mut guard = {
        let space = Space::new(&kernel.memory, mapping);
        Guard::new(&space, &kernel.profile, [7; 32]).unwrap()
    };
    change(&mut kernel);
    let space = Space::new(&kernel.memory, mapping);
    let mut parts = Vec::new();
    for change in (0..PASS).flat_map(|_| guard.look(&space, &kernel.profile).unwrap()) {
        if !parts.contains(&change.part) {
            parts.push(change.part);
        }
    }
    parts
}

#[test]
fn a_switched_branch_is_let_be_and_any_other_change_is_seen() {
    let text = PHYSICAL;
    assert_eq!(guarded(|_| {}), []);
    // jmp to 0x180, and back to 0x200 from 0x1fffd is too far for two bytes, so that one stays.
    assert_eq!(guarded(|kernel| kernel.put(text + 0x100, &[0xe9, 0x7b, 0, 0, 0])), []);
    assert_eq!(guarded(|kernel| kernel.put(text + 0x100, &[0xcc, 0x7b, 0, 0, 0])), [], "on its way");
    assert_eq!(guarded(|kernel| kernel.put(text + 0x300, &[0xe8, 0xfb, 0x04, 0, 0])), [], "another function");
    for (what, at, bytes) in [
        ("a jump elsewhere", 0x100, &[0xe9, 0x7c, 0, 0, 0][..]),
        ("another instruction", 0x100, &[0x90, 0x90, 0x90, 0x90, 0x90]),
        ("a call into a function", 0x300, &[0xe8, 0xfc, 0, 0, 0]),
        ("a breakpoint over nothing legal", 0x100, &[0xcc, 1, 2, 3, 4]),
        ("any other byte", 0x5000, &[1]),
        ("the last one", 0x1_fffc, &[1]),
        ("the byte behind a branch", 0x105, &[1]),
    ] {
        assert_eq!(guarded(|kernel| kernel.put(text + at, bytes)), [Part::Text], "{what}");
    }
    assert_eq!(guarded(|kernel| kernel.put(text + 0x2_8000, &[1])), [Part::ReadOnly]);
    assert_eq!(guarded(|kernel| kernel.put(text + 0x8_0ffc, &[1])), [Part::Table], "interrupts");
    assert_eq!(
        guarded(|kernel| kernel.put(text + 0x2_1008, &[1])),
        [Part::Table, Part::ReadOnly],
        "system calls"
    );
}

#[test]
fn a_page_that_the_vmm_made_its_own_is_read_within_a_pass_and_the_others_in_their_turn() {
    let mut kernel = with_sites();
    kernel.memory.own = Some(Vec::new());
    let mapping = kernel.mapping();
    let mut guard = Guard::new(&Space::new(&kernel.memory, mapping), &kernel.profile, [7; 32]).unwrap();
    assert_eq!(guard.own_bytes(), 2 * 4096 + 4096, "the tables and the entry, which every look reads");
    let mut look = |kernel: &Kernel| {
        let space = Space::new(&kernel.memory, mapping);
        guard.look(&space, &kernel.profile).unwrap().len()
    };
    assert_eq!(look(&kernel), 0);
    // A byte that the host's account does not tell of is found where the turn comes to it.
    kernel.put(PHYSICAL + 0x5000, &[1]);
    let looks = (0..10).position(|_| look(&kernel) > 0).unwrap();
    assert!(looks > 0, "nothing said that it was written to");
    kernel.put(PHYSICAL + 0x5000, &[0]);
    (0..10).for_each(|_| assert!(look(&kernel) <= 1));
    // One that it tells of is found within a pass, wherever the turn is.
    for at in [0x5000, 0x2_f000] {
        kernel.put(PHYSICAL + at, &[1]);
        kernel.memory.own = Some(vec![(PHYSICAL + at) / 4096]);
        assert!((0..PASS).any(|_| look(&kernel) == 1), "{at:#x}");
        kernel.put(PHYSICAL + at, &[0]);
        kernel.memory.own = Some(Vec::new());
        (0..10).for_each(|_| assert!(look(&kernel) <= 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Pointers that lead anywhere, numbers that are anything.
    #[test]
    fn no_memory_panics_or_hangs_the_reader(seed in proptest::collection::vec(any::<u8>(), 64..4096), levels in 4u32..=5) {
        let regions = vec![Region { guest: 0, host: 0, bytes: 1 << 40 }];
        let memory = Memory { bytes: seed, regions, wraps: true, own: None };
        let profile = profile();
        let _ = locate(&memory_of(&memory), &profile);
        let mapping = Mapping { text: TEXT, text_physical: PHYSICAL, image_bytes: 1 << 20, direct: DIRECT, tables: 0x1000, levels };
        let space = Space::new(&memory, mapping);
        let mut reader = TaskReader::default();
        for _ in 0..2 {
            let _ = reader.sweep(&space, &profile, &PLACES);
        }
        let processors = Processors::find(&space, &profile).unwrap_or_default();
        if let Ok(views) = Views::read(&space, &profile, &processors, reader.tasks()) {
            let _ = views.suspects(&space, &profile, reader.tasks());
        }
        let _ = net_devices(&space, &profile);
        let _ = find_nonce(&space, 0x2000, b"mark");
    }
}

/// The same with one small region: a search by steps ends soon.
fn memory_of(memory: &Memory) -> Memory {
    let regions = vec![Region { guest: 0, host: 0, bytes: 64 << 20 }];
    Memory { bytes: memory.bytes.clone(), regions, wraps: true, own: None }
}

/// A machine of which the host says what was touched.
struct Touched<'a> {
    memory: &'a Memory,
    /// Of a piece that begins at this address; `None`: the host does not tell.
    says: fn(u64) -> Option<bool>,
    /// Where a text of this many bytes was looked for.
    line: usize,
    looked: std::sync::Mutex<Vec<u64>>,
}

impl Source for Touched<'_> {
    fn regions(&self) -> &[Region] {
        self.memory.regions()
    }

    fn read(&self, ranges: &[Range], into: &mut [u8]) -> Result<(), ReadError> {
        let lines = ranges.iter().filter(|range| range.bytes == self.line);
        self.looked.lock().unwrap().extend(lines.map(|range| range.address));
        self.memory.read(ranges, into)
    }

    fn touched(&self, address: u64, _: usize) -> Option<bool> {
        (self.says)(address)
    }
}

#[test]
fn memory_that_nobody_touched_is_read_last() {
    let kernel = Kernel::new(4);
    let looked = |says: fn(u64) -> Option<bool>| {
        let line = kernel.profile.banner.len();
        let source = Touched { memory: &kernel.memory, says, line, looked: Default::default() };
        let mapping = locate(&source, &kernel.profile).unwrap();
        (mapping.text_physical, source.looked.into_inner().unwrap().len())
    };
    let (text, all) = looked(|_| None);
    assert!(all > 1, "the control: every piece before it is looked at");
    assert_eq!(looked(|address| Some(address >= 2 << 20)), (text, all - 1));
    // A host that says nothing was touched keeps nobody from finding it.
    assert_eq!(looked(|_| Some(false)), (text, all));
}
