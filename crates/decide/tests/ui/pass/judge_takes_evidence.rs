use hotcell_decide::{Evidence, Judge};

fn consider(judge: &mut Judge, evidence: Evidence) {
    let _ = judge.observe(&evidence);
}

fn main() {
    let _ = consider;
}
