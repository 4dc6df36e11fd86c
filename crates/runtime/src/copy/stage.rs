//! Where a tree out of the guest grows until all of it is there.
//!
//! ```text
//! <parent>/.hotcell-part-<run>-<exec>/   private; made exclusively
//!     top                                what was asked for; becomes <parent>/… in one rename, which replaces nothing
//! ```
//! The attack: entries named `..`, `/etc/x`, twice, or below a link that came before; links to places of the host;
//! devices; sizes and counts without end; names that are one name on a host that ignores case. Each name is taken apart
//! here, must begin with what was asked for, and the kernel resolves its directory below the stage's own descriptor and
//! through no link; files are made exclusively; entries, bytes and names are paid for before they are made.
//!
//! What it guarantees: nothing outside the stage is made, changed or opened; a stage that is dropped is removed; what
//! has the final name is whole. What it does not: sync to the disk.
//! Who may call: the thread of the copy's stdout fills a [`Stage`]; the driver commits a [`Staged`].

use super::archive::{Entry, Kind, Sink};
use super::{Budget, Cost, FILES, GetRequest, MAX_BUNDLE_DEPTH, MAX_DEPTH, stays_inside};
use hotcell_decide::{Direction, HostFact};
use hotcell_ledger::Digest;
use hotcell_ledger::checkpoint::escape;
use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, RenameFlags, ResolveFlags, Timespec, Timestamps, fchmod, futimens, linkat,
    mkdirat, openat, openat2, renameat_with, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The name of what was asked for, within the stage.
const TOP: &str = "top";
/// Entries that were not taken and are listed by name; the rest is counted.
const LISTED: usize = 20;
/// What a line of the record's note has besides the path, at most.
const NOTE_LINE: u64 = 100;
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A tree that grows.
#[derive(Debug)]
pub(crate) struct Stage {
    place: Place,
    /// Components of the guest's path.
    asked: Vec<String>,
    budget: Arc<Budget>,
    spent: Cost,
    open: Option<Growing>,
    /// Content that nobody wants.
    skipping: bool,
    /// The directory of the last entry: trees come directory by directory.
    last: Option<(Vec<String>, OwnedFd)>,
    directories: Vec<(Vec<String>, u32, Timestamps)>,
    files: HashMap<Vec<String>, (Digest, u64, u32)>,
    facts: Vec<HostFact>,
    left_out: Vec<String>,
    left_out_count: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Growing {
    path: Vec<String>,
    file: File,
    hasher: blake3::Hasher,
    size: u64,
    mode: u32,
    times: Timestamps,
}

/// The stage's folder. Removed with all that is in it when dropped.
#[derive(Debug)]
struct Place {
    parent: OwnedFd,
    name: String,
    root: OwnedFd,
    /// What becomes of the top: a name in the parent, or the guest's path below the bundle's `files`.
    target: Option<String>,
    shown: PathBuf,
}

impl Place {
    fn make(request: &GetRequest, bundle: &Path, label: &str) -> Result<Place, String> {
        let (parent, target) = match &request.target {
            None => (bundle.to_owned(), None),
            Some(target) => {
                let shown = target.display();
                let name = target.file_name().and_then(OsStr::to_str);
                let name = name
                    .ok_or_else(|| format!("{shown}: name the file or folder that it becomes, in UTF-8"))?;
                if target.symlink_metadata().is_ok() {
                    return Err(format!("{shown} is there already: nothing is replaced"));
                }
                let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty());
                (parent.unwrap_or(Path::new(".")).to_owned(), Some(name.to_owned()))
            }
        };
        let text = |error: Errno| format!("{}: {error}", parent.display());
        // The caller named it: it may be a link.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent_fd = openat(CWD, &parent, flags, Mode::empty()).map_err(text)?;
        let name = format!(".hotcell-part-{label}");
        mkdirat(&parent_fd, name.as_str(), Mode::RWXU).map_err(text)?;
        let root = openat(&parent_fd, name.as_str(), DIRECTORY, Mode::empty()).map_err(text)?;
        let shown = match &request.target {
            None => bundle.join(FILES).join(request.path.trim_start_matches('/')),
            Some(target) => target.clone(),
        };
        Ok(Place { parent: parent_fd, name, root, target, shown })
    }

    fn is_bundle(&self) -> bool {
        self.target.is_none()
    }

    fn below(&self, path: &[String]) -> Result<OwnedFd, Errno> {
        let path = if path.is_empty() { ".".to_owned() } else { path.join("/") };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(&self.root, path, DIRECTORY, Mode::empty(), resolve)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // By its parent's descriptor: whoever moves folders about meanwhile gets nothing removed of his.
        let path = format!("/proc/self/fd/{}/{}", self.parent.as_raw_fd(), self.name);
        let _ = std::fs::remove_dir_all(path);
    }
}

