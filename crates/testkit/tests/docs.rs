//! The prose against the sources: every test that a page names exists, every promise has one or says "test pending",
//! every link leads somewhere, and tables that repeat the code repeat it rightly.
//!
//! The checks are tested on pages that are wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

mod common;
use common::{cells, code, read, root, table};

/// Says that a promise has no test yet.
const PENDING: &str = "test pending";
/// The last column of a table whose rows are promises.
const TEST: &str = "test";

fn pages() -> Vec<String> {
    let names = |folder: &str| {
        let entries = std::fs::read_dir(root().join(folder)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    let mut pages: Vec<String> = names(".").into_iter().filter(|name| name.ends_with(".md")).collect();
    pages.extend(
        names("docs").into_iter().filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}")),
    );
    pages.push("fuzz/README.md".into());
    pages.sort();
    pages
}

fn rust_files(folder: &Path, into: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

/// Sources of all crates: crate, path below it, text.
fn sources() -> Vec<(String, PathBuf, String)> {
    let crates = root().join("crates");
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&crates).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let mut files = Vec::new();
        for part in ["src", "tests"] {
            rust_files(&folder.join(part), &mut files);
        }
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            all.push((name.clone(), file.strip_prefix(&folder).unwrap().to_owned(), text));
        }
    }
    all
}

/// `decide::rules::tripped_stays_tripped_whatever_follows`, of every `#[test]` in the workspace.
fn tests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (name, path, text) in sources() {
        let parts = path.with_extension("");
        let modules = parts.iter().skip(1).map(|part| part.to_str().unwrap());
        let modules: Vec<&str> = modules.filter(|part| !["lib", "main", "mod"].contains(part)).collect();
        let place = std::iter::once(name.as_str()).chain(modules).collect::<Vec<_>>().join("::");
        found.extend(test_names(&text).into_iter().map(|test| format!("{place}::{test}")));
    }
    found
}

/// Names of the functions that `#[test]` stands before.
fn test_names(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut armed = false;
    for line in text.lines().map(str::trim) {
        if line == "#[test]" {
            armed = true;
        } else if let Some(rest) = line.strip_prefix("fn ") {
            if armed {
                names.push(rest.split('(').next().unwrap().to_owned());
            }
            armed = false;
        } else if !line.starts_with('#') && !line.starts_with("//") {
            armed = false;
        }
    }
    names
}

fn is_path_of_names(word: &str) -> bool {
    let parts: Vec<&str> = word.split("::").collect();
    let plain = |part: &&str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    };
    parts.len() > 1 && parts.iter().all(plain)
}

/// What is wrong with the tests that a page names.
fn test_faults(page: &str, tests: &BTreeSet<String>) -> Vec<String> {
    let crates: BTreeSet<&str> = tests.iter().filter_map(|test| test.split("::").next()).collect();
    let mut faults = Vec::new();
    let mut promises = false;
    let mut before = "";
    for line in page.lines() {
        for word in code(line) {
            let ours = word.split("::").next().is_some_and(|first| crates.contains(first));
            if is_path_of_names(&word) && ours && !tests.contains(&word) {
                faults.push(format!("there is no test {word}"));
            }
        }
        if !line.starts_with('|') {
            promises = false;
        } else if line.starts_with("|--") {
            promises = cells(before).last().is_some_and(|head| head == TEST);
        } else if promises {
            let cell = cells(line).pop().unwrap_or_default();
            let named: Vec<String> = code(&cell).into_iter().filter(|word| !word.contains('/')).collect();
            for name in named.iter().filter(|name| !name.contains("::")) {
                if !tests.iter().any(|test| test.ends_with(&format!("::{name}"))) {
                    faults.push(format!("there is no test {name}"));
                }
            }
            if named.is_empty() && !cell.contains(PENDING) {
                faults.push(format!("neither test nor \"{PENDING}\": {line}"));
            }
        }
        before = line;
    }
    faults
}

/// As GitHub makes a heading an anchor.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-' || *c == '_');
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// What is wrong with the links of a page, and with the paths that it names between backticks.
fn link_faults(name: &str, page: &str) -> Vec<String> {
    let folder = Path::new(name).parent().unwrap_or(Path::new(""));
    let mut faults = Vec::new();
    for part in page.split("](").skip(1) {
        let target = part.split(')').next().unwrap();
        if target.contains("://") {
            continue;
        }
        let (file, place) = target.split_once('#').unwrap_or((target, ""));
        let path = if file.is_empty() { PathBuf::from(name) } else { folder.join(file) };
        if !root().join(&path).exists() {
            faults.push(format!("{name} links to {target}, which is not there"));
        } else if !place.is_empty() {
            let page = if file.is_empty() { page.to_owned() } else { read(path.to_str().unwrap()) };
            if !page.lines().any(|line| line.starts_with('#') && anchor(line) == place) {
                faults.push(format!("{name} links to {target}, and there is no such heading"));
            }
        }
    }
    for word in code(page) {
        let ours = ["crates/", "docs/", "fuzz/", "vectors/"].iter().any(|start| word.starts_with(start));
        let plain = !word.contains([' ', '<', '*', '\n']);
        if ours && plain && !root().join(&word).exists() {
            faults.push(format!("{name} names {word}, which is not there"));
        }
    }
    faults
}

