//! What `/proc` says about a running VMM.

use super::{Part, cgroup};
use crate::process::{ProcessId, proc_text};
use hotcell_sys::host::Namespace;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Longest list that goes into the record, bytes.
const MAX_DETAIL: usize = 4096;

/// By their names in `status`.
const CAPABILITY_SETS: [&str; 5] = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];

/// What was read. Over threads, the weakest value counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Real, effective, saved and file system user.
    pub uids: [u32; 4],
    /// Real, effective, saved and file system group.
    pub gids: [u32; 4],
    /// Further groups.
    pub groups: Vec<u32>,
    /// Namespaces that are not the ones of this process.
    pub namespaces: BTreeSet<Namespace>,
    /// No new privileges, on every thread.
    pub no_new_privileges: bool,
    /// All capability sets of all threads together: inheritable, permitted, effective, bounding, ambient.
    pub capabilities: [u64; 5],
    /// Every thread's system calls are filtered.
    pub seccomp: bool,
    /// Filters on the thread that has the fewest, where the kernel says.
    pub filters: Option<u32>,
    /// Names in its root folder.
    pub root: Vec<String>,
    /// Mount points that are not read-only.
    pub writable_mounts: Vec<String>,
    /// Limits by cgroups of ours.
    pub limits: Vec<(Part, String)>,
    /// What its open descriptors are.
    pub descriptors: Vec<String>,
    /// Open descriptors that are folders: a way out of a root.
    pub open_folders: u32,
}

impl Measured {
    /// Reads all of it.
    ///
    /// # Errors
    /// The process is gone, or may not be looked at.
    pub fn of(process: &ProcessId) -> io::Result<Measured> {
        let base = format!("/proc/{}", process.pid);
        let status = Status::of(&threads(process)?, &mut Vec::new())?;
        let mut namespaces = BTreeSet::new();
        for kind in Namespace::ALL {
            let name = if kind == Namespace::Mount { "mnt" } else { kind.as_str() };
            if fs::read_link(format!("{base}/ns/{name}"))? != fs::read_link(format!("/proc/self/ns/{name}"))?
            {
                namespaces.insert(kind);
            }
        }
        let mut root = Vec::new();
        for entry in fs::read_dir(format!("{base}/root"))? {
            root.push(entry?.file_name().to_string_lossy().into_owned());
        }
        root.sort();
        let mountinfo = fs::read_to_string(format!("{base}/mountinfo"))?;
        let (mut descriptors, mut open_folders) = (Vec::new(), 0);
        for entry in fs::read_dir(format!("{base}/fd"))? {
            let path = entry?.path();
            let Ok(target) = fs::read_link(&path) else { continue };
            open_folders += u32::from(fs::metadata(&path).is_ok_and(|metadata| metadata.is_dir()));
            let number = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            descriptors.push(format!("{number}={}", target.display()));
        }
        if !process.exists() {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Measured {
            uids: status.uids,
            gids: status.gids,
            groups: status.groups,
            namespaces,
            no_new_privileges: status.no_new_privileges,
            capabilities: status.capabilities,
            seccomp: status.seccomp,
            filters: status.filters,
            root,
            writable_mounts: writable(&mountinfo),
            limits: cgroup::limits_of(process),
            descriptors,
            open_folders,
        })
    }

    /// The parts that this amounts to. `own_uid` is the user of the caller, `top` the
    /// name in the root below which the VMM's program lies.
    pub fn parts(&self, own_uid: u32, top: &str) -> BTreeSet<Part> {
        let has = |kind| self.namespaces.contains(&kind);
        let one = self.uids.iter().all(|uid| Some(uid) == self.uids.first())
            && self.gids.iter().all(|gid| Some(gid) == self.gids.first());
        let not_root = one && !self.uids.contains(&0) && !self.gids.contains(&0);
        let other_user = not_root && !self.uids.contains(&own_uid);
        let small_root = has(Namespace::Mount)
            && self.writable_mounts.is_empty()
            && self.root.iter().all(|name| name == top || super::host::ROOT_NAMES.contains(&name.as_str()))
            && self.open_folders == 0;
        let limited = |part| self.limits.iter().any(|(of, _)| *of == part);
        let judged = [
            (Part::User, other_user || (not_root && has(Namespace::User))),
            (Part::Mount, small_root),
            (Part::Net, has(Namespace::Net)),
            (Part::Pid, has(Namespace::Pid)),
            (Part::Ipc, has(Namespace::Ipc)),
            (Part::Uts, has(Namespace::Uts)),
            (Part::CgroupView, has(Namespace::Cgroup)),
            (Part::NoNewPrivileges, self.no_new_privileges),
            (Part::NoCapabilities, self.holds_no_capability()),
            // Ours and QEMU's; old kernels do not count.
            (Part::Seccomp, self.seccomp && self.filters.is_none_or(|count| count >= 2)),
            (Part::MemoryLimit, limited(Part::MemoryLimit)),
            (Part::CpuLimit, limited(Part::CpuLimit)),
            (Part::PidsLimit, limited(Part::PidsLimit)),
        ];
        judged.into_iter().filter(|(_, holds)| *holds).map(|(part, _)| part).collect()
    }

