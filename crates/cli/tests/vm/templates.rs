//! Runs that go on from a template: what they share and what not, what they can't do to it, and who makes it.

use crate::harness::{
    Job, Live, Outcome, PATIENCE, SOON, Slot, home, hotcell, verify, vmms_of, wait_until, warm_up,
};
use crate::images::{Built, folder};
use crate::machine::{busybox, runtime};
use hotcell_ledger::Digest;
use hotcell_runtime::{ExecIo, ExecRequest, Stdin};
use hotcell_vm::TemplateStore;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a machine could be told apart by, one to a line: name, value.
const FINGERPRINT: &str = "echo pid $$
echo kernel $(uname -r)
echo urandom $(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' ')
echo uuid $(cat /proc/sys/kernel/random/uuid)
echo boot $(cat /proc/sys/kernel/random/boot_id)
echo stack $(grep '\\[stack' /proc/self/maps | cut -d- -f1)
echo vdso $(grep '\\[vdso' /proc/self/maps | cut -d- -f1)
echo mktemp $(mktemp -u /tmp/XXXXXX)";

fn values(text: &str) -> BTreeMap<String, String> {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The template that a run went on from.
fn template_of(outcome: &Outcome) -> Option<String> {
    let record = outcome.record();
    let start = record.fact("isolation")["details"]["start"].as_str().unwrap().to_owned();
    let parts =
        record.facts("measured").filter(|fact| fact["what"].as_str().unwrap().starts_with("template-"));
    let id = start.strip_prefix("clone of template ").map(str::to_owned);
    assert_eq!(parts.count(), if id.is_some() { 3 } else { 0 }, "{start}");
    assert!(id.is_some() || start == "cold", "{start}");
    id
}

#[test]
fn two_clones_of_one_template_share_no_random_number_and_no_trace() {
    let leave = "echo secret > /workspace/left; echo secret > /tmp/left; mkdir /workspace/d; sleep 1000 & ";
    let look = "; echo files $(ls -A /workspace /tmp /run /dev/shm | grep -c left)
set -- /proc/[0-9]*; echo processes $#";
    let script = format!("{FINGERPRINT}{look}; {leave} ls /workspace /tmp | grep -c left");
    let outcomes: Vec<Outcome> = (0..2).map(|_| Job::sh(&script).run()).collect();
    let ids: Vec<Option<String>> = outcomes.iter().map(template_of).collect();
    assert!(ids[0].is_some() && ids[0] == ids[1], "two clones of one template: {ids:?}");
    let [first, second] = [&outcomes[0], &outcomes[1]].map(|outcome| {
        outcome.assert_allowed(0);
        // The control: what a run leaves can be seen by the run itself.
        assert!(outcome.text().ends_with("2\n"), "{outcome:?}");
        values(&outcome.text())
    });
    for (name, value) in &first {
        assert!(!value.is_empty(), "{name}");
        let same = second[name] == *value;
        // The controls: what can't differ is the same, so that sameness can be seen.
        let shared = ["pid", "kernel", "files", "processes"].contains(&name.as_str());
        assert_eq!(same, shared, "{name}: {value} and {}", second[name]);
    }
    assert_eq!(first["files"], "0");
    assert_eq!(first.len(), 10, "{first:?}");
}

#[test]
fn a_clones_clock_is_right_to_fifty_milliseconds() {
    let out = tempfile::tempdir().unwrap();
    let (spec, mut boot) = busybox(&format!("test-clock-{}", std::process::id()), None);
    let _slot = Slot::take();
    let runtime = runtime(out.path(), PATIENCE);
    let store = TemplateStore::in_cache(&home().join("cache"));
    boot.template = runtime.template(&store, &spec, &boot, &mut |_| ()).unwrap();
    assert!(boot.template.is_some());
    let run = runtime.start(spec, boot);
    let (to_guest, mut ask) = io::pipe().unwrap();
    let (answers, from_guest) = io::pipe().unwrap();
    let script = "while read line; do touch /tmp/now; stat -c %y /tmp/now; done";
    let exec = run.exec(
        ExecRequest::new(["/bin/sh", "-c", script]),
        ExecIo {
            stdin: Stdin::Descriptor(to_guest.into()),
            stdout: Some(Box::new(from_guest)),
            stderr: None,
        },
    );
    let mut answers = BufReader::new(answers).lines();
    // The guest looks at its clock between the question and the answer: by so much it is ahead at least, at most.
    let (mut at_least, mut at_most) = (i128::MIN, i128::MAX);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as i128;
    for _ in 0..10 {
        let asked = now();
        ask.write_all(b"?\n").unwrap();
        let said = answers.next().unwrap().unwrap();
        let (guest, answered) = (nanoseconds(&said), now());
        (at_least, at_most) = (at_least.max(guest - answered), at_most.min(guest - asked));
    }
    drop(ask);
    assert_eq!(exec.wait().unwrap().code, 0);
    let report = run.finish();
    assert_eq!(report.verdict.as_str(), "ALLOWED", "{report:?}");
    let allowed = Duration::from_millis(50).as_nanos() as i128;
    assert!(at_least <= allowed && at_most >= -allowed, "ahead by {at_least} to {at_most} ns");
    // The control: a clock that is a second off is outside, however slow the answers were.
    assert!(at_most - at_least < 1_000_000_000, "the answers were too slow to say anything");
}

/// Since 1970, of `2026-11-30 08:56:21.440645648 +0000`.
fn nanoseconds(text: &str) -> i128 {
    let (day, rest) = text.split_once(' ').unwrap();
    let (time, _) = rest.split_once(' ').unwrap();
    let (clock, fraction) = time.split_once('.').unwrap();
    let numbers =
        |text: &str, at: char| -> Vec<i64> { text.split(at).map(|word| word.parse().unwrap()).collect() };
    let (ymd, hms) = (numbers(day, '-'), numbers(clock, ':'));
    // Days from civil, by Howard Hinnant's chrono-compatible algorithms; years begin in March.
    let year = if ymd[1] <= 2 { ymd[0] - 1 } else { ymd[0] };
    let (era, month) = (year / 400, (ymd[1] + 9) % 12);
    let of_year = (153 * month + 2) / 5 + ymd[2] - 1;
    let of_era = year % 400;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    let seconds = days * 86_400 + hms[0] * 3600 + hms[1] * 60 + hms[2];
    i128::from(seconds) * 1_000_000_000 + fraction.parse::<i128>().unwrap()
}

#[test]
fn cold_boots_from_scratch_and_the_record_says_which() {
    let cold = Job::new(["true"]).flags(["--cold"]).run();
    cold.assert_allowed(0);
    assert_eq!(template_of(&cold), None);
    assert!(template_of(&Job::new(["true"]).run()).is_some());
}

fn live_clone() -> Live {
    let live = Job::sh(
        "dd if=/dev/urandom of=/tmp/fill bs=1M count=40 2>/dev/null; \
        dd if=/dev/urandom of=/workspace/fill bs=1M count=8 2>/dev/null; sync; echo up; sleep 170",
    )
    .start();
    live.wait_for("up\n");
    live
}

#[test]
fn a_run_that_fills_memory_and_disk_leaves_its_template_as_it_was_and_holds_it_read_only() {
    let live = live_clone();
    let vmm = live.vmms()[0];
    // (file, may be written) of every open file of the VMM that is a part of a template or of the run's folder.
    let mut held = Vec::new();
    for entry in fs::read_dir(format!("/proc/{vmm}/fd")).unwrap() {
        let path = entry.unwrap().path();
        let Ok(target) = fs::read_link(&path) else { continue };
        let info = fs::read_to_string(format!("/proc/{vmm}/fdinfo/{}", path.file_name().unwrap().display()))
            .unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        held.push((target, u32::from_str_radix(flags, 8).unwrap() & 3 != 0));
    }
    let of = |end: &str| -> Vec<bool> {
        held.iter().filter(|(target, _)| target.ends_with(end)).map(|(_, writable)| *writable).collect()
    };
    let (ram, own_disk) = (of("ram"), of("workspace.img"));
    assert!(!ram.is_empty() && !ram.contains(&true), "{held:?}");
    assert!(
        !own_disk.is_empty() && !own_disk.contains(&false),
        "the control: the run's own disk can be written"
    );
    let maps = fs::read_to_string(format!("/proc/{vmm}/maps")).unwrap();
    let ram: Vec<&str> = maps.lines().filter(|line| line.ends_with("/ram")).collect();
    assert!(
        !ram.is_empty() && ram.iter().all(|line| line.split(' ').nth(1).unwrap().ends_with('p')),
        "{ram:?}"
    );
    live.signal(Signal::INT);
    let outcome = live.wait();
    outcome.assert_gone();
    let id = template_of(&outcome).unwrap();
    let check = hotcell().args(["template", "ls", "--verify"]).output().unwrap();
    assert!(check.status.success(), "{check:?}");
    let listed = String::from_utf8_lossy(&check.stdout).into_owned();
    let row = listed.lines().find(|line| line.starts_with(&id[..12]));
    assert!(row.is_some_and(|row| row.ends_with(", intact")), "{id}: {listed}");
    // The control: one byte of a copy, with the digests of the original.
    let copy = tempfile::tempdir().unwrap();
    let (from, to) =
        (home().join("cache/templates").join(&id), copy.path().join("cache/templates").join(&id));
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    let copied = Command::new("cp").args(["-a", "--sparse=always"]).args([&from, &to]).status().unwrap();
    assert!(copied.success());
    let check =
        hotcell().env("HOTCELL_HOME", copy.path()).args(["template", "ls", "--verify"]).output().unwrap();
    assert_eq!(check.status.code(), Some(125), "{check:?}");
}

/// A home with kernel and image, and without a template.
fn fresh_home() -> tempfile::TempDir {
    warm_up();
    let fresh = tempfile::tempdir().unwrap();
    for part in ["cache/kernels", "cache/initramfs", "cache/workspace", "state/images", "state/key"] {
        let to = fresh.path().join(part);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        let copied =
            Command::new("cp").args(["-a", "--sparse=always"]).arg(home().join(part)).arg(&to).status();
        assert!(copied.unwrap().success());
    }
    fresh
}

fn run_in(home: &Path, name: &str) -> Child {
    let mut command = hotcell();
    command.env("HOTCELL_HOME", home).args(["run", "--accel", "tcg", "--name", name, "--", "true"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn machines_of_templates(home: &Path) -> Vec<String> {
    let entries = fs::read_dir(home.join("state/live")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("template-"))
        .collect()
}

fn templates(home: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(home.join("cache/templates")).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

#[test]
fn a_killed_maker_leaves_nothing_that_is_used_and_two_makers_make_one() {
    let (fresh, _slot, _other) = (fresh_home(), Slot::take(), Slot::take());
    let mut killed = run_in(fresh.path(), "test-maker-killed");
    let mut machine = String::new();
    wait_until("the machine that is to be saved", PATIENCE, || {
        machine = machines_of_templates(fresh.path()).pop().unwrap_or_default();
        !machine.is_empty() && !vmms_of(&machine).is_empty() && !templates(fresh.path()).is_empty()
    });
    kill_process(Pid::from_child(&killed), Signal::KILL).unwrap();
    killed.wait().unwrap();
    wait_until("its machine's end", SOON, || vmms_of(&machine).is_empty());
    assert!(templates(fresh.path()).iter().all(|path| Digest::from_hex(name_of(path)).is_none()));
    let runs = ["test-maker-one", "test-maker-two"].map(|name| (name, run_in(fresh.path(), name)));
    for (name, run) in runs {
        let output = run.wait_with_output().unwrap();
        assert!(output.status.success(), "{name}: {output:?}");
        assert_eq!(verify(&fresh.path().join("state/runs").join(name)), 0);
    }
    let made = templates(fresh.path());
    assert_eq!(made.len(), 1, "what the killed one left is gone, and there is one template: {made:?}");
    assert!(Digest::from_hex(name_of(&made[0])).is_some());
    assert!(machines_of_templates(fresh.path()).is_empty(), "nothing is left in the registry");
}

#[test]
fn an_image_is_built_with_its_template_unless_told_otherwise() {
    let (fresh, _slot) = (fresh_home(), Slot::take());
    let said = |words: &[&str]| {
        let output = hotcell().env("HOTCELL_HOME", fresh.path()).args(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let run = |image| said(&["run", "--accel", "tcg", "--image", image, "--", "true"]);
    let making = "making the template";
    let built = said(&["image", "build", "with", "--from", "busybox"]);
    assert!(built.contains(making) && templates(fresh.path()).len() == 1, "{built}");
    assert!(!run("with").contains(making));
    said(&["image", "rm", "with"]);
    let built = said(&["image", "build", "without", "--from", "busybox", "--no-template"]);
    assert!(
        !built.contains(making) && templates(fresh.path()).len() == 1,
        "that of the image busybox: {built}"
    );
    assert!(!run("without").contains(making), "the same root has the same template");
}

/// A run whose image and template are removed under it, by hand and by `prune`, goes on; what is of use stays.
#[test]
fn pruning_removes_what_nothing_here_can_use_and_harms_no_run() {
    let (fresh, _slot) = (fresh_home(), Slot::take());
    let ask = |words: &[&str]| {
        let output = hotcell().env("HOTCELL_HOME", fresh.path()).args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
            + std::str::from_utf8(&output.stderr).unwrap().trim_end_matches('\n')
    };
    // An image of another root: busybox and one file more.
    let tree = fresh.path().join("tree");
    fs::create_dir_all(tree.join("bin")).unwrap();
    fs::copy("/bin/busybox", tree.join("bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", tree.join("bin/sh")).unwrap();
    let from = format!("dir:{}", tree.display());
    let said = ask(&["image", "build", "other", "--from", &from]);
    assert!(said.contains("template of other was made"), "{said}");
    let said = ask(&["image", "build", "other", "--from", &from]);
    assert!(said.contains("template of other was there already"), "{said}");
    assert!(ask(&["image", "build", "same", "--from", "busybox"]).contains("was made"));
    let listed = ask(&["template", "ls"]);
    let row = |image: &str| {
        let row = listed.lines().find(|line| line.contains(&format!("  {image}, kernel cloud, ")));
        row.unwrap_or_else(|| panic!("{image}: {listed}")).split(' ').next().unwrap().to_owned()
    };
    let (of_other, of_busybox) = (row("other"), row("busybox, same"));
    assert!(
        !listed.contains("intact") && ask(&["template", "ls", "--verify"]).matches(", intact").count() == 2
    );
    assert!(ask(&["template", "prune"]).contains("2 templates kept"));
    let mut command = hotcell();
    command.env("HOTCELL_HOME", fresh.path());
    command.args(["run", "--accel", "tcg", "--image", "other", "--name", "test-prune-live", "--"]);
    command.args(["/bin/sh", "-c", "echo up; read word; echo got $word"]);
    let mut live =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 3];
    live.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    fs::remove_dir_all(fresh.path().join("state/images/other")).unwrap();
    let said = ask(&["template", "prune"]);
    assert!(
        said.contains(&format!("removed {of_other}: its image")) && said.contains("1 template kept"),
        "{said}"
    );
    live.stdin.take().unwrap().write_all(b"it\n").unwrap();
    let ended = live.wait_with_output().unwrap();
    assert!(ended.status.success() && ended.stdout == b"got it\n", "{ended:?}");
    // An image that is built anew takes the templates of its old root with it; the last of a root's images, too.
    ask(&["image", "build", "other", "--from", &from]);
    fs::write(tree.join("more"), "more").unwrap();
    ask(&["image", "build", "other", "--from", &from, "--no-template"]);
    assert!(!ask(&["template", "ls"]).contains(&of_other));
    ask(&["image", "rm", "same"]);
    assert!(ask(&["template", "rm", &of_busybox[..6]]).contains("removed"));
    assert_eq!(ask(&["template", "ls"]), "there is no template\n");
}

fn name_of(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

/// What a machine reads ahead while nobody speaks to it, and one that a run boots does not.
#[test]
fn a_machine_that_is_saved_has_read_programs_ahead_and_one_whose_run_waits_has_not() {
    let dir = tempfile::tempdir().unwrap();
    folder(dir.path(), &[("usr/bin/unused", 0o755, &"never executed\n".repeat(400_000))]);
    let image = Built::from("ahead", &format!("dir:{}", dir.path().display()), &[]);
    let cached = |job: Job| -> u64 {
        let outcome = job.flags(["--image", &image.0]).run();
        outcome.assert_allowed(0);
        outcome.text().split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let ask = || Job::sh("grep ^Cached: /proc/meminfo");
    let (cold, clone) = (cached(ask().flags(["--cold"])), cached(ask()));
    assert!(clone > cold + 4000, "{clone} KiB of files in a clone's memory, {cold} in a fresh one's");
}

/// An image with Python, kept in the shared home: to put a Debian together takes minutes.
fn python() -> Option<&'static str> {
    const NAME: &str = "test-python";
    warm_up();
    let lock = fs::File::create(home().join("python")).unwrap();
    lock.lock().unwrap();
    if !home().join("state/images").join(NAME).exists() {
        // Fetches the mirror's lists and no package.
        let simulate =
            Command::new("mmdebstrap").args(["--simulate", "--variant=minbase", "bookworm", "-"]).output();
        if !simulate.is_ok_and(|output| output.status.success()) {
            println!("NOT RUN: no mmdebstrap, or no mirror answers it");
            return None;
        }
        let flags = ["--from", "debian:bookworm", "--include", "python3-minimal"];
        let output = hotcell().args(["image", "build", NAME]).args(flags).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    Some(NAME)
}

/// Python seeds its generator from the kernel when it starts, in each clone anew; so it does its hashes of strings.
#[test]
fn two_clones_draw_different_numbers_in_python() {
    let Some(image) = python() else { return };
    let script = "import random; random.seed(7); print('seeded', random.random())
random.seed(); print('random', random.random()); print('hash', hash('a')); print('system', random.SystemRandom().random())";
    let fresh = "import random; print('fresh', random.random())";
    let both = format!("python3 -c \"{script}\"; python3 -c \"{fresh}\"");
    let outcomes: Vec<Outcome> = (0..2).map(|_| Job::sh(&both).flags(["--image", image]).run()).collect();
    let ids: Vec<Option<String>> = outcomes.iter().map(template_of).collect();
    assert!(ids[0].is_some() && ids[0] == ids[1], "two clones of one template: {ids:?}");
    let [first, second] = [&outcomes[0], &outcomes[1]].map(|outcome| values(&outcome.text()));
    assert_eq!(first.len(), 5, "{:?}", outcomes[0]);
    for (name, value) in &first {
        // The control: what is seeded alike is alike.
        assert_eq!(second[name] == *value, name == "seeded", "{name}: {value} and {}", second[name]);
    }
}
