//! The environment as it was measured: path → content and mode, under one Merkle root.
//!
//! File format, one entry a line after the header, sorted by path bytes, no
//! duplicate:
//! ```text
//! hotcell-baseline-1 <merkle root, hex>
//! <mode, 4+ octal digits> <content digest, hex> <path, with \ and control bytes as \xHH>
//! ```
//! The root is over the lines: leaf i is `BLAKE3(line i, without newline)`, combined
//! as AMES-V1 combines a block's events. Reading recomputes it; a file that does not
//! have the root that it claims is refused. Sealed: nothing is added or changed.

use crate::manifest::Manifest;
use crate::path::CleanPath;
use hotcell_ledger::Digest;
use hotcell_ledger::merkle::Frontier;
use std::collections::BTreeMap;
use std::fmt::Write as _;

const MAGIC: &str = "hotcell-baseline-1";

/// What a name held when it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaselineEntry {
    /// Digest of a file's bytes, of a link's target, or of no bytes for a directory.
    pub content: Digest,
    /// Permission bits.
    pub mode: u32,
}

/// Why a file is not a baseline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BaselineError {
    /// Not in the format.
    #[error("line {line} of the baseline is not in its format: build it again from the image")]
    Format {
        /// Which line, from 1.
        line: usize,
    },
    /// The entries do not have the root that the file claims.
    #[error("the baseline's entries have the root {found}, not {claimed} as it claims: it was changed")]
    Root {
        /// What the file claims.
        claimed: Digest,
        /// What its entries have.
        found: Digest,
    },
}

/// The sealed baseline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvironmentBaseline {
    entries: BTreeMap<CleanPath, BaselineEntry>,
    root: Digest,
}

impl EnvironmentBaseline {
    /// The baseline of an image.
    pub fn from_manifest(manifest: &Manifest) -> EnvironmentBaseline {
        EnvironmentBaseline::seal(
            manifest
                .entries()
                .map(|(path, entry)| {
                    (path.clone(), BaselineEntry { content: entry.content(), mode: entry.mode })
                })
                .collect(),
        )
    }

    fn seal(entries: BTreeMap<CleanPath, BaselineEntry>) -> EnvironmentBaseline {
        let mut tree = Frontier::new();
        for (path, entry) in &entries {
            tree.push(&Digest::of(line(path, entry).as_bytes()));
        }
        EnvironmentBaseline { root: tree.root(), entries }
    }

    /// What the path held.
    pub fn get(&self, path: &CleanPath) -> Option<&BaselineEntry> {
        self.entries.get(path)
    }

    /// Every name with what it held, sorted by path.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&CleanPath, &BaselineEntry)> {
        self.entries.iter()
    }

    /// The Merkle root over all entries.
    pub fn root(&self) -> Digest {
        self.root
    }

    /// How many names.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = format!("{MAGIC} {}\n", self.root);
        for (path, entry) in &self.entries {
            text.push_str(&line(path, entry));
            text.push('\n');
        }
        text.into_bytes()
    }

    /// The digest of the file: what a spec names.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.to_bytes())
    }

    /// Reads a file; it must be in the one spelling and have the root that it claims.
    pub fn from_bytes(bytes: &[u8]) -> Result<EnvironmentBaseline, BaselineError> {
        let format = |line: usize| BaselineError::Format { line };
        let text = core::str::from_utf8(bytes).map_err(|_| format(1))?;
        let mut lines = text.lines();
        let claimed = lines
            .next()
            .and_then(|head| head.strip_prefix(MAGIC)?.strip_prefix(' '))
            .and_then(Digest::from_hex)
            .ok_or(format(1))?;
        let mut entries = BTreeMap::new();
        for (index, text) in lines.enumerate() {
            let (path, entry) = parse_line(text).ok_or(format(index + 2))?;
            if line(&path, &entry) != text || entries.insert(path, entry).is_some() {
                return Err(format(index + 2));
            }
        }
        let baseline = EnvironmentBaseline::seal(entries);
        if baseline.root != claimed {
            return Err(BaselineError::Root { claimed, found: baseline.root });
        }
        if baseline.to_bytes() != bytes {
            return Err(format(2));
        }
        Ok(baseline)
    }
}

