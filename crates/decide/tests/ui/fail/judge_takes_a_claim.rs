//! Nor is what the guest says.
use hotcell_decide::{GuestClaim, Judge};

fn consider(judge: &mut Judge, claim: &GuestClaim) {
    let _ = judge.observe(claim);
}

fn main() {
    let _ = consider;
}
