//! Gate 1: is the record well-formed? Every violation is collected, not only the first.
//!
//! ```text
//!  actor:   (never seen) --PROCESS_SPAWN, parent live--> live --PROCESS_EXIT--> exited     ids are never used again
//!  stream:  RUN_BEGIN ... RUN_END, sequences dense, timestamps never falling
//! ```
//! Guarantees: a stream has no violations exactly when it is a legal forest of actors between its two markers. Memory is
//! bounded for hostile streams: live actors and *intervals* of exited ids are at most [`MAX_TRACKED`] entries (an honest
//! host assigns ids one after another, so its exited actors are one interval, and memory follows the live ones alone);
//! past it spawns are violations of their own code, [`Code::LineageFull`]. The list of violations is cut at
//! [`MAX_VIOLATIONS`], and the rest counted.
//! Does not: judge. Which codes end a run is said by [`Code::is_fatal`]; acting on it is the judge's.
//! Called live by the recorder ([`Lineage::would_break`] *before* it records a guest's claim, so that a lying guest can't
//! break the lineage and have its own run killed), and over the whole stream by verifiers.

use crate::event::{ActorId, Event, Payload};
use core::fmt;
use std::collections::{BTreeMap, HashSet};

/// Live actors, and intervals of exited ids, that a lineage follows. At 2^20 of each, hash set and tree hold some
/// 64 MiB: what the most hostile record can make a verifier hold.
pub const MAX_TRACKED: usize = 1 << 20;
/// Violations that a report lists; the others are counted.
pub const MAX_VIOLATIONS: usize = 1000;

/// What is wrong with the record. All but the last are AMES-V1's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Code {
    /// A sequence is not the previous one and 1.
    SeqGap,
    /// A timestamp is below the highest seen.
    TimeRegression,
    /// The stream does not open with RUN_BEGIN.
    NoRunBegin,
    /// The stream does not close with RUN_END.
    NoRunEnd,
    /// A run marker inside.
    NestedRunMarker,
    /// The actor is already live.
    DoubleSpawn,
    /// The actor exited before.
    RespawnAfterExit,
    /// The named parent is not live.
    OrphanSpawn,
    /// Exit of an actor that is not live.
    ExitWithoutSpawn,
    /// An action by an actor that never spawned.
    UnattributedAction,
    /// An action by an actor that exited.
    ActionAfterExit,
    /// Still live at the end of the stream.
    UnterminatedActor,
    /// Ours: more actors than [`MAX_TRACKED`]; this spawn is not followed.
    LineageFull,
}

impl Code {
    /// Every code.
    pub const ALL: [Code; 13] = [
        Code::SeqGap,
        Code::TimeRegression,
        Code::NoRunBegin,
        Code::NoRunEnd,
        Code::NestedRunMarker,
        Code::DoubleSpawn,
        Code::RespawnAfterExit,
        Code::OrphanSpawn,
        Code::ExitWithoutSpawn,
        Code::UnattributedAction,
        Code::ActionAfterExit,
        Code::UnterminatedActor,
        Code::LineageFull,
    ];

