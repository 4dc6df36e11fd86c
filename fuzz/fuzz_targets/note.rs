//! Any bytes as a note, a note's text, or a key: what parses is written back as it was.
#![no_main]

use hotcell_ledger::note::Note;
use hotcell_ledger::{NoteBody, SigningKey, VerifierKey, note};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(note) = Note::parse(data) {
        let keys: Vec<_> = note.claimed_key().cloned().into_iter().collect();
        let _ = note.open(&keys);
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(key) = VerifierKey::parse(text) {
        assert_eq!(key.to_string(), text.trim_end_matches('\n'));
    }
    if let Ok(body) = NoteBody::parse(text) {
        assert_eq!(body.to_text(), text);
        let key = SigningKey::from_seed(&[1; 32]);
        let signed = note::sign(body, &key).unwrap();
        assert!(Note::parse(&signed).unwrap().open(&[key.public().clone()]).is_ok());
    }
});
