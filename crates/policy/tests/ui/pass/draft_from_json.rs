use hotcell_policy::RunDraft;

fn main() {
    let _: Result<RunDraft, _> = RunDraft::from_spec_json(b"{}");
}
