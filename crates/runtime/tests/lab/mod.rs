//! A runtime over a fake backend in a folder of its own, and the record that a run left, read as a stranger would.
#![allow(dead_code, reason = "each test binary uses its part")]

use hotcell_decide::{DerivedVerdict, Evidence, HostFact, Verdict, VerdictFold};
use hotcell_ledger::{ClosedLedger, Digest, Event, SigningKey, reopen};
use hotcell_policy::{ImageRef, PolicyDraft, RunDraft, SealedSpec};
use hotcell_runtime::{
    Clock, Exec, ExecError, ExecIo, ExecRequest, ExecResult, HostClock, MeasuredBoot, Patience, Run,
    RunReport, Runtime, Stdin,
};
use hotcell_testkit::{FakeBackend, FakeGuest, FakeMachine, honest};
use hotcell_vm::{Accel, Acceleration, FileDigests, Registry};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What anything in these tests may take; only a bug takes so long.
pub(crate) const HANG: Duration = Duration::from_secs(120);
/// The disk size of test runs.
const DISK_MIB: u32 = 16;

/// The host's clock, which can be told to panic.
pub(crate) struct TestClock {
    inner: HostClock,
    asked: AtomicU64,
    /// Panics when it is asked for the time this often; 0: never.
    pub(crate) panics_at: AtomicU64,
    /// Goes on panicking from then on.
    pub(crate) for_ever: bool,
}

impl TestClock {
    pub(crate) fn new(panics_at: u64, for_ever: bool) -> Arc<TestClock> {
        let (asked, panics_at) = (AtomicU64::new(0), AtomicU64::new(panics_at));
        Arc::new(TestClock { inner: HostClock::new(), asked, panics_at, for_ever })
    }

    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }
}

impl Clock for TestClock {
    fn now_ns(&self) -> u64 {
        let asked = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        let at = self.panics_at.load(Ordering::SeqCst);
        assert!(at == 0 || asked < at || (asked > at && !self.for_ever), "asked to panic in the clock");
        self.inner.now_ns()
    }
}

/// A runtime over fake machines.
pub(crate) struct Lab {
    pub(crate) home: TempDir,
    pub(crate) backend: FakeBackend,
    pub(crate) runtime: Runtime,
    pub(crate) clock: Arc<TestClock>,
}

impl Lab {
    /// Machines whose guest follows a script.
    pub(crate) fn new(script: impl Fn(&mut FakeGuest) + Send + Sync + 'static) -> Lab {
        Lab::with(FakeMachine::new(script))
    }

    pub(crate) fn honest() -> Lab {
        Lab::new(honest)
    }

    pub(crate) fn with(machine: FakeMachine) -> Lab {
        Lab::at(tempfile::tempdir().unwrap(), machine, TestClock::new(0, false))
    }

    pub(crate) fn at(home: TempDir, machine: FakeMachine, clock: Arc<TestClock>) -> Lab {
        let dir = home.path();
        for file in ["kernel", "initramfs", "root"] {
            fs::write(dir.join(file), file).unwrap();
        }
        // In the place of a formatted disk: no test of these needs mke2fs.
        fs::create_dir_all(dir.join("cache/workspace")).unwrap();
        fs::write(dir.join(format!("cache/workspace/ext4-v2-{DISK_MIB}.img")), b"blank").unwrap();
        // Its stamps are of the same time, and do not count as the runtime's own.
        let stamps = clock.inner;
        let backend = FakeBackend::new(machine, move || stamps.now_ns());
        let runtime = Runtime {
            registry: Registry::open(&dir.join("live")).unwrap(),
            backend: Arc::new(backend.clone()),
            acceleration: Acceleration { accel: Accel::Tcg, why: "a test".into() },
            out: dir.join("out"),
            cache: dir.join("cache"),
            digests: FileDigests::remembered_in(&dir.join("cache/digests")),
            key: Arc::new(SigningKey::load_or_create(&dir.join("key")).unwrap()),
            clock: clock.clone(),
            boot_deadline: Duration::from_secs(20),
            patience: Patience {
                stop: HANG / 2,
                quiesce: HANG / 2,
                death: HANG / 2,
                caller: HANG / 2,
                arm: HANG / 2,
            },
            advisor: None,
        };
        Lab { home, backend, runtime, clock }
    }

    /// For guests that do not answer: a test that expects an answer must not hurry it.
    pub(crate) fn impatient(mut self) -> Lab {
        let soon = Duration::from_millis(300);
        let arm = self.runtime.patience.arm;
        self.runtime.patience = Patience { stop: soon, quiesce: soon, death: soon, caller: soon, arm };
        self
    }

    pub(crate) fn boot(&self) -> MeasuredBoot {
        let file = |name: &str| self.home.path().join(name);
        MeasuredBoot::open(&file("kernel"), &file("initramfs"), &file("root")).unwrap()
    }

