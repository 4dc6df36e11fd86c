//! What this host gives, found out by trying, and the plan of one run's jail.

use super::cgroup::{self, Base, HostShare, RunCgroups, TCG_OVERHEAD_MIB};
use super::memory::Memory;
use super::{Jail, Measured};
use super::{Missing, Part};
use crate::accel::Accel;
use crate::backend::{StartError, VmPlan};
use crate::process::ProcessId;
use crate::registry::Registration;
use hotcell_ledger::Digest;
use hotcell_sys::host::{Identity, JailPlan, Namespace, Place, rehearse, vmm_filter};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What fails where a cgroup that could be made before can't be made now.
pub(crate) const MAKE_CGROUPS: &str = "make the run's cgroups";
/// First of the users that VMMs run as when Hotcell is started as root: one of
/// 65 536, by the run's id. No distribution hands out numbers above 1 879 048 191
/// and below 2 147 352 576 (systemd's table of users lists them as unused).
const FIRST_UID: u32 = 0x7000_0000;
/// `nobody`, where the first choice does not exist (a container with few users).
const NOBODY: u32 = 65_534;
/// Names that the jail's root may have; anything else is a hole.
pub(super) const ROOT_NAMES: [&str; 11] =
    ["bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "opt", "proc", "sbin", "usr"];
const DEVICES: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/urandom"];
const KVM: &str = "/dev/kvm";
/// Open files; a VMM has some forty.
const MAX_FILES: u64 = 1024;
/// Address space beside guest memory and translation buffer: program, libraries,
/// a stack of 8 MiB and an arena of 64 MiB of address space for each thread.
const ADDRESS_SPACE_MIB: u64 = 8 * 1024;

/// What the operator asked for. There is no "none".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JailChoice {
    /// All that the host can give; what it can't is said.
    #[default]
    Auto,
    /// Every part, or no run.
    Required,
}

/// The jail was required and the host can't give all of it.
#[derive(Debug, thiserror::Error)]
#[error("the whole jail was asked for, but this host can't give: {0}. `hotcell doctor` says how to mend it")]
pub struct JailRefused(String);

/// How the unprivileged side is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// As root: namespaces first, then another user.
    Root,
    /// As root without the right to make namespaces: another user first, then a user namespace.
    DropThenUser,
    /// As an ordinary user: a user namespace.
    User,
}

/// What this host gives.
#[derive(Clone, Debug)]
pub struct HostJail {
    way: Way,
    namespaces: Vec<Namespace>,
    identity: bool,
    bases: Vec<Base>,
    missing: Vec<Missing>,
    /// The name in the root below which the program lies.
    top: String,
    /// Where it was remembered rather than tried.
    remembered: Option<Memory>,
}

const PLAIN: [(Namespace, Part); 6] = [
    (Namespace::Pid, Part::Pid),
    (Namespace::Mount, Part::Mount),
    (Namespace::Net, Part::Net),
    (Namespace::Ipc, Part::Ipc),
    (Namespace::Uts, Part::Uts),
    (Namespace::Cgroup, Part::CgroupView),
];

impl HostJail {
    /// Tries every part with this program as the one to be held. Nothing is executed.
    pub fn try_out(program: &Path) -> HostJail {
        HostJail::try_bases(program, cgroup::bases())
    }

    /// The same, where it was not found in these surroundings before that the host gives everything; that is
    /// remembered in `cache`.
    pub fn try_out_remembering(program: &Path, cache: &Path) -> HostJail {
        let (bases, missing) = cgroup::bases();
        let memory = Memory::new(cache, program, &bases).filter(|_| missing.is_empty());
        if let Some(memory) = memory.clone().filter(Memory::is_whole) {
            let way = ways()[0];
            return HostJail { bases, top: top(program), remembered: Some(memory), ..HostJail::whole(way) };
        }
        let jail = HostJail::try_bases(program, (bases, missing));
        if let Some(memory) = memory.filter(|_| jail.missing.is_empty() && jail.way == ways()[0]) {
            memory.remember();
        }
        jail
    }

    /// Forgets what was remembered; whether anything was.
    pub(crate) fn forget(&self) -> bool {
        self.remembered.as_ref().map(Memory::forget).is_some()
    }

    /// Everything that can be tried by this way.
    fn whole(way: Way) -> HostJail {
        HostJail {
            way,
            namespaces: PLAIN.map(|(kind, _)| kind).to_vec(),
            identity: way != Way::User,
            bases: Vec::new(),
            missing: Vec::new(),
            top: String::new(),
            remembered: None,
        }
    }

