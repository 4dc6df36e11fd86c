//! Every task of the guest's kernel, by the list that the kernel keeps itself.
//!
//! One sweep reads in three steps, each for all tasks at once: the tasks, what memory and file
//! each has, and last its credentials. Last, because a process on its way from PID 1 to the
//! workload gives up its privilege first and becomes another program after: read in this
//! order, an honest one is never seen as a privileged other program.
//!
//! The list changes while it is read. Each task must point back to the one that led to it, so a
//! walk that goes through saw one list and all of it; one that does not is an error, and whoever
//! calls reads again.
//!
//! What was read of a task is compared with the sweep before: only one that differs is described
//! anew, and only that one has to be judged.

use super::files::{FileFacts, Files};
use super::memory::ReadError;
use super::space::{Gathered, Space};
use crate::kernel::{Profile, u32_at, u64_at};
use hotcell_decide::{Life, Process};
use std::collections::HashMap;

/// Tasks that are read at most: far above `[limits] pids` and kernel threads together.
pub(super) const MAX_TASKS: usize = 8192;
/// Sweeps in which the file of every process is read once, whatever says that it is the same.
const FILE_PASS: u64 = 16;
/// `PF_KTHREAD` (`include/linux/sched.h`).
const KERNEL_THREAD: u32 = 0x0020_0000;

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
    /// The address of its set of namespaces; 0 where it is ending.
    pub nsproxy: u64,
    /// The address of its user namespace.
    pub user_namespace: u64,
    /// The address of its number's entry in the table of pids.
    pub number: u64,
    /// Whether it was judged as it is now, and nothing was found. Whoever judges sets it.
    pub settled: bool,
    /// Whether the record names it under the file that it runs from. Whoever names sets it.
    pub named: bool,
}

/// Reads tasks; keeps what makes the next sweep cheap.
#[derive(Debug, Default)]
pub struct TaskReader {
    tasks: Vec<Task>,
    /// What each task's description was made of, together with the places.
    facts: Vec<Facts>,
    places: Places,
    files: Files,
    bodies: Gathered,
    small: Gathered,
    sweeps: u64,
}

/// All that is read of a task. Two that are the same are the same task in the same state.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Facts {
    address: u64,
    pid: u32,
    tgid: u32,
    start: u64,
    comm: [u8; 16],
    parent: u64,
    mm: u64,
    nsproxy: u64,
    number: u64,
    seccomp: u32,
    /// How often it became another program.
    exec: u64,
    kernel: bool,
    file: Option<FileFacts>,
    cred: Cred,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Cred {
    uids: [u32; 4],
    gid: u32,
    capabilities: u64,
    user_namespace: u64,
}

/// The part of `task_struct` that is read.
#[derive(Clone, Copy, Debug)]
struct Layout {
    start: u32,
    bytes: usize,
}

impl Layout {
    fn of(profile: &Profile) -> Layout {
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
            (o.task_number, 8),
            (o.task_exec_id, 8),
        ];
        let start = ends.iter().map(|(at, _)| *at).min().unwrap_or(0);
        let end = ends.iter().map(|(at, length)| at.saturating_add(*length)).max().unwrap_or(0);
        Layout { start, bytes: end.saturating_sub(start).min(1 << 16) as usize }
    }

    fn place(self, task: u64) -> (u64, usize) {
        (task.wrapping_add(u64::from(self.start)), self.bytes)
    }
}

/// The bytes of one task.
#[derive(Clone, Copy)]
struct Raw<'a> {
    address: u64,
    body: &'a [u8],
    start: u32,
}

impl Raw<'_> {
    fn u32(&self, offset: u32) -> u32 {
        offset.checked_sub(self.start).and_then(|at| u32_at(self.body, at as usize)).unwrap_or(0)
    }

    fn u64(&self, offset: u32) -> u64 {
        offset.checked_sub(self.start).and_then(|at| u64_at(self.body, at as usize)).unwrap_or(0)
    }

    /// A list's node: what follows, and what went before.
    fn node(&self, offset: u32) -> (u64, u64) {
        (self.u64(offset), self.u64(offset.saturating_add(8)))
    }
}

