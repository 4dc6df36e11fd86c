//! Builds and measures what a machine boots: kernel, initramfs, root images.
//!
//! What it guarantees: what is built from the same inputs has the same bytes;
//! what stands in the store is complete (built beside it, renamed in one step);
//! two processes that build at once end with one result.
//! What it does not: it is never reached while a machine runs.
//! Who may call: the command line, and tests.
#![forbid(unsafe_code)]

mod build;
mod busybox;
mod config;
mod debian;
mod error;
mod folder;
mod initramfs;
mod kernel;
mod layer;
mod limits;
mod name;
mod oci;
mod pip;
mod program;
mod progress;
mod registry;
mod source;
mod spool;
mod stage;
mod store;
mod tree;
mod wheel;

pub use build::Recipe;
pub use busybox::busybox_tree;
pub use config::ImageConfig;
pub use error::ImageError;
pub use initramfs::build_initramfs;
pub use kernel::{Kernel, KernelKind, Module};
pub use limits::Limits;
pub use name::ImageName;
pub use pip::Pin;
pub use progress::{Progress, Silent};
pub use source::{Reference, Source};
pub use spool::Slice;
pub use store::{Details, Guest, Image, Initramfs, Store};
pub use tree::{Content, Node, Tree};
