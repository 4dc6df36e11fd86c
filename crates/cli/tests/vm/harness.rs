//! Starts `hotcell`, waits for it with a deadline, and looks at what it leaves.

use crate::record::Record;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Machines at once.
pub(crate) const SLOTS: usize = 2;
/// Longest life of any process that a test starts. Under TCG on a busy host a
/// boot has been seen to take 20 s.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);
/// How long something takes that should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(20);
/// How often a condition is looked at.
const STEP: Duration = Duration::from_millis(10);

/// Where all tests keep kernel, image and key.
pub(crate) fn home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| {
        let named = ["HOTCELL_TEST_HOME", "HOTCELL_HOME"].iter().find_map(std::env::var_os);
        let home = named.map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("home"), PathBuf::from);
        fs::create_dir_all(&home).unwrap();
        home.canonicalize().unwrap()
    })
}

pub(crate) fn hotcell() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hotcell"));
    command.env("HOTCELL_HOME", home()).stdin(Stdio::null());
    command
}

fn accel() -> String {
    std::env::var("HOTCELL_TEST_ACCEL").unwrap_or_else(|_| "tcg".into())
}

/// The right to have a machine.
#[derive(Debug)]
pub(crate) struct Slot {
    _lock: File,
}

impl Slot {
    pub(crate) fn take() -> Slot {
        let mut taken = None;
        // Others' runs end by their own deadlines.
        wait_until("a free slot", PATIENCE * 10, || {
            taken = (0..SLOTS).find_map(|number| {
                let lock = File::create(home().join(format!("slot-{number}"))).unwrap();
                lock.try_lock().is_ok().then_some(lock)
            });
            taken.is_some()
        });
        Slot { _lock: taken.unwrap() }
    }

    /// All of them. One test after the other: of two that held a part each neither would go on.
    pub(crate) fn take_all() -> Vec<Slot> {
        let turn = File::create(home().join("all-slots")).unwrap();
        wait_until("the turn to take all slots", PATIENCE * 20, || turn.try_lock().is_ok());
        (0..SLOTS).map(|_| Slot::take()).collect()
    }
}

/// Waits for a condition; the test fails when it does not come.
pub(crate) fn wait_until(what: &str, patience: Duration, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + patience;
    while !condition() {
        assert!(Instant::now() < end, "waited {patience:?} in vain for {what}");
        std::thread::sleep(STEP);
    }
}

