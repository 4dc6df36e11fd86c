//! What a workload may be granted: exact paths, trees, starting processes, pinned packages.
//!
//! Sealed, frozen and plain: no pattern language, so that what it grants can be
//! read off it. NET_EGRESS, RAW_SYSCALL and PRIVILEGE_RAISE have no field: no
//! policy can grant them.

use crate::draft::CapabilitiesDraft;
use crate::limits::MAX_LIST;
use crate::path::{CleanPath, PathPolicy, Region};
use crate::violation::{Code, Findings};
use core::fmt;

/// A package pinned to one version and one artifact.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinnedPackage {
    name: String,
    version: String,
    sha256: String,
}

impl PinnedPackage {
    /// Parses `name==version sha256:<64 hex>`; nothing looser.
    pub fn parse(text: &str) -> Option<PinnedPackage> {
        let (pin, hash) = text.split_once(' ')?;
        let (name, version) = split_pin(pin)?;
        let sha256 = parse_sha256(hash)?;
        Some(PinnedPackage { name: name.into(), version: version.into(), sha256: sha256.into() })
    }

    /// The package's name as the policy spells it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The one version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// SHA-256 of the artifact, in lower-case hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

impl fmt::Display for PinnedPackage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=={} sha256:{}", self.name, self.version, self.sha256)
    }
}

fn split_pin(text: &str) -> Option<(&str, &str)> {
    let (name, version) = text.split_once("==")?;
    let starts_well = |part: &str| part.starts_with(|c: char| c.is_ascii_alphanumeric());
    let name_ok = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    let version_ok = version.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-+!".contains(&b));
    (name.len() <= 128
        && version.len() <= 128
        && starts_well(name)
        && starts_well(version)
        && name_ok
        && version_ok)
        .then_some((name, version))
}

fn parse_sha256(text: &str) -> Option<&str> {
    let hex = text.strip_prefix("sha256:")?;
    (hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))).then_some(hex)
}

/// Why a write is granted, or that it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum WriteGrant {
    /// The exact path is listed.
    Exact,
    /// A listed tree contains it.
    Tree,
    /// Nothing grants it.
    None,
}

/// How a request for a package relates to the pins.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum PackageGrant<'a> {
    /// Exactly one of the listed packages.
    Listed(&'a PinnedPackage),
    /// Well pinned, but not listed.
    NotListed,
    /// Listed, but with another artifact's hash.
    OtherArtifact,
    /// Not an exact pin.
    NotPinned,
}

/// The sealed capability policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapabilityPolicy {
    write: Vec<CleanPath>,
    write_trees: Vec<CleanPath>,
    spawn: bool,
    packages: Vec<PinnedPackage>,
}

impl CapabilityPolicy {
    /// The policy that grants nothing.
    pub fn nothing() -> CapabilityPolicy {
        CapabilityPolicy { write: Vec::new(), write_trees: Vec::new(), spawn: false, packages: Vec::new() }
    }

    /// Checks a draft; `None` once a violation was found.
    pub(crate) fn check(
        draft: &CapabilitiesDraft,
        paths: &PathPolicy,
        findings: &mut Findings,
    ) -> CapabilityPolicy {
        let mut policy = CapabilityPolicy::nothing();
        policy.spawn = draft.spawn;
        for (key, given, kept) in [
            ("write", &draft.write, &mut policy.write),
            ("write_trees", &draft.write_trees, &mut policy.write_trees),
        ] {
            check_length(key, given.len(), findings);
            for text in given {
                match CleanPath::clean(text) {
                    Err(error) => findings.add(Code::WritePath, format!("[capabilities] {key}: {text:?}: {error}")),
                    Ok(path) if path.as_str() != text => findings.add(
                        Code::WritePath,
                        format!("[capabilities] {key}: {text:?} has another plain spelling: write {:?}", path.as_str()),
                    ),
                    Ok(path) if paths.region(&path) == Region::Immutable => findings.add(
                        Code::WriteImmutable,
                        format!(
                            "[capabilities] {key}: {text:?} lies in the read-only root and can't be made writable: \
                             only paths in /workspace, /tmp, /run and /dev/shm can"
                        ),
                    ),
                    Ok(path) => kept.push(path.to_nfc()),
                }
            }
            kept.sort();
            kept.dedup();
        }
        check_length("packages", draft.packages.len(), findings);
        for text in &draft.packages {
            match PinnedPackage::parse(text) {
                Some(package) => policy.packages.push(package),
                None => findings.add(
                    Code::PackagePin,
                    format!(
                        "[capabilities] packages: {text:?} is not an exact pin: \
                         write `name==version sha256:<64 lower-case hexadecimal digits>`"
                    ),
                ),
            }
        }
        policy.packages.sort();
        policy.packages.dedup();
        policy
    }