#[test]
fn every_test_that_a_page_names_exists_and_every_promise_has_one() {
    let tests = tests();
    assert!(tests.len() > 150, "the sources were not read");
    assert!(tests.contains("testkit::edges::the_walls_stand"));
    let mut promises = 0;
    for name in pages() {
        let page = read(&name);
        promises += page.matches(" | test |").count();
        assert_eq!(test_faults(&page, &tests), [""; 0], "{name}");
    }
    assert!(promises > 10, "only {promises} tables of promises were found");
}

#[test]
fn every_link_leads_somewhere() {
    let faults: Vec<String> = pages().iter().flat_map(|name| link_faults(name, &read(name))).collect();
    assert_eq!(faults, [""; 0]);
}

#[test]
fn wrong_pages_are_seen() {
    let tests = BTreeSet::from(["ledger::it::file::cut".to_owned()]);
    let rows = "| promise | test |\n|---|---|\n";
    for (row, fault) in [
        ("| a | `ledger::it::file::cut` |", None),
        ("| a | `cut` |", None),
        ("| a | test pending |", None),
        ("| a | `ledger::it::file::cat` |", Some("there is no test ledger::it::file::cat")),
        ("| a | `cat` |", Some("there is no test cat")),
        ("| a | soon |", Some("neither test")),
        ("| a | |", Some("neither test")),
    ] {
        let faults = test_faults(&format!("{rows}{row}\n"), &tests);
        assert_eq!(faults.len(), usize::from(fault.is_some()), "{row}: {faults:?}");
        assert!(fault.is_none_or(|fault| faults[0].starts_with(fault)), "{row}: {faults:?}");
    }
    assert_eq!(test_faults("as `ledger::it::no_such_test` shows", &tests).len(), 1);
    assert_eq!(link_faults("README.md", "[a](nowhere.md) [b](SECURITY.md#nothing) `crates/none`").len(), 3);
    assert_eq!(link_faults("docs/cli.md", "[a](../README.md) [b](policy.md#limits)"), [""; 0]);
    let text =
        "#[test]\nfn a() {}\nfn b() {}\n#[test]\n#[ignore = \"x\"]\nfn c() {}\n#[test]\n// why\nfn d() {}";
    assert_eq!(test_names(text), ["a", "c", "d"]);
}

#[test]
fn limits_are_the_constants_of_the_sources() {
    let rows = table(&read("SPECIFICATION.md"), "## Limits");
    assert!(rows.len() > 30);
    for row in &rows[1..] {
        let (constant, file) = (code(&row[1]).remove(0), code(&row[2]).remove(0));
        let (name, value) = constant.split_once(" = ").expect("NAME = value");
        let source = read(&file);
        let declared = source.split(&format!("const {name}: ")).nth(1);
        let declared = declared.unwrap_or_else(|| panic!("{file} has no {name}"));
        let found = declared.split(" = ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
        assert_eq!(found, value, "{name} in {file}");
    }
}

#[test]
fn exit_codes_are_those_of_the_source() {
    let source = read("crates/cli/src/exit.rs");
    let documented: Vec<Vec<String>> = source
        .lines()
        .filter_map(|line| line.strip_prefix("//! |"))
        .filter(|line| !line.starts_with("--"))
        .map(cells)
        .collect();
    assert_eq!(table(&read("docs/cli.md"), "## Exit codes"), documented);
    for (name, code) in [("KILLED", 99), ("TIMED_OUT", 124), ("FAILED", 125), ("USAGE", 2)] {
        assert!(source.contains(&format!("const {name}: u8 = {code};")), "{name}");
        assert!(documented.iter().any(|row| row[1] == code.to_string()), "{name}");
    }
}

#[test]
fn the_guest_page_has_the_mounts_and_calls_of_the_guest() {
    let page = read("docs/guest.md");
    let block = |text: &str| {
        let inside = text.split("```text\n").nth(1).and_then(|rest| rest.split("```").next());
        inside.unwrap().to_owned()
    };
    let view: String = read("crates/guest/src/view.rs")
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line)))
        .collect();
    assert_eq!(block(&page), block(&view));
    let source = read("crates/guest/src/syscalls.rs");
    let rules = source.split("const RULES").nth(1).and_then(|rest| rest.split("];").next()).unwrap();
    let name = |part: &str| part.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap().to_owned();
    let refused: BTreeSet<String> = rules.split("libc::SYS_").skip(1).map(name).collect();
    let rows = table(&page, "## System calls");
    let listed: BTreeSet<String> = rows[1..].iter().flat_map(|row| code(&row[1])).collect();
    assert!(refused.len() > 60);
    assert_eq!(listed, refused);
}

