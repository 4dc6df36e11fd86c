//! `debian:SUITE`: a minimal Debian, put together by mmdebstrap.
//!
//! mmdebstrap checks the archive's signatures and runs the packages' own
//! installation scripts, in a user namespace where the caller is not root or the
//! host allows it. Its tar goes straight into the [`Stage`].

use crate::error::ImageError;
use crate::layer::{Whiteouts, apply};
use crate::program::{Advice, Running};
use crate::progress::Progress;
use crate::stage::{Stage, refuse};
use hotcell_policy::CleanPath;
use std::process::Command;

const ADVICE: Advice = Advice {
    install: "Debian, Ubuntu: apt-get install mmdebstrap uidmap",
    failed: "Check the suite, the package names, the mirror and the network; an ordinary user also needs user namespaces, \
             newuidmap (apt-get install uidmap) and a line in /etc/subuid",
};

/// What differs between two builds, or tells of the host.
const CLEANED: [&str; 6] = [
    "/etc/resolv.conf",
    "/var/cache/ldconfig/aux-cache",
    "/var/log/alternatives.log",
    "/var/log/bootstrap.log",
    "/var/log/dpkg.log",
    "/var/log/apt/history.log",
];

pub(crate) fn apply_debian(
    stage: &mut Stage,
    suite: &str,
    include: &[String],
    mirror: Option<&str>,
    progress: &mut dyn Progress,
) -> Result<(), ImageError> {
    let mut command = Command::new("mmdebstrap");
    command.args(["--variant=minbase", "--format=tar"]).env("SOURCE_DATE_EPOCH", "0").env("LC_ALL", "C");
    command.arg(format!("--mode={}", mode()));
    // Recommended packages are not asked for by anybody.
    command.args(["--aptopt=APT::Install-Recommends \"false\"", "--skip=output/mknod"]);
    if !include.is_empty() {
        for package in include {
            check(package)?;
        }
        command.arg(format!("--include={}", include.join(",")));
    }
    command.args(["--", suite, "-"]);
    if let Some(mirror) = mirror {
        if mirror.starts_with('-') {
            return Err(ImageError::Request(format!("`{mirror}` is no mirror")));
        }
        command.arg(mirror);
    }
    progress.step(&format!("putting a Debian {suite} together with mmdebstrap (minutes)"));
    let mut running = Running::start("mmdebstrap", ADVICE, &mut command)?;
    if let Some(stdout) = running.stdout() {
        let applied = apply(stage, stdout, Whiteouts::Names, "mmdebstrap's archive", progress);
        // Its own complaint says more than that its archive ended early.
        running.finish()?;
        applied?;
    }
    for path in CLEANED {
        let path = CleanPath::clean(path).map_err(|error| refuse(path, error.to_string()))?;
        stage.whiteout_anything(&path);
    }
    let hostname =
        CleanPath::clean("/etc/hostname").map_err(|error| refuse("/etc/hostname", error.to_string()))?;
    stage.bytes(&hostname, 0o644, b"hotcell\n")
}

/// A namespace is the better wall even for root; without one root does without.
fn mode() -> &'static str {
    let is_root = rustix::process::geteuid().is_root();
    let has_namespaces = Command::new("unshare")
        .args(["--user", "--map-root-user", "true"])
        .output()
        .is_ok_and(|output| output.status.success());
    if is_root && !has_namespaces { "root" } else { "unshare" }
}

/// A package name, perhaps with a version: `python3`, `git=1:2.39.5-0+deb12u2`.
fn check(package: &str) -> Result<(), ImageError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "+-.=:~".contains(c);
    let starts = package.starts_with(|c: char| c.is_ascii_alphanumeric());
    if starts && package.chars().all(allowed) {
        return Ok(());
    }
    Err(ImageError::Request(format!("{package:?} is no Debian package name")))
}
