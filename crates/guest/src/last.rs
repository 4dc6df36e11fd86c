//! The end of the machine.
//!
//! What it guarantees: whatever goes wrong in PID 1 ends the machine at once,
//! with one line on the console; it never goes on half built.
//! Restart, not power-off: without ACPI tables for it a microvm does not power
//! off, while a restart under `-no-reboot` ends the VMM.

use rustix::system::{RebootCommand, reboot};
use std::io::Write;

/// What failed, for people: "failed to …: reason".
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    /// A failure without a cause of the system.
    pub(crate) fn new(what: impl Into<String>) -> Failure {
        Failure(what.into())
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Says what was being done when a call of the system failed.
pub(crate) trait Doing<T> {
    /// `what` completes "failed to".
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Failure>;
}

impl<T, E: std::fmt::Display> Doing<T> for Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Failure> {
        self.map_err(|error| Failure(format!("failed to {}: {error}", what())))
    }
}

/// A panic in PID 1 is our bug: say where, end the machine.
pub(crate) fn arm() {
    std::panic::set_hook(Box::new(|info| {
        console(&format!("panic: {info}"));
        restart();
    }));
}

/// Ends the machine when there is no channel to say why.
pub(crate) fn stop_unheard(failure: &Failure) -> ! {
    console(&failure.to_string());
    restart()
}

/// One line for the serial console.
pub(crate) fn console(text: &str) {
    // The console is the only place left; if it is gone too, nobody listens.
    let _ = std::io::stderr().write_all(format!("hotcell-init: {text}\n").as_bytes());
    // A restart does not wait for what the serial port has not sent yet.
    let _ = rustix::termios::tcdrain(std::io::stderr());
}

/// Ends the machine.
pub(crate) fn restart() -> ! {
    let _ = reboot(RebootCommand::Restart);
    // Only reached outside of PID 1's place, in a test by hand: end this process at least.
    hotcell_sys::guest::exit_now(1)
}
