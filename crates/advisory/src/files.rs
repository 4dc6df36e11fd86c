//! L6 for files: does what the guest tells of its files fit what the host saw on the disk?
//!
//! The host's account are the `FILE_MUTATION`s of its own band, read off the workspace disk; the
//! guest's are those of guest actors. Compared by path, below `/workspace` alone, since the host reads no other
//! disk.
//!
//! | finding | when |
//! |---|---|
//! | files omitted | the guest tells of files, and the host saw changes of others |
//! | files invented | the guest tells of changes of which the host saw none, and did not tell that they went again |
//!
//! A guest that tells of no file conceals nothing: it is not asked to. Where the host only counted
//! changes, or there are more paths than are kept, nothing is called invented.
//! Paths kept: [`MAX_PATHS`] of each account. At most one finding of each kind.

use crate::{Finding, FindingKind, Layer};
use hotcell_ledger::{Event, FileOp, Payload};
use std::collections::BTreeSet;

/// Paths of each account that are kept.
pub const MAX_PATHS: usize = 65_536;
/// Paths that a finding names.
const NAMED: usize = 5;
/// Where the disk that the host reads lies.
const DISK: &str = "/workspace/";
/// What the host records where it lists changes no longer.
const COUNTED: &str = "hotcell.mutations_counted";

/// Both accounts of one run's files.
#[derive(Clone, Debug, Default)]
pub struct Files {
    seen: BTreeSet<String>,
    told: BTreeSet<String>,
    /// Told to have gone.
    told_gone: BTreeSet<String>,
    /// Not every change has its path here.
    incomplete: bool,
}

impl Files {
    /// Before the first event.
    pub fn new() -> Files {
        Files::default()
    }

    /// Takes in one event.
    pub fn observe(&mut self, event: &Event) {
        match &event.payload {
            Payload::FileMutation { op, path, .. } if path.as_str().starts_with(DISK) => {
                let host = event.actor.is_host_band();
                let gone = !host && *op == FileOp::Delete;
                let account = if host { &mut self.seen } else { &mut self.told };
                if account.len() >= MAX_PATHS {
                    self.incomplete = true;
                    return;
                }
                account.insert(path.as_str().to_owned());
                if gone {
                    self.told_gone.insert(path.as_str().to_owned());
                }
            }
            Payload::ToolCall { tool, .. } if event.actor.is_host_band() => {
                self.incomplete |= tool.as_str() == COUNTED;
            }
            _ => {}
        }
    }

    /// Where the two accounts part.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        if self.told.is_empty() {
            return findings;
        }
        let mut add = |kind, paths: Vec<&String>, words: &str| {
            if let Some(first) = paths.first() {
                let named: Vec<&str> = paths.iter().take(NAMED).map(|path| path.as_str()).collect();
                let more = paths.len().saturating_sub(named.len());
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                let detail = format!("{words}: {}{more}", named.join(", "));
                findings.push(Finding { layer: Layer::L6, kind, subject: (*first).clone(), detail });
            }
        };
        // A directory on the way to a told file is told with it.
        let on_the_way = |path: &String| {
            let below = format!("{path}/");
            self.told.range(below.clone()..).next().is_some_and(|told| told.starts_with(&below))
        };
        let omitted =
            self.seen.iter().filter(|path| !self.told.contains(*path) && !on_the_way(path)).collect();
        add(FindingKind::FilesOmitted, omitted, "the host saw changes that the guest does not tell of");
        if !self.incomplete {
            let invented =
                self.told.iter().filter(|path| !self.seen.contains(*path) && !self.told_gone.contains(*path));
            let words = "the guest tells of changes that the host did not see on the disk";
            add(FindingKind::FilesInvented, invented.collect(), words);
        }
        findings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_ledger::{ActorId, Digest, NfcString};

    fn account(host: &[&str], guest: &[(FileOp, &str)]) -> Files {
        let mut files = Files::new();
        let mut observe = |actor, op, path: &str| {
            let digest = Digest::of(b"x");
            let (before, after) =
                if op == FileOp::Delete { (digest, Digest::ZERO) } else { (Digest::ZERO, digest) };
            let payload = Payload::FileMutation { op, path: NfcString::new(path), before, after };
            files.observe(&Event { sequence: 0, timestamp_ns: 0, actor, parent: None, payload });
        };
        host.iter().for_each(|path| observe(ActorId::HOST, FileOp::Create, path));
        guest.iter().for_each(|(op, path)| observe(ActorId::FIRST_GUEST, *op, path));
        files
    }

    fn kinds(files: &Files) -> Vec<(FindingKind, String)> {
        files.findings().into_iter().map(|finding| (finding.kind, finding.subject)).collect()
    }

    #[test]
    fn accounts_that_agree_or_are_not_given_find_nothing() {
        let create = |path| (FileOp::Create, path);
        for (host, guest) in [
            (&["/workspace/a"][..], &[][..]),
            (&["/workspace/a"], &[create("/workspace/a")]),
            (&["/workspace/d", "/workspace/d/a"], &[create("/workspace/d/a")]),
            (&["/workspace/a"], &[create("/workspace/a"), create("/tmp/b")]),
            (
                &["/workspace/a"],
                &[create("/workspace/a"), create("/workspace/t"), (FileOp::Delete, "/workspace/t")],
            ),
            (&[], &[create("/etc/passwd")]),
        ] {
            assert_eq!(kinds(&account(host, guest)), [], "{host:?} {guest:?}");
        }
    }

    #[test]
    fn what_is_omitted_and_what_is_invented_is_said() {
        let files = account(
            &["/workspace/a", "/workspace/hidden"],
            &[(FileOp::Create, "/workspace/a"), (FileOp::Create, "/workspace/none")],
        );
        assert_eq!(
            kinds(&files),
            [
                (FindingKind::FilesOmitted, "/workspace/hidden".to_owned()),
                (FindingKind::FilesInvented, "/workspace/none".to_owned()),
            ]
        );
    }

    #[test]
    fn nothing_is_invented_where_the_host_only_counted() {
        let mut files = account(&["/workspace/a"], &[(FileOp::Create, "/workspace/b")]);
        let payload =
            Payload::ToolCall { tool: NfcString::new(COUNTED), args: Digest::ZERO, result: Digest::ZERO };
        files.observe(&Event { sequence: 0, timestamp_ns: 0, actor: ActorId::HOST, parent: None, payload });
        assert_eq!(kinds(&files), [(FindingKind::FilesOmitted, "/workspace/a".to_owned())]);
    }
}
