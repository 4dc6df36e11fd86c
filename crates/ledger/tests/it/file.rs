//! The file: cut at every byte, on disks that fail, and read back.

use crate::generate::{spawn, tool};
use crate::vectors::MemorySink;
use hotcell_ledger::reader::Entry;
use hotcell_ledger::writer::{MAX_BLOCK_BYTES, Sink, SyncEvery};
use hotcell_ledger::*;
use std::io::{self, Write};

const EXIT: Payload = Payload::ProcessExit { code: 0 };

fn run(writer: &mut LedgerWriter<impl Sink>, tools: usize) -> Result<Vec<Event>, WriteError> {
    let mut now = 1_000;
    let mut events = Vec::new();
    let mut step = |actor, parent, payload| {
        now += 7;
        events.push(writer.append(actor, parent, payload, now)?);
        Ok::<(), WriteError>(())
    };
    step(ActorId::HOST, None, Payload::RunBegin)?;
    step(ActorId::HOST, None, spawn("/"))?;
    for i in 0..tools {
        step(ActorId::HOST, None, tool(&format!("hotcell.step_{i}")))?;
    }
    step(ActorId::HOST, None, EXIT)?;
    step(ActorId::HOST, None, Payload::RunEnd)?;
    Ok(events)
}

fn small_blocks() -> Cadence {
    Cadence { max_events: 4, ..Cadence::default() }
}

#[test]
fn written_is_what_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.ames");
    let mut writer = LedgerWriter::create(&path, small_blocks()).unwrap();
    let events = run(&mut writer, 20).unwrap();
    let closed = writer.close().unwrap();
    assert_eq!(closed.event_count(), 24);
    assert_eq!(closed.checkpoint().height, 6);
    assert_eq!(closed.events().unwrap().collect::<Result<Vec<_>, _>>().unwrap(), events);
    let again = ClosedLedger::open(&path).unwrap();
    assert_eq!(again.checkpoint(), closed.checkpoint());
    assert!(gate1::check(&events).is_ok());
    assert!(matches!(LedgerWriter::create(&path, small_blocks()), Err(WriteError::Create { .. })));

    // Changed under a reader's hands: said, not skipped.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(bytes.len() - 1);
    std::fs::write(&path, &bytes).unwrap();
    assert!(closed.events().unwrap().any(|e| e.is_err()));
    assert!(ClosedLedger::open(&path).is_err());
}

#[test]
fn closing_needs_the_end_and_the_end_is_final() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = LedgerWriter::create(dir.path().join("l"), Cadence::default()).unwrap();
    writer.append(ActorId::HOST, None, Payload::RunBegin, 1).unwrap();
    assert!(matches!(writer.finish(), Err(WriteError::NotEnded)));
    writer.append(ActorId::HOST, None, Payload::RunEnd, 1).unwrap();
    assert!(matches!(writer.append(ActorId::HOST, None, EXIT, 1), Err(WriteError::Ended)));
    writer.close().unwrap();
}

/// After a crash at any byte, every sealed block is kept, what is lost is said, and the run has not ended.
#[test]
fn cut_at_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.ames");
    let mut writer = LedgerWriter::create(&path, small_blocks()).unwrap();
    let events = run(&mut writer, 8).unwrap();
    writer.close().unwrap();
    let bytes = std::fs::read(&path).unwrap();

    // Where the blocks end, from the reader's own account of the whole file.
    let mut reader = LedgerReader::new(&bytes[..]);
    let mut ends = vec![(0u64, 0u64)];
    while let Some(entry) = reader.next_entry().unwrap() {
        if matches!(entry, Entry::BlockEnd(_)) {
            ends.push((reader.sealed_len(), reader.sealed_events()));
        }
    }
    assert_eq!(ends.len(), 4);
    for len in 0..=bytes.len() {
        std::fs::write(&path, &bytes[..len]).unwrap();
        let recovered = reopen(&path).unwrap();
        let (sealed_len, sealed_events) = *ends.iter().rfind(|(end, _)| *end <= len as u64).unwrap();
        assert_eq!(
            (recovered.sealed_len, recovered.event_count),
            (sealed_len, sealed_events),
            "cut at {len}"
        );
        assert_eq!(recovered.lost_bytes, len as u64 - sealed_len);
        assert_eq!(recovered.fault.is_some(), recovered.lost_bytes > 0);
        assert_eq!(recovered.ended, len == bytes.len());
        let kept: Vec<Event> = recovered.events().unwrap().collect::<Result<_, _>>().unwrap();
        assert_eq!(kept, events[..sealed_events as usize]);
        assert_eq!(ClosedLedger::open(&path).is_ok(), len == bytes.len());
    }
}

