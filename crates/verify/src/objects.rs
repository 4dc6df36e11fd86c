//! The objects: each whole, each named, and those that an event needs there.
//!
//! Which names need an object: `argv` of a PROCESS_SPAWN (unless it is zero: not known) and `args` of a host fact. A
//! `binary`, a `result`, a file's `before` and `after` are measurements: their objects may be there or not.
//! What names an object: any digest in an event, any 64 hex digits as a word in a capability decision's reason, and any
//! string of 64 hex digits in the JSON of an object that host facts and host spawns name.
//! Guarantees: memory is bounded by the number of files in `objects/`, never by what events name. An object that is read
//! for a fact is hashed again as it is read. Called by [`crate::verify`]; the verdict's fold reads through [`ObjectSource`].

use crate::finding::{Findings, Reason};
use hotcell_ledger::bundle::{BundleDir, FileFault};
use hotcell_ledger::{Digest, Event, Payload};
use std::collections::BTreeMap;

/// Longest object that is read for names: the longest fact is 64 KiB, and a spec holds its policies.
const MAX_SCANNED_LEN: usize = 4 << 20;

/// Why an object can't be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectFault {
    /// It is not there.
    #[error("there is no object {0}")]
    Missing(Digest),
    /// It has another digest.
    #[error("object {0} does not have the digest that it is named by")]
    Altered(Digest),
    /// It can't be read.
    #[error("object {0} can't be read")]
    File(Digest, #[source] FileFault),
}

/// Where a fold gets objects from.
pub trait ObjectSource {
    /// The object's bytes, at most `cap` of them, with the digest that it is named by.
    fn object(&self, name: &Digest, cap: usize) -> Result<Vec<u8>, ObjectFault>;
}

#[derive(Clone, Copy, Default)]
struct Known {
    named: bool,
    scanned: bool,
}

/// The objects of a bundle, and what was seen of them.
pub(crate) struct Objects<'a> {
    dir: &'a BundleDir,
    known: BTreeMap<Digest, Known>,
    missing: Findings,
}

impl ObjectSource for Objects<'_> {
    fn object(&self, name: &Digest, cap: usize) -> Result<Vec<u8>, ObjectFault> {
        match self.dir.read(&BundleDir::object_path(name), cap) {
            Ok(bytes) if Digest::of(&bytes) == *name => Ok(bytes),
            Ok(_) => Err(ObjectFault::Altered(*name)),
            Err(FileFault::Missing) => Err(ObjectFault::Missing(*name)),
            Err(fault) => Err(ObjectFault::File(*name, fault)),
        }
    }
}

impl<'a> Objects<'a> {
    pub(crate) fn new(dir: &'a BundleDir, names: &[Digest]) -> Objects<'a> {
        let known = names.iter().map(|name| (*name, Known::default())).collect();
        Objects { dir, known, missing: Findings::default() }
    }

    /// Hashes each object.
    pub(crate) fn check_content(&self, findings: &mut Findings) {
        for name in self.known.keys() {
            match self.dir.measure(&BundleDir::object_path(name)) {
                Ok((digest, _)) if digest == *name => {}
                Ok((digest, _)) => {
                    findings
                        .add(Reason::ObjectAltered, format!("objects/{name} has the content of {digest}"));
                }
                Err(fault) => findings.add(Reason::FileStrange, format!("objects/{name} {fault}")),
            }
        }
    }

    /// Takes what an event names.
    pub(crate) fn observe(&mut self, event: &Event) {
        let is_host = event.actor.is_host_band();
        match &event.payload {
            Payload::ProcessSpawn { binary, argv, .. } => {
                self.name(binary);
                if !argv.is_zero() {
                    self.need(argv, event, "the command line");
                }
                if is_host {
                    self.scan(argv);
                }
            }
            Payload::ToolCall { tool, args, result } => {
                self.name(result);
                if is_host && tool.as_str().starts_with("hotcell.") {
                    self.need(args, event, tool.as_str());
                    self.scan(args);
                } else {
                    self.name(args);
                }
            }
            Payload::FileMutation { before, after, .. } => {
                self.name(before);
                self.name(after);
            }
            Payload::CapabilityRequest { reason, .. } => {
                for word in reason.as_str().split(' ') {
                    if let Some(name) = Digest::from_hex(word) {
                        self.name(&name);
                    }
                }
            }
            _ => {}
        }
    }

    fn name(&mut self, name: &Digest) {
        if let Some(known) = self.known.get_mut(name) {
            known.named = true;
        }
    }

    fn need(&mut self, name: &Digest, event: &Event, what: &str) {
        self.name(name);
        if !self.known.contains_key(name) {
            // The tool's name is host evidence in an honest record, and anything in another.
            let detail = format!("event {} needs objects/{name}: {}", event.sequence, what.escape_debug());
            self.missing.add(Reason::ObjectMissing, detail);
        }
    }

    /// Takes the names inside an object, once.
    fn scan(&mut self, name: &Digest) {
        match self.known.get_mut(name) {
            Some(known) if !known.scanned => known.scanned = true,
            _ => return,
        }
        // Whatever can't be read is a finding of `check_content`.
        let Ok(bytes) = self.object(name, MAX_SCANNED_LEN) else { return };
        for string in bytes.split(|byte| *byte == b'"') {
            if let Some(inner) = core::str::from_utf8(string).ok().and_then(Digest::from_hex) {
                self.name(&inner);
            }
        }
    }

    /// What is missing, and what nothing names.
    pub(crate) fn finish(self, run_ended: bool, findings: &mut Findings) {
        findings.append(self.missing);
        let unnamed: Vec<&Digest> =
            self.known.iter().filter(|(_, known)| !known.named).map(|(name, _)| name).collect();
        if run_ended {
            for name in unnamed {
                findings
                    .add(Reason::ObjectUnnamed, format!("objects/{name} is named by no event and no fact"));
            }
        } else if !unnamed.is_empty() {
            let detail = format!("{} objects are named by no event that is left", unnamed.len());
            findings.add(Reason::ObjectUnnamedYet, detail);
        }
    }
}
