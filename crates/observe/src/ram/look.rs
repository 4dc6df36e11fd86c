//! One look: what is read, in which order, and what of it is a violation.

use super::files::arguments;
use super::hidden::{self, Processors, Suspect, Views, in_both};
use super::lists::{self, FileSystem, NetDevice, mount_changes};
use super::memo::Memo;
use super::memory::ReadError;
use super::namespaces;
use super::retry;
use super::space::Space;
use super::tasks::{Places, SweepError, Task, TaskReader};
use super::text::{Guard, Part};
use crate::kernel::Profile;
use crate::observer::{ObserveError, Sightings};
use hotcell_decide::process::{Finding, MAX_SEEN, MAX_SEEN_CHARS};
use hotcell_decide::{HostFact, Life, Place, Process, ProcessRules, ViolationKind};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Processes of one look that are named: one is enough to kill, the others are for whoever reads the record.
const MAX_FINDINGS: usize = 16;
/// Bytes of arguments that are read: more than a path has.
const MAX_ARGUMENTS: usize = 8192;
/// Processes that the record names in one run; a build or a test suite has thousands, whose names nobody reads one by one.
const MAX_NAMED: usize = 1024;
/// Looks in which file systems and mounts are read once: they are the longest of the lists, and 50 ms more are no harm.
const MOUNT_PASS: u64 = 2;
/// Readings that must show what is found, after the first.
const CONFIRMATIONS: usize = 2;

/// What later looks compare with, and what makes them cheap.
pub(super) struct State {
    pub(super) places: Places,
    pub(super) modules: Vec<String>,
    pub(super) mounted: Vec<FileSystem>,
    pub(super) processors: Processors,
    namespaces: BTreeSet<u64>,
    named: usize,
    total: u64,
    looks: u64,
    /// The table of pids when tasks were read last.
    table: Vec<u64>,
    /// Whether the next look may leave tasks to the one after: this one read them, and none had come or gone since they were
    /// read before.
    may_wait: bool,
    memo: Memos,
}

/// What a look must read of tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// All.
    All,
    /// All, or at the next look where none comes or goes.
    Turn,
    /// The VMM has not run since they were read, so they are as they were.
    Still,
}

#[derive(Default)]
struct Memos {
    modules: Memo<Vec<String>>,
    devices: Memo<Vec<NetDevice>>,
    mounted: Memo<Vec<FileSystem>>,
    table: Memo<Vec<u64>>,
}

impl State {
    /// The state now.
    pub(super) fn new(
        space: &Space<'_>,
        profile: &Profile,
        tasks: &[Task],
        places: Places,
    ) -> Result<State, SweepError> {
        Ok(State {
            places,
            modules: lists::modules(space, profile)?,
            mounted: lists::file_systems(space, profile)?,
            processors: Processors::find(space, profile)?,
            namespaces: namespaces::known(space, profile, tasks)?,
            named: 0,
            total: 0,
            looks: 0,
            table: Vec::new(),
            may_wait: false,
            memo: Memos::default(),
        })
    }
}

/// Why a look has no result.
pub(super) enum Unseen {
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

/// What a look looks at, and by what it judges.
pub(super) struct Sight<'a> {
    pub(super) space: &'a Space<'a>,
    pub(super) profile: &'a Profile,
    pub(super) rules: &'a ProcessRules,
    /// Whether arguments are wanted of everybody.
    pub(super) shown: bool,
}

/// Looks once; gives whether tasks were read, and not only what is read by turns.
pub(super) fn look(
    sight: &Sight<'_>,
    reach: Reach,
    reader: &mut TaskReader,
    guard: &mut Guard,
    state: &mut State,
    seen: &mut Sightings,
) -> Result<bool, Unseen> {
    let due = tasks_are_due(sight, reach, reader, state)?;
    // Once they were put off, or could not be read, they are due.
    state.may_wait = false;
    if due {
        processes(sight, reader, state, seen)?;
    }
    system(sight, state, seen)?;
    for change in guard.look(sight.space, sight.profile)? {
        let (kind, subject) = match change.part {
            Part::Text => (ViolationKind::KernelTextChanged, "text"),
            Part::ReadOnly => (ViolationKind::KernelTextChanged, "read-only data"),
            Part::Table => (ViolationKind::KernelTableChanged, "system call or interrupt table"),
        };
        violation(seen, kind, subject, change.detail)?;
    }
    Ok(due)
}

