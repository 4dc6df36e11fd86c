//! The scenarios of L0, asked for from inside real machines.

use crate::attacks::with_probe;
use crate::harness::{Job, PATIENCE, Slot, home, hotcell, vmms_of, wait_until, warm_up};
use rustix::process::Signal;
use serde_json::json;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

#[test]
fn a_clean_run_asks_for_what_it_was_granted() {
    let policy = "[capabilities]\nwrite = [\"/workspace/report.txt\"]\nspawn = true\n";
    let script = "hotcell-request file-write /workspace/report.txt 'the task' && echo done >report.txt && cat report.txt";
    let outcome = Job::sh(script).policy(policy).run();
    outcome.assert_allowed(0);
    assert_eq!(outcome.text(), "allow: write_exact\ndone\n");
    assert_eq!(outcome.report("/advisory"), &json!([]));
    let record = outcome.record();
    assert_eq!(record.decisions(), [true]);
    assert_eq!(record.fact("switch_proven")["rules"].as_u64().map(|rules| rules > 10), Some(true));
    // The init's own account of the answer: testimony, which fits.
    assert_eq!(record.testimony(), 1);
}

#[test]
fn a_breach_of_the_read_only_root_is_denied_and_packages_wait_for_a_rebuild() {
    let digest = "0".repeat(64);
    let policy = format!("[capabilities]\nspawn = true\npackages = [\"numpy==2.3.1 sha256:{digest}\"]\n");
    let script = format!(
        "(echo evil >/etc/passwd) 2>/dev/null || echo kept\n\
         hotcell-request file-write /etc/passwd 'backup'; echo $?\n\
         hotcell-request package-install 'numpy==2.3.1 sha256:{digest}'; echo $?\n\
         hotcell-request package-install 'numpy==2.3.2'; echo $?"
    );
    let outcome = Job::sh(&script).policy(&policy).run();
    outcome.assert_allowed(0);
    let text = outcome.text();
    let codes: Vec<&str> = text.lines().filter(|line| line.len() == 1).collect();
    assert_eq!((text.lines().next(), codes.as_slice()), (Some("kept"), ["1", "2", "1"].as_slice()), "{text}");
    assert_eq!(outcome.record().decisions(), [false, false, false]);
    let pending = outcome.report("/pending_rebuild").as_array().unwrap();
    assert_eq!(pending.len(), 1, "{outcome:?}");
    assert!(pending[0].as_str().unwrap().contains("numpy==2.3.1"), "{outcome:?}");
}

#[test]
fn a_burst_of_denials_kills_while_the_command_runs() {
    let script = "echo up; for door in a b c d e f g; do hotcell-request net-egress $door.example:443; done; sleep 150; echo SURVIVED";
    let outcome = Job::sh(script).run();
    outcome.assert_killed(&["denial_burst", "denial_ewma"]);
    assert_eq!(outcome.report("/kill/absolute"), false);
    assert!(outcome.text().starts_with("up\n") && !outcome.text().contains("SURVIVED"), "{outcome:?}");
    assert!(outcome.after_ready() < Duration::from_secs(30), "well before its end: {outcome:?}");
    let record = outcome.record();
    assert_eq!(record.decisions(), [false; 5], "nothing is decided after the kill");
    let kill = record.fact("kill");
    assert_eq!(kill["reasons"], json!(["denial_burst", "denial_ewma"]));
    // It names the decision that tripped it, the fifth.
    let tripping = &record.events[usize::try_from(kill["at_sequence"].as_u64().unwrap()).unwrap()];
    assert!(matches!(tripping.payload, hotcell_ledger::Payload::CapabilityRequest { .. }), "{tripping:?}");
}

#[test]
fn patient_enumeration_beats_the_window_and_not_the_average() {
    let policy = "[capabilities]\nspawn = true\n[thresholds]\ndenial_window_s = 1\n";
    let script = "for door in a b c d e f; do hotcell-request net-egress $door.example:443; sleep 1.3; done; sleep 150";
    let outcome = Job::sh(script).policy(policy).run();
    outcome.assert_killed(&["denial_ewma"]);
    assert_eq!(outcome.record().decisions(), [false; 5]);
    assert!(outcome.after_ready() < Duration::from_secs(40), "{outcome:?}");
}

