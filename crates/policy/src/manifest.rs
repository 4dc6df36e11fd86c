//! What an image contains, file by file, as its builder measured it.
//!
//! The image builder makes it; the environment baseline and the binary allowlist
//! come from it. Entries are sorted by path, each path once. A manifest says what
//! the image is, never what a run may do.
//!
//! As a file: `{"format":"hotcell-manifest-1","services":[…],"entries":[…]}`, entries sorted by path, `services` only
//! where there are any, one spelling.

use crate::binary::{BinaryDraft, BinaryPolicy};
use crate::path::{CleanPath, PathError};
use crate::service::{self, Service, ServiceDraft, ServiceError};
use hotcell_ledger::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The first field of a manifest file.
const FORMAT: &str = "hotcell-manifest-1";
/// Symbolic links that are followed at most, as Linux does (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// What a name in an image stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EntryKind {
    /// A file, with the digest of its bytes.
    File {
        /// Digest of the bytes.
        #[serde(with = "crate::hex")]
        digest: Digest,
        /// Length in bytes.
        bytes: u64,
    },
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink {
        /// Its target, as it stands.
        target: String,
    },
}

/// One name of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestEntry {
    /// What it stands for.
    #[serde(flatten)]
    pub kind: EntryKind,
    /// Permission bits, with set-user-id, set-group-id and sticky.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl ManifestEntry {
    /// Digest of what the name holds: bytes of a file, target of a link, no bytes for a directory.
    /// Never zero: zero means that there is nothing of this name.
    pub fn content(&self) -> Digest {
        match &self.kind {
            EntryKind::File { digest, .. } => *digest,
            EntryKind::Directory => Digest::of(b""),
            EntryKind::Symlink { target } => Digest::of(target.as_bytes()),
        }
    }

    /// Whether it is a file that somebody may execute.
    pub fn is_executable(&self) -> bool {
        matches!(self.kind, EntryKind::File { .. }) && self.mode & 0o111 != 0
    }
}

/// Every name of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    entries: BTreeMap<CleanPath, ManifestEntry>,
    services: Vec<Service>,
}

impl Manifest {
    /// A manifest of these entries; a path that comes twice keeps its last entry, as in an image's layers.
    pub fn new(entries: impl IntoIterator<Item = (CleanPath, ManifestEntry)>) -> Manifest {
        Manifest { entries: entries.into_iter().collect(), services: Vec::new() }
    }

    /// The same with these root services, sorted by name, each program measured.
    ///
    /// # Errors
    /// A declaration is none, or its program is no executable of the image.
    pub fn declare(mut self, drafts: &[ServiceDraft]) -> Result<Manifest, ServiceError> {
        service::check_all(drafts.iter().map(|draft| (draft.name.as_str(), draft.argv.as_slice())))?;
        let measured = drafts.iter().map(|draft| {
            let ServiceDraft { name, argv } = draft.clone();
            let program = argv.first().map(String::as_str).unwrap_or_default();
            let binary = self.executable(program).map(|(_, entry)| entry.content());
            let none = || {
                ServiceError::new(&name, format!("starts {program:?}, which is no executable of the image"))
            };
            Ok(Service { binary: binary.ok_or_else(none)?, name, argv })
        });
        let mut services = measured.collect::<Result<Vec<_>, _>>()?;
        services.sort();
        self.services = services;
        Ok(self)
    }

    /// The root services that the image declares, sorted by name.
    pub fn services(&self) -> &[Service] {
        &self.services
    }

    /// The entries, sorted by path.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&CleanPath, &ManifestEntry)> {
        self.entries.iter()
    }

    /// The manifest as a file's bytes.
    pub fn to_json(&self) -> Vec<u8> {
        let entries = self.entries.iter().map(|(path, entry)| FileEntry {
            path: path.as_str().to_owned(),
            entry: entry.clone(),
            executable: entry.is_executable(),
        });
        let file = ManifestFile {
            format: FORMAT.to_owned(),
            services: self.services.clone(),
            entries: entries.collect(),
        };
        // Texts and numbers: nothing that JSON can't say.
        serde_json::to_vec(&file).unwrap_or_default()
    }

    /// Reads a manifest file; anything but the one spelling is refused.
    pub fn from_json(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        let file: ManifestFile =
            serde_json::from_slice(bytes).map_err(|error| ManifestError(error.to_string()))?;
        let entries = file.entries.into_iter().map(|file| Ok((CleanPath::clean(&file.path)?, file.entry)));
        let entries: Result<Vec<_>, PathError> = entries.collect();
        let manifest = Manifest::new(entries.map_err(|error| ManifestError(error.to_string()))?);
        let drafts: Vec<ServiceDraft> =
            file.services.into_iter().map(|Service { name, argv, .. }| ServiceDraft { name, argv }).collect();
        // Measured again: a digest that is not the program's makes another spelling.
        let manifest = manifest.declare(&drafts).map_err(|error| ManifestError(error.to_string()))?;
        if file.format != FORMAT || manifest.to_json() != bytes {
            return Err(ManifestError(format!("it is not in the one spelling of {FORMAT}")));
        }
        Ok(manifest)
    }

    /// The entry that a path leads to, links followed; `None` where it leads to
    /// nothing in the image, out of it, or in a circle.
    pub fn resolve(&self, path: &str) -> Option<(CleanPath, &ManifestEntry)> {
        let mut wanted: Vec<String> = components(path);
        wanted.reverse();
        let mut at: Vec<String> = Vec::new();
        let mut links = 0;
        while let Some(component) = wanted.pop() {
            match component.as_str() {
                "" | "." => continue,
                ".." => {
                    at.pop();
                    continue;
                }
                _ => at.push(component),
            }
            let here = CleanPath::clean(&format!("/{}", at.join("/"))).ok()?;
            let Some(ManifestEntry { kind: EntryKind::Symlink { target }, .. }) = self.entries.get(&here)
            else {
                continue;
            };
            links += 1;
            if links > MAX_LINKS {
                return None;
            }
            at.pop();
            if target.starts_with('/') {
                at.clear();
            }
            wanted.extend(components(target).into_iter().rev());
        }
        let path = CleanPath::clean(&format!("/{}", at.join("/"))).ok()?;
        self.entries.get(&path).map(|entry| (path.clone(), entry))
    }

    /// The image's executable that `execvp` would start; `None` where there is
    /// none in the image. `search` is the value of PATH.
    pub fn program(&self, name: &str, search: &str, cwd: &str) -> Option<(CleanPath, &ManifestEntry)> {
        let executable = |path: &str| self.executable(path);
        if name.contains('/') {
            let path = if name.starts_with('/') { name.to_owned() } else { format!("{cwd}/{name}") };
            return executable(&path);
        }
        search
            .split(':')
            .filter(|folder| folder.starts_with('/'))
            .find_map(|folder| executable(&format!("{folder}/{name}")))
    }

    fn executable(&self, path: &str) -> Option<(CleanPath, &ManifestEntry)> {
        self.resolve(path).filter(|(_, entry)| entry.is_executable())
    }

    /// The allowlist of the image's own executables.
    pub fn binaries(&self) -> BinaryPolicy {
        let mut draft = BinaryDraft::new();
        for entry in self.entries.values().filter(|entry| entry.is_executable()) {
            draft.approve(entry.content());
        }
        draft.seal()
    }
}

