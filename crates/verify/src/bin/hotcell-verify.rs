//! `hotcell-verify`: whether a bundle is what its run left, and what verdict its record gives.
//!
//! Depends on nothing of the VM side. Exit codes: 0 intact, 1 not intact, 2 asked wrongly, 3 incomplete.
#![forbid(unsafe_code)]

use clap::Parser;
use hotcell_verify::Question;
use std::io::Write as _;
use std::process::ExitCode;

/// What a command exits with when it was asked wrongly.
const USAGE: u8 = 2;

/// Verify a bundle: chain, signature, Gate 1, objects, files, and the verdict itself, from the record alone.
#[derive(Parser)]
#[command(version, after_help = "Exit codes: 0 intact, 1 not intact, 2 asked wrongly, 3 incomplete.")]
struct Cli {
    #[command(flatten)]
    question: Question,
}

fn main() -> ExitCode {
    match Cli::parse().question.answer(None) {
        Ok(answer) => {
            // A closed pipe is no reason to give another answer.
            let _ = std::io::stdout().write_all(answer.text.as_bytes());
            ExitCode::from(answer.exit_code)
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "hotcell-verify: {error}");
            ExitCode::from(USAGE)
        }
    }
}