    /// The code as AMES-V1 spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Code::SeqGap => "SEQ_GAP",
            Code::TimeRegression => "TIME_REGRESSION",
            Code::NoRunBegin => "NO_RUN_BEGIN",
            Code::NoRunEnd => "NO_RUN_END",
            Code::NestedRunMarker => "NESTED_RUN_MARKER",
            Code::DoubleSpawn => "DOUBLE_SPAWN",
            Code::RespawnAfterExit => "RESPAWN_AFTER_EXIT",
            Code::OrphanSpawn => "ORPHAN_SPAWN",
            Code::ExitWithoutSpawn => "EXIT_WITHOUT_SPAWN",
            Code::UnattributedAction => "UNATTRIBUTED_ACTION",
            Code::ActionAfterExit => "ACTION_AFTER_EXIT",
            Code::UnterminatedActor => "UNTERMINATED_ACTOR",
            Code::LineageFull => "LINEAGE_FULL",
        }
    }

    /// Whether this alone ends a run. Since a guest's claims are checked before they are recorded, a fatal code means
    /// that the recorder itself failed.
    pub const fn is_fatal(self) -> bool {
        match self {
            Code::DoubleSpawn
            | Code::RespawnAfterExit
            | Code::OrphanSpawn
            | Code::ExitWithoutSpawn
            | Code::UnattributedAction
            | Code::ActionAfterExit
            | Code::UnterminatedActor
            | Code::LineageFull => true,
            Code::SeqGap
            | Code::TimeRegression
            | Code::NoRunBegin
            | Code::NoRunEnd
            | Code::NestedRunMarker => false,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which rule.
    pub code: Code,
    /// The sequence that the event at fault says it has.
    pub sequence: u64,
    /// The actor at fault.
    pub actor: ActorId,
    /// The same in words.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at event {}, actor {}: {}", self.code, self.sequence, self.actor, self.detail)
    }
}

/// Disjoint intervals of ids, neighbours joined.
#[derive(Clone, Debug, Default)]
struct IdSet {
    end_of: BTreeMap<u64, u64>,
}

impl IdSet {
    fn contains(&self, id: u64) -> bool {
        self.end_of.range(..=id).next_back().is_some_and(|(_, end)| *end >= id)
    }

    fn insert(&mut self, id: u64) {
        if self.contains(id) {
            return;
        }
        let before = self.end_of.range(..id).next_back().map(|(start, end)| (*start, *end));
        let start = match before {
            Some((start, end)) if end.checked_add(1) == Some(id) => start,
            _ => id,
        };
        let end = id.checked_add(1).and_then(|next| self.end_of.remove(&next)).unwrap_or(id);
        self.end_of.insert(start, end);
    }
}

/// Who is live, and what has been seen, of a stream so far.
#[derive(Clone, Debug)]
pub struct Lineage {
    live: HashSet<u64>,
    /// An actor that is live: most events are by the same one as the event before.
    known_live: Option<u64>,
    exited: IdSet,
    last_sequence: Option<u64>,
    last_actor: ActorId,
    highest_ns: u64,
    run_end_at: Option<(u64, ActorId)>,
    max_tracked: usize,
}

impl Default for Lineage {
    fn default() -> Self {
        Lineage::new()
    }
}

impl Lineage {
    /// Before the first event.
    pub fn new() -> Lineage {
        Lineage {
            live: HashSet::new(),
            known_live: None,
            exited: IdSet::default(),
            last_sequence: None,
            last_actor: ActorId::HOST,
            highest_ns: 0,
            run_end_at: None,
            max_tracked: MAX_TRACKED,
        }
    }

    /// Whether the actor spawned and has not exited.
    #[inline]
    pub fn is_live(&self, actor: ActorId) -> bool {
        self.known_live == Some(actor.get()) || self.live.contains(&actor.get())
    }

    /// Whether the actor spawned and exited.
    pub fn has_exited(&self, actor: ActorId) -> bool {
        self.exited.contains(actor.get())
    }

    /// Whether the last event so far was RUN_END.
    pub fn has_ended(&self) -> bool {
        self.run_end_at.is_some()
    }

    /// The code that recording this event would cause by its actor, its parent or its kind; `None` when it is legal
    /// now. Sequence and timestamp are the host's and not looked at.
    pub fn would_break(&self, event: &Event) -> Option<Code> {
        self.lineage_faults(event).into_iter().flatten().next()
    }

    fn is_full(&self) -> bool {
        self.live.len() >= self.max_tracked || self.exited.end_of.len() >= self.max_tracked
    }

