//! Tasks by other ways than their list: the table of pids, what each processor runs, and what was there before.
//!
//! | seen | and | is |
//! |---|---|---|
//! | in the table of pids, before and after a sweep | not on the list | hidden from the list |
//! | run by a processor, and not ending | not on the list | hidden from the list |
//! | on the list one sweep before, and not ending | not on the list | hidden from the list |
//! | on the list, before and after the table was read | not in the table | hidden from the table |
//!
//! The kernel puts a task on the list before it is in the table and takes it out of the table
//! first, so the first row never holds of an honest one. For the last one its number is freed a
//! moment before its place on the list, under a lock: while that is held, nothing is said.
//! A task that is ending says so before it leaves the list.

use super::space::{Gathered, Space};
use super::tasks::{SweepError, Task, nowhere};
use crate::kernel::{Profile, u32_at, u64_at};
use std::collections::{BTreeMap, BTreeSet};

/// Processors of one machine, far above `[limits] vcpus`.
const MAX_PROCESSORS: usize = 64;
/// Nodes of the table of pids: more than [`MAX_TASKS`](super::tasks::MAX_TASKS) numbers can need.
const MAX_NODES: usize = 16_384;
/// Bytes of a node's slots: 64 of them, or 16 in a kernel with CONFIG_BASE_SMALL (`XA_CHUNK_SIZE`, `include/linux/xarray.h`).
const SLOTS_BYTES: [u32; 2] = [64 * 8, 16 * 8];
/// Levels of the tree: a number's 32 bits by four each, and the entries.
const LEVELS: usize = 9;
/// The first byte of a `qrwlock` that is held for writing (`include/asm-generic/qrwlock_types.h`).
const WRITE_LOCKED: u8 = 0xff;

/// A task that one view has and another lacks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Suspect {
    /// Its address.
    pub task: u64,
    /// When it began.
    pub start: u64,
    /// Its number.
    pub pid: i32,
    /// What it calls itself.
    pub name: String,
    /// Which views differ.
    pub how: &'static str,
}

const IN_TABLE: &str = "it is in the table of pids and not on the list of tasks";
const RUNS: &str = "a processor runs it and it is not on the list of tasks";
const WAS_LISTED: &str = "it left the list of tasks and is not ending";
const NOT_IN_TABLE: &str = "it is on the list of tasks and not in the table of pids";

/// What is read before a sweep.
#[derive(Debug, Default)]
pub struct Views {
    /// Addresses of the entries of the table of pids, ascending.
    table: Vec<u64>,
    running: Vec<u64>,
    before: Vec<(u64, u64, i32)>,
}

/// The processors' queues.
#[derive(Clone, Debug, Default)]
pub struct Processors {
    /// The address of each queue, and of the task that runs there when no other does.
    queues: Vec<(u64, u64)>,
}

impl Processors {
    /// Finds them.
    ///
    /// # Errors
    /// Memory can't be read.
    pub fn find(space: &Space<'_>, profile: &Profile) -> Result<Processors, SweepError> {
        let (o, symbols) = (&profile.offsets, &profile.symbols);
        let offsets = space.at(symbols.per_cpu_offset, symbols.text);
        let offsets =
            space.gather((0..MAX_PROCESSORS as u64).map(|cpu| (offsets.wrapping_add(cpu * 8), 8)))?;
        // The first processor's task is the kernel's first; those that do not exist have none.
        let queue = |cpu: usize| Some(offsets.u64(cpu, 0)?.wrapping_add(symbols.runqueues));
        let queues: Vec<u64> = (0..MAX_PROCESSORS).filter_map(queue).collect();
        let idle = space.gather(queues.iter().map(|queue| (queue.wrapping_add(u64::from(o.rq_idle)), 8)))?;
        let tasks: Vec<u64> = (0..queues.len()).map(|at| idle.u64(at, 0).unwrap_or(0)).collect();
        let names = space.gather(tasks.iter().map(|task| (task.wrapping_add(u64::from(o.task_comm)), 8)))?;
        let is_idle = |at: usize| names.get(at).is_some_and(|name| name.starts_with(b"swapper/"));
        let all = queues.into_iter().zip(tasks).enumerate();
        let queues = all.filter(|(at, (_, task))| *task != 0 && is_idle(*at)).map(|(_, pair)| pair).collect();
        Ok(Processors { queues })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.queues.len()
    }

    /// What each runs now, but for its idle task.
    pub(super) fn running(&self, space: &Space<'_>, profile: &Profile) -> Result<Vec<u64>, SweepError> {
        let current = u64::from(profile.offsets.rq_curr);
        let read = space.gather(self.queues.iter().map(|(queue, _)| (queue.wrapping_add(current), 8)))?;
        let runs = self
            .queues
            .iter()
            .enumerate()
            .filter_map(|(at, (_, idle))| read.u64(at, 0).filter(|task| task != idle && *task != 0));
        Ok(runs.collect())
    }
}

