//! What `--watch` shows, as lines: no terminal here, so that tests read what people would see.
//!
//! Guarantees: bounded whatever the guest does (the constants below); every text that the guest chose is escaped, so that
//! no control character, no bidirectional mark and no line break of its own reaches a terminal; no line is wider than
//! asked for, counting what is not ASCII as two columns, which is never too few.

use crate::say;
use hotcell_runtime::{Glimpse, SeenProcess};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Changes, decisions and steps that are kept each: more than a screen has lines.
const KEPT: usize = 200;
/// Characters of a text of the guest that are kept.
const MAX_TEXT: usize = 400;
/// Processes of one look that are drawn at most.
const MAX_DRAWN: usize = 500;

/// A run as far as it is known.
#[derive(Debug, Default)]
pub(crate) struct View {
    run_id: String,
    step: String,
    processes: Vec<SeenProcess>,
    files: VecDeque<String>,
    files_total: u64,
    decisions: VecDeque<String>,
    decisions_total: u64,
    broken: VecDeque<String>,
    killed: Option<Vec<String>>,
    over: Option<(&'static str, Vec<String>)>,
    pub(crate) missed: u64,
}

/// A text of the guest as a terminal may have it.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => say::shown(&text[..end]) + "…",
        None => say::shown(text),
    }
}

/// Cut to this many columns.
pub(crate) fn cut(line: &str, columns: usize) -> String {
    let mut used = 0;
    let fits = |character: &char| {
        used += if character.is_ascii() { 1 } else { 2 };
        used <= columns
    };
    line.chars().take_while(fits).collect()
}

fn keep(list: &mut VecDeque<String>, line: String) {
    if list.len() >= KEPT {
        list.pop_front();
    }
    list.push_back(line);
}

fn process(one: &SeenProcess) -> String {
    let words = if one.argv.is_empty() { &one.name } else { &one.argv };
    format!("{} user {} {} ({})", one.pid, one.user, shown(words), shown(&one.executable))
}

impl View {
    pub(crate) fn new(run_id: &str) -> View {
        View { run_id: run_id.into(), step: "starting".into(), ..View::default() }
    }

    /// Takes one in. Gives the lines that tell of it, for whoever has no screen.
    pub(crate) fn take(&mut self, glimpse: Glimpse) -> Vec<String> {
        match glimpse {
            Glimpse::Step(text) => {
                self.step = shown(&text);
                vec![self.step.clone()]
            }
            Glimpse::Begun { exec, argv } => {
                self.step = format!("exec {exec} runs: {}", shown(&argv.join(" ")));
                vec![self.step.clone()]
            }
            Glimpse::Processes(now) => {
                let pids = |list: &[SeenProcess]| list.iter().map(process).collect::<BTreeSet<_>>();
                let (before, after) = (pids(&self.processes), pids(&now));
                self.processes = now;
                let ended = before.difference(&after).map(|line| format!("process gone {line}"));
                ended.chain(after.difference(&before).map(|line| format!("process {line}"))).collect()
            }
            Glimpse::File { op, path } => {
                let line = format!("{} {}", format!("{op:?}").to_lowercase(), shown(&path));
                self.files_total += 1;
                keep(&mut self.files, line.clone());
                vec![format!("file {line}")]
            }
            Glimpse::FilesCounted(count) => {
                self.files_total += count;
                let line = format!("{count} more changes, counted");
                keep(&mut self.files, line.clone());
                vec![format!("file {line}")]
            }
            Glimpse::Decision { capability, resource, answer, rule } => {
                let line = format!("{answer} {} {} ({rule})", capability.as_str(), shown(&resource));
                self.decisions_total += 1;
                keep(&mut self.decisions, line.clone());
                vec![format!("decision {line}")]
            }
            Glimpse::Broken { reason, detail } => {
                let line = format!("BROKEN {reason}: {}", shown(&detail));
                keep(&mut self.broken, line.clone());
                vec![line]
            }
            Glimpse::Killed(reasons) => {
                let line = format!("KILLED: {}", reasons.join(", "));
                self.killed = Some(reasons);
                vec![line]
            }
            Glimpse::Over { verdict, reasons } => {
                let line = format!("verdict {verdict} {}", reasons.join(", "));
                self.over = Some((verdict, reasons));
                vec![line.trim_end().to_owned()]
            }
            _ => Vec::new(),
        }
    }