    fn try_bases(program: &Path, (mut bases, mut missing): (Vec<Base>, Vec<Missing>)) -> HostJail {
        // Neither needs the other, and a run waits for both.
        let (mut jail, refused) = std::thread::scope(|scope| {
            let entering = scope.spawn(|| try_entering(program, &bases));
            (try_ways(program), entering.join())
        });
        if let Some((base, why)) = refused.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
            missing.extend(base.parts.iter().map(|&part| Missing { part, why: why.clone() }));
            bases.clear();
        }
        jail.bases = bases;
        jail.top = top(program);
        jail.missing.extend(missing);
        jail
    }

    /// What the host can't give.
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }

    /// What the host gives.
    pub fn promise(&self) -> impl Iterator<Item = Part> {
        Part::ALL.into_iter().filter(|part| !self.missing.iter().any(|missing| missing.part == *part))
    }

    /// Holds the host against what was asked for.
    ///
    /// # Errors
    /// Something is missing, and all of it was required.
    pub fn accept(self, choice: JailChoice) -> Result<HostJail, JailRefused> {
        if choice == JailChoice::Required && !self.missing.is_empty() {
            let all: Vec<String> =
                self.missing.iter().map(|missing| format!("{} ({})", missing.part, missing.why)).collect();
            return Err(JailRefused(all.join("; ")));
        }
        Ok(self)
    }

    /// Writes the run's cgroups down, makes them, and draws the plan.
    pub(crate) fn plan(
        &self,
        program: &Path,
        registration: &mut Registration,
        plan: &VmPlan,
    ) -> Result<(JailPlan, RunCgroups), StartError> {
        let share = HostShare {
            memory_mib: plan.memory_mib,
            vcpus: plan.vcpus,
            translated: plan.acceleration.accel == Accel::Tcg,
        };
        let kvm = plan.acceleration.accel == Accel::Kvm;
        let mut walls = self.walls(program, &plan.run_id, kvm)?;
        let memory = u64::from(plan.memory_mib) + TCG_OVERHEAD_MIB;
        walls.limits.push((libc_limits::AS, (memory + ADDRESS_SPACE_MIB) << 20));
        if !self.bases.is_empty() {
            registration.record_cgroups(RunCgroups::planned(&self.bases, &plan.run_id))?;
        }
        let (cgroups, entrances) = RunCgroups::make(&self.bases, &plan.run_id, share)
            .map_err(|source| StartError::Io { doing: MAKE_CGROUPS, source })?;
        walls.cgroups = entrances;
        Ok((walls, cgroups))
    }

    fn walls(&self, program: &Path, run_id: &str, kvm: bool) -> Result<JailPlan, StartError> {
        let mut identity = if self.identity { identity(run_id) } else { None };
        let mut places = places(program);
        if kvm {
            places.push(Place::Device(KVM.into()));
            if let Some(identity) = &mut identity {
                identity.groups.extend(kvm_group()?);
            }
        }
        let mut namespaces = self.namespaces.clone();
        if self.way != Way::Root && !namespaces.is_empty() {
            namespaces.push(Namespace::User);
        }
        Ok(JailPlan {
            namespaces,
            identity,
            places,
            limits: vec![(libc_limits::CORE, 0), (libc_limits::NOFILE, MAX_FILES)],
            filter: Some(vmm_filter().map_err(|error| StartError::NotBegun(format!("{error:?}")))?),
            cgroups: Vec::new(),
            inherit: Vec::new(),
            rehearsal: false,
        })
    }

    /// Measures a running VMM; an error where it is weaker than this host's promise.
    pub(crate) fn measure(&self, process: &ProcessId) -> Result<Jail, StartError> {
        let measured = Measured::of(process)
            .map_err(|source| StartError::Io { doing: "measure the VMM's jail", source })?;
        let parts = measured.parts(rustix::process::geteuid().as_raw(), &self.top);
        let weak: Vec<&str> = self.promise().filter(|part| !parts.contains(part)).map(Part::as_str).collect();
        if !weak.is_empty() {
            return Err(StartError::WeakJail(format!("{} (it has {measured})", weak.join(", "))));
        }
        Ok(Jail::Measured { measured: Box::new(measured), missing: self.missing.clone() })
    }
}

/// Resource names of setrlimit(2) on Linux.
mod libc_limits {
    pub(super) const CORE: u32 = 4;
    pub(super) const NOFILE: u32 = 7;
    pub(super) const AS: u32 = 9;
}

/// Puts a process into a cgroup in every base; the first that refuses, and why.
fn try_entering(program: &Path, bases: &[Base]) -> Option<(Base, String)> {
    let run = format!("probe-{}", std::process::id());
    let share = HostShare { memory_mib: 64, vcpus: 1, translated: true };
    let all = || {
        bases.iter().fold(None, |all: Option<Base>, base| match all {
            None => Some(base.clone()),
            Some(mut all) => {
                all.parts.extend(&base.parts);
                Some(all)
            }
        })
    };
    let (cgroups, entrances): (RunCgroups, Vec<OwnedFd>) = match RunCgroups::make(bases, &run, share) {
        Ok(made) => made,
        Err(error) => return Some((all()?, error.to_string())),
    };
    let tried = rehearse(program, JailPlan { cgroups: entrances, ..JailPlan::default() });
    let removed = cgroups.remove();
    if let Err(error) = tried {
        return Some((all()?, error.to_string()));
    }
    let left = removed.iter().find(|check| !check.gone)?;
    Some((all()?, format!("{} can't be removed: {}", left.what, left.detail)))
}

