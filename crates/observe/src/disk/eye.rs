//! The observer of the workspace disk: decides when to read, and reads on a thread of its own.
//!
//! The thread that calls observers must not wait for a disk of a hundred thousand files while guest
//! memory is to be looked at. So a look only asks whether the file was written, one system
//! call, hands the reading to the worker and takes what the worker has seen meanwhile. Before arming
//! and after the machine's end it waits.
//!
//! Cadence: at each look that finds the file written, but no sooner after a reading than
//! [`MIN_INTERVAL`] and [`REST`] times what that reading took; so a reading's cost stays below 2 % of
//! a core however many files there are.

use super::scanner::{Explain, Scanner};
use crate::observer::{Armed, ObserveError, Observer, Sighting, Sightings};
use std::collections::VecDeque;
use std::fs::File;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// From the end of one reading to the next, at least.
pub const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// How many times as long as a reading took nothing is read after it: fifty is 2 % of a core.
pub const REST: u32 = 50;
/// The longest rest: a disk that takes a second to read is read every ten, and costs more than 2 %.
pub const MAX_INTERVAL: Duration = Duration::from_secs(10);

/// Sees what the guest writes to its disk.
pub struct DiskObserver {
    scanner: Option<Scanner>,
    worker: Option<Worker>,
    /// Seen and not told: one look tells only so much.
    waiting: VecDeque<Sighting>,
    next: Instant,
    quiet: bool,
}

struct Worker {
    ask: Sender<Scanner>,
    done: Receiver<(Scanner, Duration, Result<Vec<Sighting>, ObserveError>)>,
    thread: JoinHandle<()>,
}

impl DiskObserver {
    /// Of this file, opened to read. `explain` says what the policy says of a path; it is for the volume alone.
    pub fn new(disk: File, explain: Explain) -> DiskObserver {
        DiskObserver {
            scanner: Some(Scanner::new(disk, explain)),
            worker: None,
            waiting: VecDeque::new(),
            next: Instant::now(),
            quiet: false,
        }
    }

    /// Takes what the worker has done; waits for it where `wait` says so.
    fn take(&mut self, wait: bool) -> Result<(), ObserveError> {
        let Some(worker) = self.worker.as_ref().filter(|_| self.scanner.is_none()) else { return Ok(()) };
        let done = if wait {
            worker.done.recv().map_err(|_| TryRecvError::Disconnected)
        } else {
            worker.done.try_recv()
        };
        match done {
            Ok((scanner, took, seen)) => {
                self.scanner = Some(scanner);
                self.next = Instant::now() + rest(took);
                self.waiting.extend(seen?);
                Ok(())
            }
            Err(TryRecvError::Empty) => Ok(()),
            Err(TryRecvError::Disconnected) => {
                Err(ObserveError::Implausible("the thread that reads the workspace disk ended".into()))
            }
        }
    }

    fn tell(&mut self, seen: &mut Sightings, room: usize) -> Result<(), ObserveError> {
        for _ in 0..room.min(self.waiting.len()) {
            if let Some(sighting) = self.waiting.pop_front() {
                seen.push(sighting)?;
            }
        }
        Ok(())
    }
}

/// After a reading that took so long.
fn rest(took: Duration) -> Duration {
    (took * REST).clamp(MIN_INTERVAL, MAX_INTERVAL)
}

impl Observer for DiskObserver {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn prepare(&mut self) -> Result<(), ObserveError> {
        let (ask, asked) = channel::<Scanner>();
        let (tell, done) = channel();
        let thread = std::thread::Builder::new()
            .name("observe-disk".into())
            .spawn(move || {
                while let Ok(mut scanner) = asked.recv() {
                    let begun = Instant::now();
                    let seen = scanner.read();
                    if tell.send((scanner, begun.elapsed(), seen)).is_err() {
                        return;
                    }
                }
            })
            .map_err(|source| ObserveError::Host { what: "a thread for the workspace disk", source })?;
        self.worker = Some(Worker { ask, done, thread });
        Ok(())
    }

    fn arm(&mut self, seen: &mut Sightings) -> Result<Armed, ObserveError> {
        let scanner = self.scanner.as_mut();
        let scanner = scanner.ok_or_else(|| ObserveError::Unprepared("armed twice".into()))?;
        for sighting in scanner.arm()? {
            seen.push(sighting)?;
        }
        let basis = "the workspace disk, read whenever the guest has written to it, and whole at the end";
        Ok(Armed { armed: true, basis: basis.into() })
    }

    fn look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        self.take(false)?;
        self.tell(seen, crate::observer::MAX_SIGHTINGS)?;
        if Instant::now() < self.next {
            return Ok(());
        }
        if let Some(scanner) = self.scanner.take_if(|scanner| scanner.is_changed().unwrap_or(true))
            && let Some(worker) = &self.worker
            && let Err(lost) = worker.ask.send(scanner)
        {
            self.scanner = Some(lost.0);
            return Err(ObserveError::Implausible("the thread that reads the workspace disk ended".into()));
        }
        Ok(())
    }

    fn last_look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        self.quiet = true;
        self.take(false)?;
        self.tell(seen, crate::observer::MAX_SIGHTINGS)
    }

    fn post_mortem(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        self.take(true)?;
        if let Some(worker) = self.worker.take() {
            drop(worker.ask);
            let _ = worker.thread.join();
        }
        self.tell(seen, usize::MAX)?;
        let Some(scanner) = &mut self.scanner else { return Ok(()) };
        for sighting in scanner.finish(self.quiet)? {
            seen.push(sighting)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_followed_by_a_rest_that_keeps_its_cost_low() {
        assert_eq!(rest(Duration::ZERO), MIN_INTERVAL);
        assert_eq!(rest(Duration::from_millis(1)), MIN_INTERVAL);
        for ms in [3, 20, 199] {
            let took = Duration::from_millis(ms);
            assert!(took.as_secs_f64() / (took + rest(took)).as_secs_f64() <= 0.02, "{took:?}");
        }
        assert_eq!(rest(Duration::from_secs(3)), MAX_INTERVAL);
    }
}
