use hotcell_policy::RunDraft;

fn ask(mut draft: RunDraft) -> RunDraft {
    draft.vsock_cid = None;
    draft.image.name = "busybox".into();
    draft.policy.limits.disk_mib = 64;
    draft
}

fn main() {
    let _ = ask;
}