/// The ways there are for this user, best first.
fn ways() -> &'static [Way] {
    if rustix::process::geteuid().is_root() { &[Way::Root, Way::DropThenUser] } else { &[Way::User] }
}

/// The way by which the host gives most.
fn try_ways(program: &Path) -> HostJail {
    let mut best: Option<HostJail> = None;
    for &way in ways() {
        let jail = try_way(program, way);
        let done = jail.missing.is_empty();
        if best.as_ref().is_none_or(|best| best.missing.len() > jail.missing.len()) {
            best = Some(jail);
        }
        if done {
            break;
        }
    }
    best.unwrap_or_else(|| HostJail { namespaces: Vec::new(), ..HostJail::whole(Way::User) })
}

/// Everything at once; where that fails, part by part.
fn try_way(program: &Path, way: Way) -> HostJail {
    let mut jail = HostJail::whole(way);
    let rehearsed = |jail: &HostJail| {
        jail.walls(program, "probe", false)
            .map_err(|error| error.to_string())
            .and_then(|plan| rehearse(program, plan).map_err(|error| error.to_string()))
    };
    if jail.identity && identity("probe").is_none() {
        jail.identity = false;
        let why = "this host maps no user that a VMM could run as".to_owned();
        jail.missing.push(Missing { part: Part::User, why });
    }
    if rehearsed(&jail).is_ok() {
        return jail;
    }
    jail.namespaces.clear();
    if let Err(why) = rehearsed(&jail)
        && jail.identity
    {
        jail.identity = false;
        jail.missing.push(Missing { part: Part::User, why });
    }
    for (kind, part) in PLAIN {
        jail.namespaces.push(kind);
        if let Err(why) = rehearsed(&jail) {
            jail.namespaces.pop();
            jail.missing.push(Missing { part, why });
        }
    }
    if way == Way::User && jail.namespaces.is_empty() {
        let why = "no user namespace can be made, so the VMM keeps the caller's rights".to_owned();
        jail.missing.push(Missing { part: Part::User, why });
    }
    jail
}

/// Whom a run's VMM runs as.
fn identity(run_id: &str) -> Option<Identity> {
    let digest = Digest::of(run_id.as_bytes()).to_string();
    let slot = digest.get(..4).and_then(|hex| u32::from_str_radix(hex, 16).ok()).unwrap_or(0);
    let maps = [fs::read_to_string("/proc/self/uid_map"), fs::read_to_string("/proc/self/gid_map")];
    let mapped = |id: u32| maps.iter().all(|map| map.as_ref().is_ok_and(|map| is_mapped(map, id)));
    let id = [FIRST_UID + slot, NOBODY].into_iter().find(|&id| mapped(id))?;
    Some(Identity { uid: id, gid: id, groups: Vec::new() })
}

fn is_mapped(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(first)), Some(Ok(_)), Some(Ok(count))) =
            (numbers.next(), numbers.next(), numbers.next())
        else {
            return false;
        };
        (first..first.saturating_add(count)).contains(&u64::from(id))
    })
}

/// The group through which `/dev/kvm` can be used; none where everybody may.
fn kvm_group() -> Result<Option<u32>, StartError> {
    let metadata =
        fs::metadata(KVM).map_err(|source| StartError::Io { doing: "look at /dev/kvm", source })?;
    if metadata.mode() & 0o006 == 0o006 {
        return Ok(None);
    }
    if metadata.mode() & 0o060 == 0o060 && metadata.gid() != 0 {
        return Ok(Some(metadata.gid()));
    }
    Err(StartError::NotBegun(format!(
        "/dev/kvm is for root alone (mode {:o}), and no VMM runs as root here: give it to a group (chgrp kvm /dev/kvm; \
         chmod 660 /dev/kvm), or use --accel tcg",
        metadata.mode() & 0o777
    )))
}

