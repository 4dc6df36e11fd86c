//! The template of a machine: found, or made by booting one and saving it.

use super::QemuBackend;
use super::args::{self, Descriptors, Origin};
use crate::accel::Accel;
use crate::backend::{LiveVm, VmPlan};
use crate::registry::Registry;
use crate::template::{Inputs, Template, TemplateError, TemplateStore};
use hotcell_ledger::Digest;
use std::collections::BTreeMap;
use std::time::Duration;

/// What the machine that is saved may take to boot: what a run's may under TCG on a busy host.
const BOOT_DEADLINE: Duration = Duration::from_secs(120);

impl QemuBackend {
    /// What a template of this machine depends on.
    pub(super) fn inputs(&self, plan: &VmPlan) -> Inputs {
        let none = Descriptors { root: 0, workspace: 0, channel: 0, qmp: 0 };
        let origin = Origin::Boot { kernel: 0, initramfs: 0, tsc_khz: None, to_be_saved: true };
        let own = args::name(&plan.run_id);
        let arguments = args::arguments(plan, none, origin).into_iter().filter(|word| *word != own);
        let mut inputs = BTreeMap::from([
            ("hotcell".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("vmm".to_owned(), self.executable().to_hex()),
            ("arguments".to_owned(), arguments.collect::<Vec<_>>().join(" ")),
            ("accelerator".to_owned(), plan.acceleration.accel.to_string()),
            ("kernel".to_owned(), plan.kernel.digest.to_hex()),
            ("initramfs".to_owned(), plan.initramfs.digest.to_hex()),
            ("root".to_owned(), plan.root.digest.to_hex()),
            ("disk_mib".to_owned(), plan.workspace.mib().to_string()),
        ]);
        if plan.acceleration.accel == Accel::Kvm {
            // Hardware executes the guest, and the guest's kernel has set itself up for this one.
            inputs.insert("processor".to_owned(), processor());
        }
        Inputs(inputs)
    }

    /// Boots a machine for nobody and saves it.
    pub(super) fn make_template(
        &self,
        store: &TemplateStore,
        registry: &Registry,
        plan: &VmPlan,
        say: &mut dyn FnMut(&str),
    ) -> Result<Template, TemplateError> {
        let inputs = self.inputs(plan);
        store.make(inputs.clone(), |dir| {
            say("making the template that runs of this image start from (once)");
            let tsc_khz = hotcell_sys::host::tsc_khz();
            // A name of its own: two makers of different templates may work at once.
            let name = format!(
                "template-{}-{}",
                inputs.id().to_hex().get(..16).unwrap_or_default(),
                std::process::id()
            );
            let registration = registry.register(&name, dir)?;
            let plan = VmPlan {
                run_id: name,
                template: None,
                ..plan.try_clone().map_err(crate::template::at(dir))?
            };
            let mut vm =
                self.start_machine(registration, plan, true).map_err(|failed| match failed.teardown {
                    Ok(_) => TemplateError::Start(failed.error),
                    Err(left) => TemplateError::Teardown(unproven(&left.report)),
                })?;
            let saved = vm.save(dir, tsc_khz, BOOT_DEADLINE);
            match Box::new(vm).destroy() {
                Ok(_) => saved,
                Err(left) => Err(TemplateError::Teardown(unproven(&left.report))),
            }
        })
    }
}

fn unproven(report: &crate::teardown::TeardownReport) -> String {
    let left = report.checks.iter().filter(|check| !check.gone);
    left.map(|check| format!("{}: {}", check.what, check.detail)).collect::<Vec<_>>().join("; ")
}

/// The processor's model and what it can do, as the host's kernel says; of the first one.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of = ["vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags"];
    let first = text.split("\n\n").next().unwrap_or_default();
    let lines: Vec<&str> = first
        .lines()
        .filter(|line| of.contains(&line.split(':').next().unwrap_or_default().trim()))
        .collect();
    Digest::of(lines.join("\n").as_bytes()).to_hex()
}