impl TaskReader {
    /// One sweep over every process and every thread, the idle task first.
    ///
    /// # Errors
    /// The list is torn, or memory can't be read.
    pub fn sweep(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        places: &Places,
    ) -> Result<&mut [Task], SweepError> {
        let layout = Layout::of(profile);
        let mut bodies = std::mem::take(&mut self.bodies);
        let read = space.gather_again(self.tasks.iter().map(|task| layout.place(task.address)), &mut bodies);
        let facts = read.map_err(SweepError::from).and_then(|()| {
            let mut walk = Walk::new(space, profile, layout, &self.tasks, &bodies);
            walk.all()?;
            let raws: Vec<Raw<'_>> = walk.order.iter().filter_map(|found| walk.raw(*found)).collect();
            let mut facts = own(profile, &raws);
            self.sweeps += 1;
            origins(
                space,
                profile,
                &mut facts,
                &self.facts,
                (&mut self.files, &mut self.small, self.sweeps),
            )?;
            credentials(space, profile, &raws, &mut facts, &mut self.small)?;
            Ok(facts)
        });
        self.bodies = bodies;
        if self.places != *places {
            self.places = places.clone();
            self.facts.clear();
        }
        self.describe(space, profile, places, facts?)?;
        Ok(&mut self.tasks)
    }

    /// In place of a sweep where no task can have changed: reads the files whose turn it is, and gives whether they are as
    /// they were. If not, it is their turn in the next sweep again.
    ///
    /// # Errors
    /// Memory can't be read.
    pub(super) fn files_stand(&mut self, space: &Space<'_>, profile: &Profile) -> Result<bool, SweepError> {
        let sweep = self.sweeps + 1;
        let turn = self.facts.iter().enumerate().filter(|(at, _)| has_turn(*at, sweep));
        let tasks: Vec<&Facts> = turn.map(|(_, task)| task).collect();
        let found = origins_of(space, profile, &tasks, (&mut self.files, &mut self.small))?;
        let stand = tasks.into_iter().map(|task| (task.kernel, task.file)).eq(found);
        if stand {
            self.sweeps = sweep;
        }
        Ok(stand)
    }

    /// The tasks of the last sweep.
    pub fn tasks(&mut self) -> &mut [Task] {
        &mut self.tasks
    }

    /// Describes what differs from the sweep before; the rest stays as it is.
    fn describe(
        &mut self,
        space: &Space<'_>,
        profile: &Profile,
        places: &Places,
        facts: Vec<Facts>,
    ) -> Result<(), SweepError> {
        // Where the list is as it was, so are the positions.
        let same_list = facts.iter().map(|new| new.address).eq(self.facts.iter().map(|old| old.address));
        let old: HashMap<u64, usize> = match same_list {
            true => HashMap::new(),
            false => self.facts.iter().enumerate().map(|(at, old)| (old.address, at)).collect(),
        };
        let position =
            |at: usize, new: &Facts| if same_list { Some(at) } else { old.get(&new.address).copied() };
        let mut groups: Option<HashMap<u64, u32>> = None;
        let mut described = Vec::new();
        for (at, new) in facts.iter().enumerate() {
            let before = position(at, new).and_then(|at| Some((self.facts.get(at)?, self.tasks.get(at)?)));
            if before.is_some_and(|(old, _)| old == new) {
                continue;
            }
            let groups =
                groups.get_or_insert_with(|| facts.iter().map(|one| (one.address, one.tgid)).collect());
            let process = Process {
                pid: new.pid as i32,
                tgid: new.tgid as i32,
                parent: groups.get(&new.parent).map_or(-1, |tgid| *tgid as i32),
                start_ns: new.start,
                name: name(&new.comm),
                uids: new.cred.uids,
                gid: new.cred.gid,
                capabilities: new.cred.capabilities,
                seccomp: new.seccomp,
                life: match (new.mm, new.kernel) {
                    (0, true) => Life::KernelThread,
                    (0, false) => Life::NoMemory,
                    _ => Life::Running(match &new.file {
                        Some(file) => Some(self.files.describe(space, profile, places, file)?),
                        None => None,
                    }),
                },
                argv: Vec::new(),
            };
            let named = before.is_some_and(|(old, task)| {
                task.named && old.start == new.start && task.process.executable() == process.executable()
            });
            described.push((
                at,
                Task {
                    address: new.address,
                    mm: new.mm,
                    process,
                    nsproxy: new.nsproxy,
                    user_namespace: new.cred.user_namespace,
                    number: new.number,
                    settled: false,
                    named,
                },
            ));
        }
        // Nothing fails from here on, so the two lists stay one.
        if same_list {
            for (at, task) in described {
                if let Some(place) = self.tasks.get_mut(at) {
                    *place = task;
                }
            }
        } else {
            let mut before: Vec<Option<Task>> =
                std::mem::take(&mut self.tasks).into_iter().map(Some).collect();
            let mut described = described.into_iter().peekable();
            for (at, new) in facts.iter().enumerate() {
                let task = match described.next_if(|(position, _)| *position == at) {
                    Some((_, task)) => Some(task),
                    None => position(at, new).and_then(|at| before.get_mut(at)?.take()),
                };
                self.tasks.extend(task);
            }
        }
        self.facts = facts;
        Ok(())
    }
}

