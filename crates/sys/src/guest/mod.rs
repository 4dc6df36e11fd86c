//! What PID 1 of the guest needs from its kernel.
//!
//! Who may call: crate `guest` only. The guest's processes have one thread
//! each; several wrappers here rely on it and say so.

mod fanotify;
mod fork;
mod ioctl;
mod program;
mod seccomp;
mod secret;
mod shared;

pub use fanotify::{ExecEvent, ExecEvents};
pub use fork::{Child, ForkPlan, Namespaces, exit_now, fork, signal};
pub use ioctl::{credit_entropy, freeze, loopback_up};
pub use program::{
    ExecImage, adopt_stdio, close_from, close_on_exec, default_signals, read_raw, reap_automatically,
    write_raw,
};
pub use seccomp::{Argument, Filter, FilterError, Rule, Verdict};
pub use secret::LockedPage;
pub use shared::SharedWords;
