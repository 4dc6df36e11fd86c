//! What the host sees of the workspace disk while machines write to it, and what that decides.

use crate::harness::Job;
use crate::machine::Sink;
use crate::observed::{Module, Taken};
use crate::record::Record;
use hotcell_ledger::{Digest, FileOp};
use hotcell_runtime::{ExecIo, ExecRequest, PutRequest};
use serde_json::json;
use std::time::Duration;

const NOTHING: Digest = Digest::ZERO;
const ONE_FILE: &str = "[capabilities]\nwrite = [\"/workspace/out.txt\"]\nspawn = true\n";

fn of(text: &str) -> Digest {
    Digest::of(text.as_bytes())
}

fn mode(mode: u32) -> Digest {
    of(&format!("{mode:o} 1000 1000"))
}

#[test]
fn every_kind_of_change_is_seen_from_outside_with_both_digests() {
    // The second half is told only at the end: the first is on the disk after `sync`, and waited for.
    let script = "umask 022; echo one >a; echo two >b; mkdir d; echo in >d/f; ln -s a l; mkfifo p; echo gone >g; sync; sleep 2
        echo changed >a; chmod 600 b; mv d e; ln -sf b l; rm g; ln a hard; sync; sleep 2
        echo last >late; head -c 300000 /dev/zero | tr '\\0' 'z' >big; printf x >'spa ce'";
    let outcome = Job::sh(script).run();
    outcome.assert_allowed(0);
    let record = outcome.record();
    let seen = record.mutations();
    let at = |path: &str| {
        let path = format!("/workspace/{path}");
        seen.iter()
            .filter(move |(_, at, _, _)| *at == path)
            .map(|(op, _, before, after)| (*op, *before, *after))
    };
    let all = |path: &str| at(path).collect::<Vec<_>>();
    assert_eq!(
        all("a"),
        [(FileOp::Create, NOTHING, of("one\n")), (FileOp::Write, of("one\n"), of("changed\n")),]
    );
    assert_eq!(
        all("b"),
        [(FileOp::Create, NOTHING, of("two\n")), (FileOp::Chmod, mode(0o644), mode(0o600)),]
    );
    assert_eq!(all("d"), [(FileOp::Create, NOTHING, of("")), (FileOp::Rename, of(""), NOTHING)]);
    assert_eq!(all("e"), [(FileOp::Rename, NOTHING, of(""))]);
    assert_eq!(all("d/f"), [(FileOp::Create, NOTHING, of("in\n")), (FileOp::Rename, of("in\n"), NOTHING)]);
    assert_eq!(all("e/f"), [(FileOp::Rename, NOTHING, of("in\n"))]);
    assert_eq!(all("l"), [(FileOp::Symlink, NOTHING, of("a")), (FileOp::Symlink, of("a"), of("b"))]);
    assert_eq!(all("g"), [(FileOp::Create, NOTHING, of("gone\n")), (FileOp::Delete, of("gone\n"), NOTHING)]);
    assert_eq!(all("hard"), [(FileOp::Create, NOTHING, of("changed\n"))]);
    assert_eq!(all("late"), [(FileOp::Create, NOTHING, of("last\n"))]);
    assert_eq!(all("big"), [(FileOp::Create, NOTHING, of(&"z".repeat(300_000)))]);
    assert_eq!(all("spa ce").len(), 1);
    assert_eq!(all("p").len(), 1);
    let reads: Vec<_> = record.facts("disk_read").collect();
    assert_eq!(reads.iter().map(|read| &read["at"]).collect::<Vec<_>>(), [&json!("armed"), &json!("quiet")]);
    assert!(reads.iter().all(|read| read["unread"].is_null()), "{reads:?}");
    assert_eq!(reads[1]["names"], json!(11), "{seen:?}");
    let layers = record.fact("spec")["layers"].as_array().unwrap();
    assert!(layers.iter().any(|layer| layer["layer"] == "L7" && layer["armed"] == true), "{layers:?}");
}