/// A run to be made.
pub(crate) struct Job {
    run_id: String,
    flags: Vec<OsString>,
    argv: Vec<OsString>,
    env: Vec<(&'static str, OsString)>,
    stdin: Option<Vec<u8>>,
    /// Where the bundle goes, if not into `out`.
    elsewhere: Option<PathBuf>,
    out: tempfile::TempDir,
}

impl Job {
    pub(crate) fn new<const N: usize>(argv: [&str; N]) -> Job {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Job {
            run_id: format!("test-{}-{count}", std::process::id()),
            flags: Vec::new(),
            argv: argv.iter().map(OsString::from).collect(),
            env: Vec::new(),
            stdin: None,
            elsewhere: None,
            out: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn sh(script: &str) -> Job {
        Job::new(["/bin/sh", "-c", script])
    }

    pub(crate) fn flags<const N: usize>(mut self, flags: [&str; N]) -> Job {
        self.flags.extend(flags.iter().map(OsString::from));
        self
    }

    /// Flags that need not be UTF-8 or known beforehand.
    pub(crate) fn flag(mut self, name: &str, value: impl Into<OsString>) -> Job {
        self.flags.extend([name.into(), value.into()]);
        self
    }

    pub(crate) fn policy(mut self, toml: &str) -> Job {
        let path = self.out.path().join("policy.toml");
        fs::write(&path, toml).unwrap();
        self.flags.extend(["--policy".into(), path.into()]);
        self
    }

    /// Puts the bundle into a folder of the caller's.
    pub(crate) fn out_at(mut self, dir: &Path) -> Job {
        self.elsewhere = Some(dir.to_owned());
        self
    }

    pub(crate) fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Job {
        self.stdin = Some(bytes.into());
        self
    }

    pub(crate) fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Job {
        self.env.push((name, value.into()));
        self
    }

    /// Runs to the end and checks that nothing is left and the record is intact.
    pub(crate) fn run(self) -> Outcome {
        let outcome = self.start().wait();
        outcome.assert_gone();
        assert_eq!(outcome.verify(), 0, "{outcome:?}");
        outcome
    }

    pub(crate) fn start(self) -> Live {
        warm_up();
        self.start_cold()
    }

    /// Without a kernel and an image in the home, if need be.
    pub(crate) fn start_cold(self) -> Live {
        let slot = Slot::take();
        let mut command = hotcell();
        command.args(["run", "--json", "--accel", &accel(), "--name", &self.run_id, "--out"]);
        let bundles = self.elsewhere.as_deref().unwrap_or(self.out.path()).to_owned();
        command.arg(&bundles).args(&self.flags).arg("--").args(&self.argv);
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        if self.stdin.is_some() {
            command.stdin(Stdio::piped());
        }
        let begun = Instant::now();
        let mut child = command.spawn().unwrap();
        let stdout = Gathered::from(child.stdout.take().unwrap());
        let stderr = Gathered::from(child.stderr.take().unwrap());
        let feeder = self.stdin.zip(child.stdin.take()).map(|(bytes, mut pipe)| {
            std::thread::spawn(move || {
                // A guest that does not read to the end is not this test's failure.
                let _ = pipe.write_all(&bytes);
            })
        });
        let Job { run_id, out, .. } =
            Job { stdin: None, flags: Vec::new(), argv: Vec::new(), env: Vec::new(), ..self };
        Live {
            run_id,
            bundles,
            out,
            child: Owned(child),
            begun,
            stdout,
            stderr,
            feeder,
            peak_rss_kib: 0,
            _slot: slot,
        }
    }
}

/// Builds image, kernel and what is kept of it in the shared home, once for each Hotcell, whoever comes first.
pub(crate) fn warm_up() {
    static WARM: OnceLock<()> = OnceLock::new();
    WARM.get_or_init(|| {
        let path = home().join("warm");
        let lock = File::options().create(true).read(true).append(true).open(&path).unwrap();
        lock.lock().unwrap();
        let hotcell = fs::metadata(env!("CARGO_BIN_EXE_hotcell")).unwrap();
        let this = format!("{:?} {}", hotcell.modified().unwrap(), hotcell.len());
        if fs::read_to_string(&path).unwrap() != this {
            let outcome = Job::new(["true"]).start_cold().wait();
            assert_eq!(outcome.code, Some(0), "{outcome:?}");
            fs::write(&path, this).unwrap();
        }
    });
}

/// What a stream has brought so far: all of it, or of a flood the newest bytes.
struct Gathered {
    shared: Arc<(Mutex<Stream>, Condvar)>,
    reader: JoinHandle<()>,
}

#[derive(Default)]
struct Stream {
    bytes: Vec<u8>,
    total: u64,
    ended: bool,
}

/// More than any test compares byte by byte.
const KEPT_BYTES: usize = 80 << 20;

impl Gathered {
    fn from(mut source: impl Read + Send + 'static) -> Gathered {
        let shared = Arc::new((Mutex::new(Stream::default()), Condvar::new()));
        let gathered = Arc::clone(&shared);
        let reader = std::thread::spawn(move || {
            let mut chunk = vec![0; 1 << 16];
            while let Ok(count @ 1..) = source.read(&mut chunk) {
                let mut stream = gathered.0.lock().unwrap();
                stream.total += count as u64;
                stream.bytes.extend_from_slice(&chunk[..count]);
                if stream.bytes.len() > KEPT_BYTES {
                    stream.bytes.drain(..KEPT_BYTES / 2);
                }
                gathered.1.notify_all();
            }
            gathered.0.lock().unwrap().ended = true;
            gathered.1.notify_all();
        });
        Gathered { shared, reader }
    }

    /// Whether the text came before the deadline or the stream's end.
    fn wait_for(&self, text: &str, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let mut stream = self.shared.0.lock().unwrap();
        loop {
            if String::from_utf8_lossy(&stream.bytes).contains(text) {
                return true;
            }
            let left = end.saturating_duration_since(Instant::now());
            if stream.ended || left.is_zero() {
                return false;
            }
            stream = self.shared.1.wait_timeout(stream, left).unwrap().0;
        }
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.shared.0.lock().unwrap().bytes).into_owned()
    }

    fn finish(self) -> Stream {
        self.reader.join().unwrap();
        std::mem::take(&mut self.shared.0.lock().unwrap())
    }
}

/// A process that does not outlive its test.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        // Fails where it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A `hotcell run` that goes on.
pub(crate) struct Live {
    pub(crate) run_id: String,
    bundles: PathBuf,
    out: tempfile::TempDir,
    child: Owned,
    begun: Instant,
    stdout: Gathered,
    stderr: Gathered,
    feeder: Option<JoinHandle<()>>,
    peak_rss_kib: u64,
    _slot: Slot,
}

impl Live {
    /// Waits until the guest has printed this.
    pub(crate) fn wait_for(&self, text: &str) {
        let came = self.stdout.wait_for(text, PATIENCE);
        assert!(came, "the guest never said {text:?}: {}", self.stderr.so_far());
    }

