//! How long it takes from the observation that breaks a rule to a VMM that is gone.
//!
//! ```text
//! cargo test --release -p hotcell-cli --test vm -- --ignored --nocapture latency
//! ```
//! The observation's time is the tripping event's in the ledger; the VMM's end is
//! seen by this test itself, through a descriptor of the process. Both are read
//! off the host's wall clock, which `hotcell` follows from its start on.

use crate::harness::Job;
use hotcell_ledger::{ActorId, Payload};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::time::{SystemTime, UNIX_EPOCH};

const KILLS: usize = 20;
/// DESIGN.md: what it must reach.
const LIMIT_MS: f64 = 250.0;

#[test]
#[ignore = "a measurement of some two minutes; asserts the limit of DESIGN.md"]
fn kill_latency_over_twenty_kills() {
    let mut figures: [Vec<f64>; 2] = Default::default();
    for _ in 0..KILLS {
        let script = "echo up; for door in a b c d e; do hotcell-request net-egress $door:1 >/dev/null; done; sleep 100";
        let live = Job::sh(script).start();
        live.wait_for("up\n");
        let vmm = pidfd_open(Pid::from_raw(live.vmms()[0]).unwrap(), PidfdFlags::empty()).unwrap();
        let watcher = std::thread::spawn(move || {
            poll(&mut [PollFd::new(&vmm, PollFlags::IN)], None).unwrap();
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
        });
        let outcome = live.wait();
        let gone_ns = watcher.join().unwrap();
        outcome.assert_killed(&["denial_burst", "denial_ewma"]);
        let record = outcome.record();
        let at = record.fact("kill")["at_sequence"].as_u64().unwrap();
        let tripped_ns = record.events[usize::try_from(at).unwrap()].timestamp_ns;
        // By the record alone: when the teardown had seen the VMM reaped.
        let recorded = record
            .events
            .iter()
            .find(|event| event.actor == ActorId::VM && matches!(event.payload, Payload::ProcessExit { .. }));
        let recorded_ns = recorded.unwrap().timestamp_ns;
        for (figures, end) in figures.iter_mut().zip([gone_ns, recorded_ns]) {
            figures.push(end.saturating_sub(tripped_ns) as f64 / 1e6);
        }
    }
    let [gone, recorded] = &figures;
    println!(r#"{{"kill_ms": {gone:.2?}, "kill_recorded_ms": {recorded:.2?}}}"#);
    for (what, figures) in ["VMM process gone", "teardown recorded"].iter().zip(&mut figures) {
        figures.sort_by(f64::total_cmp);
        let (median, p99) = (figures[KILLS / 2], figures[KILLS - 1]);
        println!("observation to {what}: median {median:.2} ms, p99 (of {KILLS}: the worst) {p99:.2} ms");
        assert!(median > 0.0 && p99 <= LIMIT_MS, "{what}: {figures:?}");
    }
}

#[test]
#[ignore = "a measurement of some two minutes; asserts the limit of DESIGN.md"]
fn kill_latency_from_a_written_file_over_twenty_kills() {
    let mut figures = Vec::new();
    for _ in 0..KILLS {
        let script = "echo up; sleep 1; echo 1 >x; echo 2 >y; echo 3 >z; sync; echo written; sleep 100";
        let policy = "[capabilities]\nwrite = [\"/workspace/out.txt\"]\n";
        let live = Job::sh(script).policy(policy).start();
        live.wait_for("up\n");
        let vmm = pidfd_open(Pid::from_raw(live.vmms()[0]).unwrap(), PidfdFlags::empty()).unwrap();
        let watcher = std::thread::spawn(move || {
            poll(&mut [PollFd::new(&vmm, PollFlags::IN)], None).unwrap();
            std::time::Instant::now()
        });
        // The last of three files may be on the disk, and the machine gone, before `sync` returns.
        let written = live.saw("written\n").then(std::time::Instant::now);
        let outcome = live.wait();
        let gone = watcher.join().unwrap();
        outcome.assert_killed(&["mutation_burst", "mutation_ewma"]);
        figures
            .push(written.map_or(0.0, |written| gone.saturating_duration_since(written).as_secs_f64() * 1e3));
    }
    figures.sort_by(f64::total_cmp);
    let (median, p99) = (figures[KILLS / 2], figures[KILLS - 1]);
    println!(
        "sync returned to VMM process gone: median {median:.2} ms, p99 (of {KILLS}: the worst) {p99:.2} ms"
    );
    println!(r#"{{"kill_after_sync_ms": {figures:.2?}}}"#);
    assert!(p99 <= LIMIT_MS, "{figures:?}");
}
