//! The guest kernels in the cache. Nothing is installed on the host.
//!
//! | kernel | comes from |
//! |---|---|
//! | [`KernelKind::Cloud`] | the distribution's cloud kernel, downloaded with apt and unpacked, by `cloud` |
//! | [`KernelKind::Slim`] | the distribution's kernel source with a configuration of ours, built by `slim` |
//!
//! apt checks the packages' signature chain; what was unpacked or built is measured at
//! every run. Works as an ordinary user.

mod apt;
mod cloud;
mod slim;

pub(crate) use slim::SlimRecipe;

use crate::error::{ImageError, at};
use hotcell_ledger::Digest;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Which kernel a machine boots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelKind {
    /// The distribution's, with the modules that a machine needs.
    #[default]
    Cloud,
    /// Built from the distribution's source for a machine of ours and nothing else.
    Slim,
}

impl KernelKind {
    /// All of them.
    pub const ALL: [KernelKind; 2] = [KernelKind::Cloud, KernelKind::Slim];

    /// Its name, and that of its folder.
    pub fn as_str(self) -> &'static str {
        match self {
            KernelKind::Cloud => "cloud",
            KernelKind::Slim => "slim",
        }
    }
}

/// One module, uncompressed.
#[derive(Clone, Debug)]
pub struct Module {
    /// File name without `.ko`.
    pub name: String,
    /// The file.
    pub bytes: Vec<u8>,
}

/// A kernel in the cache.
#[derive(Clone, Debug)]
pub struct Kernel {
    dir: PathBuf,
    facts: Facts,
    digest: Digest,
    identity: Digest,
}

/// `kernel.json`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Facts {
    release: String,
    package: String,
    vmlinuz: String,
    /// In the order of loading: name and digest.
    modules: Vec<(String, String)>,
    /// Digest of the configuration that it was built with, where it was built here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    configuration: Option<String>,
}

impl Kernel {
    /// The kernel in this folder. Its files are compared with what was recorded of them where they are used.
    ///
    /// # Errors
    /// It is not there, or its `kernel.json` makes no sense.
    pub(crate) fn open(dir: &Path) -> Result<Kernel, ImageError> {
        let index = dir.join("kernel.json");
        let bytes = fs::read(&index).map_err(at(&index))?;
        let damaged = |why: String| ImageError::Damaged { path: index.clone(), why };
        let facts: Facts = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        let digest = Digest::from_hex(&facts.vmlinuz).ok_or_else(|| damaged("it has no digest".into()))?;
        Ok(Kernel { dir: dir.to_owned(), facts, digest, identity: Digest::of(&bytes) })
    }

    /// Writes a kernel into `dir`, which is new, and opens it.
    fn create(
        dir: &Path,
        (release, package): (String, String),
        vmlinuz: &[u8],
        modules: &[(String, &[u8])],
        configuration: Option<Digest>,
    ) -> Result<Kernel, ImageError> {
        write(&dir.join("vmlinuz"), vmlinuz)?;
        for (name, bytes) in modules {
            write(&dir.join(format!("{name}.ko")), bytes)?;
        }
        let facts = Facts {
            release,
            package,
            vmlinuz: Digest::of(vmlinuz).to_hex(),
            modules: modules.iter().map(|(name, bytes)| (name.clone(), Digest::of(bytes).to_hex())).collect(),
            configuration: configuration.as_ref().map(Digest::to_hex),
        };
        let json = serde_json::to_vec_pretty(&facts).map_err(|e| at(dir)(e.into()))?;
        write(&dir.join("kernel.json"), &json)?;
        Kernel::open(dir)
    }

    /// Path of the bootable image.
    pub fn vmlinuz(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// The release, as `uname -r` says it.
    pub fn release(&self) -> &str {
        &self.facts.release
    }

    /// The package that it came from; of a kernel that was built here, also that package's version.
    pub fn package(&self) -> &str {
        &self.facts.package
    }

    /// Digest of the bootable image when it was unpacked or built; whoever boots it measures it, and compares.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Digest of everything that was recorded of it, modules included.
    pub(crate) fn identity(&self) -> Digest {
        self.identity
    }

    /// The modules in the order of loading.
    ///
    /// # Errors
    /// One is not there or was changed.
    pub fn modules(&self) -> Result<Vec<Module>, ImageError> {
        let read = |(name, digest): &(String, String)| {
            let path = self.dir.join(format!("{name}.ko"));
            let bytes = fs::read(&path).map_err(at(&path))?;
            if Digest::of(&bytes).to_hex() == *digest {
                return Ok(Module { name: name.clone(), bytes });
            }
            Err(ImageError::Damaged { path, why: "its digest is not the one that was recorded".into() })
        };
        self.facts.modules.iter().map(read).collect()
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    File::create_new(path).and_then(|mut file| file.write_all(bytes)).map_err(at(path))
}
