//! Builds and measures what a machine boots: kernel, initramfs, root images.
//!
//! What it guarantees: what is built from the same inputs has the same bytes;
//! what stands in the store is complete (built beside it, renamed in one step);
//! two processes that build at once end with one result.
//! What it does not: it is never reached while a machine runs.
//! Who may call: the command line, and tests.
#![forbid(unsafe_code)]

mod busybox;
mod error;
mod initramfs;
mod kernel;
mod name;
mod store;
mod tree;

pub use busybox::busybox_tree;
pub use error::ImageError;
pub use initramfs::build_initramfs;
pub use kernel::Kernel;
pub use name::ImageName;
pub use store::{Guest, Image, Store};
pub use tree::{Content, Node, Tree};
