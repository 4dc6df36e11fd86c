use hotcell_policy::{PolicyDraft, SealedPolicy};

fn run_under(_policy: &SealedPolicy) {}

fn main() {
    run_under(&PolicyDraft::default().seal().unwrap());
}
