//! Honest sources, and what an image says about itself.

use crate::fixture::{Ground, Layer, entry};
use hotcell_image::{Limits, Recipe, Source};
use std::fs;
use std::process::Command;

const CONFIG: &str = r#""Env":["PATH=/opt/bin:/bin","A=b=c"],"WorkingDir":"/srv/app","User":"web","Entrypoint":["/bin/e"],"Cmd":["c"]"#;

fn accounts() -> Layer {
    Layer::default()
        .file("etc/passwd", "root:x:0:0::/:/bin/sh\nweb:x:33:44::/:/bin/sh")
        .file("etc/group", "root:x:0:\nstaff:x:50:\n")
}

#[test]
fn the_configuration_is_read_and_its_user_found_in_the_image() {
    let ground = Ground::new();
    let user = |config: &str| {
        ground.layout(&[accounts().end()], config);
        ground.build("test", &ground.recipe(), Limits::default()).map(|image| image.details.config)
    };
    let config = user(CONFIG).unwrap();
    assert_eq!((config.uid, config.gid, config.workdir.as_deref()), (33, 44, Some("/srv/app")));
    assert_eq!(config.env, [("PATH".into(), "/opt/bin:/bin".into()), ("A".into(), "b=c".into())]);
    assert_eq!((config.entrypoint, config.cmd), (vec!["/bin/e".into()], vec!["c".to_owned()]));
    for (text, ids) in [
        ("", (1000, 1000)),
        ("0", (1000, 1000)),
        ("root", (1000, 1000)),
        ("33", (33, 44)),
        ("web:staff", (33, 50)),
        ("1234:5678", (1234, 5678)),
        ("1234:0", (1234, 1234)),
    ] {
        let config = user(&format!(r#""User":"{text}""#)).unwrap();
        assert_eq!((config.uid, config.gid), ids, "{text}");
    }
    for bad in ["nobody-here", "web:no-group", "4294967295", "-1"] {
        assert!(user(&format!(r#""User":"{bad}""#)).is_err(), "{bad}");
    }
    assert!(user(r#""Env":["=x"]"#).is_err());
    assert!(user(r#""WorkingDir":"../x""#).is_err());
    assert!(user(r#""WorkingDir":"relative""#).is_err());
}

#[test]
fn every_image_has_what_the_machine_needs() {
    let image = Ground::new().layers(&[accounts().end()]).unwrap();
    for point in ["/dev", "/proc", "/sys", "/tmp", "/run", "/workspace", "/mnt"] {
        assert_eq!(entry(&image, point).as_deref(), Some("directory"), "{point}");
    }
    assert_eq!(entry(&image, "/usr/bin/hotcell-request").as_deref(), Some("file 7 755"));
    // The accounts got a newline and the agent's line.
    assert_eq!(entry(&image, "/etc/passwd").as_deref(), Some("file 88 644"));
}

#[test]
fn the_same_source_gives_the_same_bytes_and_another_one_others() {
    let ground = Ground::new();
    let first = ground.layers(&[accounts().end()]).unwrap();
    let other = Ground::new();
    let second = other.layers(&[accounts().end()]).unwrap();
    assert_eq!((first.digest, &first.details.manifest), (second.digest, &second.details.manifest));
    assert_ne!(other.layers(&[accounts().file("x", "y").end()]).unwrap().digest, first.digest);
    let busybox = |ground: &Ground| ground.build("busybox", &Recipe::new(Source::Busybox), Limits::default());
    assert_eq!(busybox(&ground).unwrap().digest, busybox(&other).unwrap().digest);
    assert!(ground.build("busybox", &ground.recipe(), Limits::default()).is_err());
}

#[test]
fn a_folder_becomes_a_root_and_its_strange_files_do_not() {
    let ground = Ground::new();
    let extra = ground.path().join("extra");
    fs::create_dir_all(extra.join("bin")).unwrap();
    fs::write(extra.join("bin/tool"), "#!/bin/sh\n").unwrap();
    std::os::unix::fs::symlink("/etc/shadow", extra.join("bin/link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(extra.join("socket")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, extra.join("fifo"), rustix::fs::Mode::RUSR).unwrap();
    let image = ground.build("dir", &Recipe::new(Source::Folder(extra)), Limits::default()).unwrap();
    assert_eq!(entry(&image, "/bin/link").as_deref(), Some("link /etc/shadow"));
    assert_eq!(entry(&image, "/bin/tool").as_deref(), Some("file 10 644"));
    assert!(entry(&image, "/socket").is_none() && entry(&image, "/fifo").is_none());
    ground.store.remove("dir").unwrap();
    assert!(ground.store.remove("dir").is_err());
}

#[test]
fn two_builds_of_one_name_at_once_end_with_one_image() {
    let ground = Ground::new();
    ground.layout(&[accounts().end()], "");
    let built: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let build = || {
                    let recipe = ground.recipe();
                    ground.store.build("same", &recipe, None, Limits::default(), &mut hotcell_image::Silent)
                };
                scope.spawn(move || build().unwrap().digest)
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(built.iter().all(|digest| *digest == built[0]));
}

fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("NOT RUN: {program} is not installed");
    }
    found
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An image by umoci with a whiteout, as layout and through skopeo as docker-archive.
#[test]
fn images_of_other_tools_are_read_and_all_forms_give_one_root() {
    if !has("umoci") || !has("skopeo") {
        return;
    }
    let ground = Ground::new();
    let extra = ground.path().join("extra");
    fs::create_dir_all(&extra).unwrap();
    let text = |name: &str| extra.join(name).to_str().unwrap().to_owned();
    let tag = format!("{}:one", text("layout"));
    run("umoci", &["init", "--layout", &text("layout")]);
    run("umoci", &["new", "--image", &tag]);
    run("umoci", &["unpack", "--rootless", "--image", &tag, &text("bundle")]);
    fs::create_dir_all(extra.join("bundle/rootfs/etc")).unwrap();
    fs::write(extra.join("bundle/rootfs/etc/keep"), "keep").unwrap();
    fs::write(extra.join("bundle/rootfs/etc/gone"), "gone").unwrap();
    run("umoci", &["repack", "--refresh-bundle", "--image", &tag, &text("bundle")]);
    fs::remove_file(extra.join("bundle/rootfs/etc/gone")).unwrap();
    run("umoci", &["repack", "--image", &tag, &text("bundle")]);
    run("umoci", &["config", "--image", &tag, "--config.workingdir", "/srv", "--config.env", "X=y"]);
    run(
        "skopeo",
        &[
            "--insecure-policy",
            "copy",
            &format!("oci:{tag}"),
            &format!("docker-archive:{}", text("saved.tar")),
        ],
    );
    let oci = Recipe::new(Source::parse(&format!("oci:{tag}"), ground.path()).unwrap());
    let first = ground.build("oci", &oci, Limits::default()).unwrap();
    assert_eq!(entry(&first, "/etc/keep").as_deref(), Some("file 4 644"));
    assert!(entry(&first, "/etc/gone").is_none());
    assert_eq!(first.details.config.workdir.as_deref(), Some("/srv"));
    assert_eq!(ground.build("oci", &oci, Limits::default()).unwrap().digest, first.digest);
    let saved = Recipe::new(Source::DockerArchive(text("saved.tar").into()));
    assert_eq!(ground.build("saved", &saved, Limits::default()).unwrap().digest, first.digest);
}
