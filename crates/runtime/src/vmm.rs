//! The observer of the VMM process itself.
//!
//! What it compares, and with what, stands in `crates/vm/src/jail/watch.rs`. A breach is an
//! absolute violation: the process that holds the guest has something that it had not when it was let go.

use hotcell_decide::{HostFact, ViolationKind};
use hotcell_observe::{Armed, ObserveError, Observer, Sightings};
use hotcell_vm::{Breach, VmmWatch};
use std::time::{Duration, Instant};

/// From one look to the next. A look takes some half millisecond, so this is a fifth of a per cent of a core.
const CADENCE: Duration = Duration::from_millis(250);

/// Looks at one VMM.
pub(crate) struct VmmObserver {
    watch: VmmWatch,
    next: Instant,
}

impl VmmObserver {
    pub(crate) fn new(watch: VmmWatch) -> VmmObserver {
        VmmObserver { watch, next: Instant::now() }
    }

    fn see(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        let breaches = self.watch.look();
        let breaches = breaches.map_err(|source| ObserveError::Host { what: "the VMM process", source })?;
        for Breach { writable_root, subject, detail } in breaches {
            let kind = if writable_root { ViolationKind::WritableRoot } else { ViolationKind::VmmOutOfJail };
            seen.fact(HostFact::Violation { kind, subject, detail })?;
        }
        self.next = Instant::now() + CADENCE;
        Ok(())
    }
}

impl Observer for VmmObserver {
    fn name(&self) -> &'static str {
        "vmm"
    }

    fn arm(&mut self, seen: &mut Sightings) -> Result<Armed, ObserveError> {
        self.see(seen)?;
        let basis = "the VMM's users, namespaces, filters, descriptors, children and executable mappings before its guest ran";
        Ok(Armed { armed: true, basis: basis.into() })
    }

    fn look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        if Instant::now() < self.next { Ok(()) } else { self.see(seen) }
    }

    fn last_look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        self.see(seen)
    }
}