fn line(path: &CleanPath, entry: &BaselineEntry) -> String {
    let mut text = format!("{:04o} {} ", entry.mode, entry.content);
    for c in path.as_str().chars() {
        if c == '\\' || c.is_ascii_control() {
            let _ = write!(text, "\\x{:02x}", c as u32);
        } else {
            text.push(c);
        }
    }
    text
}

fn parse_line(text: &str) -> Option<(CleanPath, BaselineEntry)> {
    let (mode, rest) = text.split_once(' ')?;
    let (content, path) = rest.split_once(' ')?;
    let mut plain = String::with_capacity(path.len());
    let mut parts = path.split('\\');
    plain.push_str(parts.next()?);
    for part in parts {
        let code = u8::from_str_radix(part.strip_prefix('x')?.get(..2)?, 16).ok()?;
        plain.push(char::from(code));
        plain.push_str(part.get(3..)?);
    }
    let clean = CleanPath::clean(&plain).ok()?;
    let entry =
        BaselineEntry { content: Digest::from_hex(content)?, mode: u32::from_str_radix(mode, 8).ok()? };
    (clean.as_str() == plain).then_some((clean, entry))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{EntryKind, ManifestEntry};

    fn manifest(paths: &[&str]) -> Manifest {
        Manifest::new(paths.iter().map(|path| {
            let kind = EntryKind::File { digest: Digest::of(path.as_bytes()), bytes: 1 };
            (CleanPath::clean(path).unwrap(), ManifestEntry { kind, mode: 0o755, uid: 0, gid: 0 })
        }))
    }

    #[test]
    fn a_baseline_survives_its_file() {
        let baseline = EnvironmentBaseline::from_manifest(&manifest(&[
            "/bin/sh",
            "/etc/a b",
            "/etc/new\nline",
            "/etc/back\\x41",
        ]));
        let bytes = baseline.to_bytes();
        let read = EnvironmentBaseline::from_bytes(&bytes).unwrap();
        assert_eq!(read, baseline);
        assert_eq!(read.digest(), Digest::of(&bytes));
        assert_eq!(read.get(&CleanPath::clean("/bin//sh").unwrap()).unwrap().mode, 0o755);
        assert!(read.get(&CleanPath::clean("/etc/new\nline").unwrap()).is_some());
    }

    #[test]
    fn every_changed_byte_is_seen() {
        let bytes = EnvironmentBaseline::from_manifest(&manifest(&["/bin/sh", "/etc/passwd"])).to_bytes();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(EnvironmentBaseline::from_bytes(&changed).is_err(), "byte {at}");
        }
        let text = String::from_utf8(bytes).unwrap();
        assert!(EnvironmentBaseline::from_bytes(text.trim_end().as_bytes()).is_err());
        let unsorted: Vec<&str> = text.lines().collect();
        let unsorted = format!("{}\n{}\n{}\n", unsorted[0], unsorted[2], unsorted[1]);
        assert!(EnvironmentBaseline::from_bytes(unsorted.as_bytes()).is_err());
    }

    #[test]
    fn the_root_is_over_the_lines() {
        let baseline = EnvironmentBaseline::from_manifest(&manifest(&["/a", "/b"]));
        let text = String::from_utf8(baseline.to_bytes()).unwrap();
        let mut tree = Frontier::new();
        text.lines().skip(1).for_each(|line| tree.push(&Digest::of(line.as_bytes())));
        assert_eq!(baseline.root(), tree.root());
        assert_eq!(text.lines().next().unwrap(), format!("{MAGIC} {}", tree.root()));
        assert!(EnvironmentBaseline::from_manifest(&Manifest::default()).root().is_zero());
    }

    #[test]
    fn the_allowlist_is_the_image_s_executables() {
        let mut entries: Vec<_> =
            manifest(&["/bin/sh"]).entries().map(|(p, e)| (p.clone(), e.clone())).collect();
        entries.push((
            CleanPath::clean("/etc/passwd").unwrap(),
            ManifestEntry {
                kind: EntryKind::File { digest: Digest::of(b"p"), bytes: 1 },
                mode: 0o644,
                uid: 0,
                gid: 0,
            },
        ));
        let policy = Manifest::new(entries).binaries();
        assert_eq!(policy.len(), 1);
        assert_eq!(policy.membership(&Digest::of(b"/bin/sh")), crate::Membership::Approved);
    }
}
