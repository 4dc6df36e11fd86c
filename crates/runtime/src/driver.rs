//! Attends a live machine: hears the channel, the VMM, the caller and the clock,
//! decides, records, and stops the machine the moment a rule breaks.
//!
//! ```text
//! booting ──ready──▶ arming ──armed──▶ running ──finish──▶ ending ──quiesced──▶ looking ──looked──▶ over
//!    │                  │                │ timeout, interrupt ──▶ stopping ──execs ended──▶ ending
//!    └─ deadline, death ┴─ FAILED        └─ kill, death, broken record, blind observer ─────────────▶ over
//! ```
//! It never waits without a deadline for anything that the guest could hold up,
//! and never blocks on the guest's reading: what is sent goes through a queue, and
//! a guest that lets it fill up is lost.

mod copies;
mod ending;
mod execs;
mod heard;
mod roll;

pub(crate) use copies::{CopyReply, CopyStep};

use crate::channel::{FromGuest, ToGuest, read_frames, write_frames};
use crate::exec::{ExecRequest, ExecResult};
use crate::phases::Booted;
use crate::recorder::RecordError;
use crate::run::{Call, ExecError};
use crate::stdin::StdinPump;
use crate::stream::{FromStream, OnDone, Sinks, Tap};
use crate::watch::{self, Told, Watch};
use copies::{Budgets, LiveCopy};
use crossbeam_channel::{Receiver, Sender, bounded, never, select};
use ending::{Going, turn_away};
use hotcell_decide::HostFact;
use hotcell_ledger::ActorId;
use hotcell_policy::WorkspaceExec;
use hotcell_wire::{Configure, ExecEnded, MAX_EXECS};
use roll::RollCall;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Frames from the guest that wait for the driver at most; the reader waits beyond, and with it the guest.
const FROM_GUEST: usize = 256;
/// What the driver has to say to the guest and it has not read yet: three messages for each exec that may be alive,
/// one more to kill it, and answers. An honest guest has at most 32 requests open, so one that lets this fill up reads
/// no more.
const TO_GUEST: usize = 4096;
/// Stdin and credit that wait at most; the streams wait beyond.
const STREAM_TO_GUEST: usize = 256;
/// Longest working directory: the kernel's PATH_MAX.
const MAX_CWD: usize = 4096;
/// From one question for the VMM's write counters to the next, with which the answer is taken: ten in a second cost it and
/// the driver half a per cent of a core.
const COUNTERS: Duration = Duration::from_millis(250);
/// How often a quiet run seals its open block.
const TICK: Duration = Duration::from_millis(100);

/// How attending ended, beyond what is recorded.
pub(crate) struct Attended {
    pub(crate) error: Option<String>,
    /// The VMM ended while the run went on, and nobody had ended it.
    pub(crate) alone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Booting,
    /// Observers take the state that they compare with; nothing of the workload runs yet.
    Arming,
    Running,
    /// Execs were told to end; then on to `Ending`.
    Stopping,
    /// The guest writes its disks out.
    Ending,
    /// It did; the observers look for the last time.
    Looking,
    Over,
}

struct LiveExec {
    actor: ActorId,
    request: ExecRequest,
    /// The name of the root service that it is.
    service: Option<String>,
    reply: Sender<Result<ExecResult, ExecError>>,
    stdin: Option<StdinPump>,
    ended: Option<ExecEnded>,
    /// The time limit came while it ran.
    timed_out: bool,
    outputs: [Tap; 2],
    /// Which outputs have nobody left who passes them on.
    over: [bool; 2],
}

struct Driver<'a> {
    run: &'a mut Booted,
    state: State,
    deadline: Instant,
    run_deadline: Option<Instant>,
    execs: BTreeMap<u32, LiveExec>,
    copies: BTreeMap<u32, LiveCopy>,
    budgets: Budgets,
    next_exec: u32,
    waiting: Vec<Call>,
    finish_asked: bool,
    going: Going,
    /// The queue to the guest was full.
    unread: bool,
    quiesced: bool,
    sinks: Sinks,
    to_guest: Sender<ToGuest>,
    stream_to_guest: Sender<ToGuest>,
    on_done: OnDone,
    watch: Option<Watch>,
    /// When the VMM is asked next whether its guest goes on.
    look: Instant,
    count: Instant,
    roll: RollCall,
    error: Option<String>,
    alone: bool,
}

