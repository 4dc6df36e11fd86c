//! Starts and surely stops a virtual machine.
//!
//! What it guarantees: nothing is started that is not written down first (a
//! [`Registration`] is needed to start and is given back only by a checked
//! teardown); a machine has no network device and one byte channel; it dies
//! with the thread that started it; its VMM is held in a jail whose level is measured; [`LiveVm::destroy`] says what was checked
//! to be gone.
//! What it does not: it judges nothing and writes no record.
//! Who may call: `hotcell-runtime`'s driver, and the command line for `doctor`,
//! `ps` and `reap`.
#![forbid(unsafe_code)]

mod accel;
mod backend;
mod console;
mod disk;
mod jail;
mod measured;
mod memory;
mod process;
mod qemu;
mod reap;
mod registry;
mod teardown;
mod template;

pub use accel::{Accel, AccelChoice, AccelRefused, Acceleration};
pub use backend::{BootInput, LiveVm, StartError, StartFailed, VmBackend, VmPlan, VmmFacts};
pub use console::{CONSOLE_CAP, Captured, Console};
pub use disk::{DiskError, Workspace};
pub use jail::{Breach, HostJail, Jail, JailChoice, JailRefused, Measured, Missing, Part, VmmWatch};
pub use measured::FileDigests;
pub use memory::{GuestMemory, MemoryRegion};
pub use process::{ProcessId, boot_id};
pub use qemu::{QemuBackend, QmpError};
pub use reap::{Listed, REAPED_FILE, Reaped};
pub use registry::{Entry, Registration, Registry, RegistryError};
pub use teardown::{Check, TeardownFailed, TeardownProof, TeardownReport};
pub use template::{Template, TemplateError, TemplateStore, Usable};