/// Flipping any one bit is seen by a strict reader or changes the head.
#[test]
fn any_flipped_bit_shows() {
    let mut bytes = Vec::new();
    let mut writer = LedgerWriter::over(MemorySink(&mut bytes), small_blocks());
    run(&mut writer, 4).unwrap();
    let head = writer.finish().unwrap();
    let read = |bytes: &[u8]| {
        let mut reader = LedgerReader::new(bytes);
        while reader.next_entry().ok()?.is_some() {}
        Some(reader.checkpoint())
    };
    assert_eq!(read(&bytes), Some(head));
    for bit in 0..bytes.len() * 8 {
        let mut altered = bytes.clone();
        altered[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(read(&altered), Some(head), "bit {bit}");
    }
}

#[test]
fn seals_by_events_bytes_age_and_on_demand() {
    let heights = |cadence: Cadence| {
        let mut bytes = Vec::new();
        let mut writer = LedgerWriter::over(MemorySink(&mut bytes), cadence);
        run(&mut writer, 8).unwrap();
        writer.finish().unwrap().height
    };
    let never =
        Cadence { max_events: u64::MAX, max_bytes: usize::MAX, max_age_ns: u64::MAX, sync: SyncEvery::Close };
    assert_eq!(heights(never), 1);
    assert_eq!(heights(Cadence { max_events: 3, ..never }), 4);
    assert_eq!(heights(Cadence { max_bytes: 0, ..never }), 12);
    assert_eq!(heights(Cadence { max_age_ns: 7, ..never }), 6);
    assert_eq!(heights(Cadence { max_events: 0, ..never }), 12);

    let mut bytes = Vec::new();
    let mut writer = LedgerWriter::over(MemorySink(&mut bytes), Cadence { max_age_ns: 100, ..never });
    writer.append(ActorId::HOST, None, Payload::RunBegin, 1000).unwrap();
    writer.tick(1099).unwrap();
    assert_eq!(writer.checkpoint().height, 0);
    writer.tick(1100).unwrap();
    assert_eq!(writer.checkpoint().height, 1);
    writer.seal_block(1101).unwrap();
    assert_eq!(writer.checkpoint().height, 1);
}

#[test]
fn blocks_are_bounded_whatever_the_cadence() {
    let never =
        Cadence { max_events: u64::MAX, max_bytes: usize::MAX, max_age_ns: u64::MAX, sync: SyncEvery::Close };
    let mut bytes = Vec::new();
    let mut writer = LedgerWriter::over(MemorySink(&mut bytes), never);
    let big = "x".repeat(1_000_000);
    writer.append(ActorId::HOST, None, Payload::RunBegin, 1).unwrap();
    for _ in 0..9 {
        writer.append(ActorId::HOST, None, tool(&big), 1).unwrap();
    }
    assert!(matches!(
        writer.append(ActorId::HOST, None, tool(&"x".repeat(2_000_000)), 1),
        Err(WriteError::PayloadTooLong(_))
    ));
    writer.append(ActorId::HOST, None, Payload::RunEnd, 1).unwrap();
    writer.finish().unwrap();
    let mut reader = LedgerReader::new(&bytes[..]);
    let (mut before, mut blocks) = (0, 0);
    while let Some(entry) = reader.next_entry().unwrap() {
        if let Entry::BlockEnd(_) = entry {
            assert!(reader.sealed_len() - before <= MAX_BLOCK_BYTES as u64);
            before = reader.sealed_len();
            blocks += 1;
        }
    }
    assert_eq!((blocks, reader.sealed_events()), (3, 11));
}

/// A disk that takes so many bytes, a few at a time, and then fails.
struct Failing {
    room: usize,
    at_once: usize,
    kind: io::ErrorKind,
    fail_sync: bool,
    written: Vec<u8>,
    calls_after_failure: usize,
}

impl Write for Failing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.room - self.written.len()).min(self.at_once);
        if n == 0 {
            self.calls_after_failure += 1;
            return Err(self.kind.into());
        }
        self.written.extend_from_slice(&bytes[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sink for Failing {
    fn sync(&mut self) -> io::Result<()> {
        if self.fail_sync {
            self.calls_after_failure += 1;
            return Err(self.kind.into());
        }
        Ok(())
    }
}

#[test]
fn a_failing_disk_is_told_at_once_and_for_ever() {
    for kind in [io::ErrorKind::StorageFull, io::ErrorKind::ReadOnlyFilesystem, io::ErrorKind::Other] {
        for (room, fail_sync) in
            [(0, false), (1, false), (88, false), (300, false), (1000, false), (1 << 20, true)]
        {
            let mut disk =
                Failing { room, at_once: 7, kind, fail_sync, written: Vec::new(), calls_after_failure: 0 };
            let mut writer = LedgerWriter::over(&mut disk, small_blocks());
            match run(&mut writer, 100) {
                Err(WriteError::Io { source, sealed_events }) => {
                    assert_eq!((source.kind(), sealed_events % 4), (kind, 0));
                }
                other => panic!("{other:?}"),
            }
            assert!(writer.is_poisoned());
            for _ in 0..3 {
                assert!(
                    matches!(writer.append(ActorId::HOST, None, EXIT, 1), Err(WriteError::Poisoned(k)) if k == kind)
                );
                assert!(matches!(writer.seal_block(1), Err(WriteError::Poisoned(_))));
                assert!(matches!(writer.tick(u64::MAX), Err(WriteError::Poisoned(_))));
                assert!(matches!(writer.finish(), Err(WriteError::Poisoned(_))));
            }
            drop(writer);
            // Nothing is tried again behind the caller's back.
            assert_eq!(disk.calls_after_failure, 1);
            let mut reader = LedgerReader::new(&disk.written[..]);
            while let Ok(Some(_)) = reader.next_entry() {}
            assert!(!reader.has_ended());
        }
    }
}

#[test]
fn short_writes_alone_lose_nothing() {
    let mut disk = Failing {
        room: usize::MAX,
        at_once: 1,
        kind: io::ErrorKind::Other,
        fail_sync: false,
        written: Vec::new(),
        calls_after_failure: 0,
    };
    let mut writer = LedgerWriter::over(&mut disk, small_blocks());
    run(&mut writer, 30).unwrap();
    let head = writer.finish().unwrap();
    drop(writer);
    let mut reader = LedgerReader::new(&disk.written[..]);
    while reader.next_entry().unwrap().is_some() {}
    assert_eq!(reader.checkpoint(), head);
}

#[test]
fn a_full_device() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut writer = LedgerWriter::over(full, small_blocks());
    match run(&mut writer, 10) {
        Err(WriteError::Io { source, sealed_events: 0 }) => {
            assert_eq!(source.kind(), io::ErrorKind::StorageFull)
        }
        other => panic!("{other:?}"),
    }
    assert!(writer.finish().is_err());
}

/// 2^64 events, says the header; ten gigabytes, says the file system.
#[test]
fn a_sparse_giant_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.ames");
    let header = BlockHeader {
        height: 0,
        prev_hash: Digest::ZERO,
        event_count: u64::MAX,
        events_root: Digest::ZERO,
        timestamp_ns: 0,
    };
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&header.to_bytes()).unwrap();
    file.set_len(10 << 30).unwrap();
    let recovered = reopen(&path).unwrap();
    assert_eq!((recovered.event_count, recovered.lost_bytes), (0, 10 << 30));
    assert!(matches!(recovered.fault, Some(ReadError::Broken(..))));
}