    /// The bounding set is what could be had, not what is held; with no-new-privileges it gives nothing.
    fn holds_no_capability(&self) -> bool {
        let [inheritable, permitted, effective, bounding, ambient] = self.capabilities;
        let held = inheritable | permitted | effective | ambient;
        held == 0 && (bounding == 0 || self.no_new_privileges)
    }

    pub(super) fn details(&self) -> BTreeMap<String, String> {
        let join = |all: &[u32]| all.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        let capabilities: Vec<String> = self.capabilities.iter().map(|set| format!("{set:x}")).collect();
        let limits: Vec<&str> = self.limits.iter().map(|(_, text)| text.as_str()).collect();
        let namespaces: Vec<&str> = self.namespaces.iter().map(|kind| kind.as_str()).collect();
        let filters = self.filters.map_or_else(|| "unknown".to_owned(), |count| count.to_string());
        BTreeMap::from([
            ("jail_uids".to_owned(), join(&self.uids)),
            ("jail_gids".to_owned(), join(&self.gids)),
            ("jail_groups".to_owned(), join(&self.groups)),
            ("jail_namespaces".to_owned(), namespaces.join(" ")),
            ("jail_no_new_privileges".to_owned(), self.no_new_privileges.to_string()),
            ("jail_capabilities".to_owned(), capabilities.join(" ")),
            ("jail_seccomp_filters".to_owned(), filters),
            ("jail_root".to_owned(), bounded(&self.root)),
            ("jail_writable_mounts".to_owned(), bounded(&self.writable_mounts)),
            ("jail_limits".to_owned(), limits.join(" ")),
            ("jail_descriptors".to_owned(), bounded(&self.descriptors)),
        ])
    }
}

fn bounded(list: &[String]) -> String {
    let mut text = list.join(" ");
    if text.len() > MAX_DETAIL {
        let end = (0..=MAX_DETAIL).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.namespaces.iter().map(|kind| kind.as_str()).collect();
        let [uid, ..] = self.uids;
        match names.as_slice() {
            [] => write!(f, "no namespaces, uid {uid}")?,
            names => write!(f, "{} namespaces, uid {uid}", names.join("+"))?,
        }
        if self.holds_no_capability() {
            f.write_str(", no capabilities")?;
        }
        if self.no_new_privileges {
            f.write_str(", no new privileges")?;
        }
        if self.seccomp {
            f.write_str(", seccomp")?;
        }
        let limits: BTreeSet<&str> = self.limits.iter().map(|(part, _)| part.as_str()).collect();
        for limit in limits {
            write!(f, ", {limit}")?;
        }
        Ok(())
    }
}

/// Mount points whose own flags do not say read-only. Devices are not written
/// through their mount, and `/proc` of the jail is mounted read-only as well.
fn writable(mountinfo: &str) -> Vec<String> {
    mountinfo
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let (at, options) = (fields.get(4)?, fields.get(5)?);
            (!options.split(',').any(|option| option == "ro")).then(|| (*at).to_owned())
        })
        .collect()
}

/// What `status` says, over all threads: the weakest of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    uids: [u32; 4],
    gids: [u32; 4],
    groups: Vec<u32>,
    no_new_privileges: bool,
    capabilities: [u64; 5],
    seccomp: bool,
    filters: Option<u32>,
}

/// Whether a thread executes nothing any more. The kernel takes a thread's filters away as it ends (since Linux 6.11),
/// and that is no breach.
fn is_ending(task: &Path) -> bool {
    /// `PF_EXITING` (`include/linux/sched.h`).
    const EXITING: u64 = 0x4;
    let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
    // Field 9 of proc(5); the first behind the name is field 3.
    let flags = stat.rfind(')').and_then(|end| stat.get(end + 1..)?.split_ascii_whitespace().nth(6));
    flags.and_then(|flags| flags.parse::<u64>().ok()).is_none_or(|flags| flags & EXITING != 0)
}

/// The folders of a process's threads.
pub(super) fn threads(process: &ProcessId) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(format!("/proc/{}/task", process.pid))?.map(|task| Ok(task?.path())).collect()
}

