//! The guest's memory, read from the VMM process: what its kernel and its processes really are.
//!
//! | what | how often | against what |
//! |---|---|---|
//! | every process and thread: user, capabilities, file | every second look, and each where one comes or goes | [`ProcessRules`] |
//! | modules, network devices | each look | their state at ready |
//! | system call and interrupt table, system call entry | each look | their state at ready |
//! | namespaces | with the tasks | their state at ready |
//! | the root's file system and disk, mounts | every second look | their state at ready |
//! | the table of pids, what each processor runs | each look | the list of tasks |
//! | the kernel's text and read-only data | each look where it was written to; else a part, all of it within [`PASS`] | their state at ready, a clone's as its template left it |
//! | the nonce in PID 1's memory | at ready | what the host sent |
//!
//! While the VMM does not run ([`Source::ran`]), tasks, namespaces, table of pids and processors are read at every fifth look:
//! memory that nobody writes is as it was.
//!
//! A list that changes while it is read is read again at once; one that can't be read in
//! `PATIENCE` looks in a row is an error, and an error ends the run. A finding counts when a
//! second reading, made at once, shows it again.

mod files;
mod hidden;
mod lists;
mod locate;
mod look;
mod memo;
mod memory;
mod namespaces;
mod nonce;
mod space;
mod tasks;
mod text;

pub use hidden::{Processors, Suspect, Views, in_both};
pub use lists::{FileSystem, Mount, NetDevice, mount_changes, net_devices};
pub use locate::{LocateError, locate};
pub use memory::{ReadError, Region, Source, VmmMemory};
pub use nonce::find as find_nonce;
pub use space::{Gathered, Mapping, Space};
pub use tasks::{Places, SweepError, Task, TaskReader};
pub use text::{Change, Guard, PASS, Part};

use crate::kernel::Profile;
use crate::observer::{Armed, ObserveError, Observer, Roll, Sightings};
use hotcell_decide::{HostFact, Place, ProcessRules, SeenProcess, ViolationKind};
use look::{Reach, State, Unseen};
use std::fs::File;
use std::path::PathBuf;

/// Readings of a list that changes, within one look.
const ATTEMPTS: usize = 8;
/// Looks in a row that may find nothing but torn lists.
const PATIENCE: u32 = 20;
/// Looks in a row that do not read again what only a VMM that ran could have changed: nothing rests on the host's account of
/// that alone. Five looks are also the time between two questions for the VMM's write counters, each of which makes it run.
const MOST_STILL: u32 = 4;

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
    /// Whether somebody looks on, who wants to see arguments.
    pub shown: bool,
    /// Whether the machine goes on from a template: then its kernel's image is compared with what the template left.
    pub cloned: bool,
}

/// Observes a machine's memory.
pub struct RamObserver {
    plan: RamPlan,
    profile: Option<Profile>,
    /// Where the kernel is and how its image was, where that was known before ready.
    early: Option<(Mapping, Guard)>,
    armed: Option<(Mapping, TaskReader, Guard, State)>,
    torn: u32,
    /// Looks that saw all of it.
    whole: u64,
    /// How long the VMM had run before the last of them, where it was the last that there was.
    ran: Option<u64>,
    /// Looks since then.
    still: u32,
}

impl RamObserver {
    /// An observer of this memory.
    pub fn new(plan: RamPlan) -> RamObserver {
        RamObserver { plan, profile: None, early: None, armed: None, torn: 0, whole: 0, ran: None, still: 0 }
    }
}

