//! May it start? Single-use tokens bind each spawn to one live parent and one approved binary.
//!
//! ```text
//! issue(parent, binary, 32 random bytes) ──► outstanding ── redeem ──► used      (permit, or denial: used either way)
//! ```
//! The attack: a process replays a token, borrows another's, or runs another file
//! with it. A token that is presented is used up, whether it fits or not. Tokens are
//! compared in constant time, over the whole list. Used ones are remembered by their
//! digest to tell a replay from an invention; past [`MAX_REMEMBERED`] the oldest are
//! forgotten and a replay of them reads as unknown, which is denied all the same.
//!
//! Randomness is a parameter. Not done here: knowing what the binary is (its digest
//! comes in), and starting it.

use hotcell_ledger::gate1::Lineage;
use hotcell_ledger::{ActorId, Digest};
use hotcell_policy::{BinaryPolicy, Membership};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

/// Tokens that may be issued and not yet presented.
pub const MAX_OUTSTANDING: usize = 1024;
/// Used tokens that are remembered.
pub const MAX_REMEMBERED: usize = 65_536;

/// A token. Its bytes are shown to one parent, once; it can't be copied here.
#[derive(PartialEq, Eq)]
pub struct SpawnToken([u8; 32]);

impl SpawnToken {
    /// The bytes to hand to the parent.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Never shows the bytes.
impl core::fmt::Debug for SpawnToken {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("SpawnToken(..)")
    }
}

/// Why a spawn is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpawnDenial {
    /// The binary is not in the allowlist.
    UnknownBinary,
    /// No token was presented.
    NoToken,
    /// The token was never issued.
    UnknownToken,
    /// The token was presented before.
    Replay,
    /// The token was issued to another parent.
    ParentMismatch,
    /// The token was issued for another binary.
    BinaryMismatch,
    /// The parent is not live.
    DeadParent,
}

impl SpawnDenial {
    /// Every denial.
    pub const ALL: &'static [SpawnDenial] = &[
        SpawnDenial::UnknownBinary,
        SpawnDenial::NoToken,
        SpawnDenial::UnknownToken,
        SpawnDenial::Replay,
        SpawnDenial::ParentMismatch,
        SpawnDenial::BinaryMismatch,
        SpawnDenial::DeadParent,
    ];

    /// Whether it counts into the denial signal. An unapproved binary does not: it is
    /// denied before it runs, and honest builds try their own programs by the dozen.
    /// The other six need a token that was stolen, forged, replayed or left out.
    pub const fn counts_as_denial(self) -> bool {
        !matches!(self, SpawnDenial::UnknownBinary)
    }
}

/// Why a token is not issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IssueError {
    /// The binary is not in the allowlist.
    #[error("the binary {0} is not in the image's allowlist: add it to the image and build that again")]
    UnknownBinary(Digest),
    /// The parent is not live.
    #[error("the parent {0} is not live")]
    DeadParent(ActorId),
    /// Too many tokens wait to be presented.
    #[error("{MAX_OUTSTANDING} spawn tokens are outstanding: wait until some are presented")]
    TooMany,
    /// The random bytes are not random.
    #[error("the random source repeats itself: this is a bug or a broken host")]
    NotRandom,
}

/// A spawn that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpawnAttempt {
    /// Who asks.
    pub parent: ActorId,
    /// Digest of the file that would run.
    pub binary: Digest,
    /// The token that was presented.
    pub token: Option<[u8; 32]>,
}

/// A spawn that was allowed: this parent may start this binary once.
#[derive(Debug, PartialEq, Eq)]
pub struct SpawnPermit {
    parent: ActorId,
    binary: Digest,
}

impl SpawnPermit {
    /// Who may start it.
    pub fn parent(&self) -> ActorId {
        self.parent
    }

    /// What may be started.
    pub fn binary(&self) -> Digest {
        self.binary
    }
}