    fn lineage_faults(&self, event: &Event) -> [Option<Code>; 2] {
        let actor = event.actor;
        match event.payload {
            Payload::RunBegin | Payload::RunEnd => [self.last_sequence.map(|_| Code::NestedRunMarker), None],
            Payload::ProcessSpawn { .. } => {
                let own = if self.is_live(actor) {
                    Some(Code::DoubleSpawn)
                } else if self.has_exited(actor) {
                    Some(Code::RespawnAfterExit)
                } else {
                    self.is_full().then_some(Code::LineageFull)
                };
                let orphan = event.parent.is_some_and(|parent| !self.is_live(parent));
                [own, orphan.then_some(Code::OrphanSpawn)]
            }
            _ if self.is_live(actor) => [None, None],
            Payload::ProcessExit { .. } => [Some(Code::ExitWithoutSpawn), None],
            _ if self.has_exited(actor) => [Some(Code::ActionAfterExit), None],
            _ => [Some(Code::UnattributedAction), None],
        }
    }

    /// Takes the next event, as recorded, and says what is wrong with it. Never refuses: the record is what it is.
    pub fn observe(&mut self, event: &Event) -> Vec<Violation> {
        let mut found = Vec::new();
        let mut report =
            |code, sequence, actor, detail| found.push(Violation { code, sequence, actor, detail });
        let (sequence, actor) = (event.sequence, event.actor);

        match self.last_sequence {
            None if event.payload != Payload::RunBegin => {
                let detail = format!("the stream opens with {:?}", event.payload.event_type());
                report(Code::NoRunBegin, sequence, actor, detail);
            }
            Some(last) if last.checked_add(1) != Some(sequence) => {
                report(Code::SeqGap, sequence, actor, format!("follows sequence {last}"));
            }
            _ => {}
        }
        if event.timestamp_ns < self.highest_ns {
            let detail = format!("at {} ns, after {} ns", event.timestamp_ns, self.highest_ns);
            report(Code::TimeRegression, sequence, actor, detail);
        }
        if let Some((end, by)) = self.run_end_at.take() {
            report(Code::NestedRunMarker, end, by, "events follow RUN_END".to_owned());
        }

        let is_marker = matches!(event.payload, Payload::RunBegin | Payload::RunEnd);
        if is_marker {
            // RUN_END is inside only once something follows it; RUN_BEGIN as soon as it is not the first.
            if event.payload == Payload::RunEnd {
                self.run_end_at = Some((sequence, actor));
            } else if self.last_sequence.is_some() {
                report(Code::NestedRunMarker, sequence, actor, "RUN_BEGIN is not the first event".to_owned());
            }
        } else {
            let faults = self.lineage_faults(event);
            for code in faults.into_iter().flatten() {
                report(code, sequence, actor, fault_detail(code, event));
            }
            match event.payload {
                // An orphan is followed all the same, or each of its actions would be a violation too.
                Payload::ProcessSpawn { .. } if matches!(faults, [None, _]) => {
                    self.live.insert(actor.get());
                }
                Payload::ProcessExit { .. } if matches!(faults, [None, None]) => {
                    self.known_live = None;
                    self.live.remove(&actor.get());
                    self.exited.insert(actor.get());
                }
                _ if matches!(faults, [None, None]) => self.known_live = Some(actor.get()),
                _ => {}
            }
        }
        self.last_sequence = Some(sequence);
        self.last_actor = actor;
        self.highest_ns = self.highest_ns.max(event.timestamp_ns);
        found
    }

    /// What is wrong with the stream's end: no closing marker, actors still live (in the order of their ids). Lazy: a
    /// hostile record's million live actors are not a list. An empty stream is fine.
    pub fn finish(&self) -> impl Iterator<Item = Violation> + '_ {
        let sequence = self.last_sequence.unwrap_or(0);
        let no_end = (self.last_sequence.is_some() && self.run_end_at.is_none()).then(|| Violation {
            code: Code::NoRunEnd,
            sequence,
            actor: self.last_actor,
            detail: "the stream does not close with RUN_END".to_owned(),
        });
        let mut live: Vec<u64> = self.live.iter().copied().collect();
        live.sort_unstable();
        let unterminated = live.into_iter().filter_map(ActorId::new).map(move |actor| Violation {
            code: Code::UnterminatedActor,
            sequence,
            actor,
            detail: "spawned and never exited".to_owned(),
        });
        no_end.into_iter().chain(unterminated)
    }
}

