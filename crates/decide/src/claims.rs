//! What the guest says: checked against the live lineage before it is recorded.
//!
//! The attack: a lying guest claims an exit that did not happen, a child of nobody,
//! an action of an actor that is gone, an event in the host's name; the record's
//! lineage breaks, and the safety system kills the run for it. Here such a claim is
//! refused, counted, and reported by the host as refused. What is admitted can't
//! break Gate 1, whatever the guest sends (`tests/claims.rs` holds that for
//! generated floods).
//!
//! ```text
//! wire claim ──► GuestClaim::parse ──► Admission::admit ──► Admitted { actor ≥ 0x1000, parent, payload, object }
//!                     │ RefusalCode         │ RefusalCode
//!                     └────────► Admission::refuse ──► first of its kind: a ClaimRefused fact now; later: counted
//! ```
//! The guest names actors by numbers of its own choosing, and execs by the number of
//! the exec. The host maps both to ids that it assigns. A [`GuestClaim`] has no
//! variant for run markers, and its numbers are never actor ids, so it can't name
//! the host's band. Bounded: [`MAX_CLAIMED_ACTORS`] actors, [`MAX_ADMITTED`] claims, and at
//! most one fact now and one at the end for each pair of kind and code. The host's own
//! execs have a bound of their own: no story keeps the host from starting one.

use crate::broker::MAX_DECISIONS;
use crate::fact::{HostFact, RESERVED_PREFIX};
use hotcell_ledger::gate1::{Code, Lineage};
use hotcell_ledger::{ActorId, Capability, Digest, Event, FileOp, NfcString, Payload, Protocol};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Execs that the host may start in a run: one a second for an hour.
pub const MAX_RUN_EXECS: usize = 4096;
/// Actors that the guest may claim. Each leaves an object in the bundle.
pub const MAX_CLAIMED_ACTORS: usize = 32_768;
/// Claims that are recorded; a story longer than this is cut, and the rest counted.
pub const MAX_ADMITTED: u64 = 262_144;
/// Objects that an exec leaves at most: argv, two outputs, and the facts of both and of its end.
const OBJECTS_OF_AN_EXEC: usize = 6;

// A bundle that no verifier reads is no record: whatever the guest does, a quarter of what one lists is left for the rest.
const _: () = assert!(
    MAX_RUN_EXECS * OBJECTS_OF_AN_EXEC + MAX_CLAIMED_ACTORS + MAX_DECISIONS as usize
        <= hotcell_ledger::bundle::MAX_FILES / 4 * 3
);

/// Longest text of a claim in bytes.
pub const MAX_CLAIM_TEXT: usize = 2048;

/// What a claim is about. The numbers are those of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClaimKind {
    /// A process began.
    Spawn,
    /// A process ended.
    Exit,
    /// A file changed.
    File,
    /// A tool was called.
    Tool,
    /// A capability was asked for.
    Capability,
    /// A network request was made.
    Network,
    /// None of these: a run marker, or nothing at all.
    Other,
}

impl ClaimKind {
    /// The kind with this number on the wire.
    pub const fn from_byte(byte: u8) -> ClaimKind {
        match byte {
            1 => ClaimKind::Spawn,
            2 => ClaimKind::Exit,
            3 => ClaimKind::File,
            4 => ClaimKind::Tool,
            5 => ClaimKind::Capability,
            6 => ClaimKind::Network,
            _ => ClaimKind::Other,
        }
    }
}

/// Why a claim is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RefusalCode {
    /// A kind that a guest may not claim, such as a run marker.
    NotClaimable,
    /// A number that lies in the host's band.
    HostBand,
    /// A tool name that is reserved for the host.
    ReservedName,
    /// A text that is too long, not UTF-8, empty or has a NUL byte.
    BadText,
    /// A value that the enumeration does not have.
    BadValue,
    /// An action by an actor that was never claimed to begin.
    UnknownActor,
    /// An action by an actor that ended.
    AfterExit,
    /// A beginning of an actor that is live.
    DoubleSpawn,
    /// A beginning of an actor that ended.
    Respawn,
    /// A beginning whose parent is not live.
    OrphanSpawn,
    /// An end of an actor that is not live.
    ExitWithoutSpawn,
    /// An end of an exec, which the host sees itself.
    ForgedExit,
    /// More actors than the host follows.
    TooManyActors,
    /// More claims than the host records.
    TooManyClaims,
}

