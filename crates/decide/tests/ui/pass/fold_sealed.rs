use hotcell_decide::VerdictFold;
use hotcell_policy::RunDraft;

fn begin(draft: RunDraft) {
    let _ = VerdictFold::new(&draft.seal().unwrap(), None);
}

fn main() {
    let _ = begin;
}
