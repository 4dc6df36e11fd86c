//! Capability requests from inside: decided, recorded and answered on the host, and counted against the run.

use crate::lab::*;
use hotcell_decide::broker::MAX_DECISIONS;
use hotcell_ledger::{ActorId, Capability, Payload};
use hotcell_runtime::{ExecRequest, Stdin};
use hotcell_testkit::{FakeGuest, FromHost, Step};
use hotcell_wire::{GuestFrame, Request};

const PACKAGE: &str = "numpy==2.3.1 sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn ask(guest: &mut FakeGuest, id: u32, capability: u8, resource: &str) -> Option<String> {
    let request = Request { exec: 1, capability, resource: resource.as_bytes(), justification: b"" };
    guest.send(id, &GuestFrame::Request(request)).then_some(())?;
    loop {
        if let FromHost::Reply(to, decision, reason) = guest.receive()? {
            assert_eq!(to, id);
            return Some(format!("{decision:?} {reason}"));
        }
    }
}

fn net() -> u8 {
    Capability::NetEgress as u8
}

fn decisions(record: &Record) -> Vec<(Capability, bool, String)> {
    let decision = |payload: &Payload| match payload {
        Payload::CapabilityRequest { capability, granted, reason } => {
            let words: Vec<&str> = reason.as_str().split(' ').take(2).collect();
            Some((*capability, *granted, words.join(" ")))
        }
        _ => None,
    };
    record.events.iter().filter_map(|event| decision(&event.payload)).collect()
}

#[test]
fn allow_deny_and_defer_are_answered_recorded_and_reported() {
    let lab = Lab::honest();
    let run = lab.start_with(|policy| {
        policy.capabilities.write_trees = vec!["/workspace".into()];
        policy.capabilities.packages = vec![PACKAGE.into()];
    });
    let mut answers = Vec::new();
    for (capability, resource) in [
        (Capability::FileWrite, "/workspace/a"),
        (Capability::FileWrite, "/etc/passwd"),
        (Capability::PackageInstall, "numpy==2.3.1"),
    ] {
        let stdout = Seen::default();
        let request = ExecRequest::new(["ask", &(capability as u8).to_string(), resource]);
        wait(run.exec(request, io_of(Stdin::Empty, &stdout, &Seen::default()))).unwrap();
        answers.push(stdout.text());
    }
    assert_eq!(answers, ["allow write_tree\n", "deny write_not_listed\n", "defer package_listed\n"]);
    let report = finish(run);
    assert_eq!(report.pending_rebuild.len(), 1);
    assert!(report.pending_rebuild[0].starts_with("numpy==2.3.1"), "{:?}", report.pending_rebuild);
    let record = assert_allowed(&lab, &report);
    assert_eq!(
        decisions(&record),
        [
            (Capability::FileWrite, true, "allow write_tree".into()),
            (Capability::FileWrite, false, "deny write_not_listed".into()),
            (Capability::PackageInstall, false, "defer package_listed".into()),
        ]
    );
    let of_host = |event: &&hotcell_ledger::Event| matches!(event.payload, Payload::CapabilityRequest { .. });
    assert!(record.events.iter().filter(of_host).all(|event| event.actor == ActorId::HOST));
}

fn prober(denials: u32) -> impl Fn(&mut FakeGuest) + Send + Sync {
    move |guest| {
        if !guest.boot() || guest.exec().is_none() {
            return;
        }
        for id in 0..denials {
            if ask(guest, id, net(), "example.org:443").is_none() {
                return;
            }
        }
        guest.exited(1, 0);
        guest.serve();
    }
}

#[test]
fn a_burst_of_denials_kills_in_mid_run_and_the_machine_before_the_writing() {
    let lab = Lab::new(|guest| {
        prober(5)(guest);
        guest.ignore();
    });
    let run = lab.start();
    let running = exec(&run, &["a command that would go on"]);
    until("the kill", || lab.backend.count(Step::Kill) > 0);
    let error = wait(running).unwrap_err();
    assert!(error.to_string().contains("the run ended first"), "{error}");
    let report = finish(run);
    assert!(!report.kill.absolute);
    // The fifth denial may also have reached the guest's exit of the exec: the kill comes first all the same.
    let record = assert_killed(&lab, &report, &["denial_burst", "denial_ewma"]);
    let killed = lab.backend.first(Step::Kill).unwrap();
    assert!(killed <= record.at_ns("kill"), "the machine was stopped after it was written about");
    let fifth = record
        .events
        .iter()
        .filter(|event| matches!(event.payload, Payload::CapabilityRequest { .. }))
        .nth(4)
        .unwrap();
    assert!(killed >= fifth.timestamp_ns, "nothing is judged that is not recorded");
}

#[test]
fn one_denial_less_does_nothing() {
    let lab = Lab::new(prober(4));
    let run = lab.start();
    assert_eq!(wait(exec(&run, &["x"])).unwrap().code, 0);
    let record = assert_allowed(&lab, &finish(run));
    assert_eq!(decisions(&record).len(), 4);
}

#[test]
fn a_flood_of_allowed_requests_is_bounded_and_kills() {
    let lab = Lab::new(|guest| {
        guest.boot();
        guest.exec();
        for id in 0.. {
            if ask(guest, id, Capability::FileWrite as u8, "/workspace/a").is_none() {
                return;
            }
        }
    });
    let run = lab.start_with(|policy| policy.capabilities.write_trees = vec!["/workspace".into()]);
    assert!(wait(exec(&run, &["x"])).is_err());
    let record = assert_killed(&lab, &finish(run), &["request_flood"]);
    assert_eq!(decisions(&record).len() as u64, MAX_DECISIONS + 1);
}

#[test]
fn a_capability_that_does_not_exist_is_denied_and_counted_not_written_each_time() {
    let lab = Lab::new(|guest| {
        guest.boot();
        guest.exec();
        for id in 0..1000 {
            match ask(guest, id, 200, "x") {
                Some(answer) => assert_eq!(answer, "Deny there is no capability 200"),
                None => return,
            }
        }
        guest.exited(1, 0);
        guest.serve();
    });
    let run = lab.start();
    assert_eq!(wait(exec(&run, &["x"])).unwrap().code, 0);
    let record = assert_allowed(&lab, &finish(run));
    assert_eq!(decisions(&record), []);
    assert_eq!(record.names().iter().filter(|name| **name == "claim_refused").count(), 2);
}

#[test]
fn a_request_in_nobody_s_name_is_the_machine_s() {
    let lab = Lab::new(|guest| {
        guest.boot();
        guest.exec();
        let request = Request { exec: 77, capability: net(), resource: b"x", justification: b"" };
        guest.send(1, &GuestFrame::Request(request));
        guest.exited(1, 0);
        guest.serve();
    });
    let run = lab.start();
    assert_eq!(wait(exec(&run, &["x"])).unwrap().code, 0);
    let record = assert_allowed(&lab, &finish(run));
    let objects: Vec<String> = entries(&record.dir.join("objects"))
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .filter(|text| text.starts_with("{\"capability\""))
        .collect();
    let actor = format!("\"actor\":{}", ActorId::VM.get());
    assert!(objects.len() == 1 && objects[0].contains(&actor), "{objects:?}");
}