    pub(crate) fn draft(&self, run_id: &str) -> RunDraft {
        let image = ImageRef {
            name: "fake".into(),
            kernel: Digest::of(b"kernel"),
            initramfs: Digest::of(b"initramfs"),
            root: Digest::of(b"root"),
        };
        let mut policy = PolicyDraft::default();
        policy.limits.disk_mib = DISK_MIB;
        RunDraft::new(run_id, image, policy)
    }

    /// A spec, its policy changed.
    pub(crate) fn spec(&self, change: impl FnOnce(&mut PolicyDraft)) -> SealedSpec {
        let mut draft = self.draft("run-00000001");
        change(&mut draft.policy);
        draft.seal().unwrap()
    }

    pub(crate) fn start(&self) -> Run {
        self.start_with(|_| {})
    }

    pub(crate) fn start_with(&self, change: impl FnOnce(&mut PolicyDraft)) -> Run {
        self.runtime.start(self.spec(change), self.boot())
    }

    /// Runs one command to the end.
    pub(crate) fn run(&self, argv: &[&str]) -> (RunReport, Result<ExecResult, ExecError>) {
        let run = self.start();
        let result = wait(exec(&run, argv));
        (finish(run), result)
    }

    /// What is registered still.
    pub(crate) fn registered(&self) -> Vec<PathBuf> {
        entries(&self.home.path().join("live"))
    }

    pub(crate) fn bundles(&self) -> Vec<PathBuf> {
        entries(&self.home.path().join("out"))
    }

    /// Nothing that was started is there any more.
    #[track_caller]
    pub(crate) fn assert_all_gone(&self) {
        assert_eq!(self.backend.alive(), 0, "a machine is still alive");
        assert_eq!(self.registered(), Vec::<PathBuf>::new());
    }
}

pub(crate) fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

pub(crate) fn exec(run: &Run, argv: &[&str]) -> Exec {
    run.exec(ExecRequest::new(argv.iter().copied()), ExecIo::default())
}

/// Runs something that must not hang.
#[track_caller]
pub(crate) fn soon<T: Send + 'static>(what: &str, step: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(step()));
    match result.recv_timeout(HANG) {
        Ok(value) => value,
        Err(error) => panic!("{what}: {error}"),
    }
}

#[track_caller]
pub(crate) fn finish(run: Run) -> RunReport {
    soon("finish", move || run.finish())
}

#[track_caller]
pub(crate) fn wait(exec: Exec) -> Result<ExecResult, ExecError> {
    soon("an exec", move || exec.wait())
}

/// Waits until something holds.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + HANG;
    while !holds() {
        assert!(Instant::now() < end, "{what} did not come to hold");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Output that a test looks at.
#[derive(Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<Vec<u8>>>);

impl Seen {
    pub(crate) fn output(&self) -> Option<Box<dyn Write + Send>> {
        Some(Box::new(self.clone()))
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.bytes()).unwrap()
    }
}

impl Write for Seen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A writer that takes nothing until it is let go.
#[derive(Clone, Default)]
pub(crate) struct Stuck(Arc<Mutex<bool>>);

impl Stuck {
    pub(crate) fn let_go(&self) {
        *self.0.lock().unwrap() = true;
    }
}

impl Write for Stuck {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        until("the writer's release", || *self.0.lock().unwrap());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn io_of(stdin: Stdin, stdout: &Seen, stderr: &Seen) -> ExecIo {
    ExecIo { stdin, stdout: stdout.output(), stderr: stderr.output() }
}

/// What a run left, read from its bundle alone.
pub(crate) struct Record {
    pub(crate) dir: PathBuf,
    pub(crate) events: Vec<Event>,
    /// Host facts, with the position and time of their events.
    pub(crate) facts: Vec<(HostFact, u64, u64)>,
    pub(crate) derived: DerivedVerdict,
}

impl Record {
    /// Reads and judges a record again; it must come to what the report says.
    #[track_caller]
    pub(crate) fn of(report: &RunReport) -> Record {
        let record = Record::read(report);
        let derived = &record.derived;
        assert_eq!(derived.verdict, report.verdict, "{:?} / {report:?}", derived.reasons);
        if report.verdict == Verdict::Killed {
            assert_eq!(derived.reasons, report.kill.reasons);
        }
        assert_eq!(derived.timed_out, report.timed_out);
        assert_eq!(derived.interrupted, report.interrupted);
        assert_eq!(derived.pending_rebuild, report.pending_rebuild);
        assert!(derived.agrees_with_record(), "{:?}", derived.recorded);
        assert!(derived.gate1.is_ok(), "{:?}", derived.gate1.violations);
        record.assert_intact(report);
        record.assert_no_parts();
        record
    }

