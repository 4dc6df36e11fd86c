//! A page is made of intact bundles alone, and what the bundle says stays text.

use hotcell_report::render;
use hotcell_verify::{Options, verify_bundle};

mod common;

#[test]
fn the_page_has_the_verdict_and_escapes_what_the_guest_said() {
    let bundle = common::bundle("<script>alert('x')</script>");
    let verified = verify_bundle(bundle.path(), &Options::default()).unwrap().into_verified();
    let page = render(&verified.unwrap_or_else(|v| panic!("{}", hotcell_verify::to_text(&v)))).unwrap();
    assert!(page.contains("ALLOWED") && page.contains("hotcell.teardown"));
    assert!(!page.contains("<script") && page.contains("&lt;script&gt;alert"), "{page}");
    assert!(page.contains("tr class=\"said\""), "testimony is not told apart");
    assert!(page.contains("1 change of a file") && page.contains("file create"), "{page}");
}

#[test]
fn no_page_of_a_bundle_that_is_not_intact_or_changed_after_it_was_verified() {
    let bundle = common::bundle("fine");
    let verified = verify_bundle(bundle.path(), &Options::default()).unwrap().into_verified().ok().unwrap();
    let ledger = bundle.path().join("ledger.ames");
    let mut bytes = std::fs::read(&ledger).unwrap();
    let last = bytes.len() - 1;
    bytes[last - 60] ^= 1;
    std::fs::write(&ledger, bytes).unwrap();
    assert!(render(&verified).is_err(), "a bundle that changed was drawn");
    let again = verify_bundle(bundle.path(), &Options::default()).unwrap();
    assert!(again.into_verified().is_err());
}
