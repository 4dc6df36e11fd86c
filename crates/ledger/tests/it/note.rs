//! Keys, notes, and the seal over a bundle.

use crate::generate::spawn;
use hotcell_ledger::checkpoint::{BodyError, FileLine, ObjectsLine};
use hotcell_ledger::key::KeyError;
use hotcell_ledger::note::{MAX_NOTE_LEN, Note, OpenError, SignError, sign};
use hotcell_ledger::*;
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt as _;

fn key(seed: u8) -> SigningKey {
    SigningKey::from_seed(&[seed; 32])
}

fn body() -> NoteBody {
    NoteBody {
        origin: "hotcell/run-1".into(),
        checkpoint: Checkpoint { height: 3, head: Digest::of(b"head") },
        key: None,
        objects: Some(ObjectsLine::over([Digest::of(b"a")])),
        files: vec![
            FileLine { path: b"files/a b\n%\xff".to_vec(), digest: Digest::of(b"1"), len: 1 },
            FileLine { path: b"report.json".to_vec(), digest: Digest::of(b""), len: 0 },
        ],
    }
}

#[test]
fn verified_and_unverified_are_two_lists() {
    let bytes = sign(body(), &key(1)).unwrap();
    let text = std::str::from_utf8(&bytes).unwrap();
    assert!(text.starts_with("hotcell/run-1\n3\n"), "{text}");
    assert!(text.contains("\nfile files/a%20b%0A%25%FF "), "{text}");
    let note = Note::parse(&bytes).unwrap();
    assert_eq!(note.claimed_key(), Some(key(1).public()));
    let opened = note.open(&[key(1).public().clone(), key(2).public().clone()]).unwrap();
    assert_eq!((opened.verified.len(), opened.unverified.len()), (1, 0));
    assert_eq!(opened.body, NoteBody { key: Some(key(1).public().clone()), ..body() });
    match note.open(&[key(2).public().clone()]) {
        Err(OpenError::UnknownKey { unverified }) => assert_eq!(unverified[0].id, key(1).public().id()),
        other => panic!("{other:?}"),
    }
    assert!(matches!(note.open(&[]), Err(OpenError::UnknownKey { .. })));

    // A second signature, by somebody else.
    let mut both = signed_note::Note::from_bytes(&bytes).unwrap();
    both.add_sigs(&[&SigningKey::from_seed(&[2; 32])]).unwrap();
    let opened = Note::parse(&both.to_bytes()).unwrap().open(&[key(1).public().clone()]).unwrap();
    assert_eq!((opened.verified.len(), opened.unverified.len()), (1, 1));
}

/// Somebody else's implementation accepts our notes and keys.
#[test]
fn the_crates_own_verifier_agrees() {
    let bytes = sign(body(), &key(1)).unwrap();
    let verifier = signed_note::StandardVerifier::new(&key(1).public().to_string()).unwrap();
    let known = signed_note::VerifierList::new(vec![Box::new(verifier)]);
    let (verified, unverified) = signed_note::Note::from_bytes(&bytes).unwrap().verify(&known).unwrap();
    assert_eq!((verified.len(), unverified.len()), (1, 0));
}

#[test]
fn a_flipped_bit_in_any_byte_of_a_note_shows() {
    let bytes = sign(body(), &key(1)).unwrap();
    for bit in (0..bytes.len()).map(|byte| byte * 8 + byte % 8) {
        let mut altered = bytes.clone();
        altered[bit / 8] ^= 1 << (bit % 8);
        let opened = Note::parse(&altered).and_then(|note| note.open(&[key(1).public().clone()]));
        assert!(opened.is_err(), "bit {bit}");
        let by_itself = Note::parse(&altered).ok().and_then(|note| {
            let key = note.claimed_key().cloned();
            note.open(key.as_slice()).ok()
        });
        assert!(by_itself.is_none(), "bit {bit}");
    }
}

#[test]
fn what_is_no_note() {
    let refuse = |text: &str| NoteBody::parse(text).unwrap_err();
    let good = body().to_text();
    assert_eq!(NoteBody::parse(&good).unwrap(), body());
    assert!(matches!(refuse(&good.replace("\n3\n", "\n03\n")), BodyError::Line { line: 2, .. }));
    assert!(matches!(refuse(&good.replace("run-1", "run 1")), BodyError::Origin(_)));
    for (from, to) in [
        ("files/a", "../a"),
        ("files/a", "files//a"),
        ("files/a", "/a"),
        ("%0A", "%0a"),
        ("%25", "%41"),
        ("file report", "fille report"),
        ("objects 1", "objects 01"),
        ("report.json", "a.json"),
    ] {
        assert!(good.contains(from), "{from}");
        assert!(matches!(refuse(&good.replace(from, to)), BodyError::Line { .. }), "{from} {to}");
    }
    assert!(matches!(Note::parse(&vec![b'a'; 1_000_001]), Err(OpenError::TooLong(_))));
    assert!(matches!(Note::parse(b"hello\n"), Err(OpenError::Form)));
}

#[test]
fn a_weak_or_misspelt_key_is_refused() {
    let good = key(1).public().to_string();
    assert_eq!(VerifierKey::parse(&good).unwrap().to_string(), good);
    assert!(VerifierKey::parse(&format!("{good}\n")).is_ok());
    assert!(VerifierKey::parse(&good.replace("hotcell", "other")).is_err());
    assert!(VerifierKey::parse(&good[..good.len() - 1]).is_err());
    // The point of order one: any signature of a certain form fits any message.
    use base64::Engine as _;
    let mut weak = vec![1u8; 2];
    weak.resize(33, 0);
    let id = signed_note::key_id("hotcell", &weak);
    let text = format!("hotcell+{id:08x}+{}", base64::prelude::BASE64_STANDARD.encode(&weak));
    assert!(signed_note::StandardVerifier::new(&text).is_ok());
    assert!(VerifierKey::parse(&text).is_err());
}

