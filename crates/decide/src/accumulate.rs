//! Two measures over one stream of good and bad samples: a burst and an average.
//!
//! The **burst** counts bad samples whose timestamps lie within the window, its
//! end included. It sees quantity: many denials, however diluted by allows.
//!
//! The **average** is exponentially weighted, `a = 0.15·x + 0.85·a`, x being 1 for
//! a bad sample and 0 for a good one, starting from 0. It has no clock, so it sees
//! concentration: patience does not help against it. Two rules keep it from
//! speaking on nothing:
//! - it needs `warm_up` samples. Without that, three denials at the start of a run
//!   would exceed 0.35 and make the burst of five meaningless;
//! - only a bad sample trips it. An allow lowers the average, and must not be the
//!   event that kills.
//!
//! One bad sample in a clean run gives at most 0.15, below every default; the
//! assertion in `judge.rs` holds that. What beats both is a workload that asks
//! slowly *and* is mostly allowed; SECURITY.md says so.

use std::collections::VecDeque;

/// The weight of the newest sample.
pub(crate) const ALPHA: f64 = 0.15;

/// Which measures exceed their threshold with this sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[must_use]
pub(crate) struct Exceeded {
    pub(crate) burst: bool,
    pub(crate) average: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Accumulator {
    burst: usize,
    window_ns: u64,
    threshold: f64,
    warm_up: u64,
    recent: VecDeque<u64>,
    average: f64,
    samples: u64,
}

impl Accumulator {
    pub(crate) fn new(burst: u32, window_s: u32, threshold: f64, warm_up: u64) -> Accumulator {
        Accumulator {
            burst: usize::try_from(burst).unwrap_or(usize::MAX).max(1),
            window_ns: u64::from(window_s) * 1_000_000_000,
            threshold,
            warm_up,
            recent: VecDeque::new(),
            average: 0.0,
            samples: 0,
        }
    }

    pub(crate) fn good(&mut self) {
        self.samples = self.samples.saturating_add(1);
        self.average *= 1.0 - ALPHA;
    }

    pub(crate) fn bad(&mut self, at_ns: u64) -> Exceeded {
        self.samples = self.samples.saturating_add(1);
        self.average = ALPHA + (1.0 - ALPHA) * self.average;
        // Only as many as make a burst are kept, so a flood costs nothing. A clock that
        // fell back makes a sample look recent, which errs on the side of the kill.
        self.recent.push_back(at_ns);
        if self.recent.len() > self.burst {
            self.recent.pop_front();
        }
        let full = self.recent.len() == self.burst;
        let oldest = self.recent.front().copied().unwrap_or(at_ns);
        Exceeded {
            burst: full && at_ns.saturating_sub(oldest) <= self.window_ns,
            average: self.samples >= self.warm_up && self.average >= self.threshold,
        }
    }
}

/// How many bad samples in a row, and no good one, make the average exceed this threshold.
pub(crate) fn run_to_exceed(threshold: f64, warm_up: u64) -> u64 {
    let (mut average, mut samples) = (0.0, 0);
    // Thresholds stay below 0.95, which takes 19.
    while samples < 1000 && (samples < warm_up || average < threshold) {
        average = ALPHA + (1.0 - ALPHA) * average;
        samples += 1;
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn defaults() -> Accumulator {
        Accumulator::new(5, 60, 0.35, 5)
    }

    #[test]
    fn a_burst_ends_with_its_window() {
        let mut quick = Accumulator::new(5, 60, 0.95, 5);
        for i in 0..4 {
            assert!(!quick.bad(i * 15 * S).burst);
        }
        assert!(quick.bad(60 * S).burst, "the fifth at exactly the window's end");
        let mut slow = Accumulator::new(5, 60, 0.95, 5);
        for i in 0..4 {
            assert!(!slow.bad(i * 15 * S).burst);
        }
        assert!(!slow.bad(60 * S + 1).burst, "one nanosecond later");
    }

    #[test]
    fn a_burst_is_seen_however_diluted() {
        let mut all = defaults();
        for i in 0..4 {
            for _ in 0..10 {
                all.good();
            }
            assert_eq!(all.bad(i), Exceeded::default());
        }
        assert_eq!(all.bad(5), Exceeded { burst: true, average: false });
    }

    #[test]
    fn patience_does_not_beat_the_average() {
        let mut patient = defaults();
        for i in 0..4 {
            assert_eq!(patient.bad(i * 3600 * S), Exceeded::default());
        }
        assert_eq!(patient.bad(4 * 3600 * S), Exceeded { burst: false, average: true });
    }

    #[test]
    fn one_bad_sample_in_a_clean_run_is_nothing() {
        for before in [0, 4, 5, 100] {
            let mut clean = defaults();
            for _ in 0..before {
                clean.good();
            }
            assert_eq!(clean.bad(S), Exceeded::default());
        }
    }

    #[test]
    fn a_clock_that_falls_back_errs_towards_the_kill() {
        let mut a = Accumulator::new(2, 60, 0.95, 100);
        assert!(!a.bad(1000 * S).burst);
        assert!(a.bad(0).burst);
    }

    #[test]
    fn the_run_to_exceed_is_exact() {
        for threshold in [0.05, 0.15, 0.30, 0.35, 0.5, 0.95] {
            let needed = run_to_exceed(threshold, 3);
            let mut a = Accumulator::new(1000, 1, threshold, 3);
            for i in 1..needed {
                assert!(!a.bad(i).average, "{threshold} at {i}");
            }
            assert!(a.bad(needed).average, "{threshold}");
        }
        assert_eq!(run_to_exceed(0.35, 5), 5);
        assert_eq!(run_to_exceed(0.35, 0), 3);
        assert_eq!(run_to_exceed(0.95, 5), 19);
    }
}
