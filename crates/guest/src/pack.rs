//! The packer: files and trees become a tar stream on stdout.
//!
//! The attack: the workload changes the tree while it is read. What is read is
//! therefore opened first, without following links, and everything said about
//! it comes from the open file; a file that shrinks is filled up with zeroes,
//! so that the stream stays in step, and the exit code says so.
//!
//! What it guarantees: no link is followed; a name in the stream is the path
//! as given, without leading slashes, and never has `..`.
//! What it does not: bound the stream. A sparse file is sent at its full
//! length; the host limits what it takes. FIFOs, sockets and devices have no
//! content: they are named on stderr and left out.
//! Who may call: `confine`, in a child that is already walled in.

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, openat, readlinkat, statat};
use rustix::io::Errno;
use rustix::pipe::{SpliceFlags, splice};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tar::{Builder, EntryType, Header};

/// Files with several names that are remembered, to be sent once; further ones are sent in full.
const MAX_LINKED: usize = 64 * 1024;
/// Deepest tree. Each level costs a descriptor and stack.
const MAX_DEPTH: usize = 256;
/// Bytes of headers and small files that are written at once.
const BUFFER: usize = 64 * 1024;
/// Bytes of a file that are taken at once: as many as the pipe holds.
const PIECE: usize = 256 * 1024;

/// Packs `paths`; gives the exit code: 1 if anything could not be packed as it was.
pub(crate) fn run(paths: &[Vec<u8>]) -> i32 {
    let pipe = match rustix::stdio::stdout().try_clone_to_owned() {
        Ok(pipe) => pipe,
        Err(_) => return 1,
    };
    let Ok(writer) = pipe.try_clone() else { return 1 };
    let out = BufWriter::with_capacity(BUFFER, File::from(writer));
    let mut packer = Packer {
        out: Builder::new(out),
        pipe: Some(pipe),
        linked: HashMap::new(),
        troubled: false,
        piece: vec![0; PIECE],
    };
    for path in paths {
        if packer.pack(path).is_err() {
            // Nobody takes the stream any more.
            return 1;
        }
    }
    let finished = packer.out.into_inner().and_then(|mut out| out.flush());
    i32::from(finished.is_err() || packer.troubled)
}

struct Packer<W: Write> {
    out: Builder<W>,
    /// Where `out` goes, if it is a pipe: the pages of files are put into it without being copied.
    pipe: Option<OwnedFd>,
    /// Device and inode of files with several names, and the first name.
    linked: HashMap<(u64, u64), Vec<u8>>,
    troubled: bool,
    piece: Vec<u8>,
}

impl<W: Write> Packer<W> {
    fn pack(&mut self, path: &[u8]) -> io::Result<()> {
        let name: Vec<&[u8]> =
            path.split(|&byte| byte == b'/').filter(|piece| !matches!(piece, [] | [b'.'])).collect();
        if name.contains(&b"..".as_slice()) {
            self.trouble(path, "its name has `..`");
            return Ok(());
        }
        self.add(CWD, OsStr::from_bytes(path), &name.join(&b'/'), 0)
    }

    /// Adds `entry` of `directory` under `name`. An error is one of the stream.
    fn add(&mut self, directory: BorrowedFd<'_>, entry: &OsStr, name: &[u8], depth: usize) -> io::Result<()> {
        let stat = match statat(directory, entry, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(error) => {
                self.trouble(name, &error.to_string());
                return Ok(());
            }
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.add_file(directory, entry, name),
            FileType::Directory => self.add_directory(directory, entry, name, depth),
            FileType::Symlink => match readlinkat(directory, entry, Vec::new()) {
                Ok(target) => self.link(EntryType::Symlink, name, target.as_bytes(), &stat),
                Err(error) => {
                    self.trouble(name, &error.to_string());
                    Ok(())
                }
            },
            _ => {
                say(name, "left out: it is neither file, directory nor link");
                Ok(())
            }
        }
    }

