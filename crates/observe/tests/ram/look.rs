//! The observer's looks over a machine made by hand: what is read again, and when that ends.

use crate::kernel::{DIRECT, Kernel, LINKED, PHYSICAL, TEXT, with_sites};
use hotcell_decide::{HostFact, ProcessRules, ViolationKind};
use hotcell_observe::kernel::Profile;
use hotcell_observe::ram::{RamObserver, RamPlan, ReadError, Region, Source};
use hotcell_observe::{ObserveError, Observer, Sighting, Sightings};
use hotcell_sys::host::Range;
use std::sync::{Arc, Mutex, MutexGuard};

const INIT: u64 = 0x28_0000;
const SHELL: u64 = 0x29_0000;
const KERNEL_THREAD: u32 = 0x0020_0000;
const NODE: u64 = 0x2b_0000;
const ROOT: u64 = 0x30_0000;
const INITRAMFS: u64 = 0x31_0000;
const WORKSPACE: u64 = 0x32_0000;

/// A machine that changes while it is observed.
struct Machine {
    kernel: Kernel,
    /// For so many readings of this address there is something else.
    forged: Option<(u64, Vec<u8>, usize)>,
    /// How long its VMM has run, where the host tells.
    ran: Option<u64>,
}

struct Shared(Arc<Mutex<Machine>>, Vec<Region>);

impl Source for Shared {
    fn regions(&self) -> &[Region] {
        &self.1
    }

