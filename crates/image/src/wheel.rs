//! A wheel put into an image, without executing anything of it (PEP 427).
//!
//! The attack: a zip whose names lead out of site-packages, that unpacks to more
//! than it says, or that differs from its own RECORD. Names go through the same
//! checks as a layer's, bytes through the same bounds; each file must have the
//! digest that RECORD gives it. Scripts are written as text; entry points become
//! the few lines that pip writes.

use crate::error::ImageError;
use crate::oci::open_plain;
use crate::pip::Python;
use crate::stage::{Meta, Stage};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use zip::ZipArchive;

/// Largest metadata file of a wheel that is read into memory.
const MAX_TEXT: u64 = 8 << 20;
/// Members of one wheel; the largest known have some 15 000.
const MAX_MEMBERS: usize = 100_000;

/// Installs a wheel. The caller has checked its digest.
pub(crate) fn install(stage: &mut Stage, python: &Python, path: &Path) -> Result<(), ImageError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let fail = |why: String| ImageError::Source { what: format!("the wheel {name}"), why };
    stage.next_layer()?;
    let mut zip = ZipArchive::new(open_plain(path)?).map_err(|error| fail(error.to_string()))?;
    if zip.len() > MAX_MEMBERS {
        return Err(fail(format!("it has more than {MAX_MEMBERS} members")));
    }
    let stem: Vec<&str> = name.split('-').take(2).collect();
    let stem = stem.join("-");
    let (info, data) = (format!("{stem}.dist-info/"), format!("{stem}.data/"));
    let mut read = |member: &str| -> Result<Option<String>, ImageError> {
        let Some(index) = zip.index_for_name(&format!("{info}{member}")) else { return Ok(None) };
        let file = zip.by_index(index).map_err(|error| fail(error.to_string()))?;
        let mut text = String::new();
        file.take(MAX_TEXT).read_to_string(&mut text).map_err(|error| fail(format!("{member}: {error}")))?;
        Ok(Some(text))
    };
    let wheel = read("WHEEL")?.ok_or_else(|| fail(format!("it has no {info}WHEEL")))?;
    if !wheel.lines().any(|line| line.trim().starts_with("Wheel-Version: 1.")) {
        return Err(fail("it is not of wheel version 1".into()));
    }
    let record = read("RECORD")?.ok_or_else(|| fail(format!("it has no {info}RECORD")))?;
    let points = read("entry_points.txt")?.unwrap_or_default();
    let declared = declared(&record);
    let mut installed: BTreeMap<String, String> = BTreeMap::new();
    for index in 0..zip.len() {
        let mut file = zip.by_index(index).map_err(|error| fail(error.to_string()))?;
        let member = file.name().map_err(|error| fail(error.to_string()))?.into_owned();
        let fault = |why: &str| fail(format!("{member:?} in it {why}"));
        stage.count()?;
        // The same checks as for a layer's names; a backslash is one on another system.
        let inner = stage.name(member.as_bytes())?;
        if member.starts_with('/') || member.contains('\\') {
            return Err(fault("has no name for a wheel"));
        }
        if file.is_dir() {
            continue;
        }
        if file.is_symlink() {
            return Err(fault("is a link"));
        }
        let inner = inner.as_str().trim_start_matches('/').to_owned();
        if inner == format!("{info}RECORD") {
            continue;
        }
        let size = file.size();
        if size > stage.bytes_left() {
            return Err(fault("is larger than an image may be"));
        }
        stage.spend_bytes(size);
        let executable = file.unix_mode().is_some_and(|mode| mode & 0o111 != 0);
        let (target, is_script) = match inner.strip_prefix(&data) {
            None => (format!("{}/{inner}", python.site), false),
            Some(rest) => match rest.split_once('/') {
                Some(("purelib" | "platlib", rest)) => (format!("{}/{rest}", python.site), false),
                Some(("scripts", rest)) => (format!("/usr/local/bin/{rest}"), true),
                Some(("data", rest)) => (format!("/usr/local/{rest}"), false),
                Some(("headers", rest)) => {
                    (format!("/usr/local/include/python{}/{rest}", python.version), false)
                }
                _ => return Err(fault("is in no known folder of a wheel")),
            },
        };
        let mut hasher = Sha256::new();
        let mode = if is_script || executable { 0o755 } else { 0o644 };
        let meta = Meta { mode, uid: 0, gid: 0, mtime: 0 };
        let clean = stage.name(target.as_bytes())?;
        if is_script {
            let mut bytes = Vec::new();
            file.by_ref().take(MAX_TEXT).read_to_end(&mut bytes).map_err(|error| fail(error.to_string()))?;
            hasher.update(&bytes);
            let bytes = match bytes.strip_prefix(b"#!python") {
                Some(rest) => [b"#!", python.program.as_bytes(), rest].concat(),
                None => bytes,
            };
            stage.file(&clean, meta, bytes.len() as u64, bytes.as_slice())?;
            installed.insert(python.relative(&target), row(&bytes));
        } else {
            let mut tee = Tee { from: &mut file, hasher: &mut hasher };
            stage.file(&clean, meta, size, &mut tee)?;
            // One byte more than declared is one too many; also makes zip check its checksum.
            let mut more = [0];
            if file.read(&mut more).map_err(|error| fail(error.to_string()))? != 0 {
                return Err(fault("is longer than it says"));
            }
            let sum = URL_SAFE_NO_PAD.encode(hasher.clone().finalize());
            installed.insert(python.relative(&target), format!("sha256={sum},{size}"));
        }
        let is_signature = inner == format!("{info}RECORD.jws") || inner == format!("{info}RECORD.p7s");
        let sum = format!("sha256={}", URL_SAFE_NO_PAD.encode(hasher.finalize()));
        if !is_signature && declared.get(&inner) != Some(&sum) {
            return Err(fault("is not what its RECORD says"));
        }
    }
    for (script, module, object) in entry_points(&points) {
        let is_word = |text: &str| text.chars().all(|c| c.is_alphanumeric() || "._-".contains(c));
        if ![&script, &module, &object].iter().all(|text| is_word(text) && !text.is_empty()) {
            return Err(fail(format!("its entry point {script:?} is none")));
        }
        let first = object.split('.').next().unwrap_or_default();
        let text = format!(
            "#!{}\nimport sys\nfrom {module} import {first}\nif __name__ == '__main__':\n    sys.exit({object}())\n",
            python.program
        );
        let target = format!("/usr/local/bin/{script}");
        let clean = stage.name(target.as_bytes())?;
        stage.bytes(&clean, 0o755, text.as_bytes())?;
        installed.insert(python.relative(&target), row(text.as_bytes()));
    }
    let folder = format!("{}/{info}", python.site);
    let installer = stage.name(format!("{folder}INSTALLER").as_bytes())?;
    stage.bytes(&installer, 0o644, b"hotcell\n")?;
    installed.insert(format!("{info}INSTALLER"), row(b"hotcell\n"));
    let mut text = String::new();
    for (path, row) in installed {
        let quoted =
            if path.contains([',', '"']) { format!("\"{}\"", path.replace('"', "\"\"")) } else { path };
        text.push_str(&format!("{quoted},{row}\n"));
    }
    text.push_str(&format!("{info}RECORD,,\n"));
    let record = stage.name(format!("{folder}RECORD").as_bytes())?;
    stage.bytes(&record, 0o644, text.as_bytes())
}

