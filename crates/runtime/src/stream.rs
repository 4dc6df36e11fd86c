//! An exec's output streams on the host: bounded whatever either end does.
//!
//! The channel reader puts bytes into a buffer that is never larger than
//! the credit that the host gave; a thread per stream takes them out, hashes all
//! of them, keeps the first `output_mib` as an object, passes everything through
//! to the caller, and gives the credit back. Input is `stdin`'s.
//!
//! ```text
//! reader ──▶ Sink (≤ one window) ──▶ thread ──▶ Tally (digest, object) ──▶ caller ──▶ credit
//!                   ▲                              ▲
//!                   └───────── Tap::close ─────────┘   the driver's end of it
//! ```
//! A caller that does not read its pipe blocks that thread and no other: the driver
//! closes the [`Tap`] and has the exact account without it, and from then on the
//! thread touches neither the disk nor the record. The thread itself ends when the
//! caller's pipe does.

use crate::bundle::PendingObject;
use crate::channel::ToGuest;
use crate::driver::CopyStep;
use crate::phases::panic_text;
use crossbeam_channel::Sender;
use hotcell_ledger::Digest;
use hotcell_wire::{STREAM_WINDOW, Stream};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Where an exec's stdin comes from.
#[derive(Debug, Default)]
pub enum Stdin {
    /// Nothing: end of file at once.
    #[default]
    Empty,
    /// These bytes, then end of file.
    Bytes(Vec<u8>),
    /// A file, pipe or terminal, until it ends.
    Descriptor(OwnedFd),
}

/// Where an exec's output goes, besides the record.
pub type Output = Option<Box<dyn Write + Send>>;

/// An exec's streams as the caller has them.
#[derive(Default)]
pub struct ExecIo {
    /// Standard input.
    pub stdin: Stdin,
    /// Standard output; `None`: only recorded.
    pub stdout: Output,
    /// Standard error; `None`: only recorded.
    pub stderr: Output,
}

/// What came of one output stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamTotals {
    /// Bytes that came.
    pub total_bytes: u64,
    /// Bytes that were kept, the first ones.
    pub kept_bytes: u64,
    /// Digest of all that came.
    pub whole: Digest,
    /// The object that holds what was kept.
    pub kept: Digest,
}

impl StreamTotals {
    /// Whether less was kept than came.
    pub fn truncated(&self) -> bool {
        self.kept_bytes < self.total_bytes
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    /// Bytes that the guest may still send.
    credit: usize,
    ended: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Sink {
    buffer: Mutex<Buffer>,
    changed: Condvar,
}

impl Sink {
    fn end(&self) {
        lock(&self.buffer).ended = true;
        self.changed.notify_all();
    }
}

/// The sinks of all live execs, shared by the reader and the driver.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sinks {
    all: Arc<Mutex<BTreeMap<u32, [Arc<Sink>; 2]>>>,
}

impl Sinks {
    /// Opens the two sinks of an exec, before the guest hears of it.
    pub(crate) fn open(&self, exec: u32) -> [Arc<Sink>; 2] {
        let sink = || {
            let buffer = Buffer { credit: STREAM_WINDOW as usize, ..Buffer::default() };
            Arc::new(Sink { buffer: Mutex::new(buffer), changed: Condvar::new() })
        };
        let sinks = [sink(), sink()];
        lock(&self.all).insert(exec, sinks.clone());
        sinks
    }

    /// Takes output of the guest.
    pub(crate) fn push(&self, exec: u32, stream: Stream, bytes: &[u8]) -> Result<(), String> {
        let found = lock(&self.all).get(&exec).map(|[stdout, stderr]| match stream {
            Stream::Stdout => Arc::clone(stdout),
            Stream::Stderr => Arc::clone(stderr),
        });
        let sink = found.ok_or_else(|| format!("output of exec {exec}, which does not run"))?;
        let mut buffer = lock(&sink.buffer);
        buffer.credit = buffer
            .credit
            .checked_sub(bytes.len())
            .ok_or_else(|| format!("more output of exec {exec} than it had credit for"))?;
        buffer.bytes.extend_from_slice(bytes);
        drop(buffer);
        sink.changed.notify_one();
        Ok(())
    }

    /// Ends the streams of an exec; its id is free for no one.
    pub(crate) fn end(&self, exec: u32) -> Result<(), String> {
        let found = lock(&self.all).remove(&exec);
        let sinks = found.ok_or_else(|| format!("the end of exec {exec}, which does not run"))?;
        sinks.iter().for_each(|sink| sink.end());
        Ok(())
    }

    /// Ends all streams: the channel is gone.
    pub(crate) fn end_all(&self) {
        let all = std::mem::take(&mut *lock(&self.all));
        all.values().flatten().for_each(|sink| sink.end());
    }
}

/// What a stream's thread says to the driver, once, at its end.
#[derive(Debug)]
pub(crate) struct StreamDone {
    pub(crate) exec: u32,
    pub(crate) stream: Stream,
    pub(crate) outcome: StreamOutcome,
}

/// How a stream's thread ended.
#[derive(Debug)]
pub(crate) enum StreamOutcome {
    /// All was passed on.
    Passed,
    /// The host's disk did not take it.
    DiskFailed(String),
    /// It panicked: in the caller's writer, or in us.
    Panicked(String),
}

/// What the threads of streams and copies say to the driver.
pub(crate) enum FromStream {
    Done(StreamDone),
    Copy { exec: u32, step: CopyStep },
}

/// Where they say it. Waits where the driver does not listen; does nothing where it is gone.
pub(crate) type OnDone = Arc<dyn Fn(FromStream) + Send + Sync>;

/// The account of a stream: what came, and what of it is kept.
#[derive(Debug)]
struct Tally {
    whole: blake3::Hasher,
    kept: blake3::Hasher,
    total_bytes: u64,
    kept_bytes: u64,
    limit: u64,
    /// None once the account is closed.
    keep: Option<PendingObject>,
}

impl Tally {
    fn new(keep: PendingObject, limit: u64) -> Tally {
        let (whole, kept) = (blake3::Hasher::new(), blake3::Hasher::new());
        Tally { whole, kept, total_bytes: 0, kept_bytes: 0, limit, keep: Some(keep) }
    }

