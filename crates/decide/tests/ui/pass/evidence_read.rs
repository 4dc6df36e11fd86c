use hotcell_decide::{Evidence, EvidenceError};
use hotcell_ledger::Event;

fn read(event: &Event, object: &[u8]) -> Result<Option<Evidence>, EvidenceError> {
    Evidence::read(event, Some(object))
}

fn main() {
    let _ = read;
}
