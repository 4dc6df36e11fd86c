//! A build: a recipe becomes a tree, its configuration, and what to say about it.

use crate::busybox::busybox_tree;
use crate::config::{ImageConfig, accounts};
use crate::debian::apply_debian;
use crate::error::ImageError;
use crate::folder;
use crate::limits::Limits;
use crate::oci;
use crate::pip::{self, Pin};
use crate::progress::Progress;
use crate::registry::apply_registry;
use crate::source::Source;
use crate::stage::{Meta, Stage, refuse};
use crate::tree::{Content, Entry, Node, Tree};
use hotcell_policy::{CleanPath, ServiceDraft};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Where the guest mounts something: each must be a directory of the image.
const MOUNT_POINTS: [(&str, u32); 7] = [
    ("/dev", 0o755),
    ("/mnt", 0o755),
    ("/proc", 0o555),
    ("/run", 0o755),
    ("/sys", 0o555),
    ("/tmp", 0o1777),
    ("/workspace", 0o755),
];
/// User and group of the workload.
const AGENT: u32 = 1000;
/// Largest compiled Python file whose header is corrected.
const MAX_PYC: u64 = 16 << 20;
const CLIENT: &str = "/usr/bin/hotcell-request";

/// What an image is built from; kept with it, so that it can be built again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The source.
    pub source: Source,
    /// Debian packages beyond the minimum.
    pub include: Vec<String>,
    /// Another Debian mirror than mmdebstrap's.
    pub mirror: Option<String>,
    /// Python packages that are installed: exactly these artifacts.
    pub pins: Vec<Pin>,
    /// Programs that the machine starts as root, without capabilities, before the first command.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceDraft>,
    /// Whether set-user-id bits stay. The guest mounts its root nosuid either way.
    pub keep_setuid: bool,
}

impl Recipe {
    /// A source and nothing else.
    pub fn new(source: Source) -> Recipe {
        let (include, pins, services) = (Vec::new(), Vec::new(), Vec::new());
        Recipe { source, include, mirror: None, pins, services, keep_setuid: false }
    }
}

/// What a recipe gave.
pub(crate) struct Built {
    pub(crate) tree: Tree,
    pub(crate) config: ImageConfig,
    pub(crate) resolved: Option<String>,
    pub(crate) left_out: BTreeMap<String, u64>,
    /// The recipe that gives the same again: requirements have become pins.
    pub(crate) recipe: Recipe,
}

/// Puts the tree together; `scratch` holds the bytes meanwhile.
pub(crate) fn build(
    recipe: &Recipe,
    requirements: Option<&Path>,
    client: &[u8],
    scratch: &Path,
    limits: Limits,
    progress: &mut dyn Progress,
) -> Result<Built, ImageError> {
    let is_debian = matches!(recipe.source, Source::Debian(_));
    if !is_debian && (!recipe.include.is_empty() || recipe.mirror.is_some()) {
        let why = "packages and a mirror belong to a source debian:SUITE";
        return Err(ImageError::Request(format!("{why}, not to {}", recipe.source)));
    }
    let mut stage = Stage::new(scratch, limits, recipe.keep_setuid)?;
    let mut config = ImageConfig::none();
    let mut resolved = None;
    match &recipe.source {
        Source::Busybox => {
            if requirements.is_some() || !recipe.pins.is_empty() {
                return Err(ImageError::Request("busybox has no python3 that could use wheels".into()));
            }
            let mut tree = busybox_tree()?;
            tree.put(CLIENT, 0o755, Node::File(Content::Bytes(client.to_vec())))?;
            return Ok(Built { tree, config, resolved, left_out: BTreeMap::new(), recipe: recipe.clone() });
        }
        Source::Debian(suite) => {
            apply_debian(&mut stage, suite, &recipe.include, recipe.mirror.as_deref(), progress)?;
        }
        Source::Folder(path) => folder::apply(&mut stage, path, progress)?,
        Source::Oci(..) | Source::DockerArchive(_) | Source::Registry(_) => {
            let applied = match &recipe.source {
                Source::Oci(dir, tag) => oci::layout(&mut stage, dir, tag.as_deref(), progress)?,
                Source::DockerArchive(path) => oci::docker_archive(&mut stage, path, progress)?,
                Source::Registry(reference) => apply_registry(&mut stage, reference, progress)?,
                _ => return Err(ImageError::Request("no such source".into())),
            };
            config = applied.config;
            resolved = Some(applied.resolved);
        }
    }
    let pins = pip::install(&mut stage, requirements, &recipe.pins, progress)?;
    complete(&mut stage, client, &config)?;
    python_headers(&mut stage)?;
    let left_out = &stage.left_out().kinds;
    let left_out = left_out.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect();
    let mut recipe = Recipe { pins, ..recipe.clone() };
    // A tag moves; what was built from is kept by its digest.
    if let (Source::Registry(reference), Some(digest)) = (&recipe.source, &resolved) {
        recipe.source = Source::Registry(reference.pinned(digest));
    }
    Ok(Built { tree: stage.into_tree(), config, resolved, left_out, recipe })
}