    fn count(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(keep) = &mut self.keep else { return Ok(()) };
        let room = usize::try_from(self.limit - self.kept_bytes).unwrap_or(usize::MAX).min(bytes.len());
        if let Some(part) = bytes.get(..room).filter(|part| !part.is_empty()) {
            keep.write(part)?;
            self.kept.update(part);
            self.kept_bytes += part.len() as u64;
        }
        self.whole.update(bytes);
        self.total_bytes += bytes.len() as u64;
        Ok(())
    }
}

/// The driver's end of one stream. Dropped, it takes the unfinished object with it.
#[derive(Debug)]
pub(crate) struct Tap {
    sink: Arc<Sink>,
    tally: Arc<Mutex<Tally>>,
}

impl Tap {
    /// Closes the account of all that came, whether or not it was passed on yet.
    pub(crate) fn close(self) -> io::Result<StreamTotals> {
        let mut tally = lock(&self.tally);
        let rest = std::mem::take(&mut lock(&self.sink.buffer).bytes);
        tally.count(&rest)?;
        let digest = |hasher: &blake3::Hasher| Digest::from_bytes(*hasher.finalize().as_bytes());
        let totals = StreamTotals {
            total_bytes: tally.total_bytes,
            kept_bytes: tally.kept_bytes,
            whole: digest(&tally.whole),
            kept: digest(&tally.kept),
        };
        if let Some(keep) = tally.keep.take() {
            keep.finish(totals.kept)?;
        }
        Ok(totals)
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        drop(lock(&self.tally).keep.take());
        self.sink.end();
    }
}

/// Opens the sinks of an exec and starts their threads.
pub(crate) fn start_outputs(
    sinks: &Sinks,
    exec: u32,
    outputs: [(Stream, Output, PendingObject); 2],
    limit: u64,
    to_guest: &Sender<ToGuest>,
    on_done: &OnDone,
) -> [Tap; 2] {
    let opened = sinks.open(exec);
    let mut opened = opened.into_iter();
    outputs.map(|(stream, pass, keep)| {
        let sink = opened.next().unwrap_or_default();
        let tap = Tap { sink, tally: Arc::new(Mutex::new(Tally::new(keep, limit))) };
        let (sink, tally) = (Arc::clone(&tap.sink), Arc::clone(&tap.tally));
        let (to_guest, on_done) = (to_guest.clone(), Arc::clone(on_done));
        std::thread::spawn(move || {
            let say = |credit: Option<u32>| {
                let message = match credit {
                    Some(bytes) => ToGuest::Credit(exec, stream, bytes),
                    None => ToGuest::CloseOutput(exec, stream),
                };
                let _ = to_guest.send(message);
            };
            let drained = catch_unwind(AssertUnwindSafe(|| drain(&sink, &tally, pass, say)));
            let outcome = match drained {
                Ok(Ok(())) => StreamOutcome::Passed,
                Ok(Err(error)) => StreamOutcome::DiskFailed(error.to_string()),
                Err(panic) => StreamOutcome::Panicked(panic_text(&*panic)),
            };
            on_done(FromStream::Done(StreamDone { exec, stream, outcome }));
        });
        tap
    })
}

fn drain(
    sink: &Sink,
    tally: &Mutex<Tally>,
    mut pass: Output,
    // Credit, or that nobody reads any more.
    mut say: impl FnMut(Option<u32>),
) -> io::Result<()> {
    let mut taken = Vec::new();
    loop {
        taken.clear();
        {
            let waiting = sink.changed.wait_while(lock(&sink.buffer), |b| b.bytes.is_empty() && !b.ended);
            drop(waiting.unwrap_or_else(PoisonError::into_inner));
            // Taken and counted in one step, so that a tap that closes in between misses nothing.
            let mut tally = lock(tally);
            std::mem::swap(&mut taken, &mut lock(&sink.buffer).bytes);
            tally.count(&taken)?;
        }
        if taken.is_empty() {
            return Ok(());
        }
        // A caller who no longer reads closes the stream in the guest too, as a pipe would; what is still on its way is
        // recorded.
        if pass.as_mut().is_some_and(|to| to.write_all(&taken).and_then(|()| to.flush()).is_err()) {
            pass = None;
            say(None);
        }
        lock(&sink.buffer).credit += taken.len();
        say(Some(taken.len() as u32));
    }
}

/// Hands over what comes, in the pieces in which it comes, to its end.
pub(crate) fn pour(sink: &Sink, mut take: impl FnMut(&[u8]), mut give_credit: impl FnMut(u32)) {
    let mut taken = Vec::new();
    loop {
        taken.clear();
        let waiting = sink.changed.wait_while(lock(&sink.buffer), |b| b.bytes.is_empty() && !b.ended);
        std::mem::swap(&mut taken, &mut waiting.unwrap_or_else(PoisonError::into_inner).bytes);
        if taken.is_empty() {
            return;
        }
        take(&taken);
        lock(&sink.buffer).credit += taken.len();
        give_credit(taken.len() as u32);
    }
}