impl Stage {
    /// Makes the stage: nothing else of the host is touched until it is committed.
    pub(crate) fn make(
        request: &GetRequest,
        bundle: &Path,
        label: &str,
        budget: Arc<Budget>,
    ) -> Result<Stage, String> {
        let asked = request.components()?;
        Ok(Stage {
            place: Place::make(request, bundle, label)?,
            asked,
            budget,
            spent: Cost::default(),
            open: None,
            skipping: false,
            last: None,
            directories: Vec::new(),
            files: HashMap::new(),
            facts: Vec::new(),
            left_out: Vec::new(),
            left_out_count: 0,
            bytes: 0,
        })
    }

    /// What the archive said is complete: modes and times of directories, which come last, and then it only lacks its name.
    pub(crate) fn finish(mut self) -> Result<Staged, String> {
        if self.open.is_some() {
            return Err("the archive ends within a file".into());
        }
        if self.facts.is_empty() {
            let why = self.left_out.first().cloned();
            return Err(why.unwrap_or_else(|| "the guest sent nothing of that name".into()));
        }
        self.last = None;
        let mut top = None;
        for (path, mode, times) in self.directories.iter().rev() {
            let directory = self.place.below(path).map_err(|error| error.to_string())?;
            if path.len() == 1 {
                // A directory that its owner may not write can't be moved.
                top = Some((directory, *mode, times.clone()));
                continue;
            }
            futimens(&directory, times).map_err(|error| error.to_string())?;
            fchmod(&directory, Mode::from_raw_mode(*mode)).map_err(|error| error.to_string())?;
        }
        Ok(Staged { stage: self, top })
    }

    /// The place of an entry within the stage, from its name; an error ends the copy.
    fn locate(&self, name: &[u8]) -> Result<Located, String> {
        let shown = || String::from_utf8_lossy(name).escape_debug().take(200).collect::<String>();
        if name.contains(&0) || name.first() == Some(&b'/') {
            return Err(format!("the guest named an entry {:?}, which is absolute or no name", shown()));
        }
        let mut pieces: Vec<&[u8]> =
            name.split(|&byte| byte == b'/').filter(|piece| !matches!(piece, [] | [b'.'])).collect();
        if pieces.contains(&b"..".as_slice()) {
            return Err(format!("the guest named an entry {:?}, with `..` in it", shown()));
        }
        let asked = self.asked.iter().map(String::as_bytes);
        if pieces.len() < self.asked.len()
            || !pieces.iter().copied().zip(asked).all(|(piece, asked)| piece == asked)
        {
            return Err(format!("the guest named an entry {:?}, which was not asked for", shown()));
        }
        let rest = pieces.split_off(self.asked.len());
        let most = if self.place.is_bundle() {
            MAX_BUNDLE_DEPTH.saturating_sub(self.asked.len())
        } else {
            MAX_DEPTH
        };
        if rest.len() > most {
            return Err(format!(
                "{:?} is too deep: copy a tree of at most {most} levels, or pack it into one file",
                shown()
            ));
        }
        let mut path = vec![TOP.to_owned()];
        for piece in rest {
            match std::str::from_utf8(piece) {
                Ok(piece) => path.push(piece.to_owned()),
                Err(_) => return Ok(Located::Unnameable(shown())),
            }
        }
        Ok(Located::At(path))
    }

    fn guest_path(&self, path: &[String]) -> String {
        let pieces = self.asked.iter().chain(path.iter().skip(1));
        pieces.fold(String::new(), |whole, piece| whole + "/" + piece)
    }

    fn leave_out(&mut self, path: &str, why: &str) {
        self.left_out_count += 1;
        if self.left_out.len() < LISTED {
            self.left_out.push(format!("{:?}: {why}", path));
        }
        self.skipping = true;
    }

    fn pay(&mut self, path: &[String], size: u64, is_file: bool) -> Result<(), String> {
        let guest_path = self.guest_path(path);
        let note = match self.place.is_bundle() && is_file {
            true => escape(guest_path.as_bytes()).len() as u64 + NOTE_LINE,
            false => 0,
        };
        let cost = Cost { entries: 1, bytes: size, names: guest_path.len() as u64, note };
        self.budget.take(cost)?;
        self.spent.entries += cost.entries;
        self.spent.bytes += cost.bytes;
        self.spent.names += cost.names;
        self.spent.note += cost.note;
        Ok(())
    }

