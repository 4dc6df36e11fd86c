//! Tests of the ledger against its vectors, its failures and its enemies.
#![allow(missing_docs)]

mod codec;
mod file;
mod gate1;
mod generate;
mod note;
mod vectors;
