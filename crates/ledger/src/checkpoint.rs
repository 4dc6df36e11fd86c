//! The head of a ledger, and the text of the note that is signed over it.
//!
//! ```text
//! hotcell/<run-id>                                     origin
//! <height>                                             number of blocks
//! <base64 of the head digest>
//! key <vkey>                                           the key that signs, so that a bundle can be checked by itself
//! objects <count> <hex>                                BLAKE3 over the 32-byte names of all objects, ascending
//! file <path> <blake3 hex> <length>                    each other file of the bundle, sorted by path
//! ```
//! This is a C2SP checkpoint with extension lines. A path is relative, its components joined by `/`; every byte of it
//! outside the printable ASCII range, and `%`, is written `%XX` with upper-case digits, so that each path has exactly
//! one spelling and a line has exactly one reading.
//! Guarantees: [`NoteBody::parse`] accepts exactly what [`NoteBody::to_text`] writes. Pure; anyone may call it.

use crate::digest::{Digest, Domain, commit};
use crate::key::VerifierKey;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

/// Where a ledger stands: exported out of a run's reach, it makes truncation and rewriting detectable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Number of blocks.
    pub height: u64,
    /// BLOCK digest of the last one; zero with none.
    pub head: Digest,
}

impl Checkpoint {
    /// The CHECKPOINT digest over height and head.
    pub fn digest(&self) -> Digest {
        let mut bytes = [0u8; 40];
        let (height, head) = bytes.split_at_mut(8);
        height.copy_from_slice(&self.height.to_be_bytes());
        head.copy_from_slice(self.head.as_bytes());
        commit(Domain::Checkpoint, &bytes)
    }
}

/// A file that a note covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLine {
    /// Path relative to the bundle, as bytes.
    pub path: Vec<u8>,
    /// BLAKE3 of the content.
    pub digest: Digest,
    /// Length of the content.
    pub len: u64,
}

/// The objects that a note covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectsLine {
    /// How many.
    pub count: u64,
    /// BLAKE3 over their 32-byte names, ascending.
    pub digest: Digest,
}

impl ObjectsLine {
    /// Over these names, which need not be sorted.
    pub fn over(names: impl IntoIterator<Item = Digest>) -> ObjectsLine {
        let mut names: Vec<Digest> = names.into_iter().collect();
        names.sort_unstable();
        names.dedup();
        let mut hasher = blake3::Hasher::new();
        names.iter().for_each(|name| {
            hasher.update(name.as_bytes());
        });
        let count = u64::try_from(names.len()).unwrap_or(u64::MAX);
        ObjectsLine { count, digest: Digest::from_bytes(*hasher.finalize().as_bytes()) }
    }
}

/// What a note says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoteBody {
    /// `hotcell/<run-id>`.
    pub origin: String,
    /// The ledger's head.
    pub checkpoint: Checkpoint,
    /// The key that signs, as the note itself states it.
    pub key: Option<VerifierKey>,
    /// The objects; a checkpoint of a run that goes on has none.
    pub objects: Option<ObjectsLine>,
    /// The other files, sorted by path.
    pub files: Vec<FileLine>,
}

/// Why a text is not a checkpoint of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    /// A line is missing or does not read as it must.
    #[error("line {line} of the note is not {wanted}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What it should be.
        wanted: &'static str,
    },
    /// An origin that a note can't have.
    #[error("{0:?} can't be the origin of a note: use a run id of printable characters without spaces")]
    Origin(String),
}

impl NoteBody {
    /// Whether a run with this origin can have a note.
    pub fn check_origin(origin: &str) -> Result<(), BodyError> {
        if origin.is_empty() || origin.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(BodyError::Origin(origin.to_owned()));
        }
        Ok(())
    }

    /// The text that is signed.
    pub fn to_text(&self) -> String {
        use std::fmt::Write as _;
        let mut text = format!(
            "{}\n{}\n{}\n",
            self.origin,
            self.checkpoint.height,
            BASE64_STANDARD.encode(self.checkpoint.head.as_bytes())
        );
        // Writing to a String can't fail.
        if let Some(key) = &self.key {
            let _ = writeln!(text, "key {key}");
        }
        if let Some(objects) = &self.objects {
            let _ = writeln!(text, "objects {} {}", objects.count, objects.digest);
        }
        for file in &self.files {
            let _ = writeln!(text, "file {} {} {}", escape(&file.path), file.digest, file.len);
        }
        text
    }

    /// Reads the text of a note.
    pub fn parse(text: &str) -> Result<NoteBody, BodyError> {
        let fault = |line, wanted| BodyError::Line { line, wanted };
        let mut lines = text.strip_suffix('\n').ok_or(fault(1, "ended by a newline"))?.split('\n');
        let origin = lines.next().unwrap_or_default();
        NoteBody::check_origin(origin)?;
        let height = lines.next().and_then(number).ok_or(fault(2, "a height"))?;
        let head = lines
            .next()
            .and_then(|line| BASE64_STANDARD.decode(line).ok())
            .and_then(|bytes| <[u8; 32]>::try_from(bytes).ok())
            .ok_or(fault(3, "the base64 of 32 bytes"))?;
        let mut body = NoteBody {
            origin: origin.to_owned(),
            checkpoint: Checkpoint { height, head: Digest::from_bytes(head) },
            key: None,
            objects: None,
            files: Vec::new(),
        };
        for (index, line) in lines.enumerate() {
            body.parse_extension(line)
                .ok_or(fault(index + 4, "a `key`, `objects` or `file` line in its place and order"))?;
        }
        Ok(body)
    }

    fn parse_extension(&mut self, line: &str) -> Option<()> {
        let (word, rest) = line.split_once(' ')?;
        match word {
            "key" if self.key.is_none() && self.objects.is_none() && self.files.is_empty() => {
                self.key = Some(VerifierKey::parse(rest).ok()?);
            }
            "objects" if self.objects.is_none() && self.files.is_empty() => {
                let (count, hex) = rest.split_once(' ')?;
                self.objects = Some(ObjectsLine { count: number(count)?, digest: Digest::from_hex(hex)? });
            }
            "file" => {
                let mut parts = rest.split(' ');
                let path = unescape(parts.next()?)?;
                let digest = Digest::from_hex(parts.next()?)?;
                let len = number(parts.next()?)?;
                let in_order = self.files.last().is_none_or(|last| last.path < path);
                if parts.next().is_some() || !in_order || !is_relative(&path) {
                    return None;
                }
                self.files.push(FileLine { path, digest, len });
            }
            _ => return None,
        }
        Some(())
    }
}

/// A number in its one spelling.
fn number(text: &str) -> Option<u64> {
    text.parse().ok().filter(|n: &u64| n.to_string() == text)
}

/// Whether the path stays within the directory that it is relative to.
fn is_relative(path: &[u8]) -> bool {
    !path.contains(&0) && path.split(|b| *b == b'/').all(|part| !matches!(part, b"" | b"." | b".."))
}

/// A path as a note spells it: every byte but printable ASCII, and `%`, as `%XX`.
pub fn escape(path: &[u8]) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path {
        match byte {
            b'%' => out.push_str("%25"),
            0x21..=0x7e => out.push(char::from(*byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let (high, low) = (char::from(bytes.next()?), char::from(bytes.next()?));
        let value = high.to_digit(16)? * 16 + low.to_digit(16)?;
        out.push(u8::try_from(value).ok()?);
    }
    // One spelling for each path.
    (escape(&out) == text).then_some(out)
}
