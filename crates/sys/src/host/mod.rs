//! What the host side needs of the kernel: starting a child that dies with its
//! owner, the time-stamp counter's rate, and whether KVM really runs code.

mod child;
mod kvm;
mod tsc;

pub use child::{die_with_owner, inherit};
pub use kvm::{KvmProbe, probe_kvm};
pub use tsc::tsc_khz;
