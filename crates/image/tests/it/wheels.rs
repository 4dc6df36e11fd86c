//! Wheels: pinned ones are installed, what a wheel should not do is refused.

use crate::fixture::{Ground, Layer, entry, hex};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hotcell_image::{Image, ImageError, Limits, Pin, Silent};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::Write;
use std::process::Command;

struct Wheel {
    members: Vec<(String, Vec<u8>)>,
    /// Instead of what RECORD should say.
    record: Option<String>,
}

impl Wheel {
    fn new() -> Wheel {
        let member = |name: &str, text: &str| (name.to_owned(), text.as_bytes().to_vec());
        Wheel {
            members: vec![
                member("tiny/__init__.py", "def main():\n    print('tiny')\n"),
                member("tiny-1.0.data/scripts/tool", "#!python\nprint(1)\n"),
                member(
                    "tiny-1.0.dist-info/WHEEL",
                    "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                ),
                member("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"),
                member("tiny-1.0.dist-info/entry_points.txt", "[console_scripts]\ntiny-run = tiny:main\n"),
            ],
            record: None,
        }
    }

    fn and(mut self, name: &str, text: &str) -> Wheel {
        self.members.push((name.to_owned(), text.as_bytes().to_vec()));
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut record = String::new();
        for (name, bytes) in &self.members {
            let sum = URL_SAFE_NO_PAD.encode(Sha256::digest(bytes));
            record.push_str(&format!("{name},sha256={sum},{}\n", bytes.len()));
        }
        let record = self.record.clone().unwrap_or(record);
        let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
        let options = zip::write::SimpleFileOptions::default();
        for (name, bytes) in &self.members {
            zip.start_file(name.as_str(), options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.start_file("tiny-1.0.dist-info/RECORD", options).unwrap();
        zip.write_all(record.as_bytes()).unwrap();
        zip.finish().unwrap().into_inner()
    }

    /// Builds an image with a Python in name and this wheel in it; `None` where there is no pip.
    fn install(&self, ground: &Ground, hash: Option<&str>) -> Option<Result<Image, ImageError>> {
        if !Command::new("python3")
            .args(["-m", "pip", "--version"])
            .output()
            .is_ok_and(|out| out.status.success())
        {
            eprintln!("NOT RUN: python3 has no pip");
            return None;
        }
        let bytes = self.bytes();
        let extra = ground.path().join("extra");
        fs::create_dir_all(&extra).unwrap();
        fs::write(extra.join("tiny-1.0-py3-none-any.whl"), &bytes).unwrap();
        let hash = hash.map_or_else(|| hex(&bytes), str::to_owned);
        let requirements = extra.join("requirements.txt");
        let text = format!("--no-index\n--find-links {}\ntiny==1.0 --hash=sha256:{hash}\n", extra.display());
        fs::write(&requirements, text).unwrap();
        let layer =
            Layer::default().mode("usr/bin/python3.11", 0o755).symlink("usr/bin/python3", "python3.11");
        ground.layout(&[layer.file("etc/debian_version", "12").end()], "");
        Some(ground.store.build("py", &ground.recipe(), Some(&requirements), Limits::default(), &mut Silent))
    }

    fn refused(&self, why: &str) {
        if let Some(built) = self.install(&Ground::new(), None) {
            let error = built.unwrap_err().to_string();
            assert!(error.contains(why), "{error:?} does not say {why:?}");
        }
    }
}

#[test]
fn a_pinned_wheel_is_installed_with_its_scripts_and_record() {
    let ground = Ground::new();
    let wheel = Wheel::new();
    let Some(image) = wheel.install(&ground, None) else { return };
    let image = image.unwrap();
    let site = "/usr/local/lib/python3.11/dist-packages";
    assert_eq!(entry(&image, &format!("{site}/tiny/__init__.py")).as_deref(), Some("file 30 644"));
    // `#!python` became the image's own.
    assert_eq!(entry(&image, "/usr/local/bin/tool").as_deref(), Some("file 31 755"));
    assert!(entry(&image, "/usr/local/bin/tiny-run").unwrap().ends_with(" 755"));
    assert!(entry(&image, &format!("{site}/tiny-1.0.dist-info/RECORD")).is_some());
    assert_eq!(image.details.recipe.pins[0].to_string(), format!("tiny==1.0 sha256:{}", hex(&wheel.bytes())));
    let again = Ground::new();
    assert_eq!(wheel.install(&again, None).unwrap().unwrap().digest, image.digest);
}

#[test]
fn another_hash_and_no_python_are_refused() {
    let zeros = "0".repeat(64);
    let Some(built) = Wheel::new().install(&Ground::new(), Some(&zeros)) else { return };
    assert!(built.is_err());
    let ground = Ground::new();
    ground.layout(&[Layer::default().file("a", "x").end()], "");
    let mut recipe = ground.recipe();
    recipe.pins = vec![Pin::parse(&format!("tiny==1.0 sha256:{zeros}")).unwrap()];
    let error = ground.build("py", &recipe, Limits::default()).unwrap_err().to_string();
    assert!(error.contains("no python3"), "{error}");
    for bad in ["tiny", "tiny==1.0", "tiny==1.0 sha256:00", "../x==1 sha256:00", "-r==1 sha256:00"] {
        assert!(Pin::parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_hostile_wheel_is_refused() {
    Wheel::new().and("../../../../etc/passwd", "x").refused("`..`");
    Wheel::new().and("/etc/passwd", "x").refused("no name for a wheel");
    Wheel::new().and("a\\b", "x").refused("no name for a wheel");
    Wheel::new().and("tiny-1.0.data/scripts/../../x", "x").refused("`..`");
    Wheel::new().and("tiny-1.0.data/elsewhere/x", "x").refused("no known folder");
    Wheel { record: Some(String::new()), ..Wheel::new() }.refused("RECORD says");
    let mut wheel = Wheel::new();
    wheel.members[4].1 = b"[console_scripts]\nx;y = tiny:main\n".to_vec();
    wheel.refused("entry point");
    wheel.members[4].1 = b"[console_scripts]\n../../bin/sh = tiny:main\n".to_vec();
    wheel.refused("entry point");
}
