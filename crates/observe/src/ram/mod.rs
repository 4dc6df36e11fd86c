//! The guest's memory, read from the VMM process: what its kernel and its processes really are.
//!
//! | what | how often | against what |
//! |---|---|---|
//! | every process and thread: user, capabilities, file | each look | [`ProcessRules`] |
//! | modules, network devices, the root's file system and disk | each look | their state at ready |
//! | system call and interrupt table, system call entry | each look | their state at ready |
//! | the kernel's text and read-only data | a part each look, all of it within [`PASS`] | their state at ready |
//! | the nonce in PID 1's memory | at ready | what the host sent |
//!
//! A list that changes while it is read is read again at once; one that can't be read in
//! `PATIENCE` looks in a row is an error, and an error ends the run. A finding counts when a
//! second reading, made at once, shows it again.

mod lists;
mod locate;
mod memory;
mod nonce;
mod space;
mod tasks;
mod text;

pub use lists::{FileSystem, NetDevice, net_devices};
pub use locate::{LocateError, locate};
pub use memory::{ReadError, Region, Source, VmmMemory};
pub use nonce::find as find_nonce;
pub use space::{Gathered, Mapping, Space};
pub use tasks::{Places, SweepError, Task, TaskReader};
pub use text::{Change, Guard, Part};

use crate::kernel::Profile;
use crate::observer::{Armed, ObserveError, Observer, Sightings};
use hotcell_decide::process::{Finding, MAX_SEEN, MAX_SEEN_CHARS};
use hotcell_decide::{HostFact, Place, Process, ProcessRules, ViolationKind};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::PathBuf;

/// Looks in which the kernel's whole image is read once.
pub const PASS: usize = 20;
/// Readings of a list that changes, within one look.
const ATTEMPTS: usize = 8;
/// Looks in a row that may find nothing but torn lists.
const PATIENCE: u32 = 20;

/// What the observer needs.
pub struct RamPlan {
    /// The memory.
    pub source: Box<dyn Source>,
    /// The measured kernel file.
    pub kernel: File,
    /// Its digest, in hexadecimal: names the profile in the cache.
    pub kernel_digest: String,
    /// The cache folder.
    pub cache: PathBuf,
    /// What the host sent to this machine: mark and nonce, as PID 1 keeps them.
    pub marked: Vec<u8>,
    /// Which processes may be there.
    pub rules: ProcessRules,
}

/// Observes a machine's memory.
pub struct RamObserver {
    plan: RamPlan,
    profile: Option<Profile>,
    armed: Option<State>,
    torn: u32,
}

/// What later looks compare with.
struct State {
    mapping: Mapping,
    places: Places,
    reader: TaskReader,
    guard: Guard,
    modules: Vec<String>,
    root: u64,
    part: usize,
    roll: Roll,
}

/// Which processes the record has named, as long as they live.
#[derive(Debug, Default)]
struct Roll {
    known: BTreeSet<(i32, u64, String)>,
    named: usize,
    total: u64,
}

impl RamObserver {
    /// An observer of this memory.
    pub fn new(plan: RamPlan) -> RamObserver {
        RamObserver { plan, profile: None, armed: None, torn: 0 }
    }
}

