//! Python packages: pinned wheels, downloaded on the host by pip, installed by
//! [`crate::wheel`]. pip only downloads: no source distributions, no dependencies
//! that were not named, every hash required and checked here again.

use crate::error::{ImageError, at};
use crate::oci::open_plain;
use crate::program::{Advice, Running};
use crate::progress::Progress;
use crate::stage::Stage;
use crate::tree::Node;
use crate::wheel;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::Path;
use std::process::Command;

const ADVICE: Advice = Advice {
    install: "Debian, Ubuntu: apt-get install python3-pip",
    failed: "Every requirement must be pinned as name==version --hash=sha256:…, dependencies too, and have a wheel for the \
             image's Python; look at the network, too",
};
/// What the host's Python says where it has no pip.
const NO_PIP: &str = "No module named pip";
/// Newest glibc whose wheels are asked for, where the image's own can't be read: 2.17, which all have.
const OLDEST_GLIBC: u32 = 17;
/// Largest C library that is searched for its version.
const MAX_LIBC: u64 = 16 << 20;

/// A wheel that an image has.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    /// Name, as PEP 503 writes it.
    pub name: String,
    /// Version.
    pub version: String,
    /// SHA-256 of the artifact, in hexadecimal.
    pub sha256: String,
}

impl Pin {
    /// Reads `name==version sha256:…`, as policies and records write it.
    ///
    /// # Errors
    /// It is no such pin.
    pub fn parse(text: &str) -> Result<Pin, ImageError> {
        let bad = || ImageError::Request(format!("{text:?} is no pin name==version sha256:…"));
        let (package, digest) = text.split_once(' ').ok_or_else(bad)?;
        let (name, version) = package.split_once("==").ok_or_else(bad)?;
        let word = |text: &str, more: &str| {
            text.starts_with(|c: char| c.is_ascii_alphanumeric())
                && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
        };
        let sha256 = crate::oci::sha256_hex(digest)?;
        if !word(name, "._-") || !word(version, "._-+!") {
            return Err(bad());
        }
        Ok(Pin { name: normal(name), version: version.to_owned(), sha256: sha256.to_owned() })
    }
}

impl std::fmt::Display for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}=={} sha256:{}", self.name, self.version, self.sha256)
    }
}

/// PEP 503.
fn normal(name: &str) -> String {
    let parts = name.split(['-', '_', '.']).filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("-").to_ascii_lowercase()
}

/// The Python of an image.
pub(crate) struct Python {
    pub(crate) program: String,
    /// `3.11`
    pub(crate) version: String,
    pub(crate) site: String,
    platforms: Vec<String>,
}

impl Python {
    fn find(stage: &mut Stage) -> Result<Python, ImageError> {
        let found = ["/usr/local/bin/python3", "/usr/bin/python3"]
            .into_iter()
            .find_map(|path| stage.find(path).map(|(place, _)| (path, place)));
        let (_, place) = found.ok_or_else(|| {
            ImageError::Request(
                "the image has no python3, so no wheel can be installed: for debian:SUITE add --include python3"
                    .into(),
            )
        })?;
        let version = place.as_str().rsplit("/python").next().unwrap_or_default().to_owned();
        if !version.starts_with("3.") || !version.chars().all(|c| c.is_ascii_digit() || c == '.') {
            return Err(ImageError::Request(format!("{place} in the image names no version of Python")));
        }
        // Debian's own Python looks for what others install in dist-packages.
        let folder = if place.as_str().starts_with("/usr/bin/") && stage.find("/etc/debian_version").is_some()
        {
            "dist-packages"
        } else {
            "site-packages"
        };
        let prefix = if folder == "site-packages" && place.as_str().starts_with("/usr/bin/") {
            "/usr"
        } else {
            "/usr/local"
        };
        let site = format!("{prefix}/lib/python{version}/{folder}");
        let platforms = platforms(stage)?;
        Ok(Python { program: place.as_str().to_owned(), version, site, platforms })
    }

    /// A path as RECORD writes it: relative to site-packages.
    pub(crate) fn relative(&self, path: &str) -> String {
        if let Some(rest) = path.strip_prefix(&format!("{}/", self.site)) {
            return rest.to_owned();
        }
        let up = self.site.matches('/').count();
        format!("{}{}", "../".repeat(up), path.trim_start_matches('/'))
    }
}

