//! A sealed spec can't be deserialized: what is read must pass the checks again.
use hotcell_policy::SealedSpec;

fn main() {
    let _: SealedSpec = serde_json::from_str("{}").unwrap();
}
