//! Attends a live machine: hears the channel, the VMM, the caller and the clock,
//! decides, records, and stops the machine the moment a rule breaks.
//!
//! ```text
//! booting ──ready──▶ running ──finish──▶ ending ──quiesced──▶ over
//!    │                  │ timeout, interrupt ──▶ stopping ──execs ended──▶ ending
//!    └─ deadline, death └─ kill, death, broken record ─────────────────────▶ over
//! ```
//! It never waits without a deadline for anything that the guest could hold up,
//! and never blocks on the guest's reading: what is sent goes through a queue.

use crate::channel::{FromGuest, Lost, ToGuest, read_frames, write_frames};
use crate::exec::{ExecRequest, ExecResult, ending, not_started};
use crate::phases::Booted;
use crate::recorder::RecordError;
use crate::run::{Call, RunEnded};
use crate::stream::{ExecIo, OnDone, Sinks, StdinPump, StreamDone, StreamTotals, start_outputs};
use crossbeam_channel::{Receiver, Sender, bounded, never, select};
use hotcell_decide::{
    Broker, CapabilityRequest, Decision, ExecHow, HostFact, OutputStream, SpawnAttempt, SpawnDecision,
    ViolationKind,
};
use hotcell_ledger::{ActorId, Capability, Digest};
use hotcell_policy::WorkspaceExec;
use hotcell_wire::{Configure, ExecBegin, ExecEnded, MAX_EXECS, Program, Stream};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Frames from the guest that wait for the driver at most; the reader waits beyond, and with it the guest.
const FROM_GUEST: usize = 256;
/// Messages to the guest that wait at most. Stream credit and stdin are bounded by
/// their windows; a guest that stops reading until this is full is lost.
const TO_GUEST: usize = 4096;
/// What execs may take to end once they were told to.
const STOP_GRACE: Duration = Duration::from_secs(3);
/// What the guest may take to write its disks out.
const QUIESCE_GRACE: Duration = Duration::from_secs(10);
/// What sinks may take to hand on what they have, once the streams ended: a caller
/// that does not read its pipe must not keep a machine alive.
const SINK_GRACE: Duration = Duration::from_secs(5);
/// What a VMM whose guest is gone may take to end by itself, so that its status is known.
const DEATH_GRACE: Duration = Duration::from_secs(5);
/// How often a quiet run seals its open block.
const TICK: Duration = Duration::from_millis(100);

/// How attending ended, beyond what is recorded.
pub(crate) struct Attended {
    pub(crate) error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Booting,
    Running,
    /// Execs were told to end; then on to `Ending`.
    Stopping,
    /// The guest writes its disks out.
    Ending,
    Over,
}

struct LiveExec {
    actor: ActorId,
    request: ExecRequest,
    reply: Sender<Result<ExecResult, RunEnded>>,
    stdin: Option<StdinPump>,
    ended: Option<ExecEnded>,
    stdout: Option<Option<StreamTotals>>,
    stderr: Option<Option<StreamTotals>>,
}

struct Driver<'a> {
    run: &'a mut Booted,
    state: State,
    deadline: Instant,
    run_deadline: Option<Instant>,
    execs: BTreeMap<u32, LiveExec>,
    next_exec: u32,
    waiting: Vec<Call>,
    finish_asked: bool,
    timed_out: bool,
    sinks: Sinks,
    to_guest: Sender<ToGuest>,
    on_done: OnDone,
    error: Option<String>,
}