    /// What is known of the verdict.
    pub(crate) fn state(&self) -> String {
        match (&self.over, &self.killed) {
            (Some((verdict, reasons)), _) if reasons.is_empty() => (*verdict).to_owned(),
            (Some((verdict, reasons)), _) => format!("{verdict}: {}", reasons.join(", ")),
            (None, Some(reasons)) => format!("KILLED: {}", reasons.join(", ")),
            (None, None) if !self.broken.is_empty() => "a rule broke".into(),
            (None, None) => "no rule broken".into(),
        }
    }

    /// The whole screen: at most so many lines of at most so many columns. The first is the headline.
    pub(crate) fn draw(
        &self,
        since: Duration,
        output: &[String],
        rows: usize,
        columns: usize,
    ) -> Vec<String> {
        let mut lines = vec![
            format!("hotcell {}  {:.1} s  {}", self.run_id, since.as_secs_f64(), self.state()),
            self.step.clone(),
        ];
        lines.extend(self.broken.iter().take(3).cloned());
        if self.missed > 0 {
            lines.push(format!("{} moments came too fast to be shown; the record has them", self.missed));
        }
        let left = rows.saturating_sub(lines.len());
        let part = |share: usize| (left * share / 8).saturating_sub(1);
        let tree = tree(&self.processes);
        let (count, most) = (self.processes.len(), part(3));
        section(&mut lines, &format!("processes: {count}"), most, tree.into_iter(), count);
        let newest = |list: &VecDeque<String>, most: usize| {
            list.iter().skip(list.len().saturating_sub(most)).cloned().collect::<Vec<_>>()
        };
        for (title, list, total) in [
            ("files changed on the disk", &self.files, self.files_total),
            ("decisions", &self.decisions, self.decisions_total),
        ] {
            let most = part(if title == "decisions" { 1 } else { 2 });
            section(&mut lines, &format!("{title}: {total}"), most, newest(list, most).into_iter(), 0);
        }
        let rest = rows.saturating_sub(lines.len() + 1);
        let skip = output.len().saturating_sub(rest);
        section(&mut lines, "output", rest, output.iter().skip(skip).cloned(), 0);
        lines.truncate(rows);
        lines.iter().map(|line| cut(line, columns)).collect()
    }
}

/// A title and at most so many lines; where there are `count` and not all fit, the last says how many do not.
fn section(
    lines: &mut Vec<String>,
    title: &str,
    most: usize,
    all: impl Iterator<Item = String>,
    count: usize,
) {
    lines.push(format!("── {title} ──"));
    if count > most && most > 0 {
        lines.extend(all.take(most - 1));
        lines.push(format!("  and {} more", count - (most - 1)));
    } else {
        lines.extend(all.take(most));
    }
}

