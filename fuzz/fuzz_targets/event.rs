//! Any bytes: an event that encodes to the same bytes, or an error. Gate 1 takes whatever decodes.
#![no_main]

use hotcell_ledger::{Event, Lineage};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(event) = Event::decode(data) {
        assert_eq!(event.to_bytes().unwrap(), data);
    }
    let (mut rest, mut lineage) = (data, Lineage::new());
    while let Ok((event, len)) = Event::decode_prefix(rest) {
        assert!(len >= 41 && event.to_bytes().unwrap() == rest[..len]);
        let _ = (lineage.would_break(&event), lineage.observe(&event));
        rest = &rest[len..];
    }
    let _ = lineage.finish().count();
});