/// Entries of the table of pids: a tree of nodes with 64 or 16 slots (`lib/xarray.c`).
///
/// # Errors
/// The tree makes no sense, or memory can't be read.
pub(super) fn table(space: &Space<'_>, profile: &Profile) -> Result<Vec<u64>, SweepError> {
    const TORN: SweepError = SweepError::Torn("the table of pids leads out of memory");
    let o = &profile.offsets;
    let head =
        space.at(profile.symbols.init_pid_ns, profile.symbols.text).wrapping_add(u64::from(o.pid_ns_idr));
    let head = space.u64(head).map_err(nowhere(|_| TORN))?;
    let (mut entries, mut level, mut nodes) = (Vec::new(), vec![head], 0usize);
    let bytes = o.xa_marks.saturating_sub(o.xa_slots);
    if !SLOTS_BYTES.contains(&bytes) {
        return Err(TORN);
    }
    for _ in 0..LEVELS {
        // A node has 2 in its lowest bits; anything else that is there is an entry, aligned as all structures are.
        let inner: Vec<u64> = level.iter().copied().filter(|entry| entry & 3 == 2 && *entry > 4096).collect();
        entries.extend(level.into_iter().filter(|entry| entry & 3 == 0 && *entry != 0));
        nodes += inner.len();
        if inner.is_empty() {
            entries.sort_unstable();
            return Ok(entries);
        }
        if nodes > MAX_NODES {
            break;
        }
        let slots =
            inner.iter().map(|node| ((node & !3).wrapping_add(u64::from(o.xa_slots)), bytes as usize));
        let read = space.gather(slots)?;
        level = Vec::with_capacity(inner.len() * (bytes as usize / 8));
        for at in 0..inner.len() {
            let slots = read.get(at).ok_or(TORN)?;
            level.extend(
                slots
                    .as_chunks::<8>()
                    .0
                    .iter()
                    .map(|slot| u64::from_le_bytes(*slot))
                    .filter(|slot| *slot != 0),
            );
        }
    }
    Err(SweepError::Torn("the table of pids does not end"))
}

/// Whether a process is appearing or going right now.
fn is_locked(space: &Space<'_>, profile: &Profile) -> Result<bool, SweepError> {
    let mut byte = [0];
    let torn = |_| SweepError::Torn("the lock of the list of tasks leads out of memory");
    space
        .read(space.at(profile.symbols.tasklist_lock, profile.symbols.text), &mut byte)
        .map_err(nowhere(torn))?;
    Ok(byte == [WRITE_LOCKED])
}

impl Views {
    /// Reads the other views. A sweep must follow; `tasks` are those of the one before.
    ///
    /// # Errors
    /// A table makes no sense, or memory can't be read.
    pub fn read(
        space: &Space<'_>,
        profile: &Profile,
        processors: &Processors,
        tasks: &[Task],
    ) -> Result<Views, SweepError> {
        let table = table(space, profile)?;
        let running = processors.running(space, profile)?;
        let before =
            tasks.iter().map(|task| (task.address, task.process.start_ns, task.process.pid)).collect();
        Ok(Views { table, running, before })
    }

    /// The entries of the table of pids.
    pub(super) fn into_table(self) -> Vec<u64> {
        self.table
    }

    /// Reads them again, to compare with another sweep; which tasks were there before stays as it was.
    ///
    /// # Errors
    /// As [`Views::read`].
    pub fn again(
        &self,
        space: &Space<'_>,
        profile: &Profile,
        processors: &Processors,
    ) -> Result<Views, SweepError> {
        Ok(Views { before: self.before.clone(), ..Views::read(space, profile, processors, &[])? })
    }

    /// Compares them with the sweep that followed. What is found may be on its way: it counts when it is found again.
    ///
    /// # Errors
    /// Memory can't be read.
    pub fn suspects(
        &self,
        space: &Space<'_>,
        profile: &Profile,
        tasks: &[Task],
    ) -> Result<Vec<Suspect>, SweepError> {
        let listed = ascending(tasks.iter().map(|task| task.address));
        let mut suspects = BTreeMap::new();
        for (task, how) in self.off_the_list(space, profile, tasks, &listed)? {
            suspects.entry(task).or_insert(how);
        }
        let mut found = described(space, profile, suspects)?;
        // Those that appeared meanwhile are in the table by now.
        let absent = |table: &[u64], task: &&Task| task.process.pid != 0 && !has(table, task.number);
        let mut unnumbered: Vec<&Task> = tasks.iter().filter(|task| absent(&self.table, task)).collect();
        if !unnumbered.is_empty() {
            let table = table(space, profile)?;
            unnumbered.retain(|task| absent(&table, task));
        }
        if !unnumbered.is_empty() && !is_locked(space, profile)? {
            found.extend(unnumbered.into_iter().map(|task| Suspect {
                task: task.address,
                start: task.process.start_ns,
                pid: task.process.pid,
                name: task.process.name.clone(),
                how: NOT_IN_TABLE,
            }));
        }
        Ok(found)
    }

