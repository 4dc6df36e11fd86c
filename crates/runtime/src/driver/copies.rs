//! The driver's copies: files in and out, each an exec of the guest's own packer or unpacker.
//!
//! The guest's part runs as the workload's user and is recorded as what it is, an actor whose argv begins with
//! `hotcell-pack` or `hotcell-unpack`. What goes in is recorded entry by entry before the guest has all of it; what comes
//! out is recorded, and gets its name, once the guest said that it packed everything. Called by the driver alone.

use super::{Driver, State};
use crate::channel::ToGuest;
use crate::copy::{
    Archive, Budget, CopyError, CopyResult, GetRequest, PutRequest, Stage, Staged, Unsent, send,
};
use crate::phases::panic_text;
use crate::recorder::RecordError;
use crate::stdin::StdinPump;
use crate::stream::{FromStream, OnDone, Sink, pour};
use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use hotcell_decide::{Direction, HostFact};
use hotcell_ledger::{ActorId, Digest};
use hotcell_policy::LimitsDraft;
use hotcell_wire::{ExecBegin, ExecEnd, ExecEnded, ExecText, MAX_EXECS, Program, Stream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Words of the guest's packer or unpacker that are kept.
const MAX_WORDS: usize = 4096;
/// How often a thread that waits for the driver looks whether it is still wanted.
const STEP: Duration = Duration::from_millis(100);

/// Where a caller is answered.
pub(crate) type CopyReply = Sender<Result<CopyResult, CopyError>>;

/// What a copy's threads say.
pub(crate) enum CopyStep {
    /// To be recorded, and said when it is.
    Note { fact: HostFact, recorded: Sender<()> },
    /// All was sent, or not.
    Sent(Result<(), Unsent>),
    /// What comes is not taken any more.
    Unwanted,
    /// The guest's stdout is over: what came of it, where something should.
    Received(Option<Result<Box<Staged>, String>>),
    /// Its stderr is over.
    Spoke(String),
    /// A bug of ours.
    Panicked(String),
}

/// A copy under way.
pub(super) struct LiveCopy {
    actor: ActorId,
    direction: Direction,
    path: String,
    reply: CopyReply,
    stdin: Option<StdinPump>,
    ended: Option<ExecEnded>,
    timed_out: bool,
    /// Of what went in: how much it is, and how sending it ended.
    sending: Option<(u64, u64)>,
    sent: Option<Result<(), Unsent>>,
    received: Option<Option<Result<Box<Staged>, String>>>,
    spoke: Option<String>,
}

impl LiveCopy {
    /// Whether its threads and the guest are done with it.
    fn is_over(&self) -> bool {
        self.ended.is_some() && self.threads_are_over()
    }

    pub(super) fn threads_are_over(&self) -> bool {
        self.received.is_some() && self.spoke.is_some() && (self.sending.is_none() || self.sent.is_some())
    }

    pub(super) fn hear_end(&mut self, ended: ExecEnded) {
        self.ended = Some(ended);
        self.stdin = None;
    }

    pub(super) fn time_out(&mut self) {
        self.timed_out = self.ended.is_none();
    }

    pub(super) fn stdin(&mut self) -> &mut Option<StdinPump> {
        &mut self.stdin
    }
}

/// What is left of the policy's limits, for each direction.
pub(super) struct Budgets {
    into: Arc<Budget>,
    out: Arc<Budget>,
}

impl Budgets {
    pub(super) fn new(limits: &LimitsDraft) -> Budgets {
        Budgets { into: Arc::new(Budget::new(limits)), out: Arc::new(Budget::new(limits)) }
    }
}

/// An exec of the guest's own.
struct Own {
    program: Program,
    argv: Vec<String>,
    cwd: String,
    uid: u32,
    gid: u32,
}

/// It was begun.
struct Begun {
    exec: u32,
    actor: ActorId,
    sinks: [Arc<Sink>; 2],
}

impl Driver<'_> {
    pub(super) fn put(&mut self, request: PutRequest, reply: CopyReply) -> Result<(), RecordError> {
        let refuse = |why: String| {
            let _ = reply.send(Err(CopyError::Refused(why)));
        };
        if let Err(why) = self.budgets.into.take(request.cost()) {
            refuse(format!("{}: {why}", request.source()));
            return Ok(());
        }
        let own = Own {
            program: Program::Unpack,
            argv: vec!["hotcell-unpack".into(), request.target().into()],
            cwd: request.root().into(),
            uid: request.uid,
            gid: request.gid,
        };
        let Begun { exec, actor, sinks } = match self.begin_own(own)? {
            Ok(begun) => begun,
            Err(why) => {
                self.budgets.into.give_back(request.cost());
                refuse(why);
                return Ok(());
            }
        };
        let cost = request.cost();
        let path = request.target().to_owned();
        let on_done = Arc::clone(&self.on_done);
        let feed = StdinPump::write(exec, self.stream_to_guest.clone(), move |feed| {
            let say = |step| on_done(FromStream::Copy { exec, step });
            let sent = catch_unwind(AssertUnwindSafe(|| {
                let stop = feed.stopper();
                let note = |fact| {
                    let (recorded, done) = bounded(1);
                    say(CopyStep::Note { fact, recorded });
                    loop {
                        match done.recv_timeout(STEP) {
                            Ok(()) => return true,
                            Err(RecvTimeoutError::Timeout) if !stop.is_stopped() => {}
                            Err(_) => return false,
                        }
                    }
                };
                send(&request, feed, note).and_then(|()| feed.end().map_err(|_| Unsent::Stopped))
            }));
            say(match sent {
                Ok(sent) => CopyStep::Sent(sent),
                Err(panic) => CopyStep::Panicked(panic_text(&*panic)),
            });
        });
        let stdin = match feed {
            Ok(stdin) => Some(stdin),
            Err(error) => return self.fault("copy", &error.to_string()),
        };
        self.watch_streams(exec, sinks, None);
        self.run.recorder.copied().begin();
        let live = LiveCopy {
            actor,
            direction: Direction::In,
            path,
            reply,
            stdin,
            ended: None,
            timed_out: false,
            sending: Some((cost.entries, cost.bytes)),
            sent: None,
            received: None,
            spoke: None,
        };
        self.copies.insert(exec, live);
        Ok(())
    }

    pub(super) fn get(&mut self, request: GetRequest, reply: CopyReply) -> Result<(), RecordError> {
        let label = format!("{}-{}", self.run.spec.run_id(), self.next_exec);
        let bundle = self.run.recorder.bundle().dir().to_owned();
        let stage = match Stage::make(&request, &bundle, &label, Arc::clone(&self.budgets.out)) {
            Ok(stage) => stage,
            Err(why) => {
                let _ = reply.send(Err(CopyError::Refused(why)));
                return Ok(());
            }
        };
        let own = Own {
            program: Program::Pack,
            argv: vec!["hotcell-pack".into(), request.path.clone()],
            cwd: "/".into(),
            uid: request.uid,
            gid: request.gid,
        };
        let Begun { exec, actor, sinks } = match self.begin_own(own)? {
            Ok(begun) => begun,
            Err(why) => {
                let _ = reply.send(Err(CopyError::Refused(why)));
                return Ok(());
            }
        };
        self.watch_streams(exec, sinks, Some(stage));
        let live = LiveCopy {
            actor,
            direction: Direction::Out,
            path: request.path,
            reply,
            stdin: None,
            ended: None,
            timed_out: false,
            sending: None,
            sent: None,
            received: None,
            spoke: None,
        };
        self.copies.insert(exec, live);
        Ok(())
    }

    /// Starts the guest's own program; its sinks are open, and nobody empties them yet.
    fn begin_own(&mut self, own: Own) -> Result<Result<Begun, String>, RecordError> {
        if self.execs.len() + self.copies.len() >= MAX_EXECS {
            return Ok(Err(format!("{MAX_EXECS} execs run already")));
        }
        if own.uid == 0 || own.gid == 0 {
            return Ok(Err("user and group 0 are the guest's own: name another".into()));
        }
        let text = ExecText {
            argv: own.argv.iter().map(|word| word.clone().into_bytes()).collect(),
            env: Vec::new(),
            cwd: Some(own.cwd.clone().into_bytes()),
        };
        let text = match text.encode() {
            Ok(text) => text,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let exec = self.next_exec;
        // Not of the image, so no digest of it: what the init is was measured with the initramfs.
        let begun = self.run.recorder.exec_begun(exec, Digest::ZERO, &own.argv, &own.cwd)?;
        let Some(actor) = begun else { return Ok(Err("the run has started as many execs as it may".into())) };
        self.next_exec += 1;
        let begin = ExecBegin {
            program: own.program,
            stdin: u8::from(own.program == Program::Unpack),
            // It executes nothing.
            spawn: 0,
            last: 0,
            binary: [0; 32],
            uid: own.uid.into(),
            gid: own.gid.into(),
            text_len: (text.len() as u32).into(),
        };
        let sinks = self.sinks.open(exec);
        self.send(ToGuest::ExecBegin(exec, begin));
        self.send(ToGuest::ExecText(exec, text));
        self.send(ToGuest::ExecStart(exec));
        Ok(Ok(Begun { exec, actor, sinks }))
    }

    /// Starts the threads that take what the guest's program writes.
    fn watch_streams(&self, exec: u32, [stdout, stderr]: [Arc<Sink>; 2], stage: Option<Stage>) {
        let credit = |stream: Stream| {
            let to_guest = self.stream_to_guest.clone();
            move |bytes| {
                let _ = to_guest.send(ToGuest::Credit(exec, stream, bytes));
            }
        };
        let (out_credit, err_credit) = (credit(Stream::Stdout), credit(Stream::Stderr));
        let on_done = Arc::clone(&self.on_done);
        thread(exec, on_done, move |say| {
            let received = match stage {
                None => {
                    pour(&stdout, |_| {}, out_credit);
                    None
                }
                Some(stage) => Some(receive(stage, |take| pour(&stdout, take, out_credit), say)),
            };
            CopyStep::Received(received)
        });
        thread(exec, Arc::clone(&self.on_done), move |_| {
            let mut words = Vec::new();
            let keep = |bytes: &[u8]| {
                let room = MAX_WORDS - words.len();
                words.extend_from_slice(bytes.get(..room).unwrap_or(bytes));
            };
            pour(&stderr, keep, err_credit);
            CopyStep::Spoke(String::from_utf8_lossy(&words).into_owned())
        });
    }

    pub(super) fn copy_step(&mut self, exec: u32, step: CopyStep) -> Result<(), RecordError> {
        if let CopyStep::Note { fact, recorded } = step {
            // A copy that is over is not recorded any further.
            if self.copies.contains_key(&exec) {
                self.run.recorder.host(&fact)?;
                let _ = recorded.send(());
            }
            return Ok(());
        }
        let Some(copy) = self.copies.get_mut(&exec) else { return Ok(()) };
        let mut unwanted = false;
        match step {
            CopyStep::Note { .. } => {}
            CopyStep::Sent(sent) => {
                unwanted = matches!(sent, Err(Unsent::Source(_)));
                copy.sent = Some(sent);
            }
            CopyStep::Unwanted => unwanted = true,
            CopyStep::Received(received) => copy.received = Some(received),
            CopyStep::Spoke(words) => copy.spoke = Some(words),
            CopyStep::Panicked(text) => return self.fault("copy", &text),
        }
        if unwanted && self.state != State::Over {
            self.send(ToGuest::KillTree(exec));
        }
        self.complete_copy(exec)
    }

    /// Records and answers a copy whose threads and guest's part are over.
    pub(super) fn complete_copy(&mut self, exec: u32) -> Result<(), RecordError> {
        if !self.copies.get(&exec).is_some_and(LiveCopy::is_over) {
            return Ok(());
        }
        let Some(copy) = self.copies.remove(&exec) else { return Ok(()) };
        self.conclude_copy(exec, copy)
    }

    pub(super) fn conclude_copy(&mut self, exec: u32, copy: LiveCopy) -> Result<(), RecordError> {
        let LiveCopy {
            actor,
            direction,
            path,
            reply,
            stdin,
            ended,
            timed_out,
            sending,
            sent,
            received,
            spoke,
        } = copy;
        drop(stdin);
        if direction == Direction::In {
            self.run.recorder.copied().end();
        }
        let spoke = spoke.unwrap_or_default();
        let guest = guests_word(ended.as_ref(), &spoke);
        let refused = match (&sent, &received) {
            (Some(Err(Unsent::Source(why))), _) | (_, Some(Some(Err(why)))) => Some(why.clone()),
            _ => None,
        };
        let unfinished = || sending.is_some() && !matches!(sent, Some(Ok(())));
        let outcome = match (ended, guest, refused) {
            (None, ..) => Err(CopyError::RunEnded(self.why_over())),
            _ if timed_out => Err(CopyError::RunEnded("it took as long as it may".into())),
            // The guest's word says more than an archive that ends early.
            (_, Some(why), Some(ours))
                if ours.starts_with("the guest sent nothing") || ours.starts_with("the archive") =>
            {
                Err(CopyError::Failed(why))
            }
            (_, _, Some(why)) => Err(CopyError::Failed(why)),
            (_, Some(why), None) => Err(CopyError::Failed(why)),
            (_, None, None) if unfinished() => Err(CopyError::Failed("the guest stopped reading".into())),
            (_, None, None) => match received.flatten() {
                Some(Ok(staged)) => {
                    let taken = self.take_over(*staged)?.map_err(CopyError::Failed);
                    taken.map(|(mut result, count)| {
                        // What it left out itself: FIFOs, sockets, devices.
                        let words = spoke
                            .lines()
                            .take(20)
                            .map(|line| format!("(the guest says) {}", line.escape_debug()));
                        result.left_out.extend(words);
                        (result, count)
                    })
                }
                _ => {
                    let (entries, bytes) = sending.unwrap_or_default();
                    Ok((CopyResult { entries, bytes, left_out: Vec::new(), place: None }, 0))
                }
            },
        };
        let (entries, bytes, left_out) = match &outcome {
            Ok((result, left_out)) => (result.entries, result.bytes, *left_out),
            Err(_) => (0, 0, 0),
        };
        let error = outcome.as_ref().err().map(|error| error.to_string().chars().take(1000).collect());
        let exec = u64::from(exec);
        self.run.recorder.host(&HostFact::CopyEnded {
            exec,
            direction,
            path,
            entries,
            bytes,
            left_out,
            error,
        })?;
        let code = match &ended {
            Some(ended) if ended.how == ExecEnd::Exited => ended.code.get() & 0xFF,
            Some(ended) if ended.how != ExecEnd::NotStarted => -ended.code.get().clamp(1, 64),
            _ => -9,
        };
        self.run.recorder.exec_exited(actor, code)?;
        let _ = reply.send(outcome.map(|(result, _)| result));
        Ok(())
    }

    /// Records what came out, then gives it its name.
    fn take_over(&mut self, mut staged: Staged) -> Result<Result<(CopyResult, u64), String>, RecordError> {
        for fact in staged.facts() {
            self.run.recorder.host(&fact)?;
        }
        let (entries, bytes, left_out_count) = staged.totals();
        let left_out = staged.left_out();
        Ok(staged
            .commit()
            .map(|place| (CopyResult { entries, bytes, left_out, place: Some(place) }, left_out_count)))
    }
}

/// What is wrong, as the guest tells it; `None` where it says that all is done.
fn guests_word(ended: Option<&ExecEnded>, spoke: &str) -> Option<String> {
    let ended = ended?;
    if ended.how == ExecEnd::Exited && ended.code.get() == 0 {
        return None;
    }
    let words: String = spoke.trim().escape_debug().take(500).collect();
    Some(match (ended.how, words.as_str()) {
        (ExecEnd::NotStarted, _) => {
            let errno = rustix::io::Errno::from_raw_os_error(ended.code.get());
            format!("the guest could not begin it: {errno}")
        }
        (_, "") => format!("the guest's part ended with {:?} {}", ended.how, ended.code.get()),
        (_, words) => format!("the guest says: {words}"),
    })
}

/// Fills a stage with what comes. The rest of what is not wanted is read to its end: the guest's exec ends no sooner.
fn receive(
    stage: Stage,
    pour: impl FnOnce(&mut dyn FnMut(&[u8])),
    say: &dyn Fn(CopyStep),
) -> Result<Box<Staged>, String> {
    let mut archive = Archive::new();
    let (mut stage, mut refused) = (Some(stage), None);
    pour(&mut |bytes| {
        if let Some(growing) = &mut stage
            && let Err(why) = archive.push(bytes, growing)
        {
            stage = None;
            refused = Some(why);
            say(CopyStep::Unwanted);
        }
    });
    match (stage, refused) {
        (_, Some(why)) => Err(why),
        (Some(stage), None) if archive.is_complete() => stage.finish().map(Box::new),
        _ => Err("the archive that the guest sent has no end".into()),
    }
}

fn thread(exec: u32, on_done: OnDone, work: impl FnOnce(&dyn Fn(CopyStep)) -> CopyStep + Send + 'static) {
    std::thread::spawn(move || {
        let say = |step| on_done(FromStream::Copy { exec, step });
        match catch_unwind(AssertUnwindSafe(|| work(&say))) {
            Ok(step) => say(step),
            Err(panic) => say(CopyStep::Panicked(panic_text(&*panic))),
        }
    });
}
