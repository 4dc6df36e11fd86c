//! The byte channel to the host: frames in, a bounded queue of frames out.
//!
//! What it guarantees: frames go out whole, in order, with their sequence
//! numbers; a host that goes away is noticed once it has spoken.
//! What it does not: bound the queue by itself. Producers look at
//! [`Channel::waiting`] first; `limits` has the two marks.

use crate::limits::{ABSENCE, OUT_DATA_BYTES, OUT_STOP_BYTES, READ_BYTES};
use hotcell_wire::{FrameReader, GuestFrame, STREAM_CHUNK, Stream};
use rustix::io::{Errno, read, write};
use std::os::fd::OwnedFd;
use std::time::Instant;

/// What reading gave.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// Bytes are in the reader.
    Bytes,
    /// Nothing for now.
    Nothing,
    /// The host has closed its end.
    Gone,
}

/// The channel.
#[derive(Debug)]
pub(crate) struct Channel {
    port: OwnedFd,
    /// Frames that came; taken out while they are handled.
    pub(crate) reader: FrameReader,
    out: Vec<u8>,
    /// Bytes of `out` that are gone already.
    sent: usize,
    sequence: u32,
    readable: bool,
    writable: bool,
    /// Whether the host ever sent anything. Before that, a closed end is only
    /// a host that has not come yet (a template has none at all).
    spoken: bool,
    /// Since when its end has looked closed.
    absent: Option<Instant>,
    gone: bool,
    /// For reading into, so that no read begins with clearing a buffer.
    scratch: Vec<u8>,
}

impl Channel {
    /// `port` must be non-blocking.
    pub(crate) fn new(port: OwnedFd) -> Channel {
        Channel {
            port,
            reader: FrameReader::new(),
            out: Vec::with_capacity(OUT_STOP_BYTES),
            sent: 0,
            sequence: 0,
            readable: true,
            writable: true,
            spoken: false,
            absent: None,
            gone: false,
            scratch: vec![0; STREAM_CHUNK],
        }
    }

