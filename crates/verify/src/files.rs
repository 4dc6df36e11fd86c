//! The files that the note covers: all there, all the same, and no other.
//!
//! Called by [`crate::verify`] with a note's body; whether the note is to be believed is [`crate::anchors`]' business.

use crate::finding::{Findings, Reason};
use hotcell_ledger::bundle::{BundleDir, FileFault, Listing};
use hotcell_ledger::checkpoint::{ObjectsLine, escape};
use hotcell_ledger::{Digest, NoteBody};
use std::collections::BTreeMap;

/// Where a bundle keeps what was copied out.
const FILES: &[u8] = b"files/";
/// Paths in the guest, without the leading slash, and the last content that was copied out of there.
pub(crate) type Copied = BTreeMap<Vec<u8>, Digest>;

pub(crate) fn check(dir: &BundleDir, listing: &Listing, note: &NoteBody, findings: &mut Findings) {
    for line in &note.files {
        let path = escape(&line.path);
        match dir.measure(&line.path) {
            Ok((digest, len)) if (digest, len) == (line.digest, line.len) => {}
            Ok((_, len)) if len != line.len => findings.add(
                Reason::FileAltered,
                format!("{path} has {len} bytes, and the note covers {} others", line.len),
            ),
            Ok(_) => {
                findings.add(Reason::FileAltered, format!("{path} has other content than the note covers"))
            }
            Err(FileFault::Missing) => {
                findings.add(Reason::FileMissing, format!("{path} is covered and not there"))
            }
            Err(fault) => findings.add(Reason::FileStrange, format!("{path} {fault}")),
        }
    }
    for path in &listing.files {
        if note.files.binary_search_by(|line| line.path.cmp(path)).is_err() {
            findings.add(Reason::FileExtra, format!("{} is covered by no line of the note", escape(path)));
        }
    }
    let present = ObjectsLine::over(listing.objects.iter().copied());
    match note.objects {
        Some(covered) if covered == present => {}
        Some(covered) => findings.add(
            Reason::ObjectSet,
            format!(
                "the note covers {} objects, and the bundle has {}, not the same",
                covered.count, present.count
            ),
        ),
        None => findings.add(Reason::ObjectSet, "the note does not cover the objects"),
    }
}

/// What was copied out is what the record says was: its facts name each file by its path in the guest.
pub(crate) fn check_copies(dir: &BundleDir, listing: &Listing, copied: &Copied, findings: &mut Findings) {
    for path in &listing.files {
        let Some(in_guest) = path.strip_prefix(FILES) else { continue };
        let detail = match copied.get(in_guest) {
            None => "is not among what the record says was copied out",
            Some(digest) => match dir.measure(path) {
                Ok((measured, _)) if measured == *digest => continue,
                Ok(_) => "has another content than the record says was copied out",
                // `check` and `check_strange` say what is wrong with it.
                Err(_) => continue,
            },
        };
        findings.add(Reason::CopyDisagrees, format!("{} {detail}", escape(path)));
    }
}

pub(crate) fn check_strange(listing: &Listing, findings: &mut Findings) {
    for (path, fault) in &listing.strange {
        findings.add(Reason::FileStrange, format!("{} {fault}", escape(path)));
    }
}
