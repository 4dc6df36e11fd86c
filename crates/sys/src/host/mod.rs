//! What the host side needs of the kernel: starting a child behind walls that
//! dies with its owner, reading a process's memory, the time-stamp counter's rate, and whether KVM really runs code.

mod jail;
mod kvm;
mod memory;
mod opens;
mod tsc;
mod vmm_filter;

pub use jail::{Identity, JailError, JailPlan, JailedChild, Namespace, Place, Stage, rehearse, spawn_jailed};
pub use kvm::{KvmProbe, probe_kvm};
pub use memory::{MAX_RANGES, Range, process_time, read_process};
pub use opens::{Gift, OpenService, Opens};
pub use tsc::tsc_khz;
pub use vmm_filter::vmm_filter;
