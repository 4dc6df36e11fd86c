//! docs/policy.md against the code: every key, its default and its range.

use hotcell_policy::limits::*;
use hotcell_policy::{PolicyDraft, PolicyError};
use serde_json::Value;
use std::collections::BTreeMap;

/// The rows under each `## [table]`: key, default, range.
fn page() -> BTreeMap<String, [String; 2]> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/policy.md")).unwrap();
    let mut keys = BTreeMap::new();
    let mut section = None;
    for line in text.lines() {
        if line.starts_with("## ") {
            section = line.strip_prefix("## [").and_then(|rest| rest.strip_suffix(']'));
        }
        let (Some(section), true) = (section, line.starts_with("| `")) else { continue };
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [key, default, range, _] = cells[..] else { panic!("four columns: {line}") };
        let full = format!("{section}.{}", key.trim_matches('`'));
        assert!(keys.insert(full, [default.to_owned(), range.to_owned()]).is_none(), "twice: {line}");
    }
    keys
}

fn flatten(value: &Value, prefix: &str, into: &mut BTreeMap<String, Value>) {
    let Value::Object(map) = value else {
        into.insert(prefix.to_owned(), value.clone());
        return;
    };
    for (key, value) in map {
        let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        flatten(value, &name, into);
    }
}

#[test]
fn the_page_has_every_key_with_its_default() {
    let mut defaults = BTreeMap::new();
    flatten(&serde_json::to_value(PolicyDraft::default()).unwrap(), "", &mut defaults);
    let defaults: BTreeMap<String, String> = defaults
        .into_iter()
        .map(|(key, value)| (key, if value.is_null() { "none".to_owned() } else { value.to_string() }))
        .collect();
    let page: BTreeMap<String, String> =
        page().into_iter().map(|(key, [default, _])| (key, default)).collect();
    assert_eq!(page, defaults);
}

#[test]
fn the_page_has_every_range() {
    let page = page();
    let ints = [
        ("limits.vcpus", VCPUS),
        ("limits.memory_mib", MEMORY_MIB),
        ("limits.disk_mib", DISK_MIB),
        ("limits.tmp_mib", TMP_MIB),
        ("limits.pids", PIDS),
        ("limits.output_mib", OUTPUT_MIB),
        ("limits.copy_mib", COPY_MIB),
        ("limits.copy_files", COPY_FILES),
        ("limits.timeout_s", TIMEOUT_S),
        ("thresholds.denial_burst", DENIAL_BURST),
        ("thresholds.denial_window_s", DENIAL_WINDOW_S),
        ("thresholds.mutation_burst", MUTATION_BURST),
        ("thresholds.mutation_window_s", MUTATION_WINDOW_S),
    ];
    let mut ranges: BTreeMap<&str, String> =
        ints.iter().map(|(key, range)| (*key, format!("{}..={}", range.min, range.max))).collect();
    for (key, range) in [("thresholds.denial_ewma", DENIAL_EWMA), ("thresholds.mutation_ewma", MUTATION_EWMA)]
    {
        ranges.insert(key, format!("{}..={}", range.min, range.max));
    }
    for (key, [_, range]) in &page {
        if key.starts_with("limits.") || key.starts_with("thresholds.") {
            assert_eq!(ranges.remove(key.as_str()).as_ref(), Some(range), "{key}");
        }
    }
    assert!(ranges.is_empty(), "not on the page: {ranges:?}");
    assert!(page["capabilities.write"][1].contains(&format!("at most {MAX_LIST}")));
}

#[test]
fn the_page_s_words_for_the_workspace_are_the_two_that_are_read() {
    for word in page()["exec.workspace"][1].split(" or ") {
        assert!(PolicyDraft::from_toml(&format!("[exec]\nworkspace = {word}\n")).is_ok(), "{word}");
    }
    let other = PolicyDraft::from_toml("[exec]\nworkspace = \"maybe\"\n");
    assert!(matches!(other, Err(PolicyError::Refused(_))));
}
