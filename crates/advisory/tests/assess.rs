//! Fingerprint and drift over real, closed ledgers.

use hotcell_advisory::{
    Finding, FindingKind, Fingerprint, FingerprintDraft, FingerprintError, Layer, assess,
};
use hotcell_ledger::{ActorId, Cadence, Capability, ClosedLedger, Digest, LedgerWriter, NfcString, Payload};
use proptest::prelude::*;
use std::path::Path;

const MS: u64 = 1_000_000;

/// Who says what of which capability, and how many milliseconds after the last.
type Line = (Who, Capability, bool, u64);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    Host,
    Guest,
}
use Who::{Guest, Host};

fn ledger(dir: &Path, lines: &[Line]) -> ClosedLedger {
    let count = std::fs::read_dir(dir).unwrap().count();
    let mut writer = LedgerWriter::create(dir.join(format!("{count}.ames")), Cadence::default()).unwrap();
    let mut now = 1000 * MS + count as u64;
    let spawn =
        || Payload::ProcessSpawn { binary: Digest::ZERO, argv: Digest::ZERO, cwd: NfcString::new("/") };
    writer.append(ActorId::HOST, None, Payload::RunBegin, now).unwrap();
    writer.append(ActorId::HOST, None, spawn(), now).unwrap();
    writer.append(ActorId::FIRST_GUEST, Some(ActorId::HOST), spawn(), now).unwrap();
    for (who, capability, granted, after_ms) in lines {
        now += after_ms * MS;
        let (actor, parent) = match who {
            Host => (ActorId::HOST, None),
            Guest => (ActorId::FIRST_GUEST, Some(ActorId::HOST)),
        };
        let payload = Payload::CapabilityRequest {
            capability: *capability,
            granted: *granted,
            reason: NfcString::new("why"),
        };
        writer.append(actor, parent, payload, now).unwrap();
    }
    for actor in [ActorId::FIRST_GUEST, ActorId::HOST] {
        writer.append(actor, None, Payload::ProcessExit { code: 0 }, now).unwrap();
    }
    writer.append(ActorId::HOST, None, Payload::RunEnd, now).unwrap();
    writer.close().unwrap()
}

fn kinds(findings: &[Finding]) -> Vec<(FindingKind, &str)> {
    findings.iter().map(|finding| (finding.kind, finding.subject.as_str())).collect()
}

fn drift(lines: &[Line]) -> Vec<(FindingKind, String)> {
    let dir = tempfile::tempdir().unwrap();
    let findings = assess(&ledger(dir.path(), lines), None).unwrap();
    assert!(findings.iter().all(|finding| finding.layer == Layer::L6));
    findings.into_iter().map(|finding| (finding.kind, finding.subject)).collect()
}

use Capability::{FileWrite, NetEgress, ProcessSpawn};

#[test]
fn an_honest_story_fits() {
    assert!(drift(&[]).is_empty());
    let told = [
        (Host, FileWrite, true, 1),
        (Guest, FileWrite, true, 1),
        (Guest, NetEgress, false, 1),
        (Host, NetEgress, false, 1),
    ];
    assert!(drift(&told).is_empty(), "late or early, it is the same story");
}

#[test]
fn a_concealed_narrative_is_unnarrated() {
    let concealed = [(Host, FileWrite, true, 1), (Guest, FileWrite, true, 1), (Host, NetEgress, false, 1)];
    assert_eq!(drift(&concealed), [(FindingKind::Unnarrated, "NET_EGRESS".into())]);
    let some = [(Host, NetEgress, false, 1), (Guest, NetEgress, false, 1), (Host, NetEgress, false, 1)];
    assert_eq!(drift(&some), [(FindingKind::Unnarrated, "NET_EGRESS".into())]);
}

#[test]
fn an_invented_narrative_is_unconfirmed() {
    assert_eq!(drift(&[(Guest, NetEgress, true, 1)]), [(FindingKind::Unconfirmed, "NET_EGRESS".into())]);
}

#[test]
fn another_outcome_is_a_mismatch() {
    let lie = [(Host, NetEgress, false, 1), (Guest, NetEgress, true, 1)];
    assert_eq!(drift(&lie), [(FindingKind::OutcomeMismatch, "NET_EGRESS".into())]);
    let both = [(Host, FileWrite, false, 1), (Host, FileWrite, false, 1), (Guest, FileWrite, true, 1)];
    assert_eq!(
        drift(&both),
        [(FindingKind::Unnarrated, "FILE_WRITE".into()), (FindingKind::OutcomeMismatch, "FILE_WRITE".into())]
    );
    let near = [(Host, FileWrite, false, 1), (Host, FileWrite, true, 1), (Guest, FileWrite, true, 1)];
    assert_eq!(drift(&near), [(FindingKind::Unnarrated, "FILE_WRITE".into())]);
}

fn rhythm(capability: Capability, gaps_ms: &[u64]) -> Vec<Line> {
    let mut lines = vec![(Host, capability, true, 1)];
    lines.extend(gaps_ms.iter().map(|gap| (Host, capability, true, *gap)));
    lines
}

fn compare(references: &[&[Line]], run: &[Line]) -> Vec<Finding> {
    let dir = tempfile::tempdir().unwrap();
    let mut draft = FingerprintDraft::new();
    for lines in references {
        draft.absorb(&ledger(dir.path(), lines)).unwrap();
    }
    let profile = draft.seal().unwrap();
    let read = Fingerprint::from_bytes(&profile.to_bytes()).unwrap();
    assert_eq!(read, profile);
    let findings = assess(&ledger(dir.path(), run), Some(&read)).unwrap();
    findings.into_iter().filter(|finding| finding.layer == Layer::L5).collect()
}

