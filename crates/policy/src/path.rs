//! Paths inside the guest: cleaned before anything is decided about them.
//!
//! The attack: `/workspace/../etc/passwd`, `/workspacefoo`, `//usr//lib`, a NUL
//! that cuts a name short. A [`CleanPath`] is absolute, has no empty, `.` or `..`
//! component, no trailing slash, no NUL, and is at most [`MAX_PATH_BYTES`] long;
//! it can only be made by cleaning. Prefixes match whole components.
//!
//! Cleaning is lexical. What a link inside the guest makes of a name is not known
//! here; observers report the path of the file itself, and the root is immutable
//! by device, so a link never turns a permitted write into a forbidden one.

use core::fmt;
use hotcell_ledger::NfcString;
use serde::{Serialize, Serializer};

/// Linux's PATH_MAX.
pub const MAX_PATH_BYTES: usize = 4096;

/// Why text is not a usable path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// It does not start with `/`.
    #[error("the path is not absolute: start it with `/`")]
    NotAbsolute,
    /// It contains a NUL byte.
    #[error("the path contains a NUL byte")]
    Nul,
    /// It is longer than Linux allows.
    #[error("the path is longer than {MAX_PATH_BYTES} bytes")]
    TooLong,
    /// Its `..` components lead above `/`.
    #[error("the path leads above `/`")]
    AboveRoot,
}

/// An absolute path in its one clean spelling.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CleanPath(String);

impl CleanPath {
    /// Cleans a path: `//`, `.` and `..` are resolved lexically.
    ///
    /// The kernel would let `/..` mean `/`; here it is refused, since no honest
    /// program writes it.
    pub fn clean(text: &str) -> Result<CleanPath, PathError> {
        if text.contains('\0') {
            return Err(PathError::Nul);
        }
        if text.len() > MAX_PATH_BYTES {
            return Err(PathError::TooLong);
        }
        let Some(rest) = text.strip_prefix('/') else {
            return Err(PathError::NotAbsolute);
        };
        let mut parts: Vec<&str> = Vec::new();
        for part in rest.split('/') {
            match part {
                "" | "." => {}
                ".." => {
                    parts.pop().ok_or(PathError::AboveRoot)?;
                }
                name => parts.push(name),
            }
        }
        Ok(CleanPath(format!("/{}", parts.join("/"))))
    }

    /// The path.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path as a record spells it: in Unicode NFC. Two names that differ in this alone are one in a record.
    pub fn to_nfc(&self) -> CleanPath {
        CleanPath(NfcString::new(&self.0).as_str().to_owned())
    }

    /// Whether this path is `tree` or lies below it; `/workspacefoo` is not below `/workspace`.
    pub fn is_within(&self, tree: &CleanPath) -> bool {
        if tree.0 == "/" {
            return true;
        }
        match self.0.strip_prefix(tree.0.as_str()) {
            Some(rest) => rest.is_empty() || rest.starts_with('/'),
            None => false,
        }
    }
}

impl fmt::Debug for CleanPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for CleanPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for CleanPath {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.0)
    }
}

/// How a part of the guest's file tree behaves; later is more restrictive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// In memory, gone with the machine; changes there are nobody's business.
    Ephemeral,
    /// On the overlay disk; changes there need a grant.
    Mutable,
    /// Read-only by device: a change there is impossible.
    Immutable,
}

/// Which part of the tree is which. Sealed: fixed at construction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPolicy {
    regions: Vec<(CleanPath, Region)>,
}

impl PathPolicy {
    /// The regions of a Hotcell guest.
    pub fn standard() -> PathPolicy {
        let named = [
            (Region::Immutable, ["/usr", "/lib", "/bin", "/sbin", "/etc", "/rootfs"].as_slice()),
            (Region::Mutable, ["/workspace"].as_slice()),
            (Region::Ephemeral, ["/tmp", "/run", "/dev/shm"].as_slice()),
        ];
        let regions = named
            .into_iter()
            .flat_map(|(region, paths)| paths.iter().map(move |path| (CleanPath((*path).to_owned()), region)))
            .collect();
        PathPolicy { regions }
    }

    /// The standard regions and more. Since the most restrictive match wins, an
    /// addition can protect a part of the workspace but never open a part of the root.
    pub fn standard_and(more: impl IntoIterator<Item = (CleanPath, Region)>) -> PathPolicy {
        let mut policy = PathPolicy::standard();
        policy.regions.extend(more);
        policy
    }

