//! The public face: [`Runtime`], [`Run`], [`Exec`].

use crate::clock::{Clock, HostClock};
use crate::copy::{CopyError, CopyResult, GetRequest, PutRequest};
use crate::driver::CopyReply;
use crate::exec::{ExecRequest, ExecResult};
use crate::glimpse::{Glimpses, Shown};
use crate::measured::MeasuredBoot;
use crate::phases::{self, Sealed};
use crate::report::{Opinion, RunReport};
use crate::stream::ExecIo;
use crossbeam_channel::{Receiver, Sender, bounded, select};
use hotcell_decide::Verdict;
use hotcell_ledger::{ClosedLedger, SigningKey};
use hotcell_policy::SealedSpec;
use hotcell_vm::{
    Acceleration, FileDigests, Registry, StartError, Template, TemplateError, TemplateStore, VmBackend,
};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Calls that wait for the driver at most; a caller that makes more waits itself.
const PENDING_CALLS: usize = 64;

/// Forms opinions on a closed record. It gets nothing else, and its answer goes
/// into the report and nowhere else.
pub type Advisor = Arc<dyn Fn(&ClosedLedger) -> Vec<Opinion> + Send + Sync>;

/// What all runs of one host share: where things are, and what starts machines.
/// It holds no state of any run.
#[derive(Clone)]
pub struct Runtime {
    /// Where live runs are written down.
    pub registry: Registry,
    /// What starts machines.
    pub backend: Arc<dyn VmBackend>,
    /// What executes guest code.
    pub acceleration: Acceleration,
    /// Folder in which bundles are made.
    pub out: PathBuf,
    /// Cache folder for blank disks.
    pub cache: PathBuf,
    /// What was hashed before; Hotcell's own executable is one of these files.
    pub digests: FileDigests,
    /// Signs checkpoints.
    pub key: Arc<SigningKey>,
    /// Stamps the record.
    pub clock: Arc<dyn Clock>,
    /// A machine that is not ready by then has failed.
    pub boot_deadline: Duration,
    /// How long it waits for whoever does not answer.
    pub patience: Patience,
    /// Forms opinions, where there is one.
    pub advisor: Option<Advisor>,
}

/// How long a run waits for a guest, or a caller, that does not answer. None of them
/// switches anything off: each ends in a stopped machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// What execs may take to end once they were told to.
    pub stop: Duration,
    /// What the guest may take to write its disks out. Its own limit is 10 s, of which
    /// it tells; a host whose disk is busy may take longer.
    pub quiesce: Duration,
    /// What a machine may take to be gone altogether once it is partly gone, so that its status is known.
    pub death: Duration,
    /// What the caller may take to read what is left, once the machine was stopped:
    /// output that nobody takes must not keep a run from its end.
    pub caller: Duration,
    /// What observers may take for their first look, before anything of the workload runs.
    pub arm: Duration,
}

/// Execs that were told to end have nothing to wait for but the kernel.
const STOP_PATIENCE: Duration = Duration::from_secs(3);
/// Three times the guest's own limit: a host whose disk is busy may take longer.
const QUIESCE_PATIENCE: Duration = Duration::from_secs(30);
/// A VMM that is going needs milliseconds, on a busy host many times that.
const DEATH_PATIENCE: Duration = Duration::from_secs(5);
/// A caller that reads at all takes what is left in far less.
const CALLER_PATIENCE: Duration = Duration::from_secs(5);
/// The first look reads the whole kernel, and needs well below a second for it.
const ARM_PATIENCE: Duration = Duration::from_secs(30);

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            stop: STOP_PATIENCE,
            quiesce: QUIESCE_PATIENCE,
            death: DEATH_PATIENCE,
            caller: CALLER_PATIENCE,
            arm: ARM_PATIENCE,
        }
    }
}

impl Runtime {
    /// The host's clock.
    pub fn host_clock() -> Arc<dyn Clock> {
        Arc::new(HostClock::new())
    }

