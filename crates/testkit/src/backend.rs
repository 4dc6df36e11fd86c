//! The fake backend: every call is counted and stamped, every failure can be asked for.

use crate::guest::FakeGuest;
use hotcell_ledger::Digest;
use hotcell_vm::{
    Captured, Check, GuestMemory, LiveVm, ProcessId, Registration, StartError, StartFailed, TeardownFailed,
    TeardownProof, TeardownReport, VmBackend, VmPlan, VmmFacts, VmmWatch,
};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a script may take to see that its machine is gone.
const SCRIPT_DEADLINE: Duration = Duration::from_secs(10);

/// A call that the runtime makes of a backend or a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is the method of its name")]
pub enum Step {
    Start,
    Facts,
    TakeChannel,
    ExitEvent,
    Console,
    LastWords,
    Memory,
    RootBytesWritten,
    Kill,
    Destroy,
}

impl Step {
    /// Every step.
    pub const ALL: [Step; 10] = [
        Step::Start,
        Step::Facts,
        Step::TakeChannel,
        Step::ExitEvent,
        Step::Console,
        Step::LastWords,
        Step::Memory,
        Step::RootBytesWritten,
        Step::Kill,
        Step::Destroy,
    ];
}

/// A step, and when it was taken by the clock that the backend was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTaken {
    /// When.
    pub at_ns: u64,
    /// Which.
    pub step: Step,
}

/// How a start goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartAs {
    /// The machine starts.
    #[default]
    Fine,
    /// It does not, and nothing is left.
    Refused,
    /// It does not, and something is left.
    RefusedLeavingSomething,
}

/// What a fake guest does, on a thread of its own.
pub type Script = Arc<dyn Fn(&mut FakeGuest) + Send + Sync>;

/// What a fake machine does.
#[derive(Clone)]
pub struct FakeMachine {
    /// What its guest does, on a thread of its own. When it returns, the machine ends.
    pub script: Script,
    /// How its start goes.
    pub start: StartAs,
    /// It goes on after a kill, so that its teardown can't be verified.
    pub survives_kill: bool,
    /// This call panics, each time.
    pub panics_in: Option<Step>,
    /// What the VMM says was written to the root image.
    pub root_bytes_written: Option<u64>,
    /// Where its memory lies, if it has any.
    pub memory: Option<GuestMemory>,
    /// What is on its console.
    pub console: Vec<u8>,
    /// It has no channel to give.
    pub without_channel: bool,
    /// Stands for the VMM process where somebody looks at it.
    pub vmm_stand_in: Option<StandIn>,
}

/// Gives what is allowed to a process that stands for the VMM.
pub type StandIn = Arc<dyn Fn() -> VmmWatch + Send + Sync>;

impl FakeMachine {
    /// A machine whose guest follows a script.
    pub fn new(script: impl Fn(&mut FakeGuest) + Send + Sync + 'static) -> FakeMachine {
        FakeMachine {
            script: Arc::new(script),
            start: StartAs::Fine,
            survives_kill: false,
            panics_in: None,
            root_bytes_written: Some(0),
            memory: None,
            console: b"fake console\n".to_vec(),
            without_channel: false,
            vmm_stand_in: None,
        }
    }
}

type Stamp = Arc<dyn Fn() -> u64 + Send + Sync>;

/// A backend whose machines are fake.
#[derive(Clone)]
pub struct FakeBackend {
    machine: FakeMachine,
    shared: Arc<Shared>,
}

struct Shared {
    stamp: Stamp,
    log: Mutex<Vec<StepTaken>>,
    machines: Mutex<Vec<Arc<Machine>>>,
}