fn tasks_are_due(
    sight: &Sight<'_>,
    reach: Reach,
    reader: &mut TaskReader,
    state: &mut State,
) -> Result<bool, SweepError> {
    let Sight { space, profile, .. } = *sight;
    if reach == Reach::All || (reach == Reach::Turn && !state.may_wait) {
        return Ok(true);
    }
    if reach == Reach::Turn {
        let table = state.memo.table.get(space, |space| hidden::table(space, profile))?;
        if *table != state.table {
            return Ok(true);
        }
        let running = state.processors.running(space, profile)?;
        let known = |address: &u64| reader.tasks().iter().any(|task| task.address == *address);
        if !running.iter().all(known) {
            return Ok(true);
        }
    }
    Ok(!reader.files_stand(space, profile)?)
}

fn violation(
    seen: &mut Sightings,
    kind: ViolationKind,
    subject: &str,
    detail: String,
) -> Result<(), ObserveError> {
    seen.fact(HostFact::Violation { kind, subject: subject.into(), detail })
}

/// Tasks, by the list and by the other views.
fn processes(
    sight: &Sight<'_>,
    reader: &mut TaskReader,
    state: &mut State,
    seen: &mut Sightings,
) -> Result<(), Unseen> {
    let Sight { space, profile, .. } = *sight;
    let views = retry(|| Views::read(space, profile, &state.processors, reader.tasks()))?;
    let mut found = sweep(sight, reader, state)?;
    let mut suspects = views.suspects(space, profile, reader.tasks())?;
    for _ in 0..CONFIRMATIONS {
        if found.is_empty() && suspects.is_empty() {
            break;
        }
        // Read again: what was torn, or on its way, is gone then.
        let views = retry(|| views.again(space, profile, &state.processors))?;
        let again = sweep(sight, reader, state)?;
        found = again.into_iter().filter(|(who, _)| found.contains_key(who)).collect();
        suspects = in_both(&suspects, views.suspects(space, profile, reader.tasks())?);
    }
    for finding in found.values().take(MAX_FINDINGS) {
        violation(seen, finding.kind, &finding.subject, finding.detail.clone())?;
    }
    for Suspect { pid, name, how, .. } in suspects.iter().take(MAX_FINDINGS) {
        violation(seen, ViolationKind::HiddenProcess, &format!("process {pid} {name:?}"), (*how).into())?;
    }
    for task in reader.tasks() {
        // What has no memory is judged by its parent, and a service by its arguments, which may change.
        let lasting =
            !matches!(task.process.life, Life::NoMemory) && !sight.rules.asks_for_argv(&task.process);
        task.settled = lasting && !found.contains_key(&who(task));
    }
    name_new(sight, state, reader.tasks(), seen)?;
    let table = views.into_table();
    state.may_wait = table == state.table;
    state.table = table;
    Ok(())
}

fn who(task: &Task) -> (i32, u64) {
    (task.process.pid, task.process.start_ns)
}

/// Reads every task, and gives what the rules find of those that are not as they were.
fn sweep(
    sight: &Sight<'_>,
    reader: &mut TaskReader,
    state: &State,
) -> Result<BTreeMap<(i32, u64), Finding>, SweepError> {
    let Sight { space, profile, rules, .. } = *sight;
    retry(|| reader.sweep(space, profile, &state.places).map(drop))?;
    let tasks = reader.tasks();
    for task in tasks.iter_mut().filter(|task| rules.asks_for_argv(&task.process)) {
        task.process.argv = arguments(space, profile, task.mm, MAX_ARGUMENTS)?;
    }
    let strange = namespaces::unknown(space, profile, tasks, &state.namespaces)?;
    Ok(findings(tasks, rules, &state.namespaces, &strange))
}