    /// What grants writing this path. Compared in NFC, since that is how a record spells what was written.
    pub fn write_grant(&self, path: &CleanPath) -> WriteGrant {
        let path = &path.to_nfc();
        if self.write.contains(path) {
            WriteGrant::Exact
        } else if self.write_trees.iter().any(|tree| path.is_within(tree)) {
            WriteGrant::Tree
        } else {
            WriteGrant::None
        }
    }

    /// Whether processes of the image may be started.
    pub fn may_spawn(&self) -> bool {
        self.spawn
    }

    /// How a request `name==version` or `name==version sha256:…` relates to the pins.
    pub fn package_grant(&self, resource: &str) -> PackageGrant<'_> {
        let (pin, hash) = match resource.split_once(' ') {
            Some((pin, hash)) => match parse_sha256(hash) {
                Some(hash) => (pin, Some(hash)),
                None => return PackageGrant::NotPinned,
            },
            None => (resource, None),
        };
        let Some((name, version)) = split_pin(pin) else {
            return PackageGrant::NotPinned;
        };
        let mut listed = self.packages.iter().filter(|p| p.name == name && p.version == version).peekable();
        if listed.peek().is_none() {
            return PackageGrant::NotListed;
        }
        match listed.find(|package| hash.is_none_or(|hash| hash == package.sha256)) {
            Some(package) => PackageGrant::Listed(package),
            None => PackageGrant::OtherArtifact,
        }
    }

    /// The exact paths that may be written, in NFC, sorted.
    pub fn write(&self) -> &[CleanPath] {
        &self.write
    }

    /// The trees that may be written, in NFC, sorted.
    pub fn write_trees(&self) -> &[CleanPath] {
        &self.write_trees
    }

    /// The packages that an image rebuild may add, sorted.
    pub fn packages(&self) -> &[PinnedPackage] {
        &self.packages
    }
}

fn check_length(key: &str, length: usize, findings: &mut Findings) {
    if length > MAX_LIST {
        findings.add(
            Code::TooMany,
            format!("[capabilities] {key}: {length} entries, at most {MAX_LIST} are allowed"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn policy(packages: &[String]) -> CapabilityPolicy {
        let draft = CapabilitiesDraft { packages: packages.to_vec(), ..Default::default() };
        let mut findings = Findings::default();
        let policy = CapabilityPolicy::check(&draft, &PathPolicy::standard(), &mut findings);
        findings.finish().unwrap();
        policy
    }

    #[test]
    fn only_exact_pins_parse() {
        assert!(PinnedPackage::parse(&format!("numpy==2.3.1 sha256:{HASH}")).is_some());
        for text in [
            "numpy".to_owned(),
            "numpy==2.3.1".to_owned(),
            format!("numpy>=2 sha256:{HASH}"),
            format!("numpy==2.* sha256:{HASH}"),
            format!("numpy==2.3.1  sha256:{HASH}"),
            format!("numpy==2.3.1 sha256:{}", HASH.to_uppercase()),
            format!("numpy==2.3.1 sha256:{}", &HASH[1..]),
            format!("numpy==2.3.1,==2.3.2 sha256:{HASH}"),
            format!("-r==1 sha256:{HASH}"),
            format!("../x==1 sha256:{HASH}"),
            format!("==1 sha256:{HASH}"),
            format!("numpy== sha256:{HASH}"),
        ] {
            assert_eq!(PinnedPackage::parse(&text), None, "{text}");
        }
    }

    #[test]
    fn a_request_must_name_a_listed_pin() {
        let policy = policy(&[format!("numpy==2.3.1 sha256:{HASH}")]);
        assert!(matches!(policy.package_grant("numpy==2.3.1"), PackageGrant::Listed(_)));
        assert!(matches!(
            policy.package_grant(&format!("numpy==2.3.1 sha256:{HASH}")),
            PackageGrant::Listed(_)
        ));
        let other = format!("numpy==2.3.1 sha256:{}", "0".repeat(64));
        assert_eq!(policy.package_grant(&other), PackageGrant::OtherArtifact);
        assert_eq!(policy.package_grant("numpy==2.3.2"), PackageGrant::NotListed);
        assert_eq!(policy.package_grant("Numpy==2.3.1"), PackageGrant::NotListed);
        assert_eq!(policy.package_grant("numpy"), PackageGrant::NotPinned);
        assert_eq!(policy.package_grant("numpy>=2"), PackageGrant::NotPinned);
        assert_eq!(policy.package_grant("numpy==2.3.1 --pre"), PackageGrant::NotPinned);
    }

    #[test]
    fn lists_are_bounded() {
        let findings_of = |entries: usize| {
            let write = (0..entries).map(|n| format!("/workspace/{n}")).collect();
            let draft = CapabilitiesDraft { write, ..Default::default() };
            let mut findings = Findings::default();
            let _ = CapabilityPolicy::check(&draft, &PathPolicy::standard(), &mut findings);
            findings.finish()
        };
        assert!(findings_of(MAX_LIST).is_ok());
        let refused = findings_of(MAX_LIST + 1).unwrap_err().to_string();
        assert!(refused.contains("1025 entries, at most 1024"), "{refused}");
    }
}
