//! What a backend is: something that starts a machine and surely stops it.
//!
//! ```text
//!  Registration ──start──▶ LiveVm ──destroy──▶ TeardownProof
//!                 │                     └─────▶ TeardownFailed (the registration, for the reaper)
//!                 └─────▶ StartFailed (what was begun is already taken down again)
//! ```

use crate::accel::Acceleration;
use crate::console::Captured;
use crate::disk::{DiskError, Workspace};
use crate::jail::{Jail, VmmWatch};
use crate::memory::GuestMemory;
use crate::process::ProcessId;
use crate::registry::{Registration, Registry, RegistryError};
use crate::teardown::{Check, TeardownFailed, TeardownProof, TeardownReport};
use crate::template::{Template, TemplateError, TemplateStore};
use hotcell_ledger::Digest;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// A measured file: what was hashed is what is booted, since the open file goes
/// to the VMM, not its name.
#[derive(Debug)]
pub struct BootInput {
    /// The open file.
    pub file: File,
    /// Its digest.
    pub digest: Digest,
    /// Its length in bytes.
    pub bytes: u64,
}

/// What to start. There is no field for a network, a share or a second disk.
#[derive(Debug)]
pub struct VmPlan {
    /// Names the machine; the run's id.
    pub run_id: String,
    /// Kernel image.
    pub kernel: BootInput,
    /// Initial RAM disk with the guest's PID 1.
    pub initramfs: BootInput,
    /// Read-only root image.
    pub root: BootInput,
    /// The blank that the workspace disk is copied from.
    pub workspace: Workspace,
    /// Virtual processors.
    pub vcpus: u32,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Accelerator.
    pub acceleration: Acceleration,
    /// Words appended to the kernel command line.
    pub kernel_args: Vec<String>,
    /// User and group that most of what runs there has: the guest makes a process of theirs ready.
    pub owner: (u32, u32),
    /// The template that the machine goes on from; without one it boots from scratch.
    pub template: Option<Template>,
}

impl BootInput {
    /// The same open file.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<BootInput> {
        Ok(BootInput { file: self.file.try_clone()?, digest: self.digest, bytes: self.bytes })
    }
}

impl VmPlan {
    /// The same plan over the same open files, without its template.
    pub(crate) fn try_clone(&self) -> io::Result<VmPlan> {
        Ok(VmPlan {
            run_id: self.run_id.clone(),
            kernel: self.kernel.try_clone()?,
            initramfs: self.initramfs.try_clone()?,
            root: self.root.try_clone()?,
            workspace: self.workspace.clone(),
            vcpus: self.vcpus,
            memory_mib: self.memory_mib,
            acceleration: self.acceleration.clone(),
            kernel_args: self.kernel_args.clone(),
            owner: self.owner,
            template: None,
        })
    }
}

/// What the host saw of the VMM after it had started it.
#[derive(Clone, Debug)]
pub struct VmmFacts {
    /// The process.
    pub process: ProcessId,
    /// Digest of its executable; zero where it can't be read.
    pub executable: Digest,
    /// Its argv.
    pub argv: Vec<String>,
    /// `qemu`, …
    pub backend: &'static str,
    /// Version as the VMM says.
    pub version: String,
    /// Accelerator and why.
    pub acceleration: Acceleration,
    /// How the VMM itself is confined.
    pub jail: Jail,
    /// The VMM's own list of devices.
    pub devices: Vec<String>,
    /// Devices of that list that were not asked for: a network card would be one.
    pub unexpected_devices: Vec<String>,
    /// Whether the VMM holds the root image read-only.
    pub root_read_only: bool,
}

/// Starts machines.
pub trait VmBackend: Send + Sync {
    /// `qemu`, `kata`, `fake`.
    fn name(&self) -> &'static str;

    /// The template of such a machine, made if there is none that can be used; `None`
    /// where this backend has no templates. `say` is told that one is made, which takes as long as a boot.
    /// The machine that is saved dies with the calling thread.
    ///
    /// # Errors
    /// There is none and none can be made. A machine can still boot from scratch.
    fn template(
        &self,
        store: &TemplateStore,
        registry: &Registry,
        plan: &VmPlan,
        say: &mut dyn FnMut(&str),
    ) -> Result<Option<Template>, TemplateError> {
        let _ = (store, registry, plan, say);
        Ok(None)
    }

