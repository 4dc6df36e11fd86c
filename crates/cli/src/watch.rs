//! `hotcell run --watch`: the run while it goes on, on the terminal of stderr.
//!
//! ```text
//! Glimpses ──▶ thread `screen` ──▶ terminal: a screen of its own, drawn anew
//!                              └─▶ anything else: a line for each thing
//! output of the command to that terminal ──▶ Held ──▶ its last lines on the screen; all that is kept, after the run
//! ```
//! What it guarantees: the terminal is as it was when [`Watch::end`] returns, and where this thread panics; what goes to a
//! file or pipe passes byte for byte as without it; the run never waits for it (see `hotcell_runtime::Glimpses`).
//! What it does not: mend a terminal after `hotcell` itself was killed by SIGKILL; `reset` does.

mod view;

use crate::say;
use hotcell_runtime::{Glimpse, Glimpses, NoGlimpse};
use rustix::process::getpgrp;
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, isatty, tcgetattr, tcgetpgrp, tcgetwinsize,
    tcsetattr,
};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use view::{View, cut, shown};

/// From one drawing to the next at least.
const FRAME: Duration = Duration::from_millis(100);
/// Bytes of output to the terminal that are kept for after the run, the last ones; the record has all of it.
const HELD_BYTES: usize = 1 << 20;
/// What is written piecemeal is kept in chunks of about this size.
const CHUNK_BYTES: usize = 8 << 10;
/// Lines that tell of a run where there is no screen.
const MAX_LINES: u64 = 10_000;
/// A size to go on with where a terminal has none.
const SIZE: (usize, usize) = (24, 80);

/// Where held bytes belong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum To {
    Stdout,
    Stderr,
}

#[derive(Default)]
struct Kept {
    chunks: VecDeque<(To, Vec<u8>)>,
    bytes: usize,
    dropped: u64,
}

/// Output that waits until the terminal is free again.
#[derive(Clone, Default)]
pub(crate) struct Held(Arc<Mutex<Kept>>);

impl Held {
    fn put(&self, to: To, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.bytes += bytes.len();
        match kept.chunks.back_mut() {
            Some((last, chunk)) if *last == to && chunk.len() < CHUNK_BYTES => chunk.extend_from_slice(bytes),
            _ => kept.chunks.push_back((to, bytes.to_vec())),
        }
        while kept.bytes > HELD_BYTES {
            let Some((_, first)) = kept.chunks.pop_front() else { break };
            kept.bytes -= first.len();
            kept.dropped += first.len() as u64;
        }
    }

    /// The end of it as lines for a screen.
    fn tail(&self, lines: usize) -> Vec<String> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last: Vec<u8> = Vec::new();
        for (_, chunk) in kept.chunks.iter().rev() {
            last.splice(0..0, chunk.iter().copied());
            if last.len() > 2 * CHUNK_BYTES {
                break;
            }
        }
        let text = String::from_utf8_lossy(&last);
        let all: Vec<String> = text.lines().map(|line| format!("  {}", shown(line))).collect();
        all[all.len().saturating_sub(lines)..].to_vec()
    }

    /// Says whether the last line is open.
    fn print(&self) -> bool {
        let kept = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        if kept.dropped > 0 {
            say::note(format_args!("the first {} bytes of the output are in the record alone", kept.dropped));
        }
        let mut line_open = false;
        for (to, chunk) in kept.chunks {
            // A terminal that went away does not want it.
            let _ = match to {
                To::Stdout => io::stdout().write_all(&chunk),
                To::Stderr => io::stderr().write_all(&chunk),
            };
            line_open = chunk.last() != Some(&b'\n');
        }
        let _ = io::stdout().flush();
        line_open
    }
}

/// One of the two outputs, held.
struct Holding(Held, To);

