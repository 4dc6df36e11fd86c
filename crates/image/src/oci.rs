//! OCI layouts, `docker save` archives and what a registry gave: an index, a
//! manifest, a configuration and layers, each named by its SHA-256.
//!
//! Guaranteed: no byte is used under a digest that it does not have. A layer is
//! applied while it is measured, and if it was another one the build fails before
//! anything of it is kept.

use crate::config::{ImageConfig, RawConfig};
use crate::error::ImageError;
use crate::layer::{Whiteouts, apply, decompressed};
use crate::limits::MAX_JSON;
use crate::progress::Progress;
use crate::stage::Stage;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Indexes in indexes.
const MAX_INDEX_DEPTH: u32 = 4;
/// Members of a `docker save` archive.
const MAX_MEMBERS: usize = 4096;

/// Points to a blob.
#[derive(Clone, Debug, Deserialize)]
struct Descriptor {
    #[serde(default, rename = "mediaType")]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Clone, Debug, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

#[derive(Debug, Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct ImageManifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Debug, Default, Deserialize)]
struct ConfigFile {
    #[serde(default)]
    config: Option<RawConfig>,
    #[serde(default)]
    rootfs: RootFs,
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

#[derive(Debug, Default, Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

/// What came of a source.
pub(crate) struct Applied {
    pub(crate) config: ImageConfig,
    /// Digest of the image's manifest or configuration: what it is pinned by.
    pub(crate) resolved: String,
}

fn fail(what: impl Into<String>, why: impl Into<String>) -> ImageError {
    ImageError::Source { what: what.into(), why: why.into() }
}

/// The hexadecimal part of `sha256:…`.
pub(crate) fn sha256_hex(digest: &str) -> Result<&str, ImageError> {
    let is_hex = |hex: &&str| hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    digest
        .strip_prefix("sha256:")
        .filter(is_hex)
        .ok_or_else(|| fail(format!("{digest:?}"), "it is no sha256 digest; Hotcell reads no others"))
}

pub(crate) fn sha256_of(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{text}")
}

pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|error| fail(what, format!("it can't be read: {error}")))
}

/// A plain file, links not followed, never waiting for a FIFO.
pub(crate) fn open_plain(path: &Path) -> Result<File, ImageError> {
    let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits() as i32;
    let shown = path.display().to_string();
    let file = File::options()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| fail(&shown, format!("it can't be opened: {error}")))?;
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    if is_file { Ok(file) } else { Err(fail(shown, "it is no file")) }
}

pub(crate) fn read_json(path: &Path) -> Result<Vec<u8>, ImageError> {
    let mut bytes = Vec::new();
    let shown = path.display().to_string();
    open_plain(path)?
        .take(MAX_JSON + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| fail(&shown, error.to_string()))?;
    if bytes.len() as u64 > MAX_JSON {
        return Err(fail(shown, format!("it has more than {} MiB of JSON", MAX_JSON >> 20)));
    }
    Ok(bytes)
}

/// Where blobs are: a folder of files that are named by their digests.
pub(crate) struct Blobs<'a> {
    pub(crate) dir: &'a Path,
}

impl Blobs<'_> {
    fn open(&self, descriptor: &Descriptor) -> Result<File, ImageError> {
        let path = self.dir.join(sha256_hex(&descriptor.digest)?);
        let file = open_plain(&path)?;
        let size = file.metadata().map(|metadata| metadata.len()).unwrap_or_default();
        if size != descriptor.size {
            let why = format!("it has {size} bytes, but {} are declared", descriptor.size);
            return Err(fail(&descriptor.digest, why));
        }
        Ok(file)
    }

    fn json(&self, descriptor: &Descriptor) -> Result<Vec<u8>, ImageError> {
        self.open(descriptor)?;
        let bytes = read_json(&self.dir.join(sha256_hex(&descriptor.digest)?))?;
        if sha256_of(&bytes) != descriptor.digest {
            return Err(fail(&descriptor.digest, "its bytes have another digest"));
        }
        Ok(bytes)
    }
}

