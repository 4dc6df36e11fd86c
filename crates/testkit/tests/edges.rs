//! The walls between the crates, read off `cargo metadata`: dependencies of every kind, dev and build ones too.
//!
//! What is allowed stands in [`MAY_USE`]; everything else is a failure that names the edge. The check itself is tested
//! on graphs that are wrong.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Which of our crates each may name, in any kind of dependency. A crate that is not here is a failure.
const MAY_USE: &[(&str, &[&str])] = &[
    ("ledger", &[]),
    ("policy", &["ledger"]),
    ("decide", &["ledger", "policy"]),
    ("advisory", &["ledger"]),
    ("wire", &[]),
    ("sys", &[]),
    ("vm", &["ledger", "policy", "sys"]),
    ("observe", &["decide", "sys"]),
    ("runtime", &["decide", "ledger", "observe", "policy", "vm", "wire"]),
    ("image", &["ledger", "policy"]),
    ("verify", &["decide", "ledger", "policy"]),
    ("eval", &["ledger", "policy", "runtime"]),
    ("report", &["verify"]),
    ("cli", &["advisory", "eval", "image", "ledger", "policy", "report", "runtime", "verify", "vm"]),
    ("guest", &["sys", "wire"]),
    // Its fake guest speaks the frames.
    ("testkit", &["decide", "ledger", "vm", "wire"]),
];

/// What tests may name beyond that.
const TESTS_MAY_USE: &[(&str, &str)] = &[
    // A run's bundle is checked by the verifier, as a stranger would.
    ("runtime", "verify"),
];

/// Named as a dev-dependency alone, by whoever wants it.
const DEV_ONLY: &str = "testkit";

/// One dependency: who, whom, and whether for tests only.
type Edge = (String, String, bool);

fn edges() -> Vec<Edge> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let short = |name: &str| name.strip_prefix("hotcell-").map(str::to_owned);
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
fn faults(edges: &[Edge]) -> Vec<String> {
    let table: BTreeMap<&str, &[&str]> = MAY_USE.iter().copied().collect();
    let mut named: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut faults = Vec::new();
    for (from, to, dev) in edges {
        named.entry(from).or_default().insert(to);
        let Some(allowed) = table.get(from.as_str()) else {
            faults.push(format!("{from} is not in the table"));
            continue;
        };
        let in_tests = *dev && TESTS_MAY_USE.contains(&(from.as_str(), to.as_str()));
        if to == DEV_ONLY {
            if !dev {
                faults.push(format!("{from} names {to}, which is for tests alone"));
            }
        } else if !allowed.contains(&to.as_str()) && !in_tests {
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
    assert_eq!(faults(&edges), [""; 0]);
}

#[test]
fn the_table_itself_keeps_decide_and_advisory_apart() {
    let all: Vec<Edge> = MAY_USE
        .iter()
        .flat_map(|(from, to)| to.iter().map(|to| ((*from).to_owned(), (*to).to_owned(), false)))
        .collect();
    assert_eq!(faults(&all), [""; 0], "even if every allowed edge were there");
}

#[test]
fn wrong_graphs_are_seen() {
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
        let found = faults(&graph);
        assert!(found.iter().any(|fault| fault == expected), "{expected:?} is not in {found:?}");
    }
    assert_eq!(faults(&[edge("runtime", "testkit", true)]), [""; 0]);
}
