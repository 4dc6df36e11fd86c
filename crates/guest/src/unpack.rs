//! The unpacker: a tar stream on stdin becomes a tree below the working directory.
//!
//! The attack: a name or link in the archive, or a link that the workload puts
//! in place while this runs, leads a write out of the tree. Every path is
//! therefore resolved by the kernel below one directory, through no symbolic
//! link at all, and the last step is taken relative to an open parent.
//!
//! What it guarantees: nothing outside the working directory is touched; a
//! file is either whole or missing, since it has no name while it is written
//! (so that whoever reads the disk from outside sees no other names than the
//! archive's either); modes (without set-id bits) and times are the archive's; links lead
//! to places inside the tree.
//! What it does not: owners (all is the workload's), devices, FIFOs, sockets.
//! Who may call: `confine`, in a child that is already walled in.

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, fchmod, fcntl_setfl, futimens,
    linkat, mkdirat, open, openat, openat2, renameat, statat, symlinkat, syncfs, unlinkat, utimensat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use tar::{Archive, Entry, EntryType};

/// Where a file grows until it is whole, on a file system that has no files without a name. One process unpacks one file
/// at a time.
const PARTIAL: &str = ".hotcell-partial";
/// Bytes of a file that are written at once.
const PIECE: usize = 512 * 1024;
/// Where pieces begin in memory, and the length that they are a multiple of: what a disk takes directly.
const ALIGNMENT: usize = 4096;
/// A file from here on is written to the disk directly: filling the page cache costs the guest more than all else of a copy.
const DIRECT_FROM: u64 = 4 * PIECE as u64;
/// A file that nobody else may read before it has its own mode.
const OWNERS: Mode = Mode::RUSR.union(Mode::WUSR);
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Unpacks stdin; gives the exit code. Errors go to stderr, the first one ends it.
pub(crate) fn run() -> i32 {
    let root = match open(".", DIRECTORY, Mode::empty()) {
        Ok(root) => root,
        Err(error) => return failed(&format!("failed to open the target directory: {error}")),
    };
    let mut input = io::stdin().lock();
    let unpacked = root.try_clone().map_err(text).and_then(|root| unpack(&mut input, root));
    // The host reads the disk: what it put there is there whole before it is told that all is done.
    let written = syncfs(&root);
    // What follows the archive's end is read to its end: a writer must not be stopped half-way.
    let drained = io::copy(&mut input, &mut io::sink());
    match (unpacked, written, drained) {
        (Ok(()), Ok(()), Ok(_)) => 0,
        (Err(why), ..) => failed(&why),
        (_, Err(error), _) => failed(&format!("failed to write out: {error}")),
        (.., Err(error)) => failed(&format!("failed to read the archive: {error}")),
    }
}

fn failed(why: &str) -> i32 {
    let _ = writeln!(io::stderr(), "hotcell-unpack: {why}");
    1
}

fn unpack(input: &mut impl Read, root: OwnedFd) -> Result<(), String> {
    let mut archive = Archive::new(input);
    let entries = archive.entries().map_err(|error| format!("failed to read the archive: {error}"))?;
    let mut tree = Tree::new(root);
    for entry in entries {
        let mut entry = entry.map_err(|error| format!("failed to read the archive: {error}"))?;
        let shown = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        tree.place(&mut entry).map_err(|why| format!("failed to unpack {shown:?}: {why}"))?;
    }
    tree.finish().map_err(|why| format!("failed to set a directory's mode or time: {why}"))
}

/// The tree that grows, and the directories whose mode and time come last:
/// else a read-only one could not be filled, and filling changes the time.
struct Tree {
    root: OwnedFd,
    directories: Vec<(Vec<u8>, u32, Timestamps)>,
    piece: Piece,
}

/// Room for a piece of a file, aligned as a disk takes it.
struct Piece(Vec<u8>);

impl Piece {
    fn bytes(&mut self) -> &mut [u8] {
        let at = self.0.as_ptr().align_offset(ALIGNMENT);
        self.0.get_mut(at..).and_then(|bytes| bytes.get_mut(..PIECE)).unwrap_or_default()
    }
}

impl Tree {
    fn new(root: OwnedFd) -> Tree {
        Tree { root, directories: Vec::new(), piece: Piece(vec![0; PIECE + ALIGNMENT]) }
    }

