//! The jail of a real VMM, read from `/proc` by the test itself, as root and as
//! an ordinary user; and what is left when the owner is killed.
//!
//! Each check is first shown to fail on this very test process, which is in no jail.

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A user that owns nothing; it needs no entry in the password file.
const USER: u32 = 54_321;
const PATIENCE: Duration = Duration::from_secs(150);

/// Hotcell with a home of its own, as root or as an ordinary user.
struct Hotcell {
    program: PathBuf,
    home: tempfile::TempDir,
    user: Option<u32>,
}

impl Hotcell {
    fn new(user: Option<u32>) -> Hotcell {
        let home = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o755)).tempdir().unwrap();
        let program = home.path().join("hotcell");
        // By another process: one that this one forks meanwhile, for another test, would hold the file open to write.
        let copied =
            Command::new("cp").args([env!("CARGO_BIN_EXE_hotcell").as_ref(), program.as_path()]).status();
        assert!(copied.unwrap().success());
        // Kernel and image are made once, by whoever may; not every user can use apt.
        if let Some(shared) = std::env::var_os("HOTCELL_HOME").filter(|home| Path::new(home).is_dir()) {
            for part in ["cache", "state/images"] {
                let from = Path::new(&shared).join(part);
                if from.is_dir() {
                    let to = home.path().join("home").join(part);
                    fs::create_dir_all(to.parent().unwrap()).unwrap();
                    assert!(Command::new("cp").arg("-a").args([&from, &to]).status().unwrap().success());
                }
            }
        }
        fs::create_dir_all(home.path().join("home")).unwrap();
        if let Some(user) = user {
            let owner = format!("{user}:{user}");
            let owned = Command::new("chown").arg("-R").arg(owner).arg(home.path()).status().unwrap();
            assert!(owned.success());
        }
        Hotcell { program, home, user }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(words).env("HOTCELL_HOME", self.home.path().join("home")).current_dir("/");
        command.stdin(Stdio::null());
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        command
    }

    fn json(&self, words: &[&str]) -> Value {
        let output = self.command(words).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let last =
            text.lines().last().unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        serde_json::from_str(last).unwrap()
    }

    /// A run whose guest is at work; its owner and the entry of the registry.
    fn running(&self) -> (Child, Value) {
        let mut command = self.command(&["run", "--", "sh", "-c", "echo at work; sleep 600"]);
        let mut owner = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        let mut stdout = std::io::BufReader::new(owner.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
        assert_eq!(line, "at work\n");
        let runs = self.json(&["ps", "--json"]);
        (owner, runs["runs"][0]["entry"].clone())
    }
}

/// What `/proc` says of one process, and which of the walls it has.
fn walls(pid: u64) -> BTreeSet<String> {
    let base = format!("/proc/{pid}");
    let status = fs::read_to_string(format!("{base}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {name}")).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let mut walls = BTreeSet::new();
    let mut wall = |name: &str, there: bool| {
        if there {
            walls.insert(name.to_owned());
        }
    };
    wall("not root", field("Uid").split(' ').chain(field("Gid").split(' ')).all(|id| id != "0"));
    wall("no groups", field("Groups").is_empty());
    wall(
        "no capabilities",
        ["CapInh", "CapPrm", "CapEff", "CapAmb"]
            .iter()
            .all(|set| u64::from_str_radix(&field(set), 16).unwrap() == 0),
    );
    wall("empty bounding set", u64::from_str_radix(&field("CapBnd"), 16).unwrap() == 0);
    wall("no new privileges", field("NoNewPrivs") == "1");
    wall("two filters", field("Seccomp") == "2" && field("Seccomp_filters").parse::<u32>().unwrap() >= 2);
    for kind in ["user", "mnt", "net", "pid", "ipc", "uts", "cgroup"] {
        let link = |whose: &str| fs::read_link(format!("{whose}/ns/{kind}")).unwrap();
        wall(&format!("{kind} namespace"), link(&base) != link("/proc/self"));
    }
    let hidden = ["home", "root", "tmp", "var", "sys", "run"];
    let root: Vec<String> = fs::read_dir(format!("{base}/root"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    wall("small root", !root.is_empty() && !root.iter().any(|name| hidden.contains(&name.as_str())));
    let mounts = fs::read_to_string(format!("{base}/mountinfo")).unwrap();
    wall(
        "nothing writable",
        mounts.lines().all(|line| line.split(' ').nth(5).unwrap().split(',').any(|option| option == "ro")),
    );
    let devices = fs::read_dir(format!("{base}/root/dev")).unwrap().count();
    wall("three devices", devices == 3);
    let routes = fs::read_to_string(format!("{base}/net/dev")).unwrap();
    wall("no network device", routes.lines().skip(2).all(|line| line.trim_start().starts_with("lo:")));
    let limits = fs::read_to_string(format!("{base}/limits")).unwrap();
    wall(
        "no core file",
        limits.lines().any(|line| {
            line.starts_with("Max core file size") && line.split_whitespace().nth(5) == Some("0")
        }),
    );
    wall("own cgroups", fs::read_to_string(format!("{base}/cgroup")).unwrap().contains("/hotcell-run-"));
    walls
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|metadata| std::os::unix::fs::MetadataExt::uid(&metadata) == 0)
}

/// Processes that are alive (no zombies) and carry the mark of this run.
fn marked(run_id: &str) -> Vec<u64> {
    let name = format!("hotcell-{run_id}");
    let all = fs::read_dir("/proc").unwrap();
    all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let argv = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            argv.split(|&byte| byte == 0).any(|word| word == name.as_bytes())
        })
        .collect()
}