    /// What has an object's name is whole, and nothing half-written lies beside it.
    #[track_caller]
    pub(crate) fn assert_no_parts(&self) {
        let part = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes()[0] == b'.');
        let parts: Vec<PathBuf> = entries(&self.dir.join("objects")).into_iter().filter(part).collect();
        assert!(parts.is_empty(), "unfinished objects are left: {parts:?}");
    }

    /// A stranger's verifier finds nothing and comes to the same verdict.
    #[track_caller]
    fn assert_intact(&self, report: &RunReport) {
        let options = hotcell_verify::Options::default();
        let found = hotcell_verify::verify_bundle(&self.dir, &options).unwrap();
        let findings: Vec<String> = found
            .findings
            .list()
            .iter()
            .filter(|finding| finding.reason.severity() > hotcell_verify::Severity::Notice)
            .map(|finding| format!("{:?}: {}", finding.reason, finding.detail))
            .collect();
        assert_eq!(findings, [""; 0], "{report:?}");
    }

    #[track_caller]
    pub(crate) fn read(report: &RunReport) -> Record {
        let dir = report.bundle.clone().expect("there is a record");
        let ledger = dir.join("ledger.ames");
        let events: Vec<Event> = match ClosedLedger::open(&ledger) {
            Ok(closed) => closed.events().unwrap().map(Result::unwrap).collect(),
            Err(_) => reopen(&ledger).unwrap().events().unwrap().map(Result::unwrap).collect(),
        };
        let object = |digest: Digest| fs::read(dir.join("objects").join(digest.to_hex())).ok();
        let spec =
            RunDraft::from_spec_json(&fs::read(dir.join("spec.json")).unwrap()).unwrap().seal().unwrap();
        let mut fold = VerdictFold::new(&spec, None).unwrap();
        let mut facts = Vec::new();
        for event in &events {
            let bytes = Evidence::object_of(event).and_then(object);
            let _ = fold.event(event, bytes.as_deref());
            if let Ok(Some(evidence)) = Evidence::read(event, bytes.as_deref())
                && let Some(fact) = evidence.fact()
            {
                facts.push((fact.clone(), event.sequence, event.timestamp_ns));
            }
        }
        Record { derived: fold.finish(), dir, events, facts }
    }

    /// The names of the facts, in order.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.facts.iter().map(|(fact, ..)| fact.tool_name().trim_start_matches("hotcell.")).collect()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.names().contains(&name)
    }

    /// When a fact was recorded first.
    #[track_caller]
    pub(crate) fn at_ns(&self, name: &str) -> u64 {
        let at = self.names().iter().position(|other| *other == name);
        self.facts[at.unwrap_or_else(|| panic!("no {name} in {:?}", self.names()))].2
    }

    /// What is kept of an exec's stream, and its totals.
    #[track_caller]
    pub(crate) fn output(
        &self,
        of: u64,
        wanted: hotcell_decide::OutputStream,
    ) -> (Vec<u8>, u64, bool, Digest) {
        let found = self.facts.iter().find_map(|(fact, ..)| match fact {
            HostFact::Output { exec, stream, total_bytes, truncated, whole, kept, .. }
                if *exec == of && *stream == wanted =>
            {
                let bytes = fs::read(self.dir.join("objects").join(kept.to_hex())).unwrap();
                Some((bytes, *total_bytes, *truncated, *whole))
            }
            _ => None,
        });
        found.unwrap_or_else(|| panic!("no output of exec {of} in {:?}", self.names()))
    }
}

/// A run that must have ended KILLED for these reasons, with the machine gone and the record in agreement.
#[track_caller]
pub(crate) fn assert_killed(lab: &Lab, report: &RunReport, reasons: &[&str]) -> Record {
    assert_eq!(report.verdict, Verdict::Killed, "{report:?}");
    assert_eq!(report.kill.reasons, reasons, "{report:?}");
    assert!(report.teardown.verified, "{report:?}");
    lab.assert_all_gone();
    Record::of(report)
}

/// The same for FAILED.
#[track_caller]
pub(crate) fn assert_failed(lab: &Lab, report: &RunReport, words: &str) -> Record {
    assert_eq!(report.verdict, Verdict::Failed, "{report:?}");
    let error = report.error.clone().unwrap_or_default();
    assert!(error.contains(words), "{words:?} is not in {error:?}");
    assert!(report.teardown.verified, "{report:?}");
    lab.assert_all_gone();
    let record = Record::of(report);
    assert!(record.has("failed") && record.has("teardown"), "{:?}", record.names());
    record
}

/// The same for ALLOWED.
#[track_caller]
pub(crate) fn assert_allowed(lab: &Lab, report: &RunReport) -> Record {
    assert_eq!(report.verdict, Verdict::Allowed, "{report:?}");
    assert!(report.teardown.verified, "{report:?}");
    lab.assert_all_gone();
    Record::of(report)
}
