//! Guests that break while a command runs in them: each ends by a deadline, with its reason, and leaves nothing.
//!
//! They break from inside, by the accomplice of `observed`: the kernel spins with interrupts off, the init dies, stops,
//! says half a frame or rubbish. What a workload can do to its own guest is in `attacks`; what no guest of this kernel does,
//! in `hotcell-runtime`'s tests with scripted guests.

use crate::observed::{Exit, Module, Seen, Taken, order};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(4);
const QUIESCE: Duration = Duration::from_secs(5);

/// Runs a command that gives this order, with little patience; what came of it, and how long it took.
fn broken(module: Module, name: &str) -> (Seen, Duration) {
    let mut taken = Taken::new(module);
    taken.runtime.patience.quiesce = QUIESCE;
    taken.draft.policy.limits.timeout_s = TIMEOUT.as_secs() as u32;
    let begun = Instant::now();
    let seen = taken.run(&order(name));
    (seen, begun.elapsed())
}

/// The sandbox was destroyed from inside, while the command ran: `Taken::run` has looked that nothing is left and the record
/// verifies.
#[track_caller]
fn assert_destroyed(seen: &Seen, words: &str) {
    assert_eq!(seen.report.verdict.as_str(), "KILLED", "{seen:?}");
    assert_eq!(seen.report.kill.reasons, ["sandbox_destroyed"], "{seen:?}");
    assert_eq!(seen.said, "working\n", "{seen:?}");
    let error = seen.report.error.as_deref().unwrap_or_default();
    assert!(error.contains(words), "{error}\n{seen:?}");
}

/// What is silent is waited for no longer than the timeout and what follows it allow.
#[track_caller]
fn assert_silent(module: Module, name: &str) {
    let (seen, took) = broken(module, name);
    assert_destroyed(&seen, "did not become quiet");
    assert_eq!(seen.code, None, "{seen:?}");
    assert!(seen.report.timed_out, "{seen:?}");
    // Boot, the timeout, and the patience for execs and for quiet.
    let most = crate::harness::SOON * 2 + TIMEOUT + Duration::from_secs(3) + QUIESCE;
    assert!(took < most, "{took:?}");
}

#[test]
fn a_kernel_that_spins_is_ended_by_the_deadlines() {
    assert_silent(Module::Loaded(Exit::Spin), "unload");
}

#[test]
fn an_init_that_stops_reading_and_speaking_is_ended_by_the_deadlines() {
    assert_silent(Module::AtHand, "stop");
}

#[test]
fn half_a_frame_is_waited_for_no_longer_than_silence() {
    assert_silent(Module::AtHand, "half");
}

#[test]
fn rubbish_ends_the_channel_at_once() {
    let (seen, _) = broken(Module::AtHand, "rubbish");
    assert!(!seen.report.timed_out, "{seen:?}");
    assert_destroyed(&seen, "not with the magic");
}

#[test]
fn an_init_that_dies_ends_the_machine_at_once() {
    let (seen, _) = broken(Module::AtHand, "die");
    assert!(!seen.report.timed_out, "{seen:?}");
    assert_eq!(seen.report.verdict.as_str(), "KILLED", "{seen:?}");
    assert!(seen.report.kill.reasons.iter().any(|reason| reason == "sandbox_destroyed"), "{seen:?}");
    assert_eq!(seen.said, "working\n", "{seen:?}");
}
