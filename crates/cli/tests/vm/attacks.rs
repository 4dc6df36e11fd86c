//! `attacks/`: one file each, run in real machines, with its control.
//!
//! A file that is not named here, an expected line that did not come, a probe
//! that reported a name nobody expected, and a control that shows nothing all fail.

use crate::harness::{Job, Outcome};
use crate::record::Record;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Attack {
    title: String,
    attack: String,
    wall: String,
    guest: Guest,
    expect: Expect,
    control: Control,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Guest {
    script: String,
    #[serde(default)]
    probe: bool,
    policy: Option<String>,
    timeout: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Expect {
    exit: Option<i32>,
    verdict: String,
    reasons: Vec<String>,
    has: Vec<String>,
    lacks: Vec<String>,
    refused: Vec<String>,
    reached: Vec<String>,
    facts: Vec<Value>,
    refusals: Vec<String>,
    advisory: Vec<String>,
    testimony: usize,
    decisions: Option<usize>,
    seconds: u64,
    rss_mib: u64,
    output_mib: u64,
    bundle_mib: u64,
}

impl Default for Expect {
    fn default() -> Expect {
        Expect {
            exit: None,
            verdict: String::new(),
            reasons: Vec::new(),
            has: Vec::new(),
            lacks: Vec::new(),
            refused: Vec::new(),
            reached: Vec::new(),
            facts: Vec::new(),
            refusals: Vec::new(),
            advisory: Vec::new(),
            testimony: 0,
            decisions: None,
            // Bounds that hold for every attack, unless a file says otherwise.
            seconds: 60,
            rss_mib: 96,
            output_mib: 0,
            bundle_mib: 64,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, tag = "how", rename_all = "lowercase")]
enum Control {
    /// The same in a machine without the wall, or the honest twin.
    Machine { why: String, script: Option<String>, policy: Option<String>, has: Vec<String> },
    /// The probe on this host.
    Host { why: String, arguments: Vec<String>, reached: Vec<String>, reached_as_root: Vec<String> },
    /// The run itself shows that the attempt was one.
    Within { why: String },
    /// Nothing can show it.
    None { why: String },
}

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../attacks").canonicalize().unwrap()
}

/// `attacks/probe.c`, built once.
pub(crate) fn probe() -> &'static [u8] {
    static PROBE: OnceLock<Vec<u8>> = OnceLock::new();
    PROBE.get_or_init(|| built("probe.c"))
}

/// A program of `attacks/`, built static.
pub(crate) fn built(source: &str) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let built = dir.path().join("program");
    let output = Command::new("cc")
        .args(["-static", "-O1", "-s", "-o"])
        .args([&built, &folder().join(source)])
        .output()
        .expect("cc is installed: the guest's programs are linked with it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::read(built).unwrap()
}

/// A script that has the probe at hand.
pub(crate) fn with_probe(script: &str) -> Job {
    Job::sh(&format!("cat >probe && chmod 755 probe && {script}")).stdin(probe())
}

/// Servers on the host that no guest may reach, and what stands for them in scripts.
struct Host {
    tcp: TcpListener,
    unix: UnixListener,
    socket: String,
}

impl Host {
    fn listen(name: &str) -> Host {
        let socket = format!("hotcell-test-{}-{name}", std::process::id());
        let address = SocketAddr::from_abstract_name(&socket).unwrap();
        let host = Host {
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            unix: UnixListener::bind_addr(&address).unwrap(),
            socket,
        };
        host.tcp.set_nonblocking(true).unwrap();
        host.unix.set_nonblocking(true).unwrap();
        host
    }

    fn fill_in(&self, text: &str) -> String {
        let port = self.tcp.local_addr().unwrap().port();
        text.replace("{port}", &port.to_string()).replace("{socket}", &self.socket)
    }

    fn heard(&self) -> bool {
        self.tcp.accept().is_ok() || self.unix.accept().is_ok()
    }
}

impl Attack {
    fn read(name: &str) -> Attack {
        let text = fs::read_to_string(folder().join(format!("{name}.toml"))).unwrap();
        let attack: Attack = toml::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        let said = [&attack.title, &attack.attack, &attack.wall, attack.control.why()];
        assert!(said.iter().all(|text| !text.is_empty()), "{name} does not say what it is");
        let expect = &attack.expect;
        assert!(
            !expect.has.is_empty() || !expect.refused.is_empty() || !expect.facts.is_empty(),
            "{name}: an attack that has to show nothing proves nothing"
        );
        attack
    }

    fn job(&self, script: &str, policy: Option<&String>) -> Job {
        let mut job = if self.guest.probe { with_probe(script) } else { Job::sh(script) };
        if let Some(policy) = policy {
            job = job.policy(policy);
        }
        match self.guest.timeout {
            Some(seconds) => job.flags(["--timeout", &seconds.to_string()]),
            None => job,
        }
    }

    fn run(&self, name: &str) {
        let host = Host::listen(name);
        let script = host.fill_in(&self.guest.script);
        let outcome = self.job(&script, self.guest.policy.as_ref()).run();
        assert!(!host.heard(), "{name} reached a server of the host");
        self.expect.check(&outcome);
        if let Some(heading) = [("privileges", "## Privileges"), ("network", "## Network")]
            .iter()
            .find_map(|(attack, heading)| (*attack == name).then_some(heading))
        {
            assert_eq!(answers(&outcome.text()), documented(heading), "docs/probes.md, {heading}");
        }
        self.control.check(self, name, &host);
    }
}

impl Expect {
    fn check(&self, outcome: &Outcome) {
        assert_eq!(outcome.verdict(), self.verdict, "{outcome:?}");
        assert_eq!(outcome.reasons(), self.reasons, "{outcome:?}");
        if let Some(exit) = self.exit {
            assert_eq!(outcome.code, Some(exit), "{outcome:?}");
        }
        let text = outcome.text();
        assert_has(&text, &self.has, outcome);
        for text in &self.lacks {
            assert!(!outcome.text().contains(text), "{text:?} came: {outcome:?}");
        }
        let said = probed(&text);
        for name in &self.refused {
            assert_eq!(said.get(name.as_str()).copied(), Some(false), "{name}: {outcome:?}");
        }
        for (name, reached) in &said {
            let known = if *reached { &self.reached } else { &self.refused };
            assert!(
                known.iter().any(|known| known == name),
                "nobody expected {name}: {reached}: {outcome:?}"
            );
        }
        let record = outcome.record();
        for wanted in &self.facts {
            assert!(
                record.facts.iter().any(|fact| includes(&fact.value, wanted)),
                "{wanted} is not in the record"
            );
        }
        if !self.refusals.is_empty() {
            assert_eq!(refusals(&record), self.refusals, "{outcome:?}");
        }
        let advisory = outcome.report("/advisory").as_array().unwrap();
        for kind in &self.advisory {
            assert!(advisory.iter().any(|finding| finding["kind"] == kind.as_str()), "{kind}: {outcome:?}");
        }
        assert!(record.testimony() >= self.testimony, "{} events of testimony", record.testimony());
        if let Some(decisions) = self.decisions {
            assert_eq!(record.decisions().len(), decisions);
        }
        assert!(outcome.after_ready() <= Duration::from_secs(self.seconds), "{outcome:?}");
        assert!(outcome.peak_rss_kib <= self.rss_mib << 10, "hotcell took {} KiB", outcome.peak_rss_kib);
        assert!(outcome.stdout_total >= self.output_mib << 20, "only {} bytes", outcome.stdout_total);
        let bundle = size_of(&outcome.bundle());
        assert!(bundle <= self.bundle_mib << 20, "the bundle has {bundle} bytes");
        println!(
            "{:?} after ready, hotcell's peak {} KiB, bundle {} KiB, {} events",
            outcome.after_ready(),
            outcome.peak_rss_kib,
            bundle >> 10,
            record.events.len()
        );
    }
}

impl Control {
    fn why(&self) -> &String {
        let (Control::Machine { why, .. }
        | Control::Host { why, .. }
        | Control::Within { why }
        | Control::None { why }) = self;
        why
    }

    fn check(&self, attack: &Attack, name: &str, host: &Host) {
        match self {
            Control::Machine { script, policy, has, .. } => {
                assert!(!has.is_empty(), "{name}: a control that has to show nothing shows nothing");
                let script = script.as_ref().unwrap_or(&attack.guest.script);
                let outcome = attack.job(&host.fill_in(script), policy.as_ref()).run();
                assert_has(&outcome.text(), has, &outcome);
                assert_eq!(outcome.verdict(), "ALLOWED", "{outcome:?}");
                if !attack.expect.refusals.is_empty() {
                    assert_eq!(refusals(&outcome.record()), [] as [String; 0], "the honest twin is refused");
                }
            }
            Control::Host { arguments, reached, reached_as_root, .. } => {
                let dir = tempfile::tempdir().unwrap();
                let program = dir.path().join("probe");
                fs::write(&program, probe()).unwrap();
                fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
                let arguments = arguments.iter().map(|argument| host.fill_in(argument));
                let output =
                    Command::new(&program).args(arguments).env("PROBE_SCRATCH", dir.path()).output().unwrap();
                let text = String::from_utf8_lossy(&output.stdout);
                let said = probed(&text);
                let root = rustix::process::geteuid().is_root() && !confined();
                let mut names: Vec<&String> = reached.iter().collect();
                names.extend(reached_as_root.iter().filter(|_| root));
                for name in names {
                    assert_eq!(said.get(name.as_str()).copied(), Some(true), "control of {name}: {text}");
                }
                if !root {
                    println!("NOT RUN: the control of {reached_as_root:?} needs root without a filter");
                }
                let tried: Vec<_> = said.keys().collect();
                let missing: Vec<_> =
                    attack.expect.refused.iter().filter(|name| !tried.contains(&&name.as_str())).collect();
                assert!(missing.is_empty(), "the control does not try {missing:?}");
                let not_shown: Vec<_> =
                    said.iter().filter(|(_, reached)| !**reached).map(|(name, _)| name).collect();
                println!("refused on this host as well, so not shown by the control: {not_shown:?}");
            }
            Control::Within { .. } | Control::None { .. } => {}
        }
    }
}

/// Whether the test itself runs behind a system call filter, as in a container.
fn confined() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    !status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "0"]))
}

