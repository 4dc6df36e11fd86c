//! The default image: a static busybox with its applets, and no more.

use crate::error::{ImageError, at};
use crate::tree::{Content, Node, Tree};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Where Debian's and Ubuntu's busybox-static put it.
const PLACES: [&str; 3] = ["/usr/bin/busybox", "/bin/busybox", "/usr/local/bin/busybox"];
const INSTALL: &str = "Debian, Ubuntu: apt-get install busybox-static";
const ADVICE: &str = "The busybox of Debian's or Ubuntu's package busybox-static is one that can be used";

/// Directories that every root has: mount points and what programs expect.
const DIRECTORIES: [(&str, u32); 16] = [
    ("/bin", 0o755),
    ("/dev", 0o755),
    ("/etc", 0o755),
    ("/home", 0o755),
    ("/lib", 0o755),
    ("/mnt", 0o755),
    ("/opt", 0o755),
    ("/proc", 0o555),
    ("/root", 0o700),
    ("/run", 0o755),
    ("/sbin", 0o755),
    ("/sys", 0o555),
    ("/tmp", 0o1777),
    ("/usr/bin", 0o755),
    ("/usr/sbin", 0o755),
    ("/var", 0o755),
];

/// Files that name the two users and the one host.
const FILES: [(&str, &str); 5] = [
    ("/etc/passwd", "root:x:0:0:root:/root:/sbin/nologin\nagent:x:1000:1000:agent:/workspace:/bin/sh\n"),
    ("/etc/group", "root:x:0:\nagent:x:1000:\n"),
    ("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ("/etc/hostname", "hotcell\n"),
    ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
];

/// Builds the tree from the host's static busybox.
///
/// # Errors
/// There is none, it is not static, or it can't be run.
pub fn busybox_tree() -> Result<Tree, ImageError> {
    let fail = |why: String| ImageError::Program { program: "busybox".into(), why, advice: ADVICE };
    let path = PLACES
        .iter()
        .map(Path::new)
        .find(|path| path.is_file())
        .ok_or(ImageError::NotInstalled { program: "a static busybox".into(), install: INSTALL })?;
    let bytes = fs::read(path).map_err(at(path))?;
    if !is_static_elf(&bytes) {
        return Err(fail(format!("{} is not a static x86-64 executable", path.display())));
    }
    let listed = Command::new(path).arg("--list-full").output().map_err(at(path))?;
    let applets = String::from_utf8(listed.stdout).map_err(|error| fail(error.to_string()))?;
    let mut tree = Tree::new();
    for (directory, mode) in DIRECTORIES {
        tree.put(directory, mode, Node::Directory)?;
    }
    tree.put_owned("/workspace", 0o755, 1000, 1000, Node::Directory)?;
    for (file, text) in FILES {
        tree.put(file, 0o644, Node::File(Content::Bytes(text.into())))?;
    }
    tree.put("/bin/busybox", 0o755, Node::File(Content::Bytes(bytes)))?;
    for applet in applets.lines().filter(|applet| !applet.is_empty()) {
        let place = format!("/{applet}");
        if place != "/bin/busybox" {
            tree.put(&place, 0o777, Node::Symlink("/bin/busybox".into()))?;
        }
    }
    if !tree.contains("/bin/sh") {
        return Err(fail("it has no shell".into()));
    }
    Ok(tree)
}

/// An x86-64 ELF executable without a program interpreter.
pub(crate) fn is_static_elf(bytes: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    const EM_X86_64: u16 = 62;
    let u16_at = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let is_static = || {
        let table = usize::try_from(u64_at(32)?).ok()?;
        let (size, count) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
        for index in 0..count {
            if u32_at(table.checked_add(size.checked_mul(index)?)?)? == PT_INTERP {
                return Some(false);
            }
        }
        Some(true)
    };
    bytes.starts_with(b"\x7fELF\x02\x01") && u16_at(18) == Some(EM_X86_64) && is_static() == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_executable_and_rubbish_are_not_static() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(!is_static_elf(&own), "the test itself is linked dynamically");
        assert!(!is_static_elf(b"\x7fELF\x02\x01"));
        assert!(!is_static_elf(b""));
    }
}
