//! A spec can't be put together, only sealed.
use hotcell_policy::{RunDraft, SealedPolicy, SealedSpec};

fn by_hand(draft: RunDraft, policy: SealedPolicy) -> SealedSpec {
    SealedSpec { draft, policy, json: Vec::new() }
}

fn main() {
    let _ = by_hand;
}