    /// Whether the guest printed this before its end.
    pub(crate) fn saw(&self, text: &str) -> bool {
        self.stdout.wait_for(text, PATIENCE)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child.0), signal).unwrap();
    }

    /// Whether it has said this so far.
    pub(crate) fn has_said(&self, text: &str) -> bool {
        self.stdout.so_far().contains(text)
    }

    /// Whether `hotcell` has ended.
    pub(crate) fn is_over(&mut self) -> bool {
        self.child.0.try_wait().unwrap().is_some()
    }

    pub(crate) fn registry_entry(&self) -> PathBuf {
        home().join("state/live").join(&self.run_id)
    }

    pub(crate) fn vmms(&self) -> Vec<i32> {
        vmms_of(&self.run_id)
    }

    pub(crate) fn bundle(&self) -> PathBuf {
        self.bundles.join(&self.run_id)
    }

    pub(crate) fn wait(mut self) -> Outcome {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            let rss = peak_rss_kib(self.child.0.id());
            self.peak_rss_kib = self.peak_rss_kib.max(rss);
            if let Some(status) = self.child.0.try_wait().unwrap() {
                break Some(status);
            }
            if Instant::now() > end {
                self.child.0.kill().unwrap();
                self.child.0.wait().unwrap();
                break None;
            }
            std::thread::sleep(STEP);
        };
        let elapsed = self.begun.elapsed();
        let Live { run_id, bundles, out, stdout, stderr, feeder, peak_rss_kib, .. } = self;
        let (stdout, stderr) = (stdout.finish(), stderr.finish());
        if let Some(feeder) = feeder {
            feeder.join().unwrap();
        }
        let (stdout_total, mut stdout, stderr) = (stdout.total, stdout.bytes, stderr.bytes);
        let report = take_last_line(&mut stdout);
        let (code, signal) = status.map_or((None, None), |status| (status.code(), status.signal()));
        let outcome = Outcome {
            run_id,
            code,
            signal,
            stdout,
            stdout_total,
            stderr,
            report,
            elapsed,
            peak_rss_kib,
            bundles,
            _out: out,
        };
        assert!(status.is_some(), "it did not end within {PATIENCE:?}: {outcome:?}");
        outcome
    }
}

/// Takes the report, which is the last line, off the output; leaves what is no report.
fn take_last_line(stdout: &mut Vec<u8>) -> Option<Value> {
    let end = stdout.strip_suffix(b"\n")?.len();
    let start = stdout[..end].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let report: Value = serde_json::from_slice(&stdout[start..end]).ok()?;
    report.get("verdict")?;
    stdout.truncate(start);
    Some(report)
}

