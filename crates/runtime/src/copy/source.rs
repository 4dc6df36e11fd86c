//! A tree of the host, on its way into a machine.
//!
//! The attack: the tree holds links to elsewhere, FIFOs that block, devices that act when opened, or is changed while it
//! is copied, by whoever may write there. It is therefore looked at first, whole and without opening anything but
//! directories; and what is opened then is opened below the tree's own descriptor, through no link, and must be the very
//! file that was seen.
//!
//! What it guarantees: an entry that can't be taken refuses the whole copy before anything is sent, and says which; links
//! are copied as links, and lead to places in the tree; files with several names in the tree have them in the guest too.
//! Who may call: a caller makes a [`PutRequest`]; [`send`] runs on a thread of the copy.

use super::{CopyError, Cost, MAX_DEPTH, stays_inside};
use crate::exec::WORKLOAD_USER;
use hotcell_decide::{Direction, HostFact};
use hotcell_ledger::Digest;
use hotcell_policy::limits::COPY_FILES;
use hotcell_policy::{CleanPath, PathPolicy, Region};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2, readlinkat, statat,
};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tar::{Builder, EntryType, Header};

/// Bytes of a file that are read at once.
const CHUNK: usize = 256 * 1024;
/// Where the workload may write, and so where files can be put.
const ROOTS: [&str; 3] = ["/workspace", "/tmp", "/dev/shm"];
const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Something of the host to copy in: looked at, and nothing copied yet.
#[derive(Debug)]
pub struct PutRequest {
    /// User as whom the guest writes it; never 0.
    pub uid: u32,
    /// Group; never 0.
    pub gid: u32,
    top: OwnedFd,
    source: String,
    target: CleanPath,
    root: &'static str,
    items: Vec<Item>,
    cost: Cost,
}

#[derive(Debug)]
struct Item {
    /// Below the top; empty: the top itself.
    path: String,
    stat: Stat,
    what: What,
}

#[derive(Debug)]
enum What {
    File,
    Directory,
    Symlink(Vec<u8>),
    /// The same file as this item, earlier.
    Again(usize),
}

/// The plain spelling of a target, and which of [`ROOTS`] it lies in.
fn place(target: &str) -> Result<(CleanPath, &'static str), String> {
    let target = CleanPath::clean(target).map_err(|error| error.to_string())?;
    let root =
        ROOTS.into_iter().find(|root| CleanPath::clean(root).is_ok_and(|root| target.is_within(&root)));
    let root = root.ok_or_else(|| {
        format!("files can be put into {}, the rest of the machine is read-only", ROOTS.join(", "))
    })?;
    if PathPolicy::standard().region(&target) == Region::Immutable {
        return Err("that part of the machine is read-only".into());
    }
    Ok((target, root))
}

impl PutRequest {
    /// Looks at `source`, a file or a directory of the host, that is to become `target`, an absolute path in the guest's
    /// `/workspace`, `/tmp` or `/dev/shm`. Directories above the target are made where they are missing; a file that is
    /// there is replaced; a directory that is there keeps what it has besides.
    ///
    /// # Errors
    /// It can't be copied; the error says which part of it, and why.
    pub fn new(source: &Path, target: &str) -> Result<PutRequest, CopyError> {
        let shown = source.display().to_string();
        PutRequest::look(source, target)
            .map_err(|why| CopyError::Refused(format!("{shown} to {target}: {why}")))
    }

    /// Whether files can be put there at all, whatever they are.
    ///
    /// # Errors
    /// Why not.
    pub fn check_target(target: &str) -> Result<(), String> {
        place(target).map(|_| ())
    }