impl Observer for RamObserver {
    fn name(&self) -> &'static str {
        "ram"
    }

    fn prepare(&mut self) -> Result<(), ObserveError> {
        let profile = Profile::load(&self.plan.kernel, &self.plan.kernel_digest, &self.plan.cache)
            .map_err(|error| ObserveError::Unprepared(error.to_string()))?;
        self.profile = Some(profile);
        Ok(())
    }

    fn arm(&mut self, seen: &mut Sightings) -> Result<Armed, ObserveError> {
        let profile = self.profile.as_ref().ok_or_else(|| ObserveError::Unprepared("no profile".into()))?;
        let source = self.plan.source.as_ref();
        let mapping = locate(source, profile).map_err(|error| ObserveError::Unprepared(error.to_string()))?;
        let space = Space::new(source, mapping);
        let mut reader = TaskReader::default();
        let tasks = again(|| reader.sweep(&space, profile, &Places::default()))?;
        let init = tasks.iter().find(|task| task.process.pid == 1);
        let init = init.ok_or_else(|| ObserveError::Unprepared("the guest has no PID 1".into()))?;
        let places = again(|| places(&space, profile, init.mm))?;
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|error| ObserveError::Unprepared(error.to_string()))?;
        let guard = Guard::new(&space, profile, seed).map_err(blind)?;
        let modules = again(|| lists::modules(&space, profile))?;
        let tables = space.u64(init.mm.wrapping_add(u64::from(profile.offsets.mm_pgd))).map_err(blind)?;
        let tables = space.physical(tables).map_err(blind)?;
        let nonce = find_nonce(&space, tables, &self.plan.marked).map_err(blind)?;
        if nonce.is_none() {
            seen.fact(HostFact::Violation {
                kind: ViolationKind::NotThisVm,
                subject: "PID 1".into(),
                detail: "the nonce that the host sent is not in the memory of its init".into(),
            })?;
        }
        let basis = format!(
            "{}; text at {:#x}, {} levels of page tables; {} tasks, {} modules, {} KiB of kernel watched",
            profile.banner.split(" (").next().unwrap_or_default(),
            mapping.text_physical,
            mapping.levels,
            tasks.len(),
            modules.len(),
            guard.bytes() >> 10
        );
        let part = guard.bytes() / PASS;
        let root = places.root;
        self.armed =
            Some(State { mapping, places, reader, guard, modules, root, part, roll: Roll::default() });
        self.look(seen)?;
        Ok(Armed { armed: true, basis })
    }

    fn look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        let (Some(profile), Some(state)) = (&self.profile, &mut self.armed) else { return Ok(()) };
        let space = Space::new(self.plan.source.as_ref(), state.mapping);
        match look(&space, profile, state, &self.plan.rules, seen) {
            Ok(()) => {
                self.torn = 0;
                Ok(())
            }
            // Whoever waits for the VMM will know, and the run ends by that.
            Err(Unseen::Sweep(SweepError::Read(ReadError::Gone))) => Ok(()),
            Err(Unseen::Sweep(error)) if !lists::is_final(&error) => {
                self.torn += 1;
                if self.torn < PATIENCE { Ok(()) } else { Err(ObserveError::Implausible(error.to_string())) }
            }
            Err(Unseen::Sweep(error)) => Err(ObserveError::Implausible(error.to_string())),
            Err(Unseen::Told(error)) => Err(error),
        }
    }
}

/// Why a look has no result.
enum Unseen {
    Sweep(SweepError),
    Told(ObserveError),
}

impl From<SweepError> for Unseen {
    fn from(error: SweepError) -> Unseen {
        Unseen::Sweep(error)
    }
}

impl From<ReadError> for Unseen {
    fn from(error: ReadError) -> Unseen {
        Unseen::Sweep(error.into())
    }
}

impl From<ObserveError> for Unseen {
    fn from(error: ObserveError) -> Unseen {
        Unseen::Told(error)
    }
}

fn look(
    space: &Space<'_>,
    profile: &Profile,
    state: &mut State,
    rules: &ProcessRules,
    seen: &mut Sightings,
) -> Result<(), Unseen> {
    let violation = |seen: &mut Sightings, kind, subject: &str, detail: String| {
        seen.fact(HostFact::Violation { kind, subject: subject.into(), detail })
    };
    let tasks = sweep(space, profile, state, rules)?;
    let found = findings(&tasks, rules);
    if !found.is_empty() {
        // Read again: what was torn is gone then.
        let tasks = sweep(space, profile, state, rules)?;
        for (_, finding) in
            findings(&tasks, rules).into_iter().filter(|(who, _)| found.contains_key(who)).take(MAX_FINDINGS)
        {
            violation(seen, finding.kind, &finding.subject, finding.detail)?;
        }
    }
    name_new(space, profile, &mut state.roll, &tasks, seen)?;
    let modules = retry(|| lists::modules(space, profile))?;
    for module in modules.iter().filter(|module| !state.modules.contains(module)) {
        violation(seen, ViolationKind::ModuleLoaded, module, "it was not loaded at ready".into())?;
    }
    for device in retry(|| lists::net_devices(space, profile))?.iter().filter(|device| !device.loopback) {
        violation(seen, ViolationKind::NetworkDevice, &device.name, "the guest's kernel lists it".into())?;
    }
    let root = retry(|| lists::one(space, profile, state.root))?;
    if root.is_writable() {
        violation(seen, ViolationKind::WritableRoot, "root", format!("mounted writable: {:?}", root.mounts))?;
    }
    if root.disk_read_only == Some(false) {
        violation(seen, ViolationKind::WritableRoot, "root", "its disk is attached writable".into())?;
    }
    let changes = state.guard.look(space, profile, state.part)?;
    for change in changes {
        let (kind, subject) = match change.part {
            Part::Text => (ViolationKind::KernelTextChanged, "text"),
            Part::ReadOnly => (ViolationKind::KernelTextChanged, "read-only data"),
            Part::Table => (ViolationKind::KernelTableChanged, "system call or interrupt table"),
        };
        violation(seen, kind, subject, change.detail)?;
    }
    Ok(())
}