fn assert_has(text: &str, lines: &[String], outcome: &Outcome) {
    for line in lines {
        assert!(text.lines().any(|came| came == line), "{line:?} did not come: {outcome:?}");
    }
}

/// What the probe says: each name, and whether it was reached.
fn probed(text: &str) -> BTreeMap<&str, bool> {
    let outcome = |line: &'_ str| -> Option<bool> {
        match line.split(' ').next()? {
            "reached" => Some(true),
            "refused" => Some(false),
            _ => None,
        }
    };
    text.lines()
        .filter_map(|line| line.split_once(": "))
        .filter_map(|(name, rest)| Some((name, outcome(rest)?)))
        .collect()
}

/// What the probe says: each name, and with what it was refused, or `reached`.
fn answers(text: &str) -> BTreeMap<String, String> {
    let names = probed(text);
    let lines = text.lines().filter_map(|line| line.split_once(": "));
    lines
        .filter(|(name, _)| names.contains_key(name))
        .map(|(name, came)| (name.to_owned(), came.strip_prefix("refused ").unwrap_or(came).to_owned()))
        .collect()
}

/// A table of `docs/probes.md`: each attempt's answer.
fn documented(heading: &str) -> BTreeMap<String, String> {
    let page = fs::read_to_string(folder().join("../docs/probes.md")).unwrap();
    let section = page.split(heading).nth(1).unwrap().split("\n## ").next().unwrap().to_owned();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    let mut answers = BTreeMap::new();
    for (answer, attempts) in rows.skip(1) {
        for name in attempts.split('`').skip(1).step_by(2) {
            assert!(answers.insert(name.to_owned(), answer.to_owned()).is_none(), "{name} is there twice");
        }
    }
    assert!(answers.len() > 20, "{heading} was not read");
    answers
}

