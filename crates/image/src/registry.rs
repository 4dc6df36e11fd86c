//! `docker://REF`: an image of a registry, fetched by skopeo.
//!
//! skopeo is a program and not a library here because of what a registry takes:
//! TLS, tokens, credential helpers, mirrors. None of that is linked into Hotcell,
//! which talks to no network. Nothing that skopeo says is believed: the manifest
//! is measured here, then each blob against it. HTTPS always; plain HTTP only
//! where the registry is this machine.

use crate::error::{ImageError, at};
use crate::limits::MAX_JSON;
use crate::oci::{self, Applied, Blobs};
use crate::program::Running;
use crate::progress::Progress;
use crate::source::Reference;
use crate::stage::{Stage, too_much};
use std::path::Path;
use std::process::Command;

const ADVICE: &str = "Install skopeo (Debian, Ubuntu: apt-get install skopeo), and check the reference, the network, \
     and `skopeo login`";

/// Files that say which signatures images must have; where the user has one, it is obeyed.
const POLICIES: [&str; 2] = ["/etc/containers/policy.json", ".config/containers/policy.json"];

pub(crate) fn apply_registry(
    stage: &mut Stage,
    reference: &Reference,
    progress: &mut dyn Progress,
) -> Result<Applied, ImageError> {
    progress.step(&format!("asking the registry for {reference}"));
    let raw = manifest_of(reference)?;
    let top = oci::sha256_of(&raw);
    if let Some(pin) = &reference.digest
        && *pin != top
    {
        return Err(ImageError::Source {
            what: reference.to_string(),
            why: format!("the registry gave a manifest with the digest {top}"),
        });
    }
    let chosen = if oci::is_index("", &raw) { oci::choose(&raw)? } else { top.clone() };
    let pinned = reference.pinned(&chosen);
    let bytes = if chosen == top { raw } else { manifest_of(&pinned)? };
    if oci::sha256_of(&bytes) != chosen {
        return Err(ImageError::Source {
            what: pinned.to_string(),
            why: "the registry gave a manifest with another digest".into(),
        });
    }
    let declared = oci::declared_bytes(&bytes)?;
    if declared > stage.bytes_left() {
        return Err(too_much(format!("its layers have {} MiB", declared >> 20)));
    }
    let dir = tempfile::tempdir_in(stage.scratch()).map_err(at(stage.scratch()))?;
    progress.step(&format!("downloading {} KiB", declared.div_ceil(1024)));
    download(&pinned, dir.path(), declared)?;
    let blobs = Blobs { dir: dir.path() };
    let applied = oci::manifest(stage, &bytes, &blobs, progress)?;
    Ok(Applied { resolved: top, ..applied })
}

fn manifest_of(reference: &Reference) -> Result<Vec<u8>, ImageError> {
    let mut command = skopeo(None);
    command.args(["inspect", "--raw", "--no-tags"]);
    if reference.is_loopback() {
        command.arg("--tls-verify=false");
    }
    command.arg("--").arg(format!("docker://{reference}"));
    Running::start("skopeo", ADVICE, &mut command)?.output(MAX_JSON)
}

fn download(reference: &Reference, dir: &Path, declared: u64) -> Result<(), ImageError> {
    // A registry that sends more than it declared fills no disk: no file may be larger.
    let mut command = skopeo(Some(declared.saturating_add(1 << 20)));
    command.args(["copy", "--preserve-digests", "--quiet"]);
    if reference.is_loopback() {
        command.arg("--src-tls-verify=false");
    }
    command.arg("--").arg(format!("docker://{reference}")).arg(format!("dir:{}", dir.display()));
    Running::start("skopeo", ADVICE, &mut command)?.finish()
}

fn skopeo(largest_file: Option<u64>) -> Command {
    let mut command = match largest_file {
        None => Command::new("skopeo"),
        Some(bytes) => {
            let mut command = Command::new("prlimit");
            command.arg(format!("--fsize={bytes}")).arg("skopeo");
            command
        }
    };
    // The caller's home, where skopeo itself looks. No policy at all would be an error of
    // skopeo's; the digests are checked here either way.
    let home = std::env::home_dir().unwrap_or_default();
    if !POLICIES.iter().any(|policy| home.join(policy).exists()) {
        command.arg("--insecure-policy");
    }
    command.args(["--override-os", "linux", "--override-arch", "amd64"]);
    command
}
