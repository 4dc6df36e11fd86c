//! The matrix: each tampering, the reason that is found for it, and what the command would exit with. The table is the
//! one of docs/verify.md, which this test reads.

use crate::fixture::*;
use hotcell_decide::{HostFact, Verdict};
use hotcell_ledger::*;
use hotcell_verify::*;
use std::collections::BTreeSet;

fn options(checkpoint: Option<&Bundle>) -> Options {
    let checkpoints =
        checkpoint.map(|b| ("kept.note".to_owned(), b.read("checkpoint.note"))).into_iter().collect();
    Options { checkpoints, ..Options::default() }
}

fn reasons(v: &Verification) -> Vec<&'static str> {
    v.findings.counts().keys().map(|r| r.as_str()).collect()
}

struct Case {
    tampering: &'static str,
    /// All reasons, in their order.
    found: &'static str,
    exit: u8,
    act: fn(&Bundle),
}

/// What is done to a copy of the honest bundle; the honest bundle's note is the checkpoint that was kept, where `kept`.
fn cases() -> Vec<Case> {
    let case = |tampering, found, exit, act| Case { tampering, found, exit, act };
    vec![
        case("nothing (the control)", "", 0, |_| {}),
        case("bit flipped in an event's payload", "EVENT_ALTERED VERDICT_DISAGREES", 1, |b| {
            let mut blocks = b.blocks();
            *blocks[1].events[1].last_mut().unwrap() ^= 1;
            b.set_blocks(&blocks);
        }),
        case("bit flipped in an event's timestamp", "EVENT_ALTERED", 1, |b| {
            b.flip("ledger.ames", 88 + 16, 0)
        }),
        case(
            "bit flipped in an event's type",
            "UNREADABLE NO_CLOSING_MARKER TRUNCATED OBJECT_NOT_YET_NAMED VERDICT_DISAGREES",
            1,
            |b| {
                let mut blocks = b.blocks();
                blocks[2].events[1][0] ^= 0x40;
                b.set_blocks(&blocks);
            },
        ),
        case("bit flipped in a header's timestamp", "HEADER_ALTERED", 1, |b| b.flip("ledger.ames", 87, 3)),
        case("bit flipped in a header's root", "EVENT_ALTERED HEADER_ALTERED", 1, |b| {
            b.flip("ledger.ames", 50, 3)
        }),
        case("bit flipped in a header's prev_hash", "HEADER_ALTERED", 1, |b| b.flip("ledger.ames", 9, 0)),
        case("bit flipped in a header's height", "HEADER_ALTERED", 1, |b| {
            let mut blocks = b.blocks();
            blocks[1].header.height ^= 4;
            b.set_blocks(&blocks);
        }),
        case("event count lowered", "EVENT_ALTERED HEADER_ALTERED EVENT_COUNT", 1, |b| {
            let mut blocks = b.blocks();
            blocks[1].header.event_count ^= 4;
            b.set_blocks(&blocks);
        }),
        case("event removed", "EVENT_REMOVED SPLICED OBJECT_UNNAMED VERDICT_DISAGREES", 1, |b| {
            let mut blocks = b.blocks();
            blocks[1].events.remove(1);
            blocks[1].header.event_count -= 1;
            b.set_blocks(&blocks);
        }),
        case(
            "event removed, its count left",
            "EVENT_REMOVED EVENT_COUNT OBJECT_UNNAMED VERDICT_DISAGREES",
            1,
            |b| {
                let mut blocks = b.blocks();
                blocks[1].events.remove(1);
                b.set_blocks(&blocks);
            },
        ),
        case("event duplicated", "EVENT_DUPLICATED", 1, |b| {
            let mut blocks = b.blocks();
            let again = blocks[1].events[1].clone();
            blocks[1].events.insert(1, again);
            b.set_blocks(&blocks);
        }),
        case("events reordered", "EVENT_REORDERED", 1, |b| {
            let mut blocks = b.blocks();
            blocks[1].events.swap(1, 2);
            b.set_blocks(&blocks);
        }),
        case(
            "event removed, all sealed again",
            "EVENT_REMOVED CHAIN_REWRITTEN OBJECT_UNNAMED VERDICT_DISAGREES",
            1,
            |b| {
                let mut blocks = b.blocks();
                blocks[1].events.remove(1);
                reseal(&mut blocks, 1);
                b.set_blocks(&blocks);
            },
        ),
        case(
            "event removed, all renumbered and sealed again",
            "CHAIN_REWRITTEN OBJECT_UNNAMED VERDICT_DISAGREES",
            1,
            |b| {
                let mut blocks = b.blocks();
                blocks[2].events.remove(1);
                renumber(&mut blocks);
                reseal(&mut blocks, 2);
                b.set_blocks(&blocks);
            },
        ),
        case("block removed", "BLOCK_REMOVED TRUNCATED OBJECT_UNNAMED VERDICT_DISAGREES", 1, |b| {
            let mut blocks = b.blocks();
            blocks.remove(2);
            b.set_blocks(&blocks);
        }),
        case(
            "first block removed",
            "BLOCK_REMOVED NO_RUN_BEGIN TRUNCATED OBJECT_UNNAMED VERDICT_DISAGREES",
            1,
            |b| {
                let mut blocks = b.blocks();
                blocks.remove(0);
                b.set_blocks(&blocks);
            },
        ),
        case("block duplicated", "BLOCK_DUPLICATED CHECKPOINT_MISMATCH VERDICT_DISAGREES", 1, |b| {
            let mut blocks = b.blocks();
            blocks.insert(2, blocks[2].clone());
            b.set_blocks(&blocks);
        }),
        case("blocks reordered", "BLOCK_REORDERED VERDICT_DISAGREES", 1, |b| {
            let mut blocks = b.blocks();
            blocks.swap(1, 2);
            b.set_blocks(&blocks);
        }),
        case(
            "another run's blocks put behind this one's",
            "SPLICED CHECKPOINT_MISMATCH OBJECT_MISSING VERDICT_DISAGREES",
            1,
            |b| {
                let other = Plan { run_id: "run-00000002", execs: 4, ..Plan::default() }.build();
                let mut blocks = b.blocks();
                blocks.truncate(2);
                blocks.extend_from_slice(&other.blocks()[2..]);
                b.set_blocks(&blocks);
            },
        ),
        case(
            "a second run appended",
            "SPLICED RUN_MARKER_INSIDE NOT_COVERED OBJECT_MISSING SPEC_DISAGREES VERDICT_DISAGREES",
            1,
            |b| {
                let other = Plan { run_id: "run-00000002", ..Plan::default() }.build();
                let mut blocks = b.blocks();
                blocks.extend(other.blocks());
                b.set_blocks(&blocks);
            },
        ),
        case(
            "file cut inside a block",
            "TRUNCATED_TAIL NO_CLOSING_MARKER TRUNCATED VERDICT_DISAGREES",
            1,
            |b| {
                let bytes = b.read("ledger.ames");
                b.write("ledger.ames", &bytes[..bytes.len() - 60]);
            },
        ),
        case("file cut between blocks", "NO_CLOSING_MARKER TRUNCATED VERDICT_DISAGREES", 1, |b| {
            let mut blocks = b.blocks();
            blocks.pop();
            b.set_blocks(&blocks);
        }),
        case("file emptied", "NO_CLOSING_MARKER TRUNCATED OBJECT_NOT_YET_NAMED VERDICT_DISAGREES", 1, |b| {
            b.write("ledger.ames", b"")
        }),
        case(
            "ledger deleted",
            "LEDGER_DELETED NO_CLOSING_MARKER TRUNCATED OBJECT_NOT_YET_NAMED VERDICT_DISAGREES",
            1,
            |b| b.remove("ledger.ames"),
        ),
        case("ledger rewritten, longer", "CHAIN_REWRITTEN OBJECT_MISSING VERDICT_DISAGREES", 1, |b| {
            let mut blocks = Plan { execs: 9, ..Plan::default() }.build().blocks();
            renumber(&mut blocks);
            reseal(&mut blocks, 0);
            b.set_blocks(&blocks);
        }),
        case("note deleted", "NOTE_MISSING", 1, |b| b.remove("checkpoint.note")),
        case("bit flipped in the note's text", "BAD_SIGNATURE FILE_ALTERED", 1, |b| {
            let text = String::from_utf8(b.read("checkpoint.note")).unwrap();
            let at = text.find("\nfile report.json ").unwrap() + 20;
            let to = if text.as_bytes()[at] == b'0' { "1" } else { "0" };
            b.write("checkpoint.note", [&text[..at], to, &text[at + 1..]].concat());
        }),
        case("signature altered", "BAD_SIGNATURE", 1, |b| {
            let text = String::from_utf8(b.read("checkpoint.note")).unwrap();
            let at = text.rfind(' ').unwrap() + 30;
            let to = if text.as_bytes()[at] == b'A' { "B" } else { "A" };
            b.write("checkpoint.note", [&text[..at], to, &text[at + 1..]].concat());
        }),
        case("note is not a note", "NOTE_UNREADABLE", 1, |b| b.write("checkpoint.note", "hello\n")),
        case("object deleted that an event needs", "OBJECT_MISSING OBJECT_SET_CHANGED", 1, |b| {
            b.remove(&first_object(b, r#"["qemu"]"#));
        }),
        case("object deleted that is only named", "OBJECT_SET_CHANGED", 1, |b| {
            b.remove(&first_object(b, "output 1"))
        }),
        case("object altered", "OBJECT_ALTERED", 1, |b| b.flip(&first_object(b, "output 1"), 0, 0)),
        case("object added", "OBJECT_UNNAMED OBJECT_SET_CHANGED", 1, |b| {
            b.object("never seen");
        }),
        case("file added", "FILE_EXTRA COPY_DISAGREES", 1, |b| b.write("files/new", "x")),
        case("file put among the objects", "FILE_EXTRA", 1, |b| b.write("objects/readme", "x")),
        case("report.json altered", "FILE_ALTERED", 1, |b| b.flip("report.json", 12, 0)),
        case("report.json states another verdict", "FILE_ALTERED VERDICT_DISAGREES", 1, |b| {
            b.write("report.json", r#"{"verdict":"KILLED"}"#);
        }),
        case("spec.json altered", "FILE_ALTERED SPEC_DISAGREES", 1, |b| b.flip("spec.json", 9, 0)),
        case("console.log altered", "FILE_ALTERED", 1, |b| b.flip("console.log", 0, 0)),
        case("copied-out file altered", "FILE_ALTERED COPY_DISAGREES", 1, |b| {
            b.flip("files/deep dir/out.txt", 0, 0)
        }),
        case("copied-out file altered, then signed", "COPY_DISAGREES", 1, |b| {
            b.flip("files/deep dir/out.txt", 0, 0);
            b.seal_again(SEED);
        }),
        case("copied-out file deleted", "FILE_MISSING", 1, |b| b.remove("files/deep dir/out.txt")),
        case("file replaced by a link", "FILE_STRANGE", 1, |b| {
            b.remove("console.log");
            std::os::unix::fs::symlink("/etc/hostname", b.path("console.log")).unwrap();
        }),
        // The signer himself: by his key all is well, and what the record gives can still be recomputed.
        case("verdict falsified, then signed", "VERDICT_DISAGREES", 1, |b| {
            b.write("report.json", r#"{"verdict":"FAILED"}"#);
            b.seal_again(SEED);
        }),
        case("all sealed and signed again with another key", "", 0, |b| {
            b.write("console.log", "nothing to see");
            b.seal_again([9; 32]);
        }),
        // Crashes: no note yet.
        case("crash between blocks", "NO_CLOSING_MARKER", 3, |b| {
            crash(b);
            let mut blocks = b.blocks();
            blocks.pop();
            b.set_blocks(&blocks);
        }),
        case("crash inside a block", "TRUNCATED_TAIL NO_CLOSING_MARKER", 3, |b| {
            crash(b);
            let bytes = b.read("ledger.ames");
            b.write("ledger.ames", &bytes[..bytes.len() - 60]);
        }),
        case("crash, then reaped", "NO_CLOSING_MARKER REAPED", 3, |b| {
            crash(b);
            let mut blocks = b.blocks();
            blocks.pop();
            b.set_blocks(&blocks);
            b.write("reaped.json", "{}");
        }),
        case("crash, then a bit flipped", "EVENT_ALTERED NO_CLOSING_MARKER VERDICT_DISAGREES", 1, |b| {
            crash(b);
            let mut blocks = b.blocks();
            blocks.pop();
            *blocks[1].events[1].last_mut().unwrap() ^= 1;
            b.set_blocks(&blocks);
        }),
    ]
}

fn crash(bundle: &Bundle) {
    bundle.remove("checkpoint.note");
    bundle.remove("report.json");
}

fn doc_rows(heading: &str) -> Vec<String> {
    let doc = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/verify.md")).unwrap();
    let section = doc.split(heading).nth(1).expect(heading);
    section
        .lines()
        .skip_while(|l| !l.starts_with("|---"))
        .skip(1)
        .take_while(|l| l.starts_with('|'))
        .map(str::to_owned)
        .collect()
}

/// `PRINT_MATRIX=1` shows the table to put into docs/verify.md.
#[test]
fn the_matrix() {
    let mut rows = Vec::new();
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for case in cases() {
        let bundle = Plan::default().build();
        (case.act)(&bundle);
        let v = verify_bundle(bundle.dir.path(), &Options::default()).unwrap();
        let found = reasons(&v);
        seen.extend(found.clone());
        let shown = if found.is_empty() { "–".to_owned() } else { found.join(" ") };
        rows.push(format!("| {} | {shown} | {} |", case.tampering, v.outcome().exit_code()));
        if found.join(" ") != case.found || v.outcome().exit_code() != case.exit {
            let exit = v.outcome().exit_code();
            wrong.push(format!(
                "{}: {} {}, not {} {exit}",
                case.tampering,
                case.found,
                case.exit,
                found.join(" ")
            ));
        }
    }
    if std::env::var_os("PRINT_MATRIX").is_some() {
        println!("{}", rows.join("\n"));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(doc_rows("## The matrix"), rows, "docs/verify.md is not what this test finds");
}

#[test]
fn the_doc_lists_every_reason() {
    let listed: Vec<String> =
        doc_rows("## Reasons").iter().map(|row| row.split('`').nth(1).unwrap().to_owned()).collect();
    let all: Vec<&str> = Reason::ALL.iter().map(|r| r.as_str()).collect();
    assert_eq!(listed, all);
}

/// What was asked for is told apart from what was done to a record.
#[test]
fn a_folder_of_records_is_no_record_without_its_ledger() {
    let parent = tempfile::tempdir().unwrap();
    let ask = || match verify_bundle(parent.path(), &Options::default()) {
        Err(error) => error.to_string(),
        Ok(v) => reasons(&v).join(" "),
    };
    assert!(ask().contains("nothing of a record"), "{}", ask());
    let records: Vec<Bundle> = (0..9).map(|_| Plan::default().build()).collect();
    for (number, record) in records.iter().enumerate() {
        std::os::unix::fs::symlink(record.dir.path(), parent.path().join(format!("a-link-{number}")))
            .unwrap();
        std::fs::rename(record.dir.path(), parent.path().join(format!("run-{number}"))).unwrap();
    }
    std::fs::create_dir(parent.path().join("other")).unwrap();
    let said = ask();
    assert!(said.contains("folder of 9 records: run-0, run-1,") && said.contains("run-4, …"), "{said}");
    assert!(!said.contains("run-5") && !said.contains("link") && !said.contains("other"), "{said}");
    // One word of a record, and it is one whose ledger was deleted.
    for (name, folder) in
        [("checkpoint.note", false), ("spec.json", false), ("report.json", false), ("objects", true)]
    {
        let path = parent.path().join(name);
        if folder {
            std::fs::create_dir(&path).unwrap()
        } else {
            std::fs::write(&path, "x").unwrap()
        }
        assert!(ask().contains("LEDGER_DELETED"), "{name}: {}", ask());
        if folder { std::fs::remove_dir(&path).unwrap() } else { std::fs::remove_file(&path).unwrap() }
    }
}

/// Against a checkpoint that was kept: the honest bundle's note.
#[test]
fn a_kept_checkpoint() {
    let kept = Plan::default().build();
    let verify = |act: fn(&Bundle)| {
        let bundle = Plan::default().build();
        act(&bundle);
        verify_bundle(bundle.dir.path(), &options(Some(&kept))).unwrap()
    };
    assert_eq!(reasons(&verify(|_| {})), [""; 0]);
    // The chain rewritten, longer, consistent, sealed with the same key: the published verifier lets this pass.
    let longer = verify(|b| {
        let other = Plan { execs: 9, ..Plan::default() }.build();
        let mut blocks = other.blocks();
        reseal(&mut blocks, 0);
        b.set_blocks(&blocks);
        for object in std::fs::read_dir(other.path("objects")).unwrap() {
            let object = object.unwrap();
            std::fs::copy(object.path(), b.path("objects").join(object.file_name())).unwrap();
        }
        b.seal_again(SEED);
    });
    assert_eq!(reasons(&longer), ["CHAIN_REWRITTEN"]);
    assert!(
        to_text(&longer).contains("kept.note covers a chain whose block 7 is another"),
        "{}",
        to_text(&longer)
    );
    // The tail cut, and the rest sealed again.
    let shorter = verify(|b| {
        let mut blocks = b.blocks();
        let end = blocks.pop().unwrap().events.pop().unwrap();
        let last = blocks.len() - 1;
        *blocks[last].events.last_mut().unwrap() = end;
        renumber(&mut blocks);
        reseal(&mut blocks, 0);
        b.set_blocks(&blocks);
        b.seal_again(SEED);
    });
    assert!(reasons(&shorter).contains(&"TRUNCATED"), "{:?}", reasons(&shorter));
    // Sealed again with another key: the kept checkpoint's key is the one that counts.
    assert_eq!(reasons(&verify(|b| b.seal_again([9; 32]))), ["WRONG_KEY"]);
    // Another run altogether.
    let other = Plan { run_id: "run-00000002", execs: 5, ..Plan::default() }.build();
    let v = verify_bundle(other.dir.path(), &options(Some(&kept))).unwrap();
    assert_eq!(reasons(&v), ["CHAIN_REWRITTEN", "CHECKPOINT_OF_OTHER_RUN"]);
}

#[test]
fn several_checkpoints_and_what_none_covers() {
    let bundle = Plan::default().build();
    let blocks = bundle.blocks();
    let key = SigningKey::from_seed(&SEED);
    let at = |height: usize| {
        let body = NoteBody {
            origin: "hotcell/run-00000001".into(),
            checkpoint: Checkpoint { height: height as u64, head: blocks[height - 1].header.digest() },
            key: None,
            objects: None,
            files: Vec::new(),
        };
        (format!("at {height}"), note::sign(body, &key).unwrap())
    };
    let all = Options { checkpoints: vec![at(1), at(3), at(2)], ..Options::default() };
    let v = verify_bundle(bundle.dir.path(), &all).unwrap();
    assert_eq!((reasons(&v), v.unanchored_blocks), (vec![], None));
    assert!(v.checkpoints.iter().all(|c| c.holds));

    // Mid-run notes alone, after a crash: what they do not cover is shown.
    crash(&bundle);
    bundle.set_blocks(&blocks[..5]);
    let v = verify_bundle(bundle.dir.path(), &all).unwrap();
    assert_eq!((v.outcome(), v.unanchored_blocks), (Outcome::Incomplete, Some((3, 5))));
    assert!(to_text(&v).contains("unanchored block 3 to 4"), "{}", to_text(&v));

    // One of them is of a fork.
    let mut forked = blocks.clone();
    forked[1].header.timestamp_ns += 1;
    reseal(&mut forked, 2);
    bundle.set_blocks(&forked[..5]);
    let v = verify_bundle(bundle.dir.path(), &all).unwrap();
    assert_eq!(v.outcome(), Outcome::NotIntact);
    assert_eq!(v.checkpoints.iter().map(|c| c.holds).collect::<Vec<_>>(), [true, false, false]);

    // Closed, and its own note is an old one.
    let bundle = Plan::default().build();
    bundle.write("checkpoint.note", at(3).1);
    let v = verify_bundle(bundle.dir.path(), &Options::default()).unwrap();
    assert!(reasons(&v).contains(&"NOT_COVERED"), "{:?}", reasons(&v));
}

#[test]
fn whose_key() {
    let bundle = Plan::default().build();
    let key = |seed| SigningKey::from_seed(&seed).public().clone();
    let verify = |options: Options| verify_bundle(bundle.dir.path(), &options).unwrap();
    let v = verify(Options::default());
    assert_eq!(v.note.as_ref().unwrap().identity, Identity::Unanchored);
    let said = format!("unanchored: signed by {}, not compared with any key you trust", key(SEED));
    assert!(to_text(&v).contains(&said), "{}", to_text(&v));
    let v = verify(Options { own_key: Some(key(SEED)), ..Options::default() });
    assert_eq!(v.note.as_ref().unwrap().identity, Identity::Own);
    let v = verify(Options { own_key: Some(key([1; 32])), ..Options::default() });
    assert_eq!((v.outcome(), &v.note.as_ref().unwrap().identity), (Outcome::Intact, &Identity::Unanchored));
    let v = verify(Options { trusted_keys: vec![key([1; 32]), key(SEED)], ..Options::default() });
    assert_eq!((v.outcome(), &v.note.as_ref().unwrap().identity), (Outcome::Intact, &Identity::Pinned));
    let v = verify(Options { trusted_keys: vec![key([1; 32])], ..Options::default() });
    assert_eq!(reasons(&v), ["WRONG_KEY"]);
}

#[test]
fn the_verdict_is_the_records() {
    type Told = (Verdict, &'static [&'static str]);
    let cases: [(Option<HostFact>, Told); 5] = [
        (None, (Verdict::Allowed, &[])),
        (Some(HostFact::fault("driver", &"panic")), (Verdict::Killed, &["evaluator_failure"])),
        (
            Some(HostFact::Kill { reasons: vec!["nothing".into()], at_sequence: 0 }),
            (Verdict::Killed, &["unexplained_kill"]),
        ),
        (Some(HostFact::failed("boot", &"late")), (Verdict::Failed, &["failed boot"])),
        (Some(HostFact::Interrupted { signal: 2 }), (Verdict::Allowed, &[])),
    ];
    for (fact, verdict) in cases {
        let bundle = Plan { fact: fact.clone(), verdict, ..Plan::default() }.build();
        let v = verify_bundle(bundle.dir.path(), &Options::default()).unwrap();
        assert_eq!((reasons(&v), v.derived.verdict), (vec![], verdict.0), "{fact:?}");
        let other: Told =
            if verdict.0 == Verdict::Allowed { (Verdict::Killed, &["x"]) } else { (Verdict::Allowed, &[]) };
        let bundle = Plan { fact: fact.clone(), verdict: other, ..Plan::default() }.build();
        let v = verify_bundle(bundle.dir.path(), &Options::default()).unwrap();
        assert_eq!(reasons(&v), ["VERDICT_DISAGREES"], "{fact:?}");
        assert_eq!(v.findings.counts()[&Reason::VerdictDisagrees], 2);
    }
}

/// Flipping a bit in any byte of any file of the bundle is found.
#[test]
fn every_byte_is_covered() {
    let bundle = Plan { execs: 1, ..Plan::default() }.build();
    let dir = hotcell_ledger::bundle::BundleDir::open(bundle.dir.path()).unwrap();
    let listing = dir.list().unwrap();
    let mut names: Vec<String> =
        listing.files.iter().map(|p| String::from_utf8(p.clone()).unwrap()).collect();
    names.extend(listing.objects.iter().map(|o| format!("objects/{o}")));
    names.extend(["ledger.ames".into(), "checkpoint.note".into()]);
    let mut flips = 0;
    for name in names {
        let bytes = bundle.read(&name);
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 1 << (at % 8);
            bundle.write(&name, altered);
            let v = verify_bundle(bundle.dir.path(), &Options::default()).unwrap();
            assert_eq!(v.outcome(), Outcome::NotIntact, "{name} byte {at}: {}", to_text(&v));
            flips += 1;
        }
        bundle.write(&name, bytes);
    }
    assert!(flips > 2500, "{flips}");
    assert_eq!(verify_bundle(bundle.dir.path(), &Options::default()).unwrap().outcome(), Outcome::Intact);
}

#[test]
fn the_binary() {
    let run = |args: &[&str]| {
        let out =
            std::process::Command::new(env!("CARGO_BIN_EXE_hotcell-verify")).args(args).output().unwrap();
        (
            out.status.code().unwrap(),
            String::from_utf8(out.stdout).unwrap(),
            String::from_utf8(out.stderr).unwrap(),
        )
    };
    let bundle = Plan::default().build();
    let dir = bundle.dir.path().to_str().unwrap();
    let note = bundle.path("checkpoint.note");
    let key = SigningKey::from_seed(&SEED).public().to_string();
    let (code, text, _) = run(&[dir, "--checkpoint", note.to_str().unwrap(), "--key", &key]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("result     INTACT"), "{text}");
    let (code, text, _) = run(&[dir, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (code, json["result"].as_str(), json["verdict"].as_str()),
        (0, Some("intact"), Some("ALLOWED"))
    );
    bundle.write("console.log", "x");
    let (code, text, _) = run(&[dir, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, json["findings"][0]["reason"].as_str()), (1, Some("FILE_ALTERED")));
    crash(&bundle);
    bundle.write("ledger.ames", b"");
    assert_eq!(run(&[dir]).0, 3);
    for args in
        [&["/nowhere"][..], &[dir, "--key", "nonsense"], &[dir, "--checkpoint", "/nowhere"], &[], &["--what"]]
    {
        let (code, _, error) = run(args);
        assert_eq!(code, 2, "{args:?}");
        assert!(!error.is_empty());
    }
}
