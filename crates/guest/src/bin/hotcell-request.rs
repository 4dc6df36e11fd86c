//! Asks the host for a capability, from inside the workload.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(hotcell_guest::request(std::env::args_os().skip(1)))
}
