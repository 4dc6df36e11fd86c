//! `debian:SUITE`, the smallest there is. Needs mmdebstrap and a mirror: without them the
//! test says that it did not run.

use crate::fixture::{Ground, entry};
use hotcell_image::{Limits, Recipe, Source};
use std::process::Command;

#[test]
fn a_minimal_debian_becomes_an_image_without_what_tells_of_its_build() {
    // Fetches the mirror's lists and no package.
    let simulate =
        Command::new("mmdebstrap").args(["--simulate", "--variant=minbase", "bookworm", "-"]).output();
    if !simulate.is_ok_and(|output| output.status.success()) {
        eprintln!("NOT RUN: no mmdebstrap, or no mirror answers it");
        return;
    }
    let ground = Ground::new();
    let recipe = Recipe::new(Source::parse("debian:bookworm", ground.path()).unwrap());
    let image = ground.build("debian", &recipe, Limits::default()).unwrap();
    for path in ["/usr/bin/dpkg", "/etc/debian_version", "/usr/bin/hotcell-request", "/etc/hostname"] {
        assert!(entry(&image, path).is_some_and(|entry| entry.starts_with("file")), "{path}");
    }
    assert_eq!(
        entry(&image, "/bin/sh").or_else(|| entry(&image, "/usr/bin/sh")).as_deref(),
        Some("link dash")
    );
    for path in ["/var/log/bootstrap.log", "/var/log/dpkg.log", "/etc/resolv.conf"] {
        assert!(entry(&image, path).is_none(), "{path}");
    }
    // A directory's bit gives its group to new files in it, and raises nobody.
    let set_id = image.manifest.entries().filter(|(_, entry)| {
        entry.mode & 0o6000 != 0 && matches!(entry.kind, hotcell_policy::EntryKind::File { .. })
    });
    assert_eq!(set_id.count(), 0);
    assert!(
        image.details.left_out.keys().any(|kind| kind.contains("set-user-id")),
        "{:?}",
        image.details.left_out
    );
    let devices = image.manifest.entries().filter(|(path, _)| path.as_str().starts_with("/dev/"));
    assert_eq!(devices.filter(|(_, entry)| entry.is_executable()).count(), 0);
}
