//! The distribution's cloud kernel, unpacked from its package.

use super::{Kernel, apt};
use crate::error::{ImageError, at};
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Packages that are tried in order: Debian's, then Ubuntu's. Each is a
/// meta-package that depends on the current kernel.
const META_PACKAGES: [&str; 2] = ["linux-image-cloud-amd64", "linux-image-virtual"];
/// Modules that the guest needs where the kernel has them not built in; what
/// they depend on comes along.
const MODULES: [&str; 5] = ["virtio_mmio", "virtio_blk", "virtio_console", "squashfs", "ext4"];
/// Largest module or kernel file that is unpacked.
const MAX_FILE: u64 = 256 << 20;

impl Kernel {
    /// Downloads the current cloud kernel into `dir`, which is new and empty.
    pub(crate) fn fetch(dir: &Path, say: &mut dyn FnMut(&str)) -> Result<Kernel, ImageError> {
        let image = META_PACKAGES
            .iter()
            .find_map(|meta| apt::depends(meta, is_kernel_package).transpose())
            .transpose()?
            .ok_or_else(|| ImageError::NoKernelPackage(META_PACKAGES.join(" nor ")))?;
        let mut unpacked = Unpacked::default();
        let modules_package = image.replace("linux-image-unsigned-", "linux-image-");
        let modules_package = modules_package.replace("linux-image-", "linux-modules-");
        say(&format!("downloading {image}"));
        unpacked.package(dir, &image)?;
        if !unpacked.files.keys().any(|name| name.ends_with(".ko")) {
            say(&format!("downloading {modules_package}"));
            unpacked.package(dir, &modules_package)?;
        }
        let lacks = |what: &str| ImageError::KernelLacks { package: image.clone(), what: what.into() };
        let (release, vmlinuz) = unpacked.vmlinuz.take().ok_or_else(|| lacks("kernel image"))?;
        let order = unpacked.load_order(&release).map_err(|what| lacks(&what))?;
        let modules: Vec<(String, &[u8])> = order
            .into_iter()
            .map(|name| {
                let bytes = unpacked.files.get(&format!("{name}.ko")).ok_or_else(|| lacks(&name))?;
                Ok((name, bytes.as_slice()))
            })
            .collect::<Result<_, ImageError>>()?;
        Kernel::create(dir, (release, image.clone()), &vmlinuz, &modules, None)
    }
}

/// `linux-image-6.1.0-…`: a name that may go to apt-get, and no option.
fn is_kernel_package(name: &str) -> bool {
    let version = name.strip_prefix("linux-image-unsigned-").or_else(|| name.strip_prefix("linux-image-"));
    version.is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.+~".contains(&b))
}

#[derive(Default)]
struct Unpacked {
    vmlinuz: Option<(String, Vec<u8>)>,
    /// `<name>.ko` to its bytes, and the kernel's own lists by their names.
    files: BTreeMap<String, Vec<u8>>,
}

