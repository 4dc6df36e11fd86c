//! The command that `hotcell verify` and `hotcell-verify` both are: the same flags, the same answer.
//!
//! Reads the files that the flags name; prints nothing. Exit codes: 0 intact, 1 not intact, 2 asked wrongly, 3 incomplete.

use crate::render::{to_json, to_text};
use crate::verify::{Options, verify_bundle};
use clap::Args;
use hotcell_ledger::VerifierKey;
use hotcell_ledger::file::{read_regular, read_regular_text};
use hotcell_ledger::note::MAX_NOTE_LEN;
use std::path::{Path, PathBuf};

/// Longest file of a public key that is read, bytes; one has some seventy.
const MAX_KEY_FILE: u64 = 4096;

/// What is asked.
#[derive(Debug, Args)]
pub struct Question {
    /// The record: its folder; for `hotcell verify` also the name of its run or the beginning of it.
    #[arg(value_name = "BUNDLE")]
    pub bundle: PathBuf,
    /// A checkpoint that was kept elsewhere; may be given several times.
    #[arg(long, value_name = "NOTE")]
    pub checkpoint: Vec<PathBuf>,
    /// A public key that you trust, as `hotcell key` shows it, or a file that holds one; may be given several times.
    #[arg(long, value_name = "PUBKEY")]
    pub key: Vec<String>,
    /// Print the result as JSON.
    #[arg(long)]
    pub json: bool,
}

/// What is answered.
#[derive(Debug)]
pub struct Answer {
    /// For standard output, with its last newline.
    pub text: String,
    /// What the command exits with.
    pub exit_code: u8,
}

/// A question that can't be answered: what is wrong with it, in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct AskedWrongly(String);

impl Question {
    /// Verifies. `own_key` is the asker's, where there is one.
    pub fn answer(&self, own_key: Option<VerifierKey>) -> Result<Answer, AskedWrongly> {
        let mut options = Options { own_key, trusted_keys: read_keys(&self.key)?, ..Options::default() };
        for path in &self.checkpoint {
            options.checkpoints.push((path.display().to_string(), read_note(path)?));
        }
        let verification = verify_bundle(&self.bundle, &options).map_err(|error| {
            let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
            AskedWrongly(format!("{error}{}", source.unwrap_or_default()))
        })?;
        let text = if self.json { format!("{}\n", to_json(&verification)) } else { to_text(&verification) };
        Ok(Answer { text, exit_code: verification.outcome().exit_code() })
    }
}

/// Reads what `--key` gave: each a key as text, or a file that holds one.
pub fn read_keys(texts: &[String]) -> Result<Vec<VerifierKey>, AskedWrongly> {
    let read = |text: &String| {
        VerifierKey::parse(text).or_else(|error| {
            let held = read_regular_text(Path::new(text), MAX_KEY_FILE).ok();
            let held = held.and_then(|held| VerifierKey::parse(held.trim()).ok());
            held.ok_or_else(|| AskedWrongly(format!("--key {text}: {error}")))
        })
    };
    texts.iter().map(read).collect()
}

fn read_note(path: &Path) -> Result<Vec<u8>, AskedWrongly> {
    let cap = u64::try_from(MAX_NOTE_LEN).unwrap_or(u64::MAX);
    read_regular(path, cap)
        .map_err(|error| AskedWrongly(format!("can't read the checkpoint {}: {error}", path.display())))
}
