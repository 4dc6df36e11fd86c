//! L6 for processes: does what the guest's init tells of the processes fit what the host read in the machine's memory?
//!
//! The host calls the roll now and then (`crates/runtime/src/driver/roll.rs`): the init tells of every process (claims
//! `processes N …` of its execs), and after its answer the host reads the list itself (`hotcell.process_roll`, an object).
//!
//! | finding | when |
//! |---|---|
//! | processes omitted | the host saw one that had begun before the guest told, and the guest did not tell of it |
//! | processes invented | the guest tells of one that it says began before the roll before, and the host saw it at neither |
//!
//! Both hold however busy the two are: the first lived when the guest told and when the host looked, the second would have
//! lived through a look of the host. A roll that is incomplete on either side says nothing, and nothing is found in an
//! answer that never came.
//! Bounded: [`MAX_OPEN`] rolls at a time, [`MAX_TOLD`] processes of each, [`MAX_NAMES`] names, at most one finding of each kind.

use crate::{Finding, FindingKind, Layer};
use hotcell_ledger::{Digest, Event, Payload};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Rolls whose answers are kept until the host's list comes: an honest guest tells of one at a time.
pub const MAX_OPEN: usize = 16;
/// Processes of one answer that are kept; the init tells of 1024 at most.
pub const MAX_TOLD: usize = 4096;
/// Programs of processes that are kept.
pub const MAX_NAMES: usize = 4096;
/// Processes that a finding names.
const NAMED: usize = 5;
/// The guest tells beginnings in ticks of 10 ms; what began so shortly before is left alone.
const MARGIN_NS: u64 = 200_000_000;

/// What the guest told in one roll.
#[derive(Clone, Debug, Default)]
struct Told {
    at_ns: u64,
    parts: BTreeSet<u64>,
    of: u64,
    processes: BTreeMap<i32, u64>,
    spoiled: bool,
}

impl Told {
    fn is_whole(&self) -> bool {
        !self.spoiled && self.of > 0 && self.parts.iter().copied().eq(1..=self.of)
    }
}

/// The host's list of one roll.
#[derive(Clone, Debug, Deserialize)]
struct Roll {
    roll: u64,
    processes: Vec<(i32, u64)>,
    own: Vec<i32>,
    left_out: u64,
}

impl Roll {
    fn has(&self, pid: i32) -> bool {
        self.processes.iter().any(|(other, _)| *other == pid) || self.own.contains(&pid)
    }
}

#[derive(Deserialize)]
struct Seen {
    seen: Vec<SeenProcess>,
}

#[derive(Deserialize)]
struct SeenProcess {
    pid: i32,
    executable: String,
}

/// Both accounts of one run's processes.
#[derive(Clone, Debug, Default)]
pub struct Processes {
    names: BTreeMap<i32, String>,
    told: BTreeMap<u64, Told>,
    /// The roll before: when the guest told, and what the host saw.
    before: Option<(u64, Roll)>,
    omitted: BTreeSet<i32>,
    invented: BTreeSet<i32>,
}

impl Processes {
    /// Before the first event.
    pub fn new() -> Processes {
        Processes::default()
    }