impl Drop for Shared {
    /// What survived its kill goes with the backend, so that a test leaves nothing.
    fn drop(&mut self) {
        lock(&self.machines).iter().for_each(|machine| machine.die());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn take(&self, step: Step) {
        let at_ns = (self.stamp)();
        lock(&self.log).push(StepTaken { at_ns, step });
    }
}

impl FakeBackend {
    /// Starts machines of this kind; `stamp` gives the time of each call.
    pub fn new(machine: FakeMachine, stamp: impl Fn() -> u64 + Send + Sync + 'static) -> FakeBackend {
        let shared = Shared { stamp: Arc::new(stamp), log: Mutex::default(), machines: Mutex::default() };
        FakeBackend { machine, shared: Arc::new(shared) }
    }

    /// Every call so far, in order.
    pub fn log(&self) -> Vec<StepTaken> {
        lock(&self.shared.log).clone()
    }

    /// How often a call was made.
    pub fn count(&self, step: Step) -> usize {
        lock(&self.shared.log).iter().filter(|taken| taken.step == step).count()
    }

    /// When a call was made first.
    pub fn first(&self, step: Step) -> Option<u64> {
        lock(&self.shared.log).iter().find(|taken| taken.step == step).map(|taken| taken.at_ns)
    }

    /// Machines that have not ended.
    pub fn alive(&self) -> usize {
        lock(&self.shared.machines).iter().filter(|machine| !machine.is_dead()).count()
    }
}

impl VmBackend for FakeBackend {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn start(&self, registration: Registration, plan: VmPlan) -> Result<Box<dyn LiveVm>, StartFailed> {
        self.shared.take(Step::Start);
        assert_ne!(self.machine.panics_in, Some(Step::Start), "asked to panic in start");
        if self.machine.start != StartAs::Fine {
            let gone = self.machine.start == StartAs::Refused;
            let left = Check { what: "fake VMM".into(), gone, detail: "as the test asked".into() };
            let report = TeardownReport { checks: vec![left], ms: 0 };
            let error = StartError::Died { status: "exit status: 1".into(), stderr: "fake: refused".into() };
            return Err(StartFailed { error, teardown: registration.conclude(report) });
        }
        match FakeVm::begin(self, registration, plan) {
            Ok(vm) => Ok(Box::new(vm)),
            Err(failed) => {
                let (registration, source) = *failed;
                let report = TeardownReport { checks: vec![Check::never_started()], ms: 0 };
                let error = StartError::Io { doing: "make the fake machine", source };
                Err(StartFailed { error, teardown: registration.conclude(report) })
            }
        }
    }
}

/// What a script and its machine share: whether it is still there.
pub(crate) struct Machine {
    exit: OwnedFd,
    dead: Mutex<bool>,
    far: UnixStream,
    survives_kill: bool,
}

impl Machine {
    /// The VMM ends: its end of the channel closes and its exit shows.
    pub(crate) fn die(&self) {
        let mut dead = lock(&self.dead);
        if !*dead {
            *dead = true;
            let _ = self.far.shutdown(Shutdown::Both);
            let _ = rustix::io::write(&self.exit, &1u64.to_ne_bytes());
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        *lock(&self.dead)
    }
}

struct FakeVm {
    machine: Arc<Machine>,
    shared: Arc<Shared>,
    as_asked: FakeMachine,
    facts: VmmFacts,
    channel: Option<UnixStream>,
    script: Option<JoinHandle<()>>,
    registration: Option<Registration>,
}

impl FakeVm {
    fn begin(
        backend: &FakeBackend,
        registration: Registration,
        plan: VmPlan,
    ) -> Result<FakeVm, Box<(Registration, io::Error)>> {
        let as_asked = backend.machine.clone();
        let parts = (|| {
            // Stands for the overlay disk: it must be gone with the run's folder.
            std::fs::write(registration.dir().join("workspace.img"), b"fake")?;
            let (channel, far) = UnixStream::pair()?;
            let machine = Arc::new(Machine {
                exit: eventfd(0, EventfdFlags::CLOEXEC)?,
                dead: Mutex::new(false),
                far: far.try_clone()?,
                survives_kill: as_asked.survives_kill,
            });
            let (script, own) = (Arc::clone(&as_asked.script), Arc::clone(&machine));
            let thread = std::thread::Builder::new().name("fake-guest".into()).spawn(move || {
                let mut guest = FakeGuest::new(far, Arc::clone(&own));
                script(&mut guest);
                if !own.survives_kill {
                    own.die();
                }
            })?;
            let process = ProcessId::of(std::process::id() as i32).ok_or(io::ErrorKind::NotFound)?;
            Ok((channel, machine, thread, process))
        })();
        let (channel, machine, thread, process) = match parts {
            Ok(parts) => parts,
            Err(error) => return Err(Box::new((registration, error))),
        };
        lock(&backend.shared.machines).push(Arc::clone(&machine));
        let facts = VmmFacts {
            process,
            executable: Digest::of(b"fake"),
            argv: vec!["fake".into(), plan.run_id],
            backend: "fake",
            version: "0".into(),
            acceleration: plan.acceleration,
            jail: "none: this is no machine".into(),
            devices: vec!["fake-channel".into()],
            unexpected_devices: Vec::new(),
            root_read_only: true,
        };
        Ok(FakeVm {
            machine,
            shared: Arc::clone(&backend.shared),
            as_asked,
            facts,
            channel: Some(channel),
            script: Some(thread),
            registration: Some(registration),
        })
    }

