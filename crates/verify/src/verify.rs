//! Verifies one bundle: puts the checks together and sums them up.
//!
//! Guarantees: see the crate. Every check runs, whatever the others found, so that one tampering does not hide another.
//! Called by `hotcell verify`, `hotcell-verify` and `hotcell report`.

use crate::anchors::{self, CheckedNote, Keys};
use crate::chain::{self, Chain};
use crate::files;
use crate::finding::{Findings, Reason, Severity};
use crate::objects::{ObjectSource as _, Objects};
use crate::render::counted;
use crate::verdict::{Derived, Judging};
use hotcell_decide::{Direction, HostFact, Verdict};
use hotcell_ledger::bundle::{BundleDir, FileFault, LEDGER, MAX_FILES, NOTE, OBJECTS};
use hotcell_ledger::note::MAX_NOTE_LEN;
use hotcell_ledger::{Checkpoint, Digest, Event, GateReport, Payload, VerifierKey};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// Longest report that is read; it is parsed for one field, in flat memory.
const MAX_REPORT_LEN: usize = 16 << 20;
/// Longest object of a fact: the decider's own bound.
const MAX_FACT_LEN: usize = 64 * 1024;
/// The spec's file name.
const SPEC: &[u8] = b"spec.json";
/// The report's file name.
const REPORT: &[u8] = b"report.json";
/// What the reaper leaves in a record whose `hotcell` was killed.
const REAPED: &[u8] = b"reaped.json";
/// Records that are named of a folder of them.
const SHOWN_RECORDS: usize = 5;

/// What to compare a bundle with.
#[derive(Debug, Default)]
pub struct Options {
    /// Checkpoint notes that were kept elsewhere, as bytes, each with a name to speak of it by.
    pub checkpoints: Vec<(String, Vec<u8>)>,
    /// Keys that notes must be signed with; with none, see [`crate::Identity`].
    pub trusted_keys: Vec<VerifierKey>,
    /// The caller's own key, to be recognised; not demanded.
    pub own_key: Option<VerifierKey>,
}

/// Why a bundle was not verified at all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// There is no such directory.
    #[error("{} is not a bundle: give the directory that a run left", .0.display())]
    NoBundle(PathBuf, #[source] io::Error),
    /// The directory holds nothing of a record.
    #[error("nothing of a record lies in {}: give the directory that a run left", .0.display())]
    NothingOfIt(PathBuf),
    /// The directory is one in which records lie.
    #[error("{} is a folder of {}: {names}. Give one of them", bundle.display(), counted(*count, "record"))]
    FolderOfRecords {
        /// What was given.
        bundle: PathBuf,
        /// How many there are.
        count: u64,
        /// Some of them.
        names: String,
    },
    /// The disk failed.
    #[error("failed to read the bundle {}", .0.display())]
    Io(PathBuf, #[source] io::Error),
}

/// What all the findings come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The bundle is what the run left.
    Intact,
    /// It is not.
    NotIntact,
    /// The run has no end on record; nothing shows that what there is was altered.
    Incomplete,
}

impl Outcome {
    /// What a command exits with.
    pub const fn exit_code(self) -> u8 {
        match self {
            Outcome::Intact => 0,
            Outcome::NotIntact => 1,
            Outcome::Incomplete => 3,
        }
    }

    /// In words.
    pub const fn as_str(self) -> &'static str {
        match self {
            Outcome::Intact => "intact",
            Outcome::NotIntact => "not intact",
            Outcome::Incomplete => "incomplete",
        }
    }
}

/// What was found about a bundle.
#[derive(Debug)]
#[must_use]
pub struct Verification {
    /// The bundle.
    pub bundle: PathBuf,
    /// All that is wrong.
    pub findings: Findings,
    /// The verdict that the record gives.
    pub derived: Derived,
    /// The verdict that `report.json` states.
    pub reported: Option<String>,
    /// Gate 1 over all events.
    pub gate1: GateReport,
    /// The head of the whole blocks.
    pub checkpoint: Checkpoint,
    /// Events in whole blocks.
    pub events: u64,
    /// The bundle's own note.
    pub note: Option<CheckedNote>,
    /// The checkpoints that were given.
    pub checkpoints: Vec<CheckedNote>,
    /// Blocks past the last checkpoint that holds, half-open; `None` when all are covered.
    pub unanchored_blocks: Option<(u64, u64)>,
}