fn kill(pid: u64) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

/// Looks at a live run's VMM, kills the owner, and looks at what is left.
fn held_and_gone(hotcell: &Hotcell, expected: &[&str]) {
    let (mut owner, entry) = hotcell.running();
    let vmm = entry["vmm"]["pid"].as_u64().unwrap();
    let run_id = entry["run_id"].as_str().unwrap().to_owned();
    let control = walls(std::process::id().into());
    let found = walls(vmm);
    println!("VMM {vmm}: {found:?}\n{}", fs::read_to_string(format!("/proc/{vmm}/status")).unwrap());
    for wall in expected {
        assert!(found.contains(*wall), "the VMM lacks: {wall}; it has {found:?}");
        let shared = *wall == "no groups" || (!is_root() && ["not root", "no capabilities"].contains(wall));
        assert!(shared || !control.contains(*wall), "the control, in no jail, has: {wall}");
    }
    assert_eq!(marked(&run_id), [vmm]);
    let cgroups: Vec<PathBuf> = entry["cgroups"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|dir| PathBuf::from(dir.as_str().unwrap()))
        .collect();
    for dir in &cgroups {
        let members = fs::read_to_string(dir.join("cgroup.procs")).unwrap();
        assert_eq!(members.trim(), vmm.to_string(), "{}", dir.display());
    }
    assert_eq!(cgroups.is_empty(), !expected.contains(&"own cgroups"));

    kill(entry["owner"]["pid"].as_u64().unwrap());
    owner.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(1);
    while !marked(&run_id).is_empty() {
        assert!(Instant::now() < deadline, "the VMM outlived its owner by a second");
        std::thread::sleep(Duration::from_millis(5));
    }
    let reaped = hotcell.json(&["reap", "--json"]);
    assert_eq!(reaped["clean"], true, "{reaped}");
    for dir in &cgroups {
        assert!(!dir.exists(), "{} is left", dir.display());
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&run_id) && !mounts.contains("subset=pid"), "a mount is left");
}

const EVERYWHERE: [&str; 13] = [
    "not root",
    "no groups",
    "no capabilities",
    "empty bounding set",
    "no new privileges",
    "two filters",
    "mnt namespace",
    "net namespace",
    "pid namespace",
    "small root",
    "nothing writable",
    "three devices",
    "no core file",
];

#[test]
fn as_root_the_vmm_is_a_user_of_its_own_behind_all_walls() {
    if !is_root() {
        println!("NOT RUN: needs root");
        return;
    }
    let hotcell = Hotcell::new(None);
    let doctor = hotcell.json(&["doctor", "--json"]);
    let missing = |name: &str| {
        let points = doctor["points"].as_array().unwrap();
        points.iter().any(|point| point["name"] == name && point["ok"] == false)
    };
    let mut expected = EVERYWHERE.to_vec();
    if missing("jail: memory limit") {
        println!("NOT RUN: cgroup limits, this host gives none");
    } else {
        expected.push("own cgroups");
    }
    held_and_gone(&hotcell, &expected);
    let report = hotcell.json(&["run", "--json", "--", "true"]);
    let jail = report["isolation"]["jail"].as_str().unwrap();
    let number = jail.split("uid ").nth(1).unwrap().split(',').next().unwrap().parse::<u32>().unwrap();
    assert!(jail.contains("no capabilities, no new privileges, seccomp") && number >= 65_534, "{jail}");
    assert_eq!(report["teardown"]["verified"], true);
}