    /// The region of a path: the most restrictive of those that contain it; immutable where none does.
    pub fn region(&self, path: &CleanPath) -> Region {
        self.regions
            .iter()
            .filter(|(tree, _)| path.is_within(tree))
            .map(|(_, region)| *region)
            .max()
            .unwrap_or(Region::Immutable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn clean(text: &str) -> CleanPath {
        CleanPath::clean(text).unwrap()
    }

    #[test]
    fn spellings_of_one_path_are_one_path() {
        for text in ["/usr/lib", "//usr//lib/", "/usr/./lib", "/tmp/../usr/lib", "/usr/lib/x/.."] {
            assert_eq!(clean(text).as_str(), "/usr/lib", "{text}");
        }
        assert_eq!(clean("/").as_str(), "/");
        assert_eq!(clean("/a/..").as_str(), "/");
    }

    #[test]
    fn what_is_no_path_is_refused() {
        assert_eq!(CleanPath::clean("workspace"), Err(PathError::NotAbsolute));
        assert_eq!(CleanPath::clean(""), Err(PathError::NotAbsolute));
        assert_eq!(CleanPath::clean("/a\0b"), Err(PathError::Nul));
        assert_eq!(CleanPath::clean("/.."), Err(PathError::AboveRoot));
        assert_eq!(CleanPath::clean("/a/../../b"), Err(PathError::AboveRoot));
        let exact = format!("/{}", "a".repeat(MAX_PATH_BYTES - 1));
        assert!(CleanPath::clean(&exact).is_ok());
        assert_eq!(CleanPath::clean(&format!("{exact}a")), Err(PathError::TooLong));
    }

    #[test]
    fn prefixes_match_whole_components() {
        assert!(clean("/workspace").is_within(&clean("/workspace")));
        assert!(clean("/workspace/a").is_within(&clean("/workspace")));
        assert!(!clean("/workspacefoo").is_within(&clean("/workspace")));
        assert!(!clean("/work").is_within(&clean("/workspace")));
        assert!(clean("/anything").is_within(&clean("/")));
    }

    #[test]
    fn regions_are_as_the_layers_say_and_unknown_ones_are_immutable() {
        let policy = PathPolicy::standard();
        for path in [
            "/usr/bin/env",
            "/lib",
            "/bin/sh",
            "/sbin/init",
            "/etc/passwd",
            "/rootfs/x",
            "/opt/x",
            "/",
            "/dev",
        ] {
            assert_eq!(policy.region(&clean(path)), Region::Immutable, "{path}");
        }
        assert_eq!(policy.region(&clean("/workspace/a/b")), Region::Mutable);
        assert_eq!(policy.region(&clean("/workspacefoo")), Region::Immutable);
        for path in ["/tmp", "/run/x", "/dev/shm/y"] {
            assert_eq!(policy.region(&clean(path)), Region::Ephemeral, "{path}");
        }
        assert_eq!(policy.region(&clean("/tmp/../etc/shadow")), Region::Immutable);
    }

    #[test]
    fn the_most_restrictive_region_wins_both_ways_round() {
        let policy = PathPolicy::standard_and([
            (clean("/workspace/.git"), Region::Immutable),
            (clean("/usr/local"), Region::Ephemeral),
        ]);
        assert_eq!(policy.region(&clean("/workspace/.git/config")), Region::Immutable);
        assert_eq!(policy.region(&clean("/usr/local/x")), Region::Immutable);
    }

    proptest! {
        #[test]
        fn cleaning_is_idempotent_and_leaves_nothing_to_clean(text in "/?([a.]{0,3}/){0,8}[a.]{0,3}") {
            if let Ok(path) = CleanPath::clean(&text) {
                prop_assert_eq!(&clean(path.as_str()), &path);
                prop_assert!(path.as_str() == "/" || !path.as_str().ends_with('/'));
                prop_assert!(!path.as_str().split('/').skip(1).any(|part| part == "." || part == ".."));
                prop_assert!(!path.as_str().contains("//"));
            }
        }

        #[test]
        fn no_spelling_escapes_the_workspace(tail in "([a-z.]{0,3}/){0,8}[a-z.]{0,3}") {
            let policy = PathPolicy::standard();
            if let Ok(path) = CleanPath::clean(&format!("/workspace/{tail}"))
                && policy.region(&path) == Region::Mutable
            {
                prop_assert!(path.as_str() == "/workspace" || path.as_str().starts_with("/workspace/"));
            }
        }
    }
}
