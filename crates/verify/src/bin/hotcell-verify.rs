//! `hotcell-verify`: whether a bundle is what its run left, and what verdict its record gives.
//!
//! Depends on nothing of the VM side. Exit codes: 0 intact, 1 not intact, 2 asked wrongly, 3 incomplete.
#![forbid(unsafe_code)]

use clap::Parser;
use hotcell_ledger::VerifierKey;
use hotcell_verify::{Options, to_json, to_text, verify_bundle};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What a command exits with when it was asked wrongly.
const USAGE: u8 = 2;

/// Verify a bundle: chain, signature, Gate 1, objects, files, and the verdict itself, from the record alone.
#[derive(Parser)]
#[command(version, after_help = "Exit codes: 0 intact, 1 not intact, 2 asked wrongly, 3 incomplete.")]
struct Args {
    /// The directory that a run left
    bundle: PathBuf,
    /// A checkpoint note that was kept elsewhere; may be given several times
    #[arg(long, value_name = "NOTE")]
    checkpoint: Vec<PathBuf>,
    /// The key that notes must be signed with, as `hotcell key` prints it, or a file that holds it; may be given several times
    #[arg(long, value_name = "VKEY")]
    key: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn read_note(path: &Path) -> Result<Vec<u8>, String> {
    let cap = u64::try_from(hotcell_ledger::note::MAX_NOTE_LEN).unwrap_or(u64::MAX).saturating_add(1);
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(cap).read_to_end(&mut bytes))
        .map_err(|error| format!("failed to read the checkpoint {}: {error}", path.display()))?;
    Ok(bytes)
}

fn read_key(text: &str) -> Result<VerifierKey, String> {
    VerifierKey::parse(text).or_else(|error| {
        let held = std::fs::read_to_string(text).map_err(|_| format!("--key {text}: {error}"))?;
        VerifierKey::parse(held.trim()).map_err(|error| format!("--key {text}: {error}"))
    })
}

fn run(args: &Args) -> Result<u8, String> {
    let mut options = Options::default();
    for path in &args.checkpoint {
        options.checkpoints.push((path.display().to_string(), read_note(path)?));
    }
    for key in &args.key {
        options.trusted_keys.push(read_key(key)?);
    }
    let verification = verify_bundle(&args.bundle, &options).map_err(|error| {
        let source = std::error::Error::source(&error).map(|s| format!(": {s}")).unwrap_or_default();
        format!("{error}{source}")
    })?;
    let text = if args.json { format!("{}\n", to_json(&verification)) } else { to_text(&verification) };
    // A closed pipe is no reason to give another answer.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(verification.outcome().exit_code())
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "hotcell-verify: {error}");
            ExitCode::from(USAGE)
        }
    }
}
