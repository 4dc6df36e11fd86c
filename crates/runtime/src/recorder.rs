//! The one place that writes the record: object, event, judgement, in this order.
//!
//! Evidence and testimony have two methods. The band of the actor is chosen
//! here, never by a caller: [`Recorder::host`] writes as HOST, [`Recorder::guest`]
//! takes only what [`Admission`] admitted. Each event goes to the ledger first
//! and to the judge second, so that nothing can be judged that is not recorded.
//! The first thing that can't be recorded ends the record for good: one that went
//! on with a hole would pass for whole.

use crate::bundle::Bundle;
use crate::clock::Clock;
use crate::disk::Copied;
use crate::glimpse::{Glimpse, Shown};
use hotcell_decide::{
    Admission, Admitted, CapabilityRequest, ClaimKind, Decision, DerivedVerdict, Direction, Evidence,
    HostFact, RefusalCode, Ruling, Trip, VerdictFold,
};
use hotcell_ledger::{
    ActorId, ClosedLedger, Digest, FileOp, LedgerWriter, Lineage, NfcString, Payload, WriteError,
};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Writes one run's record and judges it as it goes.
pub(crate) struct Recorder {
    ledger: LedgerWriter,
    bundle: Bundle,
    fold: VerdictFold,
    clock: Arc<dyn Clock>,
    admission: Admission,
    trip: Option<Trip>,
    kill_recorded: bool,
    copied: Copied,
    shown: Shown,
    /// Why the record ended before its end.
    broken: Option<String>,
    /// Time that recording and judging took.
    spent: Duration,
}