    /// Whether the host has closed its end after it had spoken.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone
    }

    /// Something changed: try both directions again.
    pub(crate) fn wake(&mut self) {
        self.readable = true;
        self.writable = true;
    }

    /// Bytes that wait for the host.
    pub(crate) fn waiting(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Whether exec output may be added.
    pub(crate) fn takes_data(&self) -> bool {
        self.waiting() < OUT_DATA_BYTES
    }

    /// Whether something may be added that could as well come later or never.
    pub(crate) fn takes_more(&self) -> bool {
        self.waiting() < OUT_STOP_BYTES
    }

    /// Whether a read would be worth trying.
    pub(crate) fn wants_read(&self) -> bool {
        self.readable && self.takes_more()
    }

    /// When a host whose end looks closed counts as gone.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.absent.map(|since| since + ABSENCE)
    }

    /// Looks again at an end that has looked closed for long enough.
    pub(crate) fn expire(&mut self, now: Instant) {
        if self.deadline().is_some_and(|at| at <= now) {
            self.readable = true;
        }
    }

    /// Whether a write would be worth trying.
    pub(crate) fn wants_write(&self) -> bool {
        self.writable && self.waiting() > 0
    }

    /// Queues a frame.
    pub(crate) fn send(&mut self, id: u32, frame: &GuestFrame<'_>) {
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
        }
        // Every producer keeps to the wire's limits, so this holds; a frame
        // that would not fit is left out whole and takes no number.
        if frame.encode(&mut self.out, id, self.sequence) {
            self.sequence = self.sequence.wrapping_add(1);
        }
    }

    /// Reads at most `most` bytes of `pipe` and queues them; gives how many.
    pub(crate) fn relay(
        &mut self,
        id: u32,
        stream: Stream,
        pipe: &OwnedFd,
        most: usize,
    ) -> Result<usize, Errno> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let result = read(pipe, scratch.get_mut(..most.min(STREAM_CHUNK)).unwrap_or_default());
        if let Ok(count @ 1..) = result {
            let bytes = scratch.get(..count).unwrap_or_default();
            match stream {
                Stream::Stdout => self.send(id, &GuestFrame::Stdout(bytes)),
                Stream::Stderr => self.send(id, &GuestFrame::Stderr(bytes)),
            }
        }
        self.scratch = scratch;
        result
    }

    /// Writes what the host takes.
    pub(crate) fn flush(&mut self) -> Result<(), Errno> {
        while self.wants_write() {
            let rest = self.out.get(self.sent..).unwrap_or_default();
            match write(&self.port, rest) {
                Ok(0) | Err(Errno::AGAIN) => self.writable = false,
                Ok(count) => self.sent += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        // Keep the queue from creeping through memory when it never runs empty.
        if self.sent > OUT_DATA_BYTES {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    /// Reads what is there into the reader, up to a bound.
    pub(crate) fn fill(&mut self, now: Instant) -> Result<Input, Errno> {
        let mut taken = 0;
        while taken < READ_BYTES {
            match read(&self.port, self.scratch.as_mut_slice()) {
                Ok(0) if taken > 0 => break,
                Ok(0) if self.spoken => {
                    self.readable = false;
                    self.gone = now.saturating_duration_since(*self.absent.get_or_insert(now)) >= ABSENCE;
                    return Ok(if self.gone { Input::Gone } else { Input::Nothing });
                }
                Ok(0) => {
                    self.readable = false;
                    break;
                }
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    self.absent = None;
                    break;
                }
                Ok(count) => {
                    self.spoken = true;
                    self.absent = None;
                    self.reader.push(self.scratch.get(..count).unwrap_or_default());
                    taken += count;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(if taken > 0 { Input::Bytes } else { Input::Nothing })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_wire::HEADER_LEN;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (Channel, OwnedFd) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        (Channel::new(ours), theirs)
    }

    #[test]
    fn a_host_that_does_not_read_stops_the_producers() {
        let (mut channel, _theirs) = pair();
        let chunk = [7; STREAM_CHUNK];
        for _ in 0..10_000 {
            if channel.takes_data() {
                channel.send(1, &GuestFrame::Stdout(&chunk));
            }
            channel.flush().unwrap();
        }
        assert!(!channel.takes_data());
        assert!(channel.waiting() <= OUT_DATA_BYTES + HEADER_LEN + STREAM_CHUNK);
        assert!(channel.takes_more() && !channel.wants_write());
        while channel.takes_more() {
            channel.send(1, &GuestFrame::Stdout(&chunk));
        }
        assert!(!channel.wants_read());
    }

    #[test]
    fn frames_arrive_whole_and_numbered() {
        let (mut channel, theirs) = pair();
        let (mut reader, mut seen, mut bytes) = (FrameReader::new(), 0, [0; 4096]);
        for round in 0..200u32 {
            channel.send(round, &GuestFrame::Stdout(&[1; 3000]));
            channel.flush().unwrap();
            while let Ok(count @ 1..) = read(&theirs, &mut bytes) {
                reader.push(&bytes[..count]);
                while let Some((header, _)) = reader.next().unwrap() {
                    assert_eq!(header.id, seen);
                    seen += 1;
                }
            }
            channel.wake();
        }
        assert_eq!(seen, 200);
    }

    #[test]
    fn a_host_is_only_missed_once_it_has_spoken_and_stays_away() {
        let now = Instant::now();
        let (mut channel, theirs) = pair();
        assert_eq!(channel.fill(now).unwrap(), Input::Nothing);
        write(&theirs, b"HC").unwrap();
        assert_eq!(channel.fill(now).unwrap(), Input::Bytes);
        drop(theirs);
        assert_eq!(channel.fill(now).unwrap(), Input::Nothing);
        assert!(!channel.wants_read());
        channel.expire(now + ABSENCE / 2);
        assert!(!channel.wants_read());
        channel.expire(now + ABSENCE);
        assert!(channel.wants_read());
        assert_eq!(channel.fill(now + ABSENCE).unwrap(), Input::Gone);
        let (mut channel, theirs) = pair();
        drop(theirs);
        assert_eq!(channel.fill(now).unwrap(), Input::Nothing);
        assert_eq!(channel.deadline(), None);
    }
}
