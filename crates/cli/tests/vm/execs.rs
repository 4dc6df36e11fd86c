//! Execs of a run over a real machine: what each is given, what comes back, how it ends. Each test has one machine.

use crate::attacks::built;
use crate::basics::sha256sum;
use crate::harness::{Job, PATIENCE, SOON, wait_until};
use crate::machine::{Going, Machine};
use hotcell_policy::WorkspaceExec;
use hotcell_runtime::{ExecRequest, Stdin};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

#[test]
fn execs_of_one_run_get_their_own_words_directory_user_and_streams() {
    let machine = Machine::start("execs", |_| {});
    let words = ["", "two\nlines", "it's \"quoted\" \\ $HOME `id`", "", "-n", "ünï", ""];
    let print = "for word in \"$@\"; do printf '<%s>' \"$word\"; done; echo err >&2";
    let argv = ["/bin/sh", "-c", print, "sh"].into_iter().chain(words);
    let done = machine.exec(ExecRequest::new(argv), Stdin::Empty);
    assert_eq!(done.result.code, 0);
    assert_eq!(done.text(), words.map(|word| format!("<{word}>")).concat());
    assert_eq!(done.stderr, b"err\n");

    let long = "=\n'\"".repeat(16 << 10);
    let print =
        "printf '%s|%s|%s|%s|' \"$A\" \"$B\" \"$C\" \"$EMPTY\"; pwd; id -u; id -g; env | grep -c ^PATH=";
    let mut request = ExecRequest::new(["/bin/sh", "-c", print]);
    request.env = [("A", "1=2=3"), ("B", "line\n\"quote'"), ("C", &long), ("EMPTY", ""), ("PATH", "/bin")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
    request.cwd = "/tmp".into();
    (request.uid, request.gid) = (4321, 1234);
    let done = machine.exec(request, Stdin::Empty);
    assert_eq!(done.text(), format!("1=2=3|line\n\"quote'|{long}||/tmp\n4321\n1234\n1\n"));
    let mut request = ExecRequest::new(["/bin/true"]);
    request.cwd = "/nowhere".into();
    let done = machine.exec(request, Stdin::Empty);
    assert!(done.result.not_started.unwrap().contains("/nowhere"));

    // Both outputs at once, any bytes, each its own.
    let script = "cd /tmp; head -c 700001 /dev/urandom >out; head -c 300003 /dev/urandom >err; cat err >&2 & cat out; wait";
    let done = machine.sh(script);
    assert_eq!((done.stdout.len(), done.stderr.len()), (700_001, 300_003));
    assert_eq!(machine.sh("sha256sum </tmp/out").text(), sha256sum(&done.stdout));
    assert_eq!(machine.sh("sha256sum </tmp/err").text(), sha256sum(&done.stderr));

    stdin_as_it_comes(&machine);

    // What the guest's init gives each process: open files, and a small `/run`.
    let limits = machine.sh("ulimit -Sn; ulimit -Hn; df -k /run | awk 'NR > 1 {print $2}'");
    assert_eq!(limits.text(), "1024\n16384\n4096\n");

    // Twenty at once, each with its own streams and end.
    let execs: Vec<_> = (0..20)
        .map(|number| {
            let script = format!(
                "for i in $(seq 200); do echo {number}; done; echo e{number} >&2; cat; exit {number}"
            );
            let stdin = Stdin::Bytes(format!("in {number}").into_bytes());
            machine.begin(ExecRequest::new(["/bin/sh", "-c", &script]), stdin)
        })
        .collect();
    for (number, exec) in execs.into_iter().enumerate() {
        let done = exec.wait();
        assert_eq!(done.result.code, number as i32);
        assert_eq!(done.text(), format!("{number}\n").repeat(200) + &format!("in {number}"));
        assert_eq!(done.stderr, format!("e{number}\n").into_bytes());
    }
    machine.finish();
}

/// A caller's pipe: what is written is there before the next, its end is an end of file; and a reader that closes does not
/// hold the exec.
fn stdin_as_it_comes(machine: &Machine) {
    let (read, write) = rustix::pipe::pipe().unwrap();
    let mut write = File::from(write);
    let script = "while read line; do echo got $line; done; echo end";
    let going = machine.begin(ExecRequest::new(["/bin/sh", "-c", script]), Stdin::Descriptor(read));
    for number in 0..3 {
        writeln!(write, "{number}").unwrap();
        let answer = format!("got {number}\n");
        wait_until("the answer to a line", PATIENCE, || going.stdout.text().ends_with(&answer));
    }
    drop(write);
    assert_eq!(going.wait().text(), "got 0\ngot 1\ngot 2\nend\n");
    // Never written to, never closed by the caller, closed by the command.
    let (read, _write) = rustix::pipe::pipe().unwrap();
    let begun = Instant::now();
    let request = ExecRequest::new(["/bin/sh", "-c", "exec <&-; echo closed; exit 3"]);
    let done = machine.exec(request, Stdin::Descriptor(read));
    assert_eq!((done.text().as_str(), done.result.code), ("closed\n", 3));
    assert!(begun.elapsed() < SOON);
}

#[test]
fn output_is_kept_to_exactly_the_limit_and_counted_beyond() {
    const LIMIT: u64 = 1 << 20;
    let machine = Machine::start("limits", |policy| policy.limits.output_mib = 1);
    let mut expected = Vec::new();
    for (stdout, stderr) in [(LIMIT, 0), (LIMIT + 1, LIMIT), (LIMIT - 1, LIMIT + 1), (3 * LIMIT, 1)] {
        let done =
            machine.sh(&format!("head -c {stdout} /dev/zero; head -c {stderr} /dev/zero | tr '\\0' e >&2"));
        assert_eq!(
            (done.stdout.len() as u64, done.stderr.len() as u64),
            (stdout, stderr),
            "all is passed on"
        );
        for (total, came) in [(stdout, done.result.stdout), (stderr, done.result.stderr)] {
            let came = came.unwrap();
            assert_eq!((came.total_bytes, came.kept_bytes), (total, total.min(LIMIT)));
            assert_eq!(came.truncated(), total > LIMIT);
            expected.push((total, total.min(LIMIT), total > LIMIT));
        }
    }
    let (_, record) = machine.finish();
    let facts: Vec<_> = record
        .facts("output")
        .map(|fact| {
            let number = |name: &str| fact[name].as_u64().unwrap();
            (number("total_bytes"), number("kept_bytes"), fact["truncated"] == true)
        })
        .collect();
    assert_eq!(facts, expected);
}

#[test]
fn ends_are_told_apart_and_nobody_holds_one_up() {
    let machine = Machine::start("ends", |policy| policy.limits.memory_mib = 192);
    for number in [1, 2, 9, 10, 15] {
        assert_eq!(machine.sh(&format!("kill -{number} $$; sleep 60")).result.code, 128 + number);
        assert_eq!(machine.sh(&format!("exit {}", 128 + number)).result.code, 128 + number);
    }
    // The kernel kills for want of memory what does nothing wrong but take it; a SIGKILL of its own is none.
    let starved = machine.sh("exec tail /dev/zero");
    assert_eq!(starved.result.code, 137);
    // Grandchildren that keep the pipe open, one of them in a session of its own, do not hold the result.
    let begun = Instant::now();
    let held = machine.sh("sleep 300 & setsid sleep 300 & (setsid setsid sleep 300 &); echo $$; echo done");
    assert!(held.text().ends_with("done\n") && held.result.stragglers, "{held:?}");
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert_eq!(machine.sh("ps | grep -c '[s]leep 300'").text(), "0\n", "the grandchildren are still there");
    // The control: while its exec goes on, a grandchild is seen from another one.
    let (read, write) = rustix::pipe::pipe().unwrap();
    let script = "setsid sleep 300 & echo up; cat";
    let going = machine.begin(ExecRequest::new(["/bin/sh", "-c", script]), Stdin::Descriptor(read));
    wait_until("the control", PATIENCE, || going.stdout.text() == "up\n");
    assert_eq!(machine.sh("ps | grep -c '[s]leep 300'").text(), "1\n");
    drop(write);
    assert_eq!(going.wait().result.code, 0);
    let (_, record) = machine.finish();
    let ends: Vec<_> = record.facts("exec_ended").collect();
    for (pair, number) in ends.chunks(2).zip([1, 2, 9, 10, 15]) {
        assert_eq!((&pair[0]["how"], &pair[0]["signal"]), (&"signalled".into(), &number.into()));
        assert_eq!((&pair[1]["how"], &pair[1]["code"]), (&"exited".into(), &(128 + number).into()));
        assert!(pair[1]["signal"].is_null() && pair[0]["code"].is_null(), "{pair:?}");
    }
    assert_eq!((&ends[10]["how"], &ends[10]["signal"]), (&"oom".into(), &9.into()));
}

#[test]
#[ignore = "a minute; `attacks/output-flood.toml` does it for seconds"]
fn a_minute_of_yes_costs_the_host_no_memory() {
    let outcome = Job::new(["yes"]).flags(["--timeout", "60"]).run();
    outcome.assert_allowed(124);
    println!("{} MiB came, peak memory of hotcell {} KiB", outcome.stdout_total >> 20, outcome.peak_rss_kib);
    assert!(outcome.stdout_total > 16 << 20, "{} bytes are no flood", outcome.stdout_total);
    assert!(outcome.peak_rss_kib < 64 << 10, "{} KiB", outcome.peak_rss_kib);
    assert!(bundle_bytes(&outcome.bundle()) < 32 << 20);
}

fn bundle_bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries
        .map(|entry| match entry.metadata().unwrap() {
            metadata if metadata.is_dir() => bundle_bytes(&entry.path()),
            metadata => metadata.len(),
        })
        .sum()
}