/// Parents before their children, which are further in. Whatever the guest says who whose child is, each process is
/// there once.
fn tree(processes: &[SeenProcess]) -> Vec<String> {
    let known: BTreeSet<i32> = processes.iter().map(|one| one.pid).collect();
    let mut children: BTreeMap<i32, Vec<&SeenProcess>> = BTreeMap::new();
    let mut roots = Vec::new();
    for one in processes.iter().take(MAX_DRAWN) {
        if known.contains(&one.parent) && one.parent != one.pid {
            children.entry(one.parent).or_default().push(one);
        } else {
            roots.push(one);
        }
    }
    let mut lines = Vec::new();
    let mut walk = |from: Vec<&SeenProcess>, children: &mut BTreeMap<i32, Vec<&SeenProcess>>| {
        let mut next: Vec<(usize, &SeenProcess)> = from.into_iter().rev().map(|one| (0, one)).collect();
        while let Some((depth, one)) = next.pop() {
            lines.push(format!("  {}{}", "  ".repeat(depth.min(20)), process(one)));
            let below = children.remove(&one.pid).unwrap_or_default();
            next.extend(below.into_iter().rev().map(|child| (depth + 1, child)));
        }
    };
    walk(roots, &mut children);
    // A circle of parents has no root.
    while let Some((_, circle)) = children.pop_first() {
        walk(circle, &mut children);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(pid: i32, parent: i32, argv: &str) -> SeenProcess {
        let (name, executable) = ("x".to_owned(), "/bin/x".to_owned());
        SeenProcess { pid, parent, user: 1000, name, executable, argv: argv.into() }
    }

    fn screen(view: &View, rows: usize, columns: usize) -> Vec<String> {
        view.draw(Duration::from_secs(1), &["out".into()], rows, columns)
    }

    #[test]
    fn a_tree_has_children_below_their_parents_and_everybody_once_whatever_is_said() {
        let mut view = View::new("run-1");
        view.take(Glimpse::Processes(vec![
            seen(9, 4, "child"),
            seen(4, 1, "top"),
            seen(12, 9, "grandchild"),
        ]));
        let lines = screen(&view, 40, 200);
        let at = |text: &str| lines.iter().position(|line| line.contains(text)).unwrap();
        assert!(at("top") < at("child") && at("child") < at("grandchild"), "{lines:#?}");
        assert!(lines[at("grandchild")].starts_with("      "), "{lines:#?}");
        // Its own parent, and a circle.
        let circle = vec![seen(1, 1, "self"), seen(2, 3, "a"), seen(3, 2, "b"), seen(3, 2, "again")];
        assert_eq!(tree(&circle).len(), 4);
    }

    #[test]
    fn nothing_of_the_guest_reaches_the_terminal_as_it_is() {
        let mut view = View::new("run-1");
        let hostile = "a\x1b[2J\r\n\u{202e}\u{9b}31m\u{7f}b";
        let told = [
            view.take(Glimpse::Processes(vec![SeenProcess {
                name: hostile.into(),
                executable: hostile.into(),
                ..seen(2, 1, hostile)
            }])),
            view.take(Glimpse::File { op: hotcell_ledger::FileOp::Create, path: hostile.into() }),
            view.take(Glimpse::Step(hostile.into())),
            view.take(Glimpse::Broken { reason: "x".into(), detail: hostile.into() }),
            view.take(Glimpse::Begun { exec: 1, argv: vec![hostile.into()] }),
        ];
        let lines: Vec<String> = told.into_iter().flatten().chain(screen(&view, 40, 300)).collect();
        assert!(lines.iter().filter(|line| line.contains("\\u{1b}[2J")).count() >= 8, "{lines:#?}");
        for line in &lines {
            assert!(!line.chars().any(|c| c.is_control() || c == '\u{202e}'), "{line:?}");
        }
    }

    #[test]
    fn a_screen_is_never_larger_than_asked_for_and_a_flood_costs_no_memory() {
        let mut view = View::new("run-1");
        for number in 0..5000 {
            view.take(Glimpse::File { op: hotcell_ledger::FileOp::Write, path: "ü".repeat(3000) });
            view.take(Glimpse::Broken { reason: "r".into(), detail: number.to_string() });
        }
        view.take(Glimpse::Processes((1..3000).map(|pid| seen(pid, pid - 1, "deep")).collect()));
        for (rows, columns) in [(0, 0), (1, 5), (7, 20), (24, 80), (200, 300)] {
            let lines = screen(&view, rows, columns);
            assert!(lines.len() <= rows, "{rows}: {lines:#?}");
            assert!(lines.iter().all(|line| line.chars().count() <= columns), "{columns}");
        }
        assert!(view.files.len() <= KEPT && view.broken.len() <= KEPT);
        assert!(view.files.iter().all(|line| line.chars().count() < MAX_TEXT + 20));
        assert!(screen(&view, 24, 80).iter().any(|line| line.contains("more")), "what is left out is said");
    }

    #[test]
    fn the_headline_says_how_it_stands() {
        let mut view = View::new("run-1");
        assert_eq!(view.state(), "no rule broken");
        view.take(Glimpse::Broken { reason: "module_loaded".into(), detail: "x".into() });
        assert_eq!(view.state(), "a rule broke");
        view.take(Glimpse::Killed(vec!["module_loaded".into()]));
        assert_eq!(view.state(), "KILLED: module_loaded");
        view.take(Glimpse::Over { verdict: "ALLOWED", reasons: Vec::new() });
        assert_eq!(view.state(), "ALLOWED");
    }
}