pub(crate) fn attend(run: &mut Booted, calls: &Receiver<Call>) -> Attended {
    let Some(channel) = run.vm.take_channel() else {
        return Attended { error: Some("the machine has no channel".into()) };
    };
    let (from_guest, guest) = bounded(FROM_GUEST);
    let (to_guest, outgoing) = bounded(TO_GUEST);
    let (done_in, done) = bounded(2 * MAX_EXECS);
    let (death_in, death) = bounded::<()>(1);
    let sinks = Sinks::default();
    let exit = run.vm.exit_event();
    let channel = Arc::new(channel);
    let writer = Arc::clone(&channel);
    let reader_sinks = sinks.clone();
    let threads = exit.and_then(|exit| {
        let reader = channel.try_clone()?;
        std::thread::spawn(move || read_frames(reader, &reader_sinks, &from_guest));
        std::thread::spawn(move || write_frames(writer, &outgoing));
        std::thread::spawn(move || {
            while matches!(poll(&mut [PollFd::new(&exit, PollFlags::IN)], None), Err(rustix::io::Errno::INTR))
            {
            }
            let _ = death_in.send(());
        });
        Ok(())
    });
    if let Err(error) = threads {
        return Attended { error: Some(format!("can't watch the machine: {error}")) };
    }
    let boot_deadline = run.started + run.runtime.boot_deadline;
    let mut driver = Driver {
        run,
        state: State::Booting,
        deadline: boot_deadline,
        run_deadline: None,
        execs: BTreeMap::new(),
        next_exec: 1,
        waiting: Vec::new(),
        finish_asked: false,
        timed_out: false,
        sinks,
        to_guest,
        on_done: Arc::new(move |message| {
            let _ = done_in.send(message);
        }),
        error: None,
    };
    let outcome = driver.run(calls, &guest, &done, &death);
    if let Err(error) = outcome {
        driver.error.get_or_insert(error.to_string());
    }
    driver.run.vm.kill();
    let _ = channel.shutdown(std::net::Shutdown::Both);
    driver.sinks.end_all();
    driver.settle(&done);
    Attended { error: driver.error }
}

