//! May it? The broker decides each capability request from the sealed policy alone.
//!
//! Pure: the same policy and request give the same decision, so a verifier decides
//! again and compares. The justification is recorded and never consulted. Three
//! capabilities are never granted, whatever the policy; it has no field for them.
//!
//! ```text
//! request object   {"capability":"FILE_WRITE","resource":"/workspace/a","justification":"…","actor":4096}
//! reason text      <allow|deny|defer> <rule> <hex digest of the request object>
//! ```

use crate::fact::cut;
use hotcell_ledger::{ActorId, Capability, Digest, NfcString, Payload};
use hotcell_policy::{CapabilityPolicy, CleanPath, PackageGrant, WriteGrant};
use serde::{Deserialize, Serialize};

/// Decisions that a run may ask for. Each costs the host an event and an object, the allowed ones too, so a workload that
/// may do what it asks for could fill the disk by asking. Four a second for an hour: agents ask a few hundred times.
pub const MAX_DECISIONS: u64 = 16_384;
/// Longest resource in characters.
pub const MAX_RESOURCE_CHARS: usize = 512;
/// Longest justification in characters.
pub const MAX_JUSTIFICATION_CHARS: usize = 4096;
/// Longest request object in bytes: both texts, one character over their limit, six bytes each in JSON.
pub const MAX_REQUEST_BYTES: usize = (MAX_RESOURCE_CHARS + MAX_JUSTIFICATION_CHARS + 2) * 6 + 256;

/// Something that the workload asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapabilityRequest {
    capability: Capability,
    resource: String,
    justification: String,
    actor: ActorId,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestObject {
    capability: String,
    resource: String,
    justification: String,
    actor: u64,
}

impl CapabilityRequest {
    /// A request as it came. Texts over their limit are kept one character over it:
    /// enough to be refused for it, and no more.
    pub fn new(
        capability: Capability,
        resource: &str,
        justification: &str,
        actor: ActorId,
    ) -> CapabilityRequest {
        CapabilityRequest {
            capability,
            resource: cut(resource, MAX_RESOURCE_CHARS + 1),
            justification: cut(justification, MAX_JUSTIFICATION_CHARS + 1),
            actor,
        }
    }

    /// What is asked for.
    pub fn capability(&self) -> Capability {
        self.capability
    }

    /// What exactly.
    pub fn resource(&self) -> &str {
        &self.resource
    }

    /// Who asks, as the host attributed it.
    pub fn actor(&self) -> ActorId {
        self.actor
    }

    /// The request object's bytes.
    pub fn to_object(&self) -> Vec<u8> {
        let object = RequestObject {
            capability: self.capability.as_str().to_owned(),
            resource: self.resource.clone(),
            justification: self.justification.clone(),
            actor: self.actor.get(),
        };
        // Three texts and a number: nothing that JSON can't say.
        serde_json::to_vec(&object).unwrap_or_default()
    }

    /// Reads a request object, in its one spelling.
    pub fn from_object(bytes: &[u8]) -> Option<CapabilityRequest> {
        if bytes.len() > MAX_REQUEST_BYTES {
            return None;
        }
        let object: RequestObject = serde_json::from_slice(bytes).ok()?;
        let capability = Capability::from_name(&object.capability)?;
        let actor = ActorId::new(object.actor)?;
        let request = CapabilityRequest::new(capability, &object.resource, &object.justification, actor);
        (request.to_object() == bytes).then_some(request)
    }
}

macro_rules! rules {
    ($($(#[$meta:meta])* $variant:ident = $name:literal;)+) => {
        /// Which rule decided.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Rule { $($(#[$meta])* $variant),+ }

        impl Rule {
            /// Every rule.
            pub const ALL: &'static [Rule] = &[$(Rule::$variant),+];

            /// The stable name.
            pub const fn name(self) -> &'static str {
                match self { $(Rule::$variant => $name),+ }
            }
        }
    };
}

rules! {
    /// No policy can grant this.
    NeverGranted = "never_granted";
    /// The resource is empty, too long or contains a NUL byte.
    MalformedResource = "malformed_resource";
    /// The justification is too long or contains a NUL byte.
    MalformedJustification = "malformed_justification";
    /// The resource is not a path that can be cleaned.
    MalformedPath = "malformed_path";
    /// The exact path is listed.
    WriteExact = "write_exact";
    /// A listed tree contains the path.
    WriteTree = "write_tree";
    /// Nothing grants writing the path.
    WriteNotListed = "write_not_listed";
    /// The policy lets processes start.
    SpawnAllowed = "spawn_allowed";
    /// The policy lets no process start.
    SpawnOff = "spawn_off";
    /// The package is listed: for the next image, not for this machine.
    PackageListed = "package_listed";
    /// The package is pinned but not listed.
    PackageNotListed = "package_not_listed";
    /// The package is listed with another artifact.
    PackageOtherArtifact = "package_other_artifact";
    /// The package is not pinned exactly.
    PackageNotPinned = "package_not_pinned";
}

/// What the broker decided, and by which rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Decision {
    /// Yes.
    Allow(Rule),
    /// No.
    Deny(Rule),
    /// Not in this machine: noted for an image rebuild. Counts as a denial.
    Defer(Rule),
}