/// Whether a status says that system calls are not filtered: no thread of a VMM does, but one that is ending.
fn is_unfiltered(status: &str) -> bool {
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "0"))
}

impl Status {
    /// Of all these threads.
    pub(super) fn of(threads: &[PathBuf], buffer: &mut Vec<u8>) -> io::Result<Status> {
        let mut status = Status::default();
        let mut first = true;
        for task in threads {
            match proc_text(&task.join("status"), buffer) {
                // Asked after its status was read: one that was ending by then is left out.
                Ok(text) if is_unfiltered(text) && is_ending(task) => {}
                Ok(text) => status.weaken(text, std::mem::take(&mut first))?,
                // A thread may end while the list is read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                Err(error) => return Err(error),
            }
        }
        if first {
            Err(io::Error::new(io::ErrorKind::NotFound, "all of its threads are ending"))
        } else {
            Ok(status)
        }
    }

    /// In what it is less confined than before, in words.
    pub(super) fn weaker_than(&self, before: &Status) -> Vec<String> {
        let mut weaker = Vec::new();
        if (self.uids, self.gids) != (before.uids, before.gids) || self.groups != before.groups {
            weaker
                .push(format!("its users are {:?}, its groups {:?} {:?}", self.uids, self.gids, self.groups));
        }
        for ((now, before), set) in self.capabilities.iter().zip(before.capabilities).zip(CAPABILITY_SETS) {
            if now & !before != 0 {
                weaker.push(format!("{set} is {now:x}, was {before:x}"));
            }
        }
        if before.no_new_privileges && !self.no_new_privileges {
            weaker.push("it may gain privileges".to_owned());
        }
        if before.seccomp && !self.seccomp {
            weaker.push("its system calls are not filtered".to_owned());
        }
        if let (Some(now), Some(before)) = (self.filters, before.filters)
            && now < before
        {
            weaker.push(format!("it has {now} filters, had {before}"));
        }
        weaker
    }

