//! One epoll instance; every source is edge-triggered and named by a token.
//!
//! Edge-triggered, because a stream without credit must not wake the loop
//! again and again: an owner keeps a ready flag, set by an event and cleared
//! by `EAGAIN`, and nothing is re-armed.

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Who has something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The host's channel.
    Channel,
    /// The process that reaps; it is not supposed to end.
    Reaper,
    /// The process that is asked about executions; it is not supposed to end.
    GateDeath,
    /// The gate has something to tell.
    Gate,
    /// The request socket's listener.
    Listener,
    /// A client of the request socket.
    Client(u32),
    /// The cgroup of all execs became empty, or not.
    Workload,
    /// An exec's pipe that tells whether it started.
    Status(u32),
    /// An exec's first process died.
    Death(u32),
    /// An exec's stdin takes bytes.
    Stdin(u32),
    /// An exec's stdout has bytes.
    Stdout(u32),
    /// An exec's stderr has bytes.
    Stderr(u32),
    /// An exec's cgroup became empty, or not.
    Cgroup(u32),
}

impl Source {
    fn token(self) -> u64 {
        let (kind, id) = match self {
            Source::Channel => (0u64, 0),
            Source::Reaper => (1, 0),
            Source::Listener => (2, 0),
            Source::Client(id) => (3, id),
            Source::Workload => (4, 0),
            Source::Status(id) => (5, id),
            Source::Death(id) => (6, id),
            Source::Stdin(id) => (7, id),
            Source::Stdout(id) => (8, id),
            Source::Stderr(id) => (9, id),
            Source::Cgroup(id) => (10, id),
            Source::GateDeath => (11, 0),
            Source::Gate => (12, 0),
        };
        kind << 32 | u64::from(id)
    }

    fn from_token(token: u64) -> Option<Source> {
        let id = token as u32;
        Some(match token >> 32 {
            0 => Source::Channel,
            1 => Source::Reaper,
            2 => Source::Listener,
            3 => Source::Client(id),
            4 => Source::Workload,
            5 => Source::Status(id),
            6 => Source::Death(id),
            7 => Source::Stdin(id),
            8 => Source::Stdout(id),
            9 => Source::Stderr(id),
            10 => Source::Cgroup(id),
            11 => Source::GateDeath,
            12 => Source::Gate,
            _ => return None,
        })
    }

    fn interest(self) -> EventFlags {
        EventFlags::ET
            | match self {
                Source::Channel => EventFlags::IN | EventFlags::OUT,
                Source::Stdin(_) => EventFlags::OUT,
                Source::Workload | Source::Cgroup(_) => EventFlags::PRI,
                _ => EventFlags::IN,
            }
    }
}

/// The instance.
pub(crate) struct Poll {
    epoll: OwnedFd,
    events: Vec<Event>,
}

/// Events taken at once.
const BATCH: usize = 64;

impl Poll {
    pub(crate) fn new() -> Result<Poll, Errno> {
        Ok(Poll { epoll: epoll::create(CreateFlags::CLOEXEC)?, events: Vec::with_capacity(BATCH) })
    }

    /// Watches `fd` until it is closed.
    pub(crate) fn watch(&self, fd: impl AsFd, source: Source) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(source.token()), source.interest())
    }

    /// Waits; `None`: for ever. Gives the sources that have something.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> Result<Vec<Source>, Errno> {
        self.events.clear();
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        Ok(self.events.iter().filter_map(|event| Source::from_token(event.data.u64())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_name_their_source() {
        for source in [
            Source::Channel,
            Source::Reaper,
            Source::Listener,
            Source::Client(7),
            Source::Workload,
            Source::Status(u32::MAX),
            Source::Death(1),
            Source::Stdin(2),
            Source::Stdout(3),
            Source::Stderr(4),
            Source::Cgroup(5),
            Source::GateDeath,
            Source::Gate,
        ] {
            assert_eq!(Source::from_token(source.token()), Some(source));
        }
        assert_eq!(Source::from_token(u64::MAX), None);
    }
}
