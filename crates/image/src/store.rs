//! Where kernels, initramfs and images stand.
//!
//! ```text
//! <cache>/kernels/<name>/       kernel.json vmlinuz *.ko
//! <cache>/initramfs/<key>.cpio  key: digest of what it is built from
//! <images>/<name>/              image.json root.sqfs manifest.json
//! ```
//! Everything is built in a folder beside its place and renamed; a lock lets one
//! builder work at a time, and whoever waited finds it done.

use crate::build::{Built, Recipe, build};
use crate::config::ImageConfig;
use crate::error::{ImageError, at};
use crate::initramfs::build_initramfs;
use crate::kernel::{Kernel, KernelKind, SlimRecipe};
use crate::limits::Limits;
use crate::name::ImageName;
use crate::progress::{Progress, Silent};
use crate::source::Source;
use hotcell_ledger::Digest;
use hotcell_policy::Manifest;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The image that is built at first use.
const BUSYBOX: &str = "busybox";
/// Raise it when what is built from the same inputs changes.
const FORMAT: u32 = 3;

/// The guest's programs, as they were built with this Hotcell.
#[derive(Clone, Copy, Debug)]
pub struct Guest {
    /// PID 1.
    pub init: &'static [u8],
    /// The client that asks the host for capabilities.
    pub request: &'static [u8],
}

/// A built initramfs.
#[derive(Clone, Debug)]
pub struct Initramfs {
    /// Path of the archive.
    pub path: PathBuf,
    /// Its digest when it was built.
    pub digest: Digest,
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
    /// How it was built and how its programs are started.
    pub details: Details,
    /// What it holds, file by file.
    pub manifest: Manifest,
}

/// `image.json`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Details {
    format: u32,
    /// What it was built from.
    pub recipe: Recipe,
    /// SHA-256 that the source was pinned by, where it has one: of the OCI manifest
    /// or index, or of a saved image's configuration.
    pub resolved: Option<String>,
    /// How its programs are started.
    pub config: ImageConfig,
    /// BLAKE3 of the squashfs.
    pub root: String,
    /// Its length.
    pub root_bytes: u64,
    /// BLAKE3 of manifest.json.
    pub manifest: String,
    /// BLAKE3 of the guest programs that are inside.
    pub guest: String,
    /// What of the source is not in the image: kind, and how many.
    pub left_out: BTreeMap<String, u64>,
}

/// The one field that every release's image.json has.
#[derive(Deserialize)]
struct AnyFormat {
    format: u32,
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

    /// A guest kernel. The cloud kernel is downloaded at first use, the slim one built by [`Store::build_slim`].
    ///
    /// # Errors
    /// It is not to be had, or a file of it is damaged.
    pub fn kernel(&self, kind: KernelKind, say: &mut dyn FnMut(&str)) -> Result<Kernel, ImageError> {
        let dir = self.cache.join("kernels");
        let place = dir.join(kind.as_str());
        if !place.exists() {
            if kind == KernelKind::Slim {
                return Err(ImageError::Request(
                    "the slim kernel has not been built: build it with `hotcell kernel build`".into(),
                ));
            }
            build_once(&dir, kind.as_str(), |new| Kernel::fetch(new, say).map(|_| ()))?;
        }
        Kernel::open(&place)
    }

    /// A guest kernel, where it is there already.
    ///
    /// # Errors
    /// A file of it is damaged.
    pub fn present_kernel(&self, kind: KernelKind) -> Result<Option<Kernel>, ImageError> {
        let place = self.cache.join("kernels").join(kind.as_str());
        place.exists().then(|| Kernel::open(&place)).transpose()
    }

    /// Builds the slim kernel from the current source of the distribution, unless it was built from it. The one that
    /// is there stays until the new one is complete; runs that use it hold it open. Says whether it built.
    ///
    /// # Errors
    /// A program or the source is not to be had, or the build fails.
    pub fn build_slim(&self, progress: &mut dyn Progress) -> Result<(Kernel, bool), ImageError> {
        let dir = self.cache.join("kernels");
        let name = KernelKind::Slim.as_str();
        let place = dir.join(name);
        let _lock = lock(&dir, &format!(".lock.{name}"))?;
        let recipe = SlimRecipe::current()?;
        // One that is damaged is built anew.
        if let Some(kernel) = Kernel::open(&place).ok().filter(|kernel| recipe.made(kernel)) {
            return Ok((kernel, false));
        }
        let new = dir.join(format!(".new.{name}"));
        replace(&new, &place, || Kernel::build_slim(&new, &recipe, progress).map(|_| ()))?;
        Ok((Kernel::open(&place)?, true))
    }