    /// Takes one thread's `status` in: the weaker of both stays.
    fn weaken(&mut self, text: &str, first: bool) -> io::Result<()> {
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(str::trim)
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("no {name} in status")))
        };
        let numbers = |name: &str| -> io::Result<Vec<u32>> {
            field(name)?.split_whitespace().map(|word| word.parse().map_err(io::Error::other)).collect()
        };
        let four = |name: &str| -> io::Result<[u32; 4]> {
            numbers(name)?.try_into().map_err(|_| io::ErrorKind::InvalidData.into())
        };
        let mut capabilities = [0; 5];
        for (set, name) in capabilities.iter_mut().zip(CAPABILITY_SETS) {
            *set = u64::from_str_radix(field(name)?, 16).map_err(io::Error::other)?;
        }
        let (uids, gids) = (four("Uid")?, four("Gid")?);
        let no_new_privileges = field("NoNewPrivs")? == "1";
        let seccomp = field("Seccomp")? == "2";
        let filters = field("Seccomp_filters").ok().and_then(|count| count.parse().ok());
        if first {
            let groups = numbers("Groups")?;
            *self = Status { uids, gids, groups, no_new_privileges, capabilities, seccomp, filters };
            return Ok(());
        }
        // A thread with another user than the rest makes "one user" false.
        if uids != self.uids || gids != self.gids {
            self.uids = [0, uids[0], self.uids[0], 0];
            self.gids = [0, gids[0], self.gids[0], 0];
        }
        self.no_new_privileges &= no_new_privileges;
        self.seccomp &= seccomp;
        self.filters = self.filters.zip(filters).map(|(a, b)| a.min(b));
        for (mine, other) in self.capabilities.iter_mut().zip(capabilities) {
            *mine |= other;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(uid: u32, caps: &str, nnp: u8, seccomp: u8, filters: u32) -> String {
        format!(
            "Name:\tq\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t7\t7\t7\t7\nGroups:\t\nCapInh:\t0\nCapPrm:\t{caps}\n\
             CapEff:\t{caps}\nCapBnd:\t0\nCapAmb:\t0\nNoNewPrivs:\t{nnp}\nSeccomp:\t{seccomp}\nSeccomp_filters:\t{filters}\n"
        )
    }

    fn measured(threads: &[String]) -> Measured {
        let mut all = Status::default();
        for (number, text) in threads.iter().enumerate() {
            all.weaken(text, number == 0).unwrap();
        }
        Measured {
            uids: all.uids,
            gids: all.gids,
            groups: all.groups,
            namespaces: Namespace::ALL.into_iter().filter(|kind| *kind != Namespace::User).collect(),
            no_new_privileges: all.no_new_privileges,
            capabilities: all.capabilities,
            seccomp: all.seccomp,
            filters: all.filters,
            root: vec!["dev".into(), "proc".into(), "usr".into()],
            writable_mounts: Vec::new(),
            limits: Vec::new(),
            descriptors: Vec::new(),
            open_folders: 0,
        }
    }

    #[test]
    fn a_thread_that_is_ending_counts_for_nothing() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = ProcessId::of(child.id() as i32).unwrap();
        while !process.is_zombie() {
            std::thread::yield_now();
        }
        // The control: its status can be read still.
        assert!(fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap().contains("Seccomp"));
        let status = |of: &ProcessId| Status::of(&threads(of).unwrap(), &mut Vec::new());
        assert_eq!(status(&process).unwrap_err().kind(), io::ErrorKind::NotFound);
        child.wait().unwrap();
        assert!(status(&ProcessId::of(std::process::id() as i32).unwrap()).is_ok());
    }

    #[test]
    fn the_weakest_thread_counts() {
        let strong = status(7, "0", 1, 2, 2);
        let parts = measured(&[strong.clone(), strong.clone()]).parts(0, "usr");
        for part in [Part::User, Part::Mount, Part::NoNewPrivileges, Part::NoCapabilities, Part::Seccomp] {
            assert!(parts.contains(&part), "{part}");
        }
        for (weak, part) in [
            (status(0, "0", 1, 2, 2), Part::User),
            (status(7, "20", 1, 2, 2), Part::NoCapabilities),
            (status(7, "0", 0, 2, 2), Part::NoNewPrivileges),
            (status(7, "0", 1, 0, 0), Part::Seccomp),
            (status(7, "0", 1, 2, 1), Part::Seccomp),
        ] {
            for order in [[strong.clone(), weak.clone()], [weak, strong.clone()]] {
                assert!(!measured(&order).parts(0, "usr").contains(&part), "{part}");
            }
        }
    }

    #[test]
    fn what_a_process_lost_is_said() {
        let of = |text: &str| {
            let mut status = Status::default();
            status.weaken(text, true).unwrap();
            status
        };
        let strong = of(&status(7, "0", 1, 2, 2));
        assert_eq!(strong.weaker_than(&strong), [""; 0]);
        for (weak, said) in [
            (status(0, "0", 1, 2, 2), "its users"),
            (status(7, "20", 1, 2, 2), "CapPrm is 20"),
            (status(7, "0", 0, 2, 2), "gain privileges"),
            (status(7, "0", 1, 0, 2), "not filtered"),
            (status(7, "0", 1, 2, 1), "1 filters, had 2"),
        ] {
            let weaker = of(&weak).weaker_than(&strong);
            assert!(weaker.first().is_some_and(|text| text.contains(said)), "{said}: {weaker:?}");
            assert_eq!(
                strong.weaker_than(&of(&weak)).len(),
                usize::from(said == "its users"),
                "stronger is fine"
            );
        }
    }

    #[test]
    fn a_root_is_small_only_if_all_of_it_is() {
        let whole = measured(&[status(7, "0", 1, 2, 2)]);
        let with = |change: &dyn Fn(&mut Measured)| {
            let mut changed = whole.clone();
            change(&mut changed);
            changed.parts(0, "usr").contains(&Part::Mount)
        };
        assert!(with(&|_| ()));
        assert!(!with(&|jail| jail.root.push("home".into())));
        assert!(!with(&|jail| jail.writable_mounts.push("/tmp".into())));
        assert!(!with(&|jail| jail.open_folders = 1));
        assert!(!with(&|jail| jail.namespaces.retain(|kind| *kind != Namespace::Mount)));
        assert_eq!(writable("1 2 0:1 / / ro,nosuid - tmpfs t rw\n1 2 0:1 / /x rw - e e ro\n"), ["/x"]);
    }

    #[test]
    fn the_callers_own_user_is_a_part_only_in_a_user_namespace() {
        let mut jail = measured(&[status(7, "0", 1, 2, 2)]);
        assert!(!jail.parts(7, "usr").contains(&Part::User));
        jail.namespaces.insert(Namespace::User);
        assert!(jail.parts(7, "usr").contains(&Part::User));
    }

    #[test]
    fn this_process_is_not_in_a_jail() {
        let me = Measured::of(&ProcessId::of(std::process::id() as i32).unwrap()).unwrap();
        let parts = me.parts(rustix::process::getuid().as_raw(), "usr");
        assert!(me.namespaces.is_empty());
        for part in [Part::User, Part::Mount, Part::Net, Part::Pid, Part::Seccomp, Part::MemoryLimit] {
            assert!(!parts.contains(&part), "{part}");
        }
    }
}
