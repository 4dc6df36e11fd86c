//! The walls between the crates, read off `cargo metadata`: dependencies of every kind, dev and build ones too.
//!
//! What is allowed stands in ARCHITECTURE.md's table of crates, which this test reads; everything else is a failure
//! that names the edge. The check itself is tested on graphs that are wrong.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

mod common;

/// How the sentence of a crate begins that does not exist.
const NOT_YET: &str = "not yet: ";

/// A row of ARCHITECTURE.md's table.
#[derive(Debug)]
struct Crate {
    sentence: String,
    /// Which of our crates it may name, in any kind of dependency.
    may_use: BTreeSet<String>,
    /// What its tests may name beyond that.
    tests_may_use: BTreeSet<String>,
}

type Table = BTreeMap<String, Crate>;

fn table() -> Table {
    let rows = common::table(&common::read("ARCHITECTURE.md"), "## Crates");
    assert_eq!(rows[0], ["crate", "in one sentence", "may use", "its tests also"]);
    let names = |cell: &str| common::code(cell).into_iter().collect();
    rows[1..]
        .iter()
        .map(|row| {
            let row_of =
                Crate { sentence: row[1].clone(), may_use: names(&row[2]), tests_may_use: names(&row[3]) };
            (common::code(&row[0]).remove(0), row_of)
        })
        .collect()
}

/// Named as a dev-dependency alone, by whoever wants it.
const DEV_ONLY: &str = "testkit";

/// One dependency: who, whom, and whether for tests only.
type Edge = (String, String, bool);

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn short(name: &str) -> Option<String> {
    name.strip_prefix("hotcell-").map(str::to_owned)
}

fn edges() -> Vec<Edge> {
    let metadata = metadata();
    let mut edges = Vec::new();
    for package in metadata["packages"].as_array().unwrap() {
        let from = short(package["name"].as_str().unwrap()).expect("every crate is called hotcell-…");
        for dependency in package["dependencies"].as_array().unwrap() {
            if let Some(to) = short(dependency["name"].as_str().unwrap()) {
                edges.push((from.clone(), to, dependency["kind"] == "dev"));
            }
        }
    }
    edges
}

/// Everything that is wrong with a graph.
fn faults(edges: &[Edge], table: &Table) -> Vec<String> {
    let mut named: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut faults = Vec::new();
    for (from, to, dev) in edges {
        named.entry(from).or_default().insert(to);
        let Some(row) = table.get(from.as_str()) else {
            faults.push(format!("{from} is not in the table"));
            continue;
        };
        let in_tests = *dev && row.tests_may_use.contains(to);
        if to == DEV_ONLY {
            if !dev {
                faults.push(format!("{from} names {to}, which is for tests alone"));
            }
        } else if !row.may_use.contains(to) && !in_tests {
            faults.push(format!("{from} names {to}"));
        }
    }
    for (from, to) in &named {
        if to.contains("decide") && to.contains("advisory") {
            faults.push(format!("{from} names both decide and advisory"));
        }
    }
    for (from, forbidden) in [("decide", "advisory"), ("advisory", "decide")] {
        if reach(from, &named).contains(forbidden) {
            faults.push(format!("{from} reaches {forbidden}"));
        }
    }
    for to in reach("guest", &named) {
        if !["sys", "wire"].contains(&to) {
            faults.push(format!("the guest reaches {to}"));
        }
    }
    for to in reach("verify", &named) {
        if ["vm", "sys", "observe", "runtime", "image"].contains(&to) {
            faults.push(format!("the verifier reaches {to}, of the VM side"));
        }
    }
    faults
}

fn reach<'a>(from: &str, named: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<&'a str> {
    let mut seen = BTreeSet::new();
    let mut open: Vec<&str> = named.get(from).into_iter().flatten().copied().collect();
    while let Some(next) = open.pop() {
        // What a test kit pulls in does not end up in whoever is tested with it.
        if next != DEV_ONLY && seen.insert(next) {
            open.extend(named.get(next).into_iter().flatten().copied());
        }
    }
    seen
}

#[test]
fn the_walls_stand() {
    let edges = edges();
    assert!(edges.len() >= 10, "the graph was not read: {edges:?}");
    assert!(edges.contains(&("decide".into(), "policy".into(), false)), "{edges:?}");
    assert_eq!(faults(&edges, &table()), [""; 0]);
}

#[test]
fn the_table_itself_keeps_decide_and_advisory_apart() {
    let table = table();
    let all: Vec<Edge> = table
        .iter()
        .flat_map(|(from, row)| row.may_use.iter().map(|to| (from.clone(), to.clone(), false)))
        .collect();
    assert!(all.len() > 20, "the table was not read: {all:?}");
    assert_eq!(faults(&all, &table), [""; 0], "even if every allowed edge were there");
}

#[test]
fn every_crate_has_its_row_and_its_sentence() {
    let mut table = table();
    for package in metadata()["packages"].as_array().unwrap() {
        let name = short(package["name"].as_str().unwrap()).unwrap();
        let row = table.remove(&name).unwrap_or_else(|| panic!("{name} is not in the table"));
        assert_eq!(package["description"].as_str().unwrap(), row.sentence, "{name}");
    }
    for (name, row) in &table {
        assert!(row.sentence.starts_with(NOT_YET), "there is no crate {name}");
    }
}

/// cargo-deny checks two of the walls as well; it must check the same ones.
#[test]
fn deny_toml_says_the_same() {
    let table = table();
    let deny = common::read("deny.toml");
    for wall in ["advisory", "decide"] {
        let start = format!("{{ crate = \"hotcell-{wall}\", wrappers = [");
        let rest = deny.split(&start).nth(1).unwrap_or_else(|| panic!("{wall} has no wrappers"));
        let list = rest.split(']').next().unwrap();
        let wrappers: BTreeSet<String> =
            list.split(',').filter_map(|name| short(name.trim().trim_matches('"'))).collect();
        let named: BTreeSet<String> = table
            .iter()
            .filter(|(_, row)| row.may_use.contains(wall))
            .map(|(name, _)| name.clone())
            .collect();
        assert_eq!(wrappers, named, "{wall}");
    }
}

#[test]
fn wrong_graphs_are_seen() {
    let table = table();
    let edge = |from: &str, to: &str, dev: bool| (from.to_owned(), to.to_owned(), dev);
    for (graph, expected) in [
        (vec![edge("decide", "advisory", true)], "decide names advisory"),
        (vec![edge("cli", "decide", false)], "cli names decide"),
        (
            vec![edge("cli", "advisory", false), edge("cli", "decide", true)],
            "cli names both decide and advisory",
        ),
        (vec![edge("decide", "policy", false), edge("policy", "advisory", false)], "decide reaches advisory"),
        (vec![edge("runtime", "testkit", false)], "runtime names testkit, which is for tests alone"),
        (vec![edge("guest", "policy", false)], "the guest reaches policy"),
        (vec![edge("verify", "vm", false)], "the verifier reaches vm, of the VM side"),
        (vec![edge("runtime", "verify", false)], "runtime names verify"),
        (vec![edge("extra", "ledger", false)], "extra is not in the table"),
    ] {
        let found = faults(&graph, &table);
        assert!(found.iter().any(|fault| fault == expected), "{expected:?} is not in {found:?}");
    }
    for fine in [edge("runtime", "testkit", true), edge("runtime", "verify", true)] {
        assert_eq!(faults(&[fine], &table), [""; 0]);
    }
}
