//! Exit codes of `hotcell`, and how errors are told.
//!
//! | command | code | when |
//! |---|---|---|
//! | any | 2 | the command line is wrong: what it says can't be, whatever this host has |
//! | any | 125 | what it names can't be had: a file, a policy, an image, a part of this host |
//! | `run` | the command's own, 128+n for a signal | verdict ALLOWED |
//! | `run` | 99 | KILLED |
//! | `run` | 124 | the run took as long as it may |
//! | `run` | 125 | FAILED: Hotcell could not do it |
//! | `run` | 128+n | stopped by signal n |
//! | `verify`, `report` | 0, 1, 3 | intact, not intact, incomplete |
//! | those that read a record | 2 | there is no such record |
//! | `doctor` | 0, 125 | a run is possible here, or not |

use crate::say;
use std::process::ExitCode;

/// The verdict is KILLED.
pub(crate) const KILLED: u8 = 99;
/// The run took as long as it may.
pub(crate) const TIMED_OUT: u8 = 124;
/// Hotcell could not do it.
pub(crate) const FAILED: u8 = 125;
/// The command line is wrong.
pub(crate) const USAGE: u8 = 2;

/// An error that ends the command: what is wrong and what to do, and the exit code.
#[derive(Debug)]
pub(crate) struct Fatal {
    code: u8,
    text: String,
}

impl std::fmt::Display for Fatal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.text.trim_end())
    }
}

impl Fatal {
    pub(crate) fn failed(error: impl std::fmt::Display) -> Fatal {
        Fatal { code: FAILED, text: error.to_string() }
    }

    pub(crate) fn usage(error: impl std::fmt::Display) -> Fatal {
        Fatal { code: USAGE, text: error.to_string() }
    }

    pub(crate) fn with_code(code: u8, error: impl std::fmt::Display) -> Fatal {
        Fatal { code, text: error.to_string() }
    }

    /// Whether it is what this host has, and not what was typed.
    pub(crate) fn is_failure(&self) -> bool {
        self.code == FAILED
    }

    /// Prints it as one paragraph.
    pub(crate) fn report(&self) -> ExitCode {
        say::note(&self.text);
        ExitCode::from(self.code)
    }
}