impl Driver<'_> {
    fn run(
        &mut self,
        calls: &Receiver<Call>,
        guest: &Receiver<FromGuest>,
        done: &Receiver<StreamDone>,
        death: &Receiver<()>,
    ) -> Result<(), RecordError> {
        self.configure();
        let nobody = never();
        let mut calls = calls;
        while self.state != State::Over {
            let now = Instant::now();
            let due = self.run_deadline.map_or(self.deadline, |end| self.deadline.min(end));
            let wait = due.saturating_duration_since(now).min(TICK);
            select! {
                recv(calls) -> call => match call {
                    Ok(call) => self.call(call)?,
                    Err(_) => {
                        calls = &nobody;
                        self.finish_asked = true;
                    }
                },
                recv(guest) -> message => match message {
                    Ok(message) => self.guest(message, death)?,
                    Err(_) => self.lost(&Lost::Closed("the channel's reader ended".into()), death)?,
                },
                recv(done) -> message => if let Ok(message) = message { self.stream_done(message)? },
                recv(death) -> _ => self.died()?,
                default(wait) => {}
            }
            if self.run.recorder.trip().is_some() {
                // Once tripped, always tripped: stop the machine, write about it after.
                self.run.vm.kill();
                self.run.recorder.kill()?;
                self.state = State::Over;
            }
            self.advance(Instant::now())?;
        }
        Ok(())
    }

    fn configure(&mut self) {
        let limits = self.run.spec.limits();
        let mut configure = Configure {
            nonce: [0; 32],
            entropy: [0; 64],
            wall_clock_ns: self.run.recorder.now_ns().into(),
            tmp_bytes: (u64::from(limits.tmp_mib) << 20).into(),
            pids: limits.pids.into(),
            memory_bytes: 0.into(),
            workspace_exec: u8::from(self.run.spec.policy().workspace_exec() == WorkspaceExec::Allow),
            reserved: [0; 7],
        };
        random(&mut configure.nonce);
        random(&mut configure.entropy);
        self.send(ToGuest::Configure(Box::new(configure)));
    }

    /// What deadlines bring, and the steps from state to state.
    fn advance(&mut self, now: Instant) -> Result<(), RecordError> {
        self.run.recorder.tick()?;
        if self.state == State::Running && self.run_deadline.is_some_and(|end| now >= end) {
            let limit_ms = u64::from(self.run.spec.limits().timeout_s) * 1000;
            self.run.recorder.host(&HostFact::Timeout { limit_ms })?;
            self.timed_out = true;
            self.stop(now);
        }
        if self.state == State::Running && self.finish_asked && self.execs.is_empty() {
            self.quiesce(now);
        }
        if self.state == State::Stopping && (self.execs.is_empty() || now >= self.deadline) {
            self.quiesce(now);
        }
        if now < self.deadline {
            return Ok(());
        }
        match self.state {
            State::Booting => {
                let words = self.run.vm.last_words();
                let limit = self.run.runtime.boot_deadline.as_secs();
                self.fail(
                    "boot",
                    &format!("the machine was not ready after {limit} s. Its last words:\n{words}"),
                )?;
            }
            State::Ending => self.state = State::Over,
            State::Running | State::Stopping | State::Over => {}
        }
        Ok(())
    }

    fn stop(&mut self, now: Instant) {
        self.state = State::Stopping;
        self.deadline = now + STOP_GRACE;
        self.run_deadline = None;
        let execs: Vec<u32> = self.execs.keys().copied().collect();
        for exec in execs {
            self.send(ToGuest::KillTree(exec));
        }
    }

    fn quiesce(&mut self, now: Instant) {
        self.state = State::Ending;
        self.deadline = now + QUIESCE_GRACE;
        self.send(ToGuest::Quiesce);
    }

    fn fail(&mut self, stage: &str, error: &str) -> Result<(), RecordError> {
        self.state = State::Over;
        self.error = Some(error.to_owned());
        self.run.recorder.host(&HostFact::failed(stage, &error))
    }

    fn call(&mut self, call: Call) -> Result<(), RecordError> {
        match call {
            Call::Finish => self.finish_asked = true,
            Call::Interrupt { signal } => {
                self.run.recorder.host(&HostFact::Interrupted { signal })?;
                match self.state {
                    State::Running => self.stop(Instant::now()),
                    State::Booting => self.state = State::Over,
                    State::Stopping | State::Ending | State::Over => {}
                }
            }
            Call::Exec { request, io, reply } => match self.state {
                State::Booting => self.waiting.push(Call::Exec { request, io, reply }),
                State::Running => self.exec(request, io, reply)?,
                State::Stopping | State::Ending | State::Over => {
                    let _ = reply.send(Err(RunEnded("the run is ending".into())));
                }
            },
        }
        Ok(())
    }

    fn exec(
        &mut self,
        request: ExecRequest,
        io: ExecIo,
        reply: Sender<Result<ExecResult, RunEnded>>,
    ) -> Result<(), RecordError> {
        let refuse = |why: String| {
            let _ = reply.send(Err(RunEnded(why)));
        };
        if self.execs.len() >= MAX_EXECS {
            refuse(format!("{MAX_EXECS} execs run already"));
            return Ok(());
        }
        let text = match request.text().encode() {
            Ok(text) => text,
            Err(error) => {
                refuse(error.to_string());
                return Ok(());
            }
        };
        let binary = match self.authorize(&request)? {
            Ok(binary) => binary,
            Err(why) => {
                refuse(why);
                return Ok(());
            }
        };
        let exec = self.next_exec;
        self.next_exec += 1;
        let recorder = &mut self.run.recorder;
        let Some(actor) = recorder.exec_begun(exec, binary, &request.argv, &request.cwd)? else {
            refuse("the run has started as many execs as it may".into());
            return Ok(());
        };
        let keep = |stream: &str| recorder.bundle().begin_object(&format!("{exec}-{stream}"));
        let outputs =
            [(Stream::Stdout, io.stdout, keep("stdout")?), (Stream::Stderr, io.stderr, keep("stderr")?)];
        let limit = u64::from(self.run.spec.limits().output_mib) << 20;
        start_outputs(&self.sinks, exec, outputs, limit, &self.to_guest, &self.on_done);
        let begin = ExecBegin {
            program: Program::Argv,
            stdin: 1,
            reserved: [0; 2],
            uid: request.uid.into(),
            gid: request.gid.into(),
            text_len: (text.len() as u32).into(),
        };
        self.send(ToGuest::ExecBegin(exec, begin));
        self.send(ToGuest::ExecText(exec, text));
        self.send(ToGuest::ExecStart(exec));
        let stdin = StdinPump::start(exec, io.stdin, self.to_guest.clone()).ok();
        let live = LiveExec { actor, request, reply, stdin, ended: None, stdout: None, stderr: None };
        self.execs.insert(exec, live);
        Ok(())
    }

    /// A token for what the host starts, bound to the machine and the program, used
    /// at once. A program that is not in the image gets none: the guest decides
    /// whether there is such a file, and whether it may be executed.
    fn authorize(&mut self, request: &ExecRequest) -> Result<Result<Digest, String>, RecordError> {
        let (Some(contents), Some(authorizer)) = (&self.run.contents, &mut self.run.authorizer) else {
            return Ok(Ok(Digest::ZERO));
        };
        let search = request.env.iter().rev().find(|(name, _)| name == "PATH").map_or("", |(_, value)| value);
        let name = request.argv.first().map(String::as_str).unwrap_or_default();
        let Some((_, entry)) = contents.program(name, search, &request.cwd) else {
            return Ok(Ok(Digest::ZERO));
        };
        let binary = entry.content();
        let lineage = self.run.recorder.lineage();
        let mut fresh = [0; 32];
        random(&mut fresh);
        let token = match authorizer.issue(ActorId::VM, binary, fresh, lineage) {
            Ok(token) => *token.as_bytes(),
            Err(error) => return Ok(Err(error.to_string())),
        };
        let attempt = SpawnAttempt { parent: ActorId::VM, binary, token: Some(token) };
        match authorizer.redeem(&attempt, lineage) {
            SpawnDecision::Allow(permit) => Ok(Ok(permit.binary())),
            SpawnDecision::Deny(reason) => {
                self.run.recorder.host(&HostFact::SpawnDenied { reason, binary })?;
                Ok(Err(format!("{name} may not be started: {reason:?}")))
            }
        }
    }

    fn guest(&mut self, message: FromGuest, death: &Receiver<()>) -> Result<(), RecordError> {
        match message {
            FromGuest::Ready { kernel_release } if self.state == State::Booting => {
                let boot_ms = self.run.started.elapsed().as_millis() as u64;
                self.run.timings.insert("ready", boot_ms);
                self.run.recorder.host(&HostFact::Ready { boot_ms, kernel_release })?;
                self.state = State::Running;
                let limit = Duration::from_secs(u64::from(self.run.spec.limits().timeout_s));
                let end = Instant::now() + limit;
                self.run_deadline = Some(end);
                self.deadline = end + STOP_GRACE;
                for call in std::mem::take(&mut self.waiting) {
                    self.call(call)?;
                }
            }
            FromGuest::Ready { .. } => self.misbehaved("it said ready twice")?,
            FromGuest::Ended { exec, ended } => {
                if let Some(live) = self.execs.get_mut(&exec) {
                    live.ended = Some(ended);
                    live.stdin = None;
                }
                self.complete(exec)?;
            }
            FromGuest::StdinCredit { exec, bytes } => {
                if let Some(pump) = self.execs.get(&exec).and_then(|live| live.stdin.as_ref()) {
                    pump.add_credit(bytes);
                }
            }
            FromGuest::StdinClosed { exec } => {
                if let Some(live) = self.execs.get_mut(&exec) {
                    live.stdin = None;
                }
            }
            FromGuest::Request { id, exec, capability, resource, justification } => {
                self.request(id, exec, capability, &resource, &justification)?;
            }
            FromGuest::Claim { kind, subject, parent, value, text } => {
                let claim = hotcell_wire::Claim { kind, subject, parent, value, text: &text };
                self.run.recorder.claim(&claim)?;
            }
            FromGuest::Quiesced if self.state == State::Ending => self.state = State::Over,
            FromGuest::Quiesced => self.misbehaved("it quiesced unasked")?,
            FromGuest::Fatal { text } if self.state == State::Booting => {
                self.fail("boot", &format!("the guest's init can't go on: {text}"))?;
            }
            FromGuest::Fatal { text } => self.misbehaved(&format!("its init can't go on: {text}"))?,
            FromGuest::Lost { why } => self.lost(&why, death)?,
        }
        Ok(())
    }

    /// A capability request: decided here, recorded, answered.
    fn request(
        &mut self,
        id: u32,
        exec: u32,
        capability: u8,
        resource: &[u8],
        justification: &[u8],
    ) -> Result<(), RecordError> {
        let Some(capability) = Capability::from_byte(capability) else {
            let reason = format!("there is no capability {capability}");
            self.send(ToGuest::Reply(id, hotcell_wire::Decision::Deny, reason));
            return Ok(());
        };
        let actor = self.run.recorder.attribute(exec);
        let (resource, justification) =
            (String::from_utf8_lossy(resource), String::from_utf8_lossy(justification));
        let request = CapabilityRequest::new(capability, &resource, &justification, actor);
        let decision = Broker::decide(self.run.spec.policy().capabilities(), &request);
        self.run.recorder.decision(decision, &request)?;
        let verb = match decision {
            Decision::Allow(_) => hotcell_wire::Decision::Allow,
            Decision::Deny(_) => hotcell_wire::Decision::Deny,
            Decision::Defer(_) => hotcell_wire::Decision::Defer,
        };
        self.send(ToGuest::Reply(id, verb, decision.rule().name().to_owned()));
        Ok(())
    }

    fn stream_done(&mut self, message: StreamDone) -> Result<(), RecordError> {
        let StreamDone { exec, stream, totals } = message;
        let totals = totals?;
        if let Some(live) = self.execs.get_mut(&exec) {
            match stream {
                Stream::Stdout => live.stdout = Some(Some(totals)),
                Stream::Stderr => live.stderr = Some(Some(totals)),
            }
        }
        self.complete(exec)
    }

    /// Records and answers an exec whose end and streams are known.
    fn complete(&mut self, exec: u32) -> Result<(), RecordError> {
        let whole = |live: &LiveExec| live.ended.is_some() && live.stdout.is_some() && live.stderr.is_some();
        if !self.execs.get(&exec).is_some_and(whole) {
            return Ok(());
        }
        let Some(live) = self.execs.remove(&exec) else { return Ok(()) };
        self.conclude(exec, live)
    }

    fn conclude(&mut self, exec: u32, live: LiveExec) -> Result<(), RecordError> {
        let LiveExec { actor, request, reply, ended, stdout, stderr, stdin } = live;
        drop(stdin);
        let (stdout, stderr) = (stdout.flatten(), stderr.flatten());
        for (stream, totals) in [(OutputStream::Stdout, &stdout), (OutputStream::Stderr, &stderr)] {
            if let Some(totals) = totals {
                self.run.recorder.host(&HostFact::Output {
                    exec: u64::from(exec),
                    stream,
                    total_bytes: totals.total_bytes,
                    kept_bytes: totals.kept_bytes,
                    truncated: totals.truncated(),
                    whole: totals.whole,
                    kept: totals.kept,
                })?;
            }
        }
        let (mut how, mut code, mut signal) =
            ended.as_ref().map_or((ExecHow::Unknown, None, None), |ended| ending(ended));
        if self.timed_out && how != ExecHow::Unknown {
            (how, code, signal) = (ExecHow::TimedOut, None, Some(9));
        }
        self.run.recorder.host(&HostFact::ExecEnded { exec: u64::from(exec), how, code, signal })?;
        let record_code = code.or(signal.map(|signal| -signal)).unwrap_or(-9);
        self.run.recorder.exec_exited(actor, record_code)?;
        let not_started = ended.as_ref().and_then(|ended| not_started(ended, &request.argv, &request.cwd));
        let code = match how {
            ExecHow::TimedOut => 124,
            _ => code.or(signal.map(|signal| 128 + signal)).unwrap_or(125),
        };
        let stragglers = ended.is_some_and(|ended| ended.stragglers != 0);
        let result = match how {
            ExecHow::Unknown => Err(RunEnded(self.error.clone().unwrap_or("the machine was stopped".into()))),
            _ => Ok(ExecResult { how, code, not_started, stdout, stderr, stragglers }),
        };
        let _ = reply.send(result);
        Ok(())
    }

    fn lost(&mut self, why: &Lost, death: &Receiver<()>) -> Result<(), RecordError> {
        if self.state == State::Over {
            return Ok(());
        }
        match why {
            Lost::Misbehaved(what) => self.misbehaved(what),
            // The far end of the channel is the VMM: it is dying, and how it dies says more.
            Lost::Closed(what) => match death.recv_timeout(DEATH_GRACE) {
                Ok(()) => self.died(),
                Err(_) => self.misbehaved(what),
            },
        }
    }

    /// The guest broke the protocol, or its init is gone: nothing that it says counts any more.
    fn misbehaved(&mut self, what: &str) -> Result<(), RecordError> {
        if self.state == State::Booting {
            let words = self.run.vm.last_words();
            return self.fail(
                "boot",
                &format!("the guest does not speak as it should: {what}. Its last words:\n{words}"),
            );
        }
        self.destroyed("channel", what)
    }

    fn destroyed(&mut self, subject: &str, what: &str) -> Result<(), RecordError> {
        self.run.vm.kill();
        self.state = State::Over;
        self.error = Some(format!("the sandbox was destroyed from inside: {what}"));
        self.run.recorder.host(&HostFact::Violation {
            kind: ViolationKind::SandboxDestroyed,
            subject: subject.into(),
            detail: what.into(),
        })
    }

    /// The VMM ended and nobody had told it to.
    fn died(&mut self) -> Result<(), RecordError> {
        match self.state {
            State::Over => Ok(()),
            State::Booting => {
                let words = self.run.vm.last_words();
                self.fail("boot", &format!("the machine ended while it booted. Its last words:\n{words}"))
            }
            _ => self.destroyed("VMM", "the machine ended while the run went on"),
        }
    }

    /// After the machine was stopped: what execs still had, and their answers.
    fn settle(&mut self, done: &Receiver<StreamDone>) {
        let end = Instant::now() + SINK_GRACE;
        let open = |driver: &Driver<'_>| {
            driver.execs.values().any(|live| live.stdout.is_none() || live.stderr.is_none())
        };
        while open(self) {
            match done.recv_deadline(end) {
                Ok(message) => {
                    if let Err(error) = self.stream_done(message) {
                        self.error.get_or_insert(error.to_string());
                    }
                }
                Err(_) => break,
            }
        }
        for (exec, live) in std::mem::take(&mut self.execs) {
            if let Err(error) = self.conclude(exec, live) {
                self.error.get_or_insert(error.to_string());
            }
        }
        for call in std::mem::take(&mut self.waiting) {
            if let Call::Exec { reply, .. } = call {
                let why = self.error.clone().unwrap_or_else(|| "the machine was stopped".into());
                let _ = reply.send(Err(RunEnded(why)));
            }
        }
    }

    /// Never blocks: a full queue means that the guest stopped reading, and the exec's deadline ends the run.
    fn send(&mut self, message: ToGuest) {
        if self.to_guest.try_send(message).is_err() {
            self.error.get_or_insert("the guest stopped reading its channel".into());
        }
    }
}

/// Fresh random bytes of the host.
fn random(into: &mut [u8]) {
    let mut filled = 0;
    while let Some(rest) = into.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => panic!("the host has no random bytes: {errno}"),
        }
    }
}