    fn look(source: &Path, target: &str) -> Result<PutRequest, String> {
        let (target, root) = place(target)?;
        // The caller named it, so the name itself may be a link.
        let stat = statat(CWD, source, AtFlags::empty()).map_err(|error| error.to_string())?;
        let (flags, what) = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => (OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, What::File),
            FileType::Directory => (DIRECTORY, What::Directory),
            other => {
                return Err(format!("it is {}: only files and directories can be copied", kind_name(other)));
            }
        };
        let top = openat(CWD, source, flags, Mode::empty()).map_err(|error| error.to_string())?;
        let opened = fstat(&top).map_err(|error| error.to_string())?;
        if !same(&opened, &stat) {
            return Err("it changed while it was looked at".into());
        }
        let is_file = matches!(what, What::File);
        if is_file && target.as_str() == root {
            return Err(format!("{root} is a directory: name the file below it"));
        }
        let mut look = Look { items: Vec::new(), names: HashMap::new(), cost: Cost::default() };
        look.add(String::new(), stat, what)?;
        if !is_file {
            let below = openat(&top, ".", DIRECTORY, Mode::empty()).map_err(|error| error.to_string())?;
            look.directory(&below, "", 0)?;
        }
        let Look { items, cost, .. } = look;
        let source = source.display().to_string();
        Ok(PutRequest { uid: WORKLOAD_USER, gid: WORKLOAD_USER, top, source, target, root, items, cost })
    }

    /// Where it goes.
    pub fn target(&self) -> &str {
        self.target.as_str()
    }

    /// The guest's directory below which everything goes.
    pub(crate) fn root(&self) -> &'static str {
        self.root
    }

    pub(crate) fn cost(&self) -> Cost {
        self.cost
    }

    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// The path of an item in the guest.
    fn guest_path(&self, item: &Item) -> String {
        match item.path.as_str() {
            "" => self.target.as_str().to_owned(),
            path => format!("{}/{path}", self.target),
        }
    }

    /// The name of an item in the archive: relative to the root. Empty for the root itself.
    fn name(&self, item: &Item) -> String {
        let path = self.guest_path(item);
        path.strip_prefix(self.root).unwrap_or(&path).trim_start_matches('/').to_owned()
    }
}

struct Look {
    items: Vec<Item>,
    /// Device and inode of files with several names, and the first.
    names: HashMap<(u64, u64), usize>,
    cost: Cost,
}

impl Look {
    fn add(&mut self, path: String, stat: Stat, what: What) -> Result<(), String> {
        if self.items.len() as u64 >= u64::from(COPY_FILES.max) {
            return Err(format!("it has more than {} entries: pack it into one file", COPY_FILES.max));
        }
        self.cost.entries += 1;
        self.cost.names += path.len() as u64;
        if matches!(what, What::File) {
            self.cost.bytes = self.cost.bytes.saturating_add(size(&stat));
        }
        self.items.push(Item { path, stat, what });
        Ok(())
    }

    fn directory(&mut self, directory: &OwnedFd, prefix: &str, depth: usize) -> Result<(), String> {
        let fail = |path: &str, error: &dyn std::fmt::Display| format!("{path:?}: {error}");
        if depth >= MAX_DEPTH {
            return Err(fail(prefix, &format!("it is more than {MAX_DEPTH} directories deep")));
        }
        let mut names = Vec::new();
        for entry in Dir::read_from(directory).map_err(|error| fail(prefix, &error))? {
            let entry = entry.map_err(|error| fail(prefix, &error))?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                let named = std::str::from_utf8(name).map_err(|_| {
                    let name = name.escape_ascii();
                    fail(prefix, &format!("the name \"{name}\" in it is not UTF-8, as records need it"))
                })?;
                names.push(named.to_owned());
                if names.len() > COPY_FILES.max as usize {
                    return Err(format!(
                        "it has more than {} entries: pack it into one file",
                        COPY_FILES.max
                    ));
                }
            }
        }
        // The same tree gives the same archive.
        names.sort_unstable();
        for name in names {
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}/{name}") };
            let stat = statat(directory, name.as_str(), AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|error| fail(&path, &error))?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => {
                    let what = match self.names.get(&identity(&stat)) {
                        Some(first) => What::Again(*first),
                        None => What::File,
                    };
                    if matches!(what, What::File) && stat.st_nlink > 1 {
                        self.names.insert(identity(&stat), self.items.len());
                    }
                    self.add(path, stat, what)?;
                }
                FileType::Directory => {
                    let flags = DIRECTORY | OFlags::NOFOLLOW;
                    let below = openat(directory, name.as_str(), flags, Mode::empty())
                        .map_err(|error| fail(&path, &error))?;
                    self.add(path.clone(), stat, What::Directory)?;
                    self.directory(&below, &path, depth + 1)?;
                }
                FileType::Symlink => {
                    let target = readlinkat(directory, name.as_str(), Vec::new())
                        .map_err(|error| fail(&path, &error))?;
                    let target = target.into_bytes();
                    // A link in the top has depth 0: its `..` would already lead out.
                    if !stays_inside(depth, &target) {
                        let target = String::from_utf8_lossy(&target).into_owned();
                        return Err(fail(
                            &path,
                            &format!("it is a link out of what is copied, to {target:?}"),
                        ));
                    }
                    self.add(path, stat, What::Symlink(target))?;
                }
                other => {
                    let why = format!(
                        "it is {}: only files, directories and links can be copied",
                        kind_name(other)
                    );
                    return Err(fail(&path, &why));
                }
            }
        }
        Ok(())
    }
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Symlink => "a link",
        _ => "something else",
    }
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn same(one: &Stat, other: &Stat) -> bool {
    identity(one) == identity(other)
        && FileType::from_raw_mode(one.st_mode) == FileType::from_raw_mode(other.st_mode)
}

fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// Why not all was sent.
#[derive(Debug)]
pub(crate) enum Unsent {
    /// Nobody takes it any more.
    Stopped,
    /// The source is not what it was.
    Source(String),
}

/// Sends everything as a tar stream. `note` records a fact and returns when that is done; `false` where it can't be.
pub(crate) fn send(
    request: &PutRequest,
    to: &mut impl Write,
    mut note: impl FnMut(HostFact) -> bool,
) -> Result<(), Unsent> {
    let mut builder = Builder::new(to);
    let mut digests: HashMap<usize, Digest> = HashMap::new();
    let mut chunk = vec![0; CHUNK];
    for (at, item) in request.items.iter().enumerate() {
        let mut tell = |bytes: u64, digest: Digest, mode: u32| {
            let (direction, path) = (Direction::In, request.guest_path(item));
            match note(HostFact::Copied { direction, path, bytes, digest, mode }) {
                true => Ok(()),
                false => Err(Unsent::Stopped),
            }
        };
        let name = request.name(item);
        let permissions = item.stat.st_mode & 0o777;
        let stopped = |_: io::Error| Unsent::Stopped;
        let begin = |builder: &mut Builder<_>, kind, size| {
            begin(builder, &name, kind, &item.stat, size).map_err(stopped)
        };
        match &item.what {
            What::Directory => {
                tell(0, Digest::of(b""), 0o040_000 | permissions)?;
                if !name.is_empty() {
                    begin(&mut builder, EntryType::Directory, 0)?;
                }
            }
            What::Symlink(target) => {
                tell(0, Digest::of(target), 0o120_777)?;
                let mut header = header(EntryType::Symlink, &item.stat, 0);
                let target = Path::new(OsStr::from_bytes(target));
                builder.append_link(&mut header, Path::new(&name), target).map_err(stopped)?;
            }
            What::Again(first) => {
                let (Some(digest), Some(earlier)) = (digests.get(first), request.items.get(*first)) else {
                    return Err(Unsent::Stopped);
                };
                tell(size(&earlier.stat), *digest, 0o100_000 | permissions)?;
                let mut header = header(EntryType::Link, &item.stat, 0);
                builder
                    .append_link(&mut header, Path::new(&name), Path::new(&request.name(earlier)))
                    .map_err(stopped)?;
            }
            What::File => {
                let mut file = open(request, item)?;
                let length = size(&item.stat);
                let changed = |what: &str| {
                    Unsent::Source(format!(
                        "{:?} of {}: it {what} while it was copied",
                        item.path, request.source
                    ))
                };
                let (mut left, mut hasher) = (length, blake3::Hasher::new());
                let mut begun = false;
                while left > 0 {
                    let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
                    let part = chunk.get_mut(..wanted).unwrap_or_default();
                    file.read_exact(part).map_err(|error| match error.kind() {
                        io::ErrorKind::UnexpectedEof => changed("shrank"),
                        _ => Unsent::Source(format!("{:?} of {}: {error}", item.path, request.source)),
                    })?;
                    left -= part.len() as u64;
                    hasher.update(part);
                    if left == 0 {
                        // On record before the guest has all of it.
                        let digest = Digest::from_bytes(*hasher.finalize().as_bytes());
                        digests.insert(at, digest);
                        tell(length, digest, 0o100_000 | permissions)?;
                    }
                    if !std::mem::replace(&mut begun, true) {
                        begin(&mut builder, EntryType::Regular, length)?;
                    }
                    builder.get_mut().write_all(part).map_err(stopped)?;
                }
                if length == 0 {
                    let empty = Digest::of(b"");
                    digests.insert(at, empty);
                    tell(0, empty, 0o100_000 | permissions)?;
                    begin(&mut builder, EntryType::Regular, 0)?;
                }
                if file.read(&mut [0]).is_ok_and(|count| count != 0) {
                    return Err(changed("grew"));
                }
                let pad = usize::try_from(length.next_multiple_of(512) - length).unwrap_or(0);
                builder.get_mut().write_all([0; 512].get(..pad).unwrap_or_default()).map_err(stopped)?;
            }
        }
    }
    builder.into_inner().and_then(|to| to.flush()).map_err(|_| Unsent::Stopped)
}

