use hotcell_decide::Authorizer;
use hotcell_policy::BinaryDraft;

fn main() {
    let _ = Authorizer::new(BinaryDraft::new().seal());
}
