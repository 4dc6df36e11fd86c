//! What a live run shows to whoever looks on: a copy of what was recorded, and the processes of the last look.
//!
//! ```text
//! recorder, observing thread ──▶ Shown ──try_send──▶ bounded queue ──▶ Glimpses ──▶ a screen
//! ```
//! What it guarantees: showing never waits. What an onlooker does not take is dropped and counted; neither the record
//! nor the judge reads anything of this. A glimpse of a fact comes after its recording.
//! What it does not: it is not the record. Names and texts are the guest's own: escape them before a terminal gets them.
//! Who may call: whoever started the run with [`Runtime::start_watched`](crate::Runtime::start_watched).

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};
use hotcell_decide::{CapabilityRequest, Decision, ExecHow, HostFact, SeenProcess};
use hotcell_ledger::{Capability, FileOp};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Glimpses that wait for an onlooker; one that draws ten times a second needs a tenth.
const WAITING: usize = 1024;

/// Something that an onlooker may show.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Glimpse {
    /// The machine came to this point.
    Step(String),
    /// A command was started.
    Begun {
        /// Its number.
        exec: u32,
        /// Program and arguments.
        argv: Vec<String>,
    },
    /// All processes of the workload that the last look at the machine's memory saw, in place of those before.
    Processes(Vec<SeenProcess>),
    /// The host saw on the disk that a file changed.
    File {
        /// How.
        op: FileOp,
        /// Its path.
        path: String,
    },
    /// The host saw changes that are not listed one by one.
    FilesCounted(u64),
    /// The host decided what the workload asked for.
    Decision {
        /// What it asked for.
        capability: Capability,
        /// Of what.
        resource: String,
        /// `allow`, `deny` or `defer`.
        answer: &'static str,
        /// The rule that decided.
        rule: &'static str,
    },
    /// A rule broke, a wall fell, or a part of the host failed.
    Broken {
        /// The reason's name.
        reason: String,
        /// What was seen.
        detail: String,
    },
    /// The machine was stopped for these reasons.
    Killed(Vec<String>),
    /// The verdict.
    Over {
        /// Its name.
        verdict: &'static str,
        /// Its reasons.
        reasons: Vec<String>,
    },
}

/// The onlooker's end.
#[derive(Debug)]
pub struct Glimpses {
    queue: Receiver<Glimpse>,
    missed: Arc<AtomicU64>,
}

/// Why there is no glimpse now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoGlimpse {
    /// Nothing happened for so long.
    Quiet,
    /// The run is over.
    Over,
}

impl Glimpses {
    /// The next one, within this time.
    ///
    /// # Errors
    /// There is none.
    pub fn next(&self, within: Duration) -> Result<Glimpse, NoGlimpse> {
        self.queue.recv_timeout(within).map_err(|error| match error {
            RecvTimeoutError::Timeout => NoGlimpse::Quiet,
            RecvTimeoutError::Disconnected => NoGlimpse::Over,
        })
    }

    /// How many were dropped because nobody took those before.
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }
}

/// The run's end: every thread that sees something has a clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shown(Option<(Sender<Glimpse>, Arc<AtomicU64>)>);

impl Shown {
    /// Both ends.
    pub(crate) fn pair() -> (Shown, Glimpses) {
        let (sender, queue) = bounded(WAITING);
        let missed = Arc::new(AtomicU64::new(0));
        (Shown(Some((sender, Arc::clone(&missed)))), Glimpses { queue, missed })
    }

    /// Whether anybody looks on.
    pub(crate) fn is_watched(&self) -> bool {
        self.0.is_some()
    }