/// Writes an entry's headers; its content is the caller's.
fn begin(
    builder: &mut Builder<&mut impl Write>,
    name: &str,
    kind: EntryType,
    stat: &Stat,
    size: u64,
) -> io::Result<()> {
    let nanos = stat.st_mtime_nsec;
    if nanos != 0 || stat.st_mtime < 0 {
        // Plain tar has whole seconds since 1970.
        let (seconds, nanos) = (stat.st_mtime, nanos);
        let time = match seconds < 0 && nanos > 0 {
            true => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos),
            false => format!("{seconds}.{nanos:09}"),
        };
        builder.append_pax_extensions([("mtime", time.as_bytes())])?;
    }
    builder.append_data(&mut header(kind, stat, size), Path::new(name), io::empty())
}

fn header(kind: EntryType, stat: &Stat, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o777);
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(size);
    header
}

/// The very file that was looked at, or an error.
fn open(request: &PutRequest, item: &Item) -> Result<File, Unsent> {
    let fail = |why: String| Unsent::Source(format!("{:?} of {}: {why}", item.path, request.source));
    let opened = if item.path.is_empty() {
        request.top.try_clone().map_err(|error| fail(error.to_string()))?
    } else {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(&request.top, item.path.as_str(), flags, Mode::empty(), resolve)
            .map_err(|error| fail(error.to_string()))?
    };
    let stat = fstat(opened.as_fd()).map_err(|error| fail(error.to_string()))?;
    if !same(&stat, &item.stat) || stat.st_size != item.stat.st_size {
        return Err(fail("it is not the file any more that was looked at before".into()));
    }
    Ok(File::from(opened))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn refused(source: &Path, target: &str) -> String {
        PutRequest::new(source, target).unwrap_err().to_string()
    }

    #[test]
    fn what_can_not_be_copied_is_refused_before_anything_is_sent_and_named() {
        let home = tempfile::tempdir().unwrap();
        let tree = home.path().join("tree");
        fs::create_dir_all(tree.join("sub")).unwrap();
        fs::write(tree.join("sub/file"), b"x").unwrap();
        symlink("../sub/file", tree.join("sub/inside")).unwrap();
        assert!(PutRequest::new(&tree, "/workspace").is_ok(), "the control");
        for (target, words) in [
            ("workspace", "absolute"),
            ("/etc", "read-only"),
            ("/", "read-only"),
            ("/workspace/../etc/x", "read-only"),
            ("/workspacefoo", "read-only"),
        ] {
            let error = refused(&tree, target);
            assert!(error.contains(words), "{error}");
        }
        assert!(refused(&tree.join("sub/file"), "/workspace").contains("is a directory"));
        assert!(refused(&tree.join("none"), "/workspace/x").contains("No such file"));
        assert!(refused(Path::new("/dev/null"), "/workspace/x").contains("a device"));
        for (name, target) in [("abs", "/etc/passwd"), ("up", "../outside"), ("wind", "sub/../../outside")] {
            symlink(target, tree.join(name)).unwrap();
            let error = refused(&tree, "/workspace/t");
            assert!(error.contains(name) && error.contains("link out of"), "{error}");
            fs::remove_file(tree.join(name)).unwrap();
        }
        let made = std::process::Command::new("mkfifo").arg(tree.join("fifo")).status().unwrap();
        assert!(made.success());
        assert!(refused(&tree, "/workspace/t").contains("a FIFO"));
        fs::remove_file(tree.join("fifo")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();
        assert!(refused(&tree, "/workspace/t").contains("a socket"));
        fs::remove_file(tree.join("socket")).unwrap();
        fs::write(tree.join(OsStr::from_bytes(b"\xff")), b"").unwrap();
        let why = refused(&tree, "/workspace/t");
        assert!(why.contains("UTF-8") && why.contains(r"\xff"), "{why}");
    }

    #[test]
    fn a_tree_is_taken_to_the_deepest_level_and_no_deeper() {
        let home = tempfile::tempdir().unwrap();
        let chain = |depth: usize| {
            let tree = home.path().join(depth.to_string());
            fs::create_dir_all(tree.join(vec!["d"; depth].join("/"))).unwrap();
            tree
        };
        assert_eq!(PutRequest::new(&chain(MAX_DEPTH - 1), "/workspace/t").unwrap().cost().entries, 256);
        let error = refused(&chain(MAX_DEPTH), "/workspace/t");
        assert!(error.contains("256 directories deep"), "{error}");
    }

    #[test]
    fn a_tree_that_changes_under_way_is_an_error_and_never_another_file() {
        let home = tempfile::tempdir().unwrap();
        let tree = home.path().join("tree");
        fs::create_dir_all(tree.join("sub")).unwrap();
        fs::write(home.path().join("secret"), b"secret").unwrap();
        type Change = (&'static str, fn(&Path));
        let changes: [Change; 5] = [
            ("nothing", |_| ()),
            ("a link in its place", |tree| {
                fs::remove_file(tree.join("sub/file")).unwrap();
                symlink("../../secret", tree.join("sub/file")).unwrap();
            }),
            ("a link on the way", |tree| {
                fs::rename(tree.join("sub"), tree.join("moved")).unwrap();
                symlink("moved", tree.join("sub")).unwrap();
            }),
            ("another file", |tree| {
                fs::rename(tree.join("../secret"), tree.join("sub/file")).unwrap();
            }),
            ("a shorter one", |tree| fs::write(tree.join("sub/file"), b"sec").unwrap()),
        ];
        for (what, change) in changes {
            let _ = fs::remove_dir_all(&tree);
            fs::create_dir_all(tree.join("sub")).unwrap();
            fs::write(tree.join("sub/file"), b"public").unwrap();
            fs::write(home.path().join("secret"), b"secret").unwrap();
            let request = PutRequest::new(&tree, "/workspace/t").unwrap();
            change(&tree);
            let mut sent = Vec::new();
            let outcome = send(&request, &mut sent, |_| true);
            assert_eq!(outcome.is_ok(), what == "nothing", "{what}: {outcome:?}");
            assert!(!sent.windows(6).any(|window| window == b"secret"), "{what}");
        }
    }

    #[test]
    fn modes_times_and_links_are_in_the_archive() {
        let home = tempfile::tempdir().unwrap();
        let tree = home.path().join("tree");
        fs::create_dir_all(tree.join("d")).unwrap();
        fs::write(tree.join("d/file"), [7; 1000]).unwrap();
        fs::set_permissions(tree.join("d/file"), PermissionsExt::from_mode(0o4751)).unwrap();
        fs::hard_link(tree.join("d/file"), tree.join("same")).unwrap();
        symlink("d/file", tree.join("link")).unwrap();
        let request = PutRequest::new(&tree, "/workspace/t").unwrap();
        let (mut sent, mut facts) = (Vec::new(), Vec::new());
        send(&request, &mut sent, |fact| {
            facts.push(fact);
            true
        })
        .unwrap();
        let mut archive = tar::Archive::new(&*sent);
        let entries: Vec<(String, EntryType, u32)> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let time = entry.pax_extensions().unwrap().is_some();
                assert_eq!(
                    time,
                    matches!(entry.header().entry_type(), EntryType::Regular | EntryType::Directory)
                );
                (
                    entry.path().unwrap().display().to_string(),
                    entry.header().entry_type(),
                    entry.header().mode().unwrap(),
                )
            })
            .collect();
        let of = |name: &str| entries.iter().find(|entry| entry.0 == name).unwrap();
        assert_eq!((of("t/d/file").1, of("t/d/file").2), (EntryType::Regular, 0o751));
        assert_eq!((of("t/same").1, of("t/link").1), (EntryType::Link, EntryType::Symlink));
        assert_eq!(facts.len(), 5);
        assert!(facts.iter().any(|fact| matches!(fact, HostFact::Copied { path, bytes: 1000, mode: 0o100_751, .. } if path == "/workspace/t/same")));
    }
}
