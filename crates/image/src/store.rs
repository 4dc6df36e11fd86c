//! Where kernels, initramfs and images stand.
//!
//! ```text
//! <cache>/kernels/<name>/       kernel.json vmlinuz *.ko
//! <cache>/initramfs/<key>.cpio  key: digest of what it is built from
//! <images>/<name>/              image.json root.sqfs manifest.json
//! ```
//! Everything is built in a folder beside its place and renamed; a lock lets one
//! builder work at a time, and whoever waited finds it done.

use crate::busybox::busybox_tree;
use crate::error::{ImageError, at};
use crate::initramfs::build_initramfs;
use crate::kernel::Kernel;
use crate::name::ImageName;
use crate::tree::{Content, Node, Tree};
use hotcell_ledger::Digest;
use hotcell_policy::Manifest;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The kernel that runs by default.
const DEFAULT_KERNEL: &str = "cloud";
/// The image that is built at first use.
const BUSYBOX: &str = "busybox";
/// Raise it when what is built from the same inputs changes.
const FORMAT: u32 = 2;

/// The guest's programs, as they were built with this Hotcell.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    /// PID 1.
    pub init: &'static [u8],
    /// The client that asks the host for capabilities.
    pub request: &'static [u8],
}

/// A built image.
#[derive(Clone, Debug)]
pub struct Image {
    /// Its name.
    pub name: ImageName,
    /// Path of the squashfs.
    pub root: PathBuf,
    /// Digest of the squashfs when it was built.
    pub digest: Digest,
    /// What it was built from, for people.
    pub source: String,
    /// What it holds, file by file.
    pub manifest: Manifest,
}

/// `image.json`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Facts {
    format: u32,
    source: String,
    root: String,
    /// Digest of manifest.json.
    manifest: String,
    /// Digest of the guest programs that are inside.
    guest: String,
}

/// The folders.
#[derive(Clone, Debug)]
pub struct Store {
    cache: PathBuf,
    images: PathBuf,
    guest: Guest,
}

impl Store {
    /// A store in these folders; they are made when something is built.
    pub fn new(cache: &Path, images: &Path, guest: Guest) -> Store {
        Store { cache: cache.to_owned(), images: images.to_owned(), guest }
    }

    /// The guest kernel, downloaded at first use.
    ///
    /// # Errors
    /// It is not to be had, or a file of it is damaged.
    pub fn kernel(&self, say: &mut dyn FnMut(&str)) -> Result<Kernel, ImageError> {
        let dir = self.cache.join("kernels");
        let place = dir.join(DEFAULT_KERNEL);
        if !place.exists() {
            build_once(&dir, DEFAULT_KERNEL, |new| Kernel::fetch(new, say).map(|_| ()))?;
        }
        Kernel::open(&place)
    }

    /// The initramfs for a kernel, built at first use; a changed kernel or guest
    /// program gives another file.
    ///
    /// # Errors
    /// It can't be built or written.
    pub fn initramfs(&self, kernel: &Kernel) -> Result<PathBuf, ImageError> {
        let bytes = build_initramfs(self.guest.init, kernel)?;
        let dir = self.cache.join("initramfs");
        let path = dir.join(format!("{}.cpio", Digest::of(&bytes)));
        if fs::metadata(&path).is_ok_and(|metadata| metadata.len() == bytes.len() as u64) {
            return Ok(path);
        }
        make_dir(&dir)?;
        let new = dir.join(format!(".new.{}", std::process::id()));
        fs::write(&new, &bytes).and_then(|()| fs::rename(&new, &path)).map_err(at(&path))?;
        Ok(path)
    }

