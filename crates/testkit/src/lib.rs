//! A machine that is not one, and guests that behave as a test says.
//!
//! ```text
//!  FakeBackend ──start──▶ fake machine ◀─ socket pair ─▶ thread: a script over FakeGuest
//!   calls, counted           kill, exit event                honest, hostile or broken
//! ```
//! For tests alone: it isolates nothing, and says so wherever it is named (`fake`). What it keeps of a real machine is
//! what the runtime can see of one: the byte channel, the descriptor that tells of its end, death with its owner, and a
//! teardown that proves only what was checked.
//! Who may call: the tests of other crates, as a dev-dependency (`tests/edges.rs` holds that).
#![forbid(unsafe_code)]

mod backend;
mod guest;
mod honest;
mod noise;

pub use backend::{FakeBackend, FakeMachine, Script, StandIn, StartAs, Step, StepTaken};
pub use guest::{FakeGuest, FromHost};
pub use honest::honest;
pub use noise::Noise;