impl Verification {
    /// What the findings come to.
    pub fn outcome(&self) -> Outcome {
        match self.findings.worst() {
            None | Some(Severity::Notice) => Outcome::Intact,
            Some(Severity::Incomplete) => Outcome::Incomplete,
            Some(Severity::NotIntact) => Outcome::NotIntact,
        }
    }

    /// The run's id, as the bundle's note has it.
    pub fn run_id(&self) -> Option<&str> {
        self.note.as_ref().and_then(|note| note.body.origin.strip_prefix("hotcell/"))
    }

    /// Proof that the bundle is intact, for whoever demands it; else the verification back.
    pub fn into_verified(self) -> Result<VerifiedBundle, Box<Verification>> {
        if self.outcome() == Outcome::Intact { Ok(VerifiedBundle(self)) } else { Err(Box::new(self)) }
    }
}

/// A bundle that was found intact.
#[derive(Debug)]
pub struct VerifiedBundle(Verification);

impl VerifiedBundle {
    /// What was found.
    pub fn verification(&self) -> &Verification {
        &self.0
    }
}

/// Verifies a bundle.
pub fn verify_bundle(bundle: &Path, options: &Options) -> Result<Verification, VerifyError> {
    let io_fault = |error| VerifyError::Io(bundle.to_owned(), error);
    let dir = BundleDir::open(bundle).map_err(|error| VerifyError::NoBundle(bundle.to_owned(), error))?;
    check_asked(bundle).map_err(io_fault)?.map_or(Ok(()), Err)?;
    let listing = dir.list().map_err(io_fault)?;
    let mut findings = Findings::default();
    files::check_strange(&listing, &mut findings);

    let (mut note, mut checkpoints) = open_notes(&dir, options, &mut findings);
    let wanted: Vec<u64> = note.iter().chain(&checkpoints).map(|note| note.body.checkpoint.height).collect();

    let ledger = match dir.open_file(LEDGER.as_bytes(), u64::MAX) {
        Ok((file, _)) => Some(file),
        Err(FileFault::Missing) => {
            findings.add(Reason::LedgerDeleted, format!("there is no {LEDGER}"));
            None
        }
        Err(FileFault::Io(error)) => return Err(io_fault(error)),
        Err(fault) => {
            findings.add(Reason::FileStrange, format!("{LEDGER} {fault}"));
            None
        }
    };
    let objects = Objects::new(&dir, &listing.objects);
    objects.check_content(&mut findings);
    drop(objects);
    let record = Record::read(ledger.as_ref(), &wanted, || Objects::new(&dir, &listing.objects));
    let Record { chain, gate1, objects, derived, spec, copied } = record.map_err(io_fault)?;

    let exists = ledger.is_some();
    note.iter_mut()
        .chain(&mut checkpoints)
        .for_each(|note| anchors::compare(note, &chain, exists, &mut findings));
    let anchored =
        note.iter().chain(&checkpoints).filter(|note| note.holds).map(|n| n.body.checkpoint.height).max();
    let anchored = anchored.unwrap_or(0);
    check_end(&chain, &gate1, note.as_ref(), dir.open_file(NOTE.as_bytes(), u64::MAX).is_ok(), &mut findings);
    if let Some(note) = &note {
        files::check(&dir, &listing, &note.body, &mut findings);
        for given in checkpoints.iter().filter(|given| given.body.origin != note.body.origin) {
            let origin = (given.body.origin.escape_debug(), note.body.origin.escape_debug());
            findings.add(
                Reason::OtherRun,
                format!("{} is of {}, the bundle of {}", given.name, origin.0, origin.1),
            );
        }
    }
    objects.finish(chain.ended, &mut findings);
    if !chain.ended && listing.files.iter().any(|path| path == REAPED) {
        let why = "reaped.json says that `hotcell` itself was killed, and what it left was ended later";
        findings.add(Reason::Reaped, why);
    }
    // In a record without its end the fact may be lost that the file had.
    if chain.ended {
        files::check_copies(&dir, &listing, &copied, &mut findings);
    }
    check_spec(&dir, spec, &mut findings);
    let reported = check_verdict(&dir, &derived, &mut findings);

    let checkpoint = chain.checkpoint();
    let events = chain.events;
    let unanchored_blocks = (anchored < chain.blocks).then_some((anchored, chain.blocks));
    let mut all = chain.findings;
    all.append(findings);
    Ok(Verification {
        bundle: bundle.to_owned(),
        findings: all,
        derived,
        reported,
        gate1,
        checkpoint,
        events,
        note,
        checkpoints,
        unanchored_blocks,
    })
}

