//! The host sees for itself: guest memory and disks, read from outside.
//!
//! ```text
//!  prepare ──▶ arm ──▶ look, look, look … ──▶ last_look ──▶ post_mortem
//!  (boots)    (ready)  (the workload runs)    (quiet)       (the VMM is dead)
//! ```
//! Each observer ([`Observer`]) reads one thing and reports [`Sighting`]s. The runtime has
//! one thread that calls all of them at a cadence (`crates/runtime/src/watch.rs`), and its
//! driver records what they saw and kills where a rule breaks. Another observer is one
//! more `Box<dyn Observer>` in `watch::observers`.
//!
//! Guarantees: what is read is hostile bytes and taken so: loops are bounded, arithmetic is
//! checked, nothing panics. An observer that can't see says so: that is an error, and an
//! error ends the run.
//! Not guaranteed: that a guest kernel which was taken over tells the truth in its own
//! memory; SECURITY.md says what is checked against what.
//! Who may call: the runtime. No observer waits on the guest or writes to it.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod disk;
pub mod kernel;
mod observer;
pub mod ram;

pub use observer::{
    Armed, MAX_LAST_SIGHTINGS, MAX_SIGHTINGS, ObserveError, Observer, Roll, Sighting, Sightings,
};
