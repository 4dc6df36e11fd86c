//! How long from an attack to a VMM that is gone, by the attack's own account of when it was.
//!
//! The accomplice of `observed.rs` tells its wall clock sixty times through the workload's output, then the nanosecond at
//! which it will act. What it says at `g` comes to the host at `h`; the smallest `h - g` is the difference of the two
//! clocks and the time of the fastest line on its way. So a figure is too small by that line's way, and by no more.

use crate::harness::{PATIENCE, vmms_of, wait_until};
use crate::machine::kernel;
use crate::observed::{Exit, Listed, Module, Taken};
use hotcell_runtime::{ExecIo, ExecRequest, Stdin};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

fn now_ns() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as i64
}

/// Lines, each with the host's time when it came.
#[derive(Clone, Default)]
struct Timed(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    whole: Vec<(i64, String)>,
    rest: String,
}

impl Timed {
    fn numbers(&self, word: &str) -> Vec<(i64, i64)> {
        let held = self.0.lock().unwrap();
        let lines = held.whole.iter();
        lines.filter_map(|(at, line)| Some((*at, line.strip_prefix(word)?.trim().parse().ok()?))).collect()
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let (at, mut held) = (now_ns(), self.0.lock().unwrap());
        held.rest.push_str(std::str::from_utf8(bytes).unwrap());
        while let Some(end) = held.rest.find('\n') {
            let line = held.rest.drain(..=end).collect();
            held.whole.push((at, line));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Taken {
    /// Milliseconds from the moment of an attack to a VMM that is gone.
    fn time(self, name: &str, reason: &str) -> f64 {
        let run_id = self.draft.run_id.clone();
        let run = self.runtime.start(self.draft.seal().unwrap(), self.boot);
        let said = Timed::default();
        let io = ExecIo { stdin: Stdin::Empty, stdout: Some(Box::new(said.clone())), ..ExecIo::default() };
        let script = format!("mkfifo /tmp/say && echo timed {name} >/tmp/order && cat /tmp/say; sleep 60");
        let exec = run.exec(ExecRequest::new(["/bin/sh", "-c", &script]), io);
        wait_until("the clock", PATIENCE, || !said.numbers("clock ").is_empty());
        let vmm = pidfd_open(Pid::from_raw(vmms_of(&run_id)[0]).unwrap(), PidfdFlags::empty()).unwrap();
        let watcher = std::thread::spawn(move || {
            poll(&mut [PollFd::new(&vmm, PollFlags::IN)], None).unwrap();
            now_ns()
        });
        let _ = exec.wait();
        let gone = watcher.join().unwrap();
        let report = run.finish();
        assert_eq!(report.kill.reasons, [reason], "{report:?}");
        let clocks = said.numbers("clock ");
        assert_eq!(clocks.len(), 60);
        let ahead = clocks.iter().map(|(host, guest)| host - guest).min().unwrap();
        let [(_, due)] = said.numbers("due ")[..] else { panic!("the moment was told once") };
        (gone - (due + ahead)) as f64 / 1e6
    }
}

#[test]
#[ignore = "a measurement: one hundred and twenty kills"]
fn latency_from_the_attack_to_a_vmm_that_is_gone() {
    let hide = Module::Loaded(Exit::Hide(Listed::of(&kernel().vmlinuz())));
    let at_hand = Module::AtHand;
    let attacks = [
        ("root", at_hand, "unexplained_privilege"),
        ("load", at_hand, "module_loaded"),
        ("remount", at_hand, "writable_root"),
        ("unload", Module::Loaded(Exit::Interrupts), "kernel_table_changed"),
        ("unload", Module::Loaded(Exit::Text), "kernel_text_changed"),
        ("unload", hide, "hidden_process"),
    ];
    let runs = std::env::var("HOTCELL_LATENCY_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(20);
    let (mut all, mut each) = (Vec::new(), Vec::new());
    for (name, module, reason) in attacks {
        let mut figures: Vec<f64> =
            (0..runs).map(|_| Taken::new(module).cloned().time(name, reason)).collect();
        figures.sort_by(f64::total_cmp);
        println!("{reason}: median {:.0} ms, worst of {runs} {:.0} ms", figures[runs / 2], figures[runs - 1]);
        each.push(format!(r#""{reason}": {figures:.1?}"#));
        all.extend(figures);
    }
    println!(r#"{{"kill_after_attack_ms": {{{}}}}}"#, each.join(", "));
    all.sort_by(f64::total_cmp);
    let p99 = all[(all.len() * 99).div_ceil(100) - 1];
    println!("all {}: median {:.0} ms, p99 {p99:.0} ms", all.len(), all[all.len() / 2]);
}
