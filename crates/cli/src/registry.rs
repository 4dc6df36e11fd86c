//! `hotcell ps` and `hotcell reap`.

use crate::args;
use crate::exit::Fatal;
use crate::home::Home;
use crate::{records, say};
use hotcell_verify::counted;
use hotcell_vm::Registry;
use std::process::ExitCode;

fn registry(home: &Home) -> Result<Registry, Fatal> {
    Registry::open(&home.registry()).map_err(Fatal::failed)
}

pub(crate) fn ps(args: &args::Ps) -> Result<ExitCode, Fatal> {
    let home = Home::from_env().map_err(Fatal::failed)?;
    let runs = registry(&home)?.list().map_err(Fatal::failed)?;
    let known: Vec<&str> = runs.iter().map(|run| run.run_id.as_str()).collect();
    let over = records::over(&home, &known);
    let count = over.len();
    // Reading what each says takes time, so only where it is asked for.
    let over = if args.all { records::ended(&home, over) } else { Vec::new() };
    if args.json {
        let mut value = serde_json::json!({ "runs": runs });
        if args.all {
            value["ended"] = serde_json::json!(over);
        }
        say::json(&value)?;
        return Ok(ExitCode::SUCCESS);
    }
    if runs.is_empty() && over.is_empty() {
        let rest = match count {
            0 => String::new(),
            count => format!("; `hotcell ps --all` lists {}", counted(count as u64, "ended run")),
        };
        say::line(format_args!("no run is live, and none was left behind{rest}"))?;
    }
    for run in &runs {
        let state = if run.live { "live" } else { "orphaned (hotcell reap ends it)" };
        let vmm = run.entry.as_ref().and_then(|entry| entry.vmm.as_ref());
        let vmm = vmm.map_or_else(|| "no VMM".to_owned(), |vmm| format!("VMM {}", vmm.pid));
        say::line(format_args!("{}  {state}  {vmm}", run.run_id))?;
    }
    for run in &over {
        // The report is anybody's to write.
        let said = match &run.reported {
            Some(verdict) => format!("{verdict}, says its report"),
            None => "no report: its hotcell was killed".to_owned(),
        };
        say::line(format_args!("{}  over  {}  {said}", run.run_id, records::ago(run.age_s)))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn reap(json: bool) -> Result<ExitCode, Fatal> {
    let reaped = registry(&Home::from_env().map_err(Fatal::failed)?)?.reap().map_err(Fatal::failed)?;
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
