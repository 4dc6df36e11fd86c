//! An image while it is put together: layers on top of each other, in memory.
//!
//! The attack: an archive whose names, links and sizes lead the builder to write
//! somewhere else, or to fill memory and disk. Here a name never reaches the
//! host's file system: the tree is a map, the bytes go to a [`Spool`], links are
//! followed in the map only, with `/` as the end of every `..`. Owners, modes and
//! set-id bits are data. All that an archive can make grow is bounded by [`Limits`].
//!
//! Held: whatever has an entry has a directory above it.

use crate::error::ImageError;
use crate::limits::{Limits, MAX_NAME, MAX_TARGET};
use crate::spool::{Slice, Spool};
use crate::tree::{Content, Entry, Node, Tree};
use hotcell_policy::CleanPath;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io::{self, Read};
use std::path::Path;

/// Links that are followed to place one entry, as Linux does (path_resolution(7)).
const MAX_LINKS: u32 = 40;
const SET_ID: u32 = 0o6000;

/// Mode, owner and group of an entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meta {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: u64,
}

/// What a build left out, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// Kind of thing, and how many.
    pub(crate) kinds: BTreeMap<&'static str, u64>,
}

/// The image so far.
#[derive(Debug)]
pub(crate) struct Stage {
    tree: Tree,
    spool: Spool,
    limits: Limits,
    keep_setuid: bool,
    left_out: LeftOut,
    entries: u64,
    bytes: u64,
    names: u64,
    links: u64,
    owners: BTreeSet<u32>,
    layers: usize,
    /// Put by the layer at work: its whiteouts leave them alone.
    fresh: HashSet<CleanPath>,
    /// Whiteouts of the layer at work that were done.
    cleared: HashSet<(CleanPath, bool)>,
    /// When Python sources were changed: their compiled forms name it.
    pub(crate) python: BTreeMap<CleanPath, u64>,
}

impl Stage {
    pub(crate) fn new(dir: &Path, limits: Limits, keep_setuid: bool) -> Result<Stage, ImageError> {
        Ok(Stage {
            tree: Tree::new(),
            spool: Spool::new(dir)?,
            limits,
            keep_setuid,
            left_out: LeftOut::default(),
            entries: 0,
            bytes: 0,
            names: 0,
            links: 0,
            owners: BTreeSet::new(),
            layers: 0,
            fresh: HashSet::new(),
            cleared: HashSet::new(),
            python: BTreeMap::new(),
        })
    }

    pub(crate) fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(crate) fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    pub(crate) fn scratch(&self) -> &Path {
        self.spool.dir()
    }

    pub(crate) fn into_tree(self) -> Tree {
        self.tree
    }

    /// Begins another layer.
    pub(crate) fn next_layer(&mut self) -> Result<(), ImageError> {
        self.layers += 1;
        self.fresh.clear();
        self.cleared.clear();
        if self.layers > self.limits.layers {
            return Err(too_much(format!("it has more than {} layers", self.limits.layers)));
        }
        Ok(())
    }

    /// Bytes that the layers may still have.
    pub(crate) fn bytes_left(&self) -> u64 {
        self.limits.bytes.saturating_sub(self.bytes)
    }