/// The platform tags that the image's C library can load.
fn platforms(stage: &mut Stage) -> Result<Vec<String>, ImageError> {
    if stage.find("/lib/ld-musl-x86_64.so.1").is_some() {
        return Ok(vec!["musllinux_1_1_x86_64".into(), "musllinux_1_2_x86_64".into()]);
    }
    let mut minor = OLDEST_GLIBC;
    if let Some((_, entry)) = stage.find("/lib/x86_64-linux-gnu/libc.so.6")
        && let Node::File(content) = &entry.node
    {
        let bytes = content.read(MAX_LIBC)?;
        let text = b"release version 2.";
        let found = bytes.windows(text.len()).position(|window| window == text);
        let digits = found.and_then(|at| bytes.get(at + text.len()..)).unwrap_or_default();
        let digits: String = digits.iter().take_while(|b| b.is_ascii_digit()).map(|&b| b as char).collect();
        minor = digits.parse().unwrap_or(OLDEST_GLIBC).min(99);
    }
    let mut tags: Vec<String> =
        (5..=minor).rev().map(|minor| format!("manylinux_2_{minor}_x86_64")).collect();
    tags.extend(
        ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"].map(Into::into),
    );
    Ok(tags)
}

/// Downloads what `requirements` names and installs it; then the pins.
pub(crate) fn install(
    stage: &mut Stage,
    requirements: Option<&Path>,
    pins: &[Pin],
    progress: &mut dyn Progress,
) -> Result<Vec<Pin>, ImageError> {
    if requirements.is_none() && pins.is_empty() {
        return Ok(Vec::new());
    }
    let python = Python::find(stage)?;
    let dir = tempfile::tempdir_in(stage.scratch()).map_err(at(stage.scratch()))?;
    let mut lists = Vec::new();
    lists.extend(requirements.map(Path::to_owned));
    if !pins.is_empty() {
        let path = dir.path().join("pins.txt");
        let lines =
            pins.iter().map(|pin| format!("{}=={} --hash=sha256:{}\n", pin.name, pin.version, pin.sha256));
        fs::write(&path, lines.collect::<String>()).map_err(at(&path))?;
        lists.push(path);
    }
    let wheels = dir.path().join("wheels");
    fs::create_dir(&wheels).map_err(at(&wheels))?;
    progress.step("downloading wheels with pip");
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]);
    command.args(["--only-binary=:all:", "--require-hashes", "--no-deps", "--implementation=cp"]);
    command.arg(format!("--python-version={}", python.version)).arg("--dest").arg(&wheels);
    for platform in &python.platforms {
        command.arg(format!("--platform={platform}"));
    }
    for list in &lists {
        command.arg("-r").arg(list);
    }
    Running::start("pip", ADVICE, &mut command)?.finish().map_err(|error| match error {
        ImageError::Program { program, why, .. } if why.ends_with(NO_PIP) => {
            ImageError::NotInstalled { program, install: ADVICE.install }
        }
        error => error,
    })?;
    let mut files: Vec<_> = fs::read_dir(&wheels)
        .map_err(at(&wheels))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .collect();
    files.sort();
    let mut installed = Vec::new();
    for path in files {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut parts = name.split('-');
        let (package, version) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let mut hasher = Sha256::new();
        std::io::copy(&mut open_plain(&path)?, &mut hasher).map_err(at(&path))?;
        let sha256 = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let pin = Pin { name: normal(package), version: version.to_owned(), sha256 };
        if let Some(wanted) = pins.iter().find(|wanted| wanted.name == pin.name)
            && wanted.sha256 != pin.sha256
        {
            return Err(ImageError::Source { what: name, why: format!("it is not the approved {wanted}") });
        }
        progress.step(&format!("installing {}=={}", pin.name, pin.version));
        wheel::install(stage, &python, &path)?;
        installed.push(pin);
    }
    if let Some(lost) = pins.iter().find(|wanted| !installed.contains(wanted)) {
        return Err(ImageError::Source { what: lost.to_string(), why: "pip did not bring it".into() });
    }
    installed.sort();
    Ok(installed)
}
