//! Reading Markdown as far as our own pages go.

use std::path::{Path, PathBuf};

/// The repository's folder.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A file of the repository.
pub(crate) fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The first table under a heading: its head first, then its rows.
pub(crate) fn table(page: &str, heading: &str) -> Vec<Vec<String>> {
    let section = page.split(&format!("{heading}\n")).nth(1).unwrap_or_else(|| panic!("no {heading}"));
    let lines = section.lines().take_while(|line| !line.starts_with('#'));
    let rows: Vec<Vec<String>> = lines
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .filter(|line| !line.starts_with("|--"))
        .map(cells)
        .collect();
    assert!(rows.len() > 1, "no table under {heading}");
    assert!(rows.iter().all(|row| row.len() == rows[0].len()), "a ragged table under {heading}");
    rows
}

/// The cells of one line; `\|` is a bar inside a cell.
pub(crate) fn cells(line: &str) -> Vec<String> {
    let line = line.trim().trim_start_matches('|').replace("\\|", "\u{1}");
    let line = line.strip_suffix('|').unwrap_or(&line);
    line.split('|').map(|cell| cell.trim().replace('\u{1}', "|")).collect()
}

/// What stands between backticks.
pub(crate) fn code(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}