    pub(crate) fn show(&self, glimpse: impl FnOnce() -> Glimpse) {
        let Some((queue, missed)) = &self.0 else { return };
        if let Err(TrySendError::Full(_)) = queue.try_send(glimpse()) {
            missed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A fact that was recorded.
    pub(crate) fn fact(&self, fact: &HostFact) {
        if self.is_watched()
            && let Some(glimpse) = of_fact(fact)
        {
            self.show(|| glimpse);
        }
    }

    /// A decision that was recorded.
    pub(crate) fn decision(&self, decision: Decision, request: &CapabilityRequest) {
        self.show(|| Glimpse::Decision {
            capability: request.capability(),
            resource: request.resource().to_owned(),
            answer: match decision {
                Decision::Allow(_) => "allow",
                Decision::Deny(_) => "deny",
                Decision::Defer(_) => "defer",
            },
            rule: decision.rule().name(),
        });
    }
}

/// What a fact is to an onlooker; `None`: nothing that he looks for.
fn of_fact(fact: &HostFact) -> Option<Glimpse> {
    let step = |text: String| Some(Glimpse::Step(text));
    let broken = |reason: &str, detail: String| Some(Glimpse::Broken { reason: reason.to_owned(), detail });
    match fact {
        HostFact::Isolation { backend, accel, jail, .. } => {
            step(format!("{backend} under {accel}, jail: {jail}"))
        }
        HostFact::Ready { boot_ms, .. } => step(format!("ready after {boot_ms} ms")),
        HostFact::Timeout { .. } => step("the time limit came".into()),
        HostFact::Interrupted { signal } => step(format!("stopped by signal {signal}")),
        HostFact::ExecEnded { exec, how, code, signal } => {
            step(format!("exec {exec} {}", exec_words(*how, *code, *signal)))
        }
        HostFact::Failed { stage, error } => step(format!("failed at {stage}: {error}")),
        HostFact::VmExited { expected: true, .. } => step("the host ended the machine".into()),
        HostFact::VmExited { expected: false, status } => {
            step(format!("the machine ended by itself: {status}"))
        }
        HostFact::Teardown { verified, .. } => {
            step(format!("machine {}", if *verified { "gone" } else { "NOT KNOWN TO BE GONE" }))
        }
        HostFact::MutationsCounted { changes, .. } => Some(Glimpse::FilesCounted(changes.values().sum())),
        HostFact::Violation { kind, subject, detail } => {
            let name = serde_json::to_value(kind).ok()?;
            broken(name.as_str()?, format!("{subject}: {detail}"))
        }
        HostFact::Fault { stage, error } => broken("fault", format!("{stage}: {error}")),
        HostFact::ContainmentFailure { what } => broken("containment_failure", what.clone()),
        HostFact::Kill { reasons, .. } => Some(Glimpse::Killed(reasons.clone())),
        HostFact::Verdict { verdict, reasons, .. } => {
            Some(Glimpse::Over { verdict: verdict.as_str(), reasons: reasons.clone() })
        }
        _ => None,
    }
}

fn exec_words(how: ExecHow, code: Option<i32>, signal: Option<i32>) -> String {
    match (how, code, signal) {
        (ExecHow::Exited, Some(code), _) => format!("ended with code {code}"),
        (ExecHow::Signalled, _, Some(signal)) => format!("was ended by signal {signal}"),
        (ExecHow::Exited | ExecHow::Signalled, ..) => "ended".into(),
        (ExecHow::TimedOut, ..) => "was ended by the time limit".into(),
        (ExecHow::Oom, ..) => "ran out of memory".into(),
        (ExecHow::FailedToStart, ..) => "did not start".into(),
        (ExecHow::Unknown, ..) => "was ended with its machine".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ordinary_end_of_a_machine_does_not_look_like_an_accident() {
        let step = |fact: HostFact| match of_fact(&fact) {
            Some(Glimpse::Step(text)) => text,
            other => panic!("{other:?}"),
        };
        let ended = |how, code, signal| step(HostFact::ExecEnded { exec: 1, how, code, signal });
        assert_eq!(ended(ExecHow::Exited, Some(3), None), "exec 1 ended with code 3");
        assert_eq!(ended(ExecHow::Signalled, None, Some(9)), "exec 1 was ended by signal 9");
        assert_eq!(ended(ExecHow::Unknown, None, None), "exec 1 was ended with its machine");
        let told = |expected| step(HostFact::VmExited { expected, status: "signal: 9 (SIGKILL)".into() });
        assert_eq!(told(true), "the host ended the machine");
        assert_eq!(told(false), "the machine ended by itself: signal: 9 (SIGKILL)");
    }

    #[test]
    fn an_onlooker_that_takes_nothing_holds_nobody_up_and_is_told_how_much_is_missing() {
        let (shown, glimpses) = Shown::pair();
        for limit_ms in 0..WAITING as u64 + 10 {
            shown.fact(&HostFact::Timeout { limit_ms });
        }
        assert_eq!(glimpses.missed(), 10);
        drop(shown);
        let mut seen = 0;
        while glimpses.next(Duration::ZERO).is_ok() {
            seen += 1;
        }
        assert_eq!(seen, WAITING);
        assert_eq!(glimpses.next(Duration::ZERO), Err(NoGlimpse::Over));
    }

    #[test]
    fn one_that_went_away_and_none_at_all_cost_nothing() {
        let (shown, glimpses) = Shown::pair();
        drop(glimpses);
        shown.show(|| Glimpse::FilesCounted(1));
        Shown::default().show(|| unreachable!("nobody looks on"));
    }
}
