//! Broken guests, after they were ready: each ends bounded, typed, with the machine gone.

use crate::lab::*;
use hotcell_testkit::{FakeGuest, honest};
use hotcell_wire::{GuestFrame, Request, STREAM_CHUNK, STREAM_WINDOW};
use std::time::{Duration, Instant};

/// A guest that boots, takes an exec, breaks, and then only listens.
fn breaks(how: impl Fn(&mut FakeGuest, u32) + Send + Sync + 'static) -> Lab {
    Lab::new(move |guest| {
        if guest.boot()
            && let Some(exec) = guest.exec()
        {
            how(guest, exec);
            guest.ignore();
        }
    })
}

/// The run of a broken guest: KILLED, its exec in error, with these words, within seconds.
#[track_caller]
fn assert_broken(lab: &Lab, words: &str) {
    let begun = Instant::now();
    let run = lab.start_with(|policy| policy.limits.timeout_s = 1);
    let error = wait(exec(&run, &["x"])).unwrap_err().to_string();
    assert!(error.contains(words), "{words:?} is not in {error:?}");
    let report = finish(run);
    assert!(report.error.as_ref().is_some_and(|error| error.contains(words)), "{report:?}");
    let record = assert_killed(lab, &report, &["sandbox_destroyed"]);
    assert!(record.has("violation") && report.kill.absolute);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn the_unbroken_twin_is_allowed() {
    let lab = Lab::new(honest);
    let run = lab.start_with(|policy| policy.limits.timeout_s = 30);
    assert_eq!(wait(exec(&run, &["noise", "1", "1000000"])).unwrap().code, 0);
    assert_allowed(&lab, &finish(run));
}

#[test]
fn garbage() {
    assert_broken(
        &breaks(|guest, _| {
            guest.send_bytes(&[0xA5; 4096]);
        }),
        "magic",
    );
}

#[test]
fn half_a_frame_and_then_silence() {
    let lab = breaks(|guest, exec| {
        let frame = FakeGuest::frame_at(guest.sequence(), exec, &GuestFrame::Stdout(b"half of this"));
        guest.send_bytes(&frame[..frame.len() / 2]);
    });
    assert_broken(&lab, "did not become quiet");
}

#[test]
fn a_length_that_no_frame_has() {
    let lab = breaks(|guest, exec| {
        let mut frame = FakeGuest::frame_at(guest.sequence(), exec, &GuestFrame::Started);
        frame[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        guest.send_bytes(&frame);
    });
    assert_broken(&lab, "a frame of 4294967295 bytes");
}

#[test]
fn a_sequence_that_repeats_or_skips() {
    for (from_due, came) in [(-1i64, 0), (1, 2)] {
        let lab = breaks(move |guest, exec| {
            let at = (i64::from(guest.sequence()) + from_due) as u32;
            guest.send_bytes(&FakeGuest::frame_at(at, exec, &GuestFrame::Started));
        });
        assert_broken(&lab, &format!("frame {came} where frame 1 was due"));
    }
}

#[test]
fn output_beyond_its_credit() {
    let lab = breaks(|guest, exec| {
        let chunk = vec![b'x'; STREAM_CHUNK];
        // Twice the window: even if all of the first was taken before the last byte is sent, no credit was waited for.
        for _ in 0..64 * STREAM_WINDOW as usize / STREAM_CHUNK {
            if !guest.send(exec, &GuestFrame::Stdout(&chunk)) {
                return;
            }
        }
    });
    // Nobody reads the output: credit is given only for what the caller took.
    let stuck = Stuck::default();
    let run = lab.start_with(|policy| policy.limits.timeout_s = 20);
    let io = hotcell_runtime::ExecIo { stdout: Some(Box::new(stuck.clone())), ..Default::default() };
    let error = wait(run.exec(hotcell_runtime::ExecRequest::new(["x"]), io)).unwrap_err().to_string();
    stuck.let_go();
    assert!(error.contains("more output of exec 1 than it had credit for"), "{error}");
    assert_killed(&lab, &finish(run), &["sandbox_destroyed"]);
}

#[test]
fn output_of_an_exec_that_does_not_run() {
    let lab = breaks(|guest, _| {
        guest.send(4000, &GuestFrame::Stdout(b"x"));
    });
    assert_broken(&lab, "output of exec 4000");
}

#[test]
fn the_end_of_an_exec_that_does_not_run() {
    assert_broken(
        &breaks(|guest, _| {
            guest.exited(4000, 0);
        }),
        "the end of exec 4000",
    );
}

#[test]
fn the_same_end_twice() {
    let lab = breaks(|guest, exec| {
        guest.exited(exec, 3);
        guest.exited(exec, 0);
    });
    let run = lab.start();
    assert_eq!(wait(exec(&run, &["x"])).unwrap().code, 3, "the first counts");
    let report = finish(run);
    assert_eq!(report.exit_code, Some(3));
    assert_killed(&lab, &report, &["sandbox_destroyed"]);
}

#[test]
fn output_after_the_end() {
    let lab = breaks(|guest, exec| {
        guest.exited(exec, 3);
        guest.send(exec, &GuestFrame::Stdout(b"more"));
    });
    let run = lab.start();
    assert_eq!(wait(exec(&run, &["x"])).unwrap().code, 3);
    assert_killed(&lab, &finish(run), &["sandbox_destroyed"]);
}

#[test]
fn ready_twice() {
    assert_broken(
        &breaks(|guest, _| {
            guest.say_ready();
        }),
        "ready twice",
    );
}

#[test]
fn quiet_unasked() {
    assert_broken(
        &breaks(|guest, _| {
            guest.send(0, &GuestFrame::Quiesced);
        }),
        "quiesced unasked",
    );
}

#[test]
fn an_init_that_gives_up() {
    let lab = breaks(|guest, _| {
        guest.send(0, &GuestFrame::Fatal(b"out of ideas"));
    });
    assert_broken(&lab, "out of ideas");
}

#[test]
fn a_channel_that_closes_while_the_machine_goes_on() {
    let lab = breaks(|guest, _| {
        guest.close_channel();
        guest.hang();
    });
    assert_broken(&lab, "channel closed");
}

#[test]
fn quiet_that_never_comes() {
    let lab = Lab::new(|guest| {
        guest.boot();
        if let Some(exec) = guest.exec() {
            guest.exited(exec, 0);
        }
        guest.ignore();
    });
    let run = lab.start();
    assert_eq!(wait(exec(&run, &["x"])).unwrap().code, 0);
    let report = finish(run);
    assert!(report.error.as_ref().unwrap().contains("did not become quiet"), "{report:?}");
    assert_killed(&lab, &report, &["sandbox_destroyed"]);
}

#[test]
fn a_reader_that_stops_while_it_asks() {
    let lab = breaks(|guest, exec| {
        // Asks for ever and reads no answer: the answers fill the channel, then the queue.
        for id in 0.. {
            let request = Request { exec, capability: 200, resource: b"x", justification: b"" };
            if !guest.send(id, &GuestFrame::Request(request)) {
                return;
            }
        }
    });
    let run = lab.start_with(|policy| policy.limits.timeout_s = 60);
    let error = wait(exec(&run, &["x"])).unwrap_err().to_string();
    assert!(error.contains("stopped reading its channel"), "{error}");
    assert_killed(&lab, &finish(run), &["sandbox_destroyed"]);
}

#[test]
fn a_reader_that_stops_while_it_is_given_stdin() {
    let lab = Lab::new(|guest| {
        guest.boot();
        guest.exec();
        guest.hang();
    });
    let run = lab.start_with(|policy| policy.limits.timeout_s = 1);
    let stdin = hotcell_runtime::Stdin::Bytes(vec![7; 8 << 20]);
    let io = hotcell_runtime::ExecIo { stdin, ..Default::default() };
    assert!(wait(run.exec(hotcell_runtime::ExecRequest::new(["x"]), io)).is_err());
    assert_killed(&lab, &finish(run), &["sandbox_destroyed"]);
}

#[test]
fn orders_to_kill_wait_behind_no_stdin() {
    // The guest takes what it is sent slowly; the time limit comes while much stdin waits.
    let lab = Lab::honest();
    let run = lab.start_with(|policy| policy.limits.timeout_s = 1);
    let stdin = || hotcell_runtime::Stdin::Bytes(vec![7; 8 << 20]);
    let sleepers: Vec<_> = (0..20)
        .map(|_| {
            let io = hotcell_runtime::ExecIo { stdin: stdin(), ..Default::default() };
            run.exec(hotcell_runtime::ExecRequest::new(["sleep"]), io)
        })
        .collect();
    for sleeper in sleepers {
        assert_eq!(wait(sleeper).unwrap().code, 124);
    }
    assert_allowed(&lab, &finish(run));
}

#[test]
fn a_flood_of_harmless_frames_starves_no_deadline() {
    let lab = breaks(|guest, exec| {
        let log = [b'x'; 1024];
        while guest.send(0, &GuestFrame::Log(&log))
            && guest.send(exec, &GuestFrame::StdinCredit(u32::MAX))
            && guest.send(exec, &GuestFrame::StdinClosed)
        {}
    });
    assert_broken(&lab, "");
}
