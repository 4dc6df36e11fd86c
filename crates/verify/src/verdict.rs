//! The verdict, from the record again: the same fold that judged live, over the same events and objects.
//!
//! The spec that it judges by is the object that the HOST's own PROCESS_SPAWN names, so it is covered by the ledger;
//! `spec.json` is compared with it elsewhere. A record that names no spec that can be read and sealed can't be judged:
//! its verdict is INCOMPLETE, and a run that ended that way disagrees with whatever its report says.
//! Guarantees: reads events and objects, nothing else. `report.json` is compared with the result, never read for it.

use crate::objects::ObjectSource;
use hotcell_decide::{DerivedVerdict, Evidence, Verdict, VerdictFold};
use hotcell_ledger::{ActorId, Digest, Event, GateReport, Lineage, Payload};
use hotcell_policy::{EnvironmentBaseline, RunDraft};

/// The spec stands in the second event; a record without it among its first ones has none.
const SPEC_WITHIN: usize = 4;
/// Longest spec, baseline or fact that is read: a baseline of 100 000 files has some 20 MiB.
const MAX_JUDGED_LEN: usize = 64 << 20;

/// A verdict and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Derived {
    /// How the run ended.
    pub verdict: Verdict,
    /// Why; at most some dozens.
    pub reasons: Vec<String>,
    /// What broke and what to do about it, one text for each reason. May quote the guest.
    pub explained: Vec<String>,
    /// Whether the record's own verdict, where it has its end, is this one.
    pub agrees_with_record: bool,
    /// Packages that the run asked for and its policy approved for a rebuild of the image, each as `name==version sha256:…`.
    pub pending_rebuild: Vec<String>,
}

impl Default for Derived {
    /// Of a record that is not there.
    fn default() -> Derived {
        Derived {
            verdict: Verdict::Incomplete,
            reasons: Vec::new(),
            explained: Vec::new(),
            agrees_with_record: true,
            pending_rebuild: Vec::new(),
        }
    }
}

/// Folds a record's events into its verdict.
#[derive(Default)]
pub(crate) struct Judging {
    fold: Option<VerdictFold>,
    waiting: Vec<Event>,
    unjudged: Option<String>,
    /// For records that can't be judged.
    lineage: Lineage,
    gate1: GateReport,
}

impl Judging {
    /// Takes the next event.
    pub(crate) fn event(&mut self, event: &Event, objects: &dyn ObjectSource) {
        for violation in self.lineage.observe(event) {
            self.gate1.add(violation);
        }
        if self.unjudged.is_some() {
            return;
        }
        if let Some(fold) = &mut self.fold {
            let object =
                Evidence::object_of(event).and_then(|name| objects.object(&name, MAX_JUDGED_LEN).ok());
            let _ = fold.event(event, object.as_deref());
            return;
        }
        self.waiting.push(event.clone());
        let spec = match &event.payload {
            Payload::ProcessSpawn { argv, .. } if event.actor == ActorId::HOST => *argv,
            _ if self.waiting.len() < SPEC_WITHIN => return,
            _ => {
                self.unjudged = Some("the record does not begin with its spec".to_owned());
                return;
            }
        };
        match begin(&spec, objects) {
            Ok(fold) => {
                self.fold = Some(fold);
                for event in std::mem::take(&mut self.waiting) {
                    if let Some(fold) = &mut self.fold {
                        let _ = fold.event(&event, None);
                    }
                }
            }
            Err(why) => self.unjudged = Some(why),
        }
    }

    /// The verdict and Gate 1's report.
    pub(crate) fn finish(mut self) -> (Derived, GateReport) {
        if let Some(fold) = self.fold {
            let derived = fold.finish();
            let agrees_with_record = derived.agrees_with_record();
            let DerivedVerdict { verdict, reasons, explained, pending_rebuild, gate1, .. } = derived;
            return (Derived { verdict, reasons, explained, agrees_with_record, pending_rebuild }, gate1);
        }
        self.lineage.finish().for_each(|violation| self.gate1.add(violation));
        let why = self.unjudged.unwrap_or_else(|| "the record ends before its spec".to_owned());
        let derived = Derived { reasons: vec![why], ..Derived::default() };
        (derived, self.gate1)
    }
}

fn begin(spec: &Digest, objects: &dyn ObjectSource) -> Result<VerdictFold, String> {
    let read = |name: &Digest| objects.object(name, MAX_JUDGED_LEN).map_err(|fault| fault.to_string());
    let bytes = read(spec).map_err(|why| format!("no spec to judge by: {why}"))?;
    let draft = RunDraft::from_spec_json(&bytes).map_err(|error| format!("no spec to judge by: {error}"))?;
    let sealed = draft.seal().map_err(|error| format!("a spec that no run could have had: {error}"))?;
    if sealed.to_json() != bytes {
        return Err("a spec that is not in its one spelling".to_owned());
    }
    let baseline = sealed.baseline().map(|name| {
        let bytes = read(&name).map_err(|why| format!("no baseline to judge by: {why}"))?;
        EnvironmentBaseline::from_bytes(&bytes).map_err(|error| format!("no baseline to judge by: {error}"))
    });
    let baseline = baseline.transpose()?;
    VerdictFold::new(&sealed, baseline.as_ref()).map_err(|error| error.to_string())
}
