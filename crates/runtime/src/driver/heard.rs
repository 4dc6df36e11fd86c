//! What the guest says, and what follows from it. Called by the driver alone.

use super::{Driver, State};
use crate::channel::{FromGuest, Lost, ToGuest};
use crate::recorder::RecordError;
use crate::report::milliseconds;
use hotcell_decide::{Broker, CapabilityRequest, ClaimKind, Decision, HostFact, RefusalCode};
use hotcell_ledger::Capability;
use hotcell_wire::Clock;
use std::time::Instant;

impl Driver<'_> {
    pub(super) fn guest(&mut self, message: FromGuest) -> Result<(), RecordError> {
        let opens =
            matches!(message, FromGuest::Ready { .. } | FromGuest::Fatal { .. } | FromGuest::Lost { .. });
        if self.state == State::Booting && !opens {
            return self.misbehaved("it speaks before it is ready");
        }
        match message {
            FromGuest::Ready { kernel_release, uptime_ns, heard } if self.state == State::Booting => {
                let since_ns = heard.elapsed().as_nanos() as u64;
                let wall_clock_ns = self.run.recorder.now_ns().saturating_sub(since_ns).into();
                self.send(ToGuest::Clock(Clock { uptime_ns: uptime_ns.into(), wall_clock_ns }));
                let boot = self.run.started.elapsed();
                let boot_ms = boot.as_millis() as u64;
                self.run.timings.insert("ready", milliseconds(boot));
                self.run.recorder.host(&HostFact::Ready { boot_ms, kernel_release })?;
                self.enforce();
                self.ready()?;
            }
            FromGuest::Ready { .. } => self.misbehaved("it said ready twice")?,
            FromGuest::Ended { exec, ended } => {
                if let Some(copy) = self.copies.get_mut(&exec) {
                    copy.hear_end(ended);
                    return self.complete_copy(exec);
                }
                if let Some(live) = self.execs.get_mut(&exec) {
                    live.ended = Some(ended);
                    live.stdin = None;
                }
                self.complete(exec)?;
            }
            FromGuest::StdinCredit { exec, bytes } => {
                if let Some(Some(pump)) = self.stdin(exec) {
                    pump.add_credit(bytes);
                }
            }
            FromGuest::StdinClosed { exec } => {
                if let Some(stdin) = self.stdin(exec) {
                    *stdin = None;
                }
            }
            FromGuest::Request { id, exec, capability, resource, justification } => {
                self.request(id, exec, capability, &resource, &justification)?;
            }
            FromGuest::Claim { kind, subject, parent, value, text } => {
                let claim = hotcell_wire::Claim { kind, subject, parent, value, text: &text };
                self.run.recorder.claim(&claim)?;
            }
            FromGuest::Rolled { roll } => self.rolled(roll),
            FromGuest::Quiesced if self.state == State::Ending => {
                self.quiesced = true;
                self.state = State::Over;
                if let Some(watch) = &self.watch {
                    watch.last_look();
                    self.state = State::Looking;
                    self.deadline = Instant::now() + self.run.runtime.patience.quiesce;
                }
            }
            FromGuest::Quiesced => self.misbehaved("it quiesced unasked")?,
            FromGuest::Fatal { text } if self.workload_may_not_have_run() => {
                self.fail("boot", &format!("the guest's init can't go on: {text}"))?;
            }
            FromGuest::Fatal { text } => self.misbehaved(&format!("its init can't go on: {text}"))?,
            FromGuest::Lost { why: Lost::Misbehaved(what) } => self.misbehaved(&what)?,
            FromGuest::Lost { why: Lost::Closed(what) } => {
                self.going.channel = Some(what);
                self.going(Instant::now())?;
            }
        }
        Ok(())
    }

    /// A capability request: decided here, recorded, answered.
    pub(super) fn request(
        &mut self,
        id: u32,
        exec: u32,
        capability: u8,
        resource: &[u8],
        justification: &[u8],
    ) -> Result<(), RecordError> {
        let Some(capability) = Capability::from_byte(capability) else {
            self.run.recorder.refused(ClaimKind::Capability, RefusalCode::BadValue)?;
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
}
