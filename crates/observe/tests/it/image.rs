//! Disks as a workspace is made (`crates/vm/src/disk.rs`), with a tree on them.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// A file system in a file.
pub(crate) struct Image {
    pub(crate) home: TempDir,
    pub(crate) path: PathBuf,
}

fn tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").stdin(Stdio::null());
    command
}

fn checked(output: Output, allowed: &[i32]) -> Output {
    let code = output.status.code();
    assert!(code.is_some_and(|code| allowed.contains(&code)), "{output:?}");
    output
}

impl Image {
    /// With what `fill` puts into a folder.
    pub(crate) fn new(mib: u64, more: &[&str], fill: impl FnOnce(&Path)) -> Image {
        let home = tempfile::tempdir().unwrap();
        let tree = home.path().join("tree");
        fs::create_dir(&tree).unwrap();
        fill(&tree);
        let path = home.path().join("disk.img");
        File::create(&path).unwrap().set_len(mib << 20).unwrap();
        let mut mke2fs = tool("mke2fs");
        mke2fs
            .args(["-q", "-F", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0"])
            .args(["-E", "root_owner=1000:1000,lazy_itable_init=0,lazy_journal_init=0,nodiscard"])
            .args(more)
            .arg("-d")
            .args([&tree, &path]);
        checked(mke2fs.output().unwrap(), &[0]);
        Image { home, path }
    }

    pub(crate) fn file(&self) -> File {
        File::open(&self.path).unwrap()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        fs::read(&self.path).unwrap()
    }

    /// Runs `debugfs` commands on it.
    pub(crate) fn change(&self, commands: &str) {
        let mut child = tool("debugfs")
            .args([OsStr::new("-w"), OsStr::new("-f"), OsStr::new("-"), self.path.as_os_str()])
            .current_dir(self.home.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
        let output = checked(child.wait_with_output().unwrap(), &[0]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.lines().all(|line| line.starts_with("debugfs ")), "{said}");
    }

    /// Indexes its directories, as a kernel does with large ones.
    pub(crate) fn index(&self) {
        checked(tool("e2fsck").args(["-fyD"]).arg(&self.path).output().unwrap(), &[0, 1]);
    }
}
