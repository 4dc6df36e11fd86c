//! Each attack of a layer, and what comes of it: a clear error or a safe result.

use crate::fixture::{Ground, Layer, entry, gzip, hex};
use hotcell_image::Limits;
use std::fs;

#[test]
fn a_name_that_leads_up_is_refused_and_an_absolute_one_is_the_images_own() {
    for name in ["../escape", "a/../../escape", "/../escape", "a/.."] {
        Ground::new().refused(Layer::default().file(name, "x").end(), "`..`");
    }
    let image = Ground::new().layers(&[Layer::default().file("/etc/absolute", "x").end()]).unwrap();
    assert!(entry(&image, "/etc/absolute").is_some());
}

#[test]
fn a_write_through_a_link_out_of_the_root_stays_in_the_image() {
    let ground = Ground::new();
    let outside = ground.path().to_str().unwrap().to_owned();
    let layer = Layer::default()
        .symlink("out", &outside)
        .file("out/canary", "dead")
        .symlink("up", "../../../../..")
        .file("up/tmp/up", "x")
        .symlink("loop", "loop2")
        .symlink("loop2", "loop");
    let image = ground.layers(&[layer.end()]).unwrap();
    // As in a chroot: the link leads to this path inside.
    assert_eq!(entry(&image, &format!("{outside}/canary")).as_deref(), Some("file 4 644"));
    assert_eq!(entry(&image, "/tmp/up").as_deref(), Some("file 1 644"));
    let maze = Layer::default().symlink("a", "b").symlink("b", "a").file("a/x", "x").end();
    Ground::new().refused(maze, "too many symbolic links");
}

#[test]
fn a_hard_link_leads_to_files_of_the_image_only() {
    for target in ["/etc/passwd", "missing", "d"] {
        let layer = Layer::default().dir("d").hard_link("h", target).end();
        Ground::new().refused(layer, "hard link");
    }
    Ground::new().refused(Layer::default().hard_link("h", "../../etc/passwd").end(), "`..`");
    let through = Layer::default().symlink("l", "/").hard_link("h", "l/etc/shadow").end();
    Ground::new().refused(through, "not in the image");
    let image = Ground::new().layers(&[Layer::default().file("a", "xyz").hard_link("h", "a").end()]).unwrap();
    assert_eq!(entry(&image, "/h").as_deref(), Some("file 3 644"));
}

#[test]
fn devices_fifos_and_unknown_kinds_never_come_into_being() {
    let layer = Layer::default()
        .raw(b'3', b"dev/mem", b"", 0o666, 0, b"")
        .raw(b'4', b"dev/sda", b"", 0o666, 0, b"")
        .raw(b'6', b"fifo", b"", 0o666, 0, b"");
    let image = Ground::new().layers(&[layer.end()]).unwrap();
    assert!(entry(&image, "/dev/mem").is_none() && entry(&image, "/fifo").is_none());
    let left_out: Vec<_> = image.details.left_out.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
    assert_eq!(left_out, ["1 FIFOs", "2 device nodes"]);
    // A socket has no tar type; GNU sparse and what nobody knows are refused.
    for kind in *b"sSVMDZ\x01" {
        assert!(Ground::new().layers(&[Layer::default().raw(kind, b"s", b"", 0o644, 0, b"").end()]).is_err());
    }
}

#[test]
fn sizes_that_lie_are_found() {
    for size in [513, 1 << 20, 1 << 40, u64::MAX, u64::MAX / 2] {
        let layer = Layer::default().raw(b'0', b"f", b"", 0o644, size, b"x").cut();
        assert!(Ground::new().layers(&[layer]).is_err(), "{size}");
    }
    let two = Layer::default().raw(b'x', b"p", b"", 0o644, 9, b"9 size=5\n").file("f", "xyz").end();
    Ground::new().refused(two, "two sizes");
    let big_name = Layer::default().raw(b'L', b"l", b"", 0o644, 1 << 33, b"x").cut();
    Ground::new().refused(big_name, "a header in it has");
    let sparse = b"22 GNU.sparse.major=1\n";
    let sparse = Layer::default().raw(b'x', b"p", b"", 0o644, 22, sparse).file("f", "x").end();
    Ground::new().refused(sparse, "sparse");
}

