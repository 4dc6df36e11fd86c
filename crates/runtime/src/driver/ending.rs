//! How a run ends, in all its ways: asked for, by the operator, by a deadline, by the guest's fault, by ours, or with the
//! machine. Called by the driver alone.

use super::{COUNTERS, Driver, State, TICK};
use crate::channel::ToGuest;
use crate::copy::CopyError;
use crate::recorder::RecordError;
use crate::run::{Call, ExecError};
use crate::stream::FromStream;
use crate::watch::{self, Told};
use crossbeam_channel::Receiver;
use hotcell_decide::{HostFact, ViolationKind};
use hotcell_observe::Sightings;
use std::time::{Duration, Instant};

/// What observers may take to read the disk of a dead machine, beside a second for each
/// [`DISK_MIB_PER_SECOND`] of it: reading and hashing run at some 1000.
const POST_MORTEM_PATIENCE: Duration = Duration::from_secs(60);
/// The slowest host's reading and hashing.
const DISK_MIB_PER_SECOND: u32 = 32;

/// Signs that the machine is gone. Its channel closes and its process ends: whichever shows first, the other is waited
/// for, since what was sent before the end is still in the channel, and how the process ended says more than a channel.
#[derive(Default)]
pub(super) struct Going {
    pub(super) channel: Option<String>,
    pub(super) process: bool,
    pub(super) until: Option<Instant>,
}

/// What an observer's word means once the machine is stopped.
enum Posthumous {
    Over,
    Seen(Sightings),
    /// It had its state to compare with, and now can't see: whatever it missed, nobody knows.
    Blind(String),
    Nothing,
}

impl From<Told> for Posthumous {
    fn from(told: Told) -> Posthumous {
        match told {
            // The machine was stopped while the observers armed: nothing of the workload ran, and why it was is said.
            Told::Over | Told::Blind { armed: false, .. } => Posthumous::Over,
            Told::Blind { observer, error, armed: true } => Posthumous::Blind(format!("{observer}: {error}")),
            Told::Seen(seen) => Posthumous::Seen(seen),
            Told::Armed | Told::Rolled | Told::LastLooked => Posthumous::Nothing,
        }
    }
}