/// Everything that the rules find, by process.
fn findings(
    tasks: &[Task],
    rules: &ProcessRules,
    known: &BTreeSet<u64>,
    strange: &HashMap<u64, &'static str>,
) -> BTreeMap<(i32, u64), Finding> {
    let mut by_pid: Option<HashMap<i32, &Process>> = None;
    let mut found = BTreeMap::new();
    for task in tasks {
        let process = &task.process;
        if let Some(kind) = strange.get(&task.nsproxy) {
            found.insert(who(task), stranger(process, kind));
        }
        if task.settled {
            continue;
        }
        if !known.contains(&task.user_namespace) {
            found.insert(who(task), stranger(process, "user"));
        }
        let by_pid = by_pid
            .get_or_insert_with(|| tasks.iter().map(|task| (task.process.pid, &task.process)).collect());
        let parent = by_pid.get(&process.parent).copied();
        if let Some(finding) = rules.judge(process, parent) {
            found.insert(who(task), finding);
        }
    }
    found
}

fn stranger(process: &Process, kind: &str) -> Finding {
    Finding {
        kind: ViolationKind::UnexplainedNamespace,
        subject: format!("process {} {:?}", process.pid, process.name),
        detail: format!("it is in a {kind} namespace that did not exist when the guest was ready"),
    }
}

/// Modules, network devices, file systems and mounts.
fn system(sight: &Sight<'_>, state: &mut State, seen: &mut Sightings) -> Result<(), Unseen> {
    let Sight { space, profile, .. } = *sight;
    let memo = &mut state.memo;
    let modules = memo.modules.get(space, |space| lists::modules(space, profile))?;
    for module in modules.iter().filter(|module| !state.modules.contains(module)) {
        violation(seen, ViolationKind::ModuleLoaded, module, "it was not loaded at ready".into())?;
    }
    let devices = memo.devices.get(space, |space| lists::net_devices(space, profile))?;
    for device in devices.iter().filter(|device| !device.loopback) {
        violation(seen, ViolationKind::NetworkDevice, &device.name, "the guest's kernel lists it".into())?;
    }
    let looks_before = state.looks;
    state.looks += 1;
    if !looks_before.is_multiple_of(MOUNT_PASS) {
        return Ok(());
    }
    let mounted = memo.mounted.get(space, |space| lists::file_systems(space, profile))?;
    let root = mounted.iter().find(|one| one.super_block == state.places.root);
    let root = root.ok_or(SweepError::Torn("the root is not on the list of file systems"))?;
    if root.is_writable() {
        violation(seen, ViolationKind::WritableRoot, "root", format!("mounted writable: {:?}", root.mounts))?;
    }
    if root.disk_read_only == Some(false) {
        violation(seen, ViolationKind::WritableRoot, "root", "its disk is attached writable".into())?;
    }
    let changes = mount_changes(&state.mounted, mounted, state.places.root);
    if !changes.is_empty() {
        let again = retry(|| lists::file_systems(space, profile))?;
        let again = mount_changes(&state.mounted, &again, state.places.root);
        for (subject, detail) in
            changes.into_iter().filter(|change| again.contains(change)).take(MAX_FINDINGS)
        {
            violation(seen, ViolationKind::UnexplainedMount, &subject, detail)?;
        }
    }
    Ok(())
}

/// Records processes that are new, or have become another program.
fn name_new(
    sight: &Sight<'_>,
    state: &mut State,
    tasks: &mut [Task],
    seen: &mut Sightings,
) -> Result<(), Unseen> {
    let live = tasks.len() as u64;
    let (mut fresh, mut left_out) = (Vec::new(), 0);
    let Sight { space, profile, shown, .. } = *sight;
    let wanted = |task: &&mut Task| (shown || !task.named) && task.process.pid == task.process.tgid;
    for task in tasks.iter_mut().filter(wanted) {
        let process = &task.process;
        // Between its fork and its program an exec is the init's own.
        if process.executable().is_none_or(|file| file.place == Place::Initramfs) {
            continue;
        }
        if shown && process.argv.is_empty() {
            task.process.argv = arguments(space, profile, task.mm, MAX_SEEN_CHARS)?;
        }
        if task.named {
            continue;
        }
        task.named = true;
        state.total += 1;
        if fresh.len() < MAX_SEEN && state.named < MAX_NAMED {
            state.named += 1;
            let argv = arguments(space, profile, task.mm, MAX_SEEN_CHARS)?;
            fresh.extend(Process { argv, ..task.process.clone() }.seen());
        } else {
            left_out += 1;
        }
    }
    // Past the limit the totals come with the next that is named, or with none.
    if !fresh.is_empty() {
        seen.fact(HostFact::Processes { seen: fresh, left_out, live, total: state.total })?;
    }
    Ok(())
}
