//! The ed25519 key that signs checkpoints, and its public half.
//!
//! Both have the text forms of C2SP signed-note: `name+hash+key` for the verifier, one line
//! `PRIVATE+KEY+name+hash+key` in the key file.
//! Guarantees: a key file comes into being complete and with mode 0600, by a link that fails if it exists; there is no
//! moment at which others can read it, and two processes that start at once end up with one key. A key file that others
//! can read, or that is another user's, is refused. A signing key does not print itself, and its memory is cleared when it is dropped.
//! Does not: say whose key a public half is. That is for whoever hands it over.
//! Called by the run that seals, and by verifiers (the public half alone).

use crate::file::open_regular;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use core::fmt;
use ed25519_dalek::{SECRET_KEY_LENGTH, Signer as _};
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// The name in keys and notes that we make.
pub const KEY_NAME: &str = "hotcell";
/// C2SP's number for ed25519.
const ALG_ED25519: u8 = 1;
/// A key file is some 110 bytes; a larger one is something else.
const MAX_KEY_FILE_LEN: u64 = 4096;

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The text is no verifier key.
    #[error("not a verifier key: it must read name+hash+key, as `hotcell key` prints it")]
    Verifier,
    /// The file is no signing key.
    #[error("{0} is not a signing key: move it away to have a new one made, or put the right one there")]
    Signer(PathBuf),
    /// Others can read the file.
    #[error(
        "the signing key {path} can be used by others (mode {mode:03o}): run `chmod 600 {path}`, and move it away to \
         have a new one made if somebody may have read it"
    )]
    Exposed {
        /// Which file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file is another user's, who can read it.
    #[error(
        "the signing key {path} belongs to the user {owner}, who can sign with it: move it away to have a new one made"
    )]
    Foreign {
        /// Which file.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
    },
    /// The file can't be read or made.
    #[error("failed to {action} the signing key {path}: give a path in a directory of yours")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The system has no random bytes.
    #[error("failed to get random bytes from the system: {0}")]
    Random(String),
}

/// The public half of a key.
#[derive(Clone, PartialEq, Eq)]
pub struct VerifierKey {
    name: String,
    id: u32,
    key: ed25519_dalek::VerifyingKey,
}

impl VerifierKey {
    fn new(name: &str, key: ed25519_dalek::VerifyingKey) -> VerifierKey {
        let id = signed_note::key_id(name, &tagged(key.as_bytes()));
        VerifierKey { name: name.to_owned(), id, key }
    }

    /// Reads `name+hash+key`.
    pub fn parse(text: &str) -> Result<VerifierKey, KeyError> {
        // The crate checks form, hash and algorithm; the curve point is ours to keep, for strict verification.
        let text = text.trim_end_matches('\n');
        signed_note::StandardVerifier::new(text).map_err(|_| KeyError::Verifier)?;
        let mut parts = text.splitn(3, '+');
        let name = parts.next().ok_or(KeyError::Verifier)?;
        let bytes =
            parts.nth(1).and_then(|b64| BASE64_STANDARD.decode(b64).ok()).ok_or(KeyError::Verifier)?;
        let point = bytes.split_first_chunk::<1>().and_then(|(_, point)| <[u8; 32]>::try_from(point).ok());
        let key = point
            .and_then(|point| ed25519_dalek::VerifyingKey::from_bytes(&point).ok())
            // Under a key of small order a signature says nothing about the message.
            .filter(|key| !key.is_weak())
            .ok_or(KeyError::Verifier)?;
        let parsed = VerifierKey::new(name, key);
        // One spelling: the hash in lower case.
        if parsed.to_string() == text && !name.contains(|c: char| c.is_control()) {
            Ok(parsed)
        } else {
            Err(KeyError::Verifier)
        }
    }

    /// The key's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The first four bytes of the hash of name and key.
    pub fn id(&self) -> u32 {
        self.id
    }
}

impl fmt::Display for VerifierKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{:08x}+{}", self.name, self.id, BASE64_STANDARD.encode(tagged(self.key.as_bytes())))
    }
}

impl fmt::Debug for VerifierKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl signed_note::Verifier for VerifierKey {
    fn name(&self) -> &str {
        &self.name
    }

    fn key_id(&self) -> u32 {
        self.id
    }

    fn verify(&self, msg: &[u8], sig: &[u8]) -> bool {
        // Strict: one message and key have no second spelling of their signature.
        ed25519_dalek::Signature::from_slice(sig).is_ok_and(|sig| self.key.verify_strict(msg, &sig).is_ok())
    }
}

fn tagged(key: &[u8; 32]) -> Vec<u8> {
    [&[ALG_ED25519], key.as_slice()].concat()
}

