//! Layers, OCI layouts and a store in a folder that goes with the test.

use hotcell_image::{Guest, Image, ImageError, Limits, Recipe, Silent, Source, Store};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

pub(crate) fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A tar with whatever headers are asked for.
#[derive(Default)]
pub(crate) struct Layer(Vec<u8>);

impl Layer {
    pub(crate) fn raw(
        mut self,
        kind: u8,
        name: &[u8],
        link: &[u8],
        mode: u32,
        size: u64,
        data: &[u8],
    ) -> Layer {
        let mut block = [0u8; 512];
        assert!(name.len() <= 100 && link.len() <= 100);
        block[..name.len()].copy_from_slice(name);
        block[100..107].copy_from_slice(format!("{mode:07o}").as_bytes());
        block[108..115].copy_from_slice(b"0000000");
        block[116..123].copy_from_slice(b"0000000");
        if size < 1 << 33 {
            block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
        } else {
            block[124] = 0x80;
            block[128..136].copy_from_slice(&size.to_be_bytes());
        }
        block[136..147].copy_from_slice(b"00000000000");
        block[156] = kind;
        block[157..157 + link.len()].copy_from_slice(link);
        block[257..265].copy_from_slice(b"ustar\x0000");
        block[148..156].copy_from_slice(b"        ");
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        self.0.extend(block);
        self.0.extend(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(crate) fn file(self, name: &str, text: &str) -> Layer {
        self.raw(b'0', name.as_bytes(), b"", 0o644, text.len() as u64, text.as_bytes())
    }

    pub(crate) fn mode(self, name: &str, mode: u32) -> Layer {
        self.raw(b'0', name.as_bytes(), b"", mode, 1, b"x")
    }

    pub(crate) fn dir(self, name: &str) -> Layer {
        self.raw(b'5', name.as_bytes(), b"", 0o755, 0, b"")
    }

    pub(crate) fn symlink(self, name: &str, target: &str) -> Layer {
        self.raw(b'2', name.as_bytes(), target.as_bytes(), 0o777, 0, b"")
    }

    pub(crate) fn hard_link(self, name: &str, target: &str) -> Layer {
        self.raw(b'1', name.as_bytes(), target.as_bytes(), 0o644, 0, b"")
    }

    pub(crate) fn long(self, name: &str, text: &str) -> Layer {
        let size = name.len() as u64 + 1;
        let data = [name.as_bytes(), b"\0"].concat();
        self.raw(b'L', b"././@LongLink", b"", 0o644, size, &data).file("x", text)
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.0.extend([0; 1024]);
        self.0
    }

    pub(crate) fn cut(self) -> Vec<u8> {
        self.0
    }
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

/// A folder with a store, a layout, and a canary beside them.
pub(crate) struct Ground {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) store: Store,
}

impl Ground {
    pub(crate) fn new() -> Ground {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("canary"), "alive").unwrap();
        let guest = Guest { init: b"init", request: b"request" };
        let store = Store::new(&dir.path().join("cache"), &dir.path().join("images"), guest);
        Ground { dir, store }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn blob(&self, bytes: &[u8]) -> String {
        let dir = self.path().join("oci/blobs/sha256");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(hex(bytes)), bytes).unwrap();
        format!(r#""digest":"sha256:{}","size":{}"#, hex(bytes), bytes.len())
    }

    /// Writes a layout; `config` is the inside of the `config` object.
    pub(crate) fn layout(&self, layers: &[Vec<u8>], config: &str) -> PathBuf {
        let packed: Vec<Vec<u8>> = layers.iter().map(|layer| gzip(layer)).collect();
        self.packed_layout(layers, &packed, config)
    }

    pub(crate) fn packed_layout(&self, plain: &[Vec<u8>], packed: &[Vec<u8>], config: &str) -> PathBuf {
        let ids: Vec<String> = plain.iter().map(|layer| format!(r#""sha256:{}""#, hex(layer))).collect();
        let json = format!(
            r#"{{"os":"linux","architecture":"amd64","config":{{{config}}},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
            ids.join(",")
        );
        let config = self.blob(json.as_bytes());
        let layers: Vec<String> = packed.iter().map(|layer| format!("{{{}}}", self.blob(layer))).collect();
        let manifest =
            format!(r#"{{"schemaVersion":2,"config":{{{config}}},"layers":[{}]}}"#, layers.join(","));
        let manifest = self.blob(manifest.as_bytes());
        let oci = self.path().join("oci");
        fs::write(oci.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        fs::write(oci.join("index.json"), format!(r#"{{"schemaVersion":2,"manifests":[{{{manifest}}}]}}"#))
            .unwrap();
        oci
    }

    pub(crate) fn recipe(&self) -> Recipe {
        Recipe::new(Source::Oci(self.path().join("oci"), None))
    }

    pub(crate) fn build(&self, name: &str, recipe: &Recipe, limits: Limits) -> Result<Image, ImageError> {
        let built = self.store.build(name, recipe, None, limits, &mut Silent);
        self.check();
        built
    }

    /// Builds the layers as an image.
    pub(crate) fn layers(&self, layers: &[Vec<u8>]) -> Result<Image, ImageError> {
        self.layout(layers, "");
        self.build("test", &self.recipe(), Limits::default())
    }

    pub(crate) fn refused(&self, layer: Vec<u8>, why: &str) {
        let error = self.layers(&[layer]).unwrap_err().to_string();
        assert!(error.contains(why), "{error:?} does not say {why:?}");
    }

    /// Nothing was written but what a build writes, and nothing of a build is left.
    fn check(&self) {
        let names = |dir: &Path| -> Vec<String> {
            let mut names: Vec<String> = fs::read_dir(dir)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let top = ["cache", "canary", "extra", "images", "oci", "registry"];
        assert!(
            names(self.path()).iter().all(|name| top.contains(&name.as_str())),
            "{:?}",
            names(self.path())
        );
        assert_eq!(fs::read_to_string(self.path().join("canary")).unwrap(), "alive");
        if self.path().join("cache").exists() {
            assert_eq!(names(&self.path().join("cache")), ["build"]);
            assert_eq!(names(&self.path().join("cache/build")), Vec::<String>::new());
        }
        assert!(names(&self.path().join("images")).iter().all(|name| !name.starts_with(".new")));
    }
}

/// The type of an entry, with target or length.
pub(crate) fn entry(image: &Image, path: &str) -> Option<String> {
    use hotcell_policy::EntryKind;
    image.manifest.entries().find(|(found, _)| found.as_str() == path).map(|(_, entry)| match &entry.kind {
        EntryKind::File { bytes, .. } => format!("file {bytes} {:o}", entry.mode),
        EntryKind::Directory => "directory".into(),
        EntryKind::Symlink { target } => format!("link {target}"),
    })
}
