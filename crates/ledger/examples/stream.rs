//! Streams so many events (100 million by default) through writer and reader, in pieces of memory that stay the same.
//!
//! `cargo run --release -p hotcell-ledger --example stream [EVENTS]`. The writer runs on one thread and the reader, with
//! Gate 1, on another; a pipe is between them, so that nothing but the two is held. Prints rates and the peak of resident
//! memory, and fails above 64 MiB.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use hotcell_ledger::reader::Entry;
use hotcell_ledger::writer::{Sink, SyncEvery};
use hotcell_ledger::*;
use std::io::{self, PipeWriter, Write};
use std::time::Instant;

const MAX_RSS_KIB: u64 = 64 << 10;

struct Pipe(PipeWriter);

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Sink for Pipe {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A run without end: each process spawns, mutates a file, is reported on, and exits.
fn payload(n: u64) -> (ActorId, Option<ActorId>, Payload) {
    let actor = ActorId::new(ActorId::FIRST_GUEST.get() + n / 4).unwrap();
    let digest = Digest::from_bytes([n as u8; 32]);
    match n % 4 {
        0 => (actor, None, Payload::ProcessSpawn { binary: digest, argv: digest, cwd: "/workspace".into() }),
        1 => {
            let path = "/workspace/out.txt".into();
            (actor, None, Payload::FileMutation { op: FileOp::Write, path, before: digest, after: digest })
        }
        2 => (actor, None, Payload::ToolCall { tool: "hotcell.output".into(), args: digest, result: digest }),
        _ => (actor, None, Payload::ProcessExit { code: 0 }),
    }
}

fn main() {
    let events: u64 = std::env::args().nth(1).map_or(100_000_000, |n| n.parse().expect("a number of events"));
    let events = events / 4 * 4;
    let (from, to) = io::pipe().unwrap();
    let started = Instant::now();
    let writing = std::thread::spawn(move || {
        let mut writer =
            LedgerWriter::over(Pipe(to), Cadence { sync: SyncEvery::Close, ..Cadence::default() });
        writer.append(ActorId::HOST, None, Payload::RunBegin, 0).unwrap();
        for n in 0..events {
            let (actor, parent, payload) = payload(n);
            writer.append(actor, parent, payload, n * 100).unwrap();
        }
        writer.append(ActorId::HOST, None, Payload::RunEnd, events * 100).unwrap();
        writer.finish().unwrap()
    });
    let mut reader = LedgerReader::new(from);
    let mut lineage = Lineage::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        if let Entry::Event(event) = entry {
            assert!(lineage.observe(&event).is_empty());
        }
    }
    assert_eq!(lineage.finish().count(), 0);
    assert_eq!(writing.join().unwrap(), reader.checkpoint());
    let seconds = started.elapsed().as_secs_f64();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak =
        status.lines().find(|l| l.starts_with("VmHWM")).and_then(|l| l.split_whitespace().nth(1)).unwrap();
    let peak: u64 = peak.parse().unwrap();
    println!(
        "{} events written and verified in {seconds:.1} s ({:.2} million a second), peak {peak} KiB resident",
        reader.sealed_events(),
        reader.sealed_events() as f64 / seconds / 1e6
    );
    assert!(peak <= MAX_RSS_KIB, "over {MAX_RSS_KIB} KiB");
}
