//! An exec's stdin on the host: no more is sent than the guest gave credit for.
//!
//! A thread reads the caller's bytes, or a copy's thread writes them; either stops when the guest closes its end or the
//! exec is over.

use crate::channel::ToGuest;
use crate::stream::{Stdin, lock};
use crossbeam_channel::Sender;
use hotcell_wire::{STREAM_CHUNK, STREAM_WINDOW};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// A running stdin.
#[derive(Debug)]
pub(crate) struct StdinPump {
    credit: Arc<(Mutex<Credit>, Condvar)>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Credit {
    bytes: usize,
    stopped: bool,
}

impl StdinPump {
    /// Starts to send; sends the end of stdin when the source ends.
    pub(crate) fn start(exec: u32, source: Stdin, to_guest: Sender<ToGuest>) -> io::Result<StdinPump> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let watch = stop.try_clone()?;
        let credit = Credit { bytes: STREAM_WINDOW as usize, stopped: false };
        let credit = Arc::new((Mutex::new(credit), Condvar::new()));
        let shared = Arc::clone(&credit);
        let thread = std::thread::spawn(move || pump(exec, source, &watch, &shared, &to_guest));
        Ok(StdinPump { credit, stop, thread: Some(thread) })
    }

    /// Starts a thread that writes a stdin itself; it ends with what `write` does.
    pub(crate) fn write(
        exec: u32,
        to_guest: Sender<ToGuest>,
        write: impl FnOnce(&mut Feed) + Send + 'static,
    ) -> io::Result<StdinPump> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let credit = Credit { bytes: STREAM_WINDOW as usize, stopped: false };
        let credit = Arc::new((Mutex::new(credit), Condvar::new()));
        let chunk = Vec::with_capacity(STREAM_CHUNK);
        let mut feed = Feed { exec, credit: Arc::clone(&credit), to_guest, chunk };
        let thread = std::thread::spawn(move || write(&mut feed));
        Ok(StdinPump { credit, stop, thread: Some(thread) })
    }

    /// The guest may be sent so many bytes more.
    pub(crate) fn add_credit(&self, bytes: u32) {
        let (credit, changed) = &*self.credit;
        let mut credit = lock(credit);
        // More than a window is a lie and gains nothing.
        credit.bytes = (credit.bytes + bytes as usize).min(STREAM_WINDOW as usize);
        changed.notify_one();
    }

    /// Stops reading the source.
    pub(crate) fn stop(&self) {
        let (credit, changed) = &*self.credit;
        lock(credit).stopped = true;
        changed.notify_all();
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }
}

impl Drop for StdinPump {
    fn drop(&mut self) {
        self.stop();
        // A thread that is inside a read of the source can't be waited for; it
        // ends with the next byte, and holds nothing but the source.
        drop(self.thread.take());
    }
}

fn pump(
    exec: u32,
    mut source: Stdin,
    stop: &OwnedFd,
    credit: &(Mutex<Credit>, Condvar),
    to_guest: &Sender<ToGuest>,
) {
    let mut chunk = vec![0; STREAM_CHUNK];
    let mut given = 0;
    loop {
        let allowed = {
            let (credit, changed) = credit;
            let waiting = changed.wait_while(lock(credit), |credit| credit.bytes == 0 && !credit.stopped);
            let credit = waiting.unwrap_or_else(PoisonError::into_inner);
            if credit.stopped {
                return;
            }
            credit.bytes.min(STREAM_CHUNK)
        };
        let count = match &mut source {
            Stdin::Empty => 0,
            Stdin::Bytes(bytes) => {
                let rest = bytes.get(given..).unwrap_or_default();
                let count = rest.len().min(allowed);
                chunk.iter_mut().zip(rest).take(count).for_each(|(to, from)| *to = *from);
                given += count;
                count
            }
            Stdin::Descriptor(fd) => {
                match read_some(fd, stop, chunk.get_mut(..allowed).unwrap_or_default()) {
                    Some(count) => count,
                    None => return,
                }
            }
        };
        let sent = match chunk.get(..count) {
            Some(bytes) if count > 0 => to_guest.send(ToGuest::Stdin(exec, bytes.to_vec())),
            _ => to_guest.send(ToGuest::StdinEof(exec)),
        };
        if sent.is_err() || count == 0 {
            return;
        }
        let mut credit = lock(&credit.0);
        credit.bytes = credit.bytes.saturating_sub(count);
    }
}

/// Bytes read; 0 at the end or on an error; `None` when told to stop.
fn read_some(fd: &OwnedFd, stop: &OwnedFd, into: &mut [u8]) -> Option<usize> {
    loop {
        let mut fds = [PollFd::new(fd, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return Some(0),
        }
        let [source, stopped] = &fds;
        if !stopped.revents().is_empty() {
            return None;
        }
        if source.revents().is_empty() {
            continue;
        }
        match rustix::io::read(fd.as_fd(), &mut *into) {
            Ok(count) => return Some(count),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(_) => return Some(0),
        }
    }
}

/// A stdin that a thread writes: waits for the guest's credit, and fails once it was stopped.
#[derive(Debug)]
pub(crate) struct Feed {
    exec: u32,
    credit: Arc<(Mutex<Credit>, Condvar)>,
    to_guest: Sender<ToGuest>,
    chunk: Vec<u8>,
}

impl Feed {
    /// Tells whether nobody takes it any more.
    pub(crate) fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.credit))
    }

    /// Ends the stdin.
    pub(crate) fn end(&mut self) -> io::Result<()> {
        self.flush()?;
        self.to_guest.send(ToGuest::StdinEof(self.exec)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Tells whether a feed was stopped.
#[derive(Debug)]
pub(crate) struct Stopper(Arc<(Mutex<Credit>, Condvar)>);

impl Stopper {
    pub(crate) fn is_stopped(&self) -> bool {
        lock(&self.0.0).stopped
    }
}

impl Write for Feed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (part, _) = bytes.split_at(bytes.len().min(STREAM_CHUNK - self.chunk.len()));
        self.chunk.extend_from_slice(part);
        if self.chunk.len() == STREAM_CHUNK {
            self.flush()?;
        }
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let wanted = self.chunk.len();
        if wanted == 0 {
            return Ok(());
        }
        let (credit, changed) = &*self.credit;
        let waiting = changed.wait_while(lock(credit), |credit| credit.bytes < wanted && !credit.stopped);
        let mut credit = waiting.unwrap_or_else(PoisonError::into_inner);
        if credit.stopped {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        credit.bytes -= wanted;
        drop(credit);
        let chunk = std::mem::replace(&mut self.chunk, Vec::with_capacity(STREAM_CHUNK));
        self.to_guest.send(ToGuest::Stdin(self.exec, chunk)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}
