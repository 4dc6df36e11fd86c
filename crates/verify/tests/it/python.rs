//! docs/verify.py, which shares no code with us, comes to the same answers.

use crate::fixture::*;
use hotcell_ledger::SigningKey;
use hotcell_verify::*;
use std::process::Command;

fn script() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/verify.py")
}

#[test]
fn agrees_on_whole_and_on_tampered_bundles() {
    if !Command::new("python3").args(["-c", "import blake3"]).output().is_ok_and(|out| out.status.success()) {
        eprintln!("NOT RUN: docs/verify.py needs python3 with the blake3 package (pip install blake3)");
        return;
    }
    type Act = fn(&Bundle);
    let cases: &[(&str, Act)] = &[
        ("nothing", |_| {}),
        ("bit in an event", |b| b.flip("ledger.ames", 88 + 16, 0)),
        ("bit in a header", |b| b.flip("ledger.ames", 87, 0)),
        ("event removed", |b| {
            let mut blocks = b.blocks();
            blocks[1].events.remove(1);
            reseal(&mut blocks, 1);
            b.set_blocks(&blocks);
        }),
        ("blocks swapped", |b| {
            let mut blocks = b.blocks();
            blocks.swap(1, 2);
            b.set_blocks(&blocks);
        }),
        ("rewritten, longer", |b| {
            let mut blocks = Plan { execs: 9, ..Plan::default() }.build().blocks();
            reseal(&mut blocks, 0);
            b.set_blocks(&blocks);
        }),
        ("cut", |b| {
            let bytes = b.read("ledger.ames");
            b.write("ledger.ames", &bytes[..bytes.len() - 60]);
        }),
        ("emptied", |b| b.write("ledger.ames", b"")),
        ("no note", |b| b.remove("checkpoint.note")),
        ("crash", |b| {
            b.remove("checkpoint.note");
            b.remove("report.json");
            let bytes = b.read("ledger.ames");
            b.write("ledger.ames", &bytes[..bytes.len() - 60]);
        }),
        ("object gone", |b| b.remove(&first_object(b, "output 1"))),
        ("object altered", |b| b.flip(&first_object(b, "output 1"), 0, 0)),
        ("report altered", |b| b.flip("report.json", 12, 0)),
        ("file added", |b| b.write("files/new", "x")),
    ];
    for (name, act) in cases {
        let bundle = Plan::default().build();
        act(&bundle);
        let ours = verify_bundle(bundle.dir.path(), &Options::default()).unwrap();
        let out = Command::new("python3").arg(script()).arg(bundle.dir.path()).output().unwrap();
        let text =
            format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert_eq!(
            out.status.code(),
            Some(i32::from(ours.outcome().exit_code())),
            "{name}:\n{text}\n{}",
            to_text(&ours)
        );
        if *name == "nothing" {
            assert!(text.contains(&ours.checkpoint.head.to_hex()), "{text}");
            let events = format!("{} events in {} blocks", ours.events, ours.checkpoint.height);
            assert!(text.contains(&events), "{text}");
        }
    }
    let has_ed25519 = Command::new("python3")
        .args(["-c", "import cryptography.hazmat.primitives.asymmetric.ed25519"])
        .output()
        .is_ok_and(|out| out.status.success());
    if !has_ed25519 {
        eprintln!("NOT RUN: signatures by docs/verify.py, which need python3 with the cryptography package");
        return;
    }
    let bundle = Plan::default().build();
    let run = |key: [u8; 32]| {
        let key = SigningKey::from_seed(&key).public().to_string();
        Command::new("python3")
            .arg(script())
            .arg(bundle.dir.path())
            .args(["--key", &key])
            .output()
            .unwrap()
            .status
            .code()
    };
    assert_eq!((run(SEED), run([9; 32])), (Some(0), Some(1)));
}