    /// The directory that an entry goes into: announced before, and no link on the way.
    fn directory(&mut self, path: &[String]) -> Result<(OwnedFd, String), String> {
        let Some((name, parents)) = path.split_last() else { return Err("an entry without a name".into()) };
        if self.last.as_ref().is_none_or(|(last, _)| last != parents) {
            let directory = self.place.below(parents).map_err(|error| {
                format!(
                    "the guest named an entry below {:?}, which is no directory of the archive: {error}",
                    self.guest_path(parents)
                )
            })?;
            self.last = Some((parents.to_vec(), directory));
        }
        let (_, directory) = self.last.as_ref().ok_or("no directory")?;
        Ok((directory.try_clone().map_err(|error| error.to_string())?, name.clone()))
    }

    fn made(&self, path: &[String], error: Errno) -> String {
        let path = self.guest_path(path);
        match error {
            Errno::EXIST => {
                format!("the guest named {path:?} twice, or two names that are one name on this host")
            }
            error => format!("can't write {path:?}: {error}"),
        }
    }

    fn tell(&mut self, path: &[String], bytes: u64, digest: Digest, mode: u32) {
        let (direction, path) = (Direction::Out, self.guest_path(path));
        self.facts.push(HostFact::Copied { direction, path, bytes, digest, mode });
    }

    /// The mode on the host. What lies in a bundle stays readable to its owner: it is to be verified.
    fn mode(&self, mode: u32, least_in_bundle: u32) -> u32 {
        (mode & 0o777) | if self.place.is_bundle() { least_in_bundle } else { 0 }
    }
}

enum Located {
    At(Vec<String>),
    /// A name that records have no spelling for.
    Unnameable(String),
}

