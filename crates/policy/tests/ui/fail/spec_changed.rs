//! A sealed spec has no setter, and what it lends can't be changed.
use hotcell_policy::SealedSpec;

fn raise(spec: &mut SealedSpec) {
    spec.limits().vcpus = 8;
}

fn main() {
    let _ = raise;
}
