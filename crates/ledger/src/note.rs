//! A checkpoint's signed note: bytes in, what is proven out.
//!
//! ```text
//! <text of checkpoint.rs>
//!                                 an empty line
//! — <key name> <base64 of key id and signature>          one line for each signature
//! ```
//! Guarantees: [`Note::open`] gives the text only with the signatures sorted into *verified* and *unverified*; a bad
//! signature under a known key is an error, not an unverified one. Input is hostile and at most [`MAX_NOTE_LEN`] long.
//! Does not: say whether a key deserves trust. Pure; called by sealing and by verifiers.

use crate::checkpoint::{BodyError, NoteBody};
use crate::key::{SigningKey, VerifierKey};
use signed_note::{NoteError, Verifier, VerifierList};

/// Longest note that is read or written: some 8000 files. The signed-note crate's own bound is the same.
pub const MAX_NOTE_LEN: usize = 1_000_000;

/// A signature line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoteSignature {
    /// The key's name.
    pub name: String,
    /// The key's id.
    pub id: u32,
}

/// A note whose text at least one known key signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenedNote {
    /// What it says.
    pub body: NoteBody,
    /// Signatures by known keys, checked.
    pub verified: Vec<NoteSignature>,
    /// Signatures by other keys: they prove nothing.
    pub unverified: Vec<NoteSignature>,
}

/// A note that was parsed; its text is not to be believed before [`Note::open`].
#[derive(Debug)]
pub struct Note {
    inner: signed_note::Note,
    body: NoteBody,
}

/// Why a note proves nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Too long to be one of ours.
    #[error("the note has {0} bytes, over {MAX_NOTE_LEN}")]
    TooLong(usize),
    /// Not in signed-note form.
    #[error("not a signed note: a text, an empty line, and signature lines")]
    Form,
    /// The text is no checkpoint of ours.
    #[error("the note's text is not a checkpoint")]
    Body(#[from] BodyError),
    /// A signature under a known key is wrong.
    #[error("the signature by {name}+{id:08x} does not fit the note's text: one of the two was altered")]
    BadSignature {
        /// The key's name.
        name: String,
        /// The key's id.
        id: u32,
    },
    /// No signature is by a known key.
    #[error("no signature on the note is by a key that was asked for")]
    UnknownKey {
        /// Who did sign.
        unverified: Vec<NoteSignature>,
    },
}

impl Note {
    /// Reads a note; nothing about it is proven yet.
    pub fn parse(bytes: &[u8]) -> Result<Note, OpenError> {
        if bytes.len() > MAX_NOTE_LEN {
            return Err(OpenError::TooLong(bytes.len()));
        }
        let inner = signed_note::Note::from_bytes(bytes).map_err(|_| OpenError::Form)?;
        if inner.to_bytes() != bytes {
            return Err(OpenError::Form);
        }
        let text = core::str::from_utf8(inner.text()).map_err(|_| OpenError::Form)?;
        let body = NoteBody::parse(text)?;
        Ok(Note { inner, body })
    }

    /// The key that the note says it is signed with. Opening the note with it shows that the note is whole, and that
    /// whoever has that key wrote it; not who that is.
    pub fn claimed_key(&self) -> Option<&VerifierKey> {
        self.body.key.as_ref()
    }

    /// What the text says, with no signature checked: to say what else was altered where a signature does not hold,
    /// never to believe it.
    pub fn into_unproven_body(self) -> NoteBody {
        self.body
    }

    /// Checks the signatures against these keys.
    pub fn open(&self, keys: &[VerifierKey]) -> Result<OpenedNote, OpenError> {
        let mut known: Vec<Box<dyn Verifier>> = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            if !keys.iter().take(index).any(|other| other == key) {
                known.push(Box::new(key.clone()));
            }
        }
        let lines = |sigs: &[signed_note::Signature]| -> Vec<NoteSignature> {
            sigs.iter().map(|s| NoteSignature { name: s.name().to_owned(), id: s.id() }).collect()
        };
        match self.inner.verify(&VerifierList::new(known)) {
            Ok((verified, unverified)) => Ok(OpenedNote {
                body: self.body.clone(),
                verified: lines(&verified),
                unverified: lines(&unverified),
            }),
            Err(NoteError::InvalidSignature { name, id }) => Err(OpenError::BadSignature { name, id }),
            Err(NoteError::UnverifiedNote) => {
                // With no key at all, every signature is an unverified one; the crate does not hand them out on error.
                let text = String::from_utf8_lossy(&self.inner.to_bytes()).into_owned();
                let sigs: Vec<_> = text
                    .rsplit_once("\n\n")
                    .map(|(_, lines)| lines.lines())
                    .into_iter()
                    .flatten()
                    .filter_map(|line| signed_note::Signature::from_bytes(line.as_bytes()).ok())
                    .collect();
                Err(OpenError::UnknownKey { unverified: lines(&sigs) })
            }
            Err(_) => Err(OpenError::Form),
        }
    }
}

/// Why a note can't be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignError {
    /// More files than a note can list.
    #[error(
        "the note would have {0} bytes, over {MAX_NOTE_LEN}: copy fewer files out, or pack them into one archive"
    )]
    TooLong(usize),
    /// A body that does not read back.
    #[error("the bundle can't be described by a note")]
    Body(#[from] BodyError),
    /// The signer failed.
    #[error("failed to sign the note")]
    Signer,
}

/// Signs a body, adding the line that names the key.
pub fn sign(mut body: NoteBody, key: &SigningKey) -> Result<Vec<u8>, SignError> {
    body.key = Some(key.public().clone());
    let text = body.to_text();
    NoteBody::parse(&text)?;
    let too_long = |len| if len > MAX_NOTE_LEN { Err(SignError::TooLong(len)) } else { Ok(()) };
    too_long(text.len())?;
    let mut note = signed_note::Note::new(text.as_bytes(), &[]).map_err(|_| SignError::Signer)?;
    note.add_sigs(&[key]).map_err(|_| SignError::Signer)?;
    let bytes = note.to_bytes();
    too_long(bytes.len())?;
    Ok(bytes)
}
