//! Nothing leaks: threads, descriptors and memory are what they were, whatever the guests did. A binary of its own, with
//! one test, since it counts what the whole process has.
#![allow(missing_docs)]

mod lab;

use hotcell_testkit::{FakeGuest, FakeMachine, StartAs, honest};
use hotcell_wire::{GuestFrame, Request};
use lab::*;
use std::fs;
use std::time::{Duration, Instant};

fn counts() -> (usize, usize) {
    let count = |dir: &str| fs::read_dir(dir).map(Iterator::count).unwrap_or(0);
    (count("/proc/self/fd"), count("/proc/self/task"))
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[track_caller]
fn assert_no_more_than(before: (usize, usize), after_what: &str) {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let now = counts();
        if now.0 <= before.0 && now.1 <= before.1 {
            return;
        }
        assert!(
            Instant::now() < end,
            "after {after_what}: {now:?} descriptors and threads, {before:?} before"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn run(machine: FakeMachine) {
    let mut lab = Lab::with(machine);
    lab.runtime.boot_deadline = Duration::from_secs(2);
    let run = lab.start_with(|policy| policy.limits.timeout_s = 1);
    let _ = wait(exec(&run, &["cat"]));
    let _ = finish(run);
}

fn after(how: fn(&mut FakeGuest, u32)) -> FakeMachine {
    FakeMachine::new(move |guest| {
        if guest.boot()
            && let Some(exec) = guest.exec()
        {
            how(guest, exec);
            guest.ignore();
        }
    })
}

fn flood(guest: &mut FakeGuest, exec: u32) {
    for id in 0.. {
        let request = Request { exec, capability: 200, resource: b"x", justification: b"" };
        if !guest.send(id, &GuestFrame::Request(request)) {
            return;
        }
    }
}

#[test]
fn threads_descriptors_and_memory_are_what_they_were() {
    run(FakeMachine::new(honest));
    let before = counts();
    for _ in 0..50 {
        run(FakeMachine::new(honest));
    }
    assert_no_more_than(before, "fifty honest runs");
    let broken: [(&str, FakeMachine); 12] = [
        ("a boot without end", FakeMachine::new(FakeGuest::ignore)),
        ("a boot without reading", FakeMachine::new(|guest| guest.hang())),
        ("a death in boot", FakeMachine::new(|guest| guest.die())),
        ("a refused start", FakeMachine { start: StartAs::Refused, ..FakeMachine::new(honest) }),
        (
            "garbage",
            after(|guest, _| {
                guest.send_bytes(&[1; 100]);
            }),
        ),
        (
            "half a frame",
            after(|guest, _| {
                guest.send_bytes(b"HC");
            }),
        ),
        ("a flood, unread answers", after(flood)),
        ("silence", after(|_, _| {})),
        ("no reading", after(|guest, _| guest.hang())),
        ("a closed channel", after(|guest, _| guest.close_channel())),
        ("a death", after(|guest, _| guest.die())),
        (
            "two ends",
            after(|guest, exec| {
                guest.exited(exec, 0);
                guest.exited(exec, 0);
            }),
        ),
    ];
    for (what, machine) in broken {
        run(machine);
        assert_no_more_than(before, what);
    }

    // Memory: much output costs what a little costs.
    let measure = |bytes: u64| {
        let lab = Lab::honest();
        let run = lab.start_with(|policy| policy.limits.output_mib = 1);
        let noisy = exec(&run, &["noise", "1", &bytes.to_string()]);
        let watch = std::thread::spawn(move || wait(noisy).unwrap());
        let mut most = 0;
        while !watch.is_finished() {
            most = most.max(resident_kib());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(watch.join().unwrap().stdout.unwrap().total_bytes, bytes);
        let _ = finish(run);
        most
    };
    let (little, much) = (measure(8 << 20), measure(256 << 20));
    assert!(much < little + 8 * 1024, "256 MiB of output took {much} KiB, 8 MiB took {little} KiB");
    assert_no_more_than(before, "much output");
}
