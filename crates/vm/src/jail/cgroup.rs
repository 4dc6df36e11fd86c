//! Limits on memory, processor time and processes, by cgroups of version 1 or 2.
//!
//! A run's cgroups are called `hotcell-<run-id>` and lie below the cgroup of
//! Hotcell itself (version 1), or below the nearest ancestor that hands its
//! controllers on (version 2, where a cgroup with processes may not): a limit on
//! Hotcell holds for its machines too. They are written down before they are
//! made, and removed with `rmdir`, which takes nothing but an empty cgroup.

use super::Part;
use crate::process::ProcessId;
use crate::teardown::Check;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

const NAME_PREFIX: &str = "hotcell-";
/// The kernel frees a cgroup's last process a moment after it is reaped.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(2);
/// What the VMM itself needs beside the guest's memory.
const VMM_OVERHEAD_MIB: u64 = 256;
/// QEMU's translation buffer.
pub(super) const TCG_OVERHEAD_MIB: u64 = 1024;
/// QEMU has some ten threads beside the virtual processors'.
const VMM_THREADS: u64 = 64;
/// Length of the accounting period of processor time, microseconds.
const CPU_PERIOD_US: u64 = 100_000;

/// What a run may take of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostShare {
    pub(crate) memory_mib: u32,
    pub(crate) vcpus: u32,
    pub(crate) translated: bool,
}

impl HostShare {
    fn memory_bytes(self) -> u64 {
        let translation = if self.translated { TCG_OVERHEAD_MIB } else { 0 };
        (u64::from(self.memory_mib) + VMM_OVERHEAD_MIB + translation) << 20
    }

    /// Every virtual processor, and one for the VMM's own threads.
    fn cpu_quota_us(self) -> u64 {
        (u64::from(self.vcpus) + 1) * CPU_PERIOD_US
    }

    fn pids(self) -> u64 {
        u64::from(self.vcpus) + VMM_THREADS
    }
}

/// A folder in which cgroups for runs can be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Base {
    pub(super) dir: PathBuf,
    pub(super) version: u8,
    pub(super) parts: Vec<Part>,
}

const CONTROLLERS: [(&str, Part); 3] =
    [("memory", Part::MemoryLimit), ("cpu", Part::CpuLimit), ("pids", Part::PidsLimit)];

/// A mounted hierarchy and this process's place in it.
#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    version: u8,
    controllers: Vec<String>,
    mount: PathBuf,
    own: PathBuf,
}

/// Pure: `/proc/PID/mountinfo` and `/proc/PID/cgroup` in, folders out.
fn hierarchies(mountinfo: &str, cgroup: &str) -> Vec<Hierarchy> {
    let mut all: Vec<Hierarchy> = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let (Some(root), Some(mount), Some(kind), Some(options)) =
            (left.get(3), left.get(4), right.first(), right.get(2))
        else {
            continue;
        };
        let version = match *kind {
            "cgroup" => 1,
            "cgroup2" => 2,
            _ => continue,
        };
        let place = cgroup.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, names, path) = (fields.next()?, fields.next()?, fields.next()?);
            let here = match version {
                2 => names.is_empty(),
                _ => !names.is_empty() && names.split(',').all(|name| options.split(',').any(|o| o == name)),
            };
            here.then_some((names, path))
        });
        let Some((names, path)) = place else { continue };
        // A mount shows the tree from `root` down.
        let inside = match *root {
            "/" => path.trim_start_matches('/'),
            root => match path.strip_prefix(root) {
                Some(inside) => inside.trim_start_matches('/'),
                None => continue,
            },
        };
        if Path::new(inside).components().any(|part| !matches!(part, Component::Normal(_))) {
            continue;
        }
        let mount = PathBuf::from(mount);
        if all.iter().any(|known| known.version == version && known.controllers.join(",") == names) {
            continue;
        }
        all.push(Hierarchy {
            version,
            controllers: names.split(',').map(str::to_owned).collect(),
            own: mount.join(inside),
            mount,
        });
    }
    all
}

fn hierarchies_of(pid: &str) -> Vec<Hierarchy> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}"));
    match (fs::read_to_string("/proc/self/mountinfo"), read("cgroup")) {
        (Ok(mountinfo), Ok(cgroup)) => hierarchies(&mountinfo, &cgroup),
        _ => Vec::new(),
    }
}