#[test]
fn the_example_of_the_readme_is_the_one_that_compiles() {
    let example = read("crates/runtime/examples/embed.rs");
    let main = example.split("\nfn main()").nth(1).unwrap();
    assert!(read("README.md").contains(&format!("```rust\nfn main(){main}```")));
}

/// The text without comments and without the unit tests, which stand last in our files.
fn program(text: &str) -> String {
    let code = text.split("\n#[cfg(test)]\nmod tests").next().unwrap();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Where one of the words stands in a program, in the crates that `watched` picks.
fn places(watched: impl Fn(&str, &Path) -> bool, words: &[&str]) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, path, text) in sources() {
        if !path.starts_with("src") || !watched(&name, &path) {
            continue;
        }
        let text = program(&text);
        for word in words.iter().filter(|word| text.contains(**word)) {
            found.entry(format!("{name}/{}", path.display())).or_default().push((*word).to_owned());
        }
    }
    found
}

#[test]
fn decide_names_no_outside() {
    let outside = [
        "std::fs",
        "std::io",
        "std::net",
        "std::env",
        "std::process",
        "std::thread",
        "std::sync",
        "std::time",
        "SystemTime",
        "Instant",
        "Mutex",
        "RwLock",
        "rustix",
        "libc",
        "getrandom",
        "println!",
        "eprintln!",
    ];
    assert_eq!(places(|name, _| name == "decide", &outside), BTreeMap::new());
    assert!(places(|name, _| name == "vm", &outside).len() > 3, "the check sees what it looks for");
}

#[test]
fn unsafe_is_in_sys_alone() {
    let opened = ["unsafe {", "unsafe fn", "unsafe impl", "allow(unsafe_code)"];
    let found = places(|_, _| true, &opened);
    assert!(found.keys().any(|place| place.starts_with("sys/")), "the check sees what it looks for");
    let elsewhere: Vec<_> = found.keys().filter(|place| !place.starts_with("sys/")).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");
}

#[test]
fn only_the_command_line_touches_the_environment() {
    let touched = ["env::var", "env::home_dir", "println!", "eprintln!", "io::stdout()", "io::stdin()"];
    // Programs of their own: the two of the guest (and what they run), and the small verifier.
    let library = |name: &str, path: &Path| {
        !["cli", "guest"].contains(&name) && !path.starts_with("src/bin") && path != Path::new("src/main.rs")
    };
    assert_eq!(places(library, &touched), BTreeMap::new());
    assert!(!places(|name, _| name == "cli", &touched).is_empty(), "the check sees what it looks for");
}

#[test]
fn the_page_of_attacks_names_every_program_there() {
    let page = read("attacks/README.md");
    let entries = std::fs::read_dir(root().join("attacks")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let programs: Vec<String> = names.filter(|name| name.ends_with(".c")).collect();
    assert!(!programs.is_empty());
    for program in programs {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{program}` |")));
        let row = row.unwrap_or_else(|| panic!("attacks/README.md has no row for {program}"));
        for user in code(row).into_iter().filter(|word| word.ends_with(".rs")) {
            assert!(
                read(&format!("crates/cli/tests/vm/{user}")).contains(&program),
                "{user} does not use {program}"
            );
        }
    }
}

#[test]
fn the_script_helps_and_lists_every_command_that_it_has() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = std::fs::read_to_string(root.join("x")).unwrap();
    let cases = script.split("case \"${1:-}\" in\n").nth(1).unwrap();
    let arms = cases.lines().filter(|line| line.starts_with("    ") && !line.starts_with("     "));
    let arms = arms.filter_map(|line| line.trim().split_once(')').map(|(name, _)| name));
    let had: Vec<&str> = arms.filter(|name| !name.contains(['-', '*'])).collect();
    let ask = |word: &str| std::process::Command::new(root.join("x")).arg(word).output().unwrap();
    let helped = ask("--help");
    assert_eq!(helped.status.code(), Some(0), "{helped:?}");
    let text = String::from_utf8(helped.stdout).unwrap();
    let listed: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    let sorted = |mut names: Vec<&str>| {
        names.sort_unstable();
        names.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(sorted(listed), sorted(had));
    let wrong = ask("dmo");
    assert!(
        wrong.status.code() == Some(2) && String::from_utf8_lossy(&wrong.stderr).contains("dmo"),
        "{wrong:?}"
    );
}
