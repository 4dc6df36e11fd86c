//! An output as text: characters whole, however the bytes were cut on their way.
//!
//! What it guarantees: what it hands on, put together, is `String::from_utf8_lossy` of all bytes together; nothing is held
//! back but the beginning of a character whose rest has not come. What it does not: make text harmless to a terminal.
//! Who may call: whoever wants an exec's output as text, as its writer in [`ExecIo`](crate::ExecIo).

use std::io::{self, Write};

/// Longest beginning of a character that is not one yet.
const LONGEST_BEGINNING: usize = 3;

/// A writer of bytes that hands on text, piece by piece. Bytes that are no UTF-8 become U+FFFD. Dropped, it hands on U+FFFD
/// for a character whose rest never came.
///
/// ```
/// use hotcell_runtime::Text;
/// use std::io::Write;
/// let mut shown = String::new();
/// let mut text = Text::new(|piece| shown.push_str(piece));
/// text.write_all(b"caf\xc3")?;
/// text.write_all(b"\xa9")?;
/// drop(text);
/// assert_eq!(shown, "café");
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Text<F: FnMut(&str)> {
    hand_on: F,
    begun: [u8; LONGEST_BEGINNING],
    length: usize,
}

impl<F: FnMut(&str)> Text<F> {
    /// Text for whoever takes it.
    pub fn new(hand_on: F) -> Text<F> {
        Text { hand_on, begun: [0; LONGEST_BEGINNING], length: 0 }
    }

    /// Hands on all but the beginning of a character at the end, which it keeps.
    fn take(&mut self, bytes: &[u8]) {
        let kept = beginning(bytes);
        let (whole, rest) = bytes.split_at(bytes.len() - kept);
        if !whole.is_empty() {
            (self.hand_on)(&String::from_utf8_lossy(whole));
        }
        self.begun.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        self.length = kept;
    }
}

impl<F: FnMut(&str)> Write for Text<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut rest = bytes;
        // The character that was begun, byte by byte, until it is one or can't become one.
        while self.length > 0
            && let Some((&next, after)) = rest.split_first()
        {
            let mut begun = Vec::with_capacity(LONGEST_BEGINNING + 1);
            begun.extend_from_slice(self.begun.get(..self.length).unwrap_or_default());
            begun.push(next);
            rest = after;
            self.length = 0;
            self.take(&begun);
        }
        if !rest.is_empty() {
            self.take(rest);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<F: FnMut(&str)> Drop for Text<F> {
    fn drop(&mut self) {
        if self.length > 0 {
            (self.hand_on)("\u{FFFD}");
        }
    }
}

/// How many bytes at the end are the beginning of a character, and of nothing else.
fn beginning(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last();
    let invalid = last.map_or(&[][..], |chunk| chunk.invalid());
    // Without a length, more bytes could make it one.
    match std::str::from_utf8(invalid) {
        Err(error) if error.error_len().is_none() => invalid.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn through(pieces: &[&[u8]]) -> Vec<String> {
        let mut shown = Vec::new();
        let mut text = Text::new(|piece: &str| shown.push(piece.to_owned()));
        pieces.iter().for_each(|piece| text.write_all(piece).unwrap());
        drop(text);
        shown
    }

    #[test]
    fn characters_of_every_length_arrive_whole_at_every_cut() {
        let text = "a\u{7f}\u{80}é\u{7ff}\u{800}€\u{ffff}\u{10000}😀\u{10ffff}z";
        let bytes = text.as_bytes();
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let shown = through(&[&bytes[..first], &bytes[first..second], &bytes[second..]]);
                assert_eq!(shown.concat(), text, "cut at {first} and {second}");
            }
        }
        // The control: what this is for does happen to whoever takes each piece by itself.
        let (left, right) = bytes.split_at(bytes.len() - 2);
        assert_ne!(String::from_utf8_lossy(left) + String::from_utf8_lossy(right), text);
    }

    #[test]
    fn what_is_there_is_not_held_back() {
        let mut shown = String::new();
        let mut text = Text::new(|piece: &str| shown.push_str(piece));
        text.write_all(b"$ \xe2\x82").unwrap();
        let Text { length, .. } = &text;
        assert_eq!(*length, 2);
        drop(text);
        assert_eq!(shown, "$ \u{FFFD}");
        assert_eq!(
            through(&[b"\xff", b"x"]),
            ["\u{FFFD}", "x"],
            "what can't become a character does not wait"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn any_bytes_in_any_pieces_are_what_they_are_as_a_whole(
            bytes in proptest::collection::vec(
                prop_oneof![any::<u8>(), 0x80u8..0xc0, 0xe0u8..0xf8, Just(b'a')], 0..40),
            cuts in proptest::collection::vec(0usize..40, 0..6),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(through(&pieces).concat(), String::from_utf8_lossy(&bytes));
        }
    }
}
