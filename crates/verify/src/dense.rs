//! Numbers that should come as 0, 1, 2, …: which are missing, repeated or moved when they do not.
//!
//! ```text
//! 0 1 3 4      2 is missing: removed          0 1 1 2    1 is there again: duplicated
//! 0 2 1 3      1 came after 2: reordered
//! ```
//! Memory is bounded: gaps past [`MAX_GAPS`] are counted as removed and their late arrivals as duplicated.
//! Called by [`crate::chain`], for sequences and for heights.

/// Gaps that are remembered.
const MAX_GAPS: usize = 256;

/// Where a number stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The next one.
    Next,
    /// Later than the next one.
    Ahead,
    /// It was missing until now.
    Late,
    /// It was there.
    Again,
}

/// What has been seen.
#[derive(Debug, Default)]
pub(crate) struct Dense {
    next: u64,
    gaps: Vec<(u64, u64)>,
}

impl Dense {
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Where `number` stands, without taking it.
    pub(crate) fn place(&self, number: u64) -> Place {
        if number == self.next {
            Place::Next
        } else if number > self.next {
            Place::Ahead
        } else if self.gaps.iter().any(|(start, end)| (*start..*end).contains(&number)) {
            Place::Late
        } else {
            Place::Again
        }
    }

    /// Takes the number.
    pub(crate) fn take(&mut self, number: u64) -> Place {
        let place = self.place(number);
        match place {
            Place::Next => self.next = number.saturating_add(1),
            Place::Ahead => {
                if self.gaps.len() < MAX_GAPS {
                    self.gaps.push((self.next, number));
                }
                self.next = number.saturating_add(1);
            }
            Place::Late => self.fill(number),
            Place::Again => {}
        }
        place
    }

    /// Goes on behind `number`, whatever is missing: something else explains it.
    pub(crate) fn rebase(&mut self, number: u64) {
        self.next = self.next.max(number.saturating_add(1));
    }

    fn fill(&mut self, number: u64) {
        let Some(index) = self.gaps.iter().position(|(start, end)| (*start..*end).contains(&number)) else {
            return;
        };
        let (start, end) = self.gaps.swap_remove(index);
        let parts = [(start, number), (number.saturating_add(1), end)];
        self.gaps.extend(parts.into_iter().filter(|(start, end)| start < end));
    }

    /// What never came, as half-open ranges.
    pub(crate) fn missing(&self) -> Vec<(u64, u64)> {
        let mut gaps = self.gaps.clone();
        gaps.sort_unstable();
        gaps
    }
}

/// `5`, or `5 to 7`, of the half-open range.
pub(crate) fn range_text((start, end): (u64, u64)) -> String {
    match end.saturating_sub(1) {
        last if last <= start => start.to_string(),
        last => format!("{start} to {last}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(numbers: &[u64]) -> (Vec<Place>, Vec<(u64, u64)>) {
        let mut dense = Dense::default();
        (numbers.iter().map(|n| dense.take(*n)).collect(), dense.missing())
    }

    #[test]
    fn tells_them_apart() {
        use Place::*;
        assert_eq!(run(&[0, 1, 3, 4]), (vec![Next, Next, Ahead, Next], vec![(2, 3)]));
        assert_eq!(run(&[0, 1, 1, 2]), (vec![Next, Next, Again, Next], vec![]));
        assert_eq!(run(&[0, 2, 1, 3]), (vec![Next, Ahead, Late, Next], vec![]));
        assert_eq!(run(&[5, 2]), (vec![Ahead, Late], vec![(0, 2), (3, 5)]));
        assert_eq!(run(&[u64::MAX, 0]).1, [(1, u64::MAX)]);
        assert_eq!(range_text((2, 3)), "2");
        assert_eq!(range_text((2, 5)), "2 to 4");
    }
}
