//! An advisory finding (or anything like one) is not evidence.
use hotcell_decide::Judge;

struct Finding {
    _detail: String,
}

fn consider(judge: &mut Judge, finding: Finding) {
    let _ = judge.observe(&finding);
}

fn main() {
    let _ = consider;
}