/// Applies `oci:DIR[:TAG]`.
pub(crate) fn layout(
    stage: &mut Stage,
    dir: &Path,
    tag: Option<&str>,
    progress: &mut dyn Progress,
) -> Result<Applied, ImageError> {
    let index: Index = parse(&read_json(&dir.join("index.json"))?, "index.json")?;
    let name = |descriptor: &Descriptor| {
        descriptor.annotations.get("org.opencontainers.image.ref.name").cloned().unwrap_or_default()
    };
    let names: Vec<String> = index.manifests.iter().map(name).collect();
    let mut matching = index.manifests.iter().filter(|descriptor| match tag {
        Some(tag) => name(descriptor) == tag || descriptor.digest == tag,
        None => true,
    });
    let chosen = match (matching.next(), matching.next()) {
        (Some(only), None) => only.clone(),
        (Some(_), Some(_)) if tag.is_none() => {
            let why = format!("it holds several images: name one as oci:DIR:TAG of {}", names.join(", "));
            return Err(fail(dir.display().to_string(), why));
        }
        // The same tag twice: the newest is the last, as umoci has it.
        (Some(first), Some(_)) => matching.next_back().unwrap_or(first).clone(),
        (None, _) => {
            let tag = tag.unwrap_or_default();
            let why = format!("it has no image {tag:?}; it has: {}", names.join(", "));
            return Err(fail(dir.display().to_string(), why));
        }
    };
    let blobs = dir.join("blobs/sha256");
    let blobs = Blobs { dir: &blobs };
    let mut chosen = chosen;
    for _ in 0..MAX_INDEX_DEPTH {
        let bytes = blobs.json(&chosen)?;
        if !is_index(&chosen.media_type, &bytes) {
            return manifest(stage, &bytes, &blobs, progress);
        }
        chosen = for_this_machine(&bytes)?;
    }
    Err(fail(dir.display().to_string(), "its indexes go too deep"))
}

/// Whether a document is an index of images rather than one image.
pub(crate) fn is_index(media_type: &str, bytes: &[u8]) -> bool {
    media_type.ends_with(".image.index.v1+json")
        || media_type.ends_with(".manifest.list.v2+json")
        || (serde_json::from_slice::<Index>(bytes).is_ok()
            && serde_json::from_slice::<ImageManifest>(bytes).is_err())
}

fn for_this_machine(bytes: &[u8]) -> Result<Descriptor, ImageError> {
    let index: Index = parse(bytes, "the image index")?;
    let fits = |descriptor: &&Descriptor| match &descriptor.platform {
        Some(platform) => platform.os == "linux" && platform.architecture == "amd64",
        None => true,
    };
    let found = index.manifests.iter().find(fits).cloned();
    found.ok_or_else(|| fail("the image index", "it has no image for linux/amd64"))
}

/// The digest of the image for this machine in an index.
pub(crate) fn choose(bytes: &[u8]) -> Result<String, ImageError> {
    for_this_machine(bytes).map(|descriptor| descriptor.digest)
}

/// Bytes of all blobs that a manifest declares.
pub(crate) fn declared_bytes(bytes: &[u8]) -> Result<u64, ImageError> {
    let manifest: ImageManifest = parse(bytes, "the image's manifest")?;
    let sizes = manifest.layers.iter().map(|layer| layer.size);
    Ok(sizes.fold(manifest.config.size, u64::saturating_add))
}

/// Applies the image of a manifest whose digest was checked.
pub(crate) fn manifest(
    stage: &mut Stage,
    bytes: &[u8],
    blobs: &Blobs<'_>,
    progress: &mut dyn Progress,
) -> Result<Applied, ImageError> {
    let manifest: ImageManifest = parse(bytes, "the image's manifest")?;
    let config: ConfigFile = parse(&blobs.json(&manifest.config)?, "the image's configuration")?;
    check_platform(&config)?;
    let diff_ids = &config.rootfs.diff_ids;
    if diff_ids.len() != manifest.layers.len() {
        let why = format!("it names {} layers, the manifest {}", diff_ids.len(), manifest.layers.len());
        return Err(fail("the image's configuration", why));
    }
    let count = manifest.layers.len();
    for (at, (layer, diff_id)) in manifest.layers.iter().zip(diff_ids).enumerate() {
        progress.step(&format!("layer {} of {count}, {} KiB", at + 1, layer.size.div_ceil(1024)));
        let what = format!("layer {} ({})", at + 1, layer.digest);
        let (packed, sum) = Hashing::new(blobs.open(layer)?);
        measured_layer(stage, packed, diff_id, &what, progress)?;
        if sum.take() != layer.digest {
            return Err(fail(what, "its bytes have another digest"));
        }
    }
    let config = ImageConfig::resolve(config.config.unwrap_or_default(), stage)?;
    Ok(Applied { config, resolved: sha256_of(bytes) })
}