/// A claim of the guest, well formed. Testimony: it says nothing about what happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestClaim {
    subject: u64,
    statement: Statement,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Statement {
    Spawn { parent: u64, program: String },
    Exit { code: i32 },
    File { op: FileOp, path: String },
    Tool { name: String },
    Capability { capability: Capability, granted: bool, reason: String },
    Network { protocol: Protocol, destination: String },
}

impl GuestClaim {
    /// Reads a claim as the wire carries it: kind, whose, whose child, value, text.
    pub fn parse(
        kind: ClaimKind,
        subject: u64,
        parent: u64,
        value: i32,
        text: &[u8],
    ) -> Result<GuestClaim, RefusalCode> {
        let in_host_band = |number: u64| number >= ActorId::HOST_BAND_START;
        if in_host_band(subject) || in_host_band(parent) {
            return Err(RefusalCode::HostBand);
        }
        if text.len() > MAX_CLAIM_TEXT {
            return Err(RefusalCode::BadText);
        }
        let text = core::str::from_utf8(text).map_err(|_| RefusalCode::BadText)?;
        let filled = || {
            let fine = !text.is_empty() && !text.contains('\0');
            fine.then(|| text.to_owned()).ok_or(RefusalCode::BadText)
        };
        let byte = |value: i32| u8::try_from(value).map_err(|_| RefusalCode::BadValue);
        let statement = match kind {
            ClaimKind::Spawn => Statement::Spawn { parent, program: filled()? },
            ClaimKind::Exit => Statement::Exit { code: value },
            ClaimKind::File => Statement::File {
                op: FileOp::from_byte(byte(value)?).ok_or(RefusalCode::BadValue)?,
                path: filled()?,
            },
            ClaimKind::Tool => {
                // The name is compared as it will be recorded, and without regard to case, so that
                // no reader takes it for the host's.
                let name = filled()?;
                if NfcString::new(&name).as_str().to_lowercase().starts_with(RESERVED_PREFIX) {
                    return Err(RefusalCode::ReservedName);
                }
                Statement::Tool { name }
            }
            ClaimKind::Capability => {
                let granted = match value >> 8 {
                    0 => false,
                    1 => true,
                    _ => return Err(RefusalCode::BadValue),
                };
                let capability = Capability::from_byte(byte(value & 0xFF)?).ok_or(RefusalCode::BadValue)?;
                Statement::Capability { capability, granted, reason: text.to_owned() }
            }
            ClaimKind::Network => Statement::Network {
                protocol: Protocol::from_byte(byte(value)?).ok_or(RefusalCode::BadValue)?,
                destination: filled()?,
            },
            ClaimKind::Other => return Err(RefusalCode::NotClaimable),
        };
        Ok(GuestClaim { subject, statement })
    }

    /// What it is about.
    pub fn kind(&self) -> ClaimKind {
        match &self.statement {
            Statement::Spawn { .. } => ClaimKind::Spawn,
            Statement::Exit { .. } => ClaimKind::Exit,
            Statement::File { .. } => ClaimKind::File,
            Statement::Tool { .. } => ClaimKind::Tool,
            Statement::Capability { .. } => ClaimKind::Capability,
            Statement::Network { .. } => ClaimKind::Network,
        }
    }
}

/// A claim that may be recorded now, as testimony. Record it before the next is asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Whose, by the id that the host assigned; never in the host's band.
    pub actor: ActorId,
    /// Whose child.
    pub parent: Option<ActorId>,
    /// What.
    pub payload: Payload,
    /// An object that the payload names, to store before it.
    pub object: Option<Vec<u8>>,
}

/// A claim that must not be recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub code: RefusalCode,
    /// What to record instead, where this is the first of its kind and code.
    pub fact: Option<HostFact>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    actor: ActorId,
    parent: ActorId,
}