    fn add_file(&mut self, directory: BorrowedFd<'_>, entry: &OsStr, name: &[u8]) -> io::Result<()> {
        // Non-blocking: in the meantime it may have become a FIFO that nobody writes to.
        let Some((file, stat)) = self.open(directory, entry, name, OFlags::NONBLOCK) else { return Ok(()) };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            self.trouble(name, "it changed while it was packed");
            return Ok(());
        }
        if stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.linked.get(&key).cloned() {
                return self.link(EntryType::Link, name, &first, &stat);
            }
            if self.linked.len() < MAX_LINKED {
                self.linked.insert(key, name.to_vec());
            }
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.tell_time(&stat)?;
        let mut header = header(EntryType::Regular, &stat, size);
        let mut content = Exactly { file: File::from(file), left: size, short: None };
        self.out.append_data(&mut header, Path::new(OsStr::from_bytes(name)), io::empty())?;
        if let Some(pipe) = &self.pipe {
            self.out.get_mut().flush()?;
            content.splice(pipe)?;
        }
        // In larger pieces than the crate's own: each costs two system calls.
        while content.left > 0 {
            match content.read(&mut self.piece) {
                Ok(count) => self.out.get_mut().write_all(self.piece.get(..count).unwrap_or_default())?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let pad = usize::try_from(size.next_multiple_of(512) - size).unwrap_or(0);
        self.out.get_mut().write_all([0; 512].get(..pad).unwrap_or_default())?;
        if let Some(why) = content.short {
            self.trouble(name, &why);
        }
        Ok(())
    }

    fn add_directory(
        &mut self,
        directory: BorrowedFd<'_>,
        entry: &OsStr,
        name: &[u8],
        depth: usize,
    ) -> io::Result<()> {
        if depth >= MAX_DEPTH {
            self.trouble(name, "it is too deep");
            return Ok(());
        }
        let Some((own, stat)) = self.open(directory, entry, name, OFlags::DIRECTORY) else { return Ok(()) };
        if !name.is_empty() {
            self.tell_time(&stat)?;
            let mut header = header(EntryType::Directory, &stat, 0);
            self.out.append_data(&mut header, Path::new(OsStr::from_bytes(name)), io::empty())?;
        }
        let mut entries = match Dir::read_from(&own) {
            Ok(entries) => entries,
            Err(error) => {
                self.trouble(name, &error.to_string());
                return Ok(());
            }
        };
        while let Some(child) = entries.read() {
            let child = match child {
                Ok(child) => child,
                Err(error) => {
                    self.trouble(name, &error.to_string());
                    break;
                }
            };
            let piece = child.file_name().to_bytes();
            if piece != b"." && piece != b".." {
                let path = if name.is_empty() { piece.to_vec() } else { [name, b"/", piece].concat() };
                self.add(own.as_fd(), OsStr::from_bytes(piece), &path, depth + 1)?;
            }
        }
        Ok(())
    }

    fn open(
        &mut self,
        directory: BorrowedFd<'_>,
        entry: &OsStr,
        name: &[u8],
        flags: OFlags,
    ) -> Option<(OwnedFd, Stat)> {
        let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opened = openat(directory, entry, flags, Mode::empty());
        match opened.and_then(|file| fstat(&file).map(|stat| (file, stat))) {
            Ok(opened) => Some(opened),
            Err(error) => {
                self.trouble(name, &error.to_string());
                None
            }
        }
    }

    fn link(&mut self, kind: EntryType, name: &[u8], target: &[u8], stat: &Stat) -> io::Result<()> {
        let mut header = header(kind, stat, 0);
        let (name, target) = (OsStr::from_bytes(name), OsStr::from_bytes(target));
        self.out.append_link(&mut header, Path::new(name), Path::new(target))
    }

    /// Tells the time to the nanosecond, for which plain tar has no place.
    fn tell_time(&mut self, stat: &Stat) -> io::Result<()> {
        let (seconds, nanos) = (stat.st_mtime, stat.st_mtime_nsec);
        if nanos == 0 && seconds >= 0 {
            return Ok(());
        }
        let time = match seconds < 0 && nanos > 0 {
            true => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos),
            false => format!("{seconds}.{nanos:09}"),
        };
        self.out.append_pax_extensions([("mtime", time.as_bytes())])
    }

    fn trouble(&mut self, name: &[u8], why: &str) {
        self.troubled = true;
        say(name, why);
    }
}

fn say(name: &[u8], why: &str) {
    // Names in the archive have no leading slash. The host escapes what it shows.
    let _ = writeln!(io::stderr(), "/{}: {why}", String::from_utf8_lossy(name));
}

