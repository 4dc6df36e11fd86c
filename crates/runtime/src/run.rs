//! The public face: [`Runtime`], [`Run`], [`Exec`].

use crate::clock::{Clock, HostClock};
use crate::exec::{ExecRequest, ExecResult};
use crate::phases::{self, MeasuredBoot, Sealed};
use crate::report::{Opinion, RunReport};
use crate::stream::ExecIo;
use crossbeam_channel::{Receiver, Sender, bounded, select};
use hotcell_decide::Verdict;
use hotcell_ledger::{ClosedLedger, SigningKey};
use hotcell_policy::SealedSpec;
use hotcell_vm::{Acceleration, Registry, VmBackend};
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
    /// Signs checkpoints.
    pub key: Arc<SigningKey>,
    /// Stamps the record.
    pub clock: Arc<dyn Clock>,
    /// A machine that is not ready by then has failed.
    pub boot_deadline: Duration,
    /// Forms opinions, where there is one.
    pub advisor: Option<Advisor>,
}

impl Runtime {
    /// The host's clock.
    pub fn host_clock() -> Arc<dyn Clock> {
        Arc::new(HostClock::new())
    }

    /// Starts a run on a thread of its own and returns at once; calls of
    /// [`Run::exec`] wait until the machine is ready.
    pub fn start(&self, spec: SealedSpec, boot: MeasuredBoot) -> Run {
        let (calls, inbox) = bounded(PENDING_CALLS);
        let run_id = spec.run_id().to_owned();
        let sealed = Sealed { runtime: self.clone(), spec, boot };
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
        let request = spec.command().map(ExecRequest::from);
        let run = self.start(spec, boot);
        let result = request.map(|request| run.exec(request, io)).and_then(|exec| exec.wait().ok());
        (run.finish(), result)
    }
}

/// What a caller asks the driver for.
pub(crate) enum Call {
    Exec { request: ExecRequest, io: ExecIo, reply: Sender<Result<ExecResult, RunEnded>> },
    Interrupt { signal: i32 },
    Finish,
}

/// The run ended before the call did; the report says why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the run ended first: {0}")]
pub struct RunEnded(pub String);

/// A live run. Dropping it destroys the machine.
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
        let unforeseen = |why: String| RunReport::unrecorded(&self.run_id, Verdict::Killed, why);
        match self.thread.take() {
            Some(Ok(thread)) => thread.join().unwrap_or_else(|_| {
                // The driver catches panics in every phase; this one was in the catching.
                unforeseen("the run's driver panicked; its machine died with it".into())
            }),
            Some(Err(error)) => unforeseen(format!("can't start the run's thread: {error}")),
            None => unforeseen("the run was finished already".into()),
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.thread.is_some() {
            let _ = self.calls.send(Call::Finish);
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
    result: Receiver<Result<ExecResult, RunEnded>>,
    over: Receiver<()>,
}

impl Exec {
    /// Waits for its end.
    ///
    /// # Errors
    /// The run ended first.
    pub fn wait(self) -> Result<ExecResult, RunEnded> {
        // A call that nobody took stays in the queue with its reply: the driver's
        // end is heard on a channel of its own.
        let ended = select! {
            recv(self.result) -> result => result.ok(),
            recv(self.over) -> _ => self.result.try_recv().ok(),
        };
        ended.unwrap_or_else(|| Err(RunEnded("the run is over".into())))
    }
}
