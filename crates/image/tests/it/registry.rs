//! `docker://` against a registry on loopback.

use crate::fixture::{Ground, Layer, entry};
use hotcell_image::{Limits, Recipe, Source};
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Registry {
    child: Child,
    port: u16,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn registry(ground: &Ground) -> Option<Registry> {
    for program in ["docker-registry", "skopeo"] {
        if Command::new(program).arg("--version").output().is_err() {
            eprintln!("NOT RUN: {program} is not installed");
            return None;
        }
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let dir = ground.path().join("registry");
    fs::create_dir_all(&dir).unwrap();
    let config = dir.join("config.yml");
    let text = format!(
        "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n",
        dir.display()
    );
    fs::write(&config, text).unwrap();
    let child = Command::new("docker-registry")
        .arg("serve")
        .arg(&config)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let registry = Registry { child, port };
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(20), "the registry does not answer");
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(registry)
}

#[test]
fn an_image_of_a_registry_is_pinned_by_its_digest() {
    let ground = Ground::new();
    let Some(registry) = registry(&ground) else { return };
    let lower = Layer::default().file("etc/a", "1").file("etc/b", "2").end();
    let oci = ground.layout(&[lower, Layer::default().file("etc/.wh.a", "").end()], r#""User":"77""#);
    let name = format!("127.0.0.1:{}/team/tool", registry.port);
    let push = |tag: &str| {
        let output = Command::new("skopeo")
            .args(["--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false"])
            .arg(format!("oci:{}", oci.display()))
            .arg(format!("docker://{name}:{tag}"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    push("1");
    let recipe = |text: String| Recipe::new(Source::parse(&text, ground.path()).unwrap());
    let build = |text: String| ground.build("pulled", &recipe(text), Limits::default());
    let image = build(format!("docker://{name}:1")).unwrap();
    assert!(entry(&image, "/etc/a").is_none() && entry(&image, "/etc/b").is_some());
    assert_eq!(image.details.config.uid, 77);
    let pinned = image.details.recipe.source.to_string();
    assert_eq!(pinned, format!("docker://{name}@{}", image.details.resolved.clone().unwrap()));
    // The tag moves; what was built can still be built.
    ground.layout(&[Layer::default().file("etc/other", "x").end()], "");
    push("1");
    assert_ne!(build(format!("docker://{name}:1")).unwrap().digest, image.digest);
    assert_eq!(build(pinned).unwrap().digest, image.digest);
    // A digest that the registry does not have, and a blob that it changed.
    assert!(build(format!("docker://{name}@sha256:{}", "0".repeat(64))).is_err());
    assert!(build(format!("docker://{name}:none")).is_err());
}
