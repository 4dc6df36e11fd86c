//! Programs of the host that a build needs, each ended with the build.

use crate::error::ImageError;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;

/// Lines of a program's complaint that an error shows.
const SHOWN: usize = 6;
/// Longest line that is kept.
const MAX_LINE: u64 = 4096;

/// What a person can do about a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Advice {
    /// Where it is not there.
    pub(crate) install: &'static str,
    /// Where it is, and fails.
    pub(crate) failed: &'static str,
}

/// A running program. Dropping it ends it.
pub(crate) struct Running {
    child: Child,
    name: &'static str,
    advice: Advice,
    complaint: Option<JoinHandle<VecDeque<String>>>,
}

impl Running {
    pub(crate) fn start(
        name: &'static str,
        advice: Advice,
        command: &mut Command,
    ) -> Result<Running, ImageError> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| {
                if error.kind() == io::ErrorKind::NotFound {
                    return ImageError::NotInstalled { program: name.into(), install: advice.install };
                }
                ImageError::Program { program: name.into(), why: error.to_string(), advice: advice.failed }
            })?;
        let complaint = child.stderr.take().map(|stderr| {
            std::thread::spawn(move || {
                let mut last = VecDeque::new();
                let mut from = BufReader::new(stderr);
                let mut line = Vec::new();
                while from.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                    if last.len() == SHOWN {
                        last.pop_front();
                    }
                    last.push_back(String::from_utf8_lossy(&line).trim().to_owned());
                    line.clear();
                }
                last
            })
        });
        Ok(Running { child, name, advice, complaint })
    }

    pub(crate) fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Waits for its end, which must be a good one.
    pub(crate) fn finish(mut self) -> Result<(), ImageError> {
        drop(self.child.stdout.take());
        let status = self.child.wait();
        let said = self.complaint.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        let said: Vec<String> = said.into_iter().filter(|line| !line.is_empty()).collect();
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) if said.is_empty() => Err(self.fault(status.to_string())),
            Ok(status) => Err(self.fault(format!("{status}: {}", said.join("; ")))),
            Err(error) => Err(self.fault(error.to_string())),
        }
    }

    /// Its whole output, at most `limit` bytes of it, and then its end.
    pub(crate) fn output(mut self, limit: u64) -> Result<Vec<u8>, ImageError> {
        let mut bytes = Vec::new();
        if let Some(stdout) = self.stdout() {
            stdout.take(limit + 1).read_to_end(&mut bytes).map_err(|error| self.fault(error.to_string()))?;
        }
        if bytes.len() as u64 > limit {
            return Err(self.fault(format!("it says more than {limit} bytes")));
        }
        self.finish().map(|()| bytes)
    }

    fn fault(&self, why: String) -> ImageError {
        ImageError::Program { program: self.name.into(), why, advice: self.advice.failed }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADVICE: Advice = Advice { install: "INSTALL IT", failed: "LOOK AT IT" };

    fn said(command: &mut Command) -> String {
        let ended = Running::start("thing", ADVICE, command).and_then(Running::finish);
        ended.map_or_else(|error| error.to_string(), |()| "well".into())
    }

    /// Whoever has a program is not told to install it, and is told what it said.
    #[test]
    fn only_a_program_that_is_not_there_is_to_be_installed() {
        assert_eq!(said(&mut Command::new("/nonexistent/thing")), "thing is not installed. INSTALL IT");
        let mut fails = Command::new("sh");
        fails.args(["-c", "echo the mirror is down >&2; exit 3"]);
        assert_eq!(said(&mut fails), "thing failed: exit status: 3: the mirror is down. LOOK AT IT");
        let mut silent = Command::new("sh");
        assert_eq!(said(silent.args(["-c", "exit 4"])), "thing failed: exit status: 4. LOOK AT IT");
        let denied = said(&mut Command::new("/proc/self/status"));
        assert!(
            denied.starts_with("thing failed: Permission denied") && !denied.contains("INSTALL"),
            "{denied}"
        );
        assert_eq!(said(&mut Command::new("true")), "well");
    }
}
