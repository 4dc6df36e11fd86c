//! Packages by apt: asked for and downloaded, never installed.

use crate::error::{ImageError, at};
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub(super) const ADVICE: &str =
    "Check the network, the package sources (`apt-get update` as root) and the space in the cache folder";

/// Where the host is no Debian.
const NO_APT: &str =
    "Hotcell takes its guest kernel from Debian's or Ubuntu's packages and needs apt for that";

fn run(command: &mut Command) -> Result<Output, ImageError> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.env("LC_ALL", "C").stdin(Stdio::null()).output().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => ImageError::NotInstalled { program, install: NO_APT },
        _ => ImageError::Program { program, why: error.to_string(), advice: ADVICE },
    })
}

/// The first package that a package depends on and that is wanted; `None` where apt knows none.
pub(super) fn depends(package: &str, wanted: impl Fn(&str) -> bool) -> Result<Option<String>, ImageError> {
    let listed =
        run(Command::new("apt-cache").args(["--no-recommends", "--no-suggests", "depends", package]))?;
    let text = String::from_utf8_lossy(&listed.stdout);
    let depends = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    Ok(depends.map(str::trim).find(|name| wanted(name)).map(str::to_owned))
}

/// The version of a package that would be downloaded now.
pub(super) fn version(package: &str) -> Result<Option<String>, ImageError> {
    let listed = run(Command::new("apt-cache").args(["policy", package]))?;
    let text = String::from_utf8_lossy(&listed.stdout);
    let version = text.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
    Ok(version.filter(|version| *version != "(none)").map(str::to_owned))
}

/// Downloads a package into a folder of its own in `dir`; the path of its file.
pub(super) fn download(dir: &Path, package: &str) -> Result<PathBuf, ImageError> {
    let folder = dir.join("download");
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(at(&folder))?;
    let fetched = run(Command::new("apt-get").args(["download", "-q", package]).current_dir(&folder))?;
    let fail =
        |why| ImageError::Program { program: format!("apt-get download {package}"), why, advice: ADVICE };
    if !fetched.status.success() {
        let why = String::from_utf8_lossy(&fetched.stderr);
        let errors: Vec<&str> = why.lines().filter(|line| line.starts_with("E:")).collect();
        return Err(fail(errors.join(" ")));
    }
    let deb = fs::read_dir(&folder)
        .map_err(at(&folder))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .ok_or_else(|| fail("it left no package".into()))?;
    let place = dir.join("package.deb");
    fs::rename(&deb, &place).map_err(at(&deb))?;
    fs::remove_dir_all(&folder).map_err(at(&folder))?;
    Ok(place)
}