fn header(kind: EntryType, stat: &Stat, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o7777);
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_size(size);
    header
}

/// Exactly `left` bytes of a file: not those that it grows by, and zeroes for those that it lost.
struct Exactly {
    file: File,
    left: u64,
    short: Option<String>,
}

impl Exactly {
    /// Puts what it can into a pipe; what is left then is to be read.
    fn splice(&mut self, pipe: &OwnedFd) -> io::Result<()> {
        while self.left > 0 {
            let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(PIECE);
            match splice(&self.file, None, pipe, None, most, SpliceFlags::empty()) {
                Ok(0) => break,
                Ok(count) => self.left = self.left.saturating_sub(count as u64),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE) => return Err(Errno::PIPE.into()),
                // An error of the file shows again where it is read.
                Err(_) => break,
            }
        }
        Ok(())
    }
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let buffer = buffer.get_mut(..wanted).unwrap_or_default();
        if buffer.is_empty() {
            return Ok(0);
        }
        let mut count = 0;
        if self.short.is_none() {
            match self.file.read(buffer) {
                Ok(0) => self.short = Some("it shrank while it was packed".into()),
                Ok(read) => count = read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
                Err(error) => self.short = Some(error.to_string()),
            }
        }
        if count == 0 {
            buffer.fill(0);
            count = buffer.len();
        }
        self.left -= count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_tree_is_packed_without_following_links() {
        let root = std::env::temp_dir().join(format!("hotcell-pack-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("t/sub")).unwrap();
        std::fs::write(root.join("t/file"), b"content").unwrap();
        std::fs::hard_link(root.join("t/file"), root.join("t/sub/same")).unwrap();
        symlink("/etc", root.join("t/link")).unwrap();
        std::fs::write(root.join("t").join("n".repeat(200)), b"long").unwrap();
        let mut packer = Packer {
            out: Builder::new(Vec::new()),
            pipe: None,
            linked: HashMap::new(),
            troubled: false,
            piece: vec![0; PIECE],
        };
        let top = root.join("t");
        packer.pack(top.as_os_str().as_bytes()).unwrap();
        assert!(!packer.troubled);
        packer.pack(b"a/../b").unwrap();
        packer.pack(b"/nonexistent").unwrap();
        assert!(packer.troubled);
        let bytes = packer.out.into_inner().unwrap();
        let mut seen = Vec::new();
        for entry in tar::Archive::new(&*bytes).entries().unwrap() {
            let entry = entry.unwrap();
            let path = String::from_utf8(entry.path_bytes().into_owned()).unwrap();
            assert!(!path.starts_with('/') && !path.contains(".."), "{path}");
            seen.push((path, entry.header().entry_type()));
        }
        let kinds = |kind| seen.iter().filter(|(_, seen)| *seen == kind).count();
        assert_eq!((kinds(EntryType::Regular), kinds(EntryType::Link), kinds(EntryType::Symlink)), (2, 1, 1));
        assert_eq!(kinds(EntryType::Directory), 2);
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn what_goes_through_a_pipe_without_being_copied_is_the_file() {
        let path = std::env::temp_dir().join(format!("hotcell-splice-{}", std::process::id()));
        let bytes: Vec<u8> = (0..1_000_003u32).map(|at| (at >> 7) as u8 ^ at as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut content = Exactly { file: File::open(&path).unwrap(), left: 1_000_100, short: None };
        let taker = std::thread::spawn(move || {
            let mut taken = Vec::new();
            File::from(read).read_to_end(&mut taken).unwrap();
            taken
        });
        content.splice(&write).unwrap();
        drop(write);
        // It is shorter than was promised: the rest is told by reading on.
        assert_eq!((content.left, content.short.is_none()), (97, true));
        assert!(taker.join().unwrap() == bytes);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_that_shrinks_keeps_its_promised_length() {
        let path = std::env::temp_dir().join(format!("hotcell-shrink-{}", std::process::id()));
        std::fs::write(&path, b"abc").unwrap();
        let mut content = Exactly { file: File::open(&path).unwrap(), left: 5, short: None };
        let mut bytes = Vec::new();
        content.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"abc\0\0");
        assert!(content.short.is_some());
        std::fs::remove_file(&path).unwrap();
    }
}