    /// The initramfs for a kernel, built at first use; a changed kernel or guest
    /// program gives another file. Whoever boots it measures it, and compares.
    ///
    /// # Errors
    /// It can't be built or written.
    pub fn initramfs(&self, kernel: &Kernel) -> Result<Initramfs, ImageError> {
        let dir = self.cache.join("initramfs");
        let made_of = format!("{FORMAT} {} {}", Digest::of(self.guest.init), kernel.identity());
        let place = dir.join(Digest::of(made_of.as_bytes()).to_hex());
        let known = fs::read_to_string(&place).ok().and_then(|text| Digest::from_hex(text.trim()));
        if let Some(digest) = known {
            let path = dir.join(format!("{digest}.cpio"));
            if path.exists() {
                return Ok(Initramfs { path, digest });
            }
        }
        let bytes = build_initramfs(self.guest.init, &kernel.modules()?)?;
        let digest = Digest::of(&bytes);
        let path = dir.join(format!("{digest}.cpio"));
        make_dir(&dir)?;
        // Others may build it at the same time: each writes its own and renames.
        let new = dir.join(format!(".new.{}", std::process::id()));
        for (path, bytes) in [(&path, &*bytes), (&place, digest.to_hex().as_bytes())] {
            fs::write(&new, bytes).and_then(|()| fs::rename(&new, path)).map_err(at(path))?;
        }
        Ok(Initramfs { path, digest })
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
            let _lock = self.lock_name(&name)?;
            if !self.is_current(&place) {
                self.build_locked(
                    &name,
                    &Recipe::new(Source::Busybox),
                    None,
                    Limits::default(),
                    &mut Silent,
                )?;
            }
        }
        if !place.is_dir() {
            return Err(ImageError::NoImage { name: name.to_string() });
        }
        let details = self.details(&place)?;
        let index = place.join("image.json");
        let damaged = |why: &str| ImageError::Damaged { path: index.clone(), why: why.into() };
        let digest = Digest::from_hex(&details.root).ok_or_else(|| damaged("it has no digest"))?;
        let path = place.join("manifest.json");
        let bytes = fs::read(&path).map_err(at(&path))?;
        let damaged = |why: String| ImageError::Damaged { path: path.clone(), why };
        if Digest::of(&bytes).to_hex() != details.manifest {
            return Err(damaged("its digest is not the one that was recorded".into()));
        }
        let manifest = Manifest::from_json(&bytes).map_err(|error| damaged(error.to_string()))?;
        Ok(Image { name, root: place.join("root.sqfs"), digest, details, manifest })
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