impl Driver<'_> {
    /// After the machine was stopped: what observers see of what it left.
    pub(super) fn post_mortem(
        &mut self,
        told: &Receiver<Told>,
        death: &Receiver<()>,
    ) -> Result<(), RecordError> {
        let Some(watch) = self.watch.take() else { return Ok(()) };
        if !self.going.process {
            let _ = death.recv_timeout(self.run.runtime.patience.death);
        }
        watch.post_mortem();
        let disk = u64::from(self.run.spec.limits().disk_mib / DISK_MIB_PER_SECOND);
        let end = Instant::now() + POST_MORTEM_PATIENCE + Duration::from_secs(disk);
        loop {
            let Ok(told) = told.recv_deadline(end) else {
                return self.fault("observe", &watch.why_dead());
            };
            match Posthumous::from(told) {
                Posthumous::Over => return Ok(()),
                Posthumous::Blind(why) => return self.fault("observe", &why),
                Posthumous::Seen(seen) => watch::record(&mut self.run.recorder, seen)?,
                Posthumous::Nothing => {}
            }
        }
    }

    pub(super) fn stop(&mut self, now: Instant) {
        self.state = State::Stopping;
        self.deadline = now + self.run.runtime.patience.stop;
        self.run_deadline = None;
        let execs: Vec<u32> = self.execs.keys().chain(self.copies.keys()).copied().collect();
        for exec in execs {
            self.send(ToGuest::KillTree(exec));
        }
    }

    pub(super) fn quiesce(&mut self, now: Instant) {
        self.state = State::Ending;
        self.deadline = now + self.run.runtime.patience.quiesce;
        self.send(ToGuest::Quiesce);
    }

    pub(super) fn fail(&mut self, stage: &str, error: &str) -> Result<(), RecordError> {
        self.state = State::Over;
        self.error = Some(error.to_owned());
        self.run.recorder.host(&HostFact::failed(stage, &error))
    }

    /// A component failed in a way that nobody foresaw: the judge trips on that.
    pub(super) fn fault(&mut self, stage: &str, error: &str) -> Result<(), RecordError> {
        self.error.get_or_insert_with(|| error.to_owned());
        self.run.vm.kill();
        self.run.recorder.host(&HostFact::fault(stage, &error))
    }

    /// A guest that the VMM holds back says nothing more, and it is not the guest's fault. What the VMM counts of the root
    /// image is looked at as well.
    pub(super) fn look_at_vmm(&mut self, now: Instant) -> Result<(), RecordError> {
        if now < self.look || self.state == State::Over {
            return Ok(());
        }
        self.look = now + TICK;
        if let Some(why) = self.run.vm.held_back() {
            self.fault("VMM", &format!("the VMM stopped its guest: {why}"))?;
        }
        if now < self.count {
            return Ok(());
        }
        self.count = now + COUNTERS;
        let written = self.run.vm.root_bytes_so_far();
        self.judge_root(written)
    }

    /// The operator stops the run: gently at first, at once where it is being stopped already.
    pub(super) fn interrupt(&mut self, signal: i32, at_once: bool) -> Result<(), RecordError> {
        if self.state == State::Over {
            return Ok(());
        }
        self.run.recorder.host(&HostFact::Interrupted { signal })?;
        match self.state {
            State::Booting | State::Arming => {
                self.fail("boot", "the run was stopped before the machine was ready")
            }
            State::Running if !at_once => {
                self.stop(Instant::now());
                Ok(())
            }
            _ => {
                self.state = State::Over;
                Ok(())
            }
        }
    }

    /// The root image is read-only to the guest. The VMM's own counters say at the end whether that held.
    pub(super) fn check_root(&mut self) -> Result<(), RecordError> {
        let written = self.run.vm.root_bytes_written();
        self.judge_root(written)
    }

    fn judge_root(&mut self, written: Option<u64>) -> Result<(), RecordError> {
        match written {
            None | Some(0) => Ok(()),
            Some(bytes) => self.run.recorder.host(&HostFact::Violation {
                kind: ViolationKind::RootChanged,
                subject: "root image".into(),
                detail: format!("the VMM counts what was written to it, or to anything but the workspace, up to byte {bytes}"),
            }),
        }
    }

    pub(super) fn why_over(&self) -> String {
        self.error.clone().unwrap_or_else(|| "the machine was stopped".into())
    }

    /// A sign that the machine is going: with both, or after a while, it is gone.
    pub(super) fn going(&mut self, now: Instant) -> Result<(), RecordError> {
        if self.going.process && self.going.channel.is_some() {
            return self.gone();
        }
        self.going.until.get_or_insert(now + self.run.runtime.patience.death);
        Ok(())
    }

    pub(super) fn gone(&mut self) -> Result<(), RecordError> {
        self.going.until = None;
        match self.going.channel.take() {
            _ if self.state == State::Over => Ok(()),
            Some(what) if !self.going.process => self.misbehaved(&what),
            _ => self.died(),
        }
    }

    /// The guest broke the protocol, or its init is gone: nothing that it says counts any more.
    pub(super) fn misbehaved(&mut self, what: &str) -> Result<(), RecordError> {
        if self.workload_may_not_have_run() {
            let words = self.run.vm.last_words();
            return self.fail(
                "boot",
                &format!("the guest does not speak as it should: {what}. Its last words:\n{words}"),
            );
        }
        self.destroyed("channel", what)
    }

    pub(super) fn destroyed(&mut self, subject: &str, what: &str) -> Result<(), RecordError> {
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
    pub(super) fn died(&mut self) -> Result<(), RecordError> {
        match self.state {
            State::Over => Ok(()),
            State::Booting | State::Arming => {
                let words = self.run.vm.last_words();
                self.fail("boot", &format!("the machine ended while it booted. Its last words:\n{words}"))
            }
            _ => {
                self.alone = true;
                self.destroyed("VMM", "the machine ended while the run went on")
            }
        }
    }

    /// After the machine was stopped: what execs still had, and their answers.
    pub(super) fn settle(&mut self, done: &Receiver<FromStream>) {
        let end = Instant::now() + self.run.runtime.patience.caller;
        let busy = |driver: &Self| {
            driver.execs.values().any(|live| live.over != [true; 2])
                || driver.copies.values().any(|copy| !copy.threads_are_over())
        };
        for copy in self.copies.values_mut() {
            *copy.stdin() = None;
        }
        while busy(self) {
            match done.recv_deadline(end) {
                Ok(message) => {
                    if let Err(error) = self.stream(message) {
                        self.error.get_or_insert(error.to_string());
                        break;
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
        for (exec, copy) in std::mem::take(&mut self.copies) {
            if let Err(error) = self.conclude_copy(exec, copy) {
                self.error.get_or_insert(error.to_string());
            }
        }
        for call in std::mem::take(&mut self.waiting) {
            turn_away(call, &self.why_over());
        }
    }
}

/// Answers whoever asked too late.
pub(super) fn turn_away(call: Call, why: &str) {
    match call {
        Call::Exec { reply, .. } => drop(reply.send(Err(ExecError::RunEnded(why.into())))),
        Call::Put { reply, .. } | Call::Get { reply, .. } => {
            drop(reply.send(Err(CopyError::RunEnded(why.into()))));
        }
        Call::Interrupt { .. } | Call::Abandon | Call::Fail { .. } | Call::Finish => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_was_stopped_while_observers_armed_blinds_none() {
        let blind = |armed| Told::Blind { observer: "ram", armed, error: "the VMM has ended".into() };
        assert!(matches!(Posthumous::from(blind(false)), Posthumous::Over));
        assert!(
            matches!(Posthumous::from(blind(true)), Posthumous::Blind(why) if why == "ram: the VMM has ended")
        );
    }
}
