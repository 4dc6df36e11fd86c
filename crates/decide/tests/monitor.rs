//! The monitor: regions, grants, the chain of contents, the baseline.
mod common;

use common::spec_with;
use hotcell_decide::monitor::metadata_digest;
use hotcell_decide::{FoldError, Judgement, Monitor, Mutation, MutationError, VerdictFold};
use hotcell_ledger::{Digest, FileOp};
use hotcell_policy::{
    CleanPath, EntryKind, EnvironmentBaseline, Manifest, ManifestEntry, RunDraft, SealedSpec,
};
use proptest::prelude::*;

fn digest(text: &str) -> Digest {
    if text.is_empty() { Digest::ZERO } else { Digest::of(text.as_bytes()) }
}

fn mutation(op: FileOp, path: &str, before: &str, after: &str) -> Mutation {
    Mutation::new(op, path, digest(before), digest(after)).unwrap()
}

fn baseline() -> EnvironmentBaseline {
    let file = |path: &str, bytes: &str| {
        let kind = EntryKind::File { digest: digest(bytes), bytes: 1 };
        (CleanPath::clean(path).unwrap(), ManifestEntry { kind, mode: 0o644, uid: 0, gid: 0 })
    };
    EnvironmentBaseline::from_manifest(&Manifest::new([
        file("/etc/passwd", "p"),
        file("/workspace/given", "g"),
    ]))
}

fn spec() -> SealedSpec {
    spec_with(|p| {
        p.capabilities.write_trees = vec!["/workspace/out".into()];
        p.capabilities.write = vec!["/workspace/given".into()];
    })
}

fn monitor(with_baseline: bool) -> Monitor {
    let baseline = baseline();
    Monitor::new(spec().policy().paths(), spec().policy().capabilities(), with_baseline.then_some(&baseline))
}

fn unexplained(judgement: &Judgement) -> bool {
    matches!(judgement, Judgement::Unexplained(_))
}

#[test]
fn what_changes_nothing_is_no_mutation() {
    assert_eq!(Mutation::new(FileOp::Write, "/x", digest("a"), digest("a")), Err(MutationError::NoOp));
    assert_eq!(Mutation::new(FileOp::Delete, "/x", Digest::ZERO, Digest::ZERO), Err(MutationError::NoOp));
}

#[test]
fn sides_must_fit_the_operation() {
    for (op, before, after, fits) in [
        (FileOp::Create, "", "a", true),
        (FileOp::Create, "a", "b", false),
        (FileOp::Create, "a", "", false),
        (FileOp::Write, "a", "b", true),
        (FileOp::Write, "", "b", false),
        (FileOp::Delete, "a", "", true),
        (FileOp::Delete, "", "a", false),
        (FileOp::Chmod, "a", "b", true),
        (FileOp::Chmod, "", "b", false),
        (FileOp::Symlink, "", "b", true),
        (FileOp::Symlink, "a", "b", true),
        (FileOp::Symlink, "a", "", false),
        (FileOp::Rename, "a", "", true),
        (FileOp::Rename, "", "a", true),
        (FileOp::Rename, "a", "b", false),
    ] {
        let made = Mutation::new(op, "/x", digest(before), digest(after));
        assert_eq!(made.is_ok(), fits, "{op:?} {before:?} {after:?}");
    }
}

#[test]
fn grants_make_the_difference_in_the_mutable_region() {
    let mut m = monitor(false);
    assert_eq!(m.judge(&mutation(FileOp::Create, "/workspace/out/a", "", "1")), Judgement::Expected);
    assert_eq!(m.judge(&mutation(FileOp::Create, "/workspace/given", "", "1")), Judgement::Expected);
    assert!(unexplained(&m.judge(&mutation(FileOp::Create, "/workspace/other", "", "1"))));
    assert!(unexplained(&m.judge(&mutation(FileOp::Create, "/workspace/output", "", "1"))));
    assert_eq!(m.judge(&mutation(FileOp::Create, "/tmp/other", "", "1")), Judgement::Expected);
    assert!(matches!(m.judge(&mutation(FileOp::Create, "/opt/x", "", "1")), Judgement::Impossible(_)));
}

#[test]
fn a_change_continues_what_was_known() {
    let mut m = monitor(false);
    assert_eq!(m.judge(&mutation(FileOp::Create, "/workspace/out/a", "", "1")), Judgement::Expected);
    assert_eq!(m.judge(&mutation(FileOp::Write, "/workspace/out/a", "1", "2")), Judgement::Expected);
    assert!(unexplained(&m.judge(&mutation(FileOp::Write, "/workspace/out/a", "1", "3"))), "it was 2");
    assert_eq!(m.judge(&mutation(FileOp::Write, "/workspace//out/./a", "3", "4")), Judgement::Expected);
    let modes = Mutation::new(
        FileOp::Chmod,
        "/workspace/out/a",
        metadata_digest(0o644, 1, 1),
        metadata_digest(0o755, 1, 1),
    );
    assert_eq!(m.judge(&modes.unwrap()), Judgement::Expected, "modes are not contents");
    assert_eq!(m.judge(&mutation(FileOp::Rename, "/workspace/out/a", "4", "")), Judgement::Expected);
    assert_eq!(m.judge(&mutation(FileOp::Rename, "/workspace/out/b", "", "4")), Judgement::Expected);
    assert_eq!(m.judge(&mutation(FileOp::Delete, "/workspace/out/b", "4", "")), Judgement::Expected);
}

#[test]
fn the_baseline_knows_what_the_image_held() {
    let other = mutation(FileOp::Write, "/workspace/given", "not g", "1");
    assert_eq!(monitor(false).judge(&other), Judgement::Expected, "nothing to compare with");
    assert!(unexplained(&monitor(true).judge(&other)));
    assert_eq!(
        monitor(true).judge(&mutation(FileOp::Write, "/workspace/given", "g", "1")),
        Judgement::Expected
    );
}

#[test]
fn a_fold_takes_the_baseline_that_its_spec_names_and_no_other() {
    let baseline = baseline();
    let mut draft = RunDraft::from_spec_json(&spec().to_json()).unwrap();
    assert!(matches!(
        VerdictFold::new(&draft.clone().seal().unwrap(), Some(&baseline)),
        Err(FoldError::OtherBaseline { named: None, .. })
    ));
    draft.baseline = Some(baseline.digest());
    let named = draft.clone().seal().unwrap();
    assert!(VerdictFold::new(&named, Some(&baseline)).is_ok());
    assert!(matches!(VerdictFold::new(&named, None), Err(FoldError::BaselineMissing(_))));
    draft.baseline = Some(Digest::of(b"another"));
    assert!(VerdictFold::new(&draft.seal().unwrap(), Some(&baseline)).is_err());
}

proptest! {
    #![proptest_config(common::cases(256))]

    #[test]
    fn no_spelling_makes_the_read_only_root_expected(tail in "(\\.\\.?|[a-z]{1,3}|workspace|tmp|etc|/){0,10}", root in "/(usr|etc|bin|lib|sbin|rootfs|opt)") {
        let path = format!("{root}/{tail}");
        let made = mutation(FileOp::Create, &path, "", "x");
        let judgement = monitor(true).judge(&made);
        match CleanPath::clean(&path) {
            Err(_) => prop_assert!(matches!(judgement, Judgement::Impossible(_))),
            Ok(clean) => {
                let writable = ["/workspace", "/tmp"].iter().any(|tree| clean.is_within(&CleanPath::clean(tree).unwrap()));
                prop_assert_eq!(matches!(judgement, Judgement::Impossible(_)), !writable, "{}", clean);
            }
        }
    }
}
