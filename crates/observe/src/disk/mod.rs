//! The workspace disk, read from the host while the guest has it mounted.
//!
//! ```text
//! Geometry::read ─▶ Listing::take ─┐
//!                   Listing::take ─┴▶ changes ─▶ what the record says and the judge rules on
//! ```
//! Guarantees and limits stand in the parts: `ext4.rs` reads structures, `listing.rs` makes
//! a list of them, `compare.rs` finds what changed, `spelling.rs` spells names.
//! What is on the disk is what the guest's kernel wrote out; what it still holds in its
//! memory is not there yet.

mod compare;
mod ext4;
mod listing;
mod spelling;

pub use compare::{Change, changes};
pub use ext4::{Disk, DiskError, Geometry, Kind};
pub use listing::{
    Effort, Entry, Listing, MAX_DEPTH, MAX_HOLES, MAX_NAMES, MAX_PATH, MAX_UNREAD, MOUNTED_AT, SPARSE, Unread,
};