/// Why a file is not a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an image manifest: {0}. Build the image again")]
pub struct ManifestError(String);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestFile {
    format: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    services: Vec<Service>,
    entries: Vec<FileEntry>,
}

#[derive(Serialize, Deserialize)]
struct FileEntry {
    path: String,
    #[serde(flatten)]
    entry: ManifestEntry,
    executable: bool,
}

fn components(path: &str) -> Vec<String> {
    path.split('/').map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let entry = |kind, mode| ManifestEntry { kind, mode, uid: 0, gid: 0 };
        let file = |text: &str| EntryKind::File { digest: Digest::of(text.as_bytes()), bytes: 1 };
        let link = |target: &str| EntryKind::Symlink { target: target.into() };
        let path = |text: &str| CleanPath::clean(text).unwrap();
        Manifest::new([
            (path("/bin"), entry(link("usr/bin"), 0o777)),
            (path("/usr/bin"), entry(EntryKind::Directory, 0o755)),
            (path("/usr/bin/busybox"), entry(file("busybox"), 0o755)),
            (path("/usr/bin/sh"), entry(link("/bin/busybox"), 0o777)),
            (path("/usr/bin/up"), entry(link("../../usr/bin/sh"), 0o777)),
            (path("/usr/bin/loop"), entry(link("loop"), 0o777)),
            (path("/usr/bin/data"), entry(file("data"), 0o644)),
            (path("/usr/bin/gone"), entry(link("/nowhere"), 0o777)),
        ])
    }

    #[test]
    fn programs_are_found_as_the_kernel_would_find_them() {
        let manifest = manifest();
        let found = |name: &str| {
            let search = "/usr/local/bin:/bin";
            manifest.program(name, search, "/usr").map(|(path, _)| path.as_str().to_owned())
        };
        for name in ["sh", "/bin/sh", "/usr/bin/up", "bin/sh", "./bin/../bin/sh", "up", "/../bin/sh"] {
            assert_eq!(found(name).as_deref(), Some("/usr/bin/busybox"), "{name}");
        }
        for name in ["loop", "data", "gone", "nothing", "/bin", "sh/", ""] {
            let got = found(name);
            assert!(got.is_none() || name == "sh/", "{name}: {got:?}");
        }
    }

    #[test]
    fn a_service_is_measured_and_can_not_be_forged() {
        let draft = |text: &str| ServiceDraft::parse(text).unwrap();
        let declared = manifest().declare(&[draft("b=/bin/sh -c x"), draft("a=/usr/bin/up")]).unwrap();
        let names: Vec<&str> = declared.services().iter().map(|service| service.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert!(declared.services().iter().all(|service| service.binary == Digest::of(b"busybox")));
        let bytes = declared.to_json();
        assert_eq!(Manifest::from_json(&bytes), Ok(declared));
        let text = String::from_utf8(bytes).unwrap();
        let (real, forged) = (Digest::of(b"busybox").to_hex(), Digest::of(b"other").to_hex());
        assert!(Manifest::from_json(text.replacen(&real, &forged, 1).as_bytes()).is_err());
        for bad in ["x=/usr/bin/data", "x=/usr/bin/gone", "x=/usr/bin"] {
            assert!(
                manifest().declare(&[draft(bad)]).unwrap_err().to_string().contains("no executable"),
                "{bad}"
            );
        }
        assert!(manifest().declare(&[draft("x=/bin/sh"), draft("x=/bin/sh")]).is_err());
        let many: Vec<_> = (0..9).map(|n| draft(&format!("s{n}=/bin/sh"))).collect();
        assert!(manifest().declare(&many).is_err());
    }

    #[test]
    fn the_file_comes_back_and_has_one_spelling() {
        let manifest = manifest();
        let bytes = manifest.to_json();
        assert_eq!(Manifest::from_json(&bytes), Ok(manifest));
        let pretty: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert!(Manifest::from_json(&serde_json::to_vec_pretty(&pretty).unwrap()).is_err());
        let lied =
            String::from_utf8(bytes).unwrap().replacen("\"executable\":true", "\"executable\":false", 1);
        assert!(Manifest::from_json(lied.as_bytes()).is_err());
    }
}
