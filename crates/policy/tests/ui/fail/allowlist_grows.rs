//! An allowlist that can grow during a run is not an allowlist.
use hotcell_ledger::Digest;
use hotcell_policy::BinaryPolicy;

fn grow(policy: &mut BinaryPolicy) {
    policy.approve(Digest::of(b"evil"));
}

fn main() {
    let _ = grow;
}