impl Sink for Stage {
    fn entry(&mut self, entry: Entry) -> Result<(), String> {
        self.skipping = false;
        let path = match self.locate(&entry.path)? {
            Located::At(path) => path,
            Located::Unnameable(shown) => {
                self.budget.take(Cost { entries: 1, ..Cost::default() })?;
                self.spent.entries += 1;
                self.leave_out(&shown, "its name is not UTF-8");
                return Ok(());
            }
        };
        self.pay(
            &path,
            if entry.kind == Kind::File { entry.size } else { 0 },
            entry.kind != Kind::Directory,
        )?;
        let (seconds, nanos) = entry.mtime;
        let time = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
        let times = Timestamps { last_access: time, last_modification: time };
        let shown = self.guest_path(&path);
        if path.len() == 1 && matches!(entry.kind, Kind::Symlink | Kind::HardLink) {
            return Err(format!("{shown:?} is a link in the guest: ask for what it leads to"));
        }
        match entry.kind {
            Kind::File => {
                let (directory, name) = self.directory(&path)?;
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = openat(&directory, name.as_str(), flags, Mode::RUSR | Mode::WUSR);
                let file = File::from(file.map_err(|error| self.made(&path, error))?);
                let (hasher, size, mode) = (blake3::Hasher::new(), entry.size, entry.mode & 0o777);
                self.open = Some(Growing { path, file, hasher, size, mode, times });
            }
            Kind::Directory => {
                let (directory, name) = self.directory(&path)?;
                mkdirat(&directory, name.as_str(), Mode::RWXU).map_err(|error| self.made(&path, error))?;
                let mode = self.mode(entry.mode, 0o700);
                self.directories.push((path.clone(), mode, times));
                self.tell(&path, 0, Digest::of(b""), 0o040_000 | (entry.mode & 0o777));
            }
            Kind::Symlink => {
                if !stays_inside(path.len() - 2, &entry.link) {
                    let target: String =
                        String::from_utf8_lossy(&entry.link).escape_debug().take(200).collect();
                    self.leave_out(&shown, &format!("it is a link out of what was asked for, to {target}"));
                    return Ok(());
                }
                if self.place.is_bundle() {
                    self.leave_out(&shown, "it is a link, and a record holds none");
                    return Ok(());
                }
                let (directory, name) = self.directory(&path)?;
                symlinkat(OsStr::from_bytes(&entry.link), &directory, name.as_str())
                    .map_err(|error| self.made(&path, error))?;
                utimensat(&directory, name.as_str(), &times, AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(|error| self.made(&path, error))?;
                self.tell(&path, 0, Digest::of(&entry.link), 0o120_777);
            }
            Kind::HardLink => {
                let Located::At(earlier) = self.locate(&entry.link)? else {
                    self.leave_out(&shown, "it is another name of a file whose name is not UTF-8");
                    return Ok(());
                };
                let Some((digest, bytes, mode)) = self.files.get(&earlier).copied() else {
                    return Err(format!("{shown:?} is another name of a file that did not come before"));
                };
                let (from, from_name) = self.directory(&earlier)?;
                let (directory, name) = self.directory(&path)?;
                linkat(&from, from_name.as_str(), &directory, name.as_str(), AtFlags::empty())
                    .map_err(|error| self.made(&path, error))?;
                self.tell(&path, bytes, digest, 0o100_000 | mode);
            }
            Kind::Other => self.leave_out(&shown, "it is neither file, directory nor link"),
        }
        Ok(())
    }

    fn content(&mut self, bytes: &[u8]) -> Result<(), String> {
        match &mut self.open {
            Some(growing) => {
                growing
                    .file
                    .write_all(bytes)
                    .map_err(|error| format!("the host's disk does not take it: {error}"))?;
                growing.hasher.update(bytes);
            }
            // What is left out is not paid for byte by byte, but it is not endless either.
            None if self.skipping => {
                self.budget.take(Cost { bytes: bytes.len() as u64, ..Cost::default() })?;
                self.spent.bytes += bytes.len() as u64;
            }
            None => return Err("content without an entry".into()),
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<(), String> {
        let Some(growing) = self.open.take() else { return Ok(()) };
        let Growing { path, file, hasher, size, mode, times } = growing;
        let fail = |error: Errno| format!("the host's disk does not take it: {error}");
        futimens(file.as_fd(), &times).map_err(fail)?;
        fchmod(file.as_fd(), Mode::from_raw_mode(self.mode(mode, 0o400))).map_err(fail)?;
        let digest = Digest::from_bytes(*hasher.finalize().as_bytes());
        self.bytes += size;
        self.files.insert(path.clone(), (digest, size, mode));
        self.tell(&path, size, digest, 0o100_000 | mode);
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // Directories that were closed to their owner already would keep what is in them.
        for (path, ..) in &self.directories {
            if let Ok(directory) = self.place.below(path) {
                let _ = fchmod(&directory, Mode::RWXU);
            }
        }
        self.budget.give_back(std::mem::take(&mut self.spent));
    }
}

/// A whole tree that lacks its final name.
#[derive(Debug)]
pub(crate) struct Staged {
    stage: Stage,
    /// Mode and times of the top, where it is a directory.
    top: Option<(OwnedFd, u32, Timestamps)>,
}

impl Staged {
    /// What to record of it.
    pub(crate) fn facts(&mut self) -> Vec<HostFact> {
        std::mem::take(&mut self.stage.facts)
    }

    /// Entries, bytes, entries that were left out.
    pub(crate) fn totals(&self) -> (u64, u64, u64) {
        let taken = self.stage.spent.entries.saturating_sub(self.stage.left_out_count);
        (taken, self.stage.bytes, self.stage.left_out_count)
    }

    /// What was left out, in words.
    pub(crate) fn left_out(&self) -> Vec<String> {
        let mut list = self.stage.left_out.clone();
        let more = self.stage.left_out_count - list.len() as u64;
        if more > 0 {
            list.push(format!("and {more} more"));
        }
        list
    }

    /// Gives it its name; where it is then.
    pub(crate) fn commit(mut self) -> Result<PathBuf, String> {
        let stage = &mut self.stage;
        let place = &stage.place;
        let shown = place.shown.display().to_string();
        let text = |error: Errno| match error {
            Errno::EXIST => format!("{shown} is there already: nothing is replaced"),
            error => format!("{shown}: {error}"),
        };
        let named = match &place.target {
            Some(name) => {
                renameat_with(&place.root, TOP, &place.parent, name.as_str(), RenameFlags::NOREPLACE)
            }
            None => {
                let mut directory = child(&place.parent, FILES).map_err(text)?;
                let (name, parents) = stage.asked.split_last().ok_or("no name")?;
                for parent in parents {
                    directory = child(&directory, parent).map_err(text)?;
                }
                renameat_with(&place.root, TOP, &directory, name.as_str(), RenameFlags::NOREPLACE)
            }
        };
        named.map_err(text)?;
        if let Some((top, mode, times)) = &self.top {
            futimens(top, times).map_err(text)?;
            fchmod(top, Mode::from_raw_mode(*mode)).map_err(text)?;
        }
        // Spent for good.
        stage.spent = Cost::default();
        stage.directories.clear();
        let _ = unlinkat(&place.parent, place.name.as_str(), AtFlags::REMOVEDIR);
        Ok(place.shown.clone())
    }
}

/// A directory of ours, made where it is missing.
fn child(directory: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    match mkdirat(directory, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => openat(directory, name, DIRECTORY, Mode::empty()),
        Err(error) => Err(error),
    }
}