    /// The template that runs of this spec and these files go on from, made where there is none (`say` is told);
    /// `None` where the backend has no templates. For [`MeasuredBoot::template`].
    ///
    /// # Errors
    /// None can be made. A run can still boot from scratch.
    pub fn template(
        &self,
        store: &TemplateStore,
        spec: &SealedSpec,
        boot: &MeasuredBoot,
        say: &mut dyn FnMut(&str),
    ) -> Result<Option<Template>, TemplateError> {
        let plan = boot
            .try_clone()
            .map_err(|error| error.to_string())
            .and_then(|boot| boot.plan(self, spec).map_err(|error| error.to_string()))
            .map_err(|why| TemplateError::Start(StartError::NotBegun(why)))?;
        self.backend.template(store, &self.registry, &plan, say)
    }

    /// Starts a run on a thread of its own and returns at once; calls of
    /// [`Run::exec`] wait until the machine is ready.
    pub fn start(&self, spec: SealedSpec, boot: MeasuredBoot) -> Run {
        self.begin(spec, boot, Shown::default())
    }

    /// As [`Runtime::start`], for somebody who looks on. He can't hold the run up.
    pub fn start_watched(&self, spec: SealedSpec, boot: MeasuredBoot) -> (Run, Glimpses) {
        let (shown, glimpses) = Shown::pair();
        (self.begin(spec, boot, shown), glimpses)
    }

    fn begin(&self, spec: SealedSpec, boot: MeasuredBoot, shown: Shown) -> Run {
        let (calls, inbox) = bounded(PENDING_CALLS);
        let run_id = spec.run_id().to_owned();
        let sealed = Sealed { runtime: self.clone(), spec, boot, shown };
        let (alive, over) = bounded(0);
        let thread = std::thread::Builder::new().name(format!("run-{run_id}")).spawn(move || {
            let _alive = alive;
            phases::drive(sealed, inbox)
        });
        Run { run_id, calls, over, thread: Some(thread) }
    }

    /// Runs the spec's command and finishes: always a report. `None` for the
    /// exec's result where it did not end.
    pub fn execute(
        &self,
        spec: SealedSpec,
        boot: MeasuredBoot,
        io: ExecIo,
    ) -> (RunReport, Option<ExecResult>) {
        let request = spec.command().map(|command| ExecRequest { last: true, ..ExecRequest::from(command) });
        let run = self.start(spec, boot);
        let result = request.map(|request| run.exec(request, io)).and_then(|exec| exec.wait().ok());
        (run.finish(), result)
    }
}

/// What a caller asks the driver for.
pub(crate) enum Call {
    Exec {
        request: ExecRequest,
        io: ExecIo,
        reply: Sender<Result<ExecResult, ExecError>>,
    },
    Put {
        request: PutRequest,
        reply: CopyReply,
    },
    Get {
        request: GetRequest,
        reply: CopyReply,
    },
    /// What was asked for could not be done: the run is FAILED, and goes on to its end.
    Fail {
        stage: String,
        error: String,
    },
    Interrupt {
        signal: i32,
    },
    Abandon,
    Finish,
}

/// Why an exec has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// It was not started: the caller asked for what can't be. The run goes on.
    #[error("not started: {0}")]
    Refused(String),
    /// The run ended before it did; the report says why.
    #[error("the run ended first: {0}")]
    RunEnded(String),
}

/// A live run. Dropping it destroys the machine, at once and whatever runs in it; the record says so.
#[must_use = "dropping a run destroys its machine"]
pub struct Run {
    run_id: String,
    calls: Sender<Call>,
    /// Disconnected when the driver's thread has ended.
    over: Receiver<()>,
    thread: Option<std::io::Result<JoinHandle<RunReport>>>,
}

impl Run {
    /// The run's id.
    pub fn id(&self) -> &str {
        &self.run_id
    }