#[test]
fn the_exec_that_asks_is_read_from_the_kernel_and_not_from_the_message() {
    let machine = Machine::start("asker", |policy| policy.exec.workspace = WorkspaceExec::Allow);
    let put = ExecRequest::new(["/bin/sh", "-c", "cat >asker; chmod 755 asker"]);
    machine.exec(put, Stdin::Bytes(built("asker.c")));
    // Two that live at once. The second says that it is the first, that it is nobody, and at last who it is.
    let asking = |names: &str, then: &str| {
        let script = format!("for name in {names}; do ./asker ${{name%-*}} /workspace/$name; done; {then}");
        ExecRequest::new(["/bin/sh", "-c", &script])
    };
    let (hold, go) = rustix::pipe::pipe().unwrap();
    let first = machine.begin(asking("2-first", "read line"), Stdin::Descriptor(hold));
    wait_until("the first one's answer", PATIENCE, || first.stdout.text() == "0a\n");
    let forged = "2-second 0-second 4000000000-second 3-second";
    assert_eq!(machine.exec(asking(forged, ""), Stdin::Empty).text(), "0a\n".repeat(4));
    drop(go);
    first.wait();
    let (_, record) = machine.finish();
    let actors: Vec<u64> = record.asked.iter().map(|asked| asked["actor"].as_u64().unwrap()).collect();
    assert_eq!(actors.len(), 5, "{:?}", record.asked);
    assert_ne!(actors[0], actors[4], "the control: the two are told apart");
    assert!(actors[1..].iter().all(|actor| *actor == actors[4]), "{actors:?}");
}

