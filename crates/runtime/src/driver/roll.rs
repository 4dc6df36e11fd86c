//! The roll call: now and then the guest's init tells of every process, and then the host reads the list itself.
//!
//! ```text
//! RollCall n ──▶ claims `processes n …`, recorded ──▶ Pong n ──▶ Ask::Roll ──▶ hotcell.process_roll ──▶ due again later
//! ```
//! In this order, so that whoever compares the two knows what was first (`crates/advisory/src/processes.rs`). Nothing is
//! decided by either, and an init that does not answer is not asked again.

use super::{Driver, State};
use std::time::{Duration, Instant};

/// From the first exec to the first roll: a shorter run leaves nobody the time to be hidden for long.
const FIRST: Duration = Duration::from_millis(500);
/// Between two rolls in the beginning; each time it is longer by half.
const NEXT: Duration = Duration::from_secs(2);
/// Between two rolls at most: a run of an hour has some 130.
const LONGEST: Duration = Duration::from_secs(30);

/// When the roll is called.
#[derive(Debug)]
pub(super) struct RollCall {
    number: u32,
    pause: Duration,
    /// `None`: nothing runs yet, or one is under way.
    due: Option<Instant>,
    /// It was called and not answered yet.
    open: bool,
}

impl Default for RollCall {
    fn default() -> RollCall {
        RollCall { number: 0, pause: NEXT, due: None, open: false }
    }
}

impl RollCall {
    /// The workload may run.
    pub(super) fn begin(&mut self, now: Instant) {
        self.due = Some(now + FIRST);
    }

    /// The one before is over.
    pub(super) fn again(&mut self, now: Instant) {
        self.due = Some(now + self.pause);
        self.pause = (self.pause + self.pause / 2).min(LONGEST);
    }

    /// The number to call, where it is time.
    fn call(&mut self, now: Instant) -> Option<u32> {
        self.due.take_if(|due| *due <= now)?;
        self.number += 1;
        self.open = true;
        Some(self.number)
    }

    /// Whether this answers the call: each call is answered once, whatever the guest says how often.
    fn answered(&mut self, number: u32) -> bool {
        number == self.number && std::mem::take(&mut self.open)
    }
}

impl Driver<'_> {
    /// Calls the roll where it is time.
    pub(super) fn call_roll(&mut self, now: Instant) {
        if self.state != State::Running || self.watch.is_none() || self.execs.is_empty() {
            return;
        }
        if let Some(number) = self.roll.call(now) {
            self.send(crate::channel::ToGuest::RollCall(number));
        }
    }

    /// The init has told what it tells.
    pub(super) fn rolled(&mut self, number: u32) {
        if self.roll.answered(number)
            && let Some(watch) = &self.watch
        {
            watch.roll(u64::from(number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_roll_is_called_when_it_is_due_and_ever_less_often() {
        let mut roll = RollCall::default();
        let mut now = Instant::now();
        assert_eq!(roll.call(now + LONGEST), None, "nothing runs");
        roll.begin(now);
        assert_eq!(roll.call(now), None);
        let begun = now;
        let mut called = 0;
        while now < begun + Duration::from_secs(3600) {
            now += Duration::from_millis(100);
            if let Some(number) = roll.call(now) {
                called += 1;
                assert_eq!(number, called);
                assert_eq!(roll.call(now + LONGEST), None, "one is under way");
                roll.again(now);
            }
        }
        assert!((100..150).contains(&called), "{called}");
    }

    #[test]
    fn a_call_is_answered_once_and_nothing_else_is() {
        let mut roll = RollCall::default();
        let now = Instant::now();
        assert!(!roll.answered(0), "nothing was called yet");
        roll.begin(now);
        assert!(!roll.answered(0) && !roll.answered(1), "nothing was called yet");
        let number = roll.call(now + LONGEST).unwrap();
        assert!(
            !roll.answered(number + 1) && roll.answered(number),
            "an early answer takes nothing from the right one"
        );
        assert!(!roll.answered(number), "twice");
        roll.again(now);
        assert!(!roll.answered(number), "late");
        let next = roll.call(now + LONGEST * 2).unwrap();
        assert!(!roll.answered(number) && roll.answered(next));
    }
}
