//! What a run comes to, for programs (`report.json`, `--json`) and for people.
//!
//! Everything here can be recomputed from the record, or is a measurement of
//! time that proves nothing. A verifier does not trust it.

use hotcell_decide::{DerivedVerdict, Reason, Verdict};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Where time went, milliseconds.
pub(crate) type Timings = BTreeMap<&'static str, f64>;

/// Milliseconds to the microsecond.
pub(crate) fn milliseconds(took: Duration) -> f64 {
    took.as_micros() as f64 / 1e3
}

/// What a run comes to.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// The run.
    pub run_id: String,
    /// ALLOWED, KILLED or FAILED.
    pub verdict: Verdict,
    /// Why it was stopped.
    pub kill: Kill,
    /// For people: what broke and what to do about it, one text for each reason of the verdict. May quote the guest.
    pub explained: Vec<String>,
    /// Whether the record is well formed.
    pub gate1: Gate1,
    /// The first exec's exit code, 128+n for a signal; none where it did not end.
    pub exit_code: Option<i32>,
    /// Whether the run took as long as it may.
    pub timed_out: bool,
    /// The signal by which the operator stopped it.
    pub interrupted: Option<i32>,
    /// Why Hotcell could not do it, or what failed in a way that nobody foresaw.
    pub error: Option<String>,
    /// The record; none where nothing was recorded.
    pub bundle: Option<PathBuf>,
    /// Where the time went, milliseconds: three decimals.
    pub timings_ms: BTreeMap<&'static str, f64>,
    /// How the machine was isolated, as measured.
    pub isolation: Isolation,
    /// Whether the machine is gone.
    pub teardown: Teardown,
    /// Opinions, formed after the verdict.
    pub advisory: Vec<Opinion>,
    /// Packages that an image rebuild may add.
    pub pending_rebuild: Vec<String>,
}

/// Why a run was stopped.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Kill {
    /// Names of the rules.
    pub reasons: Vec<String>,
    /// Whether one occurrence was enough.
    pub absolute: bool,
}

/// Whether the record is well formed.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Gate1 {
    /// No violation.
    pub ok: bool,
    /// Each violation, in words.
    pub violations: Vec<String>,
}

/// How the machine was isolated.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Isolation {
    /// Which backend.
    pub backend: String,
    /// Which acceleration.
    pub accel: String,
    /// How the VMM is confined.
    pub jail: String,
}

/// Whether the machine is gone.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Teardown {
    /// Everything was checked to be gone, or nothing was ever started.
    pub verified: bool,
    /// How long it took.
    pub ms: u64,
}

/// An opinion on a closed run. It never changes a verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Opinion {
    /// `L5`, `L6`.
    pub layer: String,
    /// What kind of oddity.
    pub kind: String,
    /// About what.
    pub subject: String,
    /// In words.
    pub detail: String,
}

impl RunReport {
    /// A report of a run that was refused before anything existed.
    pub fn refused(run_id: &str, error: &str) -> RunReport {
        RunReport::unrecorded(run_id, Verdict::Failed, error.to_owned())
    }

    /// A report of a run that nothing was recorded of and no machine was started for.
    pub(crate) fn unrecorded(run_id: &str, verdict: Verdict, error: String) -> RunReport {
        let reasons = if verdict == Verdict::Killed {
            vec![Reason::EvaluatorFailure.name().into()]
        } else {
            Vec::new()
        };
        RunReport {
            run_id: run_id.to_owned(),
            verdict,
            kill: Kill { absolute: !reasons.is_empty(), reasons },
            explained: Vec::new(),
            gate1: Gate1::default(),
            exit_code: None,
            timed_out: false,
            interrupted: None,
            error: Some(error),
            bundle: None,
            timings_ms: BTreeMap::new(),
            isolation: Isolation::default(),
            teardown: Teardown { verified: true, ms: 0 },
            advisory: Vec::new(),
            pending_rebuild: Vec::new(),
        }
    }

    /// A report of a run whose driver is lost: what became of it is not known.
    pub(crate) fn unknown(run_id: &str, error: String) -> RunReport {
        let teardown = Teardown { verified: false, ms: 0 };
        RunReport { teardown, ..RunReport::unrecorded(run_id, Verdict::Killed, error) }
    }

    /// Takes over what the record comes to.
    pub(crate) fn conclude(&mut self, derived: &DerivedVerdict) {
        self.verdict = derived.verdict;
        self.kill = Kill {
            reasons: derived.trip.as_ref().map(|trip| trip.reason_names()).unwrap_or_default(),
            absolute: derived.trip.as_ref().is_some_and(|trip| trip.is_absolute()),
        };
        self.explained.clone_from(&derived.explained);
        let violations: Vec<String> = derived.gate1.violations.iter().map(ToString::to_string).collect();
        self.gate1 = Gate1 { ok: violations.is_empty(), violations };
        self.exit_code = derived.exit.and_then(|exit| exit.code.or(exit.signal.map(|signal| 128 + signal)));
        self.timed_out = derived.timed_out;
        self.interrupted = derived.interrupted;
        self.pending_rebuild.clone_from(&derived.pending_rebuild);
    }
}