/// Admits claims of one run, and assigns ids to everything that lives in the guest.
#[derive(Debug)]
pub struct Admission {
    execs: BTreeMap<u32, Known>,
    claimed: BTreeMap<u64, Known>,
    next: u64,
    admitted: u64,
    refused: BTreeMap<(ClaimKind, RefusalCode), u64>,
}

impl Default for Admission {
    fn default() -> Admission {
        Admission::new()
    }
}

impl Admission {
    /// Before anything runs.
    pub fn new() -> Admission {
        Admission {
            execs: BTreeMap::new(),
            claimed: BTreeMap::new(),
            next: ActorId::FIRST_GUEST.get(),
            admitted: 0,
            refused: BTreeMap::new(),
        }
    }

    /// Assigns an id to an exec that the host starts, a child of VM. `None`: there are too many, or it has one.
    pub fn begin_exec(&mut self, exec: u32) -> Option<ActorId> {
        if self.execs.contains_key(&exec) {
            return None;
        }
        let actor = self.assign(self.execs.len() < MAX_RUN_EXECS)?;
        self.execs.insert(exec, Known { actor, parent: ActorId::VM });
        Some(actor)
    }

    /// The id of an exec.
    pub fn exec_actor(&self, exec: u32) -> Option<ActorId> {
        self.execs.get(&exec).map(|known| known.actor)
    }

    /// Reads and admits a claim as the wire carries it.
    pub fn admit_wire(
        &mut self,
        (kind, subject, parent, value, text): (u8, u64, u64, i32, &[u8]),
        lineage: &Lineage,
    ) -> Result<Admitted, Refusal> {
        let kind = ClaimKind::from_byte(kind);
        match GuestClaim::parse(kind, subject, parent, value, text) {
            Ok(claim) => self.admit(&claim, lineage),
            Err(code) => Err(self.refuse(kind, code)),
        }
    }

    /// Checks a claim against the live lineage. `lineage` must have seen everything that was recorded.
    pub fn admit(&mut self, claim: &GuestClaim, lineage: &Lineage) -> Result<Admitted, Refusal> {
        let kind = claim.kind();
        match self.check(claim, lineage) {
            Ok(admitted) => {
                self.admitted = self.admitted.saturating_add(1);
                Ok(admitted)
            }
            Err(code) => Err(self.refuse(kind, code)),
        }
    }

    /// Counts a refusal, also of what could not be read as a claim.
    pub fn refuse(&mut self, kind: ClaimKind, code: RefusalCode) -> Refusal {
        let count = self.refused.entry((kind, code)).or_default();
        *count = count.saturating_add(1);
        let fact = (*count == 1).then_some(HostFact::ClaimRefused { kind, code, count: 1 });
        Refusal { code, fact }
    }

    /// At the run's end: how many more there were of each kind and code after the first.
    pub fn summary(&self) -> Vec<HostFact> {
        self.refused
            .iter()
            .filter(|(_, count)| **count > 1)
            .map(|((kind, code), count)| HostFact::ClaimRefused {
                kind: *kind,
                code: *code,
                count: count - 1,
            })
            .collect()
    }

