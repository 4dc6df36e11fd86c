//! A root file system as data: every entry with its mode and owner, then as
//! squashfs bytes and as a manifest.
//!
//! Reproducible: entries are sorted, all times are zero, compression and block
//! size are fixed.

use crate::error::{ImageError, at};
use crate::spool::{Slice, SliceReader};
use backhand::compression::{CompressionOptions, Compressor, Lz4};
use backhand::{FilesystemCompressor, FilesystemWriter, NodeHeader};
use hotcell_ledger::Digest;
use hotcell_policy::{CleanPath, EntryKind, Manifest, ManifestEntry, ServiceDraft};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Cursor, Read, Seek, Write};
use std::path::PathBuf;

/// Squashfs block size: the largest that Linux reads, so that a cold read of a
/// large file costs few requests.
const BLOCK_SIZE: u32 = 128 * 1024;

/// Where a file's bytes are.
#[derive(Clone, Debug)]
pub enum Content {
    /// At hand.
    Bytes(Vec<u8>),
    /// In a file of the host, which must not change until the image is written.
    File(PathBuf),
    /// In the spool of the build.
    Slice(Slice),
}

impl Content {
    /// Length in bytes.
    pub(crate) fn len(&self) -> Result<u64, ImageError> {
        match self {
            Content::Bytes(bytes) => Ok(bytes.len() as u64),
            Content::File(from) => Ok(std::fs::metadata(from).map_err(at(from))?.len()),
            Content::Slice(slice) => Ok(slice.len()),
        }
    }

    /// The bytes; at most `limit` of them.
    pub(crate) fn read(&self, limit: u64) -> Result<Vec<u8>, ImageError> {
        let mut bytes = Vec::new();
        let here = PathBuf::from("the build's spool");
        match self {
            Content::Bytes(all) => all.as_slice().take(limit).read_to_end(&mut bytes).map_err(at(&here))?,
            Content::File(from) => {
                File::open(from).map_err(at(from))?.take(limit).read_to_end(&mut bytes).map_err(at(from))?
            }
            Content::Slice(slice) => slice.reader().take(limit).read_to_end(&mut bytes).map_err(at(&here))?,
        };
        Ok(bytes)
    }
}

/// One entry.
#[derive(Clone, Debug)]
pub enum Node {
    /// A file.
    File(Content),
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(String),
}

/// An entry with its metadata.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) node: Node,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// A root file system.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    entries: BTreeMap<CleanPath, Entry>,
}

impl Tree {
    /// An empty tree.
    pub fn new() -> Tree {
        Tree::default()
    }

    /// Puts an entry, root-owned; missing parents are made (0755). An entry that
    /// is there already is replaced.
    ///
    /// # Errors
    /// The path is not an absolute one, or a parent is no directory.
    pub fn put(&mut self, path: &str, mode: u32, node: Node) -> Result<(), ImageError> {
        self.put_owned(path, mode, 0, 0, node)
    }

    /// [`Tree::put`] with an owner.
    ///
    /// # Errors
    /// As [`Tree::put`].
    pub fn put_owned(
        &mut self,
        path: &str,
        mode: u32,
        uid: u32,
        gid: u32,
        node: Node,
    ) -> Result<(), ImageError> {
        let refuse = |why: String| ImageError::Entry { path: path.escape_debug().to_string(), why };
        let clean = CleanPath::clean(path).map_err(|error| refuse(error.to_string()))?;
        if clean.as_str() == "/" {
            return Ok(());
        }
        let mut parent = String::new();
        let parts: Vec<&str> = clean.as_str().split('/').skip(1).collect();
        for part in parts.iter().take(parts.len() - 1) {
            parent.push('/');
            parent.push_str(part);
            let above = CleanPath::clean(&parent).map_err(|error| refuse(error.to_string()))?;
            let made = Entry { node: Node::Directory, mode: 0o755, uid: 0, gid: 0 };
            let above = self.entries.entry(above).or_insert(made);
            if !matches!(above.node, Node::Directory) {
                return Err(refuse(format!("{parent} is no directory")));
            }
        }
        self.entries.insert(clean, Entry { node, mode, uid, gid });
        Ok(())
    }

    /// Whether there is an entry.
    pub fn contains(&self, path: &str) -> bool {
        CleanPath::clean(path).is_ok_and(|path| self.entries.contains_key(&path))
    }

    pub(crate) fn get(&self, path: &CleanPath) -> Option<&Entry> {
        self.entries.get(path)
    }

