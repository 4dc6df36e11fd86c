use hotcell_policy::{RunDraft, SealedSpec, Violations};

fn sealed(draft: RunDraft) -> Result<SealedSpec, Violations> {
    draft.seal()
}

fn main() {
    let _ = sealed;
}
