//! `hotcell report`.

use crate::exit::Fatal;
use crate::{records, say};
use hotcell_verify::{Options, verify_bundle};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Writes the page of an intact bundle; of no other.
pub(crate) fn report(bundle: &Path, out: Option<&Path>) -> Result<ExitCode, Fatal> {
    let bundle = &records::find(bundle)?;
    let options = Options { own_key: crate::verify::own_key(), ..Options::default() };
    let verification = verify_bundle(bundle, &options).map_err(Fatal::usage)?;
    let verified = verification.into_verified().map_err(|verification| {
        let code = verification.outcome().exit_code();
        let (bundle, outcome) = (records::name_of(bundle), verification.outcome().as_str());
        Fatal::with_code(
            code,
            format!("{bundle} is {outcome}: no page is made of it. See `hotcell verify {bundle}`"),
        )
    })?;
    let page = hotcell_report::render(&verified).map_err(Fatal::failed)?;
    match out {
        Some(path) => File::create(path)
            .and_then(|mut file| file.write_all(page.as_bytes()))
            .map_err(|error| Fatal::failed(format!("can't write the page to {}: {error}", path.display())))?,
        None => say::text_as_is(&page)?,
    }
    Ok(ExitCode::SUCCESS)
}
