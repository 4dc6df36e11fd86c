//! Templates: a booted machine, saved once at the point where it waits for its host, from which runs are cloned.
//!
//! ```text
//!  <cache>/templates/
//!    .lock                  held by whoever makes or removes one
//!    .new.<id>/             being made; what a killed maker left goes with the next
//!    <id>/                  0500; appears whole, by a rename
//!      template.json        0400  what it depends on, and the digests of:
//!      ram                  0400  guest memory, sparse
//!      state                0400  the devices, as QEMU saves them
//!      disk                 0400  the workspace disk as the machine has mounted it, sparse
//!
//!  id = BLAKE3 over what it depends on: kernel, initramfs, root, VMM, its command line, the accelerator, this format
//! ```
//! What it guarantees: a template is complete or not there. Its digests were taken
//! from the bytes that were written; a template whose RAM or disk is no longer the
//! file that was hashed (device, inode, length, times) is not used but made anew, and the
//! state is hashed at every use. A change of anything that it depends on gives
//! another id. No clone can write it: see [`Template::ram`].
//! What it does not: see a change below the file system; [`TemplateStore::verify`]
//! hashes all of it.
//! Who may call: backends; the command line lists, verifies and removes.

mod files;
mod store;

pub(crate) use files::{Part, Saved, copy_blocks, write_whole};
pub use store::{TemplateStore, Usable};

use hotcell_ledger::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Raise it when what is made from the same inputs changes.
const FORMAT: u32 = 1;

/// What a template depends on, by name. Its digest is the template's id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Inputs(pub(crate) BTreeMap<String, String>);

impl Inputs {
    pub(crate) fn id(&self) -> Digest {
        let mut text = format!("hotcell template {FORMAT}\n");
        for (name, value) in &self.0 {
            // Lengths, so that no value can pass for another name.
            text.push_str(&format!("{} {name} {} {value}\n", name.len(), value.len()));
        }
        Digest::of(text.as_bytes())
    }
}

/// A template is superseded by one that differs from it in these alone. Not in its kernel: a host may have several.
const UPGRADED: [&str; 3] = ["hotcell", "vmm", "initramfs"];

impl Inputs {
    /// Whether a template of these is of no use once there is one of the `newer`.
    fn superseded_by(&self, newer: &Inputs) -> bool {
        let lasting = |inputs: &Inputs| {
            let mut inputs = inputs.0.clone();
            UPGRADED.iter().for_each(|name| {
                inputs.remove(*name);
            });
            inputs
        };
        self != newer && lasting(self) == lasting(newer)
    }
}

/// `template.json`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format: u32,
    inputs: Inputs,
    /// Rate of the host's time-stamp counter that the guest was told, and the boot of the host in which it was measured.
    tsc_khz: Option<u32>,
    host_boot: String,
    ram: Part,
    state: Part,
    disk: Part,
}

/// Why there is no template. A run can still boot from scratch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A file of it can't be read or written.
    #[error("can't use the template at {path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The machine that was to be saved did not come up.
    #[error("the machine for the template did not start: {0}")]
    Start(#[from] crate::backend::StartError),
    /// It came up and could not be saved.
    #[error("the machine for the template can't be saved: {0}")]
    Save(String),
    /// What was to be saved is not known to be gone.
    #[error("the machine for the template was not seen to be gone: {0}. `hotcell reap` ends what is left")]
    Teardown(String),
    /// The registry can't be written.
    #[error(transparent)]
    Registry(#[from] crate::registry::RegistryError),
}

pub(crate) fn at(path: &Path) -> impl Fn(io::Error) -> TemplateError {
    move |source| TemplateError::Io { path: path.to_owned(), source }
}

/// A template that was found whole, with its files open for reading.
#[derive(Debug)]
pub struct Template {
    id: Digest,
    manifest: Manifest,
    ram: File,
    state: Vec<u8>,
    disk: File,
}

impl Template {
    /// Its id.
    pub fn id(&self) -> Digest {
        self.id
    }

    /// Its parts as they go into the record: name, digest, length in bytes. How a digest is made stands in
    /// `docs/templates.md`.
    pub fn parts(&self) -> [(&'static str, Digest, u64); 3] {
        let Manifest { ram, state, disk, .. } = &self.manifest;
        [("template-ram", ram), ("template-state", state), ("template-disk", disk)]
            .map(|(name, part)| (name, part.digest(), part.bytes))
    }

    /// Bytes of all its parts that are not zero, in whole blocks: what it takes of the disk.
    pub fn filled(&self) -> u64 {
        let Manifest { ram, state, disk, .. } = &self.manifest;
        ram.filled + state.filled + disk.filled
    }

    /// What it depends on, by name.
    pub fn inputs(&self) -> &BTreeMap<String, String> {
        &self.manifest.inputs.0
    }

    /// The memory, open for reading only: the clone maps it privately, and with this
    /// descriptor no kernel lets it do more. Its mode lets its owner do no more by name,
    /// and the clone's filter lets nobody change the mode.
    pub(crate) fn ram(&self) -> io::Result<File> {
        self.ram.try_clone()
    }

    /// The devices' state, as it was hashed a moment ago.
    pub(crate) fn state(&self) -> &[u8] {
        &self.state
    }

    /// Writes a copy of the disk to `path`, which must not exist.
    pub(crate) fn copy_disk(&self, path: &Path) -> io::Result<File> {
        crate::disk::sparse_copy(&self.disk, path)
    }
}
