//! The runtime over a fake backend: each test is named for the promise that it holds.
#![allow(missing_docs)]

mod boot;
mod broken;
mod capability;
mod copies;
mod crossing;
mod disk;
mod ending;
mod honest;
#[path = "../lab/mod.rs"]
mod lab;
mod lying;
mod observed;
mod panics;
mod refused;