#[test]
fn a_legitimate_run_of_many_actors_is_left_alone() {
    let script = "for i in 1 2 3 4 5 6; do\n\
        (hotcell-request --claim spawn subject=$((100 + i)) parent=1 /bin/worker\n\
         hotcell-request file-write /workspace/part-$i 'a part'; echo $i >part-$i\n\
         hotcell-request --claim file subject=$((100 + i)) value=1 /workspace/part-$i\n\
         hotcell-request --claim exit subject=$((100 + i)) value=0) >/dev/null &\n\
        done; wait; cat part-* | sort | tr -d '\\n'; hotcell-request net-egress one.example:443 >/dev/null; true";
    let outcome = Job::sh(script).run();
    outcome.assert_allowed(0);
    assert_eq!(outcome.text(), "123456\n");
    let record = outcome.record();
    let mut decisions = record.decisions();
    decisions.sort_unstable();
    // One denial in a clean run does nothing.
    assert_eq!(decisions, [false, true, true, true, true, true, true]);
    assert_eq!(record.facts("claim_refused").count(), 0);
    // Six claims of files, and the init's own account of seven answers.
    assert_eq!(record.testimony(), 13);
    assert_eq!(outcome.report("/advisory"), &json!([]));
}

#[test]
fn a_concealed_narrative_is_a_finding_and_never_a_kill() {
    let policy = "exec.workspace = \"allow\"\n[capabilities]\nwrite_trees = [\"/workspace\"]\nspawn = true\n";
    // The init tells of every answer in the name of the exec that asked, so that a workload can't keep it
    // from telling; but one that asks and dies, while the host is slow to answer, is told of after its end,
    // and that is refused. The host is made slow here: it stands still while the workload asks and dies.
    let live = with_probe("echo up; sleep 2; exec ./probe conceal").policy(policy).start();
    live.wait_for("up\n");
    live.signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(5));
    live.signal(Signal::CONT);
    let outcome = live.wait();
    outcome.assert_gone();
    assert_eq!(outcome.verify(), 0, "{outcome:?}");
    outcome.assert_allowed(137);
    let decided = outcome.record().decisions().len();
    let findings = outcome.report("/advisory").as_array().unwrap();
    assert!(decided > 0, "nothing was asked: {outcome:?}");
    assert!(findings.iter().any(|finding| finding["kind"] == "unnarrated"), "{outcome:?}");
}

#[test]
fn the_demo_shows_all_three_ends() {
    warm_up();
    let _slot = Slot::take();
    let out = tempfile::tempdir().unwrap();
    let log = out.path().join("log");
    let file = fs::File::create(&log).unwrap();
    let mut child = hotcell()
        .args(["demo", "--out"])
        .arg(out.path().join("runs"))
        .stdout(file.try_clone().unwrap())
        .stderr(Stdio::from(file))
        .spawn()
        .unwrap();
    let mut status = None;
    wait_until("the demo's end", PATIENCE, || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    let text = fs::read_to_string(&log).unwrap();
    assert_eq!(status.unwrap().code(), Some(0), "{text}");
    let verdicts: Vec<&str> = text.lines().filter(|line| line.trim_start().starts_with("=> ")).collect();
    let words: Vec<&str> = verdicts.iter().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(
        words.iter().map(|word| word.trim_end_matches(',')).collect::<Vec<_>>(),
        ["ALLOWED", "KILLED", "ALLOWED"],
        "{text}"
    );
    assert!(
        text.contains("denial_burst") && text.contains("advisory") && !text.contains("never printed"),
        "{text}"
    );
    let bundles: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once(" verify ")?.1)).collect();
    assert_eq!(bundles.len(), 3, "{text}");
    for bundle in bundles {
        assert_eq!(crate::harness::verify(bundle.as_ref()), 0, "{bundle}");
        let run_id = bundle.rsplit('/').next().unwrap();
        assert!(vmms_of(run_id).is_empty());
        assert!(!home().join("state/live").join(run_id).exists());
    }
}
