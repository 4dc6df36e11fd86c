//! Forms that an honest image may have: zstd layers, an index of several platforms, a
//! source that must still be what it was, compiled Python.

use crate::fixture::{Ground, Layer};
use hotcell_image::{Image, Limits, Recipe, Silent, Source};
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;

fn layer() -> Vec<u8> {
    Layer::default().file("etc/a", "1").file("etc/b", "2").end()
}

#[test]
fn layers_of_every_compression_give_one_root() {
    let plain = layer();
    let zstd =
        ruzstd::encoding::compress_to_vec(plain.as_slice(), ruzstd::encoding::CompressionLevel::Fastest);
    assert!(zstd.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]));
    let mut digests = Vec::new();
    for packed in [plain.clone(), crate::fixture::gzip(&plain), zstd.clone()] {
        let ground = Ground::new();
        ground.packed_layout(std::slice::from_ref(&plain), &[packed], "");
        digests.push(ground.build("test", &ground.recipe(), Limits::default()).unwrap().digest);
    }
    assert!(digests.iter().all(|digest| *digest == digests[0]));
    // Cut short, and with a byte changed that only its digests tell of.
    let ground = Ground::new();
    ground.packed_layout(std::slice::from_ref(&plain), &[zstd[..zstd.len() - 8].to_vec()], "");
    assert!(ground.build("test", &ground.recipe(), Limits::default()).is_err());
}

/// Puts the layout's image into an index, behind images of other platforms.
fn wrap(ground: &Ground, platforms: &[&str]) {
    let oci = ground.path().join("oci");
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(oci.join("index.json")).unwrap()).unwrap();
    let descriptor = &index["manifests"][0];
    let manifests: Vec<serde_json::Value> = platforms
        .iter()
        .map(|platform| {
            let (os, machine) = platform.split_once('/').unwrap();
            let platform = serde_json::json!({"os": os, "architecture": machine});
            let own = os == "linux" && machine == "amd64";
            let digest =
                if own { descriptor["digest"].clone() } else { format!("sha256:{}", "0".repeat(64)).into() };
            serde_json::json!({"digest": digest, "size": descriptor["size"], "platform": platform})
        })
        .collect();
    let inner = serde_json::json!({"schemaVersion": 2, "manifests": manifests}).to_string();
    let inner_descriptor = ground.blob(inner.as_bytes());
    let kind = "application/vnd.oci.image.index.v1+json";
    let outer = format!(r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{kind}",{inner_descriptor}}}]}}"#);
    fs::write(oci.join("index.json"), outer).unwrap();
}

#[test]
fn an_index_of_several_platforms_gives_the_one_of_this_machine() {
    let ground = Ground::new();
    let alone = ground.layers(&[layer()]).unwrap();
    wrap(&ground, &["linux/arm64", "windows/amd64", "linux/amd64"]);
    let chosen = ground.build("test", &ground.recipe(), Limits::default()).unwrap();
    assert_eq!((chosen.digest, chosen.details.resolved), (alone.digest, alone.details.resolved));
    ground.layout(&[layer()], "");
    wrap(&ground, &["linux/arm64", "linux/s390x"]);
    let error = ground.build("test", &ground.recipe(), Limits::default()).unwrap_err().to_string();
    assert!(error.contains("linux/amd64"), "{error}");
}

/// What no archive is, is said to be none, and its content is nobody's error.
#[test]
fn a_text_for_an_archive_is_said_to_be_none() {
    let ground = Ground::new();
    let text = tempfile::NamedTempFile::new().unwrap();
    fs::write(text.path(), "a secret of the operator's own\n".repeat(100)).unwrap();
    let recipe = Recipe::new(Source::DockerArchive(text.path().to_owned()));
    let error = ground.build("test", &recipe, Limits::default()).unwrap_err().to_string();
    assert!(error.contains(": it is no archive") && !error.contains("secret"), "{error}");
}

#[test]
fn a_source_that_changed_is_not_taken_for_what_it_was() {
    let ground = Ground::new();
    let image = ground.layers(&[layer()]).unwrap();
    let pinned = image.details.resolved.clone().unwrap();
    let again = |ground: &Ground| {
        ground.store.build_pinned("test", &image.details.recipe, &pinned, Limits::default(), &mut Silent)
    };
    assert_eq!(again(&ground).unwrap().digest, image.digest);
    ground.layout(&[Layer::default().file("etc/other", "x").end()], "");
    let error = again(&ground).unwrap_err().to_string();
    assert!(error.contains(&pinned) && error.contains("nothing was built"), "{error}");
    let kept = ground.store.image("test", &mut |_| ()).unwrap();
    assert_eq!(kept.digest, image.digest, "the old image stays");
}

/// The bytes of a file in the image's squashfs.
fn bytes(image: &Image, path: &str) -> Vec<u8> {
    let file = std::io::BufReader::new(fs::File::open(&image.root).unwrap());
    let reader = backhand::FilesystemReader::from_reader(file).unwrap();
    let node = reader.files().find(|node| node.fullpath == Path::new(path)).unwrap();
    let backhand::InnerNode::File(file) = &node.inner else { panic!("{path} is no file") };
    let mut bytes = Vec::new();
    reader.file(file).reader().read_to_end(&mut bytes).unwrap();
    bytes
}

/// What `import module` finds in a folder whose source has the time zero, as in an image:
/// the source says `new`, its compiled file `old`.
fn imported(compiled: &[u8], name: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("__pycache__")).unwrap();
    fs::write(dir.path().join("__pycache__").join(name), compiled).unwrap();
    let source = dir.path().join("module.py");
    fs::write(&source, "word = 'new'\n").unwrap();
    let epoch = std::time::SystemTime::UNIX_EPOCH;
    fs::File::options().write(true).open(&source).unwrap().set_modified(epoch).unwrap();
    let script = "import module; print(module.word)";
    let output = Command::new("python3").args(["-B", "-c", script]).current_dir(dir.path()).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn compiled_python_is_valid_in_the_image_where_it_was_before() {
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        eprintln!("NOT RUN: python3 is not installed");
        return;
    }
    let ground = Ground::new();
    let extra = ground.path().join("extra");
    fs::create_dir_all(&extra).unwrap();
    let source = extra.join("module.py");
    fs::write(&source, "word = 'old'\n").unwrap();
    let compile = "import py_compile; print(py_compile.compile('module.py'))";
    let output = Command::new("python3").args(["-c", compile]).current_dir(&extra).output().unwrap();
    let compiled = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    let name = compiled.rsplit('/').next().unwrap().to_owned();
    let before = fs::read(extra.join(&compiled)).unwrap();
    let build = || {
        let recipe = Recipe::new(Source::Folder(extra.clone()));
        let image = ground.build("python", &recipe, Limits::default()).unwrap();
        bytes(&image, &format!("/__pycache__/{name}"))
    };
    let inside = build();
    assert_eq!(imported(&inside, &name), "old", "Python takes the compiled file of the image");
    assert_eq!(imported(&before, &name), "new", "the control: as it was outside, it is not valid there");
    assert_eq!((&inside[..8], &inside[12..]), (&before[..8], &before[12..]), "only the time differs");
    // One that was not valid before does not become so.
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(1000);
    fs::File::options().write(true).open(&source).unwrap().set_modified(later).unwrap();
    assert_eq!(build(), before);
}
