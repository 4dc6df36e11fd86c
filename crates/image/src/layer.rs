//! One layer: a tar stream, perhaps compressed, put into the [`Stage`].
//!
//! The tar crate finds headers and skips contents; long names and pax records are
//! read here, since the crate would take as much memory as they say. What one
//! reader of tar takes for this and another for that is refused: sparse files,
//! and sizes that the pax record and the header tell differently.

use crate::error::ImageError;
use crate::limits::MAX_TAR_NOTE;
use crate::progress::Progress;
use crate::stage::{Meta, Stage, refuse, too_much};
use hotcell_policy::CleanPath;
use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;
use tar::EntryType;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Other names of the kind that AUFS kept for itself.
const AUFS: &[u8] = b".wh..wh.";

/// Whether names that begin with `.wh.` are markers or names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whiteouts {
    /// A layer of an OCI or Docker image.
    Markers,
    /// A plain archive of a root file system.
    Names,
}

/// How a layer is compressed, by its first bytes: what its media type says is a claim.
enum Codec {
    Plain,
    Gzip,
    Zstd,
}

/// Gives at most so many bytes, then an error; tells how many were given.
struct Bounded<R> {
    from: R,
    given: Rc<Cell<u64>>,
    limit: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(into)?;
        let given = self.given.get().saturating_add(count as u64);
        self.given.set(given);
        if given > self.limit {
            return Err(io::Error::other(Bomb));
        }
        Ok(count)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("it unpacks to more than an image may have")]
struct Bomb;

/// Unpacks what is compressed, by its first bytes.
pub(crate) fn decompressed<'a>(mut from: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut magic = Vec::new();
    from.by_ref().take(4).read_to_end(&mut magic)?;
    let codec = match magic.as_slice() {
        [0x1f, 0x8b, ..] => Codec::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd] => Codec::Zstd,
        _ => Codec::Plain,
    };
    let whole = io::BufReader::with_capacity(1 << 16, io::Cursor::new(magic).chain(from));
    Ok(match codec {
        Codec::Plain => Box::new(whole),
        // Several members one after another are one stream (pigz, stargz).
        Codec::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(whole)),
        Codec::Zstd => Box::new(Zstd { from: whole, frame: None }),
    })
}

/// Zstandard frames one after another.
struct Zstd<R> {
    from: R,
    frame: Option<ruzstd::decoding::FrameDecoder>,
}

impl<R: io::BufRead> Read for Zstd<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            // The decoder refuses windows that are larger than zstd's own default.
            let mut decoder = match self.frame.take() {
                Some(decoder) => decoder,
                None if self.from.fill_buf()?.is_empty() => return Ok(0),
                None => {
                    let mut decoder = FrameDecoder::new();
                    match decoder.init(&mut self.from) {
                        Ok(()) => decoder,
                        Err(error) => return Err(io::Error::other(error.to_string())),
                    }
                }
            };
            if decoder.can_collect() == 0 && !decoder.is_finished() {
                let step = BlockDecodingStrategy::UptoBytes(into.len().max(1 << 16));
                decoder
                    .decode_blocks(&mut self.from, step)
                    .map_err(|error| io::Error::other(error.to_string()))?;
            }
            let count = decoder.read(into)?;
            if count > 0 || !decoder.is_finished() {
                self.frame = Some(decoder);
            }
            if count > 0 {
                return Ok(count);
            }
        }
    }
}

/// Applies a layer. Returns when its stream is read to the end, so that whoever
/// measures it below has seen all of it.
pub(crate) fn apply(
    stage: &mut Stage,
    from: impl Read,
    whiteouts: Whiteouts,
    what: &str,
    progress: &mut dyn Progress,
) -> Result<(), ImageError> {
    stage.next_layer()?;
    let given = Rc::new(Cell::new(0));
    let left = stage.bytes_left();
    let mut bounded = Bounded { from, given: Rc::clone(&given), limit: left };
    let applied = entries(stage, &mut bounded, whiteouts, what, &given, progress);
    // What follows the end of the archive is read as well: it is part of the digest.
    let drained = applied.and_then(|()| {
        io::copy(&mut bounded, &mut io::sink()).map_err(|error| broken(what, &error)).map(|_| ())
    });
    stage.spend_bytes(given.get());
    if given.get() > left {
        return Err(too_much(format!("{what} makes it larger than {} MiB", left >> 20)));
    }
    drained
}

fn broken(what: &str, error: &io::Error) -> ImageError {
    ImageError::Source { what: what.to_owned(), why: error.to_string() }
}

/// What the headers before an entry say of it.
#[derive(Default)]
struct Notes {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    capability: bool,
    sparse: bool,
}

