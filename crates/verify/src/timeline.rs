//! What happened, in order, of a bundle that was found intact: for people who read a report.
//!
//! Guarantees: only events of the chain that was verified (its head is compared again), and objects whose digests fit; at
//! most so many moments as the caller asks for. Called by `hotcell report`.

use crate::verify::VerifiedBundle;
use hotcell_decide::{HostFact, SeenProcess};
use hotcell_ledger::bundle::{BundleDir, LEDGER};
use hotcell_ledger::{ClosedLedger, Digest, Event, Payload};
use std::collections::VecDeque;
use std::io;

/// Longest fact that is shown: the longest there is.
const MAX_FACT_LEN: usize = 64 << 10;
/// Processes that a timeline has: twice as many as a record names.
const MAX_PROCESSES: usize = 2048;

/// One event in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Its place in the record.
    pub sequence: u64,
    /// Host clock, nanoseconds since 1970.
    pub timestamp_ns: u64,
    /// Who.
    pub actor: String,
    /// Whether the host saw it itself; else the guest said so.
    pub evidence: bool,
    /// What kind of event, or the name of the fact.
    pub what: String,
    /// The rest. May quote what the guest said.
    pub detail: String,
}

/// What kind of thing happened, for a drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// The run itself and its machine: beginning, measuring, readiness, teardown.
    Machine,
    /// A command, or a process that the host saw, begins or ends.
    Process,
    /// A change of a file that the host saw on the disk.
    File,
    /// A decision of the broker.
    Decision,
    /// What the guest said.
    Told,
    /// What must not be, and the kill.
    Violation,
}

/// One event's place in a drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tick {
    /// Host clock, nanoseconds since 1970.
    pub timestamp_ns: u64,
    /// What kind.
    pub lane: Lane,
}

/// A process as the host saw it first under its program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// When that was recorded, nanoseconds since 1970.
    pub timestamp_ns: u64,
    /// What was seen.
    pub process: SeenProcess,
}

/// The moments of a run: all, or the first and the last of many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// From the beginning on.
    pub first: Vec<Moment>,
    /// How many between the two are left out.
    pub left_out: u64,
    /// Up to the end.
    pub last: Vec<Moment>,
    /// Every event, in order.
    pub ticks: Vec<Tick>,
    /// The processes that the host saw, at most 2048.
    pub processes: Vec<Seen>,
}

impl VerifiedBundle {
    /// The first `first` and the last `last` moments, and every event as a tick.
    ///
    /// # Errors
    /// The bundle can't be read, or changed after it was verified.
    pub fn timeline(&self, first: usize, last: usize) -> io::Result<Timeline> {
        let verification = self.verification();
        let changed = || io::Error::other("the bundle changed after it was verified");
        let ledger = ClosedLedger::open(verification.bundle.join(LEDGER)).map_err(io::Error::other)?;
        if ledger.checkpoint() != verification.checkpoint {
            return Err(changed());
        }
        let dir = BundleDir::open(&verification.bundle)?;
        let mut timeline = Timeline::default();
        let mut late: VecDeque<Event> = VecDeque::new();
        for event in ledger.events().map_err(io::Error::other)? {
            let event = event.map_err(|_| changed())?;
            timeline.add_processes(&event, &dir);
            timeline.ticks.push(Tick { timestamp_ns: event.timestamp_ns, lane: lane(&event) });
            if timeline.first.len() < first {
                timeline.first.push(moment(&event, &dir));
                continue;
            }
            late.push_back(event);
            if late.len() > last {
                late.pop_front();
                timeline.left_out += 1;
            }
        }
        timeline.last = late.iter().map(|event| moment(event, &dir)).collect();
        Ok(timeline)
    }
}

impl Timeline {
    fn add_processes(&mut self, event: &Event, dir: &BundleDir) {
        let Payload::ToolCall { tool, args, .. } = &event.payload else { return };
        if !event.actor.is_host_band() || tool.as_str() != "hotcell.processes" {
            return;
        }
        let object = object(args, dir).and_then(|bytes| HostFact::from_object(&bytes).ok());
        let Some(HostFact::Processes { seen, .. }) = object else { return };
        let room = MAX_PROCESSES.saturating_sub(self.processes.len());
        let timestamp_ns = event.timestamp_ns;
        self.processes.extend(seen.into_iter().take(room).map(|process| Seen { timestamp_ns, process }));
    }
}

/// An object of the bundle, if it is what its name says.
fn object(name: &Digest, dir: &BundleDir) -> Option<Vec<u8>> {
    let bytes = dir.read(&BundleDir::object_path(name), MAX_FACT_LEN).ok()?;
    (Digest::of(&bytes) == *name).then_some(bytes)
}

fn lane(event: &Event) -> Lane {
    let host = event.actor.is_host_band();
    match &event.payload {
        Payload::ProcessSpawn { .. } | Payload::ProcessExit { .. } if !host => Lane::Process,
        _ if !host => Lane::Told,
        Payload::FileMutation { .. } => Lane::File,
        Payload::CapabilityRequest { .. } => Lane::Decision,
        Payload::NetworkRequest { .. } => Lane::Violation,
        Payload::ToolCall { tool, .. } => match tool.as_str() {
            "hotcell.violation" | "hotcell.kill" | "hotcell.fault" | "hotcell.containment_failure" => {
                Lane::Violation
            }
            "hotcell.mutations_counted" | "hotcell.copied" => Lane::File,
            "hotcell.spawn_denied" => Lane::Decision,
            name if name.starts_with("hotcell.process") => Lane::Process,
            _ => Lane::Machine,
        },
        _ => Lane::Machine,
    }
}

fn moment(event: &Event, dir: &BundleDir) -> Moment {
    let evidence = event.actor.is_host_band();
    let (what, detail) = words(event, evidence, dir);
    Moment {
        sequence: event.sequence,
        timestamp_ns: event.timestamp_ns,
        actor: event.actor.to_string(),
        evidence,
        what,
        detail,
    }
}

fn words(event: &Event, evidence: bool, dir: &BundleDir) -> (String, String) {
    let object = |name: &Digest| Some(String::from_utf8_lossy(&object(name, dir)?).into_owned());
    match &event.payload {
        Payload::ProcessSpawn { argv, cwd, .. } => {
            ("begins".into(), format!("{} in {cwd}", object(argv).unwrap_or_default()))
        }
        Payload::ProcessExit { code } => ("ends".into(), format!("code {code}")),
        Payload::FileMutation { op, path, before, after } => {
            let short = |digest: &Digest| match digest.is_zero() {
                true => "nothing".to_owned(),
                false => digest.to_hex().chars().take(12).collect(),
            };
            let detail = format!("{path}: {} to {}", short(before), short(after));
            (format!("file {op:?}").to_lowercase(), detail)
        }
        Payload::NetworkRequest { destination, .. } => ("network".into(), destination.to_string()),
        Payload::ToolCall { tool, args, .. } if evidence => {
            (tool.to_string(), object(args).unwrap_or_default())
        }
        Payload::ToolCall { tool, .. } => ("tool".into(), tool.to_string()),
        Payload::CapabilityRequest { capability, granted, reason } => {
            let answer = if *granted { "granted" } else { "not granted" };
            (format!("{capability:?} {answer}"), reason.to_string())
        }
        Payload::MemoryMap { addr, length, .. } => ("memory".into(), format!("{length} bytes at {addr:#x}")),
        Payload::RunBegin => ("run begins".into(), String::new()),
        Payload::RunEnd => ("run ends".into(), String::new()),
    }
}
