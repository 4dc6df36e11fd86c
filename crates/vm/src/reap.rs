//! Ends what a dead owner left.
//!
//! A run is *live* while its owner holds the lock on its entry; the kernel drops
//! the lock when the owner ends, however it ends. Whoever gets the lock may take
//! the run down. A process is signalled only if it is the very one that was
//! written down (number, start time, boot) *and* carries our marker for this run
//! and this registry; the check is repeated on the open pidfd, so that a number
//! that is reused in between is never hit. An entry that names another process is
//! said and left alone.
//!
//! A registry whose entries are gone is survived: VMMs of this registry are found
//! by their marker, in their own argv and environment.

use crate::jail::{members_of, remove_if_ours};
use crate::process::ProcessId;
use crate::qemu::{NAME_PREFIX, REGISTRY_VARIABLE};
use crate::registry::{Entry, GONE, HIDDEN, Registry, RegistryError, read_entry, remove_folder};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// How long a killed VMM may take to be gone, milliseconds.
const KILL_DEADLINE_MS: i64 = 10_000;
/// The file that says in an incomplete bundle what became of its run.
pub const REAPED_FILE: &str = "reaped.json";

/// A run in the registry.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// The run.
    pub run_id: String,
    /// Whether its owner is alive.
    pub live: bool,
    /// What was written down; none where it can't be read.
    pub entry: Option<Entry>,
}

/// What was done about one orphan.
#[derive(Clone, Debug, Serialize)]
pub struct Reaped {
    /// The run.
    pub run_id: String,
    /// What was done and seen, in order.
    pub actions: Vec<String>,
    /// Nothing of it is left.
    pub clean: bool,
}

impl Registry {
    /// All runs, live and orphaned, by name.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn list(&self) -> Result<Vec<Listed>, RegistryError> {
        let mut all = Vec::new();
        for dir in self.folders()? {
            let Some(run_id) = dir.file_name().map(|name| name.to_string_lossy().into_owned()) else {
                continue;
            };
            all.push(Listed { run_id, live: take_lock(&dir).is_none(), entry: read_entry(&dir) });
        }
        all.sort_by(|a, b| a.run_id.cmp(&b.run_id));
        Ok(all)
    }

    /// Ends what dead owners left. Live runs are not touched.
    ///
    /// # Errors
    /// The folder can't be read; what is wrong with a single run is in its answer.
    pub fn reap(&self) -> Result<Vec<Reaped>, RegistryError> {
        let mut all = Vec::new();
        for dir in self.folders()? {
            // Whoever holds the lock is the owner, or another reaper.
            let Some(_lock) = take_lock(&dir) else { continue };
            all.push(reap_entry(&dir, self.path()));
        }
        self.clear_half_made();
        let known: Vec<String> = self.list()?.into_iter().map(|run| run.run_id).collect();
        for (pid, run_id) in marked(self.path()) {
            if known.contains(&run_id) {
                continue;
            }
            let mut actions = vec![format!("VMM {} runs without an entry", pid.pid)];
            let cgroups = members_of(&pid, &run_id);
            let mut clean = end(&pid, &run_id, self.path(), &mut actions);
            clean &= remove_cgroups(&cgroups, &run_id, &mut actions);
            all.push(Reaped { run_id, actions, clean });
        }
        all.sort_by(|a, b| a.run_id.cmp(&b.run_id));
        Ok(all)
    }

    /// Folders that a dead process was making or removing: they have no name of a run, and nobody else looks at them.
    fn clear_half_made(&self) {
        for entry in fs::read_dir(self.path()).into_iter().flatten().flatten() {
            let dead = |pid: i32| !Path::new("/proc").join(pid.to_string()).exists();
            if maker(&entry.file_name()).is_some_and(dead) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Processes that carry this run's mark and have not ended: after a teardown there must be none. Other users'
    /// processes can't be read and are not among them.
    pub fn outlived(&self, run_id: &str) -> Vec<ProcessId> {
        let of_run = marked(self.path()).into_iter().filter(|(_, marker)| marker == run_id);
        of_run.map(|(process, _)| process).filter(|process| !process.is_zombie()).collect()
    }

    fn folders(&self) -> Result<Vec<PathBuf>, RegistryError> {
        let fail = |source| RegistryError::Io { path: self.path().to_owned(), source };
        let mut folders = Vec::new();
        for entry in fs::read_dir(self.path()).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let hidden = maker(&entry.file_name()).is_some();
            if !hidden && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            }
        }
        Ok(folders)
    }
}

