//! An authorizer takes a sealed allowlist.
use hotcell_decide::Authorizer;
use hotcell_policy::BinaryDraft;

fn main() {
    let _ = Authorizer::new(BinaryDraft::new());
}