    pub(crate) fn get_mut(&mut self, path: &CleanPath) -> Option<&mut Entry> {
        self.entries.get_mut(path)
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = (&CleanPath, &Entry)> {
        self.entries.iter()
    }

    /// Puts an entry whose parents are there.
    pub(crate) fn insert(&mut self, path: CleanPath, entry: Entry) -> Option<Entry> {
        self.entries.insert(path, entry)
    }

    pub(crate) fn remove(&mut self, path: &CleanPath) -> Option<Entry> {
        self.entries.remove(path)
    }

    /// Everything below a path, sorted.
    pub(crate) fn below(&self, path: &CleanPath) -> Vec<CleanPath> {
        if path.as_str() == "/" {
            return self.entries.keys().cloned().collect();
        }
        // `/a-b` sorts between `/a` and `/a/b`: begin at `/a/` itself.
        let prefix = format!("{}/", path.as_str());
        self.entries
            .range::<CleanPath, _>((std::ops::Bound::Excluded(path), std::ops::Bound::Unbounded))
            .map(|(below, _)| below)
            .skip_while(|below| below.as_str() < prefix.as_str())
            .take_while(|below| below.as_str().starts_with(&prefix))
            .cloned()
            .collect()
    }

    /// What the image holds, measured.
    ///
    /// # Errors
    /// A file can't be read, or a service's program is none of the image's.
    pub fn manifest(&self, services: &[ServiceDraft]) -> Result<Manifest, ImageError> {
        let mut entries = Vec::with_capacity(self.entries.len());
        for (path, entry) in &self.entries {
            let kind = match &entry.node {
                Node::File(Content::Bytes(bytes)) => {
                    EntryKind::File { digest: Digest::of(bytes), bytes: bytes.len() as u64 }
                }
                Node::File(Content::File(from)) => {
                    let file = File::open(from).map_err(at(from))?;
                    let bytes = file.metadata().map_err(at(from))?.len();
                    EntryKind::File { digest: Digest::of_reader(file).map_err(at(from))?, bytes }
                }
                Node::File(Content::Slice(slice)) => {
                    EntryKind::File { digest: slice.digest(), bytes: slice.len() }
                }
                Node::Directory => EntryKind::Directory,
                Node::Symlink(target) => EntryKind::Symlink { target: target.clone() },
            };
            let entry = ManifestEntry { kind, mode: entry.mode, uid: entry.uid, gid: entry.gid };
            entries.push((path.clone(), entry));
        }
        Manifest::new(entries).declare(services).map_err(|error| ImageError::Request(error.to_string()))
    }

    /// Writes the tree as a squashfs.
    ///
    /// # Errors
    /// A file can't be read, or the target can't be written.
    pub fn write_squashfs(&self, out: impl Write + Seek) -> Result<(), ImageError> {
        let refuse = |path: &CleanPath| {
            let path = path.as_str().to_owned();
            move |error: backhand::BackhandError| ImageError::Entry {
                path: path.clone(),
                why: error.to_string(),
            }
        };
        let root = CleanPath::clean("/")
            .map_err(|error| ImageError::Entry { path: "/".into(), why: error.to_string() })?;
        let mut writer = FilesystemWriter::default();
        // LZ4: the guest unpacks under emulation, where a slow codec costs seconds.
        let options = CompressionOptions::Lz4(Lz4 { version: 1, flags: 0 });
        let compressor = FilesystemCompressor::new(Compressor::Lz4, Some(options)).map_err(refuse(&root))?;
        writer.set_compressor(compressor);
        writer.set_block_size(BLOCK_SIZE);
        writer.set_time(0);
        writer.set_root_mode(0o755);
        for (path, entry) in &self.entries {
            let header =
                NodeHeader { permissions: entry.mode as u16, uid: entry.uid, gid: entry.gid, mtime: 0 };
            match &entry.node {
                Node::File(content) => {
                    let reader: Box<dyn Read> = match content {
                        Content::Bytes(bytes) => Box::new(Cursor::new(bytes.as_slice())),
                        Content::File(from) => Box::new(LazyFile { from: from.clone(), open: None }),
                        Content::Slice(slice) => Box::<SliceReader>::new(slice.reader()),
                    };
                    writer.push_file(reader, path.as_str(), header).map_err(refuse(path))?;
                }
                Node::Directory => writer.push_dir(path.as_str(), header).map_err(refuse(path))?,
                Node::Symlink(target) => {
                    writer.push_symlink(target, path.as_str(), header).map_err(refuse(path))?;
                }
            }
        }
        writer.write(out).map_err(refuse(&root))?;
        Ok(())
    }
}

/// Opens its file at the first read: a tree of 50 000 files must not need 50 000 descriptors.
struct LazyFile {
    from: PathBuf,
    open: Option<File>,
}

impl Read for LazyFile {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let file = match &mut self.open {
            Some(file) => file,
            None => self.open.insert(File::open(&self.from)?),
        };
        let count = file.read(into)?;
        if count == 0 {
            self.open = None;
            self.from = PathBuf::from("/dev/null");
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Tree {
        let mut tree = Tree::new();
        tree.put("/bin/sh", 0o755, Node::File(Content::Bytes(b"binary".to_vec()))).unwrap();
        tree.put("/bin/ls", 0o777, Node::Symlink("sh".into())).unwrap();
        tree.put_owned("/workspace", 0o755, 1000, 1000, Node::Directory).unwrap();
        tree
    }

    #[test]
    fn the_same_tree_gives_the_same_bytes() {
        let bytes = |tree: &Tree| {
            let mut out = Cursor::new(Vec::new());
            tree.write_squashfs(&mut out).unwrap();
            out.into_inner()
        };
        let first = bytes(&tree());
        assert_eq!(first, bytes(&tree()));
        assert_eq!(&first[..4], b"hsqs");
        let mut other = tree();
        other.put("/etc/x", 0o644, Node::File(Content::Bytes(b"y".to_vec()))).unwrap();
        assert_ne!(first, bytes(&other));
    }

    #[test]
    fn the_manifest_names_every_entry_and_approves_the_executables() {
        let manifest = tree().manifest(&[]).unwrap();
        let paths: Vec<&str> = manifest.entries().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["/bin", "/bin/ls", "/bin/sh", "/workspace"]);
        assert_eq!(manifest.binaries().len(), 1);
    }

    #[test]
    fn a_path_out_of_the_tree_or_below_a_file_is_refused() {
        let mut tree = tree();
        for bad in ["relative", "/../x", "/bin/sh/x", "/bin/ls/x"] {
            assert!(tree.put(bad, 0o644, Node::Directory).is_err(), "{bad}");
        }
    }
}
