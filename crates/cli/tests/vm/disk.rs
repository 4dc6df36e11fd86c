//! What the host sees of the workspace disk while machines write to it, and what that decides.

use crate::harness::Job;
use hotcell_ledger::{Digest, FileOp};
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
    assert_eq!(reads[1]["names"], json!(12), "{seen:?}");
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
    assert_eq!(outcome.record().mutations().len(), 4);
}
