//! `hotcell ps` and `hotcell reap`.

use crate::exit::Fatal;
use crate::home::Home;
use crate::say;
use hotcell_vm::Registry;
use std::process::ExitCode;

fn registry() -> Result<Registry, Fatal> {
    let home = Home::from_env().map_err(Fatal::failed)?;
    Registry::open(&home.registry()).map_err(Fatal::failed)
}

pub(crate) fn ps(json: bool) -> Result<ExitCode, Fatal> {
    let runs = registry()?.list().map_err(Fatal::failed)?;
    if json {
        say::json(&serde_json::json!({ "runs": runs }))?;
        return Ok(ExitCode::SUCCESS);
    }
    if runs.is_empty() {
        say::line("no run is live, and none was left behind")?;
    }
    for run in runs {
        let state = if run.live { "live" } else { "orphaned (hotcell reap ends it)" };
        let vmm = run.entry.as_ref().and_then(|entry| entry.vmm.as_ref());
        let vmm = vmm.map_or_else(|| "no VMM".to_owned(), |vmm| format!("VMM {}", vmm.pid));
        say::line(format_args!("{}  {state}  {vmm}", run.run_id))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn reap(json: bool) -> Result<ExitCode, Fatal> {
    let reaped = registry()?.reap().map_err(Fatal::failed)?;
    let clean = reaped.iter().all(|run| run.clean);
    if json {
        say::json(&serde_json::json!({ "reaped": reaped, "clean": clean }))?;
    } else {
        if reaped.is_empty() {
            say::line("nothing was left behind")?;
        }
        for run in &reaped {
            say::line(format_args!("{}: {}", run.run_id, run.actions.join("; ")))?;
        }
    }
    if clean { Ok(ExitCode::SUCCESS) } else { Err(Fatal::failed("something could not be ended (see above)")) }
}
