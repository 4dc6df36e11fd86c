//! What is said at a run's end: why the command ended as it did, the verdict in one line, and where that is not ALLOWED what broke,
//! what to do and where to see it.

use crate::{records, say};
use hotcell_ledger::bundle::NOTE;
use hotcell_runtime::{ExecHow, ExecResult, RunReport};
use hotcell_verify::Verdict;

/// A command that is not there, and one that may not be executed, as in a shell.
const NOT_THERE: i32 = 127;
const NOT_ALLOWED: i32 = 126;

pub(crate) fn say(image: &str, report: &RunReport, result: Option<&ExecResult>) {
    if let Some(why) = result.and_then(|result| why_ended(image, result)) {
        say::note(why);
    }
    if let Some(error) = &report.error
        && !report.explained.iter().any(|text| text.contains(error.as_str()))
    {
        say::note(error);
    }
    say::note(verdict(report));
    if let Some(line) = afterword(report) {
        say::note(line);
    }
}

/// Of a command that did not end by itself.
fn why_ended(image: &str, result: &ExecResult) -> Option<String> {
    match (&result.not_started, result.how) {
        (Some(why), _) => Some(format!("{why}{}", program_hint(image, why, result.code).unwrap_or_default())),
        (None, ExecHow::Oom) => Some(
            "the command ran out of memory: [limits] memory_mib in a policy gives the machine more".into(),
        ),
        (None, ExecHow::TimedOut) => Some(
            "the time limit ended the command: --timeout, or [limits] timeout_s in a policy, gives more"
                .into(),
        ),
        _ => None,
    }
}

/// What whoever starts a program that is not there may have overlooked.
fn program_hint(image: &str, why: &str, code: i32) -> Option<String> {
    let program = why.strip_prefix("can't execute ")?;
    match code {
        NOT_THERE if program.split(": ").next()?.contains(' ') => {
            Some(". It is one word with blanks: leave the quotes out, or run it by /bin/sh -c".to_owned())
        }
        NOT_THERE => Some(format!(
            ". The image {image} has no such program: `--image` takes another image, `--put` copies files in"
        )),
        NOT_ALLOWED => Some(
            ". Only programs of the image execute, unless the policy says [exec] workspace = \"allow\"; \
             a script runs by its interpreter, as /bin/sh FILE"
                .to_owned(),
        ),
        _ => None,
    }
}

fn verdict(report: &RunReport) -> String {
    let mut line = report.verdict.to_string();
    if !report.kill.reasons.is_empty() {
        line.push_str(&format!(" ({})", report.kill.reasons.join(", ")));
    }
    if report.timed_out {
        line.push_str(", timed out");
    }
    if let Some(signal) = report.interrupted {
        line.push_str(&format!(", stopped by signal {signal}"));
    }
    if !report.isolation.accel.is_empty() {
        line.push_str(&format!(", {} under {}", report.isolation.backend, report.isolation.accel));
    }
    line.push_str(match (report.teardown.verified, &report.bundle) {
        (true, Some(_)) => ", machine gone",
        (true, None) => ", no machine was made",
        (false, _) => ", MACHINE NOT KNOWN TO BE GONE",
    });
    if let Some(bundle) = &report.bundle {
        line.push_str(&format!(", record: {}", bundle.display()));
    }
    line
}

/// Of a run that is not ALLOWED.
fn afterword(report: &RunReport) -> Option<String> {
    if report.verdict == Verdict::Allowed {
        return None;
    }
    let mut parts: Vec<String> = report.explained.iter().take(1).cloned().collect();
    if let Some(bundle) = &report.bundle {
        let name = records::name_of(bundle);
        // A page is made of what was sealed alone.
        parts.push(match bundle.join(NOTE).is_file() {
            true => format!("All of it: `hotcell report {name} -o run.html`"),
            false => format!("What there is of it: `hotcell verify {name}`"),
        });
    }
    (!parts.is_empty()).then(|| parts.join(" "))
}
