use hotcell_decide::{Authorizer, SpawnAttempt, SpawnDecision, SpawnPermit};
use hotcell_ledger::Lineage;

fn redeem(authorizer: &mut Authorizer, attempt: &SpawnAttempt, lineage: &Lineage) -> Option<SpawnPermit> {
    match authorizer.redeem(attempt, lineage) {
        SpawnDecision::Allow(permit) => Some(permit),
        SpawnDecision::Deny(_) => None,
    }
}

fn main() {
    let _ = redeem;
}
