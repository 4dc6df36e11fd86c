use hotcell_ledger::Digest;
use hotcell_policy::BinaryDraft;

fn grow(draft: &mut BinaryDraft) {
    draft.approve(Digest::of(b"sh"));
}

fn main() {
    let _ = grow;
}
