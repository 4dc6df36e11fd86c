//! The namespaces that processes are in, against those that existed at ready.

use super::space::Space;
use super::tasks::{SweepError, Task};
use crate::kernel::{Profile, u64_at};
use std::collections::{BTreeSet, HashMap};

/// The members of `nsproxy` that name one, each with what the record calls it.
fn kinds(profile: &Profile) -> [(u32, &'static str); 8] {
    let o = &profile.offsets;
    [
        (o.nsproxy_uts, "uts"),
        (o.nsproxy_ipc, "ipc"),
        (o.nsproxy_mnt, "mount"),
        (o.nsproxy_pid, "pid"),
        (o.nsproxy_net, "network"),
        (o.nsproxy_time, "time"),
        (o.nsproxy_time_for_children, "time"),
        (o.nsproxy_cgroup, "cgroup"),
    ]
}

/// The namespaces of each set that some task has: set, kind and address.
fn all(
    space: &Space<'_>,
    profile: &Profile,
    tasks: &[Task],
) -> Result<Vec<(u64, &'static str, u64)>, SweepError> {
    let sets: BTreeSet<u64> = tasks.iter().map(|task| task.nsproxy).filter(|set| *set != 0).collect();
    let kinds = kinds(profile);
    let start = kinds.iter().map(|(at, _)| *at).min().unwrap_or(0);
    let end = kinds.iter().map(|(at, _)| *at).max().unwrap_or(0).saturating_add(8);
    let read =
        space.gather(sets.iter().map(|set| (set.wrapping_add(u64::from(start)), (end - start) as usize)))?;
    let mut found = Vec::new();
    for (at, set) in sets.into_iter().enumerate() {
        let Some(bytes) = read.get(at) else { continue };
        for (offset, kind) in kinds {
            found.extend(u64_at(bytes, (offset - start) as usize).map(|namespace| (set, kind, namespace)));
        }
    }
    Ok(found)
}

/// Every namespace that a task is in, and those of users.
///
/// # Errors
/// Memory can't be read.
pub(super) fn known(
    space: &Space<'_>,
    profile: &Profile,
    tasks: &[Task],
) -> Result<BTreeSet<u64>, SweepError> {
    let users = tasks.iter().map(|task| task.user_namespace);
    Ok(all(space, profile, tasks)?.into_iter().map(|(.., namespace)| namespace).chain(users).collect())
}

/// Which sets hold a namespace that is not known, and of which kind it is.
///
/// # Errors
/// Memory can't be read.
pub(super) fn unknown(
    space: &Space<'_>,
    profile: &Profile,
    tasks: &[Task],
    known: &BTreeSet<u64>,
) -> Result<HashMap<u64, &'static str>, SweepError> {
    let strangers =
        all(space, profile, tasks)?.into_iter().filter(|(.., namespace)| !known.contains(namespace));
    Ok(strangers.map(|(set, kind, _)| (set, kind)).collect())
}
