//! Intervals between decisions, kept as exact sums, so that a profile is the same on every machine.

/// Count, sum and sum of squares of intervals in microseconds.
///
/// An interval is cut to an hour, the longest run: 3.6e9 µs, squared 1.3e19; so 2^64
/// of them still fit into the sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Intervals {
    pub(crate) count: u64,
    pub(crate) sum_us: u128,
    pub(crate) squares: u128,
}

const LONGEST_US: u64 = 3_600_000_000;

impl Intervals {
    pub(crate) fn add_ns(&mut self, interval_ns: u64) {
        let us = u128::from((interval_ns / 1000).min(LONGEST_US));
        self.count = self.count.saturating_add(1);
        self.sum_us = self.sum_us.saturating_add(us);
        self.squares = self.squares.saturating_add(us * us);
    }

    pub(crate) fn add_all(&mut self, other: &Intervals) {
        self.count = self.count.saturating_add(other.count);
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
        self.squares = self.squares.saturating_add(other.squares);
    }

    /// The mean in microseconds; none without intervals.
    pub(crate) fn mean_us(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum_us as f64 / self.count as f64)
    }

    /// How many standard deviations of the reference lie between its mean and this one.
    /// Infinite where the reference does not vary and the means differ; none where
    /// either side has fewer than two intervals.
    pub(crate) fn z_against(&self, reference: &Intervals) -> Option<f64> {
        if self.count < 2 || reference.count < 2 {
            return None;
        }
        let distance = (self.mean_us()? - reference.mean_us()?).abs();
        // n·Σx² − (Σx)², in whole numbers: exactly zero where nothing varies.
        let n = u128::from(reference.count);
        let spread = n
            .checked_mul(reference.squares)
            .zip(reference.sum_us.checked_mul(reference.sum_us))
            .map(|(a, b)| a.saturating_sub(b) as f64);
        let variance = match spread {
            Some(spread) => spread / (n as f64 * (n - 1) as f64),
            // Too many for whole numbers: the same in floating point.
            None => {
                let n = n as f64;
                let mean = reference.sum_us as f64 / n;
                ((reference.squares as f64 / n - mean * mean) * n / (n - 1.0)).max(0.0)
            }
        };
        if distance == 0.0 {
            Some(0.0)
        } else if variance == 0.0 {
            Some(f64::INFINITY)
        } else {
            Some(distance / variance.sqrt())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(intervals_ms: &[u64]) -> Intervals {
        let mut all = Intervals::default();
        intervals_ms.iter().for_each(|ms| all.add_ns(ms * 1_000_000));
        all
    }

    #[test]
    fn z_is_the_textbook_s() {
        // mean 100, sample standard deviation 10
        let reference = of(&[90, 100, 110]);
        assert_eq!(of(&[100, 100]).z_against(&reference), Some(0.0));
        assert!((of(&[140, 140]).z_against(&reference).unwrap() - 4.0).abs() < 1e-9);
        assert!((of(&[60, 60]).z_against(&reference).unwrap() - 4.0).abs() < 1e-9);
    }

    #[test]
    fn no_variance_means_infinity() {
        let reference = of(&[100, 100, 100]);
        assert_eq!(of(&[100, 100]).z_against(&reference), Some(0.0));
        assert_eq!(of(&[100, 101]).z_against(&reference), Some(f64::INFINITY));
    }

    #[test]
    fn fewer_than_two_intervals_mean_no_verdict() {
        let reference = of(&[90, 100, 110]);
        assert_eq!(of(&[5000]).z_against(&reference), None);
        assert_eq!(of(&[]).z_against(&reference), None);
        assert_eq!(of(&[5000, 5000]).z_against(&of(&[1])), None);
    }

    #[test]
    fn absurd_intervals_do_not_overflow() {
        let mut all = Intervals::default();
        for _ in 0..100 {
            all.add_ns(u64::MAX);
        }
        let huge = Intervals { count: u64::MAX, sum_us: u128::MAX, squares: u128::MAX };
        assert!(all.z_against(&huge).is_some() && huge.z_against(&all).is_some());
    }
}
