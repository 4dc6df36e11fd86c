//! `hotcell verify` and `hotcell key`.

use crate::args;
use crate::exit::{Fatal, USAGE};
use crate::home::Home;
use hotcell_ledger::{SigningKey, VerifierKey, note::MAX_NOTE_LEN};
use hotcell_verify::{Options, to_json, to_text, verify_bundle};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

pub(crate) fn verify(args: &args::Verify) -> Result<ExitCode, Fatal> {
    let mut options = Options { own_key: own_key(), ..Options::default() };
    for path in &args.checkpoint {
        options.checkpoints.push((path.display().to_string(), read_note(path)?));
    }
    for key in &args.key {
        options.trusted_keys.push(read_key(key)?);
    }
    let verification = verify_bundle(&args.bundle, &options).map_err(|error| {
        let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
        Fatal::with_code(USAGE, format!("{error}{}", source.unwrap_or_default()))
    })?;
    if args.json {
        println!("{}", to_json(&verification));
    } else {
        print!("{}", to_text(&verification));
    }
    Ok(ExitCode::from(verification.outcome().exit_code()))
}

pub(crate) fn key() -> Result<ExitCode, Fatal> {
    let home = Home::from_env().map_err(Fatal::failed)?;
    let key = SigningKey::load_or_create(&home.key()).map_err(Fatal::failed)?;
    println!("{}", key.public());
    Ok(ExitCode::SUCCESS)
}

/// The local user's key, where there is one; verifying makes none.
pub(crate) fn own_key() -> Option<VerifierKey> {
    let home = Home::from_env().ok()?;
    SigningKey::load(&home.key()).ok().map(|key| key.public().clone())
}

fn read_note(path: &Path) -> Result<Vec<u8>, Fatal> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_NOTE_LEN as u64 + 1).read_to_end(&mut bytes))
        .map_err(|error| Fatal::usage(format!("can't read the checkpoint {}: {error}", path.display())))?;
    Ok(bytes)
}

/// A key as text, or a file that holds one.
pub(crate) fn read_key(text: &str) -> Result<VerifierKey, Fatal> {
    VerifierKey::parse(text).or_else(|error| {
        let held = std::fs::read_to_string(text).ok().and_then(|held| VerifierKey::parse(held.trim()).ok());
        held.ok_or_else(|| Fatal::usage(format!("--key {text}: {error}")))
    })
}