    /// An image by name; `busybox` is built at first use and anew when the
    /// guest's programs have changed.
    ///
    /// # Errors
    /// There is none, or it is damaged.
    pub fn image(&self, name: &str, say: &mut dyn FnMut(&str)) -> Result<Image, ImageError> {
        let name = ImageName::new(name)?;
        let place = self.images.join(name.as_str());
        if name.as_str() == BUSYBOX && !self.is_current(&place) {
            say("building the image busybox");
            let _lock = lock(&self.images)?;
            if !self.is_current(&place) {
                let new = self.images.join(format!(".new.{}", std::process::id()));
                let _ = fs::remove_dir_all(&new);
                self.write_image(&new, "busybox", busybox_tree()?)?;
                if place.exists() {
                    fs::remove_dir_all(&place).map_err(at(&place))?;
                }
                fs::rename(&new, &place).map_err(at(&place))?;
            }
        }
        if !place.is_dir() {
            return Err(ImageError::NoImage { hint: String::new(), name: name.to_string() });
        }
        let facts = self.facts(&place)?;
        let index = place.join("image.json");
        let damaged = |why: &str| ImageError::Damaged { path: index.clone(), why: why.into() };
        let digest = Digest::from_hex(&facts.root).ok_or_else(|| damaged("it has no digest"))?;
        let path = place.join("manifest.json");
        let bytes = fs::read(&path).map_err(at(&path))?;
        let damaged = |why: String| ImageError::Damaged { path: path.clone(), why };
        if Digest::of(&bytes).to_hex() != facts.manifest {
            return Err(damaged("its digest is not the one that was recorded".into()));
        }
        let manifest = Manifest::from_json(&bytes).map_err(|error| damaged(error.to_string()))?;
        Ok(Image { name, root: place.join("root.sqfs"), digest, source: facts.source, manifest })
    }

    /// Names of all images, sorted.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn list(&self) -> Result<Vec<ImageName>, ImageError> {
        let entries = match fs::read_dir(&self.images) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(at(&self.images)(error)),
        };
        let mut names: Vec<ImageName> =
            entries.filter_map(|entry| ImageName::new(entry.ok()?.file_name().to_str()?).ok()).collect();
        names.sort();
        Ok(names)
    }

    fn is_current(&self, place: &Path) -> bool {
        self.facts(place).is_ok_and(|facts| facts.guest == self.guest_digest() && facts.format == FORMAT)
    }

    fn guest_digest(&self) -> String {
        Digest::of(self.guest.request).to_hex()
    }

    fn facts(&self, place: &Path) -> Result<Facts, ImageError> {
        let index = place.join("image.json");
        let bytes = fs::read(&index).map_err(at(&index))?;
        serde_json::from_slice(&bytes)
            .map_err(|error| ImageError::Damaged { path: index, why: error.to_string() })
    }

    /// Writes a tree, with the guest's client added, into `dir`.
    fn write_image(&self, dir: &Path, source: &str, mut tree: Tree) -> Result<(), ImageError> {
        let client = Node::File(Content::Bytes(self.guest.request.to_vec()));
        tree.put("/usr/bin/hotcell-request", 0o755, client)?;
        make_dir(dir)?;
        let root = dir.join("root.sqfs");
        tree.write_squashfs(File::create_new(&root).map_err(at(&root))?)?;
        let digest = Digest::of_reader(File::open(&root).map_err(at(&root))?).map_err(at(&root))?;
        let manifest = tree.manifest()?.to_json();
        let path = dir.join("manifest.json");
        fs::write(&path, &manifest).map_err(at(&path))?;
        let facts = Facts {
            format: FORMAT,
            source: source.into(),
            root: digest.to_hex(),
            manifest: Digest::of(&manifest).to_hex(),
            guest: self.guest_digest(),
        };
        let index = dir.join("image.json");
        let json = serde_json::to_vec_pretty(&facts).map_err(|error| at(&index)(error.into()))?;
        fs::write(&index, json).map_err(at(&index))
    }
}

fn make_dir(dir: &Path) -> Result<(), ImageError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(at(dir))
}

fn lock(dir: &Path) -> Result<File, ImageError> {
    make_dir(dir)?;
    let path = dir.join(".lock");
    let file = File::options().create(true).write(true).truncate(false).open(&path).map_err(at(&path))?;
    flock(&file, FlockOperation::LockExclusive).map_err(|errno| at(&path)(errno.into()))?;
    Ok(file)
}

/// Builds `dir/name` in a new folder beside it, unless another process did so meanwhile.
fn build_once(
    dir: &Path,
    name: &str,
    build: impl FnOnce(&Path) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    let _lock = lock(dir)?;
    let (new, place) = (dir.join(format!(".new.{name}")), dir.join(name));
    if place.exists() {
        return Ok(());
    }
    // What a killed builder left; the lock says that it is gone.
    let _ = fs::remove_dir_all(&new);
    make_dir(&new)?;
    let built = build(&new).and_then(|()| fs::rename(&new, &place).map_err(at(&place)));
    if built.is_err() {
        let _ = fs::remove_dir_all(&new);
    }
    built
}