/// Tries where cgroups with limits can be made; what can't be had, and why.
pub(super) fn bases() -> (Vec<Base>, Vec<super::Missing>) {
    let hierarchies = hierarchies_of("self");
    let mut found: Vec<Base> = Vec::new();
    let mut missing = Vec::new();
    for (controller, part) in CONTROLLERS {
        let mut why = "no cgroup hierarchy with this controller is mounted".to_owned();
        let place = hierarchies.iter().find_map(|hierarchy| {
            let offers = match hierarchy.version {
                2 => fs::read_to_string(hierarchy.mount.join("cgroup.controllers"))
                    .is_ok_and(|all| all.split_whitespace().any(|name| name == controller)),
                _ => hierarchy.controllers.iter().any(|name| name == controller),
            };
            if !offers {
                return None;
            }
            match try_base(hierarchy, controller, part) {
                Ok(dir) => Some((dir, hierarchy.version)),
                Err(error) => {
                    why = error;
                    None
                }
            }
        });
        match place {
            None => missing.push(super::Missing { part, why }),
            Some((dir, version)) => match found.iter_mut().find(|base| base.dir == dir) {
                Some(base) => base.parts.push(part),
                None => found.push(Base { dir, version, parts: vec![part] }),
            },
        }
    }
    (found, missing)
}

/// Where a cgroup with this controller can be made, if anywhere.
fn place(hierarchy: &Hierarchy, controller: &str) -> Result<PathBuf, String> {
    if hierarchy.version == 1 {
        return Ok(hierarchy.own.clone());
    }
    let handed_on = |dir: &&Path| {
        fs::read_to_string(dir.join("cgroup.subtree_control"))
            .is_ok_and(|all| all.split_whitespace().any(|name| name == controller))
    };
    let mut above = hierarchy.own.ancestors().take_while(|dir| dir.starts_with(&hierarchy.mount));
    Ok(above.find(handed_on).ok_or("no cgroup above hands this controller on")?.to_owned())
}

fn try_base(hierarchy: &Hierarchy, controller: &str, part: Part) -> Result<PathBuf, String> {
    let base = place(hierarchy, controller)?;
    let probe = base.join(format!("{NAME_PREFIX}probe-{}-{controller}", std::process::id()));
    let tried = (|| {
        fs::create_dir(&probe)?;
        let share = HostShare { memory_mib: 64, vcpus: 1, translated: true };
        set_limit(&probe, hierarchy.version, part, share)?;
        // Entering needs the right to write here; where it is missing on a common ancestor, the rehearsal tells.
        OpenOptions::new().write(true).open(entrance(&probe, hierarchy.version))?;
        Ok::<(), io::Error>(())
    })();
    let _ = fs::remove_dir(&probe);
    tried.map(|()| base.clone()).map_err(|error| format!("{}: {error}", base.display()))
}

/// The file through which a process with one thread enters. Moving a whole process waits for the kernel's readers, some
/// ten milliseconds; a thread that moves itself does not, and a child that has just been forked has one. Version 2 moves
/// threads between threaded cgroups alone.
fn entrance(dir: &Path, version: u8) -> PathBuf {
    dir.join(if version == 1 { "tasks" } else { "cgroup.procs" })
}

fn set_limit(dir: &Path, version: u8, part: Part, share: HostShare) -> io::Result<()> {
    let write = |name: &str, text: String| fs::write(dir.join(name), text);
    match (part, version) {
        (Part::MemoryLimit, 1) => write("memory.limit_in_bytes", share.memory_bytes().to_string()),
        (Part::MemoryLimit, _) => write("memory.max", share.memory_bytes().to_string()),
        (Part::CpuLimit, 1) => {
            write("cpu.cfs_period_us", CPU_PERIOD_US.to_string())?;
            write("cpu.cfs_quota_us", share.cpu_quota_us().to_string())
        }
        (Part::CpuLimit, _) => write("cpu.max", format!("{} {CPU_PERIOD_US}", share.cpu_quota_us())),
        (Part::PidsLimit, _) => write("pids.max", share.pids().to_string()),
        _ => Ok(()),
    }
}

/// The cgroups of one run.
#[derive(Debug, Default)]
pub(crate) struct RunCgroups {
    dirs: Vec<PathBuf>,
}

impl RunCgroups {
    /// Where they will be.
    pub(super) fn planned(bases: &[Base], run_id: &str) -> Vec<PathBuf> {
        bases.iter().map(|base| base.dir.join(format!("{NAME_PREFIX}{run_id}"))).collect()
    }

