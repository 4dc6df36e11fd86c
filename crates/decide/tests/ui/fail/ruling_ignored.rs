//! A ruling can't be let fall by accident.
#![deny(unused_must_use)]
use hotcell_decide::VerdictFold;
use hotcell_ledger::Event;

fn careless(fold: &mut VerdictFold, event: &Event) {
    fold.event(event, None);
}

fn main() {
    let _ = careless;
}