fn fault_detail(code: Code, event: &Event) -> String {
    match code {
        Code::OrphanSpawn => match event.parent {
            Some(parent) => format!("its parent {parent} is not live"),
            None => "its parent is not live".to_owned(),
        },
        Code::DoubleSpawn => "spawned while it is live".to_owned(),
        Code::RespawnAfterExit => "spawned again after its exit".to_owned(),
        Code::ExitWithoutSpawn => "exited and is not live".to_owned(),
        Code::UnattributedAction => {
            format!("{:?} by an actor that never spawned", event.payload.event_type())
        }
        Code::ActionAfterExit => format!("{:?} after its exit", event.payload.event_type()),
        Code::LineageFull => format!("more than {MAX_TRACKED} actors to follow"),
        _ => String::new(),
    }
}

/// What Gate 1 found in a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GateReport {
    /// The first [`MAX_VIOLATIONS`], in the order of the stream.
    pub violations: Vec<Violation>,
    /// How many there were of each code, listed or not.
    pub counts: BTreeMap<Code, u64>,
}

impl GateReport {
    /// Adds one.
    pub fn add(&mut self, violation: Violation) {
        *self.counts.entry(violation.code).or_default() += 1;
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(violation);
        }
    }

    /// Whether there is no violation at all.
    pub fn is_ok(&self) -> bool {
        self.counts.is_empty()
    }

    /// How many violations there were with this code.
    pub fn count(&self, code: Code) -> u64 {
        self.counts.get(&code).copied().unwrap_or(0)
    }

    /// How many violations are not listed.
    pub fn unlisted(&self) -> u64 {
        let all: u64 = self.counts.values().fold(0, |sum, n| sum.saturating_add(*n));
        all.saturating_sub(u64::try_from(self.violations.len()).unwrap_or(u64::MAX))
    }

    /// The fatal codes that were seen. A record that did not end can't have left an actor *unterminated*: without its
    /// closing marker that code does not count.
    pub fn fatal(&self) -> impl Iterator<Item = Code> + '_ {
        let cut_short = self.count(Code::NoRunEnd) > 0;
        self.counts
            .keys()
            .copied()
            .filter(move |c| c.is_fatal() && !(cut_short && *c == Code::UnterminatedActor))
    }
}

/// Runs the gate over a whole stream.
pub fn check<'a>(events: impl IntoIterator<Item = &'a Event>) -> GateReport {
    let mut lineage = Lineage::new();
    let mut report = GateReport::default();
    for event in events {
        lineage.observe(event).into_iter().for_each(|v| report.add(v));
    }
    lineage.finish().for_each(|v| report.add(v));
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_join() {
        let mut set = IdSet::default();
        for id in [5, 3, 4, u64::MAX, 0, 1, 3] {
            set.insert(id);
        }
        assert_eq!(set.end_of.into_iter().collect::<Vec<_>>(), [(0, 1), (3, 5), (u64::MAX, u64::MAX)]);
    }

    #[test]
    fn a_full_lineage_says_so_and_stays_bounded() {
        let mut lineage = Lineage { max_tracked: 3, ..Lineage::new() };
        let spawn = |id| Event {
            sequence: 0,
            timestamp_ns: 0,
            actor: ActorId::new(id).unwrap(),
            parent: None,
            payload: Payload::ProcessSpawn {
                binary: crate::Digest::ZERO,
                argv: crate::Digest::ZERO,
                cwd: NfcString::default(),
            },
        };
        use crate::event::NfcString;
        for id in 0..3 {
            lineage.observe(&spawn(id));
        }
        assert_eq!(lineage.would_break(&spawn(9)), Some(Code::LineageFull));
        assert!(lineage.observe(&spawn(9)).iter().any(|v| v.code == Code::LineageFull));
        assert!(!lineage.is_live(ActorId::new(9).unwrap()));
    }
}