    /// Starts an exec. Several may run at once.
    pub fn exec(&self, request: ExecRequest, io: ExecIo) -> Exec {
        let (reply, result) = bounded(1);
        // Where the driver is gone the call is lost, and `wait` says so.
        let _ = self.calls.send(Call::Exec { request, io, reply });
        Exec { result, over: self.over.clone() }
    }

    /// Copies a file or tree of the host into the machine, and waits until it is there. Each entry is on record before the
    /// guest has all of it.
    ///
    /// # Errors
    /// Nothing was copied, or not all; the guest keeps what came whole. The run goes on.
    pub fn put(&self, request: PutRequest) -> Result<CopyResult, CopyError> {
        self.copy(|reply| Call::Put { request, reply })
    }

    /// Copies a file or tree out of the machine, and waits until it is there. What comes is hostile: it is bounded by the
    /// policy's `copy_mib` and `copy_files`, stays below its target, and has its name only once it is whole.
    ///
    /// # Errors
    /// Nothing of it is on the host. The run goes on.
    pub fn get(&self, request: GetRequest) -> Result<CopyResult, CopyError> {
        self.copy(|reply| Call::Get { request, reply })
    }

    fn copy(&self, call: impl FnOnce(CopyReply) -> Call) -> Result<CopyResult, CopyError> {
        let (reply, result) = bounded(1);
        let _ = self.calls.send(call(reply));
        let ended = select! {
            recv(result) -> result => result.ok(),
            recv(self.over) -> _ => result.try_recv().ok(),
        };
        ended.unwrap_or_else(|| Err(CopyError::RunEnded("it is over".into())))
    }

    /// Says that the caller could not do what it was asked for, a copy say: the verdict is FAILED, unless worse happens.
    pub fn fail(&self, stage: &str, error: &str) {
        let _ = self.calls.send(Call::Fail { stage: stage.into(), error: error.into() });
    }

    /// A handle to stop the run from another thread.
    pub fn interrupter(&self) -> Interrupter {
        Interrupter { calls: self.calls.clone() }
    }

    /// Ends the run: the machine is destroyed and checked, the record closed.
    pub fn finish(mut self) -> RunReport {
        let _ = self.calls.send(Call::Finish);
        self.join()
    }

    fn join(&mut self) -> RunReport {
        match self.thread.take() {
            Some(Ok(thread)) => thread.join().unwrap_or_else(|_| {
                // The driver catches panics in every phase; this one was in the catching.
                let why = "the run's driver panicked; its machine died with it";
                RunReport::unknown(&self.run_id, why.into())
            }),
            Some(Err(error)) => {
                let why = format!("can't start the run's thread: {error}");
                RunReport::unrecorded(&self.run_id, Verdict::Killed, why)
            }
            None => RunReport::unknown(&self.run_id, "the run was finished already".into()),
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.thread.is_some() {
            let _ = self.calls.send(Call::Abandon);
            let _ = self.join();
        }
    }
}

/// Stops a run from another thread.
#[derive(Clone)]
pub struct Interrupter {
    calls: Sender<Call>,
}

impl Interrupter {
    /// Stops the run: the record is closed with this signal as the reason.
    pub fn interrupt(&self, signal: i32) {
        let _ = self.calls.send(Call::Interrupt { signal });
    }
}

/// A started exec.
#[must_use = "an exec's result is lost with it"]
pub struct Exec {
    result: Receiver<Result<ExecResult, ExecError>>,
    over: Receiver<()>,
}

impl Exec {
    /// Waits for its end.
    ///
    /// # Errors
    /// It was refused, or the run ended first.
    pub fn wait(self) -> Result<ExecResult, ExecError> {
        // A call that nobody took stays in the queue with its reply: the driver's
        // end is heard on a channel of its own.
        let ended = select! {
            recv(self.result) -> result => result.ok(),
            recv(self.over) -> _ => self.result.try_recv().ok(),
        };
        ended.unwrap_or_else(|| Err(ExecError::RunEnded("it is over".into())))
    }
}