/// Ends the channel and every stream, however attending ends.
struct HangUp {
    channel: Arc<UnixStream>,
    sinks: Sinks,
}

impl Drop for HangUp {
    fn drop(&mut self) {
        let _ = self.channel.shutdown(std::net::Shutdown::Both);
        self.sinks.end_all();
    }
}

pub(crate) fn attend(run: &mut Booted, calls: &Receiver<Call>) -> Attended {
    let unattended = |run: &mut Booted, why: String| {
        let recorded = run.recorder.host(&HostFact::fault("driver", &why));
        Attended { error: Some(recorded.err().map_or(why, |error| error.to_string())), alone: false }
    };
    let Some(channel) = run.vm.take_channel() else {
        return unattended(run, "the machine has no channel".into());
    };
    let (from_guest, guest) = bounded(FROM_GUEST);
    let (to_guest, control) = bounded(TO_GUEST);
    let (stream_to_guest, data) = bounded(STREAM_TO_GUEST);
    let (done_in, done) = bounded(2 * MAX_EXECS);
    let (death_in, death) = bounded::<()>(1);
    let sinks = Sinks::default();
    let exit = run.vm.exit_event();
    let channel = Arc::new(channel);
    let hang_up = HangUp { channel: Arc::clone(&channel), sinks: sinks.clone() };
    let reader_sinks = sinks.clone();
    let threads = exit.and_then(|exit| {
        let reader = channel.try_clone()?;
        std::thread::spawn(move || read_frames(reader, &reader_sinks, &from_guest));
        std::thread::spawn(move || write_frames(channel, &control, &data));
        std::thread::spawn(move || {
            while matches!(poll(&mut [PollFd::new(&exit, PollFlags::IN)], None), Err(rustix::io::Errno::INTR))
            {
            }
            let _ = death_in.send(());
        });
        Ok(())
    });
    if let Err(error) = threads {
        return unattended(run, format!("can't watch the machine: {error}"));
    }
    let watch = match Watch::begin(run) {
        Ok(watch) => watch,
        Err(error) => return unattended(run, format!("can't observe the machine: {error}")),
    };
    let told = watch.as_ref().map_or_else(never, Watch::told);
    let boot_deadline = run.started + run.runtime.boot_deadline;
    let budgets = Budgets::new(run.spec.limits());
    let mut driver = Driver {
        run,
        state: State::Booting,
        deadline: boot_deadline,
        run_deadline: None,
        execs: BTreeMap::new(),
        copies: BTreeMap::new(),
        budgets,
        next_exec: 1,
        waiting: Vec::new(),
        finish_asked: false,
        going: Going::default(),
        unread: false,
        quiesced: false,
        sinks,
        to_guest,
        stream_to_guest,
        on_done: Arc::new(move |message| {
            let _ = done_in.send(message);
        }),
        watch,
        look: Instant::now(),
        count: Instant::now(),
        roll: RollCall::default(),
        error: None,
        alone: false,
    };
    let outcome = driver.run(calls, &guest, &done, &death, &told);
    if let Err(error) = outcome {
        driver.error.get_or_insert(error.to_string());
    }
    driver.run.vm.kill();
    drop(hang_up);
    driver.settle(&done);
    if let Err(error) = driver.post_mortem(&told, &death) {
        driver.error.get_or_insert(error.to_string());
    }
    Attended { error: driver.error, alone: driver.alone }
}