/// Adds what every root needs.
fn complete(stage: &mut Stage, client: &[u8], config: &ImageConfig) -> Result<(), ImageError> {
    let clean = |path: &str| CleanPath::clean(path).map_err(|error| refuse(path, error.to_string()));
    for (point, mode) in MOUNT_POINTS {
        let path = clean(point)?;
        match stage.tree().get(&path) {
            Some(Entry { node: Node::Directory, .. }) => continue,
            Some(_) => {
                let why = "the machine mounts something there, so it must be a directory of the image";
                return Err(refuse(point, why.into()));
            }
            None => {}
        }
        let owner = if point == "/workspace" { AGENT } else { 0 };
        stage.directory(&path, Meta { mode, uid: owner, gid: owner, mtime: 0 })?;
    }
    // Docker makes a working directory that is not there; below a mount point it would be hidden.
    if let Some(workdir) = &config.workdir {
        let path = stage.follow(workdir)?;
        let is_hidden =
            MOUNT_POINTS.iter().any(|(point, _)| clean(point).is_ok_and(|point| path.is_within(&point)));
        match stage.tree().get(&path) {
            Some(Entry { node: Node::Directory, .. }) => {}
            Some(_) => return Err(refuse(workdir, "it is the working directory, but a file".into())),
            None if is_hidden => {}
            None => {
                let meta = Meta { mode: 0o755, uid: config.uid, gid: config.gid, mtime: 0 };
                stage.directory(&path, meta)?;
            }
        }
    }
    let place = stage.follow(CLIENT)?;
    stage.bytes(&place, 0o755, client)?;
    account(
        stage,
        "/etc/passwd",
        2,
        "x:1000:1000:agent:/workspace:/bin/sh",
        "root:x:0:0:root:/root:/bin/sh\n",
    )?;
    account(stage, "/etc/group", 2, "x:1000:", "root:x:0:\n")
}

/// Adds the agent to an accounts file where nobody has its number.
fn account(stage: &mut Stage, path: &str, field: usize, rest: &str, empty: &str) -> Result<(), ImageError> {
    let lines = accounts(stage, path).map_err(|why| refuse(path, why))?;
    if lines.iter().any(|line| line.get(field).is_some_and(|id| *id == AGENT.to_string())) {
        return Ok(());
    }
    let is_taken = lines.iter().any(|line| line.first().is_some_and(|name| name == "agent"));
    let name = if is_taken { "hotcell-agent" } else { "agent" };
    let (place, mut bytes) = match stage.find(path) {
        Some((place, Entry { node: Node::File(content), .. })) => (place, content.read(1 << 20)?),
        _ => (stage.follow(path)?, empty.as_bytes().to_vec()),
    };
    if bytes.last().is_some_and(|last| *last != b'\n') {
        bytes.push(b'\n');
    }
    bytes.extend(format!("{name}:{rest}\n").as_bytes());
    stage.bytes(&place, 0o644, &bytes)
}

/// Python takes a compiled file only if the time in it is its source's. All times
/// of an image are zero, so what was valid is given the time zero; else every
/// start of an interpreter would compile its library anew, and could not keep it.
fn python_headers(stage: &mut Stage) -> Result<(), ImageError> {
    let mut valid = Vec::new();
    for (path, entry) in stage.tree().iter() {
        let Node::File(content) = &entry.node else { continue };
        let Some((folder, name)) = path.as_str().rsplit_once("/__pycache__/") else { continue };
        let Some((module, _)) = name.strip_suffix(".pyc").and_then(|name| name.split_once('.')) else {
            continue;
        };
        let source = CleanPath::clean(&format!("{folder}/{module}.py"));
        let Some(&mtime) = source.ok().and_then(|source| stage.python.get(&source)) else { continue };
        if content.len()? > MAX_PYC {
            continue;
        }
        // PEP 552: magic, flags (0: by time), time, size of the source.
        let head = content.read(12)?;
        let time = (mtime as u32).to_le_bytes();
        if head.get(4..8) == Some(&[0; 4]) && head.get(8..12) == Some(&time) && mtime != 0 {
            valid.push((path.clone(), content.clone()));
        }
    }
    for (path, content) in valid {
        let mut bytes = content.read(MAX_PYC)?;
        if let Some(time) = bytes.get_mut(8..12) {
            time.fill(0);
        }
        let slice = stage.keep(bytes.as_slice()).map_err(|error| refuse(path.as_str(), error.to_string()))?;
        stage.replace(&path, slice);
    }
    Ok(())
}