/// What lies in the task itself.
fn own(profile: &Profile, raws: &[Raw<'_>]) -> Vec<Facts> {
    let o = &profile.offsets;
    let facts = |raw: &Raw<'_>| {
        let mut comm = [0; 16];
        let from = raw.body.get(o.task_comm.saturating_sub(raw.start) as usize..).unwrap_or_default();
        comm.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        Facts {
            address: raw.address,
            pid: raw.u32(o.task_pid),
            tgid: raw.u32(o.task_tgid),
            start: raw.u64(o.task_start),
            comm,
            parent: raw.u64(o.task_parent),
            mm: raw.u64(o.task_mm),
            nsproxy: raw.u64(o.task_nsproxy),
            number: raw.u64(o.task_number),
            seccomp: raw.u32(o.task_seccomp),
            exec: raw.u64(o.task_exec_id),
            kernel: false,
            file: None,
            cred: Cred::default(),
        }
    };
    raws.iter().map(facts).collect()
}

/// What each task is: a part of the kernel, or which file it runs from. A task that has executed nothing since the sweep
/// before, by its kernel's count, still has the memory and the file of then; they are read again in turn.
fn origins(
    space: &Space<'_>,
    profile: &Profile,
    facts: &mut [Facts],
    before: &[Facts],
    (files, small, sweep): (&mut Files, &mut Gathered, u64),
) -> Result<(), SweepError> {
    let mut old: Option<HashMap<u64, &Facts>> = None;
    let mut fresh = Vec::new();
    for (at, new) in facts.iter_mut().enumerate() {
        let here = before.get(at).filter(|old| old.address == new.address);
        let known = here.or_else(|| {
            let old = old.get_or_insert_with(|| before.iter().map(|old| (old.address, old)).collect());
            old.get(&new.address).copied()
        });
        let same = known.filter(|old| (old.start, old.exec, old.mm) == (new.start, new.exec, new.mm));
        match same.filter(|_| !has_turn(at, sweep)) {
            Some(old) => (new.kernel, new.file) = (old.kernel, old.file),
            None => fresh.push(at),
        }
    }
    let tasks: Vec<&Facts> = fresh.iter().filter_map(|at| facts.get(*at)).collect();
    let found = origins_of(space, profile, &tasks, (files, small))?;
    for (at, origin) in fresh.into_iter().zip(found) {
        if let Some(new) = facts.get_mut(at) {
            (new.kernel, new.file) = origin;
        }
    }
    Ok(())
}

/// Whether this sweep reads the file of the task at this position in any case.
fn has_turn(at: usize, sweep: u64) -> bool {
    (at as u64).wrapping_add(sweep).is_multiple_of(FILE_PASS)
}