#[test]
fn a_million_entries_and_deep_and_long_names_are_bounded() {
    let mut layer = Layer::default();
    for at in 0..1_000 {
        layer = layer.file(&format!("f{at}"), "");
    }
    let ground = Ground::new();
    ground.layout(&[layer.end()], "");
    let few = Limits { entries: 999, ..Limits::default() };
    let error = ground.build("test", &ground.recipe(), few).unwrap_err().to_string();
    assert!(error.contains("more than 999 entries"), "{error}");
    let short = Limits { name_bytes: 100, ..Limits::default() };
    assert!(ground.build("test", &ground.recipe(), short).unwrap_err().to_string().contains("names"));
    // A directory of a thousand names needs squashfs's larger inode.
    assert!(ground.build("test", &ground.recipe(), Limits::default()).is_ok());

    let name = "n".repeat(255);
    let image = Ground::new().layers(&[Layer::default().long(&name, "x").end()]).unwrap();
    assert!(entry(&image, &format!("/{name}")).is_some());
    Ground::new().refused(Layer::default().long(&"n".repeat(256), "x").end(), "longer than 255");
    Ground::new().refused(Layer::default().long(&"a/".repeat(200), "x").end(), "folders deep");
    Ground::new().refused(Layer::default().long(&"a/".repeat(3000), "x").end(), "folders deep");
}

#[test]
fn the_real_bound_on_entries_holds() {
    let mut layer = Layer::default();
    for at in 0..=Limits::default().entries {
        // One name over and over: the tree stays small, the count does not.
        layer = layer.file(if at % 2 == 0 { "a" } else { "b" }, "");
    }
    Ground::new().refused(layer.end(), "more than 500000 entries");
}

#[test]
fn a_bomb_stops_at_the_declared_total() {
    let data = vec![0u8; 64 << 20];
    let layer = Layer::default().raw(b'0', b"bomb", b"", 0o644, data.len() as u64, &data).end();
    let packed = gzip(&layer);
    assert!(packed.len() < 1 << 20);
    let ground = Ground::new();
    ground.packed_layout(&[layer], &[packed], "");
    let limits = Limits { bytes: 8 << 20, ..Limits::default() };
    let error = ground.build("test", &ground.recipe(), limits).unwrap_err().to_string();
    assert!(error.contains("too much"), "{error}");
    // The same behind the archive's end, where no entry is.
    let mut tail = Layer::default().file("a", "x").end();
    tail.resize(64 << 20, 0);
    ground.layout(&[tail], "");
    assert!(ground.build("test", &ground.recipe(), limits).is_err());
}

#[test]
fn strange_names_are_names() {
    let layer =
        Layer::default().file("new\nline", "x").file("Case", "1").file("case", "22").file("\u{1b}[31m", "x");
    let image = Ground::new().layers(&[layer.end()]).unwrap();
    assert!(entry(&image, "/new\nline").is_some());
    assert_eq!(entry(&image, "/Case").as_deref(), Some("file 1 644"));
    assert_eq!(entry(&image, "/case").as_deref(), Some("file 2 644"));
    let latin = Layer::default().raw(b'0', b"caf\xe9", b"", 0o644, 0, b"").end();
    Ground::new().refused(latin, "not UTF-8");
}

#[test]
fn set_id_bits_go_unless_they_are_asked_for() {
    let layer = Layer::default().mode("su", 0o4755).mode("sg", 0o2755).end();
    let ground = Ground::new();
    let image = ground.layers(std::slice::from_ref(&layer)).unwrap();
    assert_eq!(entry(&image, "/su").as_deref(), Some("file 1 755"));
    assert_eq!(image.details.left_out["set-user-id and set-group-id bits"], 2);
    let mut recipe = ground.recipe();
    recipe.keep_setuid = true;
    let image = ground.build("test", &recipe, Limits::default()).unwrap();
    assert_eq!(entry(&image, "/su").as_deref(), Some("file 1 4755"));
}