    /// Takes in one event; `object` gives the object of a digest, where it is at hand.
    pub fn observe(&mut self, event: &Event, object: impl FnOnce(&Digest) -> Option<Vec<u8>>) {
        let Payload::ToolCall { tool, args, .. } = &event.payload else { return };
        let tool = tool.as_str();
        if !event.actor.is_host_band() {
            if let Some(words) = tool.strip_prefix("processes ") {
                self.tell(words);
            }
        } else if tool == "hotcell.process_roll" {
            if let Some(roll) = object(args).and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
                self.see(roll);
            }
        } else if tool == "hotcell.processes"
            && let Some(Seen { seen }) = object(args).and_then(|bytes| serde_json::from_slice(&bytes).ok())
        {
            for one in seen {
                if self.names.len() < MAX_NAMES || self.names.contains_key(&one.pid) {
                    self.names.insert(one.pid, one.executable);
                }
            }
        }
    }

    /// `ROLL PART/OF at NS PID:NS …`, as `crates/guest/src/roll.rs` writes it. What can't be read spoils the roll.
    fn tell(&mut self, words: &str) {
        let mut words = words.split(' ');
        let mut next = || words.next().unwrap_or_default();
        let roll: u64 = next().parse().unwrap_or(0);
        let (part, of) = next().split_once('/').unwrap_or_default();
        let at = (next() == "at").then(next).and_then(|at| at.parse().ok());
        if self.told.len() >= MAX_OPEN && !self.told.contains_key(&roll) {
            return;
        }
        let told = self.told.entry(roll).or_default();
        let numbers = (part.parse(), of.parse(), at);
        let (Ok(part), Ok(of), Some(at_ns)) = numbers else {
            told.spoiled = true;
            return;
        };
        told.spoiled |= part == 0 || of > 64;
        (told.at_ns, told.of) = (at_ns, of);
        if !told.spoiled {
            told.parts.insert(part);
        }
        for word in words {
            let process = word.split_once(':').map(|(pid, began)| (pid.parse(), began.parse()));
            match process {
                Some((Ok(pid), Ok(began))) if told.processes.len() < MAX_TOLD => {
                    told.processes.insert(pid, began);
                }
                _ => told.spoiled = true,
            }
        }
    }

    fn see(&mut self, roll: Roll) {
        let told = self.told.remove(&roll.roll).unwrap_or_default();
        // What was told of an earlier one came too late.
        self.told = self.told.split_off(&roll.roll);
        if !told.is_whole() || roll.left_out > 0 {
            self.before = None;
            return;
        }
        let earlier = |began: u64, at: u64| began.saturating_add(MARGIN_NS) < at;
        for (pid, began) in &roll.processes {
            if earlier(*began, told.at_ns) && !told.processes.contains_key(pid) {
                self.omitted.insert(*pid);
            }
        }
        if let Some((at, before)) = &self.before {
            for (pid, began) in &told.processes {
                if earlier(*began, *at) && !before.has(*pid) && !roll.has(*pid) {
                    self.invented.insert(*pid);
                }
            }
        }
        self.before = Some((told.at_ns, roll));
    }

    /// Where the two accounts part.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let named = |pid: &i32| match self.names.get(pid) {
            Some(executable) => format!("{pid} ({executable})"),
            None => pid.to_string(),
        };
        for (kind, pids, words) in [
            (
                FindingKind::ProcessesOmitted,
                &self.omitted,
                "the host saw processes that the guest does not tell of",
            ),
            (
                FindingKind::ProcessesInvented,
                &self.invented,
                "the guest tells of processes that the host did not see",
            ),
        ] {
            let Some(first) = pids.first() else { continue };
            let all: Vec<String> = pids.iter().take(NAMED).map(named).collect();
            let more = pids.len().saturating_sub(all.len());
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let detail = format!("{words}: {}{more}", all.join(", "));
            findings.push(Finding { layer: Layer::L6, kind, subject: format!("process {first}"), detail });
        }
        findings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_ledger::{ActorId, NfcString};

    const S: u64 = 1_000_000_000;

    #[derive(Default)]
    struct Story {
        processes: Processes,
        sequence: u64,
    }

    impl Story {
        fn event(&mut self, actor: ActorId, tool: &str, object: &str) {
            let args = Digest::of(object.as_bytes());
            let payload = Payload::ToolCall { tool: NfcString::new(tool), args, result: Digest::ZERO };
            self.sequence += 1;
            let event = Event { sequence: self.sequence, timestamp_ns: 0, actor, parent: None, payload };
            self.processes.observe(&event, |digest| (*digest == args).then(|| object.as_bytes().to_vec()));
        }

        fn told(&mut self, words: &str) {
            self.event(ActorId::FIRST_GUEST, &format!("processes {words}"), "");
        }

        fn seen(&mut self, roll: u64, processes: &str, own: &str) {
            let object = format!(
                r#"{{"fact":"process_roll","roll":{roll},"processes":[{processes}],"own":[{own}],"left_out":0}}"#
            );
            self.event(ActorId::HOST, "hotcell.process_roll", &object);
        }

        fn found(&self) -> Vec<(FindingKind, String)> {
            self.processes.findings().into_iter().map(|one| (one.kind, one.subject)).collect()
        }
    }

    #[test]
    fn an_honest_account_of_a_busy_machine_finds_nothing() {
        let mut story = Story::default();
        // 12 ends after it was told of, 13 begins after, 14 is the init's own still.
        story.told(&format!("1 1/2 at {} 10:{} 11:{}", 5 * S, S, S));
        story.told(&format!("1 2/2 at {} 12:{} 14:{}", 5 * S, 2 * S, 4 * S));
        story.seen(1, &format!("[10,{S}],[11,{S}],[13,{}]", 5 * S), "1,14");
        story.told(&format!("2 1/1 at {} 10:{} 13:{} 14:{}", 7 * S, S, 5 * S, 4 * S));
        story.seen(2, &format!("[10,{S}],[13,{}],[14,{}]", 5 * S, 4 * S), "1");
        assert_eq!(story.found(), []);
    }

    #[test]
    fn one_that_is_omitted_is_named_with_its_program() {
        let mut story = Story::default();
        let seen = r#"{"fact":"processes","seen":[{"pid":11,"parent":1,"user":0,"name":"x","executable":"/bin/hidden","argv":""}]}"#;
        story.event(ActorId::HOST, "hotcell.processes", seen);
        story.told(&format!("1 1/1 at {} 10:{S}", 5 * S));
        story.seen(1, &format!("[10,{S}],[11,{S}]"), "1");
        assert_eq!(story.found(), [(FindingKind::ProcessesOmitted, "process 11".into())]);
        assert!(story.processes.findings()[0].detail.ends_with("11 (/bin/hidden)"));
    }

    #[test]
    fn one_that_is_invented_is_named_once_it_would_have_been_seen() {
        let mut story = Story::default();
        story.told(&format!("1 1/1 at {} 10:{S} 99:{S}", 5 * S));
        story.seen(1, &format!("[10,{S}]"), "1");
        assert_eq!(story.found(), [], "it may have ended between the two");
        story.told(&format!("2 1/1 at {} 10:{S} 99:{S}", 7 * S));
        story.seen(2, &format!("[10,{S}]"), "1");
        assert_eq!(story.found(), [(FindingKind::ProcessesInvented, "process 99".into())]);
    }

    #[test]
    fn accounts_that_are_not_whole_say_nothing_and_cost_nothing() {
        for told in
            ["", "1", "1 1/2 at 5000000000", "1 0/0 at 5000000000 7:1", "1 x/y at z", "1 1/1 at 5000000000 7"]
        {
            let mut story = Story::default();
            story.told(told);
            story.seen(1, "[11,1]", "1");
            assert_eq!(story.found(), [], "{told:?}");
        }
        let mut story = Story::default();
        for pid in 0..2 * MAX_TOLD {
            story.told(&format!("1 1/1 at {} {pid}:1", 5 * S));
        }
        assert!(story.processes.told[&1].processes.len() <= MAX_TOLD);
        story.seen(1, "[1000000,1]", "1");
        assert_eq!(story.found(), []);
        for roll in 100..200 {
            story.told(&format!("{roll} 1/1 at {} 10:{S}", 5 * S));
        }
        assert!(story.processes.told.len() <= MAX_OPEN);
        // Of another roll than the host's.
        story.told(&format!("2 1/1 at {} 10:{S}", 5 * S));
        story.seen(3, "[11,1]", "1");
        assert_eq!(story.found(), []);
    }
}
