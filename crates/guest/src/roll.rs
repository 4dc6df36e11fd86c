//! The init's own account of the workload's processes, when the host asks for it. Testimony: the host compares it with
//! what it read in this machine's memory.
//!
//! ```text
//! RollCall 7 ──► claim of exec 1, a tool: "processes 7 1/2 at 5230000000 212:4100000000 213:4110000000 …"
//!            └─► claim of exec 2:         "processes 7 2/2 at 5230000000 220:5000000000"
//! ```
//! Each process once, by its number in the machine's first pid namespace and when it began, both times in nanoseconds since
//! boot. Processes of the init's own packer and unpacker are not the workload's, nor is what has no memory any more.
//! Bounded: [`MAX_LISTED`] processes, [`PER_CLAIM`] in a claim. What is left out is said: the claim's place is `0/0`.

use crate::channel::Channel;
use crate::exec::Exec;
use hotcell_wire::{Claim, ClaimKind, GuestFrame};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

/// Processes that are told of: as many as the host writes down.
const MAX_LISTED: usize = 1024;
/// Processes in one claim: their two numbers have 30 characters at most, a claim has 2048 bytes.
const PER_CLAIM: usize = 60;
/// Of the kernel's clock that processes' beginnings are told in (`USER_HZ`).
const TICK_NS: u64 = 10_000_000;

/// Tells of every process of these execs.
pub(crate) fn answer(roll: u32, at_ns: u64, execs: &BTreeMap<u32, Exec>, channel: &mut Channel) {
    let mut all = Vec::new();
    for (&exec, live) in execs.iter().filter(|(_, live)| !live.is_own()) {
        let began = |pid: i32| Some((pid, began(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?));
        all.push((exec, live.processes().into_iter().filter_map(began).collect()));
    }
    for (exec, text) in claims(roll, at_ns, &all) {
        let claim =
            Claim { kind: ClaimKind::Tool, subject: exec.into(), parent: 0, value: 0, text: text.as_bytes() };
        channel.send(0, &GuestFrame::Claim(claim));
    }
}

/// What is told of these processes, by exec: all of them, or that they are too many.
fn claims(roll: u32, at_ns: u64, all: &[(u32, Vec<(i32, u64)>)]) -> Vec<(u32, String)> {
    let parts = all.iter().flat_map(|(exec, of)| of.chunks(PER_CLAIM).map(|part| (*exec, part)));
    let parts: Vec<(u32, &[(i32, u64)])> = parts.collect();
    let listed: usize = all.iter().map(|(_, of)| of.len()).sum();
    if listed > MAX_LISTED {
        let first = parts.first().map(|(exec, part)| (*exec, words(roll, 0, 0, at_ns, part)));
        return first.into_iter().collect();
    }
    let count = parts.len();
    let numbered = parts.into_iter().enumerate();
    numbered.map(|(at, (exec, part))| (exec, words(roll, at + 1, count, at_ns, part))).collect()
}

fn words(roll: u32, number: usize, of: usize, at_ns: u64, part: &[(i32, u64)]) -> String {
    let mut text = format!("processes {roll} {number}/{of} at {at_ns}");
    for (pid, began) in part {
        // A string takes all that is written to it.
        let _ = write!(text, " {pid}:{began}");
    }
    text
}

/// When a process began, from its `stat`; `None` where it has no memory.
fn began(stat: &str) -> Option<u64> {
    // The name, in parentheses, may have any character.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(19);
    let ticks: u64 = fields.next()?.parse().ok()?;
    let memory: u64 = fields.next()?.parse().ok()?;
    (memory > 0).then(|| ticks.saturating_mul(TICK_NS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_is_read_whatever_the_name_is() {
        let stat = |name: &str, memory: u64| {
            format!(
                "7 ({name}) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 123 {memory} 99 18446744073709551615 1"
            )
        };
        assert_eq!(began(&stat("sh", 4096)), Some(1_230_000_000));
        assert_eq!(began(&stat("a) S 9 9 (b", 4096)), Some(1_230_000_000));
        assert_eq!(began(&stat("zombie", 0)), None);
        assert_eq!((began(""), began("7 (x) S")), (None, None));
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert!(began(&own).is_some());
    }

    #[test]
    fn so_many_processes_are_told_of_and_with_one_more_it_is_said_that_not_all_are() {
        let of = |count: usize| {
            let process = |number: usize| (number as i32 + 1, 7);
            let (one, other): (Vec<_>, Vec<_>) = (0..count).map(process).partition(|(pid, _)| *pid <= 100);
            claims(3, 9, &[(1, one), (2, other)])
        };
        let told = of(MAX_LISTED);
        let named: usize = told.iter().map(|(_, text)| text.matches(":7").count()).sum();
        assert_eq!((named, told.len()), (MAX_LISTED, 100_usize.div_ceil(60) + 924_usize.div_ceil(60)));
        assert!(told.iter().enumerate().all(|(at, (exec, text))| {
            *exec == if at < 2 { 1 } else { 2 }
                && text.starts_with(&format!("processes 3 {}/{} at 9 ", at + 1, told.len()))
        }));
        let beyond = of(MAX_LISTED + 1);
        assert!(
            matches!(&beyond[..], [(1, text)] if text.starts_with("processes 3 0/0 at 9 ")),
            "{beyond:?}"
        );
        assert!(of(0).is_empty());
    }

    #[test]
    fn a_claim_of_the_largest_numbers_is_no_longer_than_the_host_takes() {
        let part = vec![(i32::MAX, u64::MAX); PER_CLAIM];
        assert!(words(u32::MAX, 99, 99, u64::MAX, &part).len() <= hotcell_wire::MAX_RESOURCE);
    }
}
