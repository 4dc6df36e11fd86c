use hotcell_decide::{Admission, GuestClaim};
use hotcell_ledger::Lineage;

fn consider(admission: &mut Admission, claim: &GuestClaim, lineage: &Lineage) {
    let _ = admission.admit(claim, lineage);
}

fn main() {
    let _ = consider;
}
