//! The driver's execs: from what a caller asks for to what it is told.
//!
//! An exec is recorded before the guest hears of it, and answered once its end and
//! both its streams are known and recorded. Called by the driver alone, on its thread.

use super::{Driver, LiveExec, MAX_CWD, random};
use crate::channel::ToGuest;
use crate::exec::{ExecRequest, ExecResult, ending, not_started};
use crate::recorder::RecordError;
use crate::run::ExecError;
use crate::stdin::StdinPump;
use crate::stream::{ExecIo, StreamDone, StreamOutcome, start_outputs};
use crossbeam_channel::{Sender, bounded};
use hotcell_decide::{ExecHow, HostFact, OutputStream, SpawnAttempt, SpawnDecision};
use hotcell_ledger::{ActorId, Digest};
use hotcell_policy::{Service, WorkspaceExec};
use hotcell_wire::{ExecBegin, MAX_EXECS, Program, Stream};

/// PATH of a root service, whatever the image's environment says.
const SERVICE_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl Driver<'_> {
    pub(super) fn exec(
        &mut self,
        request: ExecRequest,
        io: ExecIo,
        reply: Sender<Result<ExecResult, ExecError>>,
    ) -> Result<(), RecordError> {
        let refuse = |why: String| {
            let _ = reply.send(Err(ExecError::Refused(why)));
        };
        if request.uid == 0 || request.gid == 0 {
            refuse("user and group 0 are the guest's own: name another".into());
            return Ok(());
        }
        self.launch(request, None, io, reply)
    }

    /// Starts the root services that the spec names, before the first command. One that does
    /// not start ends the run: the image is not what it says.
    pub(super) fn start_services(&mut self) -> Result<(), RecordError> {
        for service in self.run.spec.services().to_vec() {
            let mut request = ExecRequest::new(service.argv.clone());
            (request.uid, request.gid, request.cwd) = (0, 0, "/".into());
            request.env = vec![("PATH".into(), SERVICE_PATH.into())];
            let (reply, refused) = bounded(1);
            self.launch(request, Some(service.clone()), ExecIo::default(), reply)?;
            if let Ok(Err(error)) = refused.try_recv() {
                return self.fail("service", &format!("the image's service {:?}: {error}", service.name));
            }
        }
        Ok(())
    }

    fn launch(
        &mut self,
        request: ExecRequest,
        service: Option<Service>,
        io: ExecIo,
        reply: Sender<Result<ExecResult, ExecError>>,
    ) -> Result<(), RecordError> {
        let refuse = |why: String| {
            let _ = reply.send(Err(ExecError::Refused(why)));
        };
        if self.execs.len() + self.copies.len() >= MAX_EXECS {
            refuse(format!("{MAX_EXECS} execs run already"));
            return Ok(());
        }
        if request.cwd.len() > MAX_CWD {
            refuse(format!("the working directory has {} bytes, over {MAX_CWD}", request.cwd.len()));
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
        if service.as_ref().is_some_and(|service| service.binary != binary) {
            refuse("its program is not the one that the spec names".into());
            return Ok(());
        }
        let exec = self.next_exec;
        self.next_exec += 1;
        let recorder = &mut self.run.recorder;
        if let Some(Service { name, binary, .. }) = service.clone() {
            recorder.host(&HostFact::Service { exec: u64::from(exec), name, binary })?;
        }
        let Some(actor) = recorder.exec_begun(exec, binary, &request.argv, &request.cwd)? else {
            refuse("the run has started as many execs as it may".into());
            return Ok(());
        };
        let keep = |stream: &str| recorder.bundle().begin_object(&format!("{exec}-{stream}"));
        let outputs =
            [(Stream::Stdout, io.stdout, keep("stdout")?), (Stream::Stderr, io.stderr, keep("stderr")?)];
        let limit = u64::from(self.run.spec.limits().output_mib) << 20;
        let outputs = start_outputs(&self.sinks, exec, outputs, limit, &self.stream_to_guest, &self.on_done);
        let begin = ExecBegin {
            program: if service.is_some() { Program::Service } else { Program::Argv },
            stdin: u8::from(service.is_none()),
            spawn: u8::from(service.is_some() || self.run.spec.policy().capabilities().may_spawn()),
            last: u8::from(request.last),
            binary: *binary.as_bytes(),
            uid: request.uid.into(),
            gid: request.gid.into(),
            text_len: (text.len() as u32).into(),
        };
        self.send(ToGuest::ExecBegin(exec, begin));
        self.send(ToGuest::ExecText(exec, text));
        self.send(ToGuest::ExecStart(exec));
        let stdin = match StdinPump::start(exec, io.stdin, self.stream_to_guest.clone()) {
            Ok(stdin) => Some(stdin),
            Err(error) => return self.fault("stdin", &error.to_string()),
        };
        let (ended, timed_out, over) = (None, false, [false; 2]);
        let service = service.map(|service| service.name);
        let live = LiveExec { actor, request, service, reply, stdin, ended, timed_out, outputs, over };
        self.execs.insert(exec, live);
        Ok(())
    }

    /// Hands the allowlist to the guest's gate, where the image has one. Execs come after it on the same channel.
    pub(super) fn enforce(&mut self) {
        let Some(authorizer) = &self.run.authorizer else { return };
        let digests = authorizer.binaries().digests().map(|digest| *digest.as_bytes()).collect();
        let workspace = self.run.spec.policy().workspace_exec() == WorkspaceExec::Allow;
        self.send(ToGuest::ExecGate(digests, workspace));
    }

    /// A token for what the host starts, bound to the machine and the program, and
    /// redeemed here; what it allows goes to the guest's gate with the exec, which
    /// executes nothing without. A program that is not in the image can't be bound:
    /// the gate decides whether there is such a file, and whether it may be executed.
    pub(super) fn authorize(&mut self, request: &ExecRequest) -> Result<Result<Digest, String>, RecordError> {
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

    pub(super) fn stream_done(&mut self, message: StreamDone) -> Result<(), RecordError> {
        let StreamDone { exec, stream, outcome } = message;
        if let Some(live) = self.execs.get_mut(&exec) {
            let [stdout, stderr] = &mut live.over;
            match stream {
                Stream::Stdout => *stdout = true,
                Stream::Stderr => *stderr = true,
            }
        }
        match outcome {
            StreamOutcome::Passed => self.complete(exec),
            StreamOutcome::DiskFailed(error) => {
                Err(self.run.recorder.break_off(&format!("output of exec {exec}: {error}")))
            }
            StreamOutcome::Panicked(text) => self.fault("output", &text),
        }
    }

    /// Records and answers an exec whose end is known and whose output was passed on.
    pub(super) fn complete(&mut self, exec: u32) -> Result<(), RecordError> {
        let whole = |live: &LiveExec| live.ended.is_some() && live.over == [true; 2];
        if !self.execs.get(&exec).is_some_and(whole) {
            return Ok(());
        }
        let Some(live) = self.execs.remove(&exec) else { return Ok(()) };
        self.conclude(exec, live)
    }

    pub(super) fn conclude(&mut self, exec: u32, live: LiveExec) -> Result<(), RecordError> {
        let LiveExec { actor, request, service, reply, ended, outputs, stdin, timed_out, .. } = live;
        drop(stdin);
        let mut totals = Vec::new();
        for (stream, tap) in [OutputStream::Stdout, OutputStream::Stderr].into_iter().zip(outputs) {
            let kept = tap
                .close()
                .map_err(|error| self.run.recorder.break_off(&format!("output of exec {exec}: {error}")))?;
            self.run.recorder.host(&HostFact::Output {
                exec: u64::from(exec),
                stream,
                total_bytes: kept.total_bytes,
                kept_bytes: kept.kept_bytes,
                truncated: kept.truncated(),
                whole: kept.whole,
                kept: kept.kept,
            })?;
            totals.push(kept);
        }
        let (stderr, stdout) = (totals.pop(), totals.pop());
        let (mut how, mut code, mut signal) = ended.as_ref().map_or((ExecHow::Unknown, None, None), ending);
        if timed_out && how != ExecHow::Unknown {
            (how, code, signal) = (ExecHow::TimedOut, None, Some(9));
        }
        self.run.recorder.host(&HostFact::ExecEnded { exec: u64::from(exec), how, code, signal })?;
        let record_code = code.or(signal.map(|signal| -signal)).unwrap_or(-9);
        self.run.recorder.exec_exited(actor, record_code)?;
        let not_started = ended.as_ref().and_then(|ended| not_started(ended, &request.argv, &request.cwd));
        if let (Some(name), Some(why)) = (&service, &not_started)
            && self.state == super::State::Running
        {
            self.fail("service", &format!("the image's service {name:?} did not start: {why}"))?;
        }
        let code = match how {
            ExecHow::TimedOut => 124,
            _ => code.or(signal.map(|signal| 128 + signal)).unwrap_or(125),
        };
        let stragglers = ended.is_some_and(|ended| ended.stragglers != 0);
        let result = match how {
            ExecHow::Unknown => Err(ExecError::RunEnded(self.why_over())),
            _ => Ok(ExecResult { how, code, not_started, stdout, stderr, stragglers }),
        };
        let _ = reply.send(result);
        Ok(())
    }
}