/// The answer.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum SpawnDecision {
    /// Yes, once.
    Allow(SpawnPermit),
    /// No.
    Deny(SpawnDenial),
}

#[derive(Clone, Debug)]
struct Issued {
    token: [u8; 32],
    parent: ActorId,
    binary: Digest,
}

/// Issues and redeems spawn tokens for one run.
#[derive(Debug)]
pub struct Authorizer {
    binaries: BinaryPolicy,
    outstanding: Vec<Issued>,
    used: VecDeque<Digest>,
}

impl Authorizer {
    /// An authorizer over a sealed allowlist.
    pub fn new(binaries: BinaryPolicy) -> Authorizer {
        Authorizer { binaries, outstanding: Vec::new(), used: VecDeque::new() }
    }

    /// The allowlist.
    pub fn binaries(&self) -> &BinaryPolicy {
        &self.binaries
    }

    /// Issues a token. `random` are 32 fresh bytes from the host's generator.
    pub fn issue(
        &mut self,
        parent: ActorId,
        binary: Digest,
        random: [u8; 32],
        lineage: &Lineage,
    ) -> Result<SpawnToken, IssueError> {
        if self.binaries.membership(&binary) == Membership::Unknown {
            return Err(IssueError::UnknownBinary(binary));
        }
        if !lineage.is_live(parent) {
            return Err(IssueError::DeadParent(parent));
        }
        if self.outstanding.len() >= MAX_OUTSTANDING {
            return Err(IssueError::TooMany);
        }
        if random == [0; 32] || self.find(&random).is_some() || self.used.contains(&Digest::of(&random)) {
            return Err(IssueError::NotRandom);
        }
        self.outstanding.push(Issued { token: random, parent, binary });
        Ok(SpawnToken(random))
    }

    /// Decides a spawn. A token that is presented is used up by it.
    pub fn redeem(&mut self, attempt: &SpawnAttempt, lineage: &Lineage) -> SpawnDecision {
        let issued = attempt.token.map(|token| {
            let at = self.find(&token);
            let issued = at.map(|at| self.outstanding.swap_remove(at));
            let name = Digest::of(&token);
            let replayed = issued.is_none() && self.used.contains(&name);
            if issued.is_some() {
                self.used.push_back(name);
                if self.used.len() > MAX_REMEMBERED {
                    self.used.pop_front();
                }
            }
            (issued, replayed)
        });
        if self.binaries.membership(&attempt.binary) == Membership::Unknown {
            return SpawnDecision::Deny(SpawnDenial::UnknownBinary);
        }
        let issued = match issued {
            None => return SpawnDecision::Deny(SpawnDenial::NoToken),
            Some((None, true)) => return SpawnDecision::Deny(SpawnDenial::Replay),
            Some((None, false)) => return SpawnDecision::Deny(SpawnDenial::UnknownToken),
            Some((Some(issued), _)) => issued,
        };
        if issued.parent != attempt.parent {
            return SpawnDecision::Deny(SpawnDenial::ParentMismatch);
        }
        if issued.binary != attempt.binary {
            return SpawnDecision::Deny(SpawnDenial::BinaryMismatch);
        }
        if !lineage.is_live(attempt.parent) {
            return SpawnDecision::Deny(SpawnDenial::DeadParent);
        }
        SpawnDecision::Allow(SpawnPermit { parent: issued.parent, binary: issued.binary })
    }

    /// How many tokens wait to be presented.
    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Where the token is; looks at every entry, wherever it is.
    fn find(&self, token: &[u8; 32]) -> Option<usize> {
        let mut found = Choice::from(0);
        let mut at = 0u64;
        for (index, issued) in self.outstanding.iter().enumerate() {
            let same = issued.token.ct_eq(token);
            at.conditional_assign(&u64::try_from(index).unwrap_or(u64::MAX), same);
            found |= same;
        }
        if bool::from(found) { usize::try_from(at).ok() } else { None }
    }
}