/// Who makes or removes a folder that is no entry.
fn maker(name: &OsStr) -> Option<i32> {
    let name = name.to_str()?;
    let rest = name.strip_prefix(HIDDEN).or_else(|| name.strip_prefix(GONE))?;
    rest.split('-').next()?.parse().ok()
}

/// The lock of a run whose owner is gone.
fn take_lock(dir: &Path) -> Option<File> {
    let lock = File::options().read(true).write(true).open(dir.join("lock"));
    match lock {
        Ok(lock) => {
            flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
            // Another reaper may have been here meanwhile, and the name may be a new run's.
            let (held, there) = (lock.metadata().ok()?, dir.join("lock").symlink_metadata().ok()?);
            ((held.dev(), held.ino()) == (there.dev(), there.ino())).then_some(lock)
        }
        // No owner makes a folder without a lock: this is somebody else's rubbish.
        Err(error) if error.kind() == io::ErrorKind::NotFound => File::open(dir).ok(),
        Err(_) => None,
    }
}

fn reap_entry(dir: &Path, registry: &Path) -> Reaped {
    let run_id = dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut actions = Vec::new();
    let mut clean = true;
    let entry = read_entry(dir);
    match &entry {
        None => actions.push("its entry can't be read".to_owned()),
        Some(entry) if entry.run_id != run_id => {
            actions.push(format!("its entry speaks of another run, {}: not followed", entry.run_id));
        }
        Some(Entry { vmm: Some(vmm), .. }) => clean &= end(vmm, &run_id, registry, &mut actions),
        Some(_) => actions.push("no VMM was written down".to_owned()),
    }
    // Also what was started and not yet written down when the owner died.
    for (process, _) in marked(registry).into_iter().filter(|(_, marker)| *marker == run_id) {
        clean &= end(&process, &run_id, registry, &mut actions);
    }
    if clean
        && let Some(entry) = &entry
        && entry.run_id == run_id
    {
        clean &= remove_cgroups(&entry.cgroups, &run_id, &mut actions);
    }
    if let Some(entry) = entry.filter(|entry| entry.run_id == run_id)
        && clean
        && entry.bundle.join("ledger.ames").is_file()
        && !entry.bundle.join("checkpoint.note").exists()
    {
        let note = serde_json::json!({
            "run_id": run_id,
            "reason": "the run's owner died before the record was closed; what it left was ended",
            "owner": entry.owner,
            "actions": actions,
        });
        let written = File::create_new(entry.bundle.join(REAPED_FILE))
            .and_then(|file| serde_json::to_writer_pretty(file, &note).map_err(io::Error::from));
        if written.is_ok() {
            actions.push(format!("noted in {}", entry.bundle.display()));
        }
    }
    if clean {
        match remove_folder(dir) {
            Ok(()) => actions.push("overlay disk and entry removed".to_owned()),
            Err(error) => {
                clean = false;
                actions.push(format!("can't remove {}: {error}", dir.display()));
            }
        }
    }
    Reaped { run_id, actions, clean }
}

/// Removes a run's cgroups; whether none of them is left.
fn remove_cgroups(cgroups: &[PathBuf], run_id: &str, actions: &mut Vec<String>) -> bool {
    let mut clean = true;
    for dir in cgroups {
        match remove_if_ours(dir, run_id) {
            None => {}
            Some(Ok(())) => actions.push(format!("cgroup {} removed", dir.display())),
            Some(Err(why)) => {
                clean = false;
                actions.push(why);
            }
        }
    }
    clean
}

/// Ends this very process if it is a VMM of this run; says what it did. Whether nothing of it is left.
fn end(process: &ProcessId, run_id: &str, registry: &Path, actions: &mut Vec<String>) -> bool {
    let pid = process.pid;
    if !process.exists() {
        let other = ProcessId::of(pid).is_some();
        actions.push(match other {
            true => {
                format!("VMM {pid} is gone; the number belongs to another process now, which was left alone")
            }
            false => format!("VMM {pid} is gone"),
        });
        return true;
    }
    let held = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let Some(held) = held else {
        actions.push(format!("VMM {pid} went meanwhile"));
        return !process.exists();
    };
    // Asked again with the descriptor open: from here on the number can't change hands.
    if !process.exists() {
        actions.push(format!("VMM {pid} went meanwhile"));
        return true;
    }
    if process.is_zombie() {
        actions.push(format!("VMM {pid} has ended"));
        return true;
    }
    if marker(pid, registry).as_deref() != Some(run_id) {
        actions.push(format!("process {pid} does not carry the mark of this run: left alone"));
        return true;
    }
    if let Err(errno) = pidfd_send_signal(&held, Signal::KILL) {
        actions.push(format!("VMM {pid} can't be signalled: {errno}"));
        return false;
    }
    let timeout = rustix::time::Timespec { tv_sec: KILL_DEADLINE_MS / 1000, tv_nsec: 0 };
    let gone = matches!(poll(&mut [PollFd::new(&held, PollFlags::IN)], Some(&timeout)), Ok(1..));
    actions.push(format!("VMM {pid} {}", if gone { "killed" } else { "does not end" }));
    gone
}

