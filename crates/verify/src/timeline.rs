//! What happened, in order, of a bundle that was found intact: for people who read a report.
//!
//! Guarantees: only events of the chain that was verified (its head is compared again), and objects whose digests fit; at
//! most so many moments as the caller asks for. Called by `hotcell report`.

use crate::verify::VerifiedBundle;
use hotcell_ledger::bundle::{BundleDir, LEDGER};
use hotcell_ledger::{ClosedLedger, Digest, Event, Payload};
use std::io;

/// Longest fact that is shown: the longest there is.
const MAX_FACT_LEN: usize = 64 << 10;

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

impl VerifiedBundle {
    /// The first `most` moments, and how many more there are.
    pub fn timeline(&self, most: usize) -> io::Result<(Vec<Moment>, u64)> {
        let verification = self.verification();
        let changed = || io::Error::other("the bundle changed after it was verified");
        let ledger = ClosedLedger::open(verification.bundle.join(LEDGER)).map_err(io::Error::other)?;
        if ledger.checkpoint() != verification.checkpoint {
            return Err(changed());
        }
        let dir = BundleDir::open(&verification.bundle)?;
        let mut moments = Vec::new();
        for event in ledger.events().map_err(io::Error::other)?.take(most) {
            moments.push(moment(&event.map_err(|_| changed())?, &dir));
        }
        let shown = u64::try_from(moments.len()).unwrap_or(u64::MAX);
        Ok((moments, ledger.event_count().saturating_sub(shown)))
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
    let object = |name: &Digest| {
        let bytes = dir.read(&BundleDir::object_path(name), MAX_FACT_LEN).ok()?;
        (Digest::of(&bytes) == *name).then(|| String::from_utf8_lossy(&bytes).into_owned())
    };
    match &event.payload {
        Payload::ProcessSpawn { argv, cwd, .. } => {
            ("begins".into(), format!("{} in {cwd}", object(argv).unwrap_or_default()))
        }
        Payload::ProcessExit { code } => ("ends".into(), format!("code {code}")),
        Payload::FileMutation { op, path, .. } => (format!("file {op:?}").to_lowercase(), path.to_string()),
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
