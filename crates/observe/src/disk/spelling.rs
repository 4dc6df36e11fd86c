//! How a name on the disk is spelled in a record: one name, one spelling, and no two names the same.
//!
//! The attack: a name that is no text, or two names that a record would bring to one form
//! (Unicode's `é` and `e` with an accent), so that one file's change hides behind another's.
//! A name that is plain stays as it is. In any other, the bytes that make it so are
//! written `\xHH`; a backslash always is.

use hotcell_ledger::NfcString;
use std::fmt::Write as _;

/// The spelling of one name.
pub(super) fn spell(name: &[u8]) -> String {
    if let Ok(text) = std::str::from_utf8(name) {
        let spelled = escaped(name, text.chars(), |c| c.is_ascii());
        if is_stable(&spelled) {
            return spelled;
        }
    }
    // Not text, or not in the one form.
    escaped(name, name.iter().map(|&byte| char::from(byte)), |_| true)
}

/// With `\xHH` for what is not plain; `of_bytes` says whether a character stands for one byte.
fn escaped(name: &[u8], chars: impl Iterator<Item = char>, of_bytes: impl Fn(char) -> bool) -> String {
    let mut spelled = String::with_capacity(name.len());
    for c in chars {
        let plain = c != '\\' && (c.is_ascii_graphic() || c == ' ');
        if plain || !of_bytes(c) {
            spelled.push(c);
        } else {
            let _ = write!(spelled, "\\x{:02x}", u32::from(c));
        }
    }
    spelled
}

/// Whether a record spells it just so, also behind the `/` of its directory.
fn is_stable(text: &str) -> bool {
    if text.is_ascii() {
        return true;
    }
    let path = format!("/{text}");
    NfcString::new(&path).as_str() == path
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_spelled_apart() {
        for (name, spelled) in [
            (&b"out.txt"[..], "out.txt"),
            (b"a b", "a b"),
            (b"a\\b", "a\\x5cb"),
            (b"a\\x5cb", "a\\x5cx5cb"),
            (b"new\nline", "new\\x0aline"),
            ("\u{e9}".as_bytes(), "\u{e9}"),
            ("e\u{301}".as_bytes(), "e\\xcc\\x81"),
            (b"\xff\xfe", "\\xff\\xfe"),
        ] {
            assert_eq!(spell(name), spelled);
        }
    }

    proptest! {
        #[test]
        fn no_two_names_have_one_spelling(a: Vec<u8>, b: Vec<u8>) {
            prop_assert_eq!(spell(&a) == spell(&b), a == b);
        }

        #[test]
        fn a_spelling_is_in_the_records_form(parts in proptest::collection::vec("[a-z\u{e0}-\u{e9}\u{300}-\u{303}\\\\]{1,4}", 1..4)) {
            let path = parts.iter().fold(String::new(), |path, part| path + "/" + &spell(part.as_bytes()));
            let normal = NfcString::new(&path);
            prop_assert_eq!(normal.as_str(), &path);
        }
    }
}
