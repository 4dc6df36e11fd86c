//! L6: does the guest's story fit the host's record?
//!
//! For each capability the host's decisions (`CAPABILITY_REQUEST` by HOST) are
//! counted against the guest's account (`CAPABILITY_REQUEST` by guest actors):
//!
//! | finding | when |
//! |---|---|
//! | unnarrated | the host decided more often than the guest tells: something is concealed |
//! | unconfirmed | the guest tells more than the host decided: something is invented |
//! | outcome mismatch | both tell, and no pairing makes their outcomes agree |
//!
//! Counts, not order: the guest may tell late. A guest that tells nothing at all
//! leaves every decision unnarrated; the honest client tells of what it asked.
//! Files are compared in `files.rs`, processes in `processes.rs`.

use crate::{Finding, FindingKind, Layer, decision};
use hotcell_ledger::{Capability, Event};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default)]
struct Outcomes {
    granted: u64,
    refused: u64,
}

impl Outcomes {
    fn add(&mut self, granted: bool) {
        let count = if granted { &mut self.granted } else { &mut self.refused };
        *count = count.saturating_add(1);
    }

    fn total(self) -> u64 {
        self.granted.saturating_add(self.refused)
    }
}

/// Both accounts of one run.
#[derive(Clone, Debug, Default)]
pub struct Drift {
    accounts: BTreeMap<Capability, (Outcomes, Outcomes)>,
}

impl Drift {
    /// Before the first event.
    pub fn new() -> Drift {
        Drift::default()
    }

    /// Takes in one event.
    pub fn observe(&mut self, event: &Event) {
        if let Some((capability, granted)) = decision(event) {
            let (host, guest) = self.accounts.entry(capability).or_default();
            if event.actor.is_host_band() { host } else { guest }.add(granted);
        }
    }

    /// Where the two accounts part, by capability.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for (capability, (host, guest)) in &self.accounts {
            let mut add = |kind, detail: String| {
                let subject = capability.as_str().to_owned();
                findings.push(Finding { layer: Layer::L6, kind, subject, detail });
            };
            let (decided, told) = (host.total(), guest.total());
            if decided > told {
                add(
                    FindingKind::Unnarrated,
                    format!("the host decided {decided}, the guest tells of {told}"),
                );
            }
            if told > decided {
                add(
                    FindingKind::Unconfirmed,
                    format!("the guest tells of {told}, the host decided {decided}"),
                );
            }
            // The shorter account must fit into the longer one, outcome by outcome.
            let (short, long) = if told <= decided { (guest, host) } else { (host, guest) };
            if short.total() > 0 && (short.granted > long.granted || short.refused > long.refused) {
                add(
                    FindingKind::OutcomeMismatch,
                    format!(
                        "the host granted {} and refused {}, the guest tells of {} granted and {} refused",
                        host.granted, host.refused, guest.granted, guest.refused
                    ),
                );
            }
        }
        findings
    }
}
