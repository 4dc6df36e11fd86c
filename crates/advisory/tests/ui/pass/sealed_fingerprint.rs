use hotcell_advisory::{FingerprintDraft, assess};
use hotcell_ledger::ClosedLedger;

fn compare(ledger: &ClosedLedger, draft: FingerprintDraft) {
    let _ = assess(ledger, Some(&draft.seal().unwrap()));
}

fn main() {
    let _ = compare;
}
