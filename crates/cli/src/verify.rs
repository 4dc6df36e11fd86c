//! `hotcell verify` and `hotcell key`.

use crate::exit::Fatal;
use crate::home::Home;
use crate::{records, say};
use hotcell_ledger::{SigningKey, VerifierKey};
use hotcell_verify::Question;
use std::process::ExitCode;

pub(crate) fn verify(mut question: Question) -> Result<ExitCode, Fatal> {
    question.bundle = records::find(&question.bundle)?;
    let answer = question.answer(own_key()).map_err(Fatal::usage)?;
    say::text_as_is(&answer.text)?;
    Ok(ExitCode::from(answer.exit_code))
}

pub(crate) fn key() -> Result<ExitCode, Fatal> {
    let home = Home::from_env().map_err(Fatal::failed)?;
    let key = SigningKey::load_or_create(&home.key()).map_err(Fatal::failed)?;
    say::line(key.public())?;
    Ok(ExitCode::SUCCESS)
}

/// The local user's key, where there is one; verifying makes none.
pub(crate) fn own_key() -> Option<VerifierKey> {
    let home = Home::from_env().ok()?;
    SigningKey::load(&home.key()).ok().map(|key| key.public().clone())
}