impl Write for Holding {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.put(self.1, bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What shows the run.
pub(crate) struct Watch {
    screen: JoinHandle<()>,
    held: Held,
    on_screen: bool,
}

/// Whether stderr is a terminal that a screen can be drawn on, ours at the moment.
fn has_screen() -> bool {
    let stderr = io::stderr();
    let named = std::env::var_os("TERM").is_some_and(|term| term != "dumb");
    named && isatty(&stderr) && tcgetpgrp(&stderr).is_ok_and(|group| group == getpgrp())
}

/// Decided before the run starts, since its outputs are given then.
pub(crate) struct Plan {
    held: Held,
    on_screen: bool,
}

impl Plan {
    pub(crate) fn new() -> Plan {
        Plan { held: Held::default(), on_screen: has_screen() }
    }

    /// In place of a stdout that would draw over the screen.
    pub(crate) fn stdout(&self) -> Option<Box<dyn Write + Send>> {
        self.hold(isatty(io::stdout()), To::Stdout)
    }

    /// In place of stderr.
    pub(crate) fn stderr(&self) -> Option<Box<dyn Write + Send>> {
        self.hold(true, To::Stderr)
    }

    /// Whether what is typed goes to the screen and not to the command.
    pub(crate) fn takes_stdin(&self) -> bool {
        self.on_screen && isatty(io::stdin())
    }

    fn hold(&self, is_terminal: bool, to: To) -> Option<Box<dyn Write + Send>> {
        (self.on_screen && is_terminal)
            .then(|| Box::new(Holding(self.held.clone(), to)) as Box<dyn Write + Send>)
    }

    /// Shows the run from here on.
    pub(crate) fn begin(self, run_id: &str, glimpses: Glimpses) -> Watch {
        let Plan { held, on_screen } = self;
        let (view, kept) = (View::new(run_id), held.clone());
        let screen = std::thread::spawn(move || {
            let terminal = on_screen.then(Terminal::enter).flatten();
            match &terminal {
                Some(terminal) => draw(terminal, view, &kept, &glimpses),
                None => tell(view, &glimpses),
            }
        });
        Watch { screen, held, on_screen }
    }
}

impl Watch {
    /// For people; after the run, where there is a screen.
    pub(crate) fn say(&self, line: &str) {
        match self.on_screen {
            true => self.held.put(To::Stderr, say::paragraph(line).as_bytes()),
            false => say::note(line),
        }
    }

    /// After the run's end: gives the terminal back, and it gets what was held. Says whether its last line is open.
    pub(crate) fn end(self) -> bool {
        let _ = self.screen.join();
        self.held.print()
    }
}

/// The terminal as it was, given back when this is dropped.
struct Terminal {
    before: Termios,
}

impl Terminal {
    fn enter() -> Option<Terminal> {
        let stderr = io::stderr();
        let before = tcgetattr(&stderr).ok()?;
        let mut modes = before.clone();
        modes.local_modes.remove(LocalModes::ECHO);
        // Both would leave the terminal as it is drawn; Ctrl-C stops the run.
        modes.special_codes[SpecialCodeIndex::VSUSP] = 0;
        modes.special_codes[SpecialCodeIndex::VQUIT] = 0;
        tcsetattr(&stderr, OptionalActions::Now, &modes).ok()?;
        let terminal = Terminal { before };
        // Another screen, no cursor, no line wrapping.
        terminal.write("\x1b[?1049h\x1b[?25l\x1b[?7l");
        Some(terminal)
    }

    fn write(&self, text: &str) {
        let mut stderr = io::stderr().lock();
        let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
    }

    fn size(&self) -> (usize, usize) {
        match tcgetwinsize(io::stderr()) {
            Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row.into(), size.ws_col.into()),
            _ => SIZE,
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.write("\x1b[?7h\x1b[?25h\x1b[?1049l");
        // What was typed meanwhile was meant for nobody, the shell least of all.
        let _ = tcsetattr(io::stderr(), OptionalActions::Flush, &self.before);
    }
}

fn draw(terminal: &Terminal, mut view: View, held: &Held, glimpses: &Glimpses) {
    let begun = Instant::now();
    loop {
        let end = Instant::now() + FRAME;
        let over = loop {
            match glimpses.next(end.saturating_duration_since(Instant::now())) {
                Ok(glimpse) => drop(view.take(glimpse)),
                Err(NoGlimpse::Quiet) => break false,
                Err(NoGlimpse::Over) => break true,
            }
            if Instant::now() >= end {
                break false;
            }
        };
        view.missed = glimpses.missed();
        let (rows, columns) = terminal.size();
        let lines = view.draw(begun.elapsed(), &held.tail(rows), rows, columns);
        let mut frame = String::from("\x1b[H");
        for (at, line) in lines.iter().enumerate() {
            let (on, off) = if at == 0 { ("\x1b[7m", "\x1b[0m") } else { ("", "") };
            let end = if at + 1 < lines.len() { "\r\n" } else { "" };
            frame.push_str(&format!("{on}{line}{off}\x1b[K{end}"));
        }
        frame.push_str("\x1b[J");
        terminal.write(&frame);
        if over {
            return;
        }
    }
}

/// Without a screen: a line for each thing, up to a limit.
fn tell(mut view: View, glimpses: &Glimpses) {
    let begun = Instant::now();
    let mut telling = Telling { room: MAX_LINES, untold: 0 };
    loop {
        let glimpse = match glimpses.next(Duration::from_secs(1)) {
            Ok(glimpse) => glimpse,
            Err(NoGlimpse::Quiet) => continue,
            Err(NoGlimpse::Over) => break,
        };
        for line in telling.lines(&mut view, glimpse) {
            say::note(format_args!("watch: {:.2} s {}", begun.elapsed().as_secs_f64(), cut(&line, 1000)));
        }
    }
    let untold = telling.untold + glimpses.missed();
    if untold > 0 {
        say::note(format_args!("watch: {untold} more lines are not here; the record has it all"));
    }
}

/// What is told of a run, line by line.
struct Telling {
    /// Lines that may still be told.
    room: u64,
    untold: u64,
}

impl Telling {
    /// The lines of this moment as far as there is room; what a run ends by is told in any case.
    fn lines(&mut self, view: &mut View, glimpse: Glimpse) -> Vec<String> {
        let matters = matches!(glimpse, Glimpse::Broken { .. } | Glimpse::Killed(_) | Glimpse::Over { .. });
        let mut lines = view.take(glimpse);
        if !matters {
            let room = usize::try_from(self.room).unwrap_or(usize::MAX);
            self.untold += lines.len().saturating_sub(room) as u64;
            lines.truncate(room);
        }
        self.room = self.room.saturating_sub(lines.len() as u64);
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_output_is_bounded_keeps_its_end_and_says_how_much_is_missing() {
        let held = Held::default();
        let mut out = Holding(held.clone(), To::Stdout);
        for number in 0..300_000 {
            writeln!(out, "line {number}").unwrap();
        }
        out.write_all(b"\x1b[2Jthe end").unwrap();
        let kept = held.0.lock().unwrap();
        assert!(kept.bytes <= HELD_BYTES && kept.dropped > 1 << 20);
        drop(kept);
        let tail = held.tail(2);
        assert_eq!(tail, ["  line 299999", "  \\u{1b}[2Jthe end"]);
    }

    #[test]
    fn a_flood_is_told_to_the_last_line_there_is_room_for_and_its_end_in_any_case() {
        let (mut view, mut telling) = (View::new("run-1"), Telling { room: MAX_LINES, untold: 0 });
        let step = |n: u64| Glimpse::Step(format!("step {n}"));
        for n in 0..MAX_LINES {
            assert_eq!(telling.lines(&mut view, step(n)), [format!("step {n}")]);
        }
        for n in 0..7 {
            assert!(telling.lines(&mut view, step(n)).is_empty());
        }
        assert_eq!(telling.untold, 7);
        let killed = Glimpse::Killed(vec!["module_loaded".into()]);
        let last = telling.lines(&mut view, killed);
        assert!(!last.is_empty() && last.iter().any(|line| line.contains("module_loaded")), "{last:?}");
    }
}
