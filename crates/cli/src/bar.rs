//! How long builds show what they do.

use crate::say::{self, shown};
use hotcell_image::Progress;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// A bar where stderr is a terminal, else lines.
pub(crate) struct Bar {
    bar: Option<ProgressBar>,
}

impl Bar {
    pub(crate) fn new() -> Bar {
        let bar = std::io::stderr().is_terminal().then(ProgressBar::new_spinner);
        if let Some(bar) = &bar {
            let style = ProgressStyle::with_template("{spinner} {msg} {bytes} {elapsed}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        Bar { bar }
    }

    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Bar {
    fn step(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(0);
                bar.set_message(shown(text));
            }
            None => say::note(text),
        }
    }

    fn bytes(&mut self, done: u64, _total: Option<u64>) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }
}