/// What a VMM needs of the host: its program, firmware and libraries, and three devices.
fn places(program: &Path) -> Vec<Place> {
    let mut places = vec![Place::Folder("/usr".into())];
    for name in ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"] {
        let path = PathBuf::from(name);
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_symlink() => {
                places.extend(fs::read_link(&path).ok().map(|to| Place::Link { at: path, to }));
            }
            Ok(metadata) if metadata.is_dir() => places.push(Place::Folder(path)),
            _ => {}
        }
    }
    let cache = PathBuf::from("/etc/ld.so.cache");
    if cache.is_file() {
        places.push(Place::File(cache));
    }
    for device in DEVICES {
        if fs::metadata(device).is_ok_and(|metadata| metadata.file_type().is_char_device()) {
            places.push(Place::Device(device.into()));
        }
    }
    let Ok(program) = program.canonicalize() else { return places };
    // A VMM of the operator's own making: /opt/qemu/bin/qemu-system-x86_64 needs /opt/qemu.
    let prefix = program.ancestors().nth(2).filter(|prefix| prefix.starts_with("/opt"));
    if let Some(prefix) = prefix.filter(|prefix| *prefix != Path::new("/opt")) {
        places.push(Place::Folder(prefix.to_owned()));
    } else if !places.iter().any(|place| matches!(place, Place::Folder(at) if program.starts_with(at))) {
        // Anywhere else, the program alone: what lies around it may be somebody's home.
        places.push(Place::File(program));
    }
    places
}

fn top(program: &Path) -> String {
    let first = program.components().nth(1).map(|name| name.as_os_str().to_string_lossy().into_owned());
    first.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_has_a_user_that_exists() {
        assert!(is_mapped("         0          0 4294967295\n", FIRST_UID + 65_535));
        assert!(!is_mapped("0 100000 65536\n", FIRST_UID));
        assert!(is_mapped("0 100000 65536\n", NOBODY));
        assert!(!is_mapped("0 1000 1\n1 100000 1000\n", NOBODY));
    }

    #[test]
    fn a_vmm_is_in_its_own_jail_wherever_it_lies() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().canonicalize().unwrap().join("qemu-system-x86_64");
        fs::write(&program, "").unwrap();
        let files = |program: &Path| -> Vec<PathBuf> {
            let places = places(program).into_iter();
            places.filter_map(|place| if let Place::File(at) = place { Some(at) } else { None }).collect()
        };
        assert!(files(&program).contains(&program));
        assert!(!files(Path::new("/usr/bin/env")).contains(&PathBuf::from("/usr/bin/env")));
    }

    #[test]
    fn required_refuses_what_auto_says() {
        let whole = HostJail::whole(Way::Root);
        assert_eq!(whole.promise().count(), Part::ALL.len());
        assert!(whole.clone().accept(JailChoice::Required).is_ok());
        let missing = vec![Missing { part: Part::MemoryLimit, why: "no cgroups here".into() }];
        let lacking = HostJail { missing, ..whole };
        assert!(!lacking.promise().any(|part| part == Part::MemoryLimit));
        assert!(lacking.clone().accept(JailChoice::Auto).is_ok());
        let refused = lacking.accept(JailChoice::Required).unwrap_err().to_string();
        assert!(refused.contains("memory limit (no cgroups here)"), "{refused}");
    }

    #[test]
    fn a_whole_jail_is_remembered_and_nothing_less() {
        let (home, program) = (tempfile::tempdir().unwrap(), Path::new("/bin/sh"));
        let cache = home.path().join("cache");
        let file = cache.join("whole-jail");
        let tried = HostJail::try_out_remembering(program, &cache);
        assert!(tried.remembered.is_none() && !tried.forget(), "the first is tried");
        assert_eq!(file.exists(), tried.missing.is_empty(), "{:?}", tried.missing);
        if !tried.missing.is_empty() {
            eprintln!("NOT RUN: this host does not give the whole jail: {:?}", tried.missing);
            return;
        }
        assert_eq!(fs::metadata(&cache).unwrap().mode() & 0o077, 0, "the cache is the user's alone");
        let known = HostJail::try_out_remembering(program, &cache);
        let what = |jail: &HostJail| {
            (jail.way, jail.namespaces.clone(), jail.identity, jail.bases.clone(), jail.top.clone())
        };
        assert!(known.remembered.is_some() && known.missing.is_empty());
        assert_eq!(what(&known), what(&tried));
        let elsewhere = HostJail::try_out_remembering(Path::new("/bin/true"), &cache);
        assert!(elsewhere.remembered.is_none(), "another program is tried");
        // What was remembered is now that other program's.
        assert!(HostJail::try_out_remembering(program, &cache).remembered.is_none());
        let known = HostJail::try_out_remembering(program, &cache);
        assert!(known.forget() && !file.exists());
    }

    #[test]
    fn the_root_has_no_name_that_counts_as_a_hole() {
        for place in places(Path::new("/opt/qemu/bin/qemu")) {
            let (Place::Folder(at) | Place::File(at) | Place::Device(at) | Place::Link { at, .. }) = place;
            let first = at.components().nth(1).unwrap().as_os_str().to_str().unwrap();
            assert!(ROOT_NAMES.contains(&first), "{first}");
        }
    }
}
