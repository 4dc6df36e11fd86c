//! A kernel built from the distribution's source, with a configuration of ours.
//!
//! ```text
//! linux-source ──apt──▶ sources ──tinyconfig + slim.config──▶ .config ──make──▶ vmlinux ──strip──▶ vmlinuz
//! ```
//! It has the devices of a machine of ours built in, no modules, no drivers of PCI devices or networks.
//! What it guarantees: the configuration is what `slim.config` asks for, or nothing is built; user, host and
//! time are taken out, so that the same source, configuration and compiler give the same bytes.

use super::{Kernel, apt};
use crate::error::{ImageError, at};
use crate::program::{Advice, Running};
use crate::progress::Progress;
use hotcell_ledger::Digest;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is laid over the kernel's smallest configuration.
const CONFIG: &str = include_str!("slim.config");
/// Debian's and Ubuntu's package that depends on the current source.
const META_PACKAGE: &str = "linux-source";
/// What the build needs beside the source.
const PROGRAMS: [&str; 9] = ["bc", "bison", "dpkg-deb", "flex", "gcc", "make", "pahole", "strip", "tar"];
const ADVICE: Advice = Advice {
    install: "The build needs: apt-get install bc bison dwarves flex gcc libc6-dev libelf-dev make xz-utils",
    failed: "The build needs libelf-dev, libc6-dev and xz-utils too, and some 4 GiB of disk in the cache folder",
};
/// Output of a quiet build that is read; there is hardly any.
const MAX_OUTPUT: u64 = 16 << 20;

/// What a slim kernel is built from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlimRecipe {
    package: String,
    version: String,
    configuration: Digest,
}

impl SlimRecipe {
    /// The current source, as apt knows it.
    ///
    /// # Errors
    /// apt knows none.
    pub(crate) fn current() -> Result<SlimRecipe, ImageError> {
        let package = apt::depends(META_PACKAGE, is_source_package)?;
        let version = package.as_deref().map(apt::version).transpose()?.flatten();
        let (package, version) =
            package.zip(version).ok_or_else(|| ImageError::NoKernelPackage(META_PACKAGE.into()))?;
        Ok(SlimRecipe { package, version, configuration: Digest::of(CONFIG.as_bytes()) })
    }

    /// Whether this kernel was built so.
    pub(crate) fn made(&self, kernel: &Kernel) -> bool {
        kernel.package() == self.name()
            && kernel.facts.configuration.as_deref() == Some(&*self.configuration.to_hex())
    }

    fn name(&self) -> String {
        format!("{} {}", self.package, self.version)
    }
}

impl Kernel {
    /// Builds a slim kernel into `dir`, which is new and empty. It takes minutes.
    ///
    /// # Errors
    /// A program or the source is not there, the source has not the options, or the build fails.
    pub(crate) fn build_slim(
        dir: &Path,
        recipe: &SlimRecipe,
        progress: &mut dyn Progress,
    ) -> Result<Kernel, ImageError> {
        for program in PROGRAMS {
            run(program, Command::new(program).arg("--version"))?;
        }
        // A folder beside: what is in `dir` at the end is the kernel.
        let work = tempfile::tempdir_in(dir).map_err(at(dir))?;
        let source = unpack(work.path(), &recipe.package, progress)?;
        progress.step("configuring the kernel");
        configure(&source)?;
        progress.step("building the kernel (minutes)");
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        make(&source, &[&format!("-j{jobs}"), "vmlinux"])?;
        let release = String::from_utf8_lossy(&make(&source, &["kernelrelease"])?).trim().to_owned();
        let vmlinux = work.path().join("vmlinuz");
        run("strip", Command::new("strip").arg("-o").arg(&vmlinux).arg(source.join("vmlinux")))?;
        let bytes = fs::read(&vmlinux).map_err(at(&vmlinux))?;
        work.close().map_err(at(dir))?;
        Kernel::create(dir, (release, recipe.name()), &bytes, &[], Some(recipe.configuration))
    }
}

/// `linux-source-6.1`: a name that may go to apt-get, and no option.
fn is_source_package(name: &str) -> bool {
    let version = name.strip_prefix("linux-source-");
    version.is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.+~".contains(&b))
}

/// Downloads and unpacks the source; the folder that it is in.
fn unpack(work: &Path, package: &str, progress: &mut dyn Progress) -> Result<PathBuf, ImageError> {
    progress.step(&format!("downloading {package}"));
    let deb = apt::download(work, package)?;
    progress.step(&format!("unpacking {package}"));
    let files = work.join("package");
    run("dpkg-deb", Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&files))?;
    let folder = files.join("usr/src");
    let archive = fs::read_dir(&folder)
        .map_err(at(&folder))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.is_file() && path.to_string_lossy().contains(".tar."))
        .ok_or_else(|| ImageError::KernelLacks {
            package: package.into(),
            what: "archive of sources".into(),
        })?;
    let source = work.join("source");
    fs::create_dir(&source).map_err(at(&source))?;
    let mut tar = Command::new("tar");
    tar.arg("-x").arg("--strip-components=1").arg("-C").arg(&source).arg("-f").arg(&archive);
    run("tar", &mut tar)?;
    for path in [&files, &deb] {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed.map_err(at(path))?;
    }
    Ok(source)
}

