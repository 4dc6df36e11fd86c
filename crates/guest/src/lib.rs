//! The guest's side of Hotcell: PID 1 and the client inside the workload.
//!
//! What it is for: `hotcell-init` boots the guest into a state in which it
//! waits for its host, then runs what the host asks for, walled in.
//! What it guarantees: the workload gets no more than `syscalls`, `confine`
//! and `view` say; every queue and buffer is bounded by [`limits`]; an error
//! in the walls ends the machine and never goes on without them.
//! What it does not: decide. It is told what to do by the host, and everything
//! that it says is testimony to the host.
//! Who may call: the two binaries of this package.
//!
//! ```text
//! PID 1 (initramfs, root, one thread)             pid and mount namespace of the workload
//!  +- gate: asked by the kernel before each execve
//!  +- boot: modules, mounts under /root            +- PID 1: the reaper (no capabilities)
//!  +- serve: epoll loop  --- clone3 into cgroup -->+- first process of exec 1, and its tree
//!      channel  <=> host                           +- first process of exec 2, ...
//!      /run/hotcell/request <- capability requests
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

mod approved;
mod boot;
mod cgroup;
mod channel;
mod client;
mod configure;
mod confine;
mod exec;
mod gate;
mod last;
pub mod limits;
mod oom;
mod pack;
mod permits;
mod poll;
mod reaper;
mod requests;
mod roll;
mod serve;
mod start;
mod syscalls;
mod unpack;
mod view;
mod warm;

pub use client::run as request;

/// Runs PID 1. Comes back never: it serves until the host goes, then ends the machine.
pub fn init() -> ! {
    last::arm();
    match boot::boot() {
        Ok(booted) => serve::serve(booted),
        Err(failure) => last::stop_unheard(&failure),
    }
}