/// Why the directory is not a record at all, not even one that lost its ledger.
fn check_asked(bundle: &Path) -> io::Result<Option<VerifyError>> {
    if is_record(bundle) {
        return Ok(None);
    }
    let mut names = BTreeSet::new();
    let mut count = 0;
    for entry in std::fs::read_dir(bundle)?.take(MAX_FILES) {
        let entry = entry?;
        if entry.file_type()?.is_dir() && is_record(&entry.path()) {
            count += 1;
            names.insert(entry.file_name().to_string_lossy().escape_debug().to_string());
            if names.len() > SHOWN_RECORDS {
                names.pop_last();
            }
        }
    }
    let bundle = bundle.to_owned();
    if count == 0 {
        return Ok(Some(VerifyError::NothingOfIt(bundle)));
    }
    let more = if count > names.len() as u64 { ", …" } else { "" };
    let names = names.into_iter().collect::<Vec<_>>().join(", ") + more;
    Ok(Some(VerifyError::FolderOfRecords { bundle, count, names }))
}

/// Whether a directory has anything that only a record has.
fn is_record(dir: &Path) -> bool {
    let names = [LEDGER.as_bytes(), NOTE.as_bytes(), SPEC, REPORT, OBJECTS.as_bytes()];
    names.iter().any(|name| dir.join(OsStr::from_bytes(name)).symlink_metadata().is_ok())
}

fn open_notes(
    dir: &BundleDir,
    options: &Options,
    findings: &mut Findings,
) -> (Option<CheckedNote>, Vec<CheckedNote>) {
    let mut keys = Keys { pinned: &options.trusted_keys, own: options.own_key.as_ref(), of_checkpoints: &[] };
    let checkpoints: Vec<CheckedNote> = options
        .checkpoints
        .iter()
        .filter_map(|(name, bytes)| anchors::open(name, bytes, &keys, findings))
        .collect();
    let of_checkpoints: Vec<VerifierKey> = checkpoints
        .iter()
        .filter(|note| !note.verified.is_empty())
        .filter_map(|note| note.body.key.clone())
        .collect();
    keys.of_checkpoints = &of_checkpoints;
    let note = match dir.read(NOTE.as_bytes(), MAX_NOTE_LEN) {
        Ok(bytes) => anchors::open(NOTE, &bytes, &keys, findings),
        Err(FileFault::Missing) => None,
        Err(fault) => {
            findings.add(Reason::NoteUnreadable, format!("{NOTE} {fault}"));
            None
        }
    };
    (note, checkpoints)
}

/// What the events gave.
struct Record<'a> {
    chain: Chain,
    gate1: GateReport,
    objects: Objects<'a>,
    derived: Derived,
    /// What the `hotcell.spec` fact is about.
    spec: Option<Digest>,
    /// What was copied out.
    copied: files::Copied,
}

/// What is read of a report.
#[derive(Deserialize)]
struct Stated {
    verdict: Option<String>,
}

impl<'a> Record<'a> {
    /// Reads the events; again, up to the last whole block, where the file ends inside one: an unfinished block's events
    /// are no part of the record.
    fn read(
        ledger: Option<&File>,
        wanted: &[u64],
        objects: impl Fn() -> Objects<'a>,
    ) -> io::Result<Record<'a>> {
        let mut first: Option<Chain> = None;
        loop {
            let limit = first.as_ref().and_then(|chain| chain.tail).map_or(u64::MAX, |tail| tail.offset);
            let mut record = Record {
                chain: Chain::default(),
                gate1: GateReport::default(),
                objects: objects(),
                derived: Derived::default(),
                spec: None,
                copied: files::Copied::new(),
            };
            let mut judging = Judging::default();
            let chain = match ledger {
                None => Chain::default(),
                Some(mut file) => {
                    io::Seek::rewind(&mut file)?;
                    chain::read(file.take(limit), wanted, |event| {
                        record.objects.observe(event);
                        judging.event(event, &record.objects);
                        record.note_spec(event);
                        record.note_copy(event);
                    })?
                }
            };
            let cut = chain.tail.is_some_and(|tail| tail.whole_events > 0);
            if first.is_none() && cut {
                first = Some(chain);
                continue;
            }
            record.chain = first.unwrap_or(chain);
            (record.derived, record.gate1) = judging.finish();
            return Ok(record);
        }
    }

    fn note_copy(&mut self, event: &Event) {
        if let Payload::ToolCall { tool, args, .. } = &event.payload
            && event.actor.is_host_band()
            && tool.as_str() == "hotcell.copied"
            && self.copied.len() < MAX_FILES
            && let Ok(bytes) = self.objects.object(args, MAX_FACT_LEN)
            && let Ok(HostFact::Copied { direction: Direction::Out, path, digest, .. }) =
                HostFact::from_object(&bytes)
        {
            self.copied.insert(path.trim_start_matches('/').as_bytes().to_vec(), digest);
        }
    }

    fn note_spec(&mut self, event: &Event) {
        if let Payload::ToolCall { tool, result, .. } = &event.payload
            && event.actor.is_host_band()
            && tool.as_str() == "hotcell.spec"
        {
            self.spec = Some(*result);
        }
    }
}