impl Unpacked {
    fn package(&mut self, dir: &Path, package: &str) -> Result<(), ImageError> {
        let deb = apt::download(dir, package)?;
        let fail = |why: String| ImageError::Program {
            program: format!("dpkg-deb --fsys-tarfile {package}"),
            why,
            advice: apt::ADVICE,
        };
        let mut unpack = Command::new("dpkg-deb")
            .arg("--fsys-tarfile")
            .arg(&deb)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| fail(error.to_string()))?;
        let read = unpack.stdout.take().map(|stdout| self.read_tar(stdout));
        let status = unpack.wait().map_err(at(&deb))?;
        read.transpose().map_err(at(&deb))?;
        if !status.success() {
            return Err(fail(status.to_string()));
        }
        fs::remove_file(&deb).map_err(at(&deb))
    }

    /// Keeps what may be needed; writes nothing.
    fn read_tar(&mut self, from: impl Read) -> std::io::Result<()> {
        let mut archive = tar::Archive::new(from);
        for entry in archive.entries()? {
            let mut entry = entry?;
            if !entry.header().entry_type().is_file() || entry.size() > MAX_FILE {
                continue;
            }
            let path = entry.path()?.into_owned();
            let Some(name) = path.file_name().and_then(|name| name.to_str()).map(str::to_owned) else {
                continue;
            };
            let is_list = name == "modules.builtin";
            let module = module_name(&name);
            let release = name.strip_prefix("vmlinuz-");
            if !is_list && module.is_none() && release.is_none() {
                continue;
            }
            let mut bytes = Vec::new();
            entry.by_ref().take(MAX_FILE).read_to_end(&mut bytes)?;
            if let Some(release) = release {
                self.vmlinuz = Some((release.to_owned(), bytes));
            } else if let Some(module) = module {
                self.files.insert(format!("{module}.ko"), decompress(&name, bytes)?);
            } else {
                self.files.insert(name, bytes);
            }
        }
        Ok(())
    }

    /// The wanted modules and what they depend on, dependencies first.
    fn load_order(&self, release: &str) -> Result<Vec<String>, String> {
        let list = self.files.get("modules.builtin").ok_or(format!("modules.builtin for {release}"))?;
        let builtin: Vec<&str> = std::str::from_utf8(list)
            .map_err(|error| error.to_string())?
            .lines()
            .filter_map(|line| module_name(line.rsplit('/').next()?))
            .collect();
        let mut order = Vec::new();
        for wanted in MODULES {
            self.visit(wanted, &builtin, &mut order, 0)?;
        }
        Ok(order)
    }

    fn visit(&self, name: &str, builtin: &[&str], order: &mut Vec<String>, depth: u32) -> Result<(), String> {
        let same = |other: &str| other.replace('-', "_") == name.replace('-', "_");
        if order.iter().any(|done| same(done)) || builtin.iter().any(|&other| same(other)) {
            return Ok(());
        }
        if depth > 16 {
            return Err(format!("end to the dependencies of {name}"));
        }
        let found = self.files.iter().find(|(file, _)| file.strip_suffix(".ko").is_some_and(same));
        let (file, bytes) = found.ok_or(format!("module {name}"))?;
        for dependency in dependencies(bytes) {
            self.visit(&dependency, builtin, order, depth + 1)?;
        }
        order.push(file.trim_end_matches(".ko").to_owned());
        Ok(())
    }
}

/// `virtio_blk` of `virtio_blk.ko`, `.ko.xz` or `.ko.zst`.
fn module_name(file: &str) -> Option<&str> {
    [".ko", ".ko.xz", ".ko.zst"].iter().find_map(|suffix| file.strip_suffix(suffix))
}

/// Ubuntu's modules are compressed; the program for it is part of the system.
fn decompress(name: &str, bytes: Vec<u8>) -> std::io::Result<Vec<u8>> {
    let program = match name.rsplit('.').next() {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return Ok(bytes),
    };
    let mut file = tempfile::tempfile()?;
    file.write_all(&bytes)?;
    std::io::Seek::rewind(&mut file)?;
    let out = Command::new(program).arg("-dc").stdin(file).output()?;
    if out.status.success() {
        Ok(out.stdout)
    } else {
        Err(std::io::Error::other(format!("{program} -dc fails")))
    }
}

/// What a module's `.modinfo` says that it depends on: `depends=a,b`, ended by NUL.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let start = module.windows(KEY.len()).position(|window| window == KEY).map(|at| at + KEY.len());
    let rest = start.and_then(|start| module.get(start..)).unwrap_or_default();
    let end = rest.iter().position(|&byte| byte == 0).unwrap_or(0);
    let list = String::from_utf8_lossy(rest.get(..end).unwrap_or_default()).into_owned();
    list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_depend_on() {
        let module = |depends: &str| format!("\x7fELF\0license=GPL\0depends={depends}\0x").into_bytes();
        let mut unpacked = Unpacked::default();
        for (name, depends) in [
            ("virtio_mmio", "virtio,virtio_ring"),
            ("virtio_ring", ""),
            ("virtio", "virtio_ring"),
            ("virtio_blk", "virtio"),
            ("virtio_console", ""),
            ("squashfs", ""),
        ] {
            unpacked.files.insert(format!("{name}.ko"), module(depends));
        }
        unpacked.files.insert("modules.builtin".into(), b"kernel/fs/ext4/ext4.ko\n".to_vec());
        let order = unpacked.load_order("6.1").unwrap();
        assert_eq!(
            order,
            ["virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_console", "squashfs"]
        );
        unpacked.files.remove("virtio_ring.ko");
        assert_eq!(unpacked.load_order("6.1").unwrap_err(), "module virtio_ring");
    }

    #[test]
    fn only_kernel_packages_go_to_apt() {
        assert!(is_kernel_package("linux-image-6.1.0-57-cloud-amd64"));
        assert!(is_kernel_package("linux-image-unsigned-6.8.0-1-generic"));
        for bad in ["linux-image-cloud-amd64", "-o=x", "linux-image-6 x", "linux-image-6;x", "curl"] {
            assert!(!is_kernel_package(bad), "{bad}");
        }
    }
}