    /// Starts one machine. The caller must go on living on the thread that
    /// calls: the machine dies with it.
    ///
    /// # Errors
    /// Nothing is left behind, or the failure says what.
    fn start(&self, registration: Registration, plan: VmPlan) -> Result<Box<dyn LiveVm>, StartFailed>;
}

/// A running machine.
pub trait LiveVm: Send {
    /// What the host saw of the VMM.
    fn facts(&self) -> &VmmFacts;

    /// The byte channel to the guest; once.
    fn take_channel(&mut self) -> Option<UnixStream>;

    /// A descriptor that becomes readable when the VMM has ended.
    ///
    /// # Errors
    /// No descriptor is left.
    fn exit_event(&self) -> io::Result<OwnedFd>;

    /// Console output so far.
    fn console(&self) -> Captured;

    /// The last lines of console and VMM messages, for people.
    fn last_words(&self) -> String;

    /// Where the guest's memory lies, as read before the guest's first instruction; `None` where the backend can't
    /// tell: then nothing of its processes and its kernel is observed, and the record says so.
    fn memory(&self) -> Option<GuestMemory>;

    /// How far into the root image, or anything else but the workspace disk, the VMM says that something was written;
    /// `None` where it does not answer.
    fn root_bytes_written(&mut self) -> Option<u64>;

    /// The same as of the last call, and asks again for the next one; `None` where no answer has come. Waits for nothing.
    fn root_bytes_so_far(&mut self) -> Option<u64> {
        None
    }

    /// Why the VMM holds its guest back, where it does: it goes on no more, and says nothing. Waits for nothing.
    fn held_back(&mut self) -> Option<String> {
        None
    }

    /// The file that is the workspace disk, opened to read; it can be read after the machine's end too. `None`: this
    /// machine has none that the host could read.
    ///
    /// # Errors
    /// It can't be opened.
    fn disk(&self) -> io::Result<Option<File>> {
        Ok(None)
    }

    /// What the VMM process had before its guest executed anything, to look at it again and again; once. `None`: there
    /// is no process that the host could look at.
    fn take_watch(&mut self) -> Option<VmmWatch> {
        None
    }

    /// Ends the VMM at once, whatever it does; idempotent, does not wait.
    fn kill(&self);

    /// Ends the VMM, removes what belonged to it, and checks that all is gone.
    ///
    /// # Errors
    /// Something is not known to be gone.
    fn destroy(self: Box<Self>) -> Result<TeardownProof, TeardownFailed>;
}

/// A machine that did not start.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct StartFailed {
    /// Why.
    pub error: StartError,
    /// What came of taking down what had been begun.
    pub teardown: Result<TeardownProof, TeardownFailed>,
}

/// Why a machine did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The VMM's program is not there or can't be executed.
    #[error("can't start {program}: {source}. Install it (Debian, Ubuntu: qemu-system-x86)")]
    NoVmm {
        /// Which program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The VMM ended while it started.
    #[error("the VMM ended at once ({status}): {stderr}")]
    Died {
        /// How.
        status: String,
        /// What it said.
        stderr: String,
    },
    /// The VMM's control channel does not answer as it should.
    #[error("the VMM does not answer: {0}")]
    Control(String),
    /// The VMM has a device that it must not have.
    #[error("the VMM made devices that were not asked for: {0}")]
    UnexpectedDevice(String),
    /// The root image is not attached read-only.
    #[error("the VMM holds the root image writable")]
    WritableRoot,
    /// The VMM can't be put behind walls that this host gave when it was asked.
    #[error("can't put the VMM into its jail: {0}")]
    Jail(#[from] hotcell_sys::host::JailError),
    /// The running VMM is less confined than this host can confine it.
    #[error("the VMM is not confined as this host can confine it; it lacks {0}")]
    WeakJail(String),
    /// The workspace disk can't be made.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The registry can't be written.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Nothing was begun.
    #[error("{0}")]
    NotBegun(String),
    /// The backend has a bug.
    #[error("the backend panicked: {0}")]
    Panicked(String),
    /// Another system call failed.
    #[error("failed to {doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl StartFailed {
    /// A start that was not begun.
    pub fn not_begun(registration: Registration, why: String) -> StartFailed {
        let report = TeardownReport { checks: vec![Check::never_started()], ms: 0 };
        StartFailed { error: StartError::NotBegun(why), teardown: registration.conclude(report) }
    }

    /// A backend that panicked: what it had begun is unknown, so nothing is proven.
    pub fn panicked(text: String) -> StartFailed {
        StartFailed { error: StartError::Panicked(text), teardown: Err(TeardownFailed::unknown()) }
    }
}
