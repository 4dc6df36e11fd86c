//! docs/record.md and docs/policy.md against the code: reasons, facts, rules.

use hotcell_decide::{Decision, Reason, Rule, ViolationKind};
use std::collections::BTreeSet;

fn page(name: &str) -> String {
    let path = format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let rest = page.split(&format!("\n## {heading}\n")).nth(1).expect(heading);
    rest.split("\n## ").next().unwrap()
}

/// Names between backticks in a column of the rows of a section.
fn column(section: &str, at: usize) -> Vec<String> {
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.map(|line| line.split('|').nth(at + 1).unwrap_or_default());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

fn violation(kind: ViolationKind) -> String {
    serde_json::to_value(kind).unwrap().as_str().unwrap().to_owned()
}

#[test]
fn the_page_lists_every_reason_to_kill() {
    let page = page("record.md");
    let section = section(&page, "When the switch trips");
    let listed: BTreeSet<String> =
        column(section, 0).into_iter().filter(|name| name != "violation").collect();
    let kinds: BTreeSet<String> = ViolationKind::ALL.iter().copied().map(violation).collect();
    let absolute = Reason::ALL.iter().filter(|reason| reason.is_absolute());
    let absolute = absolute.map(|reason| reason.name().to_owned()).filter(|name| !kinds.contains(name));
    assert_eq!(listed, absolute.collect());
    assert!(section.contains("the kinds of `violation`, each by its own name"));
    for reason in Reason::ALL.iter().filter(|reason| !reason.is_absolute()) {
        assert!(section.contains(&format!("`{}`", reason.name())), "{reason}");
    }
}

#[test]
fn the_page_of_reasons_says_of_each_what_the_program_says() {
    let page = page("reasons.md");
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let rows: Vec<String> = rows.map(str::to_owned).collect();
    let row = |reason: &Reason| format!("| `{reason}` | {} | {} |", reason.words(), reason.cure());
    assert_eq!(rows, Reason::ALL.iter().map(row).collect::<Vec<_>>());
}

#[test]
fn the_page_lists_every_rule_of_the_broker_and_its_answer() {
    let page = page("policy.md");
    let section = section(&page, "What the broker answers");
    let listed: BTreeSet<String> = column(section, 0).into_iter().collect();
    let rules: BTreeSet<String> = Rule::ALL.iter().map(|rule| rule.name().to_owned()).collect();
    assert_eq!(listed, rules);
    for (decision, rule) in [
        (Decision::Allow(Rule::WriteExact), "write_exact"),
        (Decision::Allow(Rule::WriteTree), "write_tree"),
        (Decision::Allow(Rule::SpawnAllowed), "spawn_allowed"),
        (Decision::Defer(Rule::PackageListed), "package_listed"),
    ] {
        assert!(section.contains(&format!("| `{rule}` | {} |", decision.verb())), "{rule}");
    }
    assert_eq!(section.matches(" | deny | ").count(), rules.len() - 4);
}