    /// Makes them and sets their limits; the files through which a process enters.
    pub(super) fn make(
        bases: &[Base],
        run_id: &str,
        share: HostShare,
    ) -> io::Result<(RunCgroups, Vec<OwnedFd>)> {
        let mut made = RunCgroups::default();
        let mut entrances = Vec::new();
        for (base, dir) in bases.iter().zip(RunCgroups::planned(bases, run_id)) {
            let entered = (|| {
                fs::create_dir(&dir)?;
                made.dirs.push(dir.clone());
                for &part in &base.parts {
                    set_limit(&dir, base.version, part, share)?;
                }
                let entrance: File = OpenOptions::new().write(true).open(entrance(&dir, base.version))?;
                Ok(entrance.into())
            })();
            match entered {
                Ok(entrance) => entrances.push(entrance),
                Err(error) => {
                    let _ = made.remove();
                    return Err(error);
                }
            }
        }
        Ok((made, entrances))
    }

    /// Removes them; each check says whether it is gone.
    pub(crate) fn remove(&self) -> Vec<Check> {
        self.dirs
            .iter()
            .map(|dir| {
                let removed = remove_empty(dir);
                let gone = !dir.exists();
                let detail = removed.map_or_else(|error| error.to_string(), |()| "removed".into());
                Check { what: format!("cgroup {}", dir.display()), gone, detail }
            })
            .collect()
    }
}

fn remove_empty(dir: &Path) -> io::Result<()> {
    let deadline = Instant::now() + REMOVAL_DEADLINE;
    loop {
        match fs::remove_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other,
        }
    }
}

fn is_ours(dir: &Path, run_id: &str) -> bool {
    dir.is_absolute()
        && dir.file_name().is_some_and(|name| *name == *format!("{NAME_PREFIX}{run_id}"))
        && dir.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        && dir.join("cgroup.procs").is_file()
}

/// For the reaper: removes a cgroup that an entry names, if its name is this
/// run's. `None` where nothing was to be done.
pub(crate) fn remove_if_ours(dir: &Path, run_id: &str) -> Option<Result<(), String>> {
    if !dir.exists() {
        return None;
    }
    if !is_ours(dir, run_id) {
        return Some(Err(format!("{} is no cgroup of this run: left alone", dir.display())));
    }
    Some(remove_empty(dir).map_err(|error| format!("can't remove {}: {error}", dir.display())))
}

/// Cgroups of this run that a process is in.
pub(crate) fn members_of(process: &ProcessId, run_id: &str) -> Vec<PathBuf> {
    let own = hierarchies_of(&process.pid.to_string()).into_iter().map(|hierarchy| hierarchy.own);
    own.filter(|dir| is_ours(dir, run_id)).collect()
}

/// Limits that hold for a process by cgroups of ours: the part, and the file with its value.
pub(super) fn limits_of(process: &ProcessId) -> Vec<(Part, String)> {
    let mut limits = Vec::new();
    for hierarchy in hierarchies_of(&process.pid.to_string()) {
        let name = hierarchy.own.file_name().map(|name| name.to_string_lossy().into_owned());
        if !name.is_some_and(|name| name.starts_with(NAME_PREFIX)) {
            continue;
        }
        limits.extend(limits_in(&hierarchy.own));
    }
    limits
}