/// VMMs of this registry, by their own marks.
fn marked(registry: &Path) -> Vec<(ProcessId, String)> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|pid| {
            // Most are somebody else's, and that is read fastest. The marker is looked at again before any signal.
            let marker = marker(pid, registry)?;
            Some((ProcessId::of(pid)?, marker))
        })
        .collect()
}

/// The run whose VMM a process is: `-name hotcell-<run>` in its argv and this
/// registry's folder in its environment. Other users' processes can't be read.
fn marker(pid: i32, registry: &Path) -> Option<String> {
    let argv = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = argv.split(|&byte| byte == 0);
    words.find(|word| *word == b"-name")?;
    let name = words.next()?.strip_prefix(NAME_PREFIX.as_bytes())?;
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mine = [REGISTRY_VARIABLE.as_bytes(), b"=", registry.as_os_str().as_bytes()].concat();
    environment.split(|&byte| byte == 0).find(|variable| *variable == mine)?;
    String::from_utf8(name.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// A harmless process that carries the mark of a VMM.
    fn marked_sleep(run_id: &str, registry: &Path) -> std::process::Child {
        Command::new("sh")
            .args(["-c", "read forever", "-name", &format!("{NAME_PREFIX}{run_id}")])
            .env(REGISTRY_VARIABLE, registry)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn wait_marked(pid: u32, registry: &Path) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while marker(pid as i32, registry).is_none() {
            assert!(std::time::Instant::now() < deadline, "the process never showed its mark");
            std::thread::yield_now();
        }
    }

    struct Setting {
        _home: tempfile::TempDir,
        registry: Registry,
        bundle: PathBuf,
    }

    fn setting() -> Setting {
        let home = tempfile::tempdir().unwrap();
        let registry = Registry::open(&home.path().join("live")).unwrap();
        let bundle = home.path().join("bundle");
        fs::create_dir(&bundle).unwrap();
        fs::write(bundle.join("ledger.ames"), b"").unwrap();
        Setting { registry, bundle, _home: home }
    }

    #[test]
    fn an_orphan_is_ended_and_removed_and_said_in_its_bundle() {
        let Setting { registry, bundle, _home } = &setting();
        let mut vmm = marked_sleep("run-00000001", registry.path());
        wait_marked(vmm.id(), registry.path());
        let mut run = registry.register("run-00000001", bundle).unwrap();
        run.record_vmm(ProcessId::of(vmm.id() as i32).unwrap()).unwrap();
        assert!(registry.list().unwrap()[0].live);
        assert!(registry.reap().unwrap().is_empty(), "a live run was touched");
        assert!(vmm.try_wait().unwrap().is_none());
        drop(run);
        assert!(!registry.list().unwrap()[0].live);
        let reaped = registry.reap().unwrap();
        assert!(reaped[0].clean, "{reaped:?}");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&vmm.wait().unwrap()), Some(9));
        assert!(registry.list().unwrap().is_empty());
        assert!(bundle.join(REAPED_FILE).is_file());
        assert!(registry.reap().unwrap().is_empty(), "reaping is done once");
    }

    #[test]
    fn a_number_that_belongs_to_another_process_is_never_signalled() {
        let Setting { registry, bundle, _home } = &setting();
        let mut innocent =
            Command::new("sh").args(["-c", "read forever"]).stdin(Stdio::piped()).spawn().unwrap();
        let id = ProcessId::of(innocent.id() as i32).unwrap();
        // Stale: right number, wrong start time. Forged: right in all, but no VMM of ours.
        let stale = ProcessId { start_ticks: id.start_ticks + 1, ..id.clone() };
        for (process, word) in [(stale, "another process"), (id, "left alone")] {
            let mut run = registry.register("run-00000002", bundle).unwrap();
            run.record_vmm(process).unwrap();
            drop(run);
            let reaped = registry.reap().unwrap();
            assert!(reaped[0].actions.iter().any(|action| action.contains(word)), "{reaped:?}");
            assert!(innocent.try_wait().unwrap().is_none(), "an innocent process was ended");
        }
        innocent.kill().unwrap();
        innocent.wait().unwrap();
    }

    #[test]
    fn a_deleted_registry_is_survived() {
        let Setting { registry, _home, .. } = &setting();
        let mut vmm = marked_sleep("run-00000003", registry.path());
        let mut of_another = marked_sleep("run-00000004", Path::new("/another/registry"));
        wait_marked(vmm.id(), registry.path());
        wait_marked(of_another.id(), Path::new("/another/registry"));
        let reaped = registry.reap().unwrap();
        assert_eq!(reaped.len(), 1, "{reaped:?}");
        assert_eq!((reaped[0].run_id.as_str(), reaped[0].clean), ("run-00000003", true));
        vmm.wait().unwrap();
        assert!(of_another.try_wait().unwrap().is_none(), "another registry's VMM was ended");
        of_another.kill().unwrap();
        of_another.wait().unwrap();
    }

    #[test]
    fn a_registry_is_the_same_by_every_name_and_knows_where_bundles_lie_from_everywhere() {
        let Setting { registry, _home, .. } = &setting();
        let link = _home.path().join("link");
        std::os::unix::fs::symlink(_home.path(), &link).unwrap();
        let by_link = Registry::open(&link.join("./live")).unwrap();
        let mut vmm = marked_sleep("run-00000009", registry.path());
        wait_marked(vmm.id(), registry.path());
        assert_eq!(by_link.outlived("run-00000009").len(), 1);
        let reaped = by_link.reap().unwrap();
        assert_eq!((reaped.len(), reaped[0].clean), (1, true), "{reaped:?}");
        vmm.wait().unwrap();
        let run = by_link.register("run-00000010", Path::new("runs/run-00000010")).unwrap();
        let bundle = registry.list().unwrap().remove(0).entry.unwrap().bundle;
        assert_eq!(bundle, std::env::current_dir().unwrap().join("runs/run-00000010"));
        drop(run);
    }

    #[test]
    fn many_reapers_at_once_do_each_thing_once_and_harm_no_new_run_of_the_name() {
        let Setting { registry, bundle, _home } = &setting();
        for _ in 0..50 {
            drop(registry.register("run-00000006", bundle).unwrap());
            std::thread::scope(|scope| {
                let reapers: Vec<_> = (0..8).map(|_| scope.spawn(|| registry.reap().unwrap())).collect();
                let done: Vec<Reaped> =
                    reapers.into_iter().flat_map(|reaper| reaper.join().unwrap()).collect();
                assert_eq!(done.len(), 1, "{done:?}");
                assert!(done[0].clean, "{done:?}");
            });
        }
        // The same name again and again while others reap: a live run keeps its folder.
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        let done = registry.reap().unwrap();
                        assert!(done.is_empty(), "a live run was reaped: {done:?}");
                    }
                });
            }
            for _ in 0..300 {
                let run = registry.register("run-00000007", bundle).unwrap();
                assert!(run.dir().join("entry.json").exists());
                assert!(run.abandon().gone);
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    #[test]
    fn what_a_dead_process_had_half_made_is_cleared_and_what_a_live_one_has_is_not() {
        let Setting { registry, _home, .. } = &setting();
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let own = std::process::id();
        for (prefix, pid) in [(HIDDEN, child.id()), (GONE, child.id()), (HIDDEN, own), (GONE, own)] {
            fs::create_dir(registry.path().join(format!("{prefix}{pid}-run-00000008"))).unwrap();
        }
        assert!(registry.reap().unwrap().is_empty());
        let left = fs::read_dir(registry.path()).unwrap().count();
        assert_eq!(left, 2);
    }

    #[test]
    fn a_folder_without_entry_or_lock_is_cleared() {
        let Setting { registry, _home, .. } = &setting();
        fs::create_dir(registry.path().join("run-00000005")).unwrap();
        let reaped = registry.reap().unwrap();
        assert!(reaped[0].clean && registry.list().unwrap().is_empty(), "{reaped:?}");
    }
}
