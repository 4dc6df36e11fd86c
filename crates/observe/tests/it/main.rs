//! The disk reader against disks that `mke2fs` makes and `debugfs` changes, whole and damaged.

mod cost;
mod differential;
mod hostile;
mod image;
mod listing;
mod scanner;
