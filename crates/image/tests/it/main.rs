//! Images from hostile and honest sources.
//!
//! Every layer here is built byte by byte, since no honest tool writes what these need.
#![forbid(unsafe_code)]

mod debian;
mod fixture;
mod forms;
mod hostile;
mod liar;
mod registry;
mod sources;
mod wheels;
