use hotcell_advisory::assess;
use hotcell_ledger::LedgerWriter;

fn late(writer: LedgerWriter) {
    let _ = assess(&writer.close().unwrap(), None);
}

fn main() {
    let _ = late;
}