    /// How many claims were refused.
    pub fn refused(&self) -> u64 {
        self.refused.values().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The guest's actors that are live, latest first, with their parents: for their exits when the machine is gone.
    pub fn still_live(&self, lineage: &Lineage) -> Vec<(ActorId, ActorId)> {
        let mut live: Vec<_> = self
            .execs
            .values()
            .chain(self.claimed.values())
            .filter(|known| lineage.is_live(known.actor))
            .map(|known| (known.actor, known.parent))
            .collect();
        live.sort_unstable_by(|a, b| b.cmp(a));
        live
    }

    fn assign(&mut self, room: bool) -> Option<ActorId> {
        if !room {
            return None;
        }
        let actor = ActorId::new(self.next).filter(|actor| !actor.is_host_band())?;
        self.next += 1;
        Some(actor)
    }

    /// An exec by its number, else an actor that the guest named.
    fn resolve(&self, number: u64) -> Option<(Known, bool)> {
        let exec = u32::try_from(number).ok().and_then(|exec| self.execs.get(&exec));
        exec.map(|known| (*known, true)).or_else(|| self.claimed.get(&number).map(|known| (*known, false)))
    }

    fn check(&mut self, claim: &GuestClaim, lineage: &Lineage) -> Result<Admitted, RefusalCode> {
        if self.admitted >= MAX_ADMITTED {
            return Err(RefusalCode::TooManyClaims);
        }
        let known = self.resolve(claim.subject);
        let admitted = match &claim.statement {
            Statement::Spawn { parent, program } => {
                if let Some((known, _)) = known {
                    let live = lineage.is_live(known.actor);
                    return Err(if live { RefusalCode::DoubleSpawn } else { RefusalCode::Respawn });
                }
                let (parent, _) = self
                    .resolve(*parent)
                    .filter(|(parent, _)| lineage.is_live(parent.actor))
                    .ok_or(RefusalCode::OrphanSpawn)?;
                let object = serde_json::to_vec(&[program]).map_err(|_| RefusalCode::BadText)?;
                let payload = Payload::ProcessSpawn {
                    binary: Digest::ZERO,
                    argv: Digest::of(&object),
                    cwd: NfcString::default(),
                };
                let room = self.claimed.len() < MAX_CLAIMED_ACTORS;
                let actor = self.assign(room).ok_or(RefusalCode::TooManyActors)?;
                Admitted { actor, parent: Some(parent.actor), payload, object: Some(object) }
            }
            statement => {
                let (known, is_exec) = known.ok_or(match statement {
                    Statement::Exit { .. } => RefusalCode::ExitWithoutSpawn,
                    _ => RefusalCode::UnknownActor,
                })?;
                if is_exec && matches!(statement, Statement::Exit { .. }) {
                    return Err(RefusalCode::ForgedExit);
                }
                Admitted {
                    actor: known.actor,
                    parent: Some(known.parent),
                    payload: payload(statement),
                    object: None,
                }
            }
        };
        // The lineage has the last word; the checks above only give better names.
        let event = Event {
            sequence: 0,
            timestamp_ns: 0,
            actor: admitted.actor,
            parent: admitted.parent,
            payload: admitted.payload.clone(),
        };
        if let Some(code) = lineage.would_break(&event) {
            return Err(refusal_of(code));
        }
        if let (Statement::Spawn { .. }, Some(parent)) = (&claim.statement, admitted.parent) {
            self.claimed.insert(claim.subject, Known { actor: admitted.actor, parent });
        }
        Ok(admitted)
    }
}

fn payload(statement: &Statement) -> Payload {
    match statement {
        Statement::Exit { code } => Payload::ProcessExit { code: *code },
        Statement::File { op, path } => Payload::FileMutation {
            op: *op,
            path: NfcString::new(path),
            before: Digest::ZERO,
            after: Digest::ZERO,
        },
        Statement::Tool { name } => {
            Payload::ToolCall { tool: NfcString::new(name), args: Digest::ZERO, result: Digest::ZERO }
        }
        Statement::Capability { capability, granted, reason } => Payload::CapabilityRequest {
            capability: *capability,
            granted: *granted,
            reason: NfcString::new(reason),
        },
        Statement::Network { protocol, destination } => Payload::NetworkRequest {
            protocol: *protocol,
            destination: NfcString::new(destination),
            bytes_out: 0,
            bytes_in: 0,
        },
        Statement::Spawn { .. } => {
            Payload::ProcessSpawn { binary: Digest::ZERO, argv: Digest::ZERO, cwd: NfcString::default() }
        }
    }
}

fn refusal_of(code: Code) -> RefusalCode {
    match code {
        Code::DoubleSpawn => RefusalCode::DoubleSpawn,
        Code::RespawnAfterExit => RefusalCode::Respawn,
        Code::OrphanSpawn => RefusalCode::OrphanSpawn,
        Code::ExitWithoutSpawn => RefusalCode::ExitWithoutSpawn,
        Code::ActionAfterExit => RefusalCode::AfterExit,
        Code::LineageFull => RefusalCode::TooManyActors,
        _ => RefusalCode::UnknownActor,
    }
}
