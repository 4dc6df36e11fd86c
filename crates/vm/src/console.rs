//! The serial console and the VMM's own messages, bounded.
//!
//! The guest writes the console: it may write for ever. The first half of the
//! bound is kept, then the newest bytes, and what lies between is counted.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Bytes kept of a console.
pub const CONSOLE_CAP: usize = 256 * 1024;
/// Bytes kept from the beginning.
const HEAD_CAP: usize = CONSOLE_CAP / 2;

/// A stream that is being drained.
#[derive(Debug)]
pub struct Console {
    buffer: Arc<Mutex<Buffer>>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Buffer {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

/// What was kept of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// The kept bytes; a line that says so stands where bytes were dropped.
    pub bytes: Vec<u8>,
    /// All bytes that came.
    pub total: u64,
}

impl Console {
    /// Drains `source` on a thread until it ends.
    pub fn drain(mut source: impl Read + Send + 'static) -> Console {
        let buffer = Arc::new(Mutex::new(Buffer::default()));
        let shared = Arc::clone(&buffer);
        let reader = std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = source.read(&mut chunk) {
                let new = chunk.get(..count).unwrap_or_default();
                shared.lock().unwrap_or_else(PoisonError::into_inner).push(new);
            }
        });
        Console { buffer, reader: Some(reader) }
    }

    /// What has been kept so far.
    pub fn captured(&self) -> Captured {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner).captured()
    }

    /// The last `lines` lines, printable, for an error message.
    pub fn last_lines(&self, lines: usize) -> String {
        let bytes = self.captured().bytes;
        let text = String::from_utf8_lossy(&bytes);
        let text: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        let last = text.get(text.len().saturating_sub(lines)..).unwrap_or_default().join("\n");
        last.chars().filter(|c| !c.is_control() || *c == '\n').collect()
    }

    /// Waits until the stream has ended. Call it only once its writer is gone.
    pub fn finish(mut self) -> Captured {
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        self.captured()
    }
}

impl Buffer {
    fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let (to_head, rest) = bytes.split_at(bytes.len().min(HEAD_CAP - self.head.len()));
        self.head.extend_from_slice(to_head);
        self.tail.extend(rest);
        let over = self.tail.len().saturating_sub(CONSOLE_CAP - HEAD_CAP);
        self.tail.drain(..over);
    }

    fn captured(&self) -> Captured {
        let mut bytes = self.head.clone();
        let dropped = self.total - (self.head.len() + self.tail.len()) as u64;
        if dropped > 0 {
            bytes.extend_from_slice(format!("\n[{dropped} bytes dropped]\n").as_bytes());
        }
        bytes.extend(&self.tail);
        Captured { bytes, total: self.total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endless_console_keeps_its_beginning_and_its_end() {
        let mut text = b"first".to_vec();
        text.resize(3 * CONSOLE_CAP, b'x');
        text.extend_from_slice(b"\nlast");
        let total = text.len() as u64;
        let console = Console::drain(std::io::Cursor::new(text));
        let captured = console.finish();
        assert_eq!(captured.total, total);
        assert!(captured.bytes.len() < CONSOLE_CAP + 64);
        assert!(captured.bytes.starts_with(b"first") && captured.bytes.ends_with(b"\nlast"));
        assert!(String::from_utf8_lossy(&captured.bytes).contains("bytes dropped]"));
    }

    #[test]
    fn a_short_console_is_kept_whole_and_its_end_is_printable() {
        let console = Console::drain(std::io::Cursor::new(b"a\r\n\x1b[2Jb\r\n\r\nc\r\n".to_vec()));
        while console.captured().total < 15 {
            std::thread::yield_now();
        }
        assert_eq!(console.last_lines(2), "[2Jb\nc");
        assert_eq!(console.finish().bytes.len(), 15);
    }
}