/// Codes under which claims were refused, each once.
fn refusals(record: &Record) -> Vec<String> {
    let mut codes: Vec<String> =
        record.facts("claim_refused").map(|fact| fact["code"].as_str().unwrap().to_owned()).collect();
    codes.sort();
    codes.dedup();
    codes
}

/// Whether `value` has everything that `wanted` has.
fn includes(value: &Value, wanted: &Value) -> bool {
    match (value, wanted) {
        (Value::Object(value), Value::Object(wanted)) => {
            wanted.iter().all(|(key, wanted)| value.get(key).is_some_and(|value| includes(value, wanted)))
        }
        _ => value == wanted,
    }
}

fn size_of(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).unwrap().flatten();
    entries
        .map(|entry| match entry.metadata().unwrap() {
            folder if folder.is_dir() => size_of(&entry.path()),
            file => file.len(),
        })
        .sum()
}

/// One attack and its control.
fn attack(name: &str) {
    Attack::read(name).run(name);
}

#[test]
fn every_attack_is_run() {
    let own = include_str!("attacks.rs");
    let files =
        fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = files.filter_map(|file| Some(file.strip_suffix(".toml")?.to_owned())).collect();
    assert!(names.len() >= 16, "{names:?}");
    for name in names {
        assert!(own.contains(&format!("attack(\"{name}\");")), "attacks/{name}.toml is not run");
    }
}

#[test]
fn claim_flood() {
    attack("claim-flood");
}

#[test]
fn console_flood() {
    attack("console-flood");
}

#[test]
fn crowd() {
    attack("crowd");
}

#[test]
fn exec_unapproved() {
    attack("exec-unapproved");
}

#[test]
fn fill_disks() {
    attack("fill-disks");
}

#[test]
fn fill_memory() {
    attack("fill-memory");
}

#[test]
fn fork_bomb() {
    attack("fork-bomb");
}

#[test]
fn kill_all() {
    attack("kill-all");
}

#[test]
fn lying_guest() {
    attack("lying-guest");
}

#[test]
fn network() {
    attack("network");
}

#[test]
fn output_flood() {
    attack("output-flood");
}

#[test]
fn privileges() {
    attack("privileges");
}

#[test]
fn remove_all() {
    attack("remove-all");
}

#[test]
fn request_flood() {
    attack("request-flood");
}

#[test]
fn request_socket() {
    attack("request-socket");
}

#[test]
fn write_root() {
    attack("write-root");
}
