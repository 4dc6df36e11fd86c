//! The clock that stamps the record, as a parameter.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Gives nanoseconds since 1970 that never go back.
pub trait Clock: Send + Sync {
    /// Now.
    fn now_ns(&self) -> u64;
}

/// The host's clock: the wall clock when it was made, and the monotonic clock
/// from then on, so that a clock that is set back can't reorder a record.
#[derive(Clone, Copy, Debug)]
pub struct HostClock {
    begun_ns: u64,
    begun: Instant,
}

impl HostClock {
    /// Starts from the wall clock.
    pub fn new() -> HostClock {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        HostClock { begun_ns: since.as_nanos() as u64, begun: Instant::now() }
    }
}

impl Default for HostClock {
    fn default() -> HostClock {
        HostClock::new()
    }
}

impl Clock for HostClock {
    fn now_ns(&self) -> u64 {
        self.begun_ns + self.begun.elapsed().as_nanos() as u64
    }
}