    /// Counts the bytes of a layer.
    pub(crate) fn spend_bytes(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Counts an archive entry, whatever becomes of it.
    pub(crate) fn count(&mut self) -> Result<(), ImageError> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(too_much(format!("it has more than {} entries", self.limits.entries)));
        }
        Ok(())
    }

    /// An entry that no image holds.
    pub(crate) fn leave_out(&mut self, what: &'static str) {
        *self.left_out.kinds.entry(what).or_default() += 1;
    }

    /// A name as an archive or folder has it, checked: its slashes at the start
    /// mean the image's root, `..` is refused.
    pub(crate) fn name(&mut self, bytes: &[u8]) -> Result<CleanPath, ImageError> {
        let shown = String::from_utf8_lossy(bytes);
        let refuse = |why: String| refuse(&shown, why);
        self.names = self.names.saturating_add(bytes.len() as u64);
        if self.names > self.limits.name_bytes {
            return Err(too_much(format!("its names have more than {} bytes", self.limits.name_bytes)));
        }
        let text = std::str::from_utf8(bytes)
            .map_err(|_| refuse("its name is not UTF-8; rename it in the source".into()))?;
        let parts = text.split('/').filter(|part| !part.is_empty() && *part != ".");
        let mut depth = 0;
        for part in parts {
            depth += 1;
            if part == ".." {
                return Err(refuse("its name has `..` in it".into()));
            }
            if part.len() > MAX_NAME {
                return Err(refuse(format!("a name in it is longer than {MAX_NAME} bytes")));
            }
        }
        if depth > self.limits.depth {
            return Err(refuse(format!("it is more than {} folders deep", self.limits.depth)));
        }
        CleanPath::clean(&format!("/{text}")).map_err(|error| refuse(error.to_string()))
    }

    pub(crate) fn directory(&mut self, path: &CleanPath, meta: Meta) -> Result<(), ImageError> {
        if path.as_str() == "/" {
            return Ok(());
        }
        let place = self.place(path)?;
        if let Some(Entry { node: Node::Directory, .. }) = self.tree.get(&place) {
            let entry = self.entry(Node::Directory, meta)?;
            self.fresh.insert(place.clone());
            self.tree.insert(place, entry);
            return Ok(());
        }
        let entry = self.entry(Node::Directory, meta)?;
        self.put(place, entry)
    }

    pub(crate) fn symlink(&mut self, path: &CleanPath, target: &[u8], meta: Meta) -> Result<(), ImageError> {
        let fault = |why: &str| refuse(path.as_str(), why.into());
        let text = std::str::from_utf8(target).map_err(|_| fault("its target is not UTF-8"))?;
        if text.is_empty() || text.len() > MAX_TARGET || text.contains('\0') {
            return Err(fault("its target is empty, too long, or has a NUL byte"));
        }
        self.names = self.names.saturating_add(text.len() as u64);
        let place = self.place(path)?;
        let entry = self.entry(Node::Symlink(text.to_owned()), Meta { mode: 0o777, ..meta })?;
        self.put(place, entry)
    }

    /// A file of exactly `size` bytes.
    pub(crate) fn file(
        &mut self,
        path: &CleanPath,
        meta: Meta,
        size: u64,
        from: impl Read,
    ) -> Result<(), ImageError> {
        if size > self.limits.file_bytes {
            let most = self.limits.file_bytes;
            return Err(refuse(path.as_str(), format!("it says that it has {size} bytes, over {most}")));
        }
        let fault = |error: io::Error| refuse(path.as_str(), error.to_string());
        let slice = self.spool.append(from.take(size)).map_err(fault)?;
        if slice.len() != size {
            let why = format!("it says that it has {size} bytes, but only {} came", slice.len());
            return Err(refuse(path.as_str(), why));
        }
        self.slice(path, meta, slice)
    }

    pub(crate) fn slice(&mut self, path: &CleanPath, meta: Meta, slice: Slice) -> Result<(), ImageError> {
        let place = self.place(path)?;
        if place.as_str() == "/" {
            return Err(refuse("/", "it is no directory".into()));
        }
        let entry = self.entry(Node::File(Content::Slice(slice)), meta)?;
        if place.as_str().ends_with(".py") {
            self.python.insert(place.clone(), meta.mtime);
        }
        self.put(place, entry)
    }

    /// Bytes that the builder itself adds.
    pub(crate) fn bytes(&mut self, path: &CleanPath, mode: u32, bytes: &[u8]) -> Result<(), ImageError> {
        let meta = Meta { mode, uid: 0, gid: 0, mtime: 0 };
        self.file(path, meta, bytes.len() as u64, bytes)
    }

    /// Appends to the spool without giving it a name.
    pub(crate) fn keep(&mut self, from: impl Read) -> io::Result<Slice> {
        self.spool.append(from)
    }

    /// A further name of a file that is there.
    pub(crate) fn hard_link(&mut self, path: &CleanPath, target: &CleanPath) -> Result<(), ImageError> {
        let from = self.place(target)?;
        let fault = |why: &str| {
            refuse(path.as_str(), format!("it is a hard link to {:?}, which is {why}", target.as_str()))
        };
        let entry = self.tree.get(&from).ok_or_else(|| fault("not in the image"))?.clone();
        if matches!(entry.node, Node::Directory) {
            return Err(fault("a directory"));
        }
        let place = self.place(path)?;
        if place == from {
            return Ok(());
        }
        if let Some(&mtime) = self.python.get(&from) {
            self.python.insert(place.clone(), mtime);
        }
        self.put(place, entry)
    }

    /// `.wh.NAME`: what lower layers have under this name is gone.
    pub(crate) fn whiteout(&mut self, path: &CleanPath) -> Result<(), ImageError> {
        let place = self.place(path)?;
        self.clear(&place, true);
        Ok(())
    }

    /// `.wh..wh..opq`: what lower layers have in this directory is gone.
    pub(crate) fn opaque(&mut self, directory: &CleanPath) -> Result<(), ImageError> {
        let place = if directory.as_str() == "/" { directory.clone() } else { self.place(directory)? };
        self.clear(&place, false);
        Ok(())
    }

    /// Removes the lower layers' entries below `path`, and `path` itself if asked.
    /// What this layer put stays, with the directories above it.
    fn clear(&mut self, path: &CleanPath, itself: bool) {
        // A layer that repeats a whiteout a million times must not cost a million walks.
        if !self.cleared.insert((path.clone(), itself)) {
            return;
        }
        let mut doomed = self.tree.below(path);
        if itself {
            doomed.insert(0, path.clone());
        }
        // Deepest first, so that a directory is looked at after what it holds.
        let mut kept: HashSet<CleanPath> = HashSet::new();
        for path in doomed.into_iter().rev() {
            if self.fresh.contains(&path) || kept.contains(&path) {
                kept.insert(parent(&path));
            } else {
                self.drop_entry(&path);
            }
        }
    }

    /// Removes one file of whatever layer.
    pub(crate) fn whiteout_anything(&mut self, path: &CleanPath) {
        if !matches!(self.tree.get(path), Some(Entry { node: Node::Directory, .. })) {
            self.drop_entry(path);
        }
    }

    fn drop_entry(&mut self, path: &CleanPath) {
        self.tree.remove(path);
        self.python.remove(path);
        self.fresh.remove(path);
    }

    /// Puts an entry in its place; what was there is gone, with all below it.
    fn put(&mut self, place: CleanPath, entry: Entry) -> Result<(), ImageError> {
        self.make_parents(&place)?;
        let is_python = matches!(entry.node, Node::File(_)) && place.as_str().ends_with(".py");
        if let Some(Entry { node: Node::Directory, .. }) = self.tree.get(&place) {
            for below in self.tree.below(&place) {
                self.drop_entry(&below);
            }
        }
        if !is_python {
            self.python.remove(&place);
        }
        self.fresh.insert(place.clone());
        self.tree.insert(place, entry);
        Ok(())
    }

    fn make_parents(&mut self, place: &CleanPath) -> Result<(), ImageError> {
        let mut missing = Vec::new();
        let mut above = parent(place);
        while above.as_str() != "/" {
            match self.tree.get(&above) {
                None => missing.push(above.clone()),
                Some(Entry { node: Node::Directory, .. }) => break,
                Some(_) => return Err(refuse(place.as_str(), format!("{above} is no directory"))),
            }
            above = parent(&above);
        }
        for above in missing.into_iter().rev() {
            self.count()?;
            let made = Entry { node: Node::Directory, mode: 0o755, uid: 0, gid: 0 };
            self.fresh.insert(above.clone());
            self.tree.insert(above, made);
        }
        Ok(())
    }

    fn entry(&mut self, node: Node, meta: Meta) -> Result<Entry, ImageError> {
        let mut mode = meta.mode & 0o7777;
        if matches!(node, Node::File(_)) && mode & SET_ID != 0 && !self.keep_setuid {
            mode &= !SET_ID;
            self.leave_out("set-user-id and set-group-id bits");
        }
        self.owners.insert(meta.uid);
        self.owners.insert(meta.gid);
        if self.owners.len() > self.limits.owners {
            return Err(too_much(format!("its files have more than {} owners", self.limits.owners)));
        }
        Ok(Entry { node, mode, uid: meta.uid, gid: meta.gid })
    }

    /// Where a path leads, the links in its folders followed as in a chroot; the
    /// last name is taken as it is.
    pub(crate) fn place(&mut self, path: &CleanPath) -> Result<CleanPath, ImageError> {
        let above = parent(path);
        if above.as_str() == "/" || matches!(self.tree.get(&above), Some(Entry { node: Node::Directory, .. }))
        {
            return Ok(path.clone());
        }
        let (folder, name) = path.as_str().rsplit_once('/').unwrap_or(("", path.as_str()));
        let folder = self.follow(folder)?;
        let folder = if folder.as_str() == "/" { "" } else { folder.as_str() };
        CleanPath::clean(&format!("{folder}/{name}"))
            .map_err(|error| refuse(path.as_str(), error.to_string()))
    }

    /// Where a path leads, all links followed as in a chroot; it need not be there.
    pub(crate) fn follow(&mut self, path: &str) -> Result<CleanPath, ImageError> {
        let fault = |why: String| refuse(path, why);
        let split = |text: &str| -> Vec<String> {
            text.split('/').filter(|part| !part.is_empty() && *part != ".").map(str::to_owned).rev().collect()
        };
        let mut wanted = split(path);
        let mut at = String::new();
        let mut links = 0;
        while let Some(part) = wanted.pop() {
            if part == ".." {
                at.truncate(at.rfind('/').unwrap_or(0));
                continue;
            }
            let back = at.len();
            at.push('/');
            at.push_str(&part);
            let here = CleanPath::clean(&at).map_err(|error| fault(error.to_string()))?;
            let Some(Entry { node: Node::Symlink(target), .. }) = self.tree.get(&here) else { continue };
            links += 1;
            self.links += 1;
            if links > MAX_LINKS || self.links > self.limits.links {
                return Err(fault("it leads through too many symbolic links".into()));
            }
            let from = if target.starts_with('/') { 0 } else { back };
            at.truncate(from);
            wanted.extend(split(target));
            if wanted.len() > self.limits.depth * 2 {
                return Err(fault("it leads through links that are too deep".into()));
            }
        }
        if at.matches('/').count() > self.limits.depth {
            return Err(fault(format!("it is more than {} folders deep", self.limits.depth)));
        }
        let at = if at.is_empty() { "/" } else { &at };
        CleanPath::clean(at).map_err(|error| fault(error.to_string()))
    }

    /// The entry that a path leads to, links followed.
    pub(crate) fn find(&mut self, path: &str) -> Option<(CleanPath, Entry)> {
        let place = self.follow(path).ok()?;
        let entry = self.tree.get(&place)?.clone();
        Some((place, entry))
    }

    /// Changes the content of a file that is there.
    pub(crate) fn replace(&mut self, path: &CleanPath, slice: Slice) {
        if let Some(entry) = self.tree.get_mut(path) {
            entry.node = Node::File(Content::Slice(slice));
        }
    }
}

pub(crate) fn parent(path: &CleanPath) -> CleanPath {
    let above = match path.as_str().rsplit_once('/') {
        None | Some(("", _)) => "/",
        Some((above, _)) => above,
    };
    // A part of a clean path is clean.
    CleanPath::clean(above).unwrap_or_else(|_| path.clone())
}

pub(crate) fn refuse(path: &str, why: String) -> ImageError {
    ImageError::Entry { path: path.escape_debug().to_string(), why }
}

pub(crate) fn too_much(why: String) -> ImageError {
    ImageError::TooMuch { why }
}
