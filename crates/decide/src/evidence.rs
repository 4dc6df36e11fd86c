//! Evidence: what the host measured, as the record has it.
//!
//! The attack: something hands the judge a statement that was never recorded, or
//! that a guest made. So [`Evidence`] has private fields and one constructor,
//! [`Evidence::read`], which takes a recorded event and the object that it names,
//! checks one against the other, and gives nothing for an event outside the host
//! band. Testimony is another type ([`GuestClaim`](crate::GuestClaim)).
//!
//! | host-band event | its object |
//! |---|---|
//! | `RUN_BEGIN`, `RUN_END`, `PROCESS_EXIT` | none |
//! | `PROCESS_SPAWN` | none is needed here; verifiers check that the argv object exists |
//! | `TOOL_CALL` `hotcell.*` by HOST | the fact, named by `args` |
//! | `CAPABILITY_REQUEST` by HOST | the request, named by the reason's last word |
//! | `FILE_MUTATION`, `NETWORK_REQUEST` | none |
//!
//! Anything else in the host band is an error: the host does not write it, so
//! whoever did is not this host. An error is for the caller to turn into a kill.

use crate::broker::{CapabilityRequest, request_digest};
use crate::fact::{FactError, HostFact, RESERVED_PREFIX};
use hotcell_ledger::{ActorId, Capability, Digest, Event, EventType, FileOp, Payload};

/// One host observation, with the event that recorded it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evidence {
    sequence: u64,
    timestamp_ns: u64,
    observation: Observation,
}

/// What was observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Observation {
    /// A marker, spawn or exit: nothing to rule on beyond the lineage.
    Lifecycle,
    Fact(Box<HostFact>),
    Decision {
        capability: Capability,
        granted: bool,
        reason: String,
        request: Box<CapabilityRequest>,
    },
    Mutation {
        op: FileOp,
        path: String,
        before: Digest,
        after: Digest,
    },
    Network {
        destination: String,
    },
}

/// Why a host-band event is not evidence of anything: the record is damaged, or we have a bug.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EvidenceError {
    /// The actor is in the host band and is neither HOST nor VM.
    #[error("the actor {0} is in the host's band, and the host has no such actor")]
    UnknownActor(ActorId),
    /// The profile has no such event by this actor.
    #[error("the host records no {event:?} by {actor}")]
    NotInProfile {
        /// Which type.
        event: EventType,
        /// Whose.
        actor: ActorId,
    },
    /// The object that the event names is not at hand.
    #[error("the object {0} is missing")]
    MissingObject(Digest),
    /// The object at hand is another.
    #[error("the object has the digest {found}, the event names {named}")]
    OtherObject {
        /// What the event names.
        named: Digest,
        /// What the bytes have.
        found: Digest,
    },
    /// The object is not a fact.
    #[error("the fact's object can't be read: {0}")]
    Fact(#[from] FactError),
    /// The event calls the fact by another name, or is about another digest.
    #[error("the event says {event:?}, its object {object:?}")]
    FactDisagrees {
        /// Tool and result of the event.
        event: String,
        /// Tool and result of the object.
        object: String,
    },
    /// The reason is not in its form or names no request.
    #[error("the reason {0:?} is not `<decision> <rule> <request digest>`")]
    Reason(String),
    /// The object is not a request, or one for another capability.
    #[error("the object {0} is not the request that was decided")]
    Request(Digest),
}

impl Evidence {
    /// Reads a recorded event. `object` are the bytes that the event names, where it names any
    /// ([`Evidence::object_of`]). Testimony gives `None`.
    pub fn read(event: &Event, object: Option<&[u8]>) -> Result<Option<Evidence>, EvidenceError> {
        if !event.actor.is_host_band() {
            return Ok(None);
        }
        let is_host = match event.actor {
            ActorId::HOST => true,
            ActorId::VM => false,
            other => return Err(EvidenceError::UnknownActor(other)),
        };
        let observation = match &event.payload {
            Payload::RunBegin | Payload::RunEnd if is_host => Observation::Lifecycle,
            Payload::ProcessSpawn { .. } | Payload::ProcessExit { .. } => Observation::Lifecycle,
            Payload::ToolCall { tool, args, result } if is_host => {
                let fact = HostFact::from_object(named(*args, object)?)?;
                if fact.tool_name() != tool.as_str() || fact.result_digest() != *result {
                    return Err(EvidenceError::FactDisagrees {
                        event: format!("{tool} {result}"),
                        object: format!("{} {}", fact.tool_name(), fact.result_digest()),
                    });
                }
                Observation::Fact(Box::new(fact))
            }
            Payload::CapabilityRequest { capability, granted, reason } if is_host => {
                let digest = request_digest(reason.as_str())
                    .ok_or_else(|| EvidenceError::Reason(reason.as_str().to_owned()))?;
                let request = CapabilityRequest::from_object(named(digest, object)?)
                    .filter(|request| request.capability() == *capability)
                    .ok_or(EvidenceError::Request(digest))?;
                Observation::Decision {
                    capability: *capability,
                    granted: *granted,
                    reason: reason.as_str().to_owned(),
                    request: Box::new(request),
                }
            }
            Payload::FileMutation { op, path, before, after } => Observation::Mutation {
                op: *op,
                path: path.as_str().to_owned(),
                before: *before,
                after: *after,
            },
            Payload::NetworkRequest { destination, .. } => {
                Observation::Network { destination: destination.as_str().to_owned() }
            }
            payload => {
                return Err(EvidenceError::NotInProfile { event: payload.event_type(), actor: event.actor });
            }
        };
        Ok(Some(Evidence { sequence: event.sequence, timestamp_ns: event.timestamp_ns, observation }))
    }

    /// The object that must be at hand to read this event as evidence; `None` where it needs none.
    pub fn object_of(event: &Event) -> Option<Digest> {
        if !event.actor.is_host_band() {
            return None;
        }
        match &event.payload {
            Payload::ToolCall { tool, args, .. } if tool.as_str().starts_with(RESERVED_PREFIX) => Some(*args),
            Payload::CapabilityRequest { reason, .. } => request_digest(reason.as_str()),
            _ => None,
        }
    }

    /// Position of the event that recorded it.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Host time of the event that recorded it.
    pub fn timestamp_ns(&self) -> u64 {
        self.timestamp_ns
    }

    /// The fact, where it is one.
    pub fn fact(&self) -> Option<&HostFact> {
        match &self.observation {
            Observation::Fact(fact) => Some(fact),
            _ => None,
        }
    }

    pub(crate) fn observation(&self) -> &Observation {
        &self.observation
    }
}

fn named(digest: Digest, object: Option<&[u8]>) -> Result<&[u8], EvidenceError> {
    let object = object.ok_or(EvidenceError::MissingObject(digest))?;
    let found = Digest::of(object);
    if found == digest { Ok(object) } else { Err(EvidenceError::OtherObject { named: digest, found }) }
}