/// The kernel's smallest configuration with ours over it, or an error that names what did not come out as asked.
fn configure(source: &Path) -> Result<(), ImageError> {
    make(source, &["tinyconfig"])?;
    let path = source.join(".config");
    let mut text = fs::read_to_string(&path).map_err(at(&path))?;
    // Of two lines for one option the last counts.
    text.push_str(CONFIG);
    fs::write(&path, text).map_err(at(&path))?;
    make(source, &["olddefconfig"])?;
    let made = options(&fs::read_to_string(&path).map_err(at(&path))?);
    let off = |value: &Option<String>| value.clone().unwrap_or_else(|| "n".into());
    let wrong: Vec<String> = options(CONFIG)
        .into_iter()
        .filter(|(name, wanted)| off(made.get(name).unwrap_or(&None)) != off(wanted))
        .map(|(name, wanted)| format!("{name}={}", off(&wanted)))
        .collect();
    if wrong.is_empty() {
        return Ok(());
    }
    Err(ImageError::Request(format!(
        "this kernel source can't be configured as the slim kernel is: {}. Use the cloud kernel",
        wrong.join(" ")
    )))
}

/// Options of a configuration; `None` for one that is not set.
fn options(text: &str) -> BTreeMap<String, Option<String>> {
    let option = |line: &str| {
        if let Some((name, value)) = line.split_once('=').filter(|(name, _)| name.starts_with("CONFIG_")) {
            return Some((name.to_owned(), Some(value.to_owned())));
        }
        let name = line.strip_prefix("# ")?.strip_suffix(" is not set")?;
        Some((name.to_owned(), None))
    };
    text.lines().filter_map(option).collect()
}

fn make(source: &Path, targets: &[&str]) -> Result<Vec<u8>, ImageError> {
    let mut command = Command::new("make");
    command.arg("-s").args(targets).current_dir(source);
    // The caller's settings for other kernels are not for this one.
    for variable in ["ARCH", "CROSS_COMPILE", "KBUILD_OUTPUT", "KCFLAGS", "LLVM", "LOCALVERSION", "MAKEFLAGS"]
    {
        command.env_remove(variable);
    }
    command.env("LC_ALL", "C");
    for what in ["USER", "HOST"] {
        command.env(format!("KBUILD_BUILD_{what}"), "hotcell");
    }
    command.env("KBUILD_BUILD_TIMESTAMP", "1970-01-01").env("KBUILD_BUILD_VERSION", "1");
    Running::start("make", ADVICE, &mut command)?.output(MAX_OUTPUT)
}

fn run(name: &'static str, command: &mut Command) -> Result<(), ImageError> {
    Running::start(name, ADVICE, command)?.output(MAX_OUTPUT).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_says_too_much_ends_the_build() {
        let say =
            |bytes: u64| run("sh", Command::new("sh").args(["-c", &format!("head -c {bytes} /dev/zero")]));
        say(MAX_OUTPUT).unwrap();
        let error = say(MAX_OUTPUT + 1).unwrap_err().to_string();
        assert!(error.contains("more than 16777216 bytes"), "{error}");
    }

    #[test]
    fn only_names_of_kernel_sources_go_to_apt() {
        assert!(is_source_package("linux-source-6.1"));
        for bad in ["linux-source", "linux-source-x", "-o=x", "linux-source-6 x", "linux-image-6.1"] {
            assert!(!is_source_package(bad), "{bad}");
        }
    }

    #[test]
    fn the_configuration_names_each_option_once_and_has_no_network_no_pci_drivers_no_modules() {
        let lines = CONFIG.lines().filter(|line| line.contains("CONFIG_")).count();
        let ours = options(CONFIG);
        assert_eq!(ours.len(), lines, "an option is named twice, or a line is no option");
        for off in ["MODULES", "VIRTIO_PCI", "NETDEVICES", "DEVMEM", "KEXEC", "IO_URING", "USERFAULTFD"] {
            assert_eq!(ours.get(&format!("CONFIG_{off}")), Some(&None), "{off}");
        }
        for on in ["DEBUG_INFO_BTF", "KALLSYMS_ALL", "SECURITY_LANDLOCK", "FANOTIFY_ACCESS_PERMISSIONS"] {
            assert_eq!(ours.get(&format!("CONFIG_{on}")), Some(&Some("y".into())), "{on}");
        }
    }
}
