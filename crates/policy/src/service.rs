//! Root services that an image declares: programs that the machine starts as root
//! before the first command, without any capability.
//!
//! A declaration is `NAME=PATH [ARGUMENT]...`. It becomes part of the image's manifest
//! together with the digest of its program, and part of the sealed spec of every run
//! of that image, so the record says which root processes there may be, and which file
//! each of them is.

use crate::limits::{MAX_SERVICE_BYTES, MAX_SERVICES};
use crate::path::CleanPath;
use hotcell_ledger::Digest;
use serde::{Deserialize, Serialize};

/// A service as somebody asks for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceDraft {
    /// `[a-z0-9][a-z0-9-]{0,31}`.
    pub name: String,
    /// Absolute path of the program in the image, and its arguments.
    pub argv: Vec<String>,
}

/// A service whose program was found in the image and measured.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// Its name, unique in the image.
    pub name: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Digest of the program's file: what may run under this name.
    #[serde(with = "crate::hex")]
    pub binary: Digest,
}

/// Why something is no service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the service {name:?} {why}")]
pub struct ServiceError {
    name: String,
    why: String,
}

impl ServiceError {
    pub(crate) fn new(name: &str, why: impl Into<String>) -> ServiceError {
        ServiceError { name: name.chars().take(64).collect(), why: why.into() }
    }
}

impl ServiceDraft {
    /// Reads `NAME=PATH [ARGUMENT]...`; words are separated by blanks, and nothing quotes them.
    ///
    /// # Errors
    /// It is none: the error says why.
    pub fn parse(text: &str) -> Result<ServiceDraft, ServiceError> {
        let (name, command) = text.split_once('=').ok_or_else(|| {
            ServiceError::new(text, "has no program: write NAME=PATH, arguments behind blanks")
        })?;
        let argv = command.split_ascii_whitespace().map(str::to_owned).collect();
        let draft = ServiceDraft { name: name.to_owned(), argv };
        check(&draft.name, &draft.argv)?;
        Ok(draft)
    }
}

/// What holds of a service wherever it stands.
pub(crate) fn check(name: &str, argv: &[String]) -> Result<(), ServiceError> {
    let fail = |why: &str| Err(ServiceError::new(name, why));
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > 32 || name.starts_with('-') || !name.chars().all(plain) {
        return fail("has a wrong name: 1 to 32 of a-z 0-9 -, beginning with a letter or digit");
    }
    let program = argv.first().map(String::as_str).unwrap_or_default();
    if CleanPath::clean(program).is_err() || !program.starts_with('/') {
        return fail("needs the absolute path of a program in the image");
    }
    if argv.iter().any(|word| word.contains('\0')) {
        return fail("has a NUL byte in its command");
    }
    let bytes: usize = argv.iter().map(|word| word.len() + 1).sum();
    if bytes > MAX_SERVICE_BYTES {
        return fail(&format!("has a command of {bytes} bytes, over {MAX_SERVICE_BYTES}"));
    }
    Ok(())
}

/// What holds of all services of an image together.
pub(crate) fn check_all<'a>(
    services: impl ExactSizeIterator<Item = (&'a str, &'a [String])>,
) -> Result<(), ServiceError> {
    let mut names = std::collections::BTreeSet::new();
    if services.len() > MAX_SERVICES {
        return Err(ServiceError::new("", format!("is one of more than {MAX_SERVICES}")));
    }
    for (name, argv) in services {
        check(name, argv)?;
        if !names.insert(name) {
            return Err(ServiceError::new(name, "is declared twice"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_read_or_refused_with_the_reason() {
        let good = ServiceDraft::parse("job-runner=/usr/sbin/runner --socket  /run/runner").unwrap();
        assert_eq!(good.argv, ["/usr/sbin/runner", "--socket", "/run/runner"]);
        for (text, why) in [
            ("runner", "has no program"),
            ("=/bin/sh", "wrong name"),
            ("Runner=/bin/sh", "wrong name"),
            ("-x=/bin/sh", "wrong name"),
            ("x=", "absolute path"),
            ("x=bin/sh", "absolute path"),
            ("x=/bin/sh a\0b", "NUL"),
        ] {
            let error = ServiceDraft::parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text:?}: {error}");
        }
        let long = format!("x=/bin/sh {}", "a".repeat(MAX_SERVICE_BYTES));
        assert!(ServiceDraft::parse(&long).unwrap_err().to_string().contains("bytes, over"));
    }
}
