//! The verdict, from the record again.
//!
//! [`VerdictFold`] is the seam: whatever judged live folds over the same events here. [`RecordFold`] is the part that needs
//! no judge: Gate 1, and what the host wrote about the run's end.
//! Guarantees: reads events and objects, nothing else. `report.json` is compared with the result, never read for it.

use crate::objects::ObjectSource;
use core::fmt;
use hotcell_ledger::{Event, GateReport, Payload};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing that it did was forbidden.
    Allowed,
    /// A rule broke, or the record did.
    Killed,
    /// Hotcell itself could not do it.
    Failed,
    /// The record has no end.
    Incomplete,
}

impl Verdict {
    /// As reports spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Verdict::Allowed => "ALLOWED",
            Verdict::Killed => "KILLED",
            Verdict::Failed => "FAILED",
            Verdict::Incomplete => "INCOMPLETE",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A verdict and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Derived {
    /// How the run ended.
    pub verdict: Verdict,
    /// Why; at most some dozens.
    pub reasons: Vec<String>,
}

/// What is known once the last event was folded.
#[derive(Debug)]
pub struct Closing<'a> {
    /// Gate 1 over all events.
    pub gate1: &'a GateReport,
    /// Whether the last event is RUN_END.
    pub ended: bool,
}

/// Folds a record's events into its verdict.
pub trait VerdictFold {
    /// Takes the next event.
    fn event(&mut self, event: &Event, objects: &dyn ObjectSource);
    /// Gives the verdict.
    fn finish(self: Box<Self>, closing: &Closing<'_>) -> Derived;
}

/// The rules of docs/record.md, section "The verdict", that need no judge.
#[derive(Debug, Default)]
pub struct RecordFold {
    killed_by: Option<String>,
    failed: bool,
}

impl VerdictFold for RecordFold {
    fn event(&mut self, event: &Event, _: &dyn ObjectSource) {
        if let Payload::ToolCall { tool, .. } = &event.payload
            && event.actor.is_host_band()
        {
            match tool.as_str() {
                fact @ ("hotcell.kill" | "hotcell.fault") if self.killed_by.is_none() => {
                    self.killed_by = Some(format!("{fact} at event {}", event.sequence));
                }
                "hotcell.failed" => self.failed = true,
                _ => {}
            }
        }
    }

    fn finish(self: Box<Self>, closing: &Closing<'_>) -> Derived {
        let mut reasons: Vec<String> = closing.gate1.fatal().map(|code| format!("Gate 1: {code}")).collect();
        reasons.extend(self.killed_by);
        let verdict = if !reasons.is_empty() {
            Verdict::Killed
        } else if self.failed {
            reasons.push("hotcell.failed".to_owned());
            Verdict::Failed
        } else if !closing.ended {
            reasons.push("no RUN_END".to_owned());
            Verdict::Incomplete
        } else {
            Verdict::Allowed
        };
        Derived { verdict, reasons }
    }
}
