//! The files that boot: opened, hashed, and put into the plan of a machine.

use crate::run::Runtime;
use hotcell_policy::{Manifest, SealedSpec};
use hotcell_vm::{BootInput, DiskError, FileDigests, Template, VmPlan, Workspace};
use std::io;
use std::path::{Path, PathBuf};

/// The files that boot, opened and hashed: what was hashed is what boots.
#[derive(Debug)]
pub struct MeasuredBoot {
    /// Kernel.
    pub kernel: BootInput,
    /// Initramfs.
    pub initramfs: BootInput,
    /// Root image.
    pub root: BootInput,
    /// The template that the machine goes on from, as [`Runtime::template`](crate::Runtime::template) gives it;
    /// without one it boots from scratch.
    pub template: Option<Template>,
    /// What the root image holds, where its builder says; it gives the environment
    /// baseline and the binary allowlist, whose digests the spec names.
    pub contents: Option<Manifest>,
    /// User and group that own `/workspace`: the image's; never 0.
    pub owner: (u32, u32),
}

/// Why a file could not be measured.
#[derive(Debug, thiserror::Error)]
#[error("can't read {path}: {source}")]
pub struct MeasureError {
    /// Which.
    path: PathBuf,
    /// Why.
    source: io::Error,
}

impl MeasuredBoot {
    /// Opens and hashes.
    ///
    /// # Errors
    /// A file can't be read.
    pub fn open(kernel: &Path, initramfs: &Path, root: &Path) -> Result<MeasuredBoot, MeasureError> {
        MeasuredBoot::remembering(&FileDigests::default(), kernel, initramfs, root)
    }

    /// Opens, and hashes what was not hashed before.
    ///
    /// # Errors
    /// A file can't be read.
    pub fn remembering(
        digests: &FileDigests,
        kernel: &Path,
        initramfs: &Path,
        root: &Path,
    ) -> Result<MeasuredBoot, MeasureError> {
        let measure =
            |path: &Path| digests.open(path).map_err(|source| MeasureError { path: path.to_owned(), source });
        let (kernel, initramfs) = (measure(kernel)?, measure(initramfs)?);
        let owner = (crate::WORKLOAD_USER, crate::WORKLOAD_USER);
        Ok(MeasuredBoot { kernel, initramfs, root: measure(root)?, template: None, contents: None, owner })
    }

    /// The machine of this spec, from these files.
    pub(crate) fn plan(self, runtime: &Runtime, spec: &SealedSpec) -> Result<VmPlan, DiskError> {
        let limits = spec.limits();
        Ok(VmPlan {
            run_id: spec.run_id().into(),
            kernel: self.kernel,
            initramfs: self.initramfs,
            root: self.root,
            workspace: Workspace::blank(&runtime.cache, limits.disk_mib)?,
            vcpus: limits.vcpus,
            memory_mib: limits.memory_mib,
            acceleration: runtime.acceleration.clone(),
            kernel_args: spec.kernel_args().to_vec(),
            owner: self.owner,
            template: self.template,
        })
    }

    /// The same open files, without a template and without contents.
    pub(crate) fn try_clone(&self) -> io::Result<MeasuredBoot> {
        Ok(MeasuredBoot {
            kernel: self.kernel.try_clone()?,
            initramfs: self.initramfs.try_clone()?,
            root: self.root.try_clone()?,
            template: None,
            contents: None,
            owner: self.owner,
        })
    }
}
