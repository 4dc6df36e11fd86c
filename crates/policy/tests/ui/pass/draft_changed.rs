use hotcell_policy::RunDraft;

fn raise(draft: &mut RunDraft) {
    draft.policy.limits.vcpus = 8;
}

fn main() {
    let _ = raise;
}