impl Driver<'_> {
    fn run(
        &mut self,
        calls: &Receiver<Call>,
        guest: &Receiver<FromGuest>,
        done: &Receiver<FromStream>,
        death: &Receiver<()>,
        told: &Receiver<Told>,
    ) -> Result<(), RecordError> {
        self.configure();
        let (no_calls, no_frames, no_death, nothing_told) = (never(), never(), never(), never());
        let (mut calls, mut guest, mut death, mut told) = (calls, guest, death, told);
        while self.state != State::Over {
            let now = Instant::now();
            let due = self.run_deadline.map_or(self.deadline, |end| self.deadline.min(end));
            let wait = due.saturating_duration_since(now).min(TICK);
            select! {
                recv(calls) -> call => match call {
                    Ok(call) => self.call(call)?,
                    Err(_) => {
                        calls = &no_calls;
                        self.finish_asked = true;
                    }
                },
                recv(guest) -> message => match message {
                    Ok(message) => {
                        if matches!(message, FromGuest::Lost { .. }) {
                            guest = &no_frames;
                        }
                        self.guest(message)?;
                    }
                    Err(_) => {
                        // It says why it ends, unless it panicked.
                        guest = &no_frames;
                        self.fault("channel", "the channel's reader panicked")?;
                    }
                },
                recv(done) -> message => if let Ok(message) = message { self.stream(message)? },
                recv(death) -> _ => {
                    death = &no_death;
                    self.going.process = true;
                    self.going(now)?;
                }
                recv(told) -> message => match message {
                    Ok(message) => self.told(message)?,
                    Err(_) => {
                        told = &nothing_told;
                        self.blind()?;
                    }
                },
                default(wait) => {}
            }
            if self.unread && self.state != State::Over {
                self.misbehaved("it stopped reading its channel")?;
            }
            self.look_at_vmm(now)?;
            if self.run.recorder.trip().is_some() {
                // Once tripped, always tripped: stop the machine, write about it after.
                self.run.vm.kill();
                self.run.recorder.kill()?;
                self.state = State::Over;
            }
            self.advance(Instant::now())?;
        }
        if self.quiesced {
            self.check_root()?;
        }
        Ok(())
    }

    fn configure(&mut self) {
        let limits = self.run.spec.limits();
        let mut configure = Configure {
            nonce: self.run.nonce,
            entropy: [0; 64],
            wall_clock_ns: self.run.recorder.now_ns().into(),
            tmp_bytes: (u64::from(limits.tmp_mib) << 20).into(),
            pids: limits.pids.into(),
            memory_bytes: 0.into(),
            workspace_uid: self.run.owner.0.into(),
            workspace_gid: self.run.owner.1.into(),
            workspace_exec: u8::from(self.run.spec.policy().workspace_exec() == WorkspaceExec::Allow),
            reserved: [0; 7],
        };
        random(&mut configure.entropy);
        self.send(ToGuest::Configure(Box::new(configure)));
    }

    /// What deadlines bring, and the steps from state to state.
    fn advance(&mut self, now: Instant) -> Result<(), RecordError> {
        self.run.recorder.tick()?;
        self.call_roll(now);
        if self.state == State::Running && self.run_deadline.is_some_and(|end| now >= end) {
            let limit_ms = u64::from(self.run.spec.limits().timeout_s) * 1000;
            self.run.recorder.host(&HostFact::Timeout { limit_ms })?;
            self.execs.values_mut().for_each(|live| live.timed_out = live.ended.is_none());
            self.copies.values_mut().for_each(LiveCopy::time_out);
            self.stop(now);
        }
        let idle = self.execs.is_empty() && self.copies.is_empty();
        if self.state == State::Running && self.finish_asked {
            if idle {
                self.quiesce(now);
            } else if self.copies.is_empty() && self.execs.values().all(|live| live.service.is_some()) {
                self.stop(now);
            }
        }
        if self.state == State::Stopping && (idle || now >= self.deadline) {
            self.quiesce(now);
        }
        if self.going.until.is_some_and(|until| now >= until) {
            self.gone()?;
        }
        if now < self.deadline {
            return Ok(());
        }
        match self.state {
            State::Booting => {
                let words = self.run.vm.last_words();
                let limit = self.run.runtime.boot_deadline;
                self.fail(
                    "boot",
                    &format!("the machine was not ready after {limit:?}. Its last words:\n{words}"),
                )?;
            }
            State::Ending => {
                let limit = self.run.runtime.patience.quiesce;
                self.destroyed("init", &format!("it did not become quiet within {limit:?}"))?;
            }
            State::Arming => {
                let limit = self.run.runtime.patience.arm;
                self.fail("observe", &format!("the machine could not be observed within {limit:?}"))?;
            }
            State::Looking => {
                let what =
                    format!("the last look did not end within {:?}", self.run.runtime.patience.quiesce);
                self.fault("observe", &what)?;
                self.state = State::Over;
            }
            State::Running | State::Stopping | State::Over => {}
        }
        Ok(())
    }

    /// The guest is ready: what observers compare with is read before anything of the workload runs.
    fn ready(&mut self) -> Result<(), RecordError> {
        let Some(watch) = &self.watch else { return self.begin() };
        watch.arm();
        self.state = State::Arming;
        self.deadline = Instant::now() + self.run.runtime.patience.arm;
        Ok(())
    }

    /// The workload may run.
    fn begin(&mut self) -> Result<(), RecordError> {
        self.state = State::Running;
        let limit = Duration::from_secs(u64::from(self.run.spec.limits().timeout_s));
        let end = Instant::now() + limit;
        self.run_deadline = Some(end);
        self.deadline = end + self.run.runtime.patience.stop;
        self.roll.begin(Instant::now());
        self.start_services()?;
        for call in std::mem::take(&mut self.waiting) {
            self.call(call)?;
        }
        Ok(())
    }

    /// What an observer has to say.
    fn told(&mut self, told: Told) -> Result<(), RecordError> {
        match told {
            Told::Seen(seen) => watch::record(&mut self.run.recorder, seen)?,
            Told::Armed if self.state == State::Arming => self.begin()?,
            Told::LastLooked if self.state == State::Looking => self.state = State::Over,
            Told::Rolled => self.roll.again(Instant::now()),
            Told::Armed | Told::LastLooked | Told::Over => {}
            Told::Blind { observer, armed: false, error } if self.workload_may_not_have_run() => {
                self.fail("observe", &format!("{observer}: {error}"))?;
            }
            Told::Blind { observer, error, .. } => self.fault("observe", &format!("{observer}: {error}"))?,
        }
        Ok(())
    }

    /// The observing thread is gone.
    fn blind(&mut self) -> Result<(), RecordError> {
        if self.state == State::Over {
            return Ok(());
        }
        let why = self.watch.as_ref().map_or_else(String::new, Watch::why_dead);
        self.fault("observe", &why)
    }

    fn workload_may_not_have_run(&self) -> bool {
        matches!(self.state, State::Booting | State::Arming)
    }

    fn call(&mut self, call: Call) -> Result<(), RecordError> {
        match call {
            Call::Finish => self.finish_asked = true,
            Call::Interrupt { signal } => self.interrupt(signal, false)?,
            Call::Abandon => self.interrupt(0, true)?,
            Call::Fail { stage, error } => {
                if self.state != State::Over {
                    self.error.get_or_insert_with(|| error.clone());
                    self.run.recorder.host(&HostFact::failed(&stage, &error))?;
                }
            }
            work @ (Call::Exec { .. } | Call::Put { .. } | Call::Get { .. }) => match self.state {
                State::Booting | State::Arming => self.waiting.push(work),
                State::Running => match work {
                    Call::Exec { request, io, reply } => self.exec(request, io, reply)?,
                    Call::Put { request, reply } => self.put(request, reply)?,
                    Call::Get { request, reply } => self.get(request, reply)?,
                    _ => {}
                },
                State::Stopping | State::Ending | State::Looking | State::Over => {
                    turn_away(work, "it is ending");
                }
            },
        }
        Ok(())
    }

    /// The stdin of an exec or copy that is alive.
    fn stdin(&mut self, exec: u32) -> Option<&mut Option<StdinPump>> {
        match self.execs.get_mut(&exec) {
            Some(live) => Some(&mut live.stdin),
            None => self.copies.get_mut(&exec).map(LiveCopy::stdin),
        }
    }

    /// What the threads of streams and copies say.
    fn stream(&mut self, message: FromStream) -> Result<(), RecordError> {
        match message {
            FromStream::Done(done) => self.stream_done(done),
            FromStream::Copy { exec, step } => self.copy_step(exec, step),
        }
    }

    /// Never blocks. A full queue means that the guest reads no more: the loop ends the run for it.
    fn send(&mut self, message: ToGuest) {
        self.unread |= self.to_guest.try_send(message).is_err_and(|error| error.is_full());
    }
}

/// Fresh random bytes of the host.
pub(crate) fn random(into: &mut [u8]) {
    if let Err(error) = getrandom::fill(into) {
        panic!("the host has no random bytes: {error}");
    }
}
