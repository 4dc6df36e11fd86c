//! The workspace disk, read from the host while the guest has it mounted.
//!
//! ```text
//! Geometry::read ─▶ Listing::take ─┐
//!                   Listing::take ─┴▶ changes ─▶ Scanner ─▶ DiskObserver ─▶ what the record says
//! ```
//! Guarantees and limits stand in the parts: `ext4.rs` reads structures, `listing.rs` makes
//! a list of them, `compare.rs` finds what changed, `spelling.rs` spells names, `scanner.rs` reads
//! again and bounds the volume, `eye.rs` decides when.
//! What is on the disk is what the guest's kernel wrote out; what it still holds in its
//! memory is not there yet.

mod compare;
mod ext4;
mod eye;
mod listing;
mod scanner;
mod spelling;

pub use compare::{Change, changes};
pub use ext4::{Disk, DiskError, Geometry, Kind};
pub use eye::{DiskObserver, MAX_INTERVAL, MIN_INTERVAL, REST};
pub use listing::{
    Bounds, Effort, Entry, Listing, MAX_DEPTH, MAX_HOLES, MAX_NAMES, MAX_PATH, MAX_UNREAD, MOUNTED_AT,
    SPARSE, Unread,
};
pub use scanner::{Explain, Explained, MAX_LISTED, MAX_LISTED_OF_RUN, MAX_UNEXPLAINED, Scanner};
