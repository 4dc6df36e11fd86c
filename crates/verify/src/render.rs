//! A verification as text for people and as JSON for programs.
//!
//! Guarantees: whatever a bundle names is escaped before it gets here or here, so that hostile names can't move a
//! terminal's cursor. Called by `hotcell verify` and `hotcell-verify`.

use crate::anchors::{CheckedNote, Identity};
use crate::dense::range_text;
use crate::finding::Severity;
use crate::verify::{Outcome, Verification};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Reasons of a verdict that the text explains.
const SHOWN_EXPLAINED: usize = 10;
/// Gate 1's violations that the text shows.
const SHOWN_VIOLATIONS: usize = 10;

fn key_text(note: &CheckedNote) -> String {
    note.body.key.as_ref().map_or_else(|| "a key that it does not name".to_owned(), printable)
}

/// A note's key names and origins are any printable text; only the escaping of control characters is ours.
fn printable(text: impl ToString) -> String {
    text.to_string()
        .chars()
        .flat_map(|c| if c.is_control() { c.escape_debug().collect() } else { vec![c] })
        .collect()
}

fn identity_text(note: &CheckedNote) -> String {
    let key = key_text(note);
    match note.identity {
        Identity::Pinned => "signed by a key that you named".to_owned(),
        Identity::Own => format!("signed by your key, {key}"),
        Identity::SameAsCheckpoint => format!("signed by the key of the checkpoint that you gave, {key}"),
        Identity::Unanchored => {
            format!("unanchored: signed by {key}, not compared with any key you trust; name it with --key")
        }
        Identity::None => "no signature on it holds".to_owned(),
    }
}

const fn identity_name(identity: &Identity) -> &'static str {
    match identity {
        Identity::Pinned => "pinned",
        Identity::Own => "own",
        Identity::SameAsCheckpoint => "same_as_checkpoint",
        Identity::Unanchored => "unanchored",
        Identity::None => "none",
    }
}

/// So many of a thing, in words.
pub fn counted(count: u64, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// Lines for people.
pub fn to_text(v: &Verification) -> String {
    let mut out = String::new();
    // Writing to a String can't fail.
    let _ = write_text(v, &mut out);
    out
}

fn write_text(v: &Verification, out: &mut String) -> std::fmt::Result {
    writeln!(out, "bundle     {}", printable(v.bundle.display()))?;
    if let Some(run) = v.run_id() {
        writeln!(out, "run        {}", printable(run))?;
    }
    writeln!(
        out,
        "ledger     {} in {}, head {}",
        counted(v.events, "event"),
        counted(v.checkpoint.height, "block"),
        v.checkpoint.head
    )?;
    for note in v.note.iter().chain(&v.checkpoints) {
        let holds = if note.holds { "holds" } else { "does not hold" };
        let height = note.body.checkpoint.height;
        writeln!(
            out,
            "checkpoint {}: {}, {holds}; {}",
            printable(&note.name),
            counted(height, "block"),
            identity_text(note)
        )?;
        for other in &note.unverified {
            writeln!(
                out,
                "           also signed by {}+{:08x}: not verified",
                printable(&other.name),
                other.id
            )?;
        }
    }
    match v.unanchored_blocks {
        Some(range) => {
            writeln!(out, "unanchored block {}: covered by no checkpoint that holds", range_text(range))?
        }
        None if v.checkpoint.height > 0 => writeln!(out, "anchored   every block")?,
        None => {}
    }
    if v.gate1.is_ok() {
        writeln!(out, "gate 1     ok")?;
    }
    for violation in v.gate1.violations.iter().take(SHOWN_VIOLATIONS) {
        writeln!(out, "gate 1     {violation}")?;
    }
    let violations: u64 = v.gate1.counts.values().sum();
    let shown = u64::try_from(v.gate1.violations.len().min(SHOWN_VIOLATIONS)).unwrap_or(0);
    if violations > shown {
        writeln!(out, "gate 1     and {} more", violations - shown)?;
    }
    let reasons = if v.derived.reasons.is_empty() {
        String::new()
    } else {
        format!(": {}", v.derived.reasons.join(", "))
    };
    writeln!(out, "verdict    {}, as the record gives it{}", v.derived.verdict, printable(reasons))?;
    for why in v.derived.explained.iter().take(SHOWN_EXPLAINED) {
        writeln!(out, "why        {}", printable(why))?;
    }
    for finding in v.findings.list() {
        let mark = match finding.reason.severity() {
            Severity::NotIntact => "BROKEN    ",
            Severity::Incomplete => "INCOMPLETE",
            Severity::Notice => "note      ",
        };
        writeln!(out, "{mark} {}: {}", finding.reason, printable(&finding.detail))?;
    }
    if v.findings.unlisted() > 0 {
        writeln!(out, "           and {}", counted(v.findings.unlisted(), "more finding"))?;
    }
    writeln!(out, "result     {}", v.outcome().as_str().to_uppercase())
}

/// One object for programs.
pub fn to_json(v: &Verification) -> Value {
    let note = |note: &CheckedNote| {
        let signature = |s: &hotcell_ledger::note::NoteSignature| format!("{}+{:08x}", s.name, s.id);
        json!({
            "name": note.name,
            "origin": note.body.origin,
            "height": note.body.checkpoint.height,
            "head": note.body.checkpoint.head.to_hex(),
            "holds": note.holds,
            "identity": identity_name(&note.identity),
            "key": note.body.key.as_ref().map(ToString::to_string),
            "verified": note.verified.iter().map(signature).collect::<Vec<_>>(),
            "unverified": note.unverified.iter().map(signature).collect::<Vec<_>>(),
        })
    };
    let findings: Vec<Value> = v
        .findings
        .list()
        .iter()
        .map(|f| {
            let severity = match f.reason.severity() {
                Severity::NotIntact => "not_intact",
                Severity::Incomplete => "incomplete",
                Severity::Notice => "notice",
            };
            json!({ "reason": f.reason.as_str(), "severity": severity, "detail": f.detail })
        })
        .collect();
    let violations: Vec<Value> = v
        .gate1
        .violations
        .iter()
        .map(|x| json!({ "code": x.code.as_str(), "sequence": x.sequence, "actor": x.actor.get(), "detail": x.detail }))
        .collect();
    json!({
        "bundle": v.bundle.display().to_string(),
        "run_id": v.run_id(),
        "result": v.outcome().as_str().replace(' ', "_"),
        "intact": v.outcome() == Outcome::Intact,
        "exit_code": v.outcome().exit_code(),
        "verdict": v.derived.verdict.as_str(),
        "reasons": v.derived.reasons,
        "explained": v.derived.explained,
        "reported_verdict": v.reported,
        "ledger": {
            "blocks": v.checkpoint.height, "events": v.events, "head": v.checkpoint.head.to_hex(),
            "unanchored_blocks": v.unanchored_blocks.map(|(start, end)| json!([start, end])),
        },
        "note": v.note.as_ref().map(note),
        "checkpoints": v.checkpoints.iter().map(note).collect::<Vec<_>>(),
        "gate1": { "ok": v.gate1.is_ok(), "violations": violations, "unlisted": v.gate1.unlisted() },
        "findings": findings,
        "unlisted_findings": v.findings.unlisted(),
    })
}
