//! A header from the first 88 bytes, events from the rest; and the same bytes sealed by the writer read back as themselves.
#![no_main]

use hotcell_ledger::reader::Entry;
use hotcell_ledger::writer::Sink;
use hotcell_ledger::*;
use libfuzzer_sys::fuzz_target;
use std::io::{self, Write};

struct Memory(Vec<u8>);

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sink for Memory {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((header, mut rest)) = data.split_first_chunk::<88>() else { return };
    assert_eq!(&BlockHeader::from_bytes(header).to_bytes(), header);
    let mut events = Vec::new();
    while let Ok((event, len)) = Event::decode_prefix(rest) {
        events.push(event);
        rest = &rest[len..];
    }
    let mut file = Memory(Vec::new());
    let cadence = Cadence { max_events: u64::from(header[0] % 9) + 1, ..Cadence::default() };
    let mut writer = LedgerWriter::over(&mut file, cadence);
    let mut written = Vec::new();
    for event in &events {
        match writer.append(event.actor, event.parent, event.payload.clone(), event.timestamp_ns) {
            Ok(event) => written.push(event),
            Err(WriteError::Ended) => break,
            Err(other) => panic!("{other}"),
        }
    }
    writer.seal_block(1).unwrap();
    drop(writer);
    let mut reader = LedgerReader::new(&file.0[..]);
    let mut read = Vec::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        if let Entry::Event(event) = entry {
            read.push(event);
        }
    }
    assert_eq!(read, written);
    let Some((first, _)) = file.0.split_first_chunk::<88>() else { return };
    let first = BlockHeader::from_bytes(first);
    let in_block = &written[..first.event_count as usize];
    let index = usize::from(header[1]) % in_block.len();
    let proof = EventProof::new(in_block, index).unwrap();
    assert_eq!(proof.verify(&first).unwrap(), in_block[index]);
    let other = BlockHeader { events_root: Digest::of(header), ..first };
    assert!(proof.verify(&other).is_err());
});
