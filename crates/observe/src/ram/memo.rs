//! A walk that is not walked again while every byte that it read is the same.
//!
//! What a walk gives is a function of what it read, page tables included. So its result stands
//! for as long as a second reading of the same bytes, with few calls of the host's kernel, finds
//! them as they were.

use super::memory::ReadError;
use super::retry;
use super::space::{Space, merge};
use super::tasks::SweepError;
use hotcell_sys::host::Range;

/// The result of a walk, and all that it rests on.
#[derive(Debug)]
pub(super) struct Memo<T> {
    value: Option<T>,
    /// Whether what was read is known, so that the result may stand.
    stands: bool,
    /// What is read again, and where in it each of the bytes that count begins.
    ranges: Vec<Range>,
    places: Vec<(usize, usize)>,
    /// Those bytes, one place after another.
    held: Vec<u8>,
    now: Vec<u8>,
}

impl<T> Default for Memo<T> {
    fn default() -> Memo<T> {
        Memo {
            value: None,
            stands: false,
            ranges: Vec::new(),
            places: Vec::new(),
            held: Vec::new(),
            now: Vec::new(),
        }
    }
}

impl<T> Memo<T> {
    /// The result as of now; a list that changes while it is walked is walked again.
    ///
    /// # Errors
    /// Those of the walk, or the host can't read.
    pub(super) fn get(
        &mut self,
        space: &Space<'_>,
        walk: impl Fn(&Space<'_>) -> Result<T, SweepError>,
    ) -> Result<&T, SweepError> {
        let known = self.value.take();
        let stands = std::mem::take(&mut self.stands) && self.is_unchanged(space)?;
        let value = match known.filter(|_| stands) {
            Some(value) => {
                self.stands = true;
                value
            }
            None => retry(|| self.walked(space, &walk))?,
        };
        Ok(self.value.insert(value))
    }

    fn walked(
        &mut self,
        space: &Space<'_>,
        walk: impl Fn(&Space<'_>) -> Result<T, SweepError>,
    ) -> Result<T, SweepError> {
        let logging = space.logging();
        let value = walk(&logging)?;
        let log = logging.into_log();
        if !log.moved {
            let ranges: Vec<Range> =
                log.reads.keys().map(|&(address, bytes)| Range { address, bytes }).collect();
            let starts = merge(&ranges, &mut self.ranges);
            self.places = starts.into_iter().zip(ranges.iter().map(|range| range.bytes)).collect();
            self.held = log.reads.into_values().flatten().collect();
            self.stands = true;
        }
        Ok(value)
    }

    fn is_unchanged(&mut self, space: &Space<'_>) -> Result<bool, ReadError> {
        self.now.resize(self.ranges.iter().map(|range| range.bytes).sum(), 0);
        space.fetch(&self.ranges, &mut self.now)?;
        let mut held = self.held.as_slice();
        for &(start, bytes) in &self.places {
            let (before, rest) = held.split_at_checked(bytes).unwrap_or_default();
            held = rest;
            if !self.now.get(start..).is_some_and(|now| now.starts_with(before)) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