struct Tee<'a, R> {
    from: R,
    hasher: &'a mut Sha256,
}

impl<R: Read> Read for Tee<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.from.read(into)?;
        self.hasher.update(into.get(..count).unwrap_or_default());
        Ok(count)
    }
}

fn row(bytes: &[u8]) -> String {
    format!("sha256={},{}", URL_SAFE_NO_PAD.encode(Sha256::digest(bytes)), bytes.len())
}

/// RECORD: path, hash, size. A path with a comma is quoted.
fn declared(record: &str) -> BTreeMap<String, String> {
    let mut rows = BTreeMap::new();
    for line in record.lines() {
        let mut fields = line.rsplitn(3, ',');
        if let (Some(_), Some(hash), Some(path)) = (fields.next(), fields.next(), fields.next()) {
            let path = match path.strip_prefix('"').and_then(|path| path.strip_suffix('"')) {
                Some(path) => path.replace("\"\"", "\""),
                None => path.to_owned(),
            };
            rows.insert(path, hash.trim_end_matches('=').to_owned());
        }
    }
    rows
}

/// `name = module:object [extra]` of the sections for scripts.
fn entry_points(text: &str) -> Vec<(String, String, String)> {
    let mut section = "";
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name;
        } else if matches!(section, "console_scripts" | "gui_scripts")
            && let Some((name, rest)) = line.split_once('=')
            && let Some((module, object)) = rest.split('[').next().unwrap_or_default().split_once(':')
        {
            found.push((name.trim().to_owned(), module.trim().to_owned(), object.trim().to_owned()));
        }
    }
    found
}