#[test]
fn as_an_ordinary_user_the_walls_are_a_user_namespaces() {
    let hotcell = Hotcell::new(is_root().then_some(USER));
    let doctor = hotcell.json(&["doctor", "--json"]);
    let points = doctor["points"].as_array().unwrap();
    let lacks = |name: &str| points.iter().any(|point| point["name"] == name && point["ok"] == false);
    if lacks("jail: mount") {
        println!("NOT RUN: this host gives ordinary users no user namespace");
        return;
    }
    let mut expected = EVERYWHERE.to_vec();
    expected.push("user namespace");
    let limited = !["memory", "cpu", "pids"].iter().any(|limit| lacks(&format!("jail: {limit} limit")));
    if limited {
        expected.push("own cgroups");
    }
    held_and_gone(&hotcell, &expected);
    let mut required = hotcell.command(&["run", "--jail", "required", "--", "true"]);
    let output = required.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if limited {
        assert!(output.status.success(), "{said}");
    } else {
        assert_eq!(output.status.code(), Some(125), "{said}");
        assert!(said.contains("memory limit"), "{said}");
        assert!(!said.contains("record:"), "something was begun: {said}");
    }
}

#[test]
fn a_host_that_gives_less_than_it_did_starts_nothing_and_is_tried_anew() {
    if !is_root() {
        println!("NOT RUN: needs root");
        return;
    }
    let hotcell = Hotcell::new(None);
    let memory = hotcell.home.path().join("home/cache/whole-jail");
    let run = |name: &str| {
        let output = hotcell.command(&["run", "--cold", "--name", name, "--", "true"]).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run("test-gives-all").0, Some(0));
    let Some(known) = fs::read_to_string(&memory).ok() else {
        println!("NOT RUN: this host does not give the whole jail");
        return;
    };
    assert_eq!(run("test-gives-all-again").0, Some(0), "by what is remembered");
    // A cgroup that can't be made: one of that name is there.
    let base = known.split("dir: \"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    let taken = Path::new(base).join("hotcell-test-gives-less");
    fs::create_dir(&taken).unwrap();
    let (code, said) = run("test-gives-less");
    fs::remove_dir(&taken).unwrap();
    assert!(code == Some(125) && said.contains("make the run's cgroups"), "{code:?} {said}");
    assert!(said.contains("is forgotten") && !memory.exists(), "{said}");
    assert_eq!(run("test-gives-all-once-more").0, Some(0), "tried anew");
    assert_eq!(fs::read_to_string(&memory).ok(), Some(known));
}

#[test]
fn there_is_no_way_to_ask_for_less() {
    let hotcell = Hotcell::new(None);
    for word in ["none", "off", "no"] {
        let output = hotcell.command(&["run", "--jail", word, "--", "true"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
    }
}

#[test]
fn the_doctor_names_each_point_and_says_how_to_mend_it() {
    let hotcell = Hotcell::new(None);
    let begun = Instant::now();
    let doctor = hotcell.json(&["doctor", "--json"]);
    assert!(begun.elapsed() < PATIENCE);
    let points = doctor["points"].as_array().unwrap();
    assert!(points.len() >= 20, "{doctor}");
    let needed_missing = points.iter().any(|point| point["needed"] == true && point["ok"] == false);
    assert_eq!(doctor["run_possible"], !needed_missing);
    for point in points.iter().filter(|point| point["ok"] == false) {
        assert!(point["mend"].as_str().is_some_and(|mend| !mend.is_empty()), "{point}");
    }
    // Control: without QEMU on this host no run is possible, and the exit code says so.
    let mut lame = hotcell.command(&["doctor", "--json"]);
    let unshared = lame.env("HOTCELL_HOME", "/proc/no-such-folder").output().unwrap();
    assert_eq!(unshared.status.code(), Some(125));
}
