//! Safe wrappers for kernel calls that neither std nor rustix offers safely.
//!
//! What it is for: the only crate of the workspace where `unsafe` compiles, so
//! that a reader who looks for unsafe code has one place to look.
//! What it guarantees: each `unsafe` block carries the argument why it is
//! sound; nothing here decides anything.
//! What it does not: policy, protocol, or anything that safe code can do.
//! Who may call: `guest` (its half under [`guest`]), and the host's crates (under `host`).
#![allow(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod guest;
#[cfg(feature = "host")]
pub mod host;
