//! The proof that a machine is gone.

use crate::registry::Registration;
use serde::{Deserialize, Serialize};

/// One thing that had to be gone, and whether it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What was looked for.
    pub what: String,
    /// Whether it is gone.
    pub gone: bool,
    /// How that was seen.
    pub detail: String,
}

impl Check {
    /// Of a machine that was never started.
    pub fn never_started() -> Check {
        Check { what: "VMM process".into(), gone: true, detail: "was never started".into() }
    }
}

/// All that was looked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeardownReport {
    /// The checks, in the order in which they were made.
    pub checks: Vec<Check>,
    /// From the order to stop to the last check, milliseconds.
    pub ms: u64,
}

impl TeardownReport {
    /// Whether all is gone. A report without a check proves nothing.
    pub fn verified(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|check| check.gone)
    }
}

/// A machine was destroyed and all its parts were seen to be gone. Made only by
/// a teardown whose every check passed.
#[derive(Debug)]
#[must_use = "the proof belongs in the record"]
pub struct TeardownProof {
    report: TeardownReport,
}

impl TeardownProof {
    /// What was checked.
    pub fn report(&self) -> &TeardownReport {
        &self.report
    }
}

/// Something is not known to be gone. The registration stays, so that the reaper finds it.
#[derive(Debug)]
#[must_use = "what is left must be recorded"]
pub struct TeardownFailed {
    /// Still on disk; none where the backend lost it.
    pub registration: Option<Box<Registration>>,
    /// What was checked.
    pub report: TeardownReport,
}

impl TeardownFailed {
    /// Of a backend that panicked: nothing is known, so nothing is proven.
    pub fn unknown() -> TeardownFailed {
        let check = Check { what: "everything".into(), gone: false, detail: "the backend panicked".into() };
        TeardownFailed { registration: None, report: TeardownReport { checks: vec![check], ms: 0 } }
    }
}

impl Registration {
    /// Ends a registration by the checks that were made: gone only if there was one and every one passed.
    ///
    /// For backends, at the end of [`LiveVm::destroy`](crate::LiveVm::destroy) or of a start that came to nothing. It
    /// believes the report: what was checked, and how, is the backend's own promise. Whoever never got a registration
    /// can't call it, and it is spent by the call.
    ///
    /// # Errors
    /// Something is not known to be gone; the entry stays for the reaper.
    pub fn conclude(self, mut report: TeardownReport) -> Result<TeardownProof, TeardownFailed> {
        if !report.verified() {
            return Err(TeardownFailed { registration: Some(Box::new(self)), report });
        }
        match self.release() {
            Ok(check) => {
                report.checks.push(check);
                Ok(TeardownProof { report })
            }
            Err(kept) => {
                let (registration, check) = *kept;
                report.checks.push(check);
                Err(TeardownFailed { registration: Some(Box::new(registration)), report })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Registry;
    use std::path::Path;

    fn check(gone: bool) -> Check {
        Check { what: "VMM process".into(), gone, detail: String::new() }
    }

    #[test]
    fn only_checks_that_all_passed_end_a_registration() {
        let home = tempfile::tempdir().unwrap();
        let registry = Registry::open(home.path()).unwrap();
        for (checks, proven) in
            [(vec![], false), (vec![check(true), check(false)], false), (vec![check(true)], true)]
        {
            let registration = registry.register("run-00000001", Path::new("/b")).unwrap();
            let dir = registration.dir().to_owned();
            match registration.conclude(TeardownReport { checks, ms: 1 }) {
                Ok(proof) => {
                    assert!(proven && !dir.exists());
                    assert_eq!(proof.report().checks.len(), 2, "the run folder is a check too");
                }
                Err(failed) => {
                    assert!(!proven && dir.exists(), "the entry stays for the reaper");
                    let _ = failed.registration.map(|registration| registration.abandon());
                }
            }
        }
    }
}
