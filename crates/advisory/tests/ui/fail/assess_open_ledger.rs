//! Opinions are of runs that are over.
use hotcell_advisory::assess;
use hotcell_ledger::LedgerWriter;

fn early(writer: &LedgerWriter) {
    let _ = assess(writer, None);
}

fn main() {
    let _ = early;
}