    fn off_the_list(
        &self,
        space: &Space<'_>,
        profile: &Profile,
        tasks: &[Task],
        listed: &[u64],
    ) -> Result<Vec<(u64, &'static str)>, SweepError> {
        let o = &profile.offsets;
        let mut found = Vec::new();
        // Numbers whose task is none of the listed ones; one that is a group's or a session's alone has none.
        let numbers = ascending(tasks.iter().map(|task| task.number));
        let rest: Vec<u64> = self.table.iter().copied().filter(|entry| !has(&numbers, *entry)).collect();
        let first = space.gather(rest.iter().map(|entry| (entry.wrapping_add(u64::from(o.pid_tasks)), 8)))?;
        for at in 0..rest.len() {
            let Some(link) = first.u64(at, 0).filter(|link| *link != 0) else { continue };
            let task = link.wrapping_sub(u64::from(o.task_pid_links));
            if !has(listed, task) {
                found.push((task, IN_TABLE));
            }
        }
        let gone: Vec<(u64, u64, i32)> =
            self.before.iter().copied().filter(|(task, ..)| !has(listed, *task)).collect();
        let states = Alive::read(space, profile, gone.iter().map(|(task, ..)| *task))?;
        for (at, (task, start, pid)) in gone.into_iter().enumerate() {
            if states.get(at).is_some_and(|state| !state.ending && state.start == start && state.pid == pid) {
                found.push((task, WAS_LISTED));
            }
        }
        let running: Vec<u64> = self.running.iter().copied().filter(|task| !has(listed, *task)).collect();
        let states = Alive::read(space, profile, running.iter().copied())?;
        for (at, task) in running.into_iter().enumerate() {
            if states.get(at).is_some_and(|state| !state.ending) {
                found.push((task, RUNS));
            }
        }
        Ok(found)
    }
}

fn ascending(numbers: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut all: Vec<u64> = numbers.collect();
    all.sort_unstable();
    all
}

fn has(ascending: &[u64], number: u64) -> bool {
    ascending.binary_search(&number).is_ok()
}

/// What a task that is on no list says of itself.
struct Alive {
    bytes: Gathered,
    offsets: [usize; 4],
}

struct State {
    start: u64,
    pid: i32,
    name: String,
    ending: bool,
}

impl Alive {
    fn read(
        space: &Space<'_>,
        profile: &Profile,
        tasks: impl Iterator<Item = u64>,
    ) -> Result<Alive, SweepError> {
        let o = &profile.offsets;
        let all = [o.task_start, o.task_pid, o.task_comm, o.task_exit_state];
        let start = all.into_iter().min().unwrap_or(0);
        let end = all.into_iter().max().unwrap_or(0).saturating_add(16);
        let bytes =
            space.gather(tasks.map(|task| (task.wrapping_add(u64::from(start)), (end - start) as usize)))?;
        Ok(Alive { bytes, offsets: all.map(|at| (at - start) as usize) })
    }

    fn get(&self, at: usize) -> Option<State> {
        let bytes = self.bytes.get(at)?;
        let [start, pid, name, exit] = self.offsets;
        let comm: Vec<u8> =
            bytes.get(name..)?.iter().take(16).copied().take_while(|byte| *byte != 0).collect();
        Some(State {
            start: u64_at(bytes, start)?,
            pid: u32_at(bytes, pid)? as i32,
            name: String::from_utf8_lossy(&comm).into_owned(),
            ending: u32_at(bytes, exit)? != 0,
        })
    }
}

fn described(
    space: &Space<'_>,
    profile: &Profile,
    suspects: BTreeMap<u64, &'static str>,
) -> Result<Vec<Suspect>, SweepError> {
    let states = Alive::read(space, profile, suspects.keys().copied())?;
    let all = suspects.into_iter().enumerate().filter_map(|(at, (task, how))| {
        let State { start, pid, name, .. } = states.get(at)?;
        Some(Suspect { task, start, pid, name, how })
    });
    Ok(all.collect())
}

/// Those that both have: the same task, however it shows.
pub fn in_both(first: &[Suspect], second: Vec<Suspect>) -> Vec<Suspect> {
    let known: BTreeSet<(u64, u64, i32, bool)> = first.iter().map(Suspect::key).collect();
    second.into_iter().filter(|suspect| known.contains(&suspect.key())).collect()
}

impl Suspect {
    fn key(&self) -> (u64, u64, i32, bool) {
        (self.task, self.start, self.pid, self.how == NOT_IN_TABLE)
    }
}
