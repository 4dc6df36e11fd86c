//! Any bytes as `ledger.ames`: the strict reader and the verifier end, and the verifier never finds more intact than the
//! reader. The bytes are tried as they are, and with the links and roots of what parses made to fit, so that the fuzzer
//! gets past the hashes.
#![no_main]

use hotcell_ledger::*;
use hotcell_verify::{Options, Outcome, to_json, to_text, verify_bundle};
use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;

thread_local! {
    static DIR: RefCell<Option<tempfile::TempDir>> = const { RefCell::new(None) };
}

fn check(bytes: &[u8]) {
    let mut reader = LedgerReader::new(bytes);
    while let Ok(Some(_)) = reader.next_entry() {}
    let whole = reader.sealed_len() == bytes.len() as u64;
    DIR.with_borrow_mut(|dir| {
        let dir = dir.get_or_insert_with(|| {
            let shm = std::path::Path::new("/dev/shm");
            if shm.is_dir() { tempfile::tempdir_in(shm).unwrap() } else { tempfile::tempdir().unwrap() }
        });
        std::fs::write(dir.path().join("ledger.ames"), bytes).unwrap();
        let v = verify_bundle(dir.path(), &Options::default()).unwrap();
        // There is no note: at best the run did not end.
        assert_ne!(v.outcome(), Outcome::Intact);
        if v.outcome() == Outcome::Incomplete && v.findings.counts().len() == 1 {
            assert!(whole);
        }
        if whole {
            assert_eq!(v.checkpoint, reader.checkpoint());
            assert_eq!(v.events, reader.sealed_events());
        }
        let _ = (to_text(&v), to_json(&v).to_string());
    });
}

/// The same bytes with counts, roots, heights and links that fit.
fn sealed(mut data: &[u8]) -> Vec<u8> {
    let (mut out, mut prev_hash, mut height) = (Vec::new(), Digest::ZERO, 0);
    while let Some((header, mut rest)) = data.split_first_chunk::<88>() {
        let wanted = BlockHeader::from_bytes(header).event_count.min(64);
        let (mut events, mut leaves) = (Vec::new(), Vec::new());
        while (leaves.len() as u64) < wanted
            && let Ok((_, len)) = Event::decode_prefix(rest)
        {
            leaves.push(commit(Domain::Event, &rest[..len]));
            events.extend_from_slice(&rest[..len]);
            rest = &rest[len..];
        }
        let event_count = leaves.len() as u64;
        let header = BlockHeader { height, prev_hash, event_count, events_root: merkle::root(&leaves), timestamp_ns: 0 };
        prev_hash = header.digest();
        height += 1;
        out.extend_from_slice(&header.to_bytes());
        out.extend_from_slice(&events);
        data = rest;
    }
    out.extend_from_slice(data);
    out
}

fuzz_target!(|data: &[u8]| {
    check(data);
    check(&sealed(data));
});