    /// The images that are there, each with the digest of its root as it was recorded. Builds none; one that is damaged has none.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn roots(&self) -> Result<Vec<(ImageName, String)>, ImageError> {
        let names = self.list()?.into_iter();
        Ok(names
            .filter_map(|name| {
                let root = self.details(&self.images.join(name.as_str())).ok()?.root;
                Some((name, root))
            })
            .collect())
    }

    /// Builds an image, or builds it anew. An image of this name stays as it is
    /// until the new one is complete, and for good where the build fails.
    /// `requirements`: a requirements file of pip's with hashes, whose wheels are installed.
    ///
    /// # Errors
    /// The source can't be had, is refused, or there is no room.
    pub fn build(
        &self,
        name: &str,
        recipe: &Recipe,
        requirements: Option<&Path>,
        limits: Limits,
        progress: &mut dyn Progress,
    ) -> Result<Image, ImageError> {
        let name = ImageName::new(name)?;
        if name.as_str() == BUSYBOX && recipe.source != Source::Busybox {
            return Err(ImageError::Request(
                "the name busybox is kept for the image that Hotcell builds itself: take another".into(),
            ));
        }
        {
            let _lock = self.lock_name(&name)?;
            self.build_locked(&name, recipe, requirements, limits, progress)?;
        }
        self.image(name.as_str(), &mut |_| ())
    }

    /// [`Store::build`] of a source that must still be what it was: `pinned` is the digest that
    /// [`Details::resolved`] had then.
    ///
    /// # Errors
    /// As [`Store::build`]; the source is another by now.
    pub fn build_pinned(
        &self,
        name: &str,
        recipe: &Recipe,
        pinned: &str,
        limits: Limits,
        progress: &mut dyn Progress,
    ) -> Result<Image, ImageError> {
        let name = ImageName::new(name)?;
        {
            let _lock = self.lock_name(&name)?;
            self.build_as(&name, recipe, (None, Some(pinned)), limits, progress)?;
        }
        self.image(name.as_str(), &mut |_| ())
    }

    /// Removes an image. A run that uses it holds it open and is not disturbed.
    ///
    /// # Errors
    /// There is none, or it can't be removed.
    pub fn remove(&self, name: &str) -> Result<(), ImageError> {
        let name = ImageName::new(name)?;
        let _lock = self.lock_name(&name)?;
        let place = self.images.join(name.as_str());
        if !place.is_dir() {
            return Err(ImageError::NoImage { name: name.to_string() });
        }
        // Out of sight in one step, then away.
        let old = self.images.join(format!(".new.{name}"));
        let _ = fs::remove_dir_all(&old);
        fs::rename(&place, &old).map_err(at(&place))?;
        fs::remove_dir_all(&old).map_err(at(&old))
    }

    fn lock_name(&self, name: &ImageName) -> Result<File, ImageError> {
        lock(&self.images, &format!(".lock.{name}"))
    }

    /// Builds while the name's lock is held.
    fn build_locked(
        &self,
        name: &ImageName,
        recipe: &Recipe,
        requirements: Option<&Path>,
        limits: Limits,
        progress: &mut dyn Progress,
    ) -> Result<(), ImageError> {
        self.build_as(name, recipe, (requirements, None), limits, progress)
    }

    /// With what is installed into it, and the digest that its source must have.
    fn build_as(
        &self,
        name: &ImageName,
        recipe: &Recipe,
        (requirements, pinned): (Option<&Path>, Option<&str>),
        limits: Limits,
        progress: &mut dyn Progress,
    ) -> Result<(), ImageError> {
        let scratch = self.cache.join("build");
        make_dir(&scratch)?;
        let built = build(recipe, requirements, self.guest.request, &scratch, limits, progress)?;
        if let (Some(pinned), Some(now)) = (pinned, &built.resolved)
            && pinned != now
        {
            return Err(ImageError::Source {
                what: recipe.source.to_string(),
                why: format!("it is {now} now, and the image was built from {pinned}: nothing was built"),
            });
        }
        let (new, place) = (self.images.join(format!(".new.{name}")), self.images.join(name.as_str()));
        progress.step("writing the root image");
        replace(&new, &place, || self.write_image(&new, built))
    }

    fn is_current(&self, place: &Path) -> bool {
        self.details(place).is_ok_and(|details| details.guest == self.guest_digest())
    }

    fn guest_digest(&self) -> String {
        Digest::of(self.guest.request).to_hex()
    }

    fn details(&self, place: &Path) -> Result<Details, ImageError> {
        let index = place.join("image.json");
        let bytes = fs::read(&index).map_err(at(&index))?;
        let damaged = |why: String| ImageError::Damaged { path: index.clone(), why };
        let any: AnyFormat = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        if any.format != FORMAT {
            let why = format!("it has the format {}, not {FORMAT}: another release built it", any.format);
            return Err(damaged(why));
        }
        serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))
    }

    /// Writes what was built into `dir`, which is new.
    fn write_image(&self, dir: &Path, built: Built) -> Result<(), ImageError> {
        let root = dir.join("root.sqfs");
        built.tree.write_squashfs(File::create_new(&root).map_err(at(&root))?)?;
        let file = File::open(&root).map_err(at(&root))?;
        let root_bytes = file.metadata().map_err(at(&root))?.len();
        let digest = Digest::of_reader(file).map_err(at(&root))?;
        let manifest = built.tree.manifest(&built.recipe.services)?.to_json();
        let path = dir.join("manifest.json");
        fs::write(&path, &manifest).map_err(at(&path))?;
        let details = Details {
            format: FORMAT,
            recipe: built.recipe,
            resolved: built.resolved,
            config: built.config,
            root: digest.to_hex(),
            root_bytes,
            manifest: Digest::of(&manifest).to_hex(),
            guest: self.guest_digest(),
            left_out: built.left_out,
        };
        let index = dir.join("image.json");
        let json = serde_json::to_vec_pretty(&details).map_err(|error| at(&index)(error.into()))?;
        fs::write(&index, json).map_err(at(&index))
    }
}

fn make_dir(dir: &Path) -> Result<(), ImageError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(at(dir))
}

/// Makes the folder `new`, lets it be filled, and puts it where `place` is, or is to be. For whoever holds the place's lock.
fn replace(
    new: &Path,
    place: &Path,
    make: impl FnOnce() -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    // What a killed builder left; the lock says that it is gone.
    let _ = fs::remove_dir_all(new);
    let made = make_dir(new).and_then(|()| make()).and_then(|()| {
        let flags = if place.exists() { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
        renameat_with(CWD, new, CWD, place, flags).map_err(|errno| at(place)(errno.into()))
    });
    // Either what was replaced, or what a failed build left.
    let _ = fs::remove_dir_all(new);
    made
}

fn lock(dir: &Path, name: &str) -> Result<File, ImageError> {
    make_dir(dir)?;
    let path = dir.join(name);
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
    let _lock = lock(dir, ".lock")?;
    let (new, place) = (dir.join(format!(".new.{name}")), dir.join(name));
    if place.exists() {
        return Ok(());
    }
    replace(&new, &place, || build(&new))
}
