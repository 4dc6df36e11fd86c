//! The rate of the time-stamp counter.
//!
//! Under TCG the guest's counter is the host's, and a microvm has no other
//! reference to calibrate it by: with a PIT the guest kernel's calibration fails
//! on a busy host and the boot hangs. So the host measures the rate and the
//! guest is told it (`tsc_early_khz=`).

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// One measurement's length: 10 ms against a clock read of some 50 ns gives parts in a hundred thousand.
const MEASURE: Duration = Duration::from_millis(10);
/// Measurements; the median is taken, since a pause between two reads falsifies one.
const MEASUREMENTS: usize = 3;

/// The counter's rate in kHz, measured once per process; `None` where the processor has none.
pub fn tsc_khz() -> Option<u32> {
    static RATE: OnceLock<Option<u32>> = OnceLock::new();
    *RATE.get_or_init(measure)
}

#[cfg(target_arch = "x86_64")]
fn measure() -> Option<u32> {
    let mut rates: Vec<u64> = (0..MEASUREMENTS)
        .map(|_| {
            let (start, first) = (Instant::now(), counter());
            while start.elapsed() < MEASURE {
                std::hint::spin_loop();
            }
            let ticks = counter().wrapping_sub(first);
            ticks.saturating_mul(1_000_000) / (start.elapsed().as_nanos() as u64).max(1)
        })
        .collect();
    rates.sort_unstable();
    rates.get(MEASUREMENTS / 2).and_then(|&rate| u32::try_from(rate).ok()).filter(|&rate| rate > 0)
}

#[cfg(target_arch = "x86_64")]
fn counter() -> u64 {
    // SAFETY: RDTSC is part of every x86-64 processor and reads no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn measure() -> Option<u32> {
    None
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_rate_is_that_of_a_real_processor() {
        let khz = super::tsc_khz().unwrap();
        assert!((100_000..20_000_000).contains(&khz), "{khz} kHz");
    }
}
