//! Bundles that mean harm: no panic, no hang, no memory.

use crate::fixture::*;
use hotcell_ledger::*;
use hotcell_verify::*;
use proptest::prelude::*;
use std::io::Write as _;
use std::time::{Duration, Instant};

fn verify(bundle: &Bundle) -> Verification {
    let started = Instant::now();
    let v = verify_bundle(bundle.dir.path(), &Options::default()).unwrap();
    assert!(started.elapsed() < Duration::from_secs(20));
    let _ = (to_text(&v), to_json(&v).to_string());
    v
}

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_sparse_ten_gigabytes_that_claims_two_to_the_64_events() {
    let bundle = Plan::default().build();
    let before = peak_kib();
    let header = BlockHeader {
        height: 0,
        prev_hash: Digest::ZERO,
        event_count: u64::MAX,
        events_root: Digest::ZERO,
        timestamp_ns: 0,
    };
    let mut file = std::fs::File::create(bundle.path("ledger.ames")).unwrap();
    file.write_all(&header.to_bytes()).unwrap();
    file.set_len(10 << 30).unwrap();
    let v = verify(&bundle);
    assert!(v.findings.has(Reason::Unreadable), "{}", to_text(&v));
    assert!(peak_kib() - before < 64 << 10);
}

#[test]
fn links_fifos_sockets_and_deep_directories() {
    let bundle = Plan::default().build();
    std::os::unix::fs::symlink("/", bundle.path("files/root")).unwrap();
    std::os::unix::fs::symlink(".", bundle.path("files/self")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(bundle.path("files/s")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(bundle.path("files/fifo")).status().unwrap().success());
    let mut deep = bundle.path("files");
    for _ in 0..40 {
        deep.push("d");
    }
    std::fs::create_dir_all(&deep).unwrap();
    let v = verify(&bundle);
    assert_eq!(v.findings.counts()[&Reason::FileStrange], 5, "{}", to_text(&v));

    for name in ["ledger.ames", "checkpoint.note", "report.json", "spec.json", "objects"] {
        for make in ["fifo", "link", "dir"] {
            let bundle = Plan::default().build();
            let path = bundle.path(name);
            if name == "objects" {
                std::fs::remove_dir_all(&path).unwrap()
            } else {
                bundle.remove(name)
            }
            match make {
                "fifo" => {
                    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success())
                }
                "link" => std::os::unix::fs::symlink("/etc", &path).unwrap(),
                _ => std::fs::create_dir(&path).unwrap(),
            }
            let v = verify(&bundle);
            assert_eq!(v.outcome(), Outcome::NotIntact, "{name} {make}");
        }
    }
}

/// A name can't write to the terminal.
#[test]
fn names_are_escaped() {
    let bundle = Plan::default().build();
    bundle.write("files/\u{1b}[2Jx", "x");
    let text = to_text(&verify(&bundle));
    assert!(text.contains("files/%1B[2Jx") && !text.contains('\u{1b}'), "{text}");
}

#[test]
fn findings_are_bounded() {
    let bundle = Plan::default().build();
    for n in 0..500 {
        bundle.write(&format!("extra{n}"), "");
    }
    let v = verify(&bundle);
    assert_eq!(v.findings.counts()[&Reason::FileExtra], 500);
    assert_eq!((v.findings.list().len(), v.findings.unlisted()), (20, 480));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Whatever is done to the ledger's bytes: an answer, and never that it is intact.
    #[test]
    fn mangled_ledgers(edits in prop::collection::vec((any::<prop::sample::Index>(), 0u8..4, any::<Vec<u8>>()), 1..6)) {
        let bundle = Plan { execs: 1, ..Plan::default() }.build();
        let honest = bundle.read("ledger.ames");
        let mut bytes = honest.clone();
        for (at, kind, with) in edits {
            if bytes.is_empty() { break; }
            let at = at.index(bytes.len());
            let end = (at + with.len()).min(bytes.len());
            match kind {
                0 => { bytes.splice(at..at, with); }
                1 => { bytes.drain(at..end); }
                2 => bytes[at..end].copy_from_slice(&with[..end - at]),
                _ => bytes.truncate(at),
            }
        }
        prop_assume!(bytes != honest);
        bundle.write("ledger.ames", &bytes);
        prop_assert_eq!(verify(&bundle).outcome(), Outcome::NotIntact);
        bundle.remove("checkpoint.note");
        prop_assert_ne!(verify(&bundle).outcome(), Outcome::Intact);
    }
}
