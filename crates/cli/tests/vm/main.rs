//! The real `hotcell` command and real machines.
//!
//! At most [`harness::SLOTS`] machines run at once on a host, whoever runs the
//! tests and however: a slot is a locked file in the home that all tests share.
//! Everything waits with a deadline, and a run that is over is asked three
//! things each time: is its VMM gone, is its registry entry gone, and does the
//! record verify.
//!
//! `HOTCELL_TEST_HOME` (else `HOTCELL_HOME`) names the shared home, in which
//! kernel and image are kept; `HOTCELL_TEST_ACCEL` the accelerator, `tcg` if unset.

mod attacks;
mod basics;
mod broken;
mod disk;
mod exec_gate;
mod execs;
mod files;
mod full;
mod harness;
mod images;
mod judgement;
mod latency;
mod machine;
mod many;
mod moments;
mod observed;
mod record;
mod refusals;
mod sabotage;
mod sigkill;
mod signals;
mod starts;
mod streams;
mod templates;
mod watch;
mod words;
