//! What an image is built from, as it is written on the command line.

use crate::error::ImageError;
use crate::oci::split_tag;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// The forms, for people.
const FORMS: &str = "busybox, debian:SUITE, oci:DIR[:TAG], docker-archive:FILE, docker://REF, dir:PATH";

/// A source.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The host's static busybox.
    Busybox,
    /// A Debian of this suite, put together by mmdebstrap.
    Debian(String),
    /// An OCI layout, and the tag or digest of an image in it.
    Oci(PathBuf, Option<String>),
    /// What `docker save` wrote.
    DockerArchive(PathBuf),
    /// An image of a registry.
    Registry(Reference),
    /// A folder.
    Folder(PathBuf),
}

/// `[HOST/]NAME[:TAG][@DIGEST]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Registry and name.
    pub name: String,
    /// Tag, where one was given.
    pub tag: Option<String>,
    /// Digest that it must have, where one was given.
    pub digest: Option<String>,
}

impl Reference {
    /// The registry's host name or address, without the port; none where the default registry is meant.
    pub fn host(&self) -> Option<&str> {
        let (host, _) = self.name.split_once('/')?;
        let is_host = host == "localhost" || host.contains(['.', ':']);
        let bare = match host.strip_prefix('[') {
            Some(v6) => v6.split(']').next()?,
            None => host.split(':').next()?,
        };
        is_host.then_some(bare)
    }

    /// Whether the registry is this machine: only then plain HTTP is spoken.
    pub fn is_loopback(&self) -> bool {
        let Some(host) = self.host() else { return false };
        host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// The same image by its digest.
    pub(crate) fn pinned(&self, digest: &str) -> Reference {
        Reference { name: self.name.clone(), tag: None, digest: Some(digest.to_owned()) }
    }

    fn parse(text: &str) -> Result<Reference, String> {
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                crate::oci::sha256_hex(digest).map_err(|error| error.to_string())?;
                (rest, Some(digest.to_owned()))
            }
            None => (text, None),
        };
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag.to_owned())),
            _ => (rest, None),
        };
        let is_plain = |text: &str, more: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
        };
        if !is_plain(name, "._-/:[]") || name.starts_with(['-', '/', '.']) || name.contains("..") {
            return Err(format!("{name:?} is no image name of a registry"));
        }
        if tag.as_ref().is_some_and(|tag| !is_plain(tag, "._-")) {
            return Err("the tag has other characters than letters, digits, . _ -".into());
        }
        // With both, the digest counts; skopeo takes only one.
        let tag = if digest.is_some() { None } else { tag };
        Ok(Reference { name: name.to_owned(), tag, digest })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        match (&self.tag, &self.digest) {
            (_, Some(digest)) => write!(f, "@{digest}"),
            (Some(tag), None) => write!(f, ":{tag}"),
            (None, None) => Ok(()),
        }
    }
}

impl Source {
    /// Reads a source. Relative paths are taken from `here`, so that the image can be built again from anywhere.
    ///
    /// # Errors
    /// It has none of the forms.
    pub fn parse(text: &str, here: &Path) -> Result<Source, ImageError> {
        let bad = |why: String| ImageError::Request(format!("`{text}` is no source: {why}. Use {FORMS}"));
        if text == "busybox" {
            return Ok(Source::Busybox);
        }
        if let Some(reference) = text.strip_prefix("docker://") {
            return Reference::parse(reference).map(Source::Registry).map_err(bad);
        }
        let (form, rest) = text.split_once(':').ok_or_else(|| bad("it has no `:`".into()))?;
        if rest.is_empty() {
            return Err(bad(format!("nothing follows `{form}:`")));
        }
        match form {
            "debian" => {
                let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
                if !rest.chars().all(plain) || rest.starts_with('-') {
                    return Err(bad(format!("{rest:?} is no suite such as bookworm")));
                }
                Ok(Source::Debian(rest.to_owned()))
            }
            "oci" => {
                // A folder whose own name has a colon is a folder.
                let whole = here.join(rest);
                if whole.join("index.json").exists() {
                    return Ok(Source::Oci(whole, None));
                }
                let (dir, tag) = match rest.split_once("@sha256:") {
                    Some((dir, hex)) => (PathBuf::from(dir), Some(format!("sha256:{hex}"))),
                    None => split_tag(rest),
                };
                Ok(Source::Oci(here.join(dir), tag))
            }
            "docker-archive" => Ok(Source::DockerArchive(here.join(rest))),
            "dir" => Ok(Source::Folder(here.join(rest))),
            _ => Err(bad(format!("there is no form `{form}:`"))),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Busybox => f.write_str("busybox"),
            Source::Debian(suite) => write!(f, "debian:{suite}"),
            Source::Oci(dir, None) => write!(f, "oci:{}", dir.display()),
            Source::Oci(dir, Some(tag)) if tag.starts_with("sha256:") => {
                write!(f, "oci:{}@{tag}", dir.display())
            }
            Source::Oci(dir, Some(tag)) => write!(f, "oci:{}:{tag}", dir.display()),
            Source::DockerArchive(file) => write!(f, "docker-archive:{}", file.display()),
            Source::Registry(reference) => write!(f, "docker://{reference}"),
            Source::Folder(dir) => write!(f, "dir:{}", dir.display()),
        }
    }
}

impl Serialize for Source {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Source {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Source, D::Error> {
        let text = String::deserialize(from)?;
        Source::parse(&text, Path::new("/")).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_comes_back_as_it_was_written() {
        for text in [
            "busybox",
            "debian:bookworm",
            "oci:/a/b:latest",
            "oci:/a/b",
            "docker-archive:/a/b.tar",
            "dir:/a/b",
            "docker://localhost:5000/a/b:1",
            "docker://python",
        ] {
            assert_eq!(Source::parse(text, Path::new("/x")).unwrap().to_string(), text);
        }
        assert_eq!(Source::parse("dir:a", Path::new("/x")).unwrap().to_string(), "dir:/x/a");
        for bad in
            ["", "ftp:x", "debian:", "debian:../x", "debian:-x", "docker://", "docker://-x", "docker://a b"]
        {
            assert!(Source::parse(bad, Path::new("/")).is_err(), "{bad}");
        }
    }

    #[test]
    fn plain_http_is_for_this_machine_only() {
        let loopback = |text: &str| Reference::parse(text).unwrap().is_loopback();
        for text in ["localhost:5000/a", "127.0.0.1:5000/a", "127.9.9.9/a:1", "[::1]:5000/a", "localhost/a"] {
            assert!(loopback(text), "{text}");
        }
        for text in ["python", "localhost.example.org/a", "127.0.0.1.example.org/a", "10.0.0.1:5000/a", "a/b"]
        {
            assert!(!loopback(text), "{text}");
        }
    }
}
