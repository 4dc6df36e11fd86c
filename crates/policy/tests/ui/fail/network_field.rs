//! There is no field for a network, for a share of the host, or for a disk's path.
use hotcell_policy::RunDraft;

fn ask(mut draft: RunDraft) -> RunDraft {
    draft.network = true;
    draft.host_share = "/home";
    draft.image.writable = true;
    draft.policy.limits.disk_path = "/dev/sda";
    draft
}

fn main() {
    let _ = ask;
}
