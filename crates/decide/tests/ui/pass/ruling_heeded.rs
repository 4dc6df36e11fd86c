#![deny(unused_must_use)]
use hotcell_decide::{Ruling, VerdictFold};
use hotcell_ledger::Event;

fn careful(fold: &mut VerdictFold, event: &Event) -> bool {
    matches!(fold.event(event, None), Ruling::Kill(_))
}

fn main() {
    let _ = careful;
}
