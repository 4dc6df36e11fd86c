//! What is refused is refused before anything exists, and touches nothing that was there.

use crate::lab::*;
use hotcell_decide::Verdict;
use hotcell_vm::Registry;
use std::fs;

fn assert_untouched(lab: &Lab, report: &hotcell_runtime::RunReport, words: &str) {
    assert_eq!(report.verdict, Verdict::Failed, "{report:?}");
    let error = report.error.clone().unwrap();
    assert!(error.contains(words), "{words:?} is not in {error:?}");
    assert!(lab.backend.log().is_empty(), "the backend was touched: {:?}", lab.backend.log());
    assert_eq!(report.bundle, None);
}

#[test]
fn another_image_than_the_spec_names_touches_no_backend_and_leaves_nothing() {
    for part in ["kernel", "initramfs", "root"] {
        let lab = Lab::honest();
        fs::write(lab.home.path().join(part), "another").unwrap();
        let run = lab.start();
        let early = exec(&run, &["true"]);
        let report = finish(run);
        assert_untouched(&lab, &report, "is not the one that the spec names");
        assert!(wait(early).is_err());
        assert!(lab.bundles().is_empty() && lab.registered().is_empty());
        // The twin with the right file runs.
        fs::write(lab.home.path().join(part), part).unwrap();
        assert_allowed(&lab, &lab.run(&["true"]).0);
    }
}

#[test]
fn a_bundle_that_exists_is_refused_and_not_adopted() {
    let lab = Lab::honest();
    let bundle = lab.home.path().join("out/run-00000001");
    fs::create_dir_all(&bundle).unwrap();
    fs::write(bundle.join("ledger.ames"), b"somebody's").unwrap();
    let report = finish(lab.start());
    assert_untouched(&lab, &report, "exists already");
    assert_eq!(fs::read(bundle.join("ledger.ames")).unwrap(), b"somebody's");
    assert_eq!(entries(&bundle).len(), 1, "nothing was added");
    assert!(lab.registered().is_empty());
    fs::remove_dir_all(&bundle).unwrap();
    assert_allowed(&lab, &lab.run(&["true"]).0);
}

#[test]
fn a_run_id_that_is_taken_is_refused_and_the_first_one_goes_on() {
    let lab = Lab::honest();
    let first = lab.start();
    let sleeper = exec(&first, &["sleep"]);
    until("the first run's start", || lab.backend.count(hotcell_testkit::Step::TakeChannel) == 1);
    let before = fs::read(lab.registered()[0].join("entry.json")).unwrap();
    let mut second = lab.runtime.clone();
    second.out = lab.home.path().join("elsewhere");
    let report = finish(second.start(lab.spec(|_| {}), lab.boot()));
    assert_eq!(report.verdict, Verdict::Failed);
    assert!(report.error.unwrap().contains("exists already"));
    assert!(entries(&second.out).is_empty(), "its bundle is gone again");
    assert_eq!(fs::read(lab.registered()[0].join("entry.json")).unwrap(), before);
    first.interrupter().interrupt(2);
    assert_eq!(wait(sleeper).unwrap().code, 137);
    assert_allowed(&lab, &finish(first));
}

#[test]
fn fifty_runs_of_one_name_at_once_are_one_run_and_forty_nine_refusals() {
    let lab = Lab::honest();
    let outs: Vec<_> = (0..50).map(|i| lab.home.path().join(format!("out-{i}"))).collect();
    let runs: Vec<_> = outs
        .iter()
        .map(|out| {
            let mut runtime = lab.runtime.clone();
            runtime.out.clone_from(out);
            runtime.start(lab.spec(|_| {}), lab.boot())
        })
        .collect();
    // Each that started holds its name until it is finished.
    until("every start", || {
        let held = outs.iter().filter(|out| !entries(out).is_empty()).count();
        held == 1 && lab.backend.count(hotcell_testkit::Step::Facts) >= 1
    });
    let reports: Vec<_> = runs.into_iter().map(finish).collect();
    let allowed = reports.iter().filter(|report| report.verdict == Verdict::Allowed).count();
    let refused = reports.iter().filter(|report| report.bundle.is_none()).count();
    assert!(allowed >= 1 && allowed + refused == 50, "{allowed} ran, {refused} were refused");
    assert_eq!(lab.backend.count(hotcell_testkit::Step::Start), allowed);
    lab.assert_all_gone();
}

#[test]
fn an_out_folder_that_can_not_be_made_is_named() {
    let mut lab = Lab::honest();
    lab.runtime.out = lab.home.path().join("kernel/below-a-file");
    let report = finish(lab.start());
    assert_untouched(&lab, &report, "--out");
    assert!(lab.registered().is_empty());
}

#[test]
fn a_registry_that_is_gone_is_named_and_the_bundle_with_it() {
    let lab = Lab::honest();
    fs::remove_dir_all(lab.home.path().join("live")).unwrap();
    let report = finish(lab.start());
    assert_untouched(&lab, &report, "registry");
    assert!(lab.bundles().is_empty());
    Registry::open(&lab.home.path().join("live")).unwrap();
    assert_allowed(&lab, &lab.run(&["true"]).0);
}
