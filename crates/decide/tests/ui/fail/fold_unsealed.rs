//! A verdict is reached under a sealed spec.
use hotcell_decide::VerdictFold;
use hotcell_policy::RunDraft;

fn begin(draft: &RunDraft) {
    let _ = VerdictFold::new(draft, None);
}

fn main() {
    let _ = begin;
}
