//! Records by their runs' names: what `hotcell ps --all` lists, and what commands take in place of a folder.
//!
//! What it guarantees: a path is taken as it is; only what is none is looked for among the records of the `runs` folder. Nothing
//! that stands in a record is believed: a verdict is told as what its report says.

use crate::exit::Fatal;
use crate::home::Home;
use hotcell_ledger::bundle::BundleDir;
use serde::Serialize;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

/// Largest report that is read for its verdict.
const MAX_REPORT: usize = 16 << 20;
/// Runs that are named where a name means several.
const SHOWN: usize = 5;

/// The folder that is meant: a path; or a run by its name, or by an unambiguous beginning of it.
pub(crate) fn find(asked: &Path) -> Result<PathBuf, Fatal> {
    if asked.symlink_metadata().is_ok() {
        return Ok(asked.to_owned());
    }
    find_in(&Home::from_env().map_err(Fatal::failed)?.runs(), asked)
}

fn find_in(runs: &Path, asked: &Path) -> Result<PathBuf, Fatal> {
    let mut parts = asked.components();
    let (Some(Component::Normal(name)), None, Some(name_text)) = (parts.next(), parts.next(), asked.to_str())
    else {
        return Err(Fatal::usage(format_args!("there is no {}", asked.display())));
    };
    if runs.join(name).is_dir() {
        return Ok(runs.join(name));
    }
    let mut meant: Vec<String> = names(runs).into_iter().filter(|name| name.starts_with(name_text)).collect();
    match meant.len() {
        0 => Err(Fatal::usage(format_args!(
            "there is no folder `{name_text}` here, and no run of this name: `hotcell ps --all` lists the runs, and a record \
             elsewhere is given by its folder"
        ))),
        1 => Ok(runs.join(meant.remove(0))),
        count => {
            meant.truncate(SHOWN);
            let more = if count > SHOWN { ", …" } else { "" };
            let shown = meant.join(", ");
            Err(Fatal::usage(format_args!("`{name_text}` means {count} runs: {shown}{more}")))
        }
    }
}

/// What a record is called in a command: its run's name where that finds it, else its folder.
pub(crate) fn name_of(bundle: &Path) -> String {
    let name = bundle.file_name().and_then(|name| name.to_str());
    match name.filter(|name| find(Path::new(name)).is_ok_and(|found| found == bundle)) {
        Some(name) => name.to_owned(),
        None => bundle.display().to_string(),
    }
}

fn names(runs: &Path) -> Vec<String> {
    let entries = fs::read_dir(runs).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// A record of the `runs` folder whose run is over.
#[derive(Debug, Serialize)]
pub(crate) struct Ended {
    pub(crate) run_id: String,
    pub(crate) bundle: PathBuf,
    /// As the report says it, which nobody has checked; none where the run left none.
    pub(crate) reported: Option<String>,
    /// Seconds since something was last written to it.
    pub(crate) age_s: u64,
}

/// Names of all runs of the folder but the `live` ones.
pub(crate) fn over(home: &Home, live: &[&str]) -> Vec<String> {
    let mut names = names(&home.runs());
    names.retain(|name| !live.contains(&name.as_str()));
    names
}

/// All of these, the newest first.
pub(crate) fn ended(home: &Home, over: Vec<String>) -> Vec<Ended> {
    let runs = home.runs();
    let mut all: Vec<Ended> = over
        .into_iter()
        .map(|run_id| {
            let bundle = runs.join(&run_id);
            let written = fs::metadata(&bundle).and_then(|metadata| metadata.modified());
            let age = written.ok().and_then(|at| SystemTime::now().duration_since(at).ok());
            let age_s = age.unwrap_or_default().as_secs();
            Ended { run_id, reported: reported(&bundle), bundle, age_s }
        })
        .collect();
    all.sort_by(|a, b| a.age_s.cmp(&b.age_s).then_with(|| a.run_id.cmp(&b.run_id)));
    all
}

fn reported(bundle: &Path) -> Option<String> {
    let bytes = BundleDir::open(bundle).ok()?.read(b"report.json", MAX_REPORT).ok()?;
    let report: serde_json::Value = serde_json::from_slice(&bytes).ok()?;
    report.get("verdict")?.as_str().map(str::to_owned)
}

/// A time as people say it.
pub(crate) fn ago(seconds: u64) -> String {
    let (count, unit) = match seconds {
        0..60 => (seconds, "s"),
        60..3600 => (seconds / 60, "min"),
        3600..86_400 => (seconds / 3600, "h"),
        _ => (seconds / 86_400, "d"),
    };
    format!("{count} {unit} ago")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_found_by_its_name_or_an_unambiguous_beginning_of_it() {
        let home = tempfile::tempdir().unwrap();
        let runs = home.path();
        let find = |name: &str| find_in(runs, Path::new(name)).map_err(|error| error.to_string());
        for name in ["run-0aa1", "run-0ab2", "run-0a", "first"] {
            fs::create_dir(runs.join(name)).unwrap();
        }
        fs::write(runs.join("file"), "").unwrap();
        assert_eq!(find("run-0ab"), Ok(runs.join("run-0ab2")));
        assert_eq!(find("f"), Ok(runs.join("first")));
        assert_eq!(find("run-0a"), Ok(runs.join("run-0a")), "a whole name goes before a beginning");
        assert!(find("run-").unwrap_err().contains("means 3 runs: run-0a, run-0aa1, run-0ab2"));
        for number in 0..9 {
            fs::create_dir(runs.join(format!("many-{number}"))).unwrap();
        }
        let many = find("many").unwrap_err();
        assert!(many.contains("means 9 runs: ") && many.ends_with("many-4, …"), "{many}");
        for none in ["x", "file", "", ".", "..", "../first", "a/first", "/first"] {
            assert!(find(none).is_err(), "{none:?}");
        }
        // A path is taken as it is, whatever runs there are.
        assert_eq!(super::find(&runs.join("file")).ok(), Some(runs.join("file")));
    }

    #[test]
    fn ended_runs_are_listed_with_what_their_reports_say_and_live_ones_are_not() {
        let home = tempfile::tempdir().unwrap();
        let home = Home::below(home.path());
        for (name, report) in [("run-a", r#"{"verdict":"KILLED"}"#), ("run-b", "no json"), ("run-live", "{}")]
        {
            fs::create_dir_all(home.runs().join(name)).unwrap();
            fs::write(home.runs().join(name).join("report.json"), report).unwrap();
        }
        fs::create_dir_all(home.runs().join("run-c")).unwrap();
        let mut found: Vec<(String, Option<String>)> =
            ended(&home, over(&home, &["run-live"])).into_iter().map(|it| (it.run_id, it.reported)).collect();
        found.sort();
        let expected = [("run-a", Some("KILLED")), ("run-b", None), ("run-c", None)];
        assert_eq!(found, expected.map(|(name, said)| (name.to_owned(), said.map(str::to_owned))));
        assert_eq!(
            (ago(59), ago(60), ago(7300), ago(90_000)),
            ("59 s ago".into(), "1 min ago".into(), "2 h ago".into(), "1 d ago".into())
        );
    }
}
