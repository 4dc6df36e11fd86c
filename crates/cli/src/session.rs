//! What `run` and `demo` share: the host's parts put together, and one run from
//! an image name to a live `Run`.

use crate::exit::Fatal;
use crate::home::{Home, find_qemu};
use crate::{profile, say};
use hotcell_advisory::Fingerprint;
use hotcell_image::{Guest, KernelKind, Store};
use hotcell_ledger::{ClosedLedger, SigningKey};
use hotcell_policy::{Code, Command, EnvironmentBaseline, ImageRef, PolicyDraft, RunDraft, SealedSpec};
use hotcell_runtime::{Advisor, MeasuredBoot, Opinion, Patience, Runtime};
use hotcell_vm::{
    Accel, AccelChoice, Acceleration, FileDigests, JailChoice, QemuBackend, Registry, TemplateStore,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A machine under KVM is ready in a second or two.
const BOOT_DEADLINE_KVM: Duration = Duration::from_secs(30);
/// Under TCG it takes some four seconds, on a busy host many times that.
const BOOT_DEADLINE_TCG: Duration = Duration::from_secs(120);

/// The guest's programs, built with this `hotcell`.
const GUEST: Guest =
    Guest { init: include_bytes!(env!("HOTCELL_INIT")), request: include_bytes!(env!("HOTCELL_REQUEST")) };

/// What one `hotcell` process works with.
pub(crate) struct Session {
    pub(crate) home: Home,
    pub(crate) store: Store,
}

/// What to run.
pub(crate) struct Job {
    pub(crate) image: String,
    pub(crate) kernel: KernelKind,
    pub(crate) name: Option<String>,
    pub(crate) policy: PolicyDraft,
    pub(crate) argv: Vec<String>,
    /// Variables beyond, or in place of, the image's and our own.
    pub(crate) env: Vec<(String, String)>,
    /// In place of the image's.
    pub(crate) cwd: Option<String>,
}

/// Measured and sealed.
pub(crate) struct Prepared {
    pub(crate) spec: SealedSpec,
    pub(crate) boot: MeasuredBoot,
    pub(crate) advisor: Advisor,
    /// User and group that the image wants.
    pub(crate) user: (u32, u32),
}

impl Session {
    pub(crate) fn open() -> Result<Session, Fatal> {
        let home = Home::from_env().map_err(Fatal::failed)?;
        let store = Store::new(home.cache(), &home.images(), GUEST);
        Ok(Session { home, store })
    }

    /// What starts machines, and where their records go.
    pub(crate) fn runtime(
        &self,
        accel: AccelChoice,
        jail: JailChoice,
        out: Option<PathBuf>,
    ) -> Result<Runtime, Fatal> {
        let program = find_qemu().map_err(Fatal::failed)?;
        let registry = Registry::open(&self.home.registry()).map_err(Fatal::failed)?;
        let (reaped, backend) = std::thread::scope(|scope| {
            // What a dead owner left would take memory and disk from this run.
            let reaping = scope.spawn(|| registry.reap());
            let backend = QemuBackend::remembering(program, jail, self.home.cache(), self.digests());
            (reaping.join(), backend)
        });
        let reaped = reaped.map_err(|_| Fatal::failed("looking for what dead owners left panicked"))?;
        for left in reaped.map_err(Fatal::failed)? {
            say::note(format_args!("left by a dead owner, {}: {}", left.run_id, left.actions.join("; ")));
        }
        let acceleration: Acceleration =
            accel.resolve_remembering(self.home.cache()).map_err(Fatal::failed)?;
        let boot_deadline = boot_deadline(acceleration.accel);
        Ok(Runtime {
            registry,
            backend: Arc::new(backend.map_err(Fatal::failed)?),
            acceleration,
            out: out.unwrap_or_else(|| self.home.runs()),
            cache: self.home.cache().to_owned(),
            digests: self.digests(),
            key: Arc::new(SigningKey::load_or_create(&self.home.key()).map_err(Fatal::failed)?),
            clock: Runtime::host_clock(),
            boot_deadline,
            patience: Patience::default(),
            advisor: None,
        })
    }

    /// Lets the run go on from its template, which is made where there is none. Where none can be made it is said, with
    /// what happens instead: a machine that boots from scratch takes longer and isolates no less.
    /// Says whether it was made now.
    pub(crate) fn attach_template(&self, runtime: &Runtime, prepared: &mut Prepared, instead: &str) -> bool {
        let mut made = false;
        let mut say = |text: &str| {
            made = true;
            say::note(text);
        };
        match runtime.template(&self.templates(), &prepared.spec, &prepared.boot, &mut say) {
            Ok(template) => prepared.boot.template = template,
            Err(error) => say::note(format_args!("{error}. {instead}")),
        }
        made
    }

    pub(crate) fn templates(&self) -> TemplateStore {
        TemplateStore::in_cache(self.home.cache())
    }

    /// Removes the templates of something that is no more: `what` a template depends on, and its digest.
    pub(crate) fn forget_templates(&self, what: &str, digest: &str) -> Result<(), Fatal> {
        let templates = self.templates();
        for (id, template) in templates.list().map_err(Fatal::failed)? {
            if template.is_ok_and(|template| template.inputs().get(what).is_some_and(|of| of == digest)) {
                templates.remove(&id).map_err(Fatal::failed)?;
            }
        }
        Ok(())
    }

    fn digests(&self) -> FileDigests {
        FileDigests::remembered_in(&self.home.cache().join("digests"))
    }

    /// Measures the image and seals the spec; nothing exists yet.
    pub(crate) fn prepare(&self, job: Job) -> Result<Prepared, Fatal> {
        if job.policy.backend.kata != hotcell_policy::KataDraft::default() {
            return Err(Fatal::failed(
                "the policy has settings of [backend.kata], a backend that this version lacks: remove them",
            ));
        }
        let fingerprint =
            job.policy.profile.fingerprint.as_deref().map(Path::new).map(profile::read).transpose()?;
        let mut say = |text: &str| say::note(text);
        let image = self.store.image(&job.image, &mut say).map_err(Fatal::failed)?;
        let kernel = self.store.kernel(job.kernel, &mut say).map_err(Fatal::failed)?;
        let initramfs = self.store.initramfs(&kernel).map_err(Fatal::failed)?;
        let mut boot =
            MeasuredBoot::remembering(&self.digests(), &kernel.vmlinuz(), &initramfs.path, &image.root)
                .map_err(Fatal::failed)?;
        for (path, now, then, mend) in [
            (&image.root, boot.root.digest, image.digest, "Build the image again"),
            (&kernel.vmlinuz(), boot.kernel.digest, kernel.digest(), "Remove its folder"),
            (&initramfs.path, boot.initramfs.digest, initramfs.digest, "Remove it"),
        ] {
            if now != then {
                let why = "its digest is not the one that was recorded when it was made";
                return Err(Fatal::failed(format!("{} is damaged: {why}. {mend}", path.display())));
            }
        }
        let reference = ImageRef {
            name: job.image,
            kernel: boot.kernel.digest,
            initramfs: boot.initramfs.digest,
            root: boot.root.digest,
        };
        let mut draft = RunDraft::new(job.name.unwrap_or_else(run_id), reference, job.policy);
        let config = &image.details.config;
        // As Docker does it: the entrypoint goes before whatever is run, and what is named replaces the command.
        let words = if job.argv.is_empty() { config.cmd.clone() } else { job.argv };
        let mut command = Command::new(config.entrypoint.iter().cloned().chain(words));
        if command.argv.is_empty() {
            let why = "has neither an entrypoint nor a command of its own";
            return Err(Fatal::usage(format!(
                "the image {} {why}: name one, as `-- CMD [ARG]...`",
                image.name
            )));
        }
        for (name, value) in
            [("LANG", "C.UTF-8"), ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")]
        {
            command.env.insert(name.into(), value.into());
        }
        for (name, value) in &config.env {
            command.env.insert(name.clone(), value.as_str().into());
        }
        // The machine has one home and one user, whatever the image says.
        command.env.insert("HOME".into(), "/workspace".into());
        command.env.insert("USER".into(), config.user.as_deref().unwrap_or("agent").into());
        if let Some(workdir) = &config.workdir {
            // The guest mounts its own file systems over these.
            let is_hidden = ["/workspace", "/tmp", "/run", "/mnt", "/dev", "/proc", "/sys"]
                .iter()
                .any(|point| workdir.strip_prefix(point).is_some_and(|rest| rest.starts_with('/')));
            if is_hidden {
                say(&format!(
                    "the image's working directory {workdir} is not in the machine: using /workspace"
                ));
            } else {
                command.cwd.clone_from(workdir);
            }
        }
        for (name, value) in job.env {
            command.env.insert(name, value.into());
        }
        if let Some(cwd) = job.cwd {
            command.cwd = cwd;
        }
        draft.command = Some(command);
        draft.baseline = Some(EnvironmentBaseline::from_manifest(&image.manifest).digest());
        draft.binaries = Some(image.manifest.binaries().digest());
        draft.services = image.manifest.services().to_vec();
        boot.contents = Some(image.manifest);
        boot.owner = (config.uid, config.gid);
        draft.fingerprint = fingerprint.as_ref().map(Fingerprint::digest);
        let user = (image.details.config.uid, image.details.config.gid);
        let spec = draft.seal().map_err(|refused| {
            let typed = [Code::CommandLine, Code::Environment];
            match refused.codes().iter().all(|code| typed.contains(code)) {
                true => Fatal::usage(refused),
                false => Fatal::failed(refused),
            }
        })?;
        let advisor: Advisor = Arc::new(move |ledger| opinions(ledger, fingerprint.as_ref()));
        Ok(Prepared { spec, boot, advisor, user })
    }
}

fn boot_deadline(accel: Accel) -> Duration {
    match accel {
        Accel::Kvm => BOOT_DEADLINE_KVM,
        Accel::Tcg => BOOT_DEADLINE_TCG,
    }
}

/// The advisory layers' findings on a closed record.
fn opinions(ledger: &ClosedLedger, fingerprint: Option<&Fingerprint>) -> Vec<Opinion> {
    let text = |value: serde_json::Result<serde_json::Value>| {
        value.ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
    };
    match hotcell_advisory::assess(ledger, fingerprint) {
        Ok(findings) => findings
            .into_iter()
            .map(|finding| Opinion {
                layer: text(serde_json::to_value(finding.layer)),
                kind: text(serde_json::to_value(finding.kind)),
                subject: finding.subject,
                detail: finding.detail,
            })
            .collect(),
        Err(error) => vec![Opinion {
            layer: "L6".into(),
            kind: "unreadable".into(),
            subject: "record".into(),
            detail: error.to_string(),
        }],
    }
}

/// `run-` and sixteen random hexadecimal digits.
fn run_id() -> String {
    let mut bytes = [0; 8];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    if filled != Ok(bytes.len()) {
        // The registry refuses an id that is taken, so uniqueness does not rest on this.
        bytes = (std::process::id() as u64).to_be_bytes();
    }
    bytes.iter().fold(String::from("run-"), |id, byte| id + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_gets_the_boot_deadline_of_what_executes_its_guest() {
        let home = tempfile::tempdir().unwrap();
        let home = Home::below(home.path());
        let store = Store::new(home.cache(), &home.images(), GUEST);
        let session = Session { home, store };
        let runtime = session.runtime(AccelChoice::Tcg, JailChoice::Auto, None).unwrap();
        assert_eq!(runtime.boot_deadline, BOOT_DEADLINE_TCG);
        // No host at hand executes guest code in hardware: the same choice, asked for by hand.
        assert_eq!(boot_deadline(Accel::Kvm), BOOT_DEADLINE_KVM);
    }
}
