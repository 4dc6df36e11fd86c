//! Image names: they become file names, so they are checked once and then typed.

use crate::error::ImageError;
use std::fmt;

/// Longest name.
const MAX_LEN: usize = 64;

/// A checked image name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageName(String);

impl ImageName {
    /// Checks a name.
    ///
    /// # Errors
    /// It could lead out of the store or confuse people.
    pub fn new(name: &str) -> Result<ImageName, ImageError> {
        let bad = |why| Err(ImageError::Name { name: name.escape_debug().to_string(), why });
        if name.is_empty() {
            return bad("it is empty");
        }
        if name.len() > MAX_LEN {
            return bad("it is too long");
        }
        if name.contains('/') || name.contains("..") {
            return bad("it is a path");
        }
        if !name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-:".contains(&b)) {
            return bad("it has other characters");
        }
        if !name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()) {
            return bad("it begins with a sign");
        }
        Ok(ImageName(name.to_owned()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_paths_or_options_are_refused() {
        for bad in ["", "..", "a/b", "../x", "a..b", "-x", ".hidden", "Ä", "a b", "a\n", &"x".repeat(65)] {
            assert!(ImageName::new(bad).is_err(), "{bad:?}");
        }
        for good in ["busybox", "py3.11", "a", "debian-12_x", "bb:1"] {
            assert_eq!(ImageName::new(good).unwrap().as_str(), good);
        }
    }
}