fn entries(
    stage: &mut Stage,
    from: &mut dyn Read,
    whiteouts: Whiteouts,
    what: &str,
    given: &Cell<u64>,
    progress: &mut dyn Progress,
) -> Result<(), ImageError> {
    let mut archive = tar::Archive::new(from);
    let mut notes = Notes::default();
    for entry in archive.entries().map_err(|error| broken(what, &error))?.raw(true) {
        let mut entry = entry.map_err(|error| broken(what, &error))?;
        stage.count()?;
        progress.bytes(given.get(), None);
        let kind = entry.header().entry_type();
        match kind {
            EntryType::GNULongName => {
                notes.path = Some(note(&mut entry, what)?);
                continue;
            }
            EntryType::GNULongLink => {
                notes.link = Some(note(&mut entry, what)?);
                continue;
            }
            EntryType::XHeader => {
                let records = note(&mut entry, what)?;
                pax(&records, &mut notes, what)?;
                continue;
            }
            // Comments of git and the like; what it would change for all entries is refused.
            EntryType::XGlobalHeader => {
                let records = note(&mut entry, what)?;
                let mut global = Notes::default();
                pax(&records, &mut global, what)?;
                if global.path.is_some() || global.link.is_some() || global.size.is_some() || global.sparse {
                    return Err(broken(what, &io::Error::other("a global pax header renames entries")));
                }
                continue;
            }
            _ => {}
        }
        let notes = std::mem::take(&mut notes);
        let raw = notes.path.unwrap_or_else(|| entry.path_bytes().into_owned());
        let path = stage.name(&raw)?;
        let header = entry.header();
        let number = |field: io::Result<u64>| {
            let number = field.map_err(|error| refuse(path.as_str(), error.to_string()))?;
            u32::try_from(number).map_err(|_| refuse(path.as_str(), format!("{number} is no owner or mode")))
        };
        let meta = Meta {
            mode: number(header.mode().map(u64::from))? & 0o7777,
            uid: number(notes.uid.map_or_else(|| header.uid(), Ok))?,
            gid: number(notes.gid.map_or_else(|| header.gid(), Ok))?,
            mtime: header.mtime().unwrap_or_default(),
        };
        let size = entry.size();
        if notes.size.is_some_and(|told| told != size) || notes.sparse || kind == EntryType::GNUSparse {
            return Err(refuse(
                path.as_str(),
                "it is a sparse file or tells two sizes; pack it plainly".into(),
            ));
        }
        if notes.capability {
            stage.leave_out("file capabilities");
        }
        if whiteouts == Whiteouts::Markers && marker(stage, &path)? {
            continue;
        }
        let link = || -> Result<Vec<u8>, ImageError> {
            let link = notes.link.clone().or_else(|| entry.link_name_bytes().map(|name| name.into_owned()));
            link.ok_or_else(|| refuse(path.as_str(), "it is a link without a target".into()))
        };
        match kind {
            EntryType::Directory => stage.directory(&path, meta)?,
            EntryType::Regular | EntryType::Continuous if raw.ends_with(b"/") => {
                stage.directory(&path, meta)?;
            }
            EntryType::Regular | EntryType::Continuous => stage.file(&path, meta, size, &mut entry)?,
            EntryType::Symlink => stage.symlink(&path, &link()?, meta)?,
            EntryType::Link => {
                let target = stage.name(&link()?)?;
                stage.hard_link(&path, &target)?;
            }
            // The guest makes its own /dev, mounts all else nodev, and needs none of these.
            EntryType::Char | EntryType::Block => stage.leave_out("device nodes"),
            EntryType::Fifo => stage.leave_out("FIFOs"),
            other => {
                let why = format!("it is of the unknown kind {:?}", char::from(other.as_byte()));
                return Err(refuse(path.as_str(), why));
            }
        }
    }
    Ok(())
}

/// Handles a whiteout; `false` where the name is none.
fn marker(stage: &mut Stage, path: &CleanPath) -> Result<bool, ImageError> {
    let (folder, name) = path.as_str().rsplit_once('/').unwrap_or(("", path.as_str()));
    let folder = if folder.is_empty() { "/" } else { folder };
    let clean = |text: &str| CleanPath::clean(text).map_err(|error| refuse(path.as_str(), error.to_string()));
    if name.as_bytes() == OPAQUE {
        stage.opaque(&clean(folder)?)?;
        return Ok(true);
    }
    if name.as_bytes().starts_with(AUFS) {
        return Ok(true);
    }
    let Some(hidden) = name.as_bytes().strip_prefix(WHITEOUT) else { return Ok(false) };
    if hidden.is_empty() || hidden == b"." || hidden == b".." {
        return Err(refuse(path.as_str(), "it is a whiteout of no name".into()));
    }
    let hidden = String::from_utf8_lossy(hidden);
    stage.whiteout(&clean(&format!("{folder}/{hidden}"))?)?;
    Ok(true)
}

/// Content of a long name or pax entry.
fn note(entry: &mut tar::Entry<'_, impl Read>, what: &str) -> Result<Vec<u8>, ImageError> {
    let fail = |why: String| ImageError::Source { what: what.to_owned(), why };
    if entry.size() > MAX_TAR_NOTE {
        return Err(fail(format!("a header in it has {} bytes, over {MAX_TAR_NOTE}", entry.size())));
    }
    let size = entry.size();
    let mut bytes = Vec::new();
    entry.take(MAX_TAR_NOTE).read_to_end(&mut bytes).map_err(|error| fail(error.to_string()))?;
    if bytes.len() as u64 != size {
        return Err(fail("it ends in the middle of a header".into()));
    }
    if bytes.last() == Some(&0) {
        bytes.pop();
    }
    Ok(bytes)
}

fn pax(records: &[u8], notes: &mut Notes, what: &str) -> Result<(), ImageError> {
    let fail = |why: &str| ImageError::Source { what: what.to_owned(), why: why.to_owned() };
    for record in tar::PaxExtensions::new(records) {
        let record = record.map_err(|error| broken(what, &error))?;
        let key = record.key().map_err(|_| fail("a pax header in it is not UTF-8"))?;
        let number = || {
            let text = record.value().ok().and_then(|value| value.parse().ok());
            text.ok_or_else(|| fail("a pax header in it has no number where one belongs"))
        };
        match key {
            "path" => notes.path = Some(record.value_bytes().to_vec()),
            "linkpath" => notes.link = Some(record.value_bytes().to_vec()),
            "size" => notes.size = Some(number()?),
            "uid" => notes.uid = Some(number()?),
            "gid" => notes.gid = Some(number()?),
            "SCHILY.xattr.security.capability" => notes.capability = true,
            key if key.starts_with("GNU.sparse.") => notes.sparse = true,
            _ => {}
        }
    }
    Ok(())
}