impl Observer for RamObserver {
    fn name(&self) -> &'static str {
        "ram"
    }

    fn prepare(&mut self) -> Result<(), ObserveError> {
        let profile = Profile::load(&self.plan.kernel, &self.plan.kernel_digest, &self.plan.cache)
            .map_err(|error| ObserveError::Unprepared(error.to_string()))?;
        if self.plan.cloned {
            // Nothing but its init runs, and that takes as long as this. What fails is tried again, and said, at ready.
            self.early = image(self.plan.source.as_ref(), &profile).ok();
        }
        self.profile = Some(profile);
        Ok(())
    }

    fn arm(&mut self, seen: &mut Sightings) -> Result<Armed, ObserveError> {
        let profile = self.profile.as_ref().ok_or_else(|| ObserveError::Unprepared("no profile".into()))?;
        let source = self.plan.source.as_ref();
        let (mapping, guard) = self.early.take().map_or_else(|| image(source, profile), Ok)?;
        let space = Space::new(source, mapping);
        let mut reader = TaskReader::default();
        again(|| reader.sweep(&space, profile, &Places::default()).map(drop))?;
        let init = reader.tasks().iter().find(|task| task.process.pid == 1).cloned();
        let init = init.ok_or_else(|| ObserveError::Unprepared("the guest has no PID 1".into()))?;
        let places = again(|| places(&space, profile, init.mm))?;
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
        let state = again(|| State::new(&space, profile, reader.tasks(), places.clone()))?;
        let basis = format!(
            "{}; text at {:#x}, {} levels of page tables; {} tasks, {} modules, {} mounts, {} processors, {} KiB of \
             kernel watched, {} KiB of them in pages of the VMM's own",
            profile.banner.split(" (").next().unwrap_or_default(),
            mapping.text_physical,
            mapping.levels,
            reader.tasks().len(),
            state.modules.len(),
            state.mounted.iter().map(|one| one.mounts.len()).sum::<usize>(),
            state.processors.count(),
            guard.bytes() >> 10,
            guard.own_bytes() >> 10,
        );
        self.armed = Some((mapping, reader, guard, state));
        self.see(true, seen)?;
        Ok(Armed { armed: true, basis })
    }

    fn processes(&mut self) -> Option<Vec<SeenProcess>> {
        let (_, reader, ..) = self.armed.as_mut()?;
        let of_workload =
            |task: &&mut Task| task.process.executable().is_some_and(|file| file.place != Place::Initramfs);
        Some(leaders(reader).filter(of_workload).filter_map(|task| task.process.seen()).collect())
    }

    fn roll(&mut self, seen: &mut Sightings) -> Result<Option<Roll>, ObserveError> {
        let before = self.whole;
        self.see(true, seen)?;
        let Some((_, reader, ..)) = self.armed.as_mut().filter(|_| self.whole > before) else {
            return Ok(None);
        };
        let mut roll = Roll::default();
        for task in leaders(reader) {
            match task.process.executable() {
                Some(file) if file.place == Place::Initramfs => roll.own.push(task.process.pid),
                Some(_) => roll.processes.push((task.process.pid, task.process.start_ns)),
                None => {}
            }
        }
        Ok(Some(roll))
    }

    fn look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        self.see(false, seen)
    }

    fn last_look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        self.see(true, seen)
    }
}

impl RamObserver {
    /// Looks once: at everything, or, unless `all` is asked for, without what can't have changed.
    fn see(&mut self, all: bool, seen: &mut Sightings) -> Result<(), ObserveError> {
        let (Some(profile), Some((mapping, reader, guard, state))) = (&self.profile, &mut self.armed) else {
            return Ok(());
        };
        let space = Space::new(self.plan.source.as_ref(), *mapping);
        // Before anything is read: what runs meanwhile shows at the next look.
        let ran = self.plan.source.ran();
        let before = self.ran.take().filter(|before| Some(*before) == ran);
        let reach = match before {
            _ if all => Reach::All,
            None => Reach::Turn,
            Some(_) if self.still < MOST_STILL => Reach::Still,
            Some(_) => Reach::All,
        };
        let sight = look::Sight { space: &space, profile, rules: &self.plan.rules, shown: self.plan.shown };
        match look::look(&sight, reach, reader, guard, state, seen) {
            Ok(read) => {
                if read {
                    (self.torn, self.still, self.ran) = (0, 0, ran);
                    self.whole += 1;
                } else if before.is_some() {
                    (self.still, self.ran) = (self.still + 1, ran);
                }
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

/// Where the kernel is, and how its image is now.
fn image(source: &dyn Source, profile: &Profile) -> Result<(Mapping, Guard), ObserveError> {
    let mapping = locate(source, profile).map_err(|error| ObserveError::Unprepared(error.to_string()))?;
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(|error| ObserveError::Unprepared(error.to_string()))?;
    let guard = Guard::new(&Space::new(source, mapping), profile, seed).map_err(blind)?;
    Ok((mapping, guard))
}

/// Every process once, by its first thread.
fn leaders(reader: &mut TaskReader) -> impl Iterator<Item = &mut Task> {
    reader.tasks().iter_mut().filter(|task| task.process.pid == task.process.tgid)
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
