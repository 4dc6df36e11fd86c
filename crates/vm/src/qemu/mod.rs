//! QEMU's microvm behind [`VmBackend`].
//!
//! What it guarantees: the VMM inherits exactly the measured files, the
//! workspace disk and two socket pairs, all as open descriptors: there is no
//! socket or pipe on the file system that another process could take. Before the
//! machine counts as started, the VMM's own device list is read: a network
//! device or a writable root ends it.
//! What it does not: it does not wait for the guest.

mod args;
mod devices;
mod machine;
mod qmp;
mod saved;
mod start;
mod template;

pub(crate) use args::NAME_PREFIX;
pub use qmp::QmpError;

use crate::backend::{LiveVm, StartError, StartFailed, VmBackend, VmPlan};
use crate::jail::{HostJail, JailChoice, JailRefused, MAKE_CGROUPS, RunCgroups};
use crate::measured::FileDigests;
use crate::registry::{Registration, Registry};
use crate::teardown::{Check, TeardownReport};
use crate::template::{Template, TemplateError, TemplateStore};
use hotcell_ledger::Digest;
use machine::QemuVm;
use start::Parts;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The VMM's environment has this variable alone: which registry it belongs to.
pub(crate) const REGISTRY_VARIABLE: &str = "HOTCELL_REGISTRY";

/// Starts QEMU microvms.
#[derive(Clone, Debug)]
pub struct QemuBackend {
    program: PathBuf,
    jail: HostJail,
    digests: FileDigests,
}

impl QemuBackend {
    /// A backend that starts this `qemu-system-x86_64`, in the jail that this host
    /// gives: that is found out here, by trying.
    ///
    /// # Errors
    /// The whole jail is required and the host can't give it.
    pub fn new(program: PathBuf, choice: JailChoice) -> Result<QemuBackend, JailRefused> {
        let jail = HostJail::try_out(&program).accept(choice)?;
        Ok(QemuBackend { program, jail, digests: FileDigests::default() })
    }

    /// The same; what this host gives, and the VMM's digest, are taken from memory where they are known.
    ///
    /// # Errors
    /// As [`QemuBackend::new`].
    pub fn remembering(
        program: PathBuf,
        choice: JailChoice,
        cache: &Path,
        digests: FileDigests,
    ) -> Result<QemuBackend, JailRefused> {
        let jail = HostJail::try_out_remembering(&program, cache).accept(choice)?;
        Ok(QemuBackend { program, jail, digests })
    }

    /// Digest of the VMM's executable; zero where it can't be read.
    fn executable(&self) -> Digest {
        self.digests.open(&self.program).map_or(Digest::ZERO, |input| input.digest)
    }

    /// What this host gives for a jail.
    pub fn jail(&self) -> &HostJail {
        &self.jail
    }
}

impl VmBackend for QemuBackend {
    fn name(&self) -> &'static str {
        "qemu"
    }

    fn template(
        &self,
        store: &TemplateStore,
        registry: &Registry,
        plan: &VmPlan,
        say: &mut dyn FnMut(&str),
    ) -> Result<Option<Template>, TemplateError> {
        if let Some(found) = store.find(&self.inputs(plan)) {
            return Ok(Some(found));
        }
        self.make_template(store, registry, plan, say).map(Some)
    }

    fn start(&self, registration: Registration, plan: VmPlan) -> Result<Box<dyn LiveVm>, StartFailed> {
        if plan.template.as_ref().is_some_and(|template| template.id() != self.inputs(&plan).id()) {
            return Err(StartFailed::not_begun(registration, "the template is another machine's".into()));
        }
        self.start_machine(registration, plan, false).map(|vm| Box::new(vm) as Box<dyn LiveVm>)
    }
}

impl QemuBackend {
    fn start_machine(
        &self,
        mut registration: Registration,
        plan: VmPlan,
        to_be_saved: bool,
    ) -> Result<QemuVm, StartFailed> {
        let begun = Instant::now();
        let mut cgroups = RunCgroups::default();
        let started = match Parts::spawn(self, &mut registration, &mut cgroups, &plan, to_be_saved) {
            Err(error) => {
                let mut checks = vec![Check::never_started()];
                checks.extend(cgroups.remove());
                let ms = begun.elapsed().as_millis() as u64;
                let report = TeardownReport { checks, ms };
                Err(StartFailed { error, teardown: registration.conclude(report) })
            }
            Ok(parts) => parts.finish_start(registration, cgroups, plan),
        };
        started.map_err(|failed| StartFailed { error: self.jail_failed(failed.error), ..failed })
    }

    /// A host that gives less than it did is tried anew by whoever starts next.
    fn jail_failed(&self, error: StartError) -> StartError {
        let of_jail = match &error {
            StartError::Jail(_) | StartError::WeakJail(_) => true,
            StartError::Io { doing, .. } => *doing == MAKE_CGROUPS,
            _ => false,
        };
        if of_jail && self.jail.forget() {
            let why = "this host gave more when it was tried out; that is forgotten, so run it again";
            return StartError::NotBegun(format!("{error}: {why}"));
        }
        error
    }
}