    fn place(&mut self, entry: &mut Entry<'_, impl Read>) -> Result<(), String> {
        let path = components(&entry.path_bytes())?;
        let mode = entry.header().mode().map_err(text)? & 0o777;
        let times = times(entry)?;
        let kind = entry.header().entry_type();
        let Some((name, parents)) = path.split_last() else {
            // The tree's own root: its mode and time are its owner's business.
            return if kind == EntryType::Directory { Ok(()) } else { Err("it has no name".into()) };
        };
        let parent = self.parent(parents)?;
        let name = OsStr::from_bytes(name);
        match kind {
            EntryType::Directory => {
                make_directory(&parent, name, mode)?;
                self.directories.push((path.join(&b'/'), mode, times));
            }
            EntryType::Regular | EntryType::Continuous => {
                write_file(&parent, name, entry, mode, &times, &mut self.piece)?;
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().ok_or("it is a link without a target")?;
                stays_inside(parents.len(), &target)?;
                remove(&parent, name)?;
                symlinkat(OsStr::from_bytes(&target), &parent, name).map_err(text)?;
                utimensat(&parent, name, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(text)?;
            }
            EntryType::Link => {
                let target = entry.link_name_bytes().ok_or("it is a link without a target")?;
                let target = components(&target)?;
                let (from, directories) = target.split_last().ok_or("it is a link to the root")?;
                let directory = self.open_below(&directories.join(&b'/'))?;
                remove(&parent, name)?;
                linkat(&directory, OsStr::from_bytes(from), &parent, name, AtFlags::empty()).map_err(text)?;
            }
            EntryType::XGlobalHeader => {}
            _ => return Err("it is neither file, directory nor link".into()),
        }
        Ok(())
    }

    /// The directory that an entry goes into, made where it is missing.
    fn parent(&self, parents: &[Vec<u8>]) -> Result<OwnedFd, String> {
        let mut directory = self.open_below(b"")?;
        for (depth, name) in parents.iter().enumerate() {
            let name = OsStr::from_bytes(name);
            directory = match openat(&directory, name, DIRECTORY, Mode::empty()) {
                Err(Errno::NOENT) => {
                    make_directory(&directory, name, 0o755)?;
                    openat(&directory, name, DIRECTORY, Mode::empty())
                }
                other => other,
            }
            .map_err(|error| {
                format!("its directory at depth {depth} can't be used (links are not followed): {error}")
            })?;
        }
        Ok(directory)
    }

    fn open_below(&self, path: &[u8]) -> Result<OwnedFd, String> {
        let path = if path.is_empty() { b"." } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(&self.root, OsStr::from_bytes(path), DIRECTORY, Mode::empty(), resolve).map_err(text)
    }

    fn finish(self) -> Result<(), String> {
        // Deepest last come first: closing a parent to its owner would lock its children out.
        for (path, mode, times) in self.directories.iter().rev() {
            let directory = self.open_below(path)?;
            futimens(&directory, times).map_err(text)?;
            fchmod(&directory, Mode::from_raw_mode(*mode)).map_err(text)?;
        }
        Ok(())
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The time that an entry tells: of its pax record, which has nanoseconds, else of its header.
fn times(entry: &mut Entry<'_, impl Read>) -> Result<Timestamps, String> {
    let seconds = entry.header().mtime().map_err(text)?;
    let mut time = Timespec { tv_sec: i64::try_from(seconds).unwrap_or(i64::MAX), tv_nsec: 0 };
    for record in entry.pax_extensions().map_err(text)?.into_iter().flatten() {
        let record = record.map_err(text)?;
        if record.key_bytes() == b"mtime" {
            time = pax_time(record.value_bytes()).ok_or("its time is none")?;
        }
    }
    Ok(Timestamps { last_access: time, last_modification: time })
}

/// `seconds` or `seconds.fraction`, also before 1970.
fn pax_time(text: &[u8]) -> Option<Timespec> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let seconds: i64 = whole.parse().ok()?;
    if fraction.is_empty() || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanos: i64 = format!("{fraction:0<9.9}").parse().ok()?;
    Some(match whole.starts_with('-') && nanos > 0 {
        true => Timespec { tv_sec: seconds.checked_sub(1)?, tv_nsec: 1_000_000_000 - nanos },
        false => Timespec { tv_sec: seconds, tv_nsec: nanos },
    })
}

/// A relative path without `..`, in pieces; `.` and doubled slashes are nothing.
fn components(path: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    if path.first() == Some(&b'/') {
        return Err("its name is absolute".into());
    }
    if path.contains(&0) {
        return Err("its name has a NUL byte".into());
    }
    let pieces = path.split(|&byte| byte == b'/').filter(|piece| !matches!(piece, [] | [b'.']));
    pieces
        .map(|piece| if piece == b".." { Err("its name has `..`".into()) } else { Ok(piece.to_vec()) })
        .collect()
}

/// Whether a symbolic link in a directory `depth` below the root leads to a place in the tree, by its text.
///
/// `..` is taken at the start only, where the directories are real ones: after a name it would be the
/// parent of wherever that name, if a link, leads (`a -> .`, `b -> a/..`).
fn stays_inside(depth: usize, target: &[u8]) -> Result<(), String> {
    if target.is_empty() || target.first() == Some(&b'/') {
        return Err("it is a link to an absolute or empty path".into());
    }
    let mut pieces = target.split(|&byte| byte == b'/').filter(|piece| !matches!(piece, [] | [b'.']));
    let up = pieces.by_ref().take_while(|piece| *piece == b"..").count();
    if up > depth || pieces.any(|piece| piece == b"..") {
        return Err("it is a link out of the tree".into());
    }
    Ok(())
}

/// Made with its final mode where that lets it be filled: an observer then sees it as it will be.
fn make_directory(parent: &OwnedFd, name: &OsStr, mode: u32) -> Result<(), String> {
    match mkdirat(parent, name, Mode::from_raw_mode(mode) | Mode::RWXU) {
        Err(Errno::EXIST) => {
            let there = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(text)?;
            match FileType::from_raw_mode(there.st_mode) {
                FileType::Directory => Ok(()),
                _ => Err("something that is no directory is in its place".into()),
            }
        }
        other => other.map_err(text),
    }
}

/// Makes way for a file or link; a directory is not removed.
fn remove(parent: &OwnedFd, name: &OsStr) -> Result<(), String> {
    match unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(format!("what is in its place can't be removed: {error}")),
    }
}

fn write_file(
    parent: &OwnedFd,
    name: &OsStr,
    entry: &mut Entry<'_, impl Read>,
    mode: u32,
    times: &Timestamps,
    piece: &mut Piece,
) -> Result<(), String> {
    let size = entry.size();
    let nameless = openat(parent, ".", OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC, OWNERS);
    let (file, has_name) = match nameless {
        Ok(file) => (file, false),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {
            remove(parent, PARTIAL.as_ref())?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            (openat(parent, PARTIAL, flags, OWNERS).map_err(text)?, true)
        }
        Err(error) => return Err(text(error)),
    };
    let mut file = File::from(file);
    // Not every file system can (tmpfs does not), and then it goes the usual way.
    let direct = size >= DIRECT_FROM && fcntl_setfl(&file, OFlags::DIRECT).is_ok();
    let whole = fill(entry, &mut file, direct, piece.bytes()).and_then(|written| {
        if written != size {
            return Err("the archive ends within it".into());
        }
        futimens(file.as_fd(), times).map_err(text)?;
        fchmod(file.as_fd(), Mode::from_raw_mode(mode)).map_err(text)?;
        remove(parent, name)?;
        if has_name {
            return renameat(parent, PARTIAL, parent, name).map_err(text);
        }
        let own = format!("/proc/self/fd/{}", file.as_raw_fd());
        linkat(CWD, own, parent, name, AtFlags::SYMLINK_FOLLOW).map_err(text)
    });
    if whole.is_err() && has_name {
        let _ = unlinkat(parent, PARTIAL, AtFlags::empty());
    }
    whole
}

/// Copies an entry's content in large pieces; `direct`: the file takes whole blocks only.
fn fill(entry: &mut impl Read, file: &mut File, mut direct: bool, piece: &mut [u8]) -> Result<u64, String> {
    let mut written = 0;
    loop {
        let count = read_full(entry, piece).map_err(text)?;
        if direct && count % ALIGNMENT != 0 {
            fcntl_setfl(&*file, OFlags::empty()).map_err(text)?;
            direct = false;
        }
        file.write_all(piece.get(..count).unwrap_or_default()).map_err(text)?;
        written += count as u64;
        if count < piece.len() {
            return Ok(written);
        }
    }
}

/// Reads until the piece is full, or the end.
fn read_full(entry: &mut impl Read, piece: &mut [u8]) -> io::Result<usize> {
    let mut taken = 0;
    while let Some(rest) = piece.get_mut(taken..).filter(|rest| !rest.is_empty()) {
        match entry.read(rest) {
            Ok(0) => break,
            Ok(count) => taken += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::{Path, PathBuf};

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("hotcell-unpack-{}-{name}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(path.join("in")).unwrap();
            Scratch(path)
        }

        fn unpack(&self, archive: &[u8]) -> Result<(), String> {
            let root = open(self.0.join("in"), DIRECTORY, Mode::empty()).unwrap();
            unpack(&mut &*archive, root)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join("in").join(name)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// A header with the name put in by force, since the builder refuses bad ones.
    fn archive(entries: &[(&str, EntryType, &str, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, link, data) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(if *kind == EntryType::Directory { 0o555 } else { 0o6640 });
            header.set_mtime(1_000_000_000);
            header.set_size(data.len() as u64);
            let old = header.as_old_mut();
            old.name[..name.len()].copy_from_slice(name.as_bytes());
            old.linkname[..link.len()].copy_from_slice(link.as_bytes());
            header.set_cksum();
            builder.append(&header, *data).unwrap();
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn a_large_file_is_whole_whatever_its_length_and_however_it_comes() {
        /// Gives a few bytes at a time.
        struct Dribble<'a>(&'a [u8], usize);
        impl Read for Dribble<'_> {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                let most = self.1.min(into.len());
                self.0.read(&mut into[..most])
            }
        }
        let scratch = Scratch::new("large");
        for length in [DIRECT_FROM as usize - 1, DIRECT_FROM as usize, 5 * PIECE + 4096, 5 * PIECE + 4097] {
            let content: Vec<u8> = (0..length).map(|at| (at / 512 + at) as u8).collect();
            let bytes = archive(&[("large", EntryType::Regular, "", &content)]);
            let root = open(scratch.0.join("in"), DIRECTORY, Mode::empty()).unwrap();
            unpack(&mut Dribble(&bytes, 100_001), root).unwrap();
            assert!(std::fs::read(scratch.path("large")).unwrap() == content, "{length} bytes");
        }
    }

    #[test]
    fn a_tree_comes_out_with_modes_times_and_links() {
        let scratch = Scratch::new("tree");
        let bytes = archive(&[
            ("d/", EntryType::Directory, "", b""),
            ("d/file", EntryType::Regular, "", b"content"),
            ("d/link", EntryType::Symlink, "../d/file", b""),
            ("hard", EntryType::Link, "d/file", b""),
            ("deep/er/file", EntryType::Regular, "", b""),
        ]);
        scratch.unpack(&bytes).unwrap();
        let file = std::fs::metadata(scratch.path("d/file")).unwrap();
        assert_eq!((file.permissions().mode() & 0o7777, file.mtime()), (0o640, 1_000_000_000));
        assert_eq!(std::fs::read(scratch.path("d/link")).unwrap(), b"content");
        assert_eq!(std::fs::metadata(scratch.path("hard")).unwrap().ino(), file.ino());
        let directory = std::fs::metadata(scratch.path("d")).unwrap();
        assert_eq!((directory.permissions().mode() & 0o777, directory.mtime()), (0o555, 1_000_000_000));
        std::fs::set_permissions(scratch.path("d"), PermissionsExt::from_mode(0o755)).unwrap();
        assert!(scratch.path("deep/er/file").exists());
    }

    #[test]
    fn nothing_leaves_the_tree() {
        let scratch = Scratch::new("escape");
        std::fs::write(scratch.0.join("outside"), b"safe").unwrap();
        symlink(&scratch.0, scratch.path("planted")).unwrap();
        for (name, kind, link) in [
            ("../outside", EntryType::Regular, ""),
            ("/tmp/outside", EntryType::Regular, ""),
            ("a/../../outside", EntryType::Regular, ""),
            ("planted/outside", EntryType::Regular, ""),
            ("planted/new/outside", EntryType::Directory, ""),
            ("s", EntryType::Symlink, "../outside"),
            ("a/s", EntryType::Symlink, "../../outside"),
            ("s", EntryType::Symlink, "/etc/passwd"),
            ("s", EntryType::Symlink, "a/.."),
            ("d/s", EntryType::Symlink, "../a/../.."),
            ("h", EntryType::Link, "../outside"),
            ("h", EntryType::Link, "planted/outside"),
            ("null", EntryType::Char, ""),
            ("fifo", EntryType::Fifo, ""),
        ] {
            let result = scratch.unpack(&archive(&[(name, kind, link, b"evil")]));
            assert!(result.is_err(), "{name} {kind:?} {link}");
        }
        assert_eq!(std::fs::read(scratch.0.join("outside")).unwrap(), b"safe");
        let outside: Vec<_> = std::fs::read_dir(&scratch.0).unwrap().collect();
        assert_eq!(outside.len(), 2);
    }

    #[test]
    fn a_link_in_a_files_place_is_replaced_and_not_followed() {
        let scratch = Scratch::new("replace");
        std::fs::write(scratch.0.join("outside"), b"safe").unwrap();
        symlink("../outside", scratch.path("file")).unwrap();
        scratch.unpack(&archive(&[("file", EntryType::Regular, "", b"new")])).unwrap();
        assert_eq!(std::fs::read(scratch.0.join("outside")).unwrap(), b"safe");
        assert_eq!(std::fs::read(scratch.path("file")).unwrap(), b"new");
    }

    #[test]
    fn a_cut_archive_leaves_no_partial_file() {
        let scratch = Scratch::new("cut");
        let whole = archive(&[("file", EntryType::Regular, "", &[7; 2000])]);
        assert!(scratch.unpack(&whole[..1000]).is_err());
        assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 0);
        assert!(Path::new(&scratch.0).exists());
    }
}