impl Decision {
    /// Which rule decided.
    pub const fn rule(self) -> Rule {
        match self {
            Decision::Allow(rule) | Decision::Deny(rule) | Decision::Defer(rule) => rule,
        }
    }

    /// `allow`, `deny` or `defer`.
    pub const fn verb(self) -> &'static str {
        match self {
            Decision::Allow(_) => "allow",
            Decision::Deny(_) => "deny",
            Decision::Defer(_) => "defer",
        }
    }

    /// The `granted` flag of the event.
    pub const fn is_granted(self) -> bool {
        matches!(self, Decision::Allow(_))
    }

    /// `<verb> <rule> <hex digest of the request object>`.
    pub fn reason_text(self, request: Digest) -> String {
        format!("{} {} {request}", self.verb(), self.rule().name())
    }

    /// The payload to record, and the request object to store before it.
    pub fn to_payload(self, request: &CapabilityRequest) -> (Payload, Vec<u8>) {
        let object = request.to_object();
        let payload = Payload::CapabilityRequest {
            capability: request.capability,
            granted: self.is_granted(),
            reason: NfcString::new(&self.reason_text(Digest::of(&object))),
        };
        (payload, object)
    }
}

/// The digest of the request object that a recorded reason names.
pub fn request_digest(reason: &str) -> Option<Digest> {
    Digest::from_hex(reason.rsplit(' ').next()?)
}

/// Decides capability requests. Has no state: nothing that was asked changes what is answered.
#[derive(Clone, Copy, Debug, Default)]
pub struct Broker;

impl Broker {
    /// Decides one request.
    pub fn decide(policy: &CapabilityPolicy, request: &CapabilityRequest) -> Decision {
        let resource = request.resource.as_str();
        match request.capability {
            Capability::NetEgress | Capability::RawSyscall | Capability::PrivilegeRaise => {
                return Decision::Deny(Rule::NeverGranted);
            }
            Capability::FileWrite | Capability::ProcessSpawn | Capability::PackageInstall => {}
        }
        if resource.is_empty() || resource.contains('\0') || resource.chars().count() > MAX_RESOURCE_CHARS {
            return Decision::Deny(Rule::MalformedResource);
        }
        if request.justification.contains('\0')
            || request.justification.chars().count() > MAX_JUSTIFICATION_CHARS
        {
            return Decision::Deny(Rule::MalformedJustification);
        }
        match request.capability {
            Capability::FileWrite => match CleanPath::clean(resource) {
                Err(_) => Decision::Deny(Rule::MalformedPath),
                Ok(path) => match policy.write_grant(&path) {
                    WriteGrant::Exact => Decision::Allow(Rule::WriteExact),
                    WriteGrant::Tree => Decision::Allow(Rule::WriteTree),
                    WriteGrant::None => Decision::Deny(Rule::WriteNotListed),
                },
            },
            Capability::ProcessSpawn if policy.may_spawn() => Decision::Allow(Rule::SpawnAllowed),
            Capability::ProcessSpawn => Decision::Deny(Rule::SpawnOff),
            Capability::PackageInstall => match policy.package_grant(resource) {
                PackageGrant::Listed(_) => Decision::Defer(Rule::PackageListed),
                PackageGrant::NotListed => Decision::Deny(Rule::PackageNotListed),
                PackageGrant::OtherArtifact => Decision::Deny(Rule::PackageOtherArtifact),
                PackageGrant::NotPinned => Decision::Deny(Rule::PackageNotPinned),
            },
            Capability::NetEgress | Capability::RawSyscall | Capability::PrivilegeRaise => {
                Decision::Deny(Rule::NeverGranted)
            }
        }
    }
}
