//! A permit to spawn comes from a token that was redeemed.
use hotcell_decide::SpawnPermit;
use hotcell_ledger::{ActorId, Digest};

fn main() {
    let _ = SpawnPermit { parent: ActorId::HOST, binary: Digest::ZERO };
}