#[test]
fn a_run_like_its_references_has_no_finding() {
    let reference = rhythm(FileWrite, &[90, 100, 110]);
    assert!(compare(&[&reference], &rhythm(FileWrite, &[95, 105])).is_empty());
}

#[test]
fn new_capabilities_and_orders_are_found() {
    let reference = [(Host, FileWrite, true, 1), (Host, ProcessSpawn, true, 1)];
    let run = [(Host, ProcessSpawn, true, 1), (Host, FileWrite, true, 1), (Host, NetEgress, false, 1)];
    assert_eq!(
        kinds(&compare(&[&reference], &run)),
        [
            (FindingKind::NewCapability, "NET_EGRESS"),
            (FindingKind::NewTransition, "FILE_WRITE -> NET_EGRESS"),
            (FindingKind::NewTransition, "PROCESS_SPAWN -> FILE_WRITE"),
        ]
    );
}

#[test]
fn orders_do_not_cross_the_border_between_two_runs() {
    let first = [(Host, FileWrite, true, 1)];
    let second = [(Host, NetEgress, false, 1)];
    let run = [(Host, FileWrite, true, 1), (Host, NetEgress, false, 1)];
    assert_eq!(
        kinds(&compare(&[&first, &second], &run)),
        [(FindingKind::NewTransition, "FILE_WRITE -> NET_EGRESS")]
    );
}

#[test]
fn another_rhythm_is_found_just_past_four_deviations() {
    let reference = rhythm(FileWrite, &[90, 100, 110]);
    assert!(compare(&[&reference], &rhythm(FileWrite, &[140, 140])).is_empty(), "exactly four");
    assert_eq!(
        kinds(&compare(&[&reference], &rhythm(FileWrite, &[141, 141]))),
        [(FindingKind::Cadence, "cadence")]
    );
    assert!(compare(&[&reference], &rhythm(FileWrite, &[5000])).is_empty(), "one interval is no rhythm");
    let steady = rhythm(FileWrite, &[100, 100, 100]);
    assert_eq!(
        kinds(&compare(&[&steady], &rhythm(FileWrite, &[101, 101]))),
        [(FindingKind::Cadence, "cadence")]
    );
    assert!(compare(&[&rhythm(FileWrite, &[100])], &rhythm(FileWrite, &[1, 1])).is_empty());
}

#[test]
fn only_the_host_s_decisions_make_a_profile() {
    let reference = rhythm(FileWrite, &[100, 100]);
    let mut run = rhythm(FileWrite, &[100, 100]);
    run.push((Guest, NetEgress, true, 1));
    assert!(compare(&[&reference], &run).is_empty());
}

#[test]
fn a_run_counts_once_and_a_profile_of_nothing_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let run = ledger(dir.path(), &rhythm(FileWrite, &[1]));
    let mut draft = FingerprintDraft::new();
    draft.absorb(&run).unwrap();
    assert!(matches!(draft.absorb(&run), Err(FingerprintError::Twice(_))));
    assert_eq!(draft.seal().unwrap().runs(), 1);
    assert!(matches!(FingerprintDraft::new().seal(), Err(FingerprintError::Empty)));
}

#[test]
fn a_changed_file_is_another_profile_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let mut draft = FingerprintDraft::new();
    draft.absorb(&ledger(dir.path(), &rhythm(FileWrite, &[1, 2]))).unwrap();
    let profile = draft.seal().unwrap();
    let bytes = profile.to_bytes();
    assert_eq!(profile.digest(), Digest::of(&bytes));
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        if let Ok(other) = Fingerprint::from_bytes(&changed) {
            assert_ne!(other.digest(), profile.digest(), "byte {at}");
        }
    }
    let mut spaced = bytes.clone();
    spaced.insert(1, b' ');
    assert!(matches!(Fingerprint::from_bytes(&spaced), Err(FingerprintError::Format)));
    assert!(Fingerprint::from_bytes(&bytes[..bytes.len() - 1]).is_err());
    let extra = String::from_utf8(bytes).unwrap().replacen('{', "{\"x\":1,", 1);
    assert!(Fingerprint::from_bytes(extra.as_bytes()).is_err());
}

fn any_line() -> impl Strategy<Value = Line> {
    (
        prop::sample::select(vec![Host, Guest]),
        prop::sample::select(Capability::ALL.to_vec()),
        any::<bool>(),
        0..1000u64,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_truthful_guest_never_drifts_and_findings_are_bounded(lines in prop::collection::vec(any_line(), 0..40)) {
        let dir = tempfile::tempdir().unwrap();
        let told: Vec<Line> =
            lines.iter().flat_map(|(_, c, g, t)| [(Host, *c, *g, *t), (Guest, *c, *g, 0)]).collect();
        prop_assert!(assess(&ledger(dir.path(), &told), None).unwrap().is_empty());
        let mut draft = FingerprintDraft::new();
        draft.absorb(&ledger(dir.path(), &rhythm(FileWrite, &[1, 2, 3]))).unwrap();
        let profile = draft.seal().unwrap();
        let findings = assess(&ledger(dir.path(), &lines), Some(&profile)).unwrap();
        prop_assert!(findings.len() <= 6 + 36 + 1 + 2 * 6);
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Fingerprint::from_bytes(&bytes);
    }
}