    fn take(&self, step: Step) {
        self.shared.take(step);
        assert_ne!(self.as_asked.panics_in, Some(step), "asked to panic in {step:?}");
    }

    fn end(&self) {
        if !self.machine.survives_kill {
            self.machine.die();
        }
    }

    fn script_ended(&mut self) -> bool {
        let Some(script) = self.script.take() else { return true };
        let end = Instant::now() + SCRIPT_DEADLINE;
        while !script.is_finished() {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = script.join();
        true
    }
}

impl LiveVm for FakeVm {
    fn facts(&self) -> &VmmFacts {
        self.take(Step::Facts);
        &self.facts
    }

    fn take_channel(&mut self) -> Option<UnixStream> {
        self.take(Step::TakeChannel);
        self.channel.take().filter(|_| !self.as_asked.without_channel)
    }

    fn exit_event(&self) -> io::Result<OwnedFd> {
        self.take(Step::ExitEvent);
        self.machine.exit.try_clone()
    }

    fn console(&self) -> Captured {
        self.take(Step::Console);
        let bytes = self.as_asked.console.clone();
        Captured { total: bytes.len() as u64, bytes }
    }

    fn last_words(&self) -> String {
        self.take(Step::LastWords);
        String::from_utf8_lossy(&self.as_asked.console).trim().to_owned()
    }

    fn memory(&self) -> Option<GuestMemory> {
        self.take(Step::Memory);
        self.as_asked.memory.clone()
    }

    fn root_bytes_written(&mut self) -> Option<u64> {
        self.take(Step::RootBytesWritten);
        self.as_asked.root_bytes_written
    }

    fn take_watch(&mut self) -> Option<VmmWatch> {
        self.as_asked.vmm_stand_in.take().map(|stand_in| stand_in())
    }

    fn kill(&self) {
        self.take(Step::Kill);
        self.end();
    }

    fn destroy(mut self: Box<Self>) -> Result<TeardownProof, TeardownFailed> {
        self.take(Step::Destroy);
        let begun = Instant::now();
        self.end();
        let gone = self.machine.is_dead();
        let detail = if gone { "ended" } else { "survived its kill" };
        let mut checks = vec![Check { what: "fake VMM".into(), gone, detail: detail.into() }];
        if gone {
            let gone = self.script_ended();
            checks.push(Check { what: "fake guest".into(), gone, detail: "its thread".into() });
        }
        let report = TeardownReport { checks, ms: begun.elapsed().as_millis() as u64 };
        match self.registration.take() {
            Some(registration) => registration.conclude(report),
            None => Err(TeardownFailed { registration: None, report }),
        }
    }
}

impl Drop for FakeVm {
    /// A machine dies with its owner, however that goes.
    fn drop(&mut self) {
        self.end();
    }
}