fn check_end(
    chain: &Chain,
    gate1: &GateReport,
    note: Option<&CheckedNote>,
    note_exists: bool,
    out: &mut Findings,
) {
    use hotcell_ledger::Code;
    if gate1.count(Code::NoRunBegin) > 0 {
        out.add(Reason::NoRunBegin, "the ledger does not open with RUN_BEGIN");
    }
    for violation in gate1.violations.iter().filter(|v| v.code == Code::NestedRunMarker) {
        out.add(Reason::RunMarkerInside, format!("event {}: {}", violation.sequence, violation.detail));
    }
    if !chain.ended {
        out.add(
            Reason::NoClosingMarker,
            "the ledger does not close with RUN_END: the run did not end, or its end is lost",
        );
        return;
    }
    match note {
        None if !note_exists => {
            out.add(
                Reason::NoteMissing,
                format!("the run ended and there is no {NOTE}: nothing shows that this is its record"),
            );
        }
        Some(note) if note.holds && note.body.checkpoint.height < chain.blocks => {
            let detail = format!("{NOTE} covers {} of {} blocks", note.body.checkpoint.height, chain.blocks);
            out.add(Reason::NotCovered, detail);
        }
        _ => {}
    }
}

fn check_spec(dir: &BundleDir, named: Option<Digest>, findings: &mut Findings) {
    let Some(named) = named else { return };
    match dir.measure(SPEC) {
        Ok((digest, _)) if digest == named => {}
        Ok(_) => findings.add(Reason::SpecDisagrees, "spec.json is not the one that the ledger names"),
        Err(fault) => {
            findings.add(Reason::SpecDisagrees, format!("spec.json, which the ledger names, {fault}"))
        }
    }
}

/// Compares what is stated about the verdict with what the record gives; returns what the report states.
fn check_verdict(dir: &BundleDir, derived: &Derived, out: &mut Findings) -> Option<String> {
    let agrees = |said: &str| said.eq_ignore_ascii_case(derived.verdict.as_str());
    let disagrees = |who: &str, said: &str| {
        let said: String = said.chars().take(40).flat_map(char::escape_debug).collect();
        format!("{who} says {said:?}, and the record gives {}", derived.verdict)
    };
    // Without its end the record gives no verdict that its own could agree with: a crash may come between the two.
    if derived.verdict != Verdict::Incomplete && !derived.agrees_with_record {
        let detail =
            format!("the recorded hotcell.verdict is not {}, which the record gives", derived.verdict);
        out.add(Reason::VerdictDisagrees, detail);
    }
    let bytes = match dir.read(REPORT, MAX_REPORT_LEN) {
        Ok(bytes) => bytes,
        // The note knows whether there should be one.
        Err(FileFault::Missing) => return None,
        Err(fault) => {
            out.add(Reason::ReportUnreadable, format!("report.json {fault}"));
            return None;
        }
    };
    match serde_json::from_slice::<Stated>(&bytes) {
        Ok(Stated { verdict: Some(said) }) => {
            if !agrees(&said) {
                out.add(Reason::VerdictDisagrees, disagrees("report.json", &said));
            }
            Some(said)
        }
        Ok(Stated { verdict: None }) => {
            out.add(Reason::ReportUnreadable, "report.json states no verdict");
            None
        }
        Err(error) => {
            out.add(
                Reason::ReportUnreadable,
                format!("report.json is not the JSON that it should be: {error}"),
            );
            None
        }
    }
}