#[test]
fn a_key_is_made_once_and_private() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new/deep/key");
    let made: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..8).map(|_| scope.spawn(|| SigningKey::load_or_create(&path).unwrap())).collect();
        threads.into_iter().map(|t| t.join().unwrap().public().to_string()).collect()
    });
    assert!(made.iter().all(|key| *key == made[0]), "{made:?}");
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    let mode = |m| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(m)).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    for exposed in [0o640, 0o604, 0o660, 0o610] {
        mode(exposed);
        let error = SigningKey::load_or_create(&path).unwrap_err();
        assert!(matches!(error, KeyError::Exposed { mode, .. } if mode == exposed));
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }
    mode(0o600);
    assert_eq!(SigningKey::load(&path).unwrap().public().to_string(), made[0]);
    for folder in ["new", "new/deep"] {
        assert_eq!(std::fs::metadata(dir.path().join(folder)).unwrap().permissions().mode() & 0o777, 0o700);
    }
    // Another user's is no private one, whatever its mode; only root can give a file away.
    if std::os::unix::fs::chown(&path, Some(65_534), None).is_ok() {
        let error = SigningKey::load_or_create(&path).unwrap_err();
        assert!(matches!(error, KeyError::Foreign { owner: 65_534, .. }), "{error}");
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
        SigningKey::load(&path).unwrap();
    }
    std::fs::write(&path, "PRIVATE+KEY+hotcell+00000000+AAAA\n").unwrap();
    assert!(matches!(SigningKey::load_or_create(&path), Err(KeyError::Signer(_))));
    assert!(!format!("{:?}", key(1)).contains("PRIVATE"));
}

#[test]
fn a_bundle_is_sealed_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut writer = LedgerWriter::create(at("ledger.ames"), Cadence::default()).unwrap();
    for payload in [Payload::RunBegin, spawn("/"), Payload::ProcessExit { code: 0 }, Payload::RunEnd] {
        writer.append(ActorId::HOST, None, payload, 5).unwrap();
    }
    let ledger = writer.close().unwrap();
    std::fs::create_dir_all(at("files/sub dir")).unwrap();
    std::fs::create_dir(at("objects")).unwrap();
    std::fs::write(at("files/sub dir/x"), "x").unwrap();
    std::fs::write(at("report.json"), "{}").unwrap();
    std::fs::write(at("objects").join(Digest::of(b"o").to_hex()), "o").unwrap();

    std::os::unix::fs::symlink("/etc/passwd", at("files/link")).unwrap();
    let error = bundle::seal(dir.path(), "r", &ledger, &key(1)).unwrap_err();
    assert!(error.to_string().contains("files/link"), "{error}");
    std::fs::remove_file(at("files/link")).unwrap();

    let note = bundle::seal(dir.path(), "r", &ledger, &key(1)).unwrap();
    assert_eq!(std::fs::read(at("checkpoint.note")).unwrap(), note);
    let opened = Note::parse(&note).unwrap().open(&[key(1).public().clone()]).unwrap();
    let paths: Vec<_> =
        opened.body.files.iter().map(|f| String::from_utf8_lossy(&f.path).into_owned()).collect();
    assert_eq!(paths, ["files/sub dir/x", "report.json"]);
    assert_eq!(opened.body.objects, Some(ObjectsLine::over([Digest::of(b"o")])));
    assert_eq!(opened.body.checkpoint, ledger.checkpoint());
}

proptest! {
    #[test]
    fn one_spelling_for_each_path(mut paths in prop::collection::vec("[^\0]{1,12}", 0..5)) {
        paths.retain(|p| p.split('/').all(|part| !matches!(part, "" | "." | "..")));
        paths.sort();
        paths.dedup();
        let files = paths.into_iter().map(|p| FileLine { path: p.into(), digest: Digest::of(b""), len: 7 }).collect();
        let body = NoteBody { files, ..body() };
        prop_assert_eq!(NoteBody::parse(&body.to_text()).unwrap(), body);
    }
}

/// At the limit a note is read and made; one byte, or one file, beyond it is refused.
#[test]
fn a_note_is_bounded() {
    let of = |files: usize| {
        let line =
            |n: usize| FileLine { path: format!("files/{n:08}").into_bytes(), digest: Digest::ZERO, len: 0 };
        sign(NoteBody { files: (0..files).map(line).collect(), ..body() }, &key(1))
    };
    let (one, two) = (of(1).unwrap().len(), of(2).unwrap().len());
    let fit = 1 + (MAX_NOTE_LEN - one) / (two - one);
    let bytes = of(fit).unwrap();
    assert!(bytes.len() <= MAX_NOTE_LEN && bytes.len() + (two - one) > MAX_NOTE_LEN);
    assert!(Note::parse(&bytes).is_ok());
    assert!(matches!(of(fit + 1), Err(SignError::TooLong(_))));
    assert!(matches!(Note::parse(&vec![b'a'; MAX_NOTE_LEN + 1]), Err(OpenError::TooLong(_))));
    assert!(matches!(Note::parse(&vec![b'a'; MAX_NOTE_LEN]), Err(OpenError::Form)));
}
