//! What the pages show is what the program takes.

use crate::args::Cli;
use clap::Parser;

/// The words of each command in a line of shell, as far as pages write it: quotes, pipes, `;`, comments.
fn shell(line: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words) = (Vec::new(), Vec::new());
    let (mut word, mut begun, mut quote) = (String::new(), false, None);
    for character in line.chars().chain(['\n']) {
        match (quote, character) {
            (Some(open), _) if character == open => quote = None,
            (Some(_), _) => word.push(character),
            (None, '\'' | '"') => (quote, begun) = (Some(character), true),
            (None, ' ' | '|' | ';' | '&' | '\n') => {
                if begun {
                    words.push(std::mem::take(&mut word));
                    begun = false;
                }
                if character != ' ' {
                    commands.push(std::mem::take(&mut words));
                }
            }
            (None, '#') if !begun => {
                commands.push(std::mem::take(&mut words));
                return commands;
            }
            (None, _) => {
                word.push(character);
                begun = true;
            }
        }
    }
    commands
}

/// Whoever types what a page shows is not told that it can't be read.
#[test]
fn every_command_that_a_page_shows_can_be_read() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let pages = std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|kind| kind == "md"));
    let (mut read, mut wrong) = (0, Vec::new());
    for path in pages.chain(["README.md", "CONTRIBUTING.md"].map(|name| root.join(name))) {
        let page = std::fs::read_to_string(&path).unwrap();
        for line in page.split("```").skip(1).step_by(2).flat_map(str::lines) {
            let line = line.trim().trim_start_matches("$ ");
            for words in
                shell(line).iter().filter(|words| words.first().is_some_and(|word| word == "hotcell"))
            {
                read += 1;
                if let Err(error) = Cli::try_parse_from(words)
                    && error.use_stderr()
                {
                    wrong.push(format!("{}: {line}\n{error}", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(read >= 10, "only {read} commands were found");
    // The control: a name that no run may have.
    assert!(shell("x | hotcell run --name first -- true; y").iter().any(|words| {
        Cli::try_parse_from(words).is_err_and(|error| error.to_string().contains("'first'"))
    }));
}