    fn read(&self, ranges: &[Range], into: &mut [u8]) -> Result<(), ReadError> {
        let mut machine = self.0.lock().unwrap();
        machine.kernel.memory.read(ranges, into)?;
        let Some((address, bytes, left)) = &mut machine.forged else { return Ok(()) };
        let mut rest = into;
        for range in ranges {
            let (own, behind) = rest.split_at_mut(range.bytes);
            rest = behind;
            let covers = range.address <= *address
                && *address + bytes.len() as u64 <= range.address + range.bytes as u64;
            if covers && *left > 0 {
                *left -= 1;
                own[(*address - range.address) as usize..][..bytes.len()].copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    fn ran(&self) -> Option<u64> {
        self.0.lock().unwrap().ran
    }
}

/// PID 1 of the initramfs and a shell of the root image, on a machine with two disks.
fn machine() -> Kernel {
    let mut kernel = with_sites();
    let o = kernel.profile.offsets.clone();
    let idle = kernel.image(kernel.profile.symbols.init_task);
    kernel.put(idle + u64::from(o.task_flags), &KERNEL_THREAD.to_le_bytes());
    for (at, pid, uid) in [(INIT, 1, 0), (SHELL, 2, 1000)] {
        kernel.task(at, pid, uid);
        let number = at + 0x7e00;
        kernel.number(at + u64::from(o.task_number), DIRECT + number);
        kernel.number(number + u64::from(o.pid_tasks), DIRECT + at + u64::from(o.task_pid_links));
        kernel.number(NODE + u64::from(o.xa_slots) + u64::from(pid) * 8, DIRECT + number);
        kernel.number(at + 0x2000 + u64::from(o.mm_pgd), DIRECT + 0x50_0000);
    }
    kernel.number(INIT + 0x6000 + u64::from(o.inode_sb), DIRECT + INITRAMFS);
    for at in [ROOT, INITRAMFS, WORKSPACE] {
        let kind = at + 0x1000;
        kernel.number(at + u64::from(o.sb_type), DIRECT + kind);
        kernel.number(kind + u64::from(o.fs_name), DIRECT + kind + 0x800);
    }
    let table = kernel.image(kernel.profile.symbols.init_pid_ns) + u64::from(o.pid_ns_idr);
    kernel.number(table, DIRECT + NODE + 2);
    let head = kernel.profile.symbols.super_blocks;
    let mut before = kernel.image(head);
    for (at, read_only) in [(ROOT, 1), (WORKSPACE, 0)] {
        kernel.number(before, DIRECT + at + u64::from(o.sb_list));
        before = at + u64::from(o.sb_list);
        kernel.number(at + u64::from(o.sb_flags), read_only);
        kernel.empty_list(at + u64::from(o.sb_mounts), DIRECT + at + u64::from(o.sb_mounts));
        let (device, disk) = (at + 0x2000, at + 0x3000);
        kernel.number(at + u64::from(o.sb_bdev), DIRECT + device);
        kernel.number(device + u64::from(o.bdev_disk), DIRECT + disk);
        kernel.number(disk + u64::from(o.disk_state), read_only << 1);
    }
    kernel.number(before, TEXT + (head - LINKED));
    kernel
}

struct Observed {
    observer: RamObserver,
    machine: Arc<Mutex<Machine>>,
    _cache: tempfile::TempDir,
}

impl Observed {
    fn new() -> Observed {
        let (observed, found) = Observed::armed(false, |_| {});
        assert_eq!(found, [ViolationKind::NotThisVm], "nothing else, and it has no nonce");
        observed
    }

    /// What arming finds, where something happens between preparing and ready.
    fn armed(cloned: bool, meanwhile: impl FnOnce(&mut Kernel)) -> (Observed, Vec<ViolationKind>) {
        let kernel = machine();
        let cache = tempfile::tempdir().unwrap();
        keep(&kernel.profile, cache.path());
        let regions = kernel.memory.regions.clone();
        let machine = Arc::new(Mutex::new(Machine { kernel, forged: None, ran: None }));
        let mut observer = RamObserver::new(RamPlan {
            source: Box::new(Shared(Arc::clone(&machine), regions)),
            kernel: std::fs::File::open("/dev/null").unwrap(),
            kernel_digest: "made".into(),
            cache: cache.path().to_owned(),
            marked: Vec::new(),
            rules: ProcessRules::default(),
            shown: false,
            cloned,
        });
        observer.prepare().unwrap();
        meanwhile(&mut machine.lock().unwrap().kernel);
        let mut seen = Sightings::default();
        let armed = observer.arm(&mut seen).unwrap();
        assert!(armed.basis.contains("3 tasks, 0 modules"), "{}", armed.basis);
        (Observed { observer, machine, _cache: cache }, violations(seen))
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap()
    }

    fn look(&mut self) -> Result<Sightings, ObserveError> {
        let mut seen = Sightings::default();
        self.observer.look(&mut seen).map(|()| seen)
    }
}

/// Puts a profile where one is kept: its digest, then itself.
fn keep(profile: &Profile, cache: &std::path::Path) {
    let json = serde_json::to_vec(profile).unwrap();
    let bytes = [blake3::hash(&json).as_bytes().as_slice(), &json].concat();
    std::fs::create_dir(cache.join("kernel-profiles")).unwrap();
    std::fs::write(cache.join("kernel-profiles/v3-made.json"), bytes).unwrap();
}

fn violations(seen: Sightings) -> Vec<ViolationKind> {
    let kind = |sighting| match sighting {
        Sighting::Fact(HostFact::Violation { kind, .. }) => Some(kind),
        _ => None,
    };
    seen.into_iter().filter_map(kind).collect()
}

/// The link by which a task points back.
fn back(kernel: &Kernel) -> u64 {
    SHELL + u64::from(kernel.profile.offsets.task_tasks) + 8
}

#[test]
fn a_clones_kernel_is_compared_with_its_templates_and_a_booted_one_with_itself_at_ready() {
    let patch = |kernel: &mut Kernel| {
        let entry = kernel.image(kernel.profile.symbols.entry_syscall);
        kernel.number(entry + 0x10, 0xcccc_cccc);
    };
    let found = Observed::armed(true, patch).1;
    assert_eq!(found, [ViolationKind::NotThisVm, ViolationKind::KernelTextChanged]);
    assert_eq!(Observed::armed(true, |_| {}).1, [ViolationKind::NotThisVm]);
    assert_eq!(Observed::armed(false, patch).1, [ViolationKind::NotThisVm], "the boot's own patching");
}

#[test]
fn a_list_that_stays_torn_for_twenty_looks_is_an_error() {
    let mut observed = Observed::new();
    let at = back(&observed.machine().kernel);
    let tear = |observed: &Observed, times| observed.machine().forged = Some((at, vec![0xff; 8], times));
    for _ in 0..2 {
        tear(&observed, usize::MAX);
        for look in 1..20 {
            assert!(observed.look().is_ok(), "look {look}");
        }
        // One that goes through begins the count anew.
        tear(&observed, 0);
        assert!(observed.look().is_ok());
        // And this one puts the tasks off.
        assert!(observed.look().is_ok());
    }
    tear(&observed, usize::MAX);
    let last = (1..=20).map(|_| observed.look()).last().unwrap();
    assert!(matches!(last, Err(ObserveError::Implausible(_))), "{last:?}");
}

#[test]
fn a_torn_list_is_read_eight_times_in_one_look() {
    for (torn, ends) in [(7, false), (8, true)] {
        let mut observed = Observed::new();
        let at = back(&observed.machine().kernel);
        let ended = (0..40).any(|_| {
            observed.machine().forged = Some((at, vec![0xff; 8], torn));
            observed.look().is_err()
        });
        assert_eq!(ended, ends, "{torn} torn readings of each look");
    }
}

#[test]
fn a_finding_counts_when_two_more_readings_show_it() {
    for (readings, found) in [(2, vec![]), (3, vec![ViolationKind::UnexplainedPrivilege])] {
        let mut observed = Observed::new();
        let at = SHELL + 0x1000 + u64::from(observed.machine().kernel.profile.offsets.cred_euid);
        observed.machine().forged = Some((at, vec![0; 4], readings));
        assert_eq!(violations(observed.look().unwrap()), found, "shown by {readings} readings");
    }
}

#[test]
fn the_record_names_so_many_processes_and_counts_the_others() {
    const MAX_NAMED: u64 = 1024;
    let mut observed = Observed::new();
    let (mut named, mut counted) = (1, 1);
    for start in 1..=MAX_NAMED + 8 {
        // Another process each time, at the same place.
        {
            let kernel = &mut observed.machine().kernel;
            let at = SHELL + u64::from(kernel.profile.offsets.task_start);
            kernel.number(at, start);
        }
        for sighting in [observed.look().unwrap(), observed.look().unwrap()].into_iter().flatten() {
            let Sighting::Fact(HostFact::Processes { seen, total, .. }) = sighting else {
                panic!("{sighting:?}")
            };
            named += seen.len() as u64;
            counted = total;
        }
    }
    assert_eq!((named, counted), (MAX_NAMED, MAX_NAMED));
}

#[test]
fn an_instruction_may_be_on_its_way_for_twenty_looks() {
    let mut observed = Observed::new();
    // The breakpoint by which a switched branch is changed.
    observed.machine().kernel.put(PHYSICAL + 0x100, &[0xcc, 0x7b, 0, 0, 0]);
    let found = (1..60).find(|_| !violations(observed.look().unwrap()).is_empty());
    assert!(found.is_some_and(|look| look > 20), "{found:?}");
}

/// One whose VMM stands still, as far as the host tells, after a look that saw all.
fn still() -> Observed {
    let mut observed = Observed::new();
    observed.machine().ran = Some(1);
    assert_eq!(violations(observed.look().unwrap()), []);
    observed
}

#[test]
fn tasks_are_read_again_when_the_vmm_has_run_and_else_at_every_fifth_look() {
    let privileged = |observed: &Observed| {
        let mut machine = observed.machine();
        let at = SHELL + 0x1000 + u64::from(machine.kernel.profile.offsets.cred_euid);
        machine.kernel.put(at, &[0; 4]);
    };
    let first = |observed: &mut Observed| (1..).find(|_| !violations(observed.look().unwrap()).is_empty());
    let mut observed = still();
    privileged(&observed);
    assert_eq!(first(&mut observed), Some(5), "nothing rests on the host's account alone");
    for (ran, why) in [(Some(2), "it ran"), (None, "the host tells no more")] {
        let mut observed = still();
        assert_eq!(violations(observed.look().unwrap()), []);
        privileged(&observed);
        observed.machine().ran = ran;
        assert!(first(&mut observed).is_some_and(|look| look <= 2), "{why}");
    }
    let mut observed = Observed::new();
    privileged(&observed);
    assert_eq!(first(&mut observed), Some(1), "the host never told");
    // Who asks for all of it gets all of it.
    let mut seen = Sightings::default();
    let mut observed = still();
    privileged(&observed);
    observed.observer.last_look(&mut seen).unwrap();
    assert_eq!(violations(seen), [ViolationKind::UnexplainedPrivilege]);
    let mut seen = Sightings::default();
    let mut observed = still();
    privileged(&observed);
    assert!(observed.observer.roll(&mut seen).unwrap().is_some());
    assert_eq!(violations(seen), [ViolationKind::UnexplainedPrivilege]);
}

#[test]
fn tasks_are_read_at_every_second_look_and_at_once_where_one_came_or_went() {
    let change = |observed: &Observed, table: bool| {
        let mut machine = observed.machine();
        let o = machine.kernel.profile.offsets.clone();
        machine.kernel.put(SHELL + 0x1000 + u64::from(o.cred_euid), &[0; 4]);
        if table {
            // A number that is a group's alone: nobody's task.
            machine.kernel.number(NODE + u64::from(o.xa_slots) + 5 * 8, DIRECT + SHELL + 0x7f00);
        }
    };
    // How many looks went before, and whether the table of pids changes: which look sees it.
    for (looks, table, seen) in
        [(0, false, 1), (1, false, 2), (2, false, 1), (3, false, 2), (1, true, 1), (3, true, 1)]
    {
        let mut observed = Observed::new();
        (0..looks).for_each(|_| assert_eq!(violations(observed.look().unwrap()), []));
        change(&observed, table);
        let first = (1..).find(|_| !violations(observed.look().unwrap()).is_empty());
        assert_eq!(first, Some(seen), "after {looks} looks, table {table}");
    }
    // Who came may be on its way to another program: what follows is read as well.
    let mut observed = Observed::new();
    assert_eq!(violations(observed.look().unwrap()), []);
    {
        let kernel = &mut observed.machine().kernel;
        let slots = u64::from(kernel.profile.offsets.xa_slots);
        kernel.number(NODE + slots + 5 * 8, DIRECT + SHELL + 0x7f00);
    }
    assert_eq!(violations(observed.look().unwrap()), []);
    change(&observed, false);
    assert_eq!(violations(observed.look().unwrap()), [ViolationKind::UnexplainedPrivilege]);
}

#[test]
fn after_a_torn_look_tasks_are_read_again_whether_or_not_the_vmm_has_run() {
    let mut observed = still();
    let at = back(&observed.machine().kernel);
    observed.machine().forged = Some((at, vec![0xff; 8], usize::MAX));
    observed.machine().ran = Some(2);
    // The first may put the tasks off.
    (0..2).for_each(|_| assert!(observed.look().unwrap().is_empty(), "torn"));
    observed.machine().forged = None;
    {
        let mut machine = observed.machine();
        let at = SHELL + 0x1000 + u64::from(machine.kernel.profile.offsets.cred_euid);
        machine.kernel.put(at, &[0; 4]);
    }
    assert_eq!(violations(observed.look().unwrap()), [ViolationKind::UnexplainedPrivilege]);
}

#[test]
fn what_is_read_by_and_by_is_so_also_while_the_vmm_stands_still() {
    let mut observed = still();
    {
        let kernel = &mut observed.machine().kernel;
        let at = kernel.image(kernel.profile.symbols.start_rodata) + 0x2000;
        kernel.put(at, &[0xab]);
    }
    let found = (1..=4).find_map(|_| violations(observed.look().unwrap()).pop());
    assert_eq!(found, Some(ViolationKind::KernelTextChanged));
    let mut observed = still();
    {
        let kernel = &mut observed.machine().kernel;
        let at = ROOT + u64::from(kernel.profile.offsets.sb_flags);
        kernel.number(at, 0);
    }
    let found = (1..=2).find_map(|_| violations(observed.look().unwrap()).pop());
    assert_eq!(found, Some(ViolationKind::WritableRoot));
}

#[test]
fn another_file_of_the_same_process_is_seen_within_sixteen_sweeps() {
    file_within_sixteen(Observed::new());
    file_within_sixteen(still());
}

fn file_within_sixteen(mut observed: Observed) {
    {
        let kernel = &mut observed.machine().kernel;
        let at = SHELL + 0x6000 + u64::from(kernel.profile.offsets.inode_sb);
        kernel.number(at, DIRECT + WORKSPACE);
    }
    let found = (1..=16).find_map(|_| violations(observed.look().unwrap()).pop());
    assert_eq!(found, Some(ViolationKind::ExecutedFromNoexec));
}

#[test]
fn a_root_that_becomes_writable_is_seen_within_two_looks() {
    for looks in [0, 1] {
        let mut observed = Observed::new();
        for _ in 0..looks {
            assert_eq!(violations(observed.look().unwrap()), []);
        }
        {
            let kernel = &mut observed.machine().kernel;
            let at = ROOT + u64::from(kernel.profile.offsets.sb_flags);
            kernel.number(at, 0);
        }
        let found = [observed.look(), observed.look()].map(|seen| violations(seen.unwrap()));
        assert_eq!(
            found.iter().filter(|found| **found == [ViolationKind::WritableRoot]).count(),
            1,
            "{found:?}"
        );
    }
}
