//! Safe wrappers for kernel calls; the only crate where `unsafe` compiles.
//!
//! Each wrapper states why its unsafe block is sound; callers need no `unsafe`.
#![allow(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

#[cfg(feature = "host")]
pub mod host;