/// A key that signs checkpoints.
pub struct SigningKey {
    key: ed25519_dalek::SigningKey,
    public: VerifierKey,
}

impl SigningKey {
    /// The key of these 32 secret bytes.
    pub fn from_seed(seed: &[u8; SECRET_KEY_LENGTH]) -> SigningKey {
        let key = ed25519_dalek::SigningKey::from_bytes(seed);
        let public = VerifierKey::new(KEY_NAME, key.verifying_key());
        SigningKey { key, public }
    }

    /// A new key from the system's random bytes.
    pub fn generate() -> Result<SigningKey, KeyError> {
        let mut seed = Zeroizing::new([0u8; SECRET_KEY_LENGTH]);
        getrandom::fill(seed.as_mut_slice()).map_err(|e| KeyError::Random(e.to_string()))?;
        Ok(SigningKey::from_seed(&seed))
    }

    /// The key in this file; made, with the directory it lies in, when there is none.
    pub fn load_or_create(path: &Path) -> Result<SigningKey, KeyError> {
        match SigningKey::load(path) {
            Err(KeyError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        let fault = |source| KeyError::Io { action: "make", path: path.to_owned(), source };
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(fault)?;
        let key = SigningKey::generate()?;
        let mut salt = [0u8; 8];
        getrandom::fill(&mut salt).map_err(|e| KeyError::Random(e.to_string()))?;
        let fresh = parent.join(format!(".key.{:016x}", u64::from_be_bytes(salt)));
        let write = || -> io::Result<()> {
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&fresh)?;
            file.write_all(key.to_file_text().as_bytes())?;
            file.sync_all()?;
            // Fails when somebody else was first: then theirs is the key.
            std::fs::hard_link(&fresh, path)
        };
        let written = write();
        let removed = std::fs::remove_file(&fresh);
        match written {
            Ok(()) => removed.map_err(fault)?,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(fault(e)),
        }
        SigningKey::load(path)
    }

    /// The key in this file.
    pub fn load(path: &Path) -> Result<SigningKey, KeyError> {
        let fault = |source| KeyError::Io { action: "read", path: path.to_owned(), source };
        let no_key = || KeyError::Signer(path.to_owned());
        // The checks are on the open file, not on the path.
        let file = open_regular(path).map_err(fault)?;
        let meta = file.metadata().map_err(fault)?;
        if meta.len() > MAX_KEY_FILE_LEN {
            return Err(no_key());
        }
        let mode = meta.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(KeyError::Exposed { path: path.to_owned(), mode });
        }
        if meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(KeyError::Foreign { path: path.to_owned(), owner: meta.uid() });
        }
        let mut text = Zeroizing::new(String::new());
        file.take(MAX_KEY_FILE_LEN).read_to_string(&mut text).map_err(|_| no_key())?;
        SigningKey::from_file_text(&text).ok_or_else(no_key)
    }

    fn to_file_text(&self) -> Zeroizing<String> {
        let secret = Zeroizing::new(tagged(self.key.as_bytes()));
        let b64 = Zeroizing::new(BASE64_STANDARD.encode(&*secret));
        Zeroizing::new(format!("PRIVATE+KEY+{}+{:08x}+{}\n", self.public.name, self.public.id, *b64))
    }

    fn from_file_text(text: &str) -> Option<SigningKey> {
        let rest = text.trim_end_matches('\n').strip_prefix("PRIVATE+KEY+")?;
        let mut parts = rest.splitn(3, '+');
        let (name, id, b64) = (parts.next()?, parts.next()?, parts.next()?);
        let bytes = Zeroizing::new(BASE64_STANDARD.decode(b64).ok()?);
        let (alg, seed) = bytes.split_first_chunk::<1>()?;
        let key = ed25519_dalek::SigningKey::from_bytes(<&[u8; SECRET_KEY_LENGTH]>::try_from(seed).ok()?);
        let public = VerifierKey::new(name, key.verifying_key());
        let fits = *alg == [ALG_ED25519]
            && signed_note::is_key_name_valid(name)
            && !name.contains(|c: char| c.is_control())
            && format!("{:08x}", public.id) == id;
        fits.then_some(SigningKey { key, public })
    }

    /// The public half.
    pub fn public(&self) -> &VerifierKey {
        &self.public
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.public)
    }
}

impl signed_note::Signer for SigningKey {
    fn name(&self) -> &str {
        &self.public.name
    }

    fn key_id(&self) -> u32 {
        self.public.id
    }

    fn sign(&self, msg: &[u8]) -> Result<Vec<u8>, signature::Error> {
        self.key.try_sign(msg).map(|sig| sig.to_vec())
    }
}
