//! What an observer is, and what it hands over.

use hotcell_decide::{HostFact, SeenProcess};
use hotcell_ledger::{Digest, FileOp};

/// Something that one look saw. The driver records it as the host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sighting {
    /// A fact; a [`HostFact::Violation`] kills.
    Fact(HostFact),
    /// A change of a file, which the environment monitor judges.
    Mutation {
        /// What was done.
        op: FileOp,
        /// To which path of the guest.
        path: String,
        /// What was there; zero: nothing.
        before: Digest,
        /// What is there; zero: nothing.
        after: Digest,
    },
}

/// Most sightings of one look. More is a flood: it would hide what it is a flood of.
pub const MAX_SIGHTINGS: usize = 1024;
/// Most sightings of the last look of all, at what a machine left: nothing comes after it that could tell the rest.
pub const MAX_LAST_SIGHTINGS: usize = 1 << 18;

/// What one look saw, in order.
#[derive(Debug)]
pub struct Sightings(Vec<Sighting>, usize);

impl Default for Sightings {
    fn default() -> Sightings {
        Sightings(Vec::new(), MAX_SIGHTINGS)
    }
}

impl Sightings {
    /// For [`Observer::post_mortem`]: with room for [`MAX_LAST_SIGHTINGS`].
    pub fn last() -> Sightings {
        Sightings(Vec::new(), MAX_LAST_SIGHTINGS)
    }

    /// Adds one.
    ///
    /// # Errors
    /// There are [`MAX_SIGHTINGS`] already: whoever observes must aggregate.
    pub fn push(&mut self, sighting: Sighting) -> Result<(), ObserveError> {
        if self.0.len() >= self.1 {
            return Err(ObserveError::Flood(self.1));
        }
        self.0.push(sighting);
        Ok(())
    }

    /// Adds a fact.
    ///
    /// # Errors
    /// As [`Sightings::push`].
    pub fn fact(&mut self, fact: HostFact) -> Result<(), ObserveError> {
        self.push(Sighting::Fact(fact))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl IntoIterator for Sightings {
    type Item = Sighting;
    type IntoIter = std::vec::IntoIter<Sighting>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// Whether an observer can find something in this run, and on what it stands or what it lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Armed {
    /// Whether it can.
    pub armed: bool,
    /// Its basis.
    pub basis: String,
}

/// Who is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roll {
    /// Number and beginning of each process of the workload.
    pub processes: Vec<(i32, u64)>,
    /// Numbers of those that run from the measured initramfs.
    pub own: Vec<i32>,
}

/// Why an observer can't see.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObserveError {
    /// The host can't read.
    #[error("{what}: {source}")]
    Host {
        /// What was read.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// What must be known before a machine can be observed is not to be had.
    #[error("{0}")]
    Unprepared(String),
    /// What was read makes no sense, and went on making none.
    #[error("{0}")]
    Implausible(String),
    /// More was seen in one look than can be reported.
    #[error("more than {0} sightings in one look")]
    Flood(usize),
}

/// Reads one thing of a machine from outside. All calls come from one thread, in the order of
/// the crate's picture; none may wait on the guest. An error of `prepare` or `arm` ends the run
/// as FAILED, since nothing of the workload ran; any later one is an evaluator failure and kills.
pub trait Observer: Send {
    /// `ram`, `disk`, `vmm`: names it in the record.
    fn name(&self) -> &'static str;

    /// Gets ready while the guest boots; may take a second.
    ///
    /// # Errors
    /// The machine can't be observed.
    fn prepare(&mut self) -> Result<(), ObserveError> {
        Ok(())
    }

    /// The guest said ready, and nothing of the workload runs before this returns: takes the
    /// state that later looks compare with.
    ///
    /// # Errors
    /// The machine can't be observed.
    fn arm(&mut self, seen: &mut Sightings) -> Result<Armed, ObserveError>;

    /// Looks once, at the cadence.
    ///
    /// # Errors
    /// It can't see.
    fn look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError>;

    /// The workload's processes as the last look saw them, for people who look on; `None` from an observer of other things.
    fn processes(&mut self) -> Option<Vec<SeenProcess>> {
        None
    }

    /// Looks once, and gives the processes that are there now; `None` where this look saw no whole list, and from an observer
    /// of other things.
    ///
    /// # Errors
    /// It can't see.
    fn roll(&mut self, seen: &mut Sightings) -> Result<Option<Roll>, ObserveError> {
        let _ = seen;
        Ok(None)
    }

    /// The guest has become quiet at the run's end and the machine still exists. Not called where the run ends otherwise.
    ///
    /// # Errors
    /// It can't see.
    fn last_look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        self.look(seen)
    }

    /// The VMM process has ended, by whatever way, and its files are still there. Called once for every run whose
    /// observers were armed.
    ///
    /// # Errors
    /// It can't see.
    fn post_mortem(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
        let _ = seen;
        Ok(())
    }
}
