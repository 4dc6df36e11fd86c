//! The initramfs: PID 1 and the kernel modules that it loads, as a newc archive.

use crate::error::ImageError;
use crate::kernel::Module;
use cpio::newc::{Builder, trailer};
use std::io::{self, Write};

const DIRECTORY: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Builds the archive: `/init`, `/modules/<name>.ko`, and `/modules/order`, which
/// names them one a line in the order of loading, which is that of `modules`. Same inputs, same bytes.
///
/// # Errors
/// A module is too large for the format (4 GiB).
pub fn build_initramfs(init: &[u8], modules: &[Module]) -> Result<Vec<u8>, ImageError> {
    let fail = |path: &str| {
        let path = path.to_owned();
        move |error: io::Error| ImageError::Entry { path: path.clone(), why: error.to_string() }
    };
    let mut out = Vec::new();
    let mut inode = 0;
    let mut add = |name: &str, mode: u32, device: (u32, u32), bytes: &[u8]| {
        inode += 1;
        let builder = Builder::new(name).ino(inode).mode(mode).nlink(1).mtime(0).uid(0).gid(0);
        let builder = builder.rdev_major(device.0).rdev_minor(device.1);
        let size = u32::try_from(bytes.len())
            .map_err(|_| ImageError::Entry { path: name.into(), why: "it is over 4 GiB".into() })?;
        let mut writer = builder.write(&mut out, size);
        writer.write_all(bytes).and_then(|()| writer.finish().map(|_| ())).map_err(fail(name))
    };
    for directory in ["dev", "modules", "proc", "sys"] {
        add(directory, DIRECTORY, (0, 0), &[])?;
    }
    // The kernel opens this for PID 1's standard streams before anything is mounted.
    add("dev/console", CHARACTER_DEVICE, (5, 1), &[])?;
    add("init", EXECUTABLE, (0, 0), init)?;
    let mut order = String::new();
    for module in modules {
        let name = format!("{}.ko", module.name);
        order.push_str(&name);
        order.push('\n');
        add(&format!("modules/{name}"), FILE, (0, 0), &module.bytes)?;
    }
    add("modules/order", FILE, (0, 0), order.as_bytes())?;
    trailer(&mut out).map_err(fail("the trailer"))?;
    Ok(out)
}