fn check_platform(config: &ConfigFile) -> Result<(), ImageError> {
    let (os, machine) = (config.os.as_str(), config.architecture.as_str());
    if !matches!(os, "" | "linux") || !matches!(machine, "" | "amd64") {
        return Err(fail("the image", format!("it is for {os}/{machine}; Hotcell runs linux/amd64")));
    }
    Ok(())
}

/// Applies a layer that must unpack to bytes of this digest.
fn measured_layer(
    stage: &mut Stage,
    packed: impl Read,
    diff_id: &str,
    what: &str,
    progress: &mut dyn Progress,
) -> Result<(), ImageError> {
    let mut packed = packed;
    let plain = decompressed(&mut packed).map_err(|error| fail(what, error.to_string()))?;
    let (plain, sum) = Hashing::new(plain);
    apply(stage, plain, Whiteouts::Markers, what, progress)?;
    if sum.take() != diff_id {
        return Err(fail(what, format!("unpacked, its digest is not {diff_id}")));
    }
    // What stands behind the compressed stream belongs to the blob's digest. The
    // file is no longer than declared.
    io::copy(&mut packed, &mut io::sink()).map_err(|error| fail(what, error.to_string()))?;
    Ok(())
}

/// Measures what is read through it.
struct Hashing<R> {
    from: R,
    sum: Sum,
}

/// The digest of what was read so far.
#[derive(Clone)]
struct Sum(Rc<RefCell<Sha256>>);

impl Sum {
    fn take(&self) -> String {
        hex(&self.0.borrow().clone().finalize())
    }
}

impl<R> Hashing<R> {
    fn new(from: R) -> (Hashing<R>, Sum) {
        let sum = Sum(Rc::new(RefCell::new(Sha256::new())));
        (Hashing { from, sum: sum.clone() }, sum)
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(into)?;
        self.sum.0.borrow_mut().update(into.get(..count).unwrap_or_default());
        Ok(count)
    }
}

/// One image of `docker save`'s manifest.json.
#[derive(Debug, Deserialize)]
struct Saved {
    #[serde(rename = "Config")]
    config: String,
    #[serde(rename = "RepoTags", default)]
    tags: Option<Vec<String>>,
    #[serde(rename = "Layers")]
    layers: Vec<String>,
}

/// A member of an archive: a range of it, or another name of a member.
enum Member {
    Range(u64, u64),
    Link(String),
}