#[test]
fn the_last_of_duplicated_entries_counts() {
    let layer = Layer::default().file("a", "1").file("a", "22").dir("d").file("d/x", "x").file("d", "file");
    let image = Ground::new().layers(&[layer.symlink("s", "a").file("s", "plain").end()]).unwrap();
    assert_eq!(entry(&image, "/a").as_deref(), Some("file 2 644"));
    assert_eq!(entry(&image, "/d").as_deref(), Some("file 4 644"));
    assert!(entry(&image, "/d/x").is_none());
    assert_eq!(entry(&image, "/s").as_deref(), Some("file 5 644"));
    Ground::new().refused(Layer::default().file("f", "x").file("f/below", "x").end(), "no directory");
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_else() {
    let lower = Layer::default().file("etc/a", "x").file("etc/b", "x").file("d/old", "x").file("d-e", "x");
    let upper = Layer::default().file("etc/.wh.a", "").file("d/new", "x").file("d/.wh..wh..opq", "");
    let image = Ground::new().layers(&[lower.end(), upper.end()]).unwrap();
    let has = |path: &str| entry(&image, path).is_some();
    assert!(!has("/etc/a") && has("/etc/b") && !has("/d/old") && has("/d/new") && has("/d-e"));
    assert!(!has("/etc/.wh.a") && !has("/d/.wh..wh..opq"));
}

#[test]
fn a_whiteout_of_the_root_or_of_no_name_does_no_harm() {
    for name in [".wh.", ".wh..", ".wh...", "etc/.wh.."] {
        Ground::new().refused(Layer::default().file(name, "").end(), "whiteout of no name");
    }
    let lower = Layer::default().file("a", "x").end();
    let image = Ground::new().layers(&[lower, Layer::default().file(".wh..wh..opq", "").end()]).unwrap();
    assert!(entry(&image, "/a").is_none() && entry(&image, "/usr/bin/hotcell-request").is_some());
    let through = Layer::default().symlink("l", "/").file("l/.wh.x", "").end();
    assert!(Ground::new().layers(&[through]).is_ok());
}

#[test]
fn blobs_that_are_other_ones_or_missing_are_refused() {
    let layer = Layer::default().file("a", "x").end();
    let (ground, packed) = (Ground::new(), gzip(&layer));
    let oci = ground.layout(std::slice::from_ref(&layer), "");
    let blob = oci.join("blobs/sha256").join(hex(&packed));
    let build = || ground.build("test", &ground.recipe(), Limits::default());
    let old = build().unwrap();
    let mut changed = packed.clone();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    for bytes in [changed, gzip(&Layer::default().file("a", "y").end()), Vec::new(), packed[..40].to_vec()] {
        fs::write(&blob, bytes).unwrap();
        assert!(build().is_err());
    }
    fs::remove_file(&blob).unwrap();
    assert!(build().is_err());
    std::os::unix::fs::symlink("/etc/hostname", &blob).unwrap();
    assert!(build().unwrap_err().to_string().contains("can't be opened"));
    // The image that was there is there, unchanged.
    assert_eq!(ground.store.image("test", &mut |_| ()).unwrap().digest, old.digest);
    // The layer is right, but unpacks to something else than the configuration says.
    let other = Layer::default().file("a", "z").end();
    ground.packed_layout(&[layer], &[gzip(&other)], "");
    assert!(build().unwrap_err().to_string().contains("unpacked, its digest"));
}

#[test]
fn json_that_is_huge_or_no_json_is_refused() {
    let ground = Ground::new();
    let oci = ground.layout(&[], "");
    for text in ["", "{", "[]", &"[".repeat(100_000), &format!("{{\"x\":\"{}\"}}", "y".repeat(5 << 20))] {
        fs::write(oci.join("index.json"), text).unwrap();
        assert!(ground.build("test", &ground.recipe(), Limits::default()).is_err());
    }
    let digest = r#"{"manifests":[{"digest":"sha256:../../../canary","size":5}]}"#;
    fs::write(oci.join("index.json"), digest).unwrap();
    let error = ground.build("test", &ground.recipe(), Limits::default()).unwrap_err().to_string();
    assert!(error.contains("no sha256 digest"), "{error}");
}

#[test]
fn a_file_in_the_place_of_a_mount_point_is_refused() {
    for point in ["proc", "workspace", "dev"] {
        Ground::new().refused(Layer::default().file(point, "x").end(), "must be a directory");
        Ground::new().refused(Layer::default().symlink(point, "/etc").end(), "must be a directory");
    }
}