/// An exec of this script, which answers each line with one, and where it is asked.
fn answering(machine: &Machine, script: &str) -> (Going, File) {
    let (questions, ask) = rustix::pipe::pipe().unwrap();
    let going = machine.begin(ExecRequest::new(["/bin/sh", "-c", script]), Stdin::Descriptor(questions));
    (going, File::from(ask))
}

fn answer(going: &Going, ask: &mut File, question: &str) -> String {
    let before = going.stdout.text().lines().count();
    ask.write_all(format!("{question}\n").as_bytes()).unwrap();
    wait_until("an answer", PATIENCE, || going.stdout.text().lines().count() > before);
    going.stdout.text().lines().last().unwrap().to_owned()
}

#[test]
fn the_next_execs_process_is_there_before_it_is_asked_for_unless_none_is_to_follow() {
    let machine = Machine::start("ahead", |_| {});
    let (asker, mut ask) =
        answering(&machine, "while read line; do read a b c d last </proc/loadavg; echo $last; done");
    // The last process that was made, by the kernel's own count; no process is made to ask for it.
    let mut last_process = || answer(&asker, &mut ask, "?").parse::<u32>().unwrap();
    for _ in 0..3 {
        let own: u32 = machine.sh("echo $$").text().trim().parse().unwrap();
        wait_until("a process that nobody asked for", PATIENCE, || last_process() > own);
        // Nothing else was made since: it is the next exec's.
        let next: u32 = machine.sh("echo $$").text().trim().parse().unwrap();
        assert_eq!(next, own + 1);
    }
    let last = ExecRequest { last: true, ..ExecRequest::new(["/bin/sh", "-c", "echo $$"]) };
    let own: u32 = machine.exec(last, Stdin::Empty).text().trim().parse().unwrap();
    // The question is heard after all that the init does when an exec has ended.
    assert_eq!(last_process(), own, "none is made ready where none is meant to follow");
    assert_eq!(machine.sh("echo $$").text().trim().parse(), Ok(own + 1), "one that follows all the same");
    drop(ask);
    asker.wait();
    machine.finish();
}

/// The process that waits for the next order has the workload's user.
#[test]
fn an_exec_starts_though_the_workload_has_killed_or_stopped_the_process_that_waits_for_it() {
    let machine = Machine::start("signalled", |_| {});
    let (signaller, mut ask) = answering(
        &machine,
        "while read signal; do read a b c d last </proc/loadavg; kill -$signal $last 2>/dev/null; echo $? $last; done",
    );
    // Whether the last process that was made may be signalled, and which it is.
    let mut signalled = |signal: &str| {
        let answer = answer(&signaller, &mut ask, signal);
        let (hit, last) = answer.split_once(' ').unwrap();
        (hit == "0", last.parse::<u32>().unwrap())
    };
    machine.sh("true");
    for (signal, forked) in [("STOP", 0), ("KILL", 1)] {
        // Signal 0 only asks. Until that process has its user it is root's.
        wait_until("a process that waits as the workload's user", PATIENCE, || signalled("0").0);
        let (hit, waits) = signalled(signal);
        assert!(hit, "{signal}");
        // By the time that this is answered the guest was idle, and what was killed has ended.
        signalled("0");
        // The control: what was killed is forked anew, what was stopped goes on.
        let next = machine.sh("echo $$");
        let next: u32 = next.text().trim().parse().unwrap_or_else(|_| panic!("{signal} {next:?}"));
        assert_eq!(next, waits + forked, "{signal}");
    }
    drop(ask);
    signaller.wait();
    machine.finish();
}