#[test]
fn writing_elsewhere_is_seen_mid_run_and_kills_while_the_command_runs() {
    let script = "echo fine >out.txt; for name in x y z; do echo $name >$name; done; sync; echo written; sleep 150; echo SURVIVED";
    let outcome = Job::sh(script).policy(ONE_FILE).run();
    outcome.assert_killed(&["mutation_burst", "mutation_ewma"]);
    assert!(outcome.after_ready() < Duration::from_secs(60), "well before its end: {outcome:?}");
    assert!(!outcome.text().contains("SURVIVED"), "{outcome:?}");
    let record = outcome.record();
    let kill = record.fact("kill");
    let tripping = &record.events[usize::try_from(kill["at_sequence"].as_u64().unwrap()).unwrap()];
    assert!(matches!(tripping.payload, hotcell_ledger::Payload::FileMutation { .. }), "{tripping:?}");
    assert_eq!(record.facts("disk_read").last().unwrap()["at"], json!("dead"));
}

#[test]
fn writing_what_was_granted_is_left_alone() {
    let script = "for i in 1 2 3 4 5 6; do echo $i >>out.txt; sync; done; mv out.txt /tmp/kept; cp /tmp/kept out.txt; sync; cat out.txt";
    let outcome = Job::sh(script).policy(ONE_FILE).run();
    outcome.assert_allowed(0);
    assert!(!outcome.record().mutations().is_empty());
}

#[test]
fn what_never_reached_the_disk_mid_run_is_judged_at_the_end() {
    let script = "mkdir sub; echo 1 >sub/one; echo 2 >sub/two; chmod 700 .";
    let outcome = Job::sh(script).policy(ONE_FILE).run();
    outcome.assert_killed(&["mutation_burst", "mutation_ewma"]);
    assert_eq!(outcome.record().facts("disk_read").last().unwrap()["at"], json!("quiet"));
    // How often a directory's own change is seen depends on when it is looked at.
    let mutations = outcome.record().mutations();
    for path in ["/workspace/sub", "/workspace/sub/one", "/workspace/sub/two"] {
        assert_eq!(
            mutations.iter().filter(|(op, at, ..)| *op == FileOp::Create && at == path).count(),
            1,
            "{mutations:?}"
        );
    }
}

/// Copies in, under a policy that grants nothing, while something in the guest writes out without end: the disk is full of
/// halves. Three changes that nothing explains are a kill.
#[test]
fn what_the_host_put_there_is_explained_whole_while_the_guest_writes_out_the_halves_of_it() {
    let host = tempfile::tempdir().unwrap();
    let tree = host.path().join("tree");
    std::fs::create_dir_all(tree.join("d")).unwrap();
    let sizes: Vec<usize> =
        [0, 1, 4096, 5000, 70_000].into_iter().chain((1..20).map(|n| n * 500_000)).collect();
    let content = |size: usize| (0..size).map(|at| (at * 31 % 251) as u8).collect::<Vec<u8>>();
    for size in &sizes {
        std::fs::write(tree.join(format!("d/f{size}")), content(*size)).unwrap();
    }
    let taken = Taken::new(Module::AtHand);
    let run = taken.runtime.start(taken.draft.seal().unwrap(), taken.boot);
    let script = "while [ ! -e /tmp/stop ]; do sync; done; wc -c /workspace/in/d/* | tail -n 1";
    let said = Sink::default();
    let io = ExecIo { stdout: Some(Box::new(said.clone())), ..ExecIo::default() };
    let exec = run.exec(ExecRequest::new(["/bin/sh", "-c", script]), io);
    run.put(PutRequest::new(&tree, "/workspace/in").unwrap()).unwrap();
    run.exec(ExecRequest::new(["/bin/touch", "/tmp/stop"]), ExecIo::default()).wait().unwrap();
    assert_eq!(exec.wait().map(|ended| ended.code), Ok(0));
    let report = run.finish();
    assert_eq!(report.verdict.as_str(), "ALLOWED", "{report:?}");
    assert_eq!(said.text().trim(), format!("{} total", sizes.iter().sum::<usize>()));
    let seen = Record::read(report.bundle.as_ref().unwrap()).mutations();
    for size in sizes {
        let path = format!("/workspace/in/d/f{size}");
        let of: Vec<_> = seen.iter().filter(|one| one.1 == path).map(|one| (one.0, one.2, one.3)).collect();
        assert_eq!(of, [(FileOp::Create, NOTHING, Digest::of(&content(size)))], "{path}");
    }
}
