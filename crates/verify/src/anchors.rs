//! Checkpoint notes: the bundle's own, and those that were kept elsewhere.
//!
//! A chain is consistent with itself whoever wrote it; a checkpoint that left the run's reach shows whether it is *the*
//! chain. The published verifier compares lengths, so that a rewritten, longer chain passes an old checkpoint; here the
//! block below the checkpoint's height must have the checkpoint's head digest.
//!
//! Which key counts: those that were given (`--key`); else those of the checkpoints that were given; else the one that the
//! note itself names. The last shows that the note is whole, and *not* who wrote it: it is reported as unanchored.
//! Pure. Called by [`crate::verify`].

use crate::chain::Chain;
use crate::finding::{Findings, Reason};
use crate::render::counted;
use hotcell_ledger::note::{Note, NoteSignature, OpenError};
use hotcell_ledger::{Checkpoint, Digest, NoteBody, VerifierKey};

/// Whose signature a note has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A key that the caller named.
    Pinned,
    /// The caller's own key.
    Own,
    /// The key of a checkpoint that was given.
    SameAsCheckpoint,
    /// The key that the note names, compared with nothing.
    Unanchored,
    /// No signature holds.
    None,
}

/// A note, looked at.
#[derive(Clone, Debug)]
pub struct CheckedNote {
    /// Which one, in words.
    pub name: String,
    /// What it says; believed as far as `identity` goes.
    pub body: NoteBody,
    /// Whose it is.
    pub identity: Identity,
    /// Signatures that were checked.
    pub verified: Vec<NoteSignature>,
    /// Signatures by unknown keys.
    pub unverified: Vec<NoteSignature>,
    /// Whether the chain has its checkpoint.
    pub holds: bool,
}

/// The keys that a note may be signed with.
pub(crate) struct Keys<'a> {
    pub(crate) pinned: &'a [VerifierKey],
    pub(crate) own: Option<&'a VerifierKey>,
    pub(crate) of_checkpoints: &'a [VerifierKey],
}

/// Reads a note and checks its signatures; nothing about the chain yet.
pub(crate) fn open(
    name: &str,
    bytes: &[u8],
    keys: &Keys<'_>,
    findings: &mut Findings,
) -> Option<CheckedNote> {
    let note = match Note::parse(bytes) {
        Ok(note) => note,
        Err(error) => {
            let source = std::error::Error::source(&error).map(|s| format!(": {s}")).unwrap_or_default();
            findings.add(Reason::NoteUnreadable, format!("{name}: {error}{source}"));
            return None;
        }
    };
    let claimed = note.claimed_key().cloned();
    let (accepted, identity) = if !keys.pinned.is_empty() {
        (keys.pinned.to_vec(), Identity::Pinned)
    } else if !keys.of_checkpoints.is_empty() {
        (keys.of_checkpoints.to_vec(), Identity::SameAsCheckpoint)
    } else {
        let identity = if claimed.is_some() && claimed.as_ref() == keys.own {
            Identity::Own
        } else {
            Identity::Unanchored
        };
        (claimed.iter().cloned().collect(), identity)
    };
    let checked = |identity, body, verified, unverified| {
        Some(CheckedNote { name: name.to_owned(), body, identity, verified, unverified, holds: false })
    };
    match note.open(&accepted) {
        Ok(opened) => checked(identity, opened.body, opened.verified, opened.unverified),
        Err(error) => {
            let (reason, detail) = match (&error, &claimed) {
                (OpenError::UnknownKey { .. }, None) if accepted.is_empty() => {
                    (Reason::NoKey, format!("{name} names no key: give the signer's with --key"))
                }
                (OpenError::UnknownKey { .. }, Some(claimed)) if !accepted.contains(claimed) => {
                    let wanted: Vec<String> = accepted.iter().map(ToString::to_string).collect();
                    (
                        Reason::WrongKey,
                        format!("{name} is signed by {claimed}, not by {}", wanted.join(" or ")),
                    )
                }
                (OpenError::UnknownKey { .. }, _) => {
                    (Reason::BadSignature, format!("{name} has no signature by the key that it names"))
                }
                _ => (Reason::BadSignature, format!("{name}: {error}")),
            };
            findings.add(reason, detail);
            // Its text still helps to say what else was altered; the bundle is not intact already.
            let opened = claimed.as_slice();
            let body =
                note.open(opened).map(|opened| opened.body).unwrap_or_else(|_| note.into_unproven_body());
            checked(Identity::None, body, Vec::new(), Vec::new())
        }
    }
}

/// Compares a note with the chain.
pub(crate) fn compare(note: &mut CheckedNote, chain: &Chain, ledger_exists: bool, findings: &mut Findings) {
    let Checkpoint { height, head } = note.body.checkpoint;
    let name = &note.name;
    if chain.blocks < height {
        let detail = if ledger_exists {
            format!("{name} covers {}, and the ledger has {}", counted(height, "block"), chain.blocks)
        } else {
            format!("{name} covers {}, and there is no ledger", counted(height, "block"))
        };
        findings.add(Reason::Truncated, detail);
        return;
    }
    let present = if height == 0 { Some(Digest::ZERO) } else { chain.at_height.get(&height).copied() };
    if present == Some(head) {
        note.holds = true;
        return;
    }
    let last = height.saturating_sub(1);
    let (reason, detail) = if chain.consistent {
        let longer = if chain.blocks > height { ", and goes on behind it" } else { "" };
        let detail =
            format!("{name} covers a chain whose block {last} is another: this one was rewritten{longer}");
        (Reason::ChainRewritten, detail)
    } else {
        (Reason::CheckpointMismatch, format!("{name} covers a chain whose block {last} is another"))
    };
    findings.add(reason, detail);
}