/// The record can't go on; the run must end.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The ledger's file.
    #[error(transparent)]
    Ledger(#[from] WriteError),
    /// An object's file.
    #[error("can't write an object of the bundle: {0}")]
    Object(#[from] io::Error),
    /// A fact that can't be written: a bug.
    #[error("a host fact can't be recorded: {0}")]
    Fact(#[from] hotcell_decide::FactError),
    /// It ended before.
    #[error("the record ended before: {0}")]
    Broken(String),
}

type Recorded = Result<(), RecordError>;

impl Recorder {
    pub(crate) fn new(
        ledger: LedgerWriter,
        bundle: Bundle,
        fold: VerdictFold,
        clock: Arc<dyn Clock>,
        shown: Shown,
    ) -> Recorder {
        Recorder {
            ledger,
            bundle,
            fold,
            clock,
            admission: Admission::new(),
            trip: None,
            kill_recorded: false,
            copied: Copied::default(),
            shown,
            broken: None,
            spent: Duration::ZERO,
        }
    }

    pub(crate) fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Time that recording and judging took so far.
    pub(crate) fn spent(&self) -> Duration {
        self.spent
    }

    /// What tripped the kill switch, once it has tripped.
    pub(crate) fn trip(&self) -> Option<&Trip> {
        self.trip.as_ref()
    }

    /// Records a host fact.
    pub(crate) fn host(&mut self, fact: &HostFact) -> Recorded {
        let (payload, object) = self.once_broken(|_| Ok(fact.to_payload()?))?;
        self.append(ActorId::HOST, None, payload, Some(&object))?;
        self.shown.fact(fact);
        if let HostFact::Copied { direction: Direction::In, path, .. } = fact {
            self.copied.add(path);
        }
        Ok(())
    }

    /// Where people look on.
    pub(crate) fn shown(&self) -> &Shown {
        &self.shown
    }

    /// Where the host copied something.
    pub(crate) fn copied(&self) -> &Copied {
        &self.copied
    }

    /// Records a change that the host saw on a disk.
    pub(crate) fn mutation(&mut self, op: FileOp, path: &str, before: Digest, after: Digest) -> Recorded {
        let payload = Payload::FileMutation { op, path: NfcString::new(path), before, after };
        self.append(ActorId::HOST, None, payload, None)?;
        self.shown.show(|| Glimpse::File { op, path: path.to_owned() });
        Ok(())
    }

    /// Records a broker's decision.
    pub(crate) fn decision(&mut self, decision: Decision, request: &CapabilityRequest) -> Recorded {
        let (payload, object) = decision.to_payload(request);
        self.append(ActorId::HOST, None, payload, Some(&object))?;
        self.shown.decision(decision, request);
        Ok(())
    }

    /// Records the beginning or end of the host's own part.
    pub(crate) fn host_lifecycle(&mut self, payload: Payload) -> Recorded {
        self.append(ActorId::HOST, None, payload, None)
    }

    /// Records that the machine exists.
    pub(crate) fn vm_spawned(&mut self, executable: Digest, argv: &[String]) -> Recorded {
        let object = argv_object(argv);
        let payload =
            Payload::ProcessSpawn { binary: executable, argv: Digest::of(&object), cwd: NfcString::new("/") };
        self.append(ActorId::VM, Some(ActorId::HOST), payload, Some(&object))
    }

    /// Records that the machine is gone, and with it everything that lived in it.
    pub(crate) fn vm_exited(&mut self, code: i32) -> Recorded {
        for (actor, parent) in self.admission.still_live(self.fold.lineage()) {
            self.append(actor, Some(parent), Payload::ProcessExit { code: -9 }, None)?;
        }
        if !self.fold.lineage().is_live(ActorId::VM) {
            // Its beginning is not on record: something failed before it could be.
            return Ok(());
        }
        self.append(ActorId::VM, Some(ActorId::HOST), Payload::ProcessExit { code }, None)
    }

    /// Who is live.
    pub(crate) fn lineage(&self) -> &Lineage {
        self.fold.lineage()
    }

    /// Records the start of an exec and assigns its actor; `None` when there are too many.
    pub(crate) fn exec_begun(
        &mut self,
        exec: u32,
        binary: Digest,
        argv: &[String],
        cwd: &str,
    ) -> Result<Option<ActorId>, RecordError> {
        let Some(actor) = self.admission.begin_exec(exec) else { return Ok(None) };
        let object = argv_object(argv);
        let payload = Payload::ProcessSpawn { binary, argv: Digest::of(&object), cwd: NfcString::new(cwd) };
        self.append(actor, Some(ActorId::VM), payload, Some(&object))?;
        self.shown.show(|| Glimpse::Begun { exec, argv: argv.to_vec() });
        Ok(Some(actor))
    }

    /// Records the end of an exec.
    pub(crate) fn exec_exited(&mut self, actor: ActorId, code: i32) -> Recorded {
        if !self.fold.lineage().is_live(actor) {
            return Ok(());
        }
        self.append(actor, Some(ActorId::VM), Payload::ProcessExit { code }, None)
    }

    /// The actor of an exec; the machine itself where the guest named none that exists.
    pub(crate) fn attribute(&self, exec: u32) -> ActorId {
        self.admission
            .exec_actor(exec)
            .filter(|actor| self.fold.lineage().is_live(*actor))
            .unwrap_or(ActorId::VM)
    }

    /// Records a guest's claim if it fits the live lineage, else, once for each kind, that it was refused.
    pub(crate) fn claim(&mut self, claim: &hotcell_wire::Claim<'_>) -> Recorded {
        let words = (claim.kind as u8, claim.subject, claim.parent, claim.value, claim.text);
        match self.admission.admit_wire(words, self.fold.lineage()) {
            Ok(admitted) => self.guest(admitted),
            Err(refusal) => refusal.fact.map_or(Ok(()), |fact| self.host(&fact)),
        }
    }

    fn guest(&mut self, admitted: Admitted) -> Recorded {
        let Admitted { actor, parent, payload, object } = admitted;
        self.append(actor, parent, payload, object.as_deref())
    }

    /// Records that the machine was stopped, once, after it was.
    pub(crate) fn kill(&mut self) -> Recorded {
        let Some(trip) = self.trip.as_ref().filter(|_| !self.kill_recorded) else { return Ok(()) };
        let fact = trip.to_fact();
        self.kill_recorded = true;
        self.host(&fact)
    }

    /// Records that the guest sent something that can't be read as what it claims to be: once, then counted.
    pub(crate) fn refused(&mut self, kind: ClaimKind, code: RefusalCode) -> Recorded {
        self.admission.refuse(kind, code).fact.map_or(Ok(()), |fact| self.host(&fact))
    }

    /// Seals a block that is old enough.
    pub(crate) fn tick(&mut self) -> Recorded {
        let now = self.clock.now_ns();
        self.once_broken(|recorder| Ok(recorder.ledger.tick(now)?))
    }

    /// Ends the record: something that belongs into it is lost.
    pub(crate) fn break_off(&mut self, why: &str) -> RecordError {
        self.broken.get_or_insert_with(|| why.to_owned());
        RecordError::Broken(why.to_owned())
    }

    fn once_broken<T>(
        &mut self,
        step: impl FnOnce(&mut Recorder) -> Result<T, RecordError>,
    ) -> Result<T, RecordError> {
        if let Some(why) = &self.broken {
            return Err(RecordError::Broken(why.clone()));
        }
        step(self).inspect_err(|error| self.broken = Some(error.to_string()))
    }

    /// Writes the end of the record. The verdict is derived from what is recorded.
    pub(crate) fn close(mut self) -> Result<(ClosedLedger, DerivedVerdict, Bundle), RecordError> {
        for fact in self.admission.summary() {
            self.host(&fact)?;
        }
        let verdict = self.fold.closing().to_fact();
        self.host(&verdict)?;
        self.host_lifecycle(Payload::ProcessExit { code: 0 })?;
        self.host_lifecycle(Payload::RunEnd)?;
        let derived = self.fold.finish();
        Ok((self.ledger.close()?, derived, self.bundle))
    }

    /// What the record comes to where it can't be closed.
    pub(crate) fn abandon(self) -> (DerivedVerdict, Bundle) {
        // Without the end that nobody could write: a host that never ended is no reason of its own.
        (self.fold.finish(), self.bundle)
    }

    fn append(
        &mut self,
        actor: ActorId,
        parent: Option<ActorId>,
        payload: Payload,
        object: Option<&[u8]>,
    ) -> Recorded {
        let begun = Instant::now();
        let recorded = self.record(actor, parent, payload, object);
        self.spent += begun.elapsed();
        recorded
    }

    fn record(
        &mut self,
        actor: ActorId,
        parent: Option<ActorId>,
        payload: Payload,
        object: Option<&[u8]>,
    ) -> Recorded {
        let event = self.once_broken(|recorder| {
            if let Some(bytes) = object {
                recorder.bundle.put_object(bytes)?;
            }
            Ok(recorder.ledger.append(actor, parent, payload, recorder.clock.now_ns())?)
        })?;
        let needed = Evidence::object_of(&event).and(object);
        if let Ruling::Kill(trip) = self.fold.event(&event, needed)
            && self.trip.is_none()
        {
            self.trip = Some(trip.clone());
        }
        Ok(())
    }
}

/// A JSON array of strings: the argv object of a spawn.
fn argv_object(argv: &[String]) -> Vec<u8> {
    serde_json::to_vec(argv).unwrap_or_default()
}