/// Reads of each of these tasks whether it is a part of the kernel, and its file.
fn origins_of(
    space: &Space<'_>,
    profile: &Profile,
    tasks: &[&Facts],
    (files, small): (&mut Files, &mut Gathered),
) -> Result<Vec<(bool, Option<FileFacts>)>, SweepError> {
    let o = &profile.offsets;
    // A task that has memory is no part of the kernel, whatever its flags say.
    let place = |task: &&Facts| match task.mm {
        0 => (task.address.wrapping_add(u64::from(o.task_flags)), 4),
        mm => (mm.wrapping_add(u64::from(o.mm_exe_file)), 8),
    };
    space.gather_again(tasks.iter().map(place), small)?;
    let opened = |(at, task): (usize, &&Facts)| if task.mm == 0 { 0 } else { small.u64(at, 0).unwrap_or(0) };
    let opened: Vec<u64> = tasks.iter().enumerate().map(opened).collect();
    let found = files.read(space, profile, &opened)?;
    let origin = |(at, (task, file)): (usize, (&&Facts, &u64))| {
        let flags = small.get(at).and_then(|bytes| u32_at(bytes, 0)).unwrap_or(0);
        (task.mm == 0 && flags & KERNEL_THREAD != 0, found.get(file).copied())
    };
    Ok(tasks.iter().zip(&opened).enumerate().map(origin).collect())
}

/// Whose each task is. Always read: who has another user by a changed credential has a changed credential alone.
fn credentials(
    space: &Space<'_>,
    profile: &Profile,
    raws: &[Raw<'_>],
    facts: &mut [Facts],
    small: &mut Gathered,
) -> Result<(), SweepError> {
    let o = &profile.offsets;
    let ids = [o.cred_uid, o.cred_gid, o.cred_suid, o.cred_euid, o.cred_fsuid];
    let sets = [o.cred_inheritable, o.cred_permitted, o.cred_effective, o.cred_ambient, o.cred_user_ns];
    let bytes = ids.into_iter().chain(sets).max().unwrap_or(0) as usize + 8;
    space.gather_near(raws.iter().map(|raw| (raw.u64(o.task_cred), bytes)), small)?;
    for (at, new) in facts.iter_mut().enumerate() {
        new.cred = cred(small.get(at).ok_or(SweepError::Torn("a task without credentials"))?, profile);
    }
    Ok(())
}

fn name(comm: &[u8; 16]) -> String {
    let end = comm.iter().position(|&byte| byte == 0).unwrap_or(comm.len());
    String::from_utf8_lossy(comm.get(..end).unwrap_or_default()).into_owned()
}

fn cred(bytes: &[u8], profile: &Profile) -> Cred {
    let o = &profile.offsets;
    let id = |offset: u32| u32_at(bytes, offset as usize).unwrap_or(0);
    let set = |offset: u32| u64_at(bytes, offset as usize).unwrap_or(0);
    Cred {
        uids: [id(o.cred_uid), id(o.cred_euid), id(o.cred_suid), id(o.cred_fsuid)],
        gid: id(o.cred_gid),
        capabilities: set(o.cred_inheritable)
            | set(o.cred_permitted)
            | set(o.cred_effective)
            | set(o.cred_ambient),
        user_namespace: set(o.cred_user_ns),
    }
}

/// Where the bytes of a task are: among those of the known ones, or among what was fetched on the way.
#[derive(Clone, Copy)]
enum Found {
    Known(usize),
    Fetched(usize),
}

/// One walk along the lists of tasks and threads.
struct Walk<'a> {
    space: &'a Space<'a>,
    profile: &'a Profile,
    layout: Layout,
    known: &'a [Task],
    bodies: &'a Gathered,
    /// Positions of the known ones, made when the order is not that of the sweep before.
    positions: Option<HashMap<u64, usize>>,
    fetched: Vec<(u64, Vec<u8>)>,
    order: Vec<Found>,
}