/// A run that is over.
pub(crate) struct Outcome {
    pub(crate) run_id: String,
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    /// What the command wrote, without the report.
    pub(crate) stdout: Vec<u8>,
    /// Bytes on stdout, with the report.
    pub(crate) stdout_total: u64,
    pub(crate) stderr: Vec<u8>,
    pub(crate) report: Option<Value>,
    pub(crate) elapsed: Duration,
    /// Most memory that `hotcell` itself had, without the VMM.
    pub(crate) peak_rss_kib: u64,
    bundles: PathBuf,
    _out: tempfile::TempDir,
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stdout = String::from_utf8_lossy(&self.stdout[..self.stdout.len().min(4000)]);
        let report = self.report.as_ref().map(Value::to_string).unwrap_or_default();
        write!(
            f,
            "{} code {:?} signal {:?} after {:?}\n--stdout\n{stdout}\n--stderr\n{}\n--report\n{report}",
            self.run_id,
            self.code,
            self.signal,
            self.elapsed,
            String::from_utf8_lossy(&self.stderr[..self.stderr.len().min(4000)])
        )
    }
}

impl Outcome {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// What `hotcell` and the command said to people.
    pub(crate) fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// From the moment the machine was ready until all was over.
    pub(crate) fn after_ready(&self) -> Duration {
        let ms = |name: &str| self.report(name).as_f64().unwrap();
        Duration::from_secs_f64((ms("/timings_ms/total") - ms("/timings_ms/ready")) / 1e3)
    }

    /// A part of the report, by a JSON pointer.
    pub(crate) fn report(&self, pointer: &str) -> &Value {
        let report = self.report.as_ref().unwrap_or_else(|| panic!("no report: {self:?}"));
        report.pointer(pointer).unwrap_or_else(|| panic!("no {pointer}: {self:?}"))
    }

    pub(crate) fn verdict(&self) -> &str {
        self.report("/verdict").as_str().unwrap()
    }

    pub(crate) fn reasons(&self) -> Vec<&str> {
        self.report("/kill/reasons")
            .as_array()
            .unwrap()
            .iter()
            .map(|reason| reason.as_str().unwrap())
            .collect()
    }

    /// Ends in a verdict of ALLOWED with this exit code.
    #[track_caller]
    pub(crate) fn assert_allowed(&self, code: i32) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.verdict(), "ALLOWED", "{self:?}");
        assert_eq!(self.report("/gate1/ok"), true, "{self:?}");
    }

    /// Ends KILLED for exactly these reasons.
    #[track_caller]
    pub(crate) fn assert_killed(&self, reasons: &[&str]) {
        assert_eq!(self.code, Some(99), "{self:?}");
        assert_eq!(self.verdict(), "KILLED", "{self:?}");
        assert_eq!(self.reasons(), reasons, "{self:?}");
    }

    pub(crate) fn bundle(&self) -> PathBuf {
        self.bundles.join(&self.run_id)
    }

    pub(crate) fn record(&self) -> Record {
        Record::read(&self.bundle())
    }

    /// `hotcell verify`'s exit code.
    pub(crate) fn verify(&self) -> i32 {
        verify(&self.bundle())
    }

    /// No VMM, no registry entry; and the report says so.
    #[track_caller]
    pub(crate) fn assert_gone(&self) {
        assert!(vmms_of(&self.run_id).is_empty(), "a VMM is left: {self:?}");
        assert!(!home().join("state/live").join(&self.run_id).exists(), "an entry is left: {self:?}");
        if let Some(report) = &self.report {
            assert_eq!(report.pointer("/teardown/verified"), Some(&Value::Bool(true)), "{self:?}");
        }
    }
}

pub(crate) fn verify(bundle: &Path) -> i32 {
    let output = hotcell().arg("verify").arg(bundle).output().unwrap();
    output.status.code().unwrap()
}

/// Processes that say by their arguments that they are this run's VMM.
pub(crate) fn vmms_of(run_id: &str) -> Vec<i32> {
    let name = format!("hotcell-{run_id}");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|&byte| byte == 0).collect();
        let named = words.windows(2).any(|pair| pair[0] == b"-name" && pair[1] == name.as_bytes());
        if named {
            found.push(pid);
        }
    }
    found
}

fn peak_rss_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
