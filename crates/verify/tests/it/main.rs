//! Bundles that are whole, tampered with, and hostile.
#![allow(missing_docs)]

mod fixture;
mod hostile;
mod python;
mod tamper;