impl<'a> Walk<'a> {
    fn new(
        space: &'a Space<'a>,
        profile: &'a Profile,
        layout: Layout,
        known: &'a [Task],
        bodies: &'a Gathered,
    ) -> Walk<'a> {
        Walk {
            space,
            profile,
            layout,
            known,
            bodies,
            positions: None,
            fetched: Vec::new(),
            order: Vec::with_capacity(known.len() + 16),
        }
    }

    fn raw(&self, found: Found) -> Option<Raw<'_>> {
        let (address, body) = match found {
            Found::Known(at) => (self.known.get(at)?.address, self.bodies.get(at)?),
            Found::Fetched(at) => self.fetched.get(at).map(|(address, body)| (*address, body.as_slice()))?,
        };
        Some(Raw { address, body, start: self.layout.start })
    }

    /// Takes the task at this address as the next one.
    fn take(&mut self, address: u64) -> Result<(), SweepError> {
        if self.order.len() >= MAX_TASKS {
            return Err(SweepError::Torn("the list of tasks does not end"));
        }
        let expected = match self.order.last() {
            Some(Found::Known(at)) => at + 1,
            _ => 0,
        };
        let known = match self.known.get(expected).is_some_and(|task| task.address == address) {
            true => Some(expected),
            false => {
                let known = self.known;
                let positions = self.positions.get_or_insert_with(|| {
                    known.iter().enumerate().map(|(at, task)| (task.address, at)).collect()
                });
                positions.get(&address).copied()
            }
        };
        if let Some(at) = known.filter(|at| self.bodies.get(*at).is_some()) {
            self.order.push(Found::Known(at));
            return Ok(());
        }
        let (place, bytes) = self.layout.place(address);
        let mut body = vec![0; bytes];
        self.space
            .read(place, &mut body)
            .map_err(nowhere(|_| SweepError::Torn("the list of tasks leads out of memory")))?;
        self.order.push(Found::Fetched(self.fetched.len()));
        self.fetched.push((address, body));
        Ok(())
    }

    /// A list's node in the task that was taken last.
    fn node(&self, offset: u32) -> (u64, u64) {
        self.order.last().and_then(|found| self.raw(*found)).map_or((0, 0), |raw| raw.node(offset))
    }

    /// Thread groups, and the threads of those that have more than one.
    fn all(&mut self) -> Result<(), SweepError> {
        let tasks = self.profile.offsets.task_tasks;
        let init = self.space.at(self.profile.symbols.init_task, self.profile.symbols.text);
        let mut leader = init;
        let mut before = 0;
        loop {
            self.take(leader)?;
            let (next, back) = self.node(tasks);
            if leader != init && back != before {
                return Err(SweepError::Torn("the list of tasks changed"));
            }
            before = leader.wrapping_add(u64::from(tasks));
            if leader != init {
                self.threads(leader)?;
            }
            leader = next.wrapping_sub(u64::from(tasks));
            if leader == init {
                return Ok(());
            }
        }
    }

    /// The other threads of the group whose leader was taken last. The list goes through the group's own structure.
    fn threads(&mut self, leader: u64) -> Result<(), SweepError> {
        const CHANGED: SweepError = SweepError::Torn("the list of threads changed");
        let o = &self.profile.offsets;
        let (link, head) = (o.task_thread_node, u64::from(o.signal_thread_head));
        let own = leader.wrapping_add(u64::from(link));
        let Some(raw) = self.order.last().and_then(|found| self.raw(*found)) else { return Ok(()) };
        let head = raw.u64(o.task_signal).wrapping_add(head);
        let (mut node, back) = raw.node(link);
        if node == back && node == head {
            return Ok(());
        }
        let mut before = own;
        let mut through = false;
        while node != own {
            let (next, back) = if node == head && !through {
                through = true;
                let mut bytes = [0; 16];
                self.space.read(head, &mut bytes).map_err(nowhere(|_| CHANGED))?;
                (u64_at(&bytes, 0).unwrap_or(0), u64_at(&bytes, 8).unwrap_or(0))
            } else {
                self.take(node.wrapping_sub(u64::from(link)))?;
                self.node(link)
            };
            if back != before {
                return Err(CHANGED);
            }
            before = node;
            node = next;
        }
        Ok(())
    }
}

/// A string of at most so many bytes.
pub(super) fn text(space: &Space<'_>, address: u64, most: usize) -> Result<String, ReadError> {
    let mut bytes = vec![0; most];
    space.read(address, &mut bytes)?;
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(most);
    Ok(String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned())
}

/// An address that leads nowhere is torn; anything else is what it is.
pub(super) fn nowhere(torn: impl Fn(u64) -> SweepError) -> impl Fn(ReadError) -> SweepError {
    move |error| match error {
        ReadError::Nowhere(address) => torn(address),
        error => error.into(),
    }
}
