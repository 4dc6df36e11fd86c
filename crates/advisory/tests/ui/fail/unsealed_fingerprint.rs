//! A profile that still grows is nothing to compare with.
use hotcell_advisory::{FingerprintDraft, assess};
use hotcell_ledger::ClosedLedger;

fn compare(ledger: &ClosedLedger, draft: &FingerprintDraft) {
    let _ = assess(ledger, Some(draft));
}

fn main() {
    let _ = compare;
}
