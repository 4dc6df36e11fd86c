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
use crate::program::{Advice, Running};
use crate::progress::Progress;
use crate::source::Reference;
use crate::stage::{Stage, too_much};
use std::path::Path;
use std::process::Command;

const ADVICE: Advice = Advice {
    install: "Debian, Ubuntu: apt-get install skopeo",
    failed: "Check the reference, the network, and `skopeo login`",
};

/// What skopeo says where the user has no file that says which signatures images must have.
const NO_POLICY: [&str; 2] = ["trust policy", "no such file"];

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
    with_policy(|policy| {
        let mut command = Command::new("skopeo");
        command.args(policy).args(PLATFORM).args(["inspect", "--raw", "--no-tags"]);
        if reference.is_loopback() {
            command.arg("--tls-verify=false");
        }
        command.arg("--").arg(format!("docker://{reference}"));
        Running::start("skopeo", ADVICE, &mut command)?.output(MAX_JSON)
    })
}

fn download(reference: &Reference, dir: &Path, declared: u64) -> Result<(), ImageError> {
    with_policy(|policy| {
        // A registry that sends more than it declared fills no disk: no file may be larger.
        let mut command = Command::new("prlimit");
        command.arg(format!("--fsize={}", declared.saturating_add(1 << 20))).arg("skopeo");
        command.args(policy).args(PLATFORM).args(["copy", "--preserve-digests", "--quiet"]);
        if reference.is_loopback() {
            command.arg("--src-tls-verify=false");
        }
        command.arg("--").arg(format!("docker://{reference}")).arg(format!("dir:{}", dir.display()));
        Running::start("skopeo", ADVICE, &mut command)?.finish()
    })
}

const PLATFORM: [&str; 4] = ["--override-os", "linux", "--override-arch", "amd64"];

/// Obeys the user's signature policy; only where there is none goes on without,
/// since the digests are checked here either way.
fn with_policy<T>(run: impl Fn(&[&str]) -> Result<T, ImageError>) -> Result<T, ImageError> {
    run(&[]).or_else(|error| {
        let text = error.to_string();
        if NO_POLICY.iter().all(|part| text.contains(part)) {
            run(&["--insecure-policy"])
        } else {
            Err(error)
        }
    })
}
