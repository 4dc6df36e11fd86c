//! The sealed spec: what a run is, checked and fixed.
//!
//! Made by [`RunDraft::seal`](crate::RunDraft::seal) alone. It has accessors and no
//! setter, and can't be deserialized: reading a record gives a draft, which must
//! pass the checks again. Holding one proves that [`IsolationPolicy`](crate::IsolationPolicy)
//! found nothing to refuse. Two parties that hold equal specs hold equal bytes.

use crate::draft::{LimitsDraft, SealedPolicy};
use crate::run::{Command, ImageRef, RunDraft, to_spec_json};
use crate::service::Service;
use hotcell_ledger::Digest;

/// What a run is. Immutable.
#[derive(Clone, Debug, PartialEq)]
pub struct SealedSpec {
    draft: RunDraft,
    policy: SealedPolicy,
    json: Vec<u8>,
}

impl SealedSpec {
    pub(crate) fn from_checked(draft: RunDraft, policy: SealedPolicy) -> SealedSpec {
        SealedSpec { json: to_spec_json(&draft), draft, policy }
    }

    /// The run's id.
    pub fn run_id(&self) -> &str {
        &self.draft.run_id
    }

    /// What boots.
    pub fn image(&self) -> &ImageRef {
        &self.draft.image
    }

    /// Kernel arguments beyond our own.
    pub fn kernel_args(&self) -> &[String] {
        &self.draft.kernel_args
    }

    /// The vsock CID, where a device was asked for.
    pub fn vsock_cid(&self) -> Option<u32> {
        self.draft.vsock_cid
    }

    /// What is started first.
    pub fn command(&self) -> Option<&Command> {
        self.draft.command.as_ref()
    }

    /// What the run may do.
    pub fn policy(&self) -> &SealedPolicy {
        &self.policy
    }

    /// What the machine may use.
    pub fn limits(&self) -> &LimitsDraft {
        self.policy.limits()
    }

    /// Digest of the environment baseline file.
    pub fn baseline(&self) -> Option<Digest> {
        self.draft.baseline
    }

    /// Digest of the binary allowlist file.
    pub fn binaries(&self) -> Option<Digest> {
        self.draft.binaries
    }

    /// Digest of the fingerprint file.
    pub fn fingerprint(&self) -> Option<Digest> {
        self.draft.fingerprint
    }

    /// Root services that the image declares: the only processes that may be root.
    pub fn services(&self) -> &[Service] {
        &self.draft.services
    }

    /// The canonical bytes: the bundle's spec.json.
    pub fn to_json(&self) -> Vec<u8> {
        self.json.clone()
    }

    /// BLAKE3 of these bytes.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.json)
    }
}