/// Processes of one look that are named: one is enough to kill, the others are for whoever reads the record.
const MAX_FINDINGS: usize = 16;
/// Bytes of arguments that are read: more than a path has.
const MAX_ARGUMENTS: usize = 8192;

fn sweep(
    space: &Space<'_>,
    profile: &Profile,
    state: &mut State,
    rules: &ProcessRules,
) -> Result<Vec<Task>, SweepError> {
    let mut tasks = retry(|| state.reader.sweep(space, profile, &state.places))?;
    for task in tasks.iter_mut().filter(|task| rules.asks_for_argv(&task.process)) {
        task.process.argv = tasks::arguments(space, profile, task.mm, MAX_ARGUMENTS)?;
    }
    Ok(tasks)
}

/// Processes that the record names in one run; a build or a test suite has thousands, whose names nobody reads one by one.
const MAX_NAMED: usize = 1024;

/// Records processes that are new, or have become another program.
fn name_new(
    space: &Space<'_>,
    profile: &Profile,
    roll: &mut Roll,
    tasks: &[Task],
    seen: &mut Sightings,
) -> Result<(), Unseen> {
    let mut live = BTreeSet::new();
    let (mut fresh, mut left_out) = (Vec::new(), 0);
    for task in tasks.iter().filter(|task| task.process.pid == task.process.tgid) {
        let process = &task.process;
        // Between its fork and its program an exec is the init's own.
        let Some(executable) = process.executable().filter(|file| file.place != Place::Initramfs) else {
            continue;
        };
        let key = (process.pid, process.start_ns, executable.path.clone());
        if !roll.known.contains(&key) {
            roll.total += 1;
            if fresh.len() < MAX_SEEN && roll.named < MAX_NAMED {
                roll.named += 1;
                let argv = tasks::arguments(space, profile, task.mm, MAX_SEEN_CHARS)?;
                fresh.extend(Process { argv, ..process.clone() }.seen());
            } else {
                left_out += 1;
            }
        }
        live.insert(key);
    }
    roll.known = live;
    // Past the limit the totals come with the next that is named, or with none.
    if !fresh.is_empty() {
        seen.fact(HostFact::Processes {
            seen: fresh,
            left_out,
            live: tasks.len() as u64,
            total: roll.total,
        })?;
    }
    Ok(())
}

/// Everything that the rules find, by process.
fn findings(tasks: &[Task], rules: &ProcessRules) -> BTreeMap<(i32, u64), Finding> {
    let by_pid: BTreeMap<i32, &Process> =
        tasks.iter().map(|task| (task.process.pid, &task.process)).collect();
    let judged = tasks.iter().filter_map(|task| {
        let process = &task.process;
        let parent = by_pid.get(&process.parent).copied();
        Some(((process.pid, process.start_ns), rules.judge(process, parent)?))
    });
    judged.collect()
}

/// Which file systems the machine's three are.
fn places(space: &Space<'_>, profile: &Profile, init_mm: u64) -> Result<Places, SweepError> {
    let o = &profile.offsets;
    let torn = |_| SweepError::Torn("PID 1 runs from no file");
    let step = |address: u64, offset: u32| {
        space.u64(address.wrapping_add(u64::from(offset))).map_err(tasks::nowhere(torn))
    };
    let inode = step(step(init_mm, o.mm_exe_file)?, o.file_inode)?;
    let initramfs = step(inode, o.inode_sb)?;
    let all = lists::file_systems(space, profile)?;
    // A machine of ours has two disks: the root image and the overlay.
    let on_disk = |read_only: bool| {
        let mut fitting = all.iter().filter(|one| one.disk_read_only.is_some() && one.read_only == read_only);
        match (fitting.next(), fitting.next()) {
            (Some(one), None) => Ok(one.super_block),
            _ => Err(SweepError::Torn("the machine does not have one root image and one overlay disk")),
        }
    };
    Ok(Places { initramfs, root: on_disk(true)?, workspace: on_disk(false)? })
}

/// Reads again where a list changed under the reader.
fn retry<T>(mut read: impl FnMut() -> Result<T, SweepError>) -> Result<T, SweepError> {
    let mut attempt = 1;
    loop {
        match read() {
            Err(SweepError::Torn(_)) if attempt < ATTEMPTS => attempt += 1,
            other => return other,
        }
    }
}

fn again<T>(read: impl FnMut() -> Result<T, SweepError>) -> Result<T, ObserveError> {
    retry(read).map_err(|error| ObserveError::Unprepared(error.to_string()))
}

fn blind(error: ReadError) -> ObserveError {
    ObserveError::Unprepared(error.to_string())
}
