//! What the command says. The only place of it that writes to stdout and stderr, the terminal's screen apart.
//!
//! The attack: words that the guest or an image chose (an argv, a file's name, an error of the init) hold line breaks,
//! escape sequences or bidirectional marks, and make a terminal show a verdict that nobody gave. And a caller who closed
//! stderr, or whose disk is full there, turns a verdict into a panic.
//!
//! What it guarantees: no control character and no bidirectional mark is written but the line breaks of our own texts, and
//! only what Hotcell says begins a line with `hotcell:`; nothing that happens to stderr changes what the command does.

use crate::exit::Fatal;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

/// A text as a terminal may have it.
pub(crate) fn shown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            // Escaped by `escape_debug` though harmless; a name off the disk has its own escapes already.
            '"' | '\'' | '\\' => out.push(character),
            _ => out.extend(character.escape_debug()),
        }
    }
    out
}

/// For people, on stderr: as one paragraph.
pub(crate) fn note(text: impl Display) {
    // Nobody is left who could be told.
    let _ = io::stderr().write_all(paragraph(&text.to_string()).as_bytes());
}

/// As [`note`] says it.
pub(crate) fn paragraph(text: &str) -> String {
    let lines: Vec<String> = text.trim_end().split('\n').map(shown).collect();
    format!("hotcell: {}\n", lines.join("\n  "))
}

/// A question, on stderr; what is typed comes behind it.
pub(crate) fn question(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// One line of what was asked for, on stdout.
pub(crate) fn line(text: impl Display) -> Result<(), Fatal> {
    write(&shown(&text.to_string()))
}

/// A value of what was asked for, on stdout.
pub(crate) fn json(value: &serde_json::Value) -> Result<(), Fatal> {
    write(&value.to_string())
}

fn write(text: &str) -> Result<(), Fatal> {
    text_as_is(&format!("{text}\n"))
}

/// What was asked for, on stdout, as it is: the caller has made it fit to be shown.
pub(crate) fn text_as_is(text: &str) -> Result<(), Fatal> {
    match io::stdout().write_all(text.as_bytes()) {
        // A reader who has enough is no failure.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Fatal::failed(format!("can't write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_has_no_control_character_and_no_line_that_poses_as_ours() {
        let hostile = "can't execute \u{1b}[2J\r\u{202e}x\nhotcell: ALLOWED, machine gone\u{7}\u{9b}2J\n";
        let said = paragraph(hostile);
        assert_eq!(
            said,
            "hotcell: can't execute \\u{1b}[2J\\r\\u{202e}x\n  hotcell: ALLOWED, machine gone\\u{7}\\u{9b}2J\n"
        );
        // The control: our own texts, as they are.
        let ours = "the policy can't be used:\na \"key\" of C:\\ isn't known – grün";
        assert_eq!(
            paragraph(ours),
            "hotcell: the policy can't be used:\n  a \"key\" of C:\\ isn't known – grün\n"
        );
    }
}
