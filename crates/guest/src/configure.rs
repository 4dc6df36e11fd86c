//! What makes a waiting machine the machine of one run.
//!
//! What it guarantees: all of it is done before the init says ready, or the
//! machine ends.

use crate::cgroup::Workload;
use crate::last::{Doing, Failure};
use crate::limits::{LEAST_MEMORY_BYTES, PIDS, RESERVE_BYTES, TMP_BYTES};
use crate::view;
use hotcell_sys::guest::{ForkPlan, LockedPage, Namespaces, credit_entropy, exit_now, fork};
use hotcell_wire::{Clock, Configure, NONCE_MARK};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd};

/// What a configuration needs, and the values that most have: made while the machine boots, so that it is in
/// every template and a clone need not do it.
#[derive(Debug)]
pub(crate) struct Prepared {
    random: File,
    /// For mark and nonce, which stay in memory for the whole run; the host finds them in this machine's RAM.
    nonce: LockedPage,
    /// Bytes of memory that the machine has.
    memory_total: u64,
    /// What the kernel calls itself.
    pub(crate) kernel_release: String,
    now: Settings,
}

/// What holds now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    tmp_bytes: u64,
    pids: u32,
    memory_bytes: u64,
    owner: (u32, u32),
}

impl Prepared {
    /// After the workload's view and its cgroup were made.
    pub(crate) fn new(workload: &Workload, owner: (u32, u32)) -> Result<Prepared, Failure> {
        let memory_total = memory_total()?;
        let now = Settings { tmp_bytes: TMP_BYTES, pids: PIDS, memory_bytes: limit(memory_total, 0), owner };
        workload.limit(now.pids, now.memory_bytes)?;
        view::own_workspace(now.owner.0, now.owner.1)?;
        // The first question after the time looks for how to ask it.
        let _ = uptime_ns();
        Ok(Prepared {
            random: File::open("/dev/urandom").doing(|| "open /dev/urandom".into())?,
            nonce: LockedPage::new().doing(|| "lock a page for the nonce".into())?,
            memory_total,
            kernel_release: rustix::system::uname().release().to_str().unwrap_or("unknown").into(),
            now,
        })
    }

    /// Applies the host's configuration.
    pub(crate) fn apply(
        &mut self,
        configure: &Configure,
        workload: &Workload,
        view: BorrowedFd<'_>,
    ) -> Result<(), Failure> {
        credit_entropy(&self.random, &configure.entropy).doing(|| "credit entropy".into())?;
        set_wall_clock(configure.wall_clock_ns.get())?;
        let wanted = Settings {
            tmp_bytes: configure.tmp_bytes.get(),
            pids: configure.pids.get(),
            memory_bytes: limit(self.memory_total, configure.memory_bytes.get()),
            owner: (configure.workspace_uid.get(), configure.workspace_gid.get()),
        };
        if wanted.tmp_bytes != self.now.tmp_bytes {
            crate::view::resize_tmp(wanted.tmp_bytes)?;
        }
        if (wanted.pids, wanted.memory_bytes) != (self.now.pids, self.now.memory_bytes) {
            workload.limit(wanted.pids, wanted.memory_bytes)?;
        }
        if wanted.owner != self.now.owner {
            crate::view::own_workspace(wanted.owner.0, wanted.owner.1)?;
        }
        self.now = wanted;
        if configure.workspace_exec != 0 {
            in_view(view, crate::view::allow_workspace_exec)?;
        }
        let marked = [NONCE_MARK.as_slice(), &configure.nonce].concat();
        self.nonce.fill(&marked).doing(|| "keep the nonce".into())
    }
}

/// Sets the clock by a moment that this guest told the host of, whatever time has passed since.
pub(crate) fn set_clock(clock: &Clock) -> Result<(), Failure> {
    let since = uptime_ns().saturating_sub(clock.uptime_ns.get());
    set_wall_clock(clock.wall_clock_ns.get().saturating_add(since))
}

/// Time since boot, nanoseconds; a clone's goes on from its template's.
pub(crate) fn uptime_ns() -> u64 {
    let uptime = clock_gettime(ClockId::Boottime);
    (uptime.tv_sec as u64).saturating_mul(1_000_000_000) + uptime.tv_nsec as u64
}

fn set_wall_clock(ns: u64) -> Result<(), Failure> {
    const SECOND: u64 = 1_000_000_000;
    let time = Timespec { tv_sec: (ns / SECOND) as i64, tv_nsec: (ns % SECOND) as i64 };
    clock_settime(ClockId::Realtime, time).doing(|| "set the clock".into())
}

fn memory_total() -> Result<u64, Failure> {
    let info = fs::read_to_string("/proc/meminfo").doing(|| "read /proc/meminfo".into())?;
    let total = info
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    total.map(|kib| kib.saturating_mul(1024)).ok_or_else(|| Failure::new("/proc/meminfo has no MemTotal"))
}

fn limit(total: u64, asked: u64) -> u64 {
    let most = total.saturating_sub(RESERVE_BYTES).max(LEAST_MEMORY_BYTES);
    if asked == 0 { most } else { asked.clamp(LEAST_MEMORY_BYTES, most) }
}

/// Runs `change` in the workload's mount namespace, in a child, since a process
/// that enters one loses its own root.
fn in_view(view: BorrowedFd<'_>, change: fn() -> Result<(), Failure>) -> Result<(), Failure> {
    let plan = ForkPlan { cgroup: None, namespaces: Namespaces::Inherit };
    let child = fork(plan, || {
        let entered = move_into_link_name_space(view, Some(LinkNameSpaceType::Mount))
            .doing(|| "enter the workload's view".into());
        match entered.and_then(|()| change()) {
            Ok(()) => exit_now(0),
            Err(failure) => {
                crate::last::console(&failure.to_string());
                exit_now(1)
            }
        }
    })
    .doing(|| "fork".into())?;
    let status = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED)
        .doing(|| "wait for a change of the workload's view".into())?;
    match status.and_then(|status| status.exit_status()) {
        Some(0) => Ok(()),
        _ => Err(Failure::new("failed to change the workload's view; the console says why")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_reserve_is_kept_whatever_is_asked_for() {
        assert_eq!(limit(512 * MIB, 0), 512 * MIB - RESERVE_BYTES);
        assert_eq!(limit(512 * MIB, u64::MAX), 512 * MIB - RESERVE_BYTES);
        assert_eq!(limit(512 * MIB, 100 * MIB), 100 * MIB);
        assert_eq!(limit(512 * MIB, 1), LEAST_MEMORY_BYTES);
        assert_eq!(limit(10 * MIB, 0), LEAST_MEMORY_BYTES);
    }
}