/// Limits that a cgroup sets, of either version.
fn limits_in(dir: &Path) -> Vec<(Part, String)> {
    let mut limits = Vec::new();
    for (part, file, unlimited) in [
        (Part::MemoryLimit, "memory.limit_in_bytes", ""),
        (Part::MemoryLimit, "memory.max", "max"),
        (Part::CpuLimit, "cpu.cfs_quota_us", "-1"),
        (Part::CpuLimit, "cpu.max", "max"),
        (Part::PidsLimit, "pids.max", "max"),
    ] {
        if let Ok(value) = fs::read_to_string(dir.join(file))
            && !value.starts_with(if unlimited.is_empty() { "\0" } else { unlimited })
        {
            limits.push((part, format!("{file}={}", value.trim())));
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_found_in_both_versions_and_through_bind_mounts() {
        let mountinfo = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
            32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
            33 31 0:30 /docker/ab /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            34 31 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let cgroup = "3:cpu,cpuacct:/user\n2:memory:/docker/ab/c\n0::/a/b\n";
        let found = hierarchies(mountinfo, cgroup);
        let own: Vec<&str> = found.iter().map(|hierarchy| hierarchy.own.to_str().unwrap()).collect();
        assert_eq!(
            own,
            ["/sys/fs/cgroup/cpu,cpuacct/user", "/sys/fs/cgroup/memory/c", "/sys/fs/cgroup/unified/a/b"]
        );
        assert_eq!(found[0].controllers, ["cpu", "cpuacct"]);
        assert!(hierarchies(mountinfo, "2:memory:/elsewhere\n0::/../x\n").is_empty());
    }

    #[test]
    fn only_a_cgroup_of_this_very_run_is_removed() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("hotcell-run-00000001");
        fs::create_dir(&dir).unwrap();
        assert_eq!(remove_if_ours(&home.path().join("hotcell-none"), "none"), None);
        assert!(remove_if_ours(&dir, "run-00000002").unwrap().is_err());
        assert!(remove_if_ours(&dir, "run-00000001").unwrap().is_err(), "a plain folder is no cgroup");
        assert!(dir.exists());
    }

    /// A tree as version 2 shows it: `a` hands all on to its children, `a/b` has processes and hands nothing on.
    fn version_2() -> (tempfile::TempDir, Hierarchy) {
        let mount = tempfile::tempdir().unwrap();
        fs::create_dir_all(mount.path().join("a/b/c")).unwrap();
        for (dir, controls) in [("", "cpu memory pids"), ("a", "memory pids"), ("a/b", ""), ("a/b/c", "")] {
            fs::write(mount.path().join(dir).join("cgroup.subtree_control"), controls).unwrap();
        }
        let mountinfo = format!("34 31 0:31 / {} rw - cgroup2 cgroup2 rw\n", mount.path().display());
        let mut found = hierarchies(&mountinfo, "0::/a/b/c\n");
        (mount, found.remove(0))
    }

    #[test]
    fn in_version_2_the_nearest_above_that_hands_a_controller_on_is_taken() {
        let (mount, hierarchy) = version_2();
        assert_eq!((hierarchy.version, &hierarchy.own), (2, &mount.path().join("a/b/c")));
        assert_eq!(place(&hierarchy, "memory").unwrap(), mount.path().join("a"));
        assert_eq!(place(&hierarchy, "pids").unwrap(), mount.path().join("a"));
        // Not handed on by `a`: then above it, and never beside the mount.
        assert_eq!(place(&hierarchy, "cpu").unwrap(), mount.path());
        assert!(place(&hierarchy, "io").unwrap_err().contains("hands this controller on"));
    }

    #[test]
    fn the_limits_of_each_version_are_written_as_it_reads_them() {
        let share = HostShare { memory_mib: 512, vcpus: 1, translated: true };
        let memory = (512u64 + 256 + 1024) << 20;
        let parts = [Part::MemoryLimit, Part::CpuLimit, Part::PidsLimit];
        let written = |version: u8| {
            let dir = tempfile::tempdir().unwrap();
            parts.iter().for_each(|part| set_limit(dir.path(), version, *part, share).unwrap());
            limits_in(dir.path())
        };
        let texts =
            |limits: Vec<(Part, String)>| limits.into_iter().map(|(_, text)| text).collect::<Vec<_>>();
        assert_eq!(
            texts(written(2)),
            [format!("memory.max={memory}"), "cpu.max=200000 100000".into(), "pids.max=65".into()]
        );
        assert_eq!(
            texts(written(1)),
            [
                format!("memory.limit_in_bytes={memory}"),
                "cpu.cfs_quota_us=200000".into(),
                "pids.max=65".into()
            ]
        );
        // What the kernel shows where nothing was set is no limit.
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("memory.max", "max\n"),
            ("cpu.max", "max 100000\n"),
            ("pids.max", "max\n"),
            ("cpu.cfs_quota_us", "-1\n"),
        ] {
            fs::write(dir.path().join(file), text).unwrap();
        }
        assert_eq!(limits_in(dir.path()), []);
    }

    #[test]
    fn a_share_covers_the_guest_and_the_vmm() {
        let share = HostShare { memory_mib: 512, vcpus: 2, translated: false };
        assert_eq!(share.memory_bytes(), 768 << 20);
        assert_eq!((share.cpu_quota_us(), share.pids()), (300_000, 66));
    }
}
