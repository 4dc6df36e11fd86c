//! A tar stream out of the guest, read as it comes.
//!
//! The attack: a header that says more than memory, a name of gigabytes, a flood of headers without entries, numbers
//! that overflow, bytes behind the end. The tar crate reads single headers here and nothing else: as much of a long name
//! or of a pax record as is in bounds is kept, everything else is passed on in the pieces that came.
//!
//! What it guarantees: no bytes make it panic or keep more than [`MAX_NOTE`] of them; an entry is told from its header
//! before any of its content. What it does not: judge names, kinds or sizes; that is its [`Sink`]'s.

use tar::{EntryType, Header};

const BLOCK: usize = 512;
/// Longest name or pax record: PATH_MAX for a name and as much for a link, and what pax writes around them.
const MAX_NOTE: u64 = 16 * 1024;
/// Headers before an entry that say more of it: a long name, a long link, a pax record.
const MAX_NOTES: u32 = 4;
/// Bytes behind the end of an archive that are overlooked: writers fill up to a record of 10 KiB.
const MAX_TAIL: usize = 64 * 1024;

/// Not an archive that our packer writes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest sent no proper archive: {0}")]
pub(crate) struct BadArchive(pub(crate) &'static str);

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Symlink,
    HardLink,
    Other,
}

/// What a header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) size: u64,
    pub(crate) mode: u32,
    /// Seconds since 1970, and nanoseconds.
    pub(crate) mtime: (i64, u32),
}

/// Takes what an archive holds. The first error is the last call.
pub(crate) trait Sink {
    fn entry(&mut self, entry: Entry) -> Result<(), String>;
    /// The next bytes of the last entry's content.
    fn content(&mut self, bytes: &[u8]) -> Result<(), String>;
    /// The last entry's content is complete.
    fn complete(&mut self) -> Result<(), String>;
}

#[derive(Debug)]
enum Reading {
    Header,
    Note { kind: EntryType, left: u64, pad: usize },
    Content { left: u64, pad: usize },
    Padding(usize),
    End(usize),
}

/// Notes before an entry.
#[derive(Debug, Default)]
struct Notes {
    count: u32,
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    mtime: Option<(i64, u32)>,
}

/// The reader's state between two pieces.
#[derive(Debug)]
pub(crate) struct Archive {
    reading: Reading,
    block: Vec<u8>,
    note: Vec<u8>,
    notes: Notes,
    zeroes: u32,
}

impl Archive {
    pub(crate) fn new() -> Archive {
        Archive {
            reading: Reading::Header,
            block: Vec::with_capacity(BLOCK),
            note: Vec::new(),
            notes: Notes::default(),
            zeroes: 0,
        }
    }

