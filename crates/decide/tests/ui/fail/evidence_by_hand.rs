//! Evidence is read from a recorded event, never put together.
use hotcell_decide::Evidence;

fn invent(recorded: Evidence) -> Evidence {
    Evidence { sequence: 0, ..recorded }
}

fn main() {
    let _ = invent;
}