/// Applies `docker-archive:FILE`.
pub(crate) fn docker_archive(
    stage: &mut Stage,
    path: &Path,
    progress: &mut dyn Progress,
) -> Result<Applied, ImageError> {
    let shown = path.display().to_string();
    let read = |error: io::Error| fail(&shown, error.to_string());
    let mut file = open_plain(path)?;
    let mut magic = [0; 2];
    let is_packed = file.read_exact(&mut magic).is_ok() && magic == [0x1f, 0x8b];
    file.rewind().map_err(read)?;
    if is_packed {
        progress.step("unpacking the archive");
        let mut plain = tempfile::tempfile_in(stage.scratch()).map_err(read)?;
        let limit = stage.bytes_left();
        let count = io::copy(&mut decompressed(&file).map_err(read)?.take(limit + 1), &mut plain);
        if count.map_err(read)? > limit {
            return Err(fail(shown, format!("it unpacks to more than {} MiB", limit >> 20)));
        }
        plain.rewind().map_err(read)?;
        file = plain;
    }
    let members = members(&file, &shown)?;
    let range = |name: &str| -> Result<(u64, u64), ImageError> {
        let mut name = name.to_owned();
        for _ in 0..4 {
            match members.get(name.trim_start_matches("./")) {
                Some(Member::Range(at, len)) => return Ok((*at, *len)),
                // docker save of old: `../ID/layer.tar`, from ID2/layer.tar.
                Some(Member::Link(target)) => {
                    name = target.strip_prefix("../").unwrap_or(target).to_owned();
                }
                None => break,
            }
        }
        Err(fail(&shown, format!("{name:?} is missing in it")))
    };
    let json = |name: &str| -> Result<Vec<u8>, ImageError> {
        let (at, len) = range(name)?;
        if len > MAX_JSON {
            return Err(fail(name, format!("it has more than {} MiB of JSON", MAX_JSON >> 20)));
        }
        let mut bytes = Vec::new();
        Part::new(&file, at, len).read_to_end(&mut bytes).map_err(read)?;
        Ok(bytes)
    };
    let saved: Vec<Saved> = parse(&json("manifest.json")?, "manifest.json")?;
    let [saved] = saved.as_slice() else {
        let tags: Vec<&str> =
            saved.iter().flat_map(|image| image.tags.iter().flatten()).map(String::as_str).collect();
        return Err(fail(shown, format!("it holds several images ({}): save one", tags.join(", "))));
    };
    let config_bytes = json(&saved.config)?;
    let resolved = sha256_of(&config_bytes);
    // The file is named by its digest, with .json behind it or without.
    let stem = saved.config.rsplit('/').next().unwrap_or_default().trim_end_matches(".json");
    if stem.len() == 64 && format!("sha256:{stem}") != resolved {
        return Err(fail(&saved.config, "its bytes have another digest"));
    }
    let config: ConfigFile = parse(&config_bytes, "the image's configuration")?;
    check_platform(&config)?;
    if config.rootfs.diff_ids.len() != saved.layers.len() {
        return Err(fail(shown, "its configuration names other layers than its manifest"));
    }
    for (at, (layer, diff_id)) in saved.layers.iter().zip(&config.rootfs.diff_ids).enumerate() {
        let (start, len) = range(layer)?;
        progress.step(&format!("layer {} of {}, {} KiB", at + 1, saved.layers.len(), len.div_ceil(1024)));
        let what = format!("layer {} ({layer})", at + 1);
        measured_layer(stage, Part::new(&file, start, len), diff_id, &what, progress)?;
    }
    let config = ImageConfig::resolve(config.config.unwrap_or_default(), stage)?;
    Ok(Applied { config, resolved })
}

/// Where an archive's members are.
fn members(file: &File, shown: &str) -> Result<BTreeMap<String, Member>, ImageError> {
    // The reader quotes what it stumbled over, which may be anything.
    let read = |error: io::Error| match error.get_ref() {
        None => fail(shown, error.to_string()),
        Some(_) => fail(shown, "it is no archive as `docker save` and `podman save` write it"),
    };
    let mut members = BTreeMap::new();
    let mut archive = tar::Archive::new(file);
    for (count, entry) in archive.entries_with_seek().map_err(read)?.raw(true).enumerate() {
        let entry = entry.map_err(read)?;
        if count >= MAX_MEMBERS {
            return Err(fail(shown, format!("it has more than {MAX_MEMBERS} members")));
        }
        let name = String::from_utf8_lossy(&entry.path_bytes()).trim_start_matches("./").to_owned();
        let kind = entry.header().entry_type();
        if kind.is_file() {
            members.insert(name, Member::Range(entry.raw_file_position(), entry.size()));
        } else if kind.is_symlink() || kind.is_hard_link() {
            let target = entry.link_name_bytes().unwrap_or_default();
            members.insert(name, Member::Link(String::from_utf8_lossy(&target).into_owned()));
        }
    }
    Ok(members)
}

/// A range of a file.
struct Part<'a> {
    file: &'a File,
    at: u64,
    left: u64,
}

impl<'a> Part<'a> {
    fn new(file: &'a File, at: u64, left: u64) -> Part<'a> {
        Part { file, at, left }
    }
}

impl Read for Part<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(into.len());
        let Some(into) = into.get_mut(..most).filter(|into| !into.is_empty()) else { return Ok(0) };
        let mut file = self.file;
        file.seek(SeekFrom::Start(self.at))?;
        let count = file.read(into)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// Path of a layout's folder and its tag, from `DIR[:TAG]`.
pub(crate) fn split_tag(text: &str) -> (PathBuf, Option<String>) {
    match text.rsplit_once(':') {
        Some((dir, tag)) if !dir.is_empty() && !tag.is_empty() && !tag.contains('/') => {
            (dir.into(), Some(tag.to_owned()))
        }
        _ => (text.into(), None),
    }
}
