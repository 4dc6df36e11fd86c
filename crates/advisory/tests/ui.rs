//! What must not compile, with the compiler's own words, and a twin of each that does:
//! without the twin a misspelt name would pass as a proof.

#[test]
fn what_must_not_compile_does_not() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/fail/*.rs");
    cases.pass("tests/ui/pass/*.rs");
}

#[test]
fn each_case_has_its_twin() {
    let count = |dir: &str| {
        let entries = std::fs::read_dir(format!("{}/tests/ui/{dir}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        entries.filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|e| e == "rs")).count()
    };
    assert!(count("fail") > 0 && count("fail") == count("pass"));
}