    /// Whether its end was read.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.reading, Reading::End(_))
    }

    /// Takes the next bytes, however they are cut.
    pub(crate) fn push(&mut self, mut bytes: &[u8], sink: &mut impl Sink) -> Result<(), String> {
        while !bytes.is_empty() {
            match &mut self.reading {
                Reading::Header => {
                    let (part, rest) = bytes.split_at(bytes.len().min(BLOCK - self.block.len()));
                    self.block.extend_from_slice(part);
                    bytes = rest;
                    if self.block.len() == BLOCK {
                        let block = std::mem::replace(&mut self.block, Vec::with_capacity(BLOCK));
                        self.header(&block, sink)?;
                    }
                }
                Reading::Note { kind, left, pad } => {
                    let (part, rest) = bytes.split_at(cut(bytes, *left));
                    self.note.extend_from_slice(part);
                    bytes = rest;
                    *left -= part.len() as u64;
                    if *left == 0 {
                        let (kind, pad) = (*kind, *pad);
                        self.reading = Reading::Padding(pad);
                        let note = std::mem::take(&mut self.note);
                        self.noted(kind, note)?;
                    }
                }
                Reading::Content { left, pad } => {
                    let (part, rest) = bytes.split_at(cut(bytes, *left));
                    bytes = rest;
                    *left -= part.len() as u64;
                    let (over, pad) = (*left == 0, *pad);
                    sink.content(part)?;
                    if over {
                        self.reading = Reading::Padding(pad);
                        sink.complete()?;
                    }
                }
                Reading::Padding(left) => {
                    let (part, rest) = bytes.split_at(bytes.len().min(*left));
                    *left -= part.len();
                    bytes = rest;
                    if *left == 0 {
                        self.reading = Reading::Header;
                    }
                }
                Reading::End(behind) => {
                    *behind += bytes.len();
                    if *behind > MAX_TAIL {
                        return Err(BadArchive("it goes on behind its end").to_string());
                    }
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn header(&mut self, block: &[u8], sink: &mut impl Sink) -> Result<(), String> {
        let bad = |why| BadArchive(why).to_string();
        if block.iter().all(|&byte| byte == 0) {
            self.zeroes += 1;
            if self.zeroes == 2 {
                self.reading = Reading::End(0);
            }
            return Ok(());
        }
        if self.zeroes != 0 {
            return Err(bad("an empty block within it"));
        }
        let header = Header::from_byte_slice(block);
        let number = |field: std::io::Result<u64>| field.map_err(|_| bad("a number that is none"));
        // The sum is taken with the field of the sum as blanks.
        let sum: u32 = block
            .iter()
            .zip(0..)
            .map(|(&byte, at)| if (148..156).contains(&at) { 32 } else { u32::from(byte) })
            .sum();
        if header.cksum().ok() != Some(sum) {
            return Err(bad("a header whose sum is wrong"));
        }
        let size = number(header.entry_size())?;
        let pad = (BLOCK - (size % BLOCK as u64) as usize) % BLOCK;
        let kind = header.entry_type();
        if matches!(kind, EntryType::GNULongName | EntryType::GNULongLink | EntryType::XHeader) {
            self.notes.count += 1;
            if size == 0 || size > MAX_NOTE || self.notes.count > MAX_NOTES {
                return Err(bad("a name or record that is too long, or too many of them"));
            }
            self.reading = Reading::Note { kind, left: size, pad };
            return Ok(());
        }
        let notes = std::mem::take(&mut self.notes);
        let kind = match kind {
            EntryType::Regular | EntryType::Continuous => Kind::File,
            EntryType::Directory => Kind::Directory,
            EntryType::Symlink => Kind::Symlink,
            EntryType::Link => Kind::HardLink,
            _ => Kind::Other,
        };
        let has_content = kind == Kind::File || kind == Kind::Other;
        if size != 0 && !has_content {
            return Err(bad("a directory or link with a content"));
        }
        let seconds = i64::try_from(number(header.mtime())?).unwrap_or(i64::MAX);
        let link = || header.link_name_bytes().map(|name| name.into_owned()).unwrap_or_default();
        sink.entry(Entry {
            kind,
            path: notes.path.unwrap_or_else(|| header.path_bytes().into_owned()),
            link: notes.link.unwrap_or_else(link),
            size,
            mode: header.mode().map_err(|_| bad("a mode that is none"))?,
            mtime: notes.mtime.unwrap_or((seconds, 0)),
        })?;
        if size == 0 {
            if has_content {
                sink.complete()?;
            }
        } else {
            self.reading = Reading::Content { left: size, pad };
        }
        Ok(())
    }

    fn noted(&mut self, kind: EntryType, mut note: Vec<u8>) -> Result<(), String> {
        let bad = |why| BadArchive(why).to_string();
        if kind == EntryType::XHeader {
            for record in tar::PaxExtensions::new(&note) {
                let record = record.map_err(|_| bad("a pax record that is none"))?;
                match record.key_bytes() {
                    b"path" => self.notes.path = Some(record.value_bytes().to_vec()),
                    b"linkpath" => self.notes.link = Some(record.value_bytes().to_vec()),
                    b"mtime" => {
                        self.notes.mtime =
                            Some(pax_time(record.value_bytes()).ok_or_else(|| bad("a time that is none"))?);
                    }
                    b"atime" | b"ctime" | b"comment" => {}
                    // A size that the header does not have, a sparse file: what one reader takes so, another takes otherwise.
                    _ => return Err(bad("a pax record that our packer does not write")),
                }
            }
            return Ok(());
        }
        if note.last() == Some(&0) {
            note.pop();
        }
        match kind {
            EntryType::GNULongName => self.notes.path = Some(note),
            _ => self.notes.link = Some(note),
        }
        Ok(())
    }
}

fn cut(bytes: &[u8], left: u64) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len())
}

/// `seconds` or `seconds.fraction`, also before 1970.
fn pax_time(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok().filter(|text| text.len() <= 40)?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let seconds: i64 = whole.parse().ok()?;
    if fraction.is_empty() || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanos: u32 = format!("{:0<9.9}", fraction).parse().ok()?;
    Some(match whole.starts_with('-') && nanos > 0 {
        true => (seconds.checked_sub(1)?, 1_000_000_000 - nanos),
        false => (seconds, nanos),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Seen(Vec<(Entry, Vec<u8>, bool)>);

    impl Sink for Seen {
        fn entry(&mut self, entry: Entry) -> Result<(), String> {
            self.0.push((entry, Vec::new(), false));
            Ok(())
        }

        fn content(&mut self, bytes: &[u8]) -> Result<(), String> {
            self.0.last_mut().unwrap().1.extend_from_slice(bytes);
            Ok(())
        }

        fn complete(&mut self) -> Result<(), String> {
            self.0.last_mut().unwrap().2 = true;
            Ok(())
        }
    }

    fn archive() -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        let long = format!("d/{}", "n".repeat(300));
        builder.append_pax_extensions([("mtime", b"1700000000.25".as_slice())]).unwrap();
        for (name, kind, data) in [
            ("d", EntryType::Directory, b"".as_slice()),
            (long.as_str(), EntryType::Regular, &[7; 1500]),
            ("d/empty", EntryType::Regular, b""),
        ] {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_mode(0o640);
            header.set_mtime(5);
            header.set_size(data.len() as u64);
            builder.append_data(&mut header, name, data).unwrap();
        }
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        builder.append_link(&mut header, "d/link", "x".repeat(150)).unwrap();
        builder.into_inner().unwrap()
    }

    #[test]
    fn pieces_of_any_size_give_the_same_entries() {
        let bytes = archive();
        let mut all = Vec::new();
        for size in [1, 7, 511, 512, 513, 1 << 20] {
            let (mut archive, mut seen) = (Archive::new(), Seen::default());
            for piece in bytes.chunks(size) {
                archive.push(piece, &mut seen).unwrap();
            }
            assert!(archive.is_complete());
            all.push(seen.0);
        }
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
        let seen = &all[0];
        assert_eq!(seen.len(), 4);
        assert_eq!((seen[0].0.kind, seen[0].0.mtime), (Kind::Directory, (1_700_000_000, 250_000_000)));
        assert_eq!((seen[1].0.path.len(), seen[1].1.len(), seen[1].2), (302, 1500, true));
        assert_eq!((seen[1].0.mtime, seen[1].0.mode), ((5, 0), 0o640));
        assert!(seen[2].2 && seen[2].1.is_empty());
        assert_eq!(seen[3].0.link.len(), 150);
    }

    #[test]
    fn what_is_no_archive_of_ours_is_refused_and_costs_no_memory() {
        let whole = archive();
        let mut archive = Archive::new();
        archive.push(&whole[..whole.len() - 1024], &mut Seen::default()).unwrap();
        assert!(!archive.is_complete(), "a cut archive is not complete");
        let header = |kind: EntryType, size: u64| {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(size);
            header.set_cksum();
            header.as_bytes().to_vec()
        };
        let mut flipped = header(EntryType::Regular, 1);
        flipped[0] ^= 1;
        let flood = header(EntryType::GNULongName, 512).repeat(1);
        let flood = [flood, vec![b'n'; 512]].concat().repeat(5);
        for (bytes, words) in [
            (vec![b'x'; 512], "sum"),
            (flipped, "sum"),
            (header(EntryType::GNULongName, u64::MAX >> 1), "too long"),
            (header(EntryType::XHeader, MAX_NOTE + 1), "too long"),
            (flood, "too many"),
            (header(EntryType::Directory, 5), "content"),
            ([vec![0; 512], header(EntryType::Regular, 0)].concat(), "empty block"),
            (vec![0; 1024 + MAX_TAIL + 1], "behind its end"),
            (
                [header(EntryType::XHeader, 11), b"11 size=10\n".to_vec(), vec![0; 501]].concat(),
                "does not write",
            ),
        ] {
            let error = Archive::new().push(&bytes, &mut Seen::default()).unwrap_err();
            assert!(error.contains(words), "{words}: {error}");
        }
    }

    #[test]
    fn times_of_pax() {
        for (text, time) in [
            ("5", Some((5, 0))),
            ("5.000000001", Some((5, 1))),
            ("5.1234567899", Some((5, 123_456_789))),
            ("-1.5", Some((-2, 500_000_000))),
            ("-0.5", Some((-1, 500_000_000))),
            ("", None),
            ("5.", None),
            ("5.x", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(pax_time(text.as_bytes()), time, "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..3000), at in 0usize..3000, byte: u8) {
            let _ = Archive::new().push(&bytes, &mut Seen::default());
            let mut changed = archive();
            let at = at % changed.len();
            changed[at] = byte;
            let _ = Archive::new().push(&changed, &mut Seen::default());
        }
    }
}
