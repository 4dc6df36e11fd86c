//! `hotcell profile`: fingerprints of how an agent asks, absorbed from records.

use crate::exit::Fatal;
use crate::{records, say};
use hotcell_advisory::{Fingerprint, FingerprintDraft};
use hotcell_ledger::ClosedLedger;
use hotcell_ledger::file::read_regular;
use hotcell_verify::{Options, verify_bundle};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Largest fingerprint file that is read.
const MAX_FILE: u64 = 1 << 20;

/// Absorbs records into a new fingerprint file. Only intact records count.
pub(crate) fn absorb(bundles: &[PathBuf], out: &Path) -> Result<ExitCode, Fatal> {
    let mut draft = FingerprintDraft::new();
    for bundle in bundles {
        let bundle = &records::find(bundle)?;
        let verification = verify_bundle(bundle, &Options::default()).map_err(Fatal::usage)?;
        if verification.into_verified().is_err() {
            let bundle = bundle.display();
            return Err(Fatal::failed(format!("{bundle} is not intact: see `hotcell verify {bundle}`")));
        }
        let ledger = ClosedLedger::open(bundle.join("ledger.ames")).map_err(Fatal::failed)?;
        draft.absorb(&ledger).map_err(|error| Fatal::failed(format!("{}: {error}", bundle.display())))?;
    }
    let fingerprint = draft.seal().map_err(Fatal::failed)?;
    let mut file = File::create_new(out)
        .map_err(|error| Fatal::failed(format!("can't make the fingerprint {}: {error}", out.display())))?;
    file.write_all(&fingerprint.to_bytes())
        .map_err(|error| Fatal::failed(format!("can't write {}: {error}", out.display())))?;
    let (out, digest) = (out.display(), fingerprint.digest());
    let runs = hotcell_verify::counted(fingerprint.runs() as u64, "run");
    say::line(format_args!("{out} of {runs}, digest {digest}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Reads a fingerprint file.
pub(crate) fn read(path: &Path) -> Result<Fingerprint, Fatal> {
    let bytes = read_regular(path, MAX_FILE)
        .map_err(|error| Fatal::failed(format!("can't read the fingerprint {}: {error}", path.display())))?;
    Fingerprint::from_bytes(&bytes).map_err(|error| Fatal::failed(format!("{}: {error}", path.display())))
}
