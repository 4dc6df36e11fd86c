//! Everything that says yes or no.
//!
//! Pure: no I/O, no lock, no clock, no randomness; timestamps, tokens and object
//! bytes come in as arguments. So the same code decides live and in a stranger's
//! verifier, and both reach the same verdict.
//!
//! ```text
//!                       host-band event + object                Ruling
//! recorder ──► VerdictFold ──► Evidence::read ──► Judge ──► Continue | Kill
//!                 │  ▲ every event                  │
//!                 │  └── gate1::Lineage             ├─ Broker   (re-decides each decision)
//!                 ▼                                 └─ Monitor  (judges each mutation)
//!           DerivedVerdict
//! guest ──► GuestClaim ──► Admission ──► recorded as testimony, or counted as refused
//! ```
//!
//! Guarantees: the judge is fed by [`Evidence`] only, and evidence is made from a
//! recorded host-band event only. Testimony can't trip it and can't untrip it. Nothing
//! here can name an opinion of the advisory crate. Not guaranteed: that what the host
//! recorded is true; measuring is the work of others.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

mod accumulate;
pub mod broker;
pub mod claims;
pub mod evidence;
pub mod fact;
pub mod judge;
pub mod monitor;
pub mod process;
pub mod proof;
pub mod reason;
pub mod spawn;
pub mod verdict;

pub use broker::{Broker, CapabilityRequest, Decision, Rule};
pub use claims::{Admission, Admitted, ClaimKind, GuestClaim, Refusal, RefusalCode};
pub use evidence::{Evidence, EvidenceError};
pub use fact::{
    Check, Direction, DiskMoment, ExecHow, FactError, HostFact, LayerState, OutputStream, SeenProcess,
    ViolationKind,
};
pub use judge::{Judge, Ruling, Trip, TripCause};
pub use monitor::{Judgement, Monitor, Mutation, MutationError, metadata_digest};
pub use process::{Executable, Life, Place, Process, ProcessRules};
pub use proof::Unproven;
pub use reason::Reason;
pub use spawn::{Authorizer, IssueError, SpawnAttempt, SpawnDecision, SpawnDenial, SpawnPermit, SpawnToken};
pub use verdict::{DerivedVerdict, ExecExit, FoldError, Verdict, VerdictFold};
