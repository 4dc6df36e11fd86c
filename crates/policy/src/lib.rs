//! What a run may do, written down before it starts and unchangeable after.
//!
//! Operators and libraries fill in *drafts*: [`PolicyDraft`], [`RunDraft`],
//! [`BinaryDraft`]. A draft has public fields and can say too much. Sealing checks
//! everything at once and gives another type, with private fields, no setter and
//! no `Deserialize`; only sealed types are accepted by the crates that decide,
//! boot and record.
//!
//! ```text
//! policy.toml ─► PolicyDraft ─┐
//!                             ├─► RunDraft ── seal ──► SealedSpec ── to_json ──► spec.json
//! image, command, run id ─────┘        ▲                                            │
//!                                      └────────────── from_spec_json ──────────────┘
//! Manifest ─► EnvironmentBaseline, BinaryPolicy
//! ```
//!
//! Guarantees: no value of any type here can name a network, a share of the host,
//! a disk that outlives the run, or a layer that is off. Not guaranteed here: that
//! a machine is built as the spec says; that is measured by others.
//! Nothing here does I/O or reads a clock.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)
)]

pub mod baseline;
pub mod binary;
pub mod capability;
pub mod draft;
pub mod hex;
pub mod isolation;
pub mod limits;
pub mod manifest;
pub mod parse;
pub mod path;
pub mod run;
pub mod service;
pub mod spec;
pub mod violation;

pub use baseline::{BaselineEntry, BaselineError, EnvironmentBaseline};
pub use binary::{BinaryDraft, BinaryPolicy, Membership};
pub use capability::{CapabilityPolicy, PackageGrant, PinnedPackage, WriteGrant};
pub use draft::{
    BackendDraft, CapabilitiesDraft, ExecDraft, KataDraft, LimitsDraft, PolicyDraft, ProfileDraft,
    SealedPolicy, ThresholdsDraft, WorkspaceExec,
};
pub use isolation::{IsolationPolicy, is_run_id};
pub use manifest::{EntryKind, Manifest, ManifestEntry, ManifestError};
pub use parse::PolicyError;
pub use path::{CleanPath, PathError, PathPolicy, Region};
pub use run::{Command, EnvValue, ImageRef, RunDraft, SpecError};
pub use service::{Service, ServiceDraft, ServiceError};
pub use spec::SealedSpec;
pub use violation::{Code, Violation, Violations};
