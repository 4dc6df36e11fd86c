//! Reads the disk again and again and says what became of it.
//!
//! ```text
//!  arm ──▶ read, read, … ──▶ finish
//! ```
//! A reading while the guest runs sees what the guest has written out, which is a moving
//! thing: blocks of one change reach the disk one after another. So:
//! - the host's file says by its times whether it was written during a reading; such a reading, and
//!   one that found damage, is repeated, [`TRIES`] times in all;
//! - a reading that was disturbed by a write is put off, [`MAX_PUT_OFF`] times in a row, unless it saw something
//!   that nothing explains;
//! - what still makes no sense counts as unchanged. Damage on a moving disk is never a
//!   violation by itself.
//!
//! The last reading is of a disk that nobody writes any more. After a guest that said quiet,
//! it must make sense: if not, that is an error. After a machine that was stopped, it may not, and the
//! record says so.
//!
//! Volume: changes that a policy explains are listed one by one up to [`MAX_LISTED`] in a reading and
//! [`MAX_LISTED_OF_RUN`] in a run; further ones are counted by the grant that explains them. What
//! nothing explains is listed before anything else, since it is what kills.

use super::compare::{Change, changes};
use super::ext4::{DiskError, Geometry};
use super::listing::{Effort, Listing, is_within};
use crate::observer::{ObserveError, Sighting};
use hotcell_decide::{DiskMoment, HostFact, ViolationKind};
use hotcell_ledger::{Digest, FileOp};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant, SystemTime};

/// Explained changes that one reading lists.
pub const MAX_LISTED: usize = 2048;
/// Explained changes that one run lists: some 3 MB of ledger.
pub const MAX_LISTED_OF_RUN: usize = 16_384;
/// Unexplained changes that one reading lists; the largest burst that a policy can ask for is far below.
pub const MAX_UNEXPLAINED: usize = 2048;
/// Bytes that a reading during the run hashes; further files wait for the next one, at least one is hashed in each.
const HASH_RUNNING: u64 = 256 << 20;
/// How often a reading is repeated while the disk moves.
const TRIES: u32 = 3;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(5);
/// A file whose times are older than this was not written by whoever wrote just now: the kernel's
/// clock of file times has steps of at most 10 ms.
const SETTLED: Duration = Duration::from_millis(20);
/// How often in a row a reading is put off that a write disturbed and that saw only what is explained. A file's
/// place may be on the disk before its bytes are.
const MAX_PUT_OFF: u32 = 10;
/// Between two facts that count.
const COUNT_CADENCE: Duration = Duration::from_secs(10);
/// Names that only the guest's root can have made: so many are named.
const MAX_PRIVILEGED: usize = 16;
/// Characters of an error that go into the record.
const MAX_WHY: usize = 1024;

/// What a policy says of a change of a path, for the volume alone: the judge decides for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Explained {
    /// This grant covers it: an exact path or a tree.
    By(String),
    /// The host itself copied something there.
    Copied,
    /// The host is copying something there: what is on the disk may be half of it.
    Copying,
    /// Nothing does.
    No,
}

/// Says it. Asked on the observer's thread.
pub type Explain = Box<dyn Fn(&str) -> Explained + Send>;

/// The state of the host's file, by its times and blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Version {
    modified: (i64, i64),
    changed: (i64, i64),
    blocks: u64,
}

/// Reads one disk.
pub struct Scanner {
    disk: File,
    explain: Explain,
    armed: Option<Armed>,
    counted: Counted,
    listed: usize,
    readings: u64,
    put_off: u32,
}

/// What is known since arming.
struct Armed {
    geometry: Geometry,
    last: Listing,
    /// Of the last reading, if nothing was written during it.
    version: Option<Version>,
    /// Names that were there before the workload, or were told.
    privileged: BTreeSet<String>,
    /// Places beyond the bounds; once there, for ever.
    bounds: BTreeSet<String>,
}

/// What is not listed and not told yet, by the grant that explains it.
#[derive(Default)]
struct Counted {
    places: BTreeMap<String, BTreeMap<String, u64>>,
    /// When the last was told.
    told: Option<Instant>,
    /// Something new must be told now.
    now: bool,
}

impl Scanner {
    /// A scanner of this file, opened to read.
    pub fn new(disk: File, explain: Explain) -> Scanner {
        Scanner {
            disk,
            explain,
            armed: None,
            counted: Counted::default(),
            listed: 0,
            readings: 0,
            put_off: 0,
        }
    }

    /// Reads the disk as it is before the workload. The guest may have it mounted, but nobody writes.
    ///
    /// # Errors
    /// It can't be read.
    pub fn arm(&mut self) -> Result<Vec<Sighting>, ObserveError> {
        let (geometry, last, version) = self.first()?;
        let fact = self.fact(DiskMoment::Armed, &last, 0, None);
        self.armed = Some(Armed {
            geometry,
            version,
            privileged: last.privileged().map(|(path, _)| path.to_owned()).collect(),
            bounds: BTreeSet::new(),
            last,
        });
        Ok(vec![fact])
    }

    /// The guest has just mounted it: a superblock on its way to the disk is waited for.
    fn first(&self) -> Result<(Geometry, Listing, Option<Version>), ObserveError> {
        let mut tries = TRIES;
        loop {
            let (version, settled) = self.settled()?;
            let read = Geometry::read(&self.disk).and_then(|geometry| {
                let effort = Effort { trust_inodes: false, hash_bytes: geometry.bytes() };
                Listing::take(&self.disk, &geometry, None, effort).map(|listing| (geometry, listing))
            });
            tries -= 1;
            match read {
                Ok((geometry, listing)) if listing.damage().is_none() => {
                    return Ok((geometry, listing, settled.then_some(version)));
                }
                Ok((_, listing)) if tries == 0 => {
                    let damage = listing.damage().unwrap_or_default();
                    return Err(ObserveError::Unprepared(format!("the workspace disk: {damage}")));
                }
                Err(error) if tries == 0 => return Err(unseen(error)),
                Ok(_) | Err(_) => std::thread::sleep(SETTLED),
            }
        }
    }

    /// Whether the file was written since the last reading that was sure. Costs one system call.
    ///
    /// # Errors
    /// The file's times can't be read.
    pub fn is_changed(&self) -> Result<bool, ObserveError> {
        let version = self.version()?;
        Ok(self.armed.as_ref().is_some_and(|armed| armed.version != Some(version)))
    }

    /// Reads the disk while the guest runs.
    ///
    /// # Errors
    /// The host's reading failed. Damage is none: it is read again later.
    pub fn read(&mut self) -> Result<Vec<Sighting>, ObserveError> {
        let Some(armed) = &self.armed else { return Ok(Vec::new()) };
        let effort = Effort { trust_inodes: true, hash_bytes: HASH_RUNNING };
        let mut taken = None;
        for attempt in 0..TRIES {
            if attempt > 0 {
                std::thread::sleep(PAUSE);
            }
            let (before, settled) = self.settled()?;
            match Listing::take(&self.disk, &armed.geometry, Some(&armed.last), effort) {
                Err(DiskError::Io(source)) => return Err(host(source)),
                Err(_) => continue,
                Ok(listing) => {
                    let still = settled && self.version()? == before;
                    let whole = listing.damage().is_none();
                    let sure = (still && listing.later() == 0 && whole).then_some(before);
                    taken = Some((listing, sure));
                    if whole {
                        break;
                    }
                }
            }
        }
        let Some((listing, version)) = taken else { return Ok(Vec::new()) };
        if version.is_none() && self.put_off < MAX_PUT_OFF {
            let unexplained = |change: &Change| (self.explain)(&change.path) == Explained::No;
            let new = |(path, _): (&str, String)| !armed.privileged.contains(path);
            if !listing.privileged().any(new) && !changes(&armed.last, &listing).iter().any(unexplained) {
                self.put_off += 1;
                return Ok(Vec::new());
            }
        }
        self.put_off = 0;
        let (seen, _) = self.compare(listing, version);
        Ok(seen)
    }

    /// Reads the disk for the last time, all of it. `quiet`: the guest had said that everything is written out.
    ///
    /// # Errors
    /// The host's reading failed, or a quiet disk makes no sense.
    pub fn finish(&mut self, quiet: bool) -> Result<Vec<Sighting>, ObserveError> {
        let Some(armed) = &self.armed else { return Ok(Vec::new()) };
        // Twice what there can be, so that only files which share blocks are too much, and no kernel makes them.
        let hash_bytes = armed.geometry.bytes().saturating_mul(4).saturating_add(4 << 30);
        let effort = Effort { trust_inodes: false, hash_bytes };
        let at = if quiet { DiskMoment::Quiet } else { DiskMoment::Dead };
        let listing = match Listing::take(&self.disk, &armed.geometry, Some(&armed.last), effort) {
            Err(DiskError::Io(source)) => return Err(host(source)),
            Err(error) if quiet => return Err(at_rest(&error.to_string())),
            Err(error) => {
                let why = error.to_string();
                let mut seen = self.tell_counted(true);
                let last = Listing::default();
                seen.push(self.fact(at, &last, 0, Some(why)));
                return Ok(seen);
            }
            Ok(listing) => listing,
        };
        let mut unread = listing.damage().map(str::to_owned);
        if listing.later() > 0 {
            unread.get_or_insert_with(|| format!("{} files ask for too much to hash", listing.later()));
        }
        match unread {
            Some(why) if quiet => Err(at_rest(&why)),
            unread => {
                let (mut seen, count) = self.compare(listing, None);
                seen.extend(self.tell_counted(true));
                let last = self.armed.as_ref().map(|armed| armed.last.clone()).unwrap_or_default();
                seen.push(self.fact(at, &last, count, unread));
                Ok(seen)
            }
        }
    }

    /// How many readings there were.
    pub fn readings(&self) -> u64 {
        self.readings
    }

    fn compare(&mut self, mut listing: Listing, mut version: Option<Version>) -> (Vec<Sighting>, u64) {
        self.readings += 1;
        let Some(armed) = &mut self.armed else { return (Vec::new(), 0) };
        if listing.hold(&armed.last, |path| (self.explain)(path) == Explained::Copying) {
            version = None;
        }
        let mut seen = Vec::new();
        for (path, what) in listing.privileged() {
            if armed.privileged.len() < MAX_PRIVILEGED + MAX_LISTED
                && armed.privileged.insert(path.to_owned())
                && seen.len() < MAX_PRIVILEGED
            {
                seen.push(Sighting::Fact(HostFact::Violation {
                    kind: ViolationKind::UnexplainedPrivilege,
                    subject: path.to_owned(),
                    detail: format!("on the workspace disk lies {what}, which no user of the guest can make"),
                }));
            }
        }
        for place in listing.bounds() {
            if armed.bounds.insert(place.to_owned()) {
                self.counted.now = true;
                self.counted.places.entry(place.to_owned()).or_default();
                // A grant of this very path covers nothing below it.
                if matches!((self.explain)(place), Explained::By(grant) if grant == place)
                    && (self.explain)(&format!("{place}/?")) == Explained::No
                {
                    self.counted.places.entry(format!("{place}/?")).or_default();
                }
            }
        }
        let changes = changes(&armed.last, &listing);
        armed.last = listing;
        armed.version = version;
        let count = changes.len() as u64;
        let (mut unexplained, mut explained) = (Vec::new(), Vec::new());
        for change in changes {
            let beyond = armed.bounds.iter().find(|place| is_within(&change.path, place));
            match ((self.explain)(&change.path), beyond) {
                // It is on its way: what became of it is seen when it is there.
                (Explained::Copying, None) => {}
                (Explained::Copied, None) => explained.push(change),
                (Explained::Copied | Explained::Copying, Some(place)) => self.counted.add(place, change.op),
                (Explained::By(grant), beyond) => {
                    if beyond.is_none() && explained.len() < MAX_LISTED && self.listed < MAX_LISTED_OF_RUN {
                        self.listed += 1;
                        explained.push(change);
                    } else {
                        // What is known of these names ends here, before the next reading says more of them.
                        self.counted.now |= beyond.is_none() && self.listed < MAX_LISTED_OF_RUN;
                        self.counted.add(beyond.unwrap_or(&grant), change.op);
                    }
                }
                (Explained::No, _) if unexplained.len() < MAX_UNEXPLAINED => unexplained.push(change),
                (Explained::No, _) => {
                    self.counted.now = true;
                    self.counted.add_unexplained(change);
                }
            }
        }
        seen.extend(
            unexplained
                .into_iter()
                .chain(explained)
                .map(|Change { op, path, before, after }| Sighting::Mutation { op, path, before, after }),
        );
        seen.extend(self.tell_counted(false));
        (seen, count)
    }

    fn tell_counted(&mut self, all: bool) -> Vec<Sighting> {
        self.counted.tell(all)
    }

    fn fact(&mut self, at: DiskMoment, listing: &Listing, changes: u64, unread: Option<String>) -> Sighting {
        let names = listing.entries().len() as u64;
        let digest = if names == 0 { Digest::ZERO } else { listing.digest() };
        let unread = unread.map(|why| why.chars().take(MAX_WHY).collect());
        Sighting::Fact(HostFact::DiskRead {
            reading: self.readings,
            at,
            names,
            listing: digest,
            changes,
            unread,
        })
    }

    fn version(&self) -> Result<Version, ObserveError> {
        let metadata = self.disk.metadata().map_err(host)?;
        Ok(Version {
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            blocks: metadata.blocks(),
        })
    }

    /// The version, and whether it is old enough that another write would give another.
    fn settled(&self) -> Result<(Version, bool), ObserveError> {
        let version = self.version()?;
        let modified = self.disk.metadata().and_then(|metadata| metadata.modified()).map_err(host)?;
        let age = SystemTime::now().duration_since(modified).unwrap_or_default();
        Ok((version, age >= SETTLED))
    }
}

impl Counted {
    fn add(&mut self, place: &str, op: FileOp) {
        *self.places.entry(place.to_owned()).or_default().entry(name(op).to_owned()).or_default() += 1;
    }

    /// All of them count at the first one's path: one is enough to be judged.
    fn add_unexplained(&mut self, change: Change) {
        self.add(&change.path, change.op);
        while self.places.len() > MAX_UNEXPLAINED {
            let Some((_, counts)) = self.places.pop_last() else { break };
            if let Some((_, first)) = self.places.iter_mut().next_back() {
                for (op, count) in counts {
                    *first.entry(op).or_default() += count;
                }
            }
        }
    }

    /// What is to be told now, in facts that fit.
    fn tell(&mut self, all: bool) -> Vec<Sighting> {
        let due = all || self.now || self.told.is_none_or(|told| told.elapsed() >= COUNT_CADENCE);
        if self.places.is_empty() || !due {
            return Vec::new();
        }
        (self.now, self.told) = (false, Some(Instant::now()));
        let places = std::mem::take(&mut self.places);
        let mut facts = Vec::new();
        let (mut within, mut sum, mut bytes) = (Vec::new(), BTreeMap::<String, u64>::new(), 0);
        for (place, counts) in places {
            // A path has at most 4096 bytes, of which each takes at most six in a fact of 64 KiB.
            bytes += place.len() * 6 + 8;
            within.push(place);
            for (op, count) in counts {
                *sum.entry(op).or_default() += count;
            }
            if bytes > 24 * 1024 {
                facts.push(counted(std::mem::take(&mut within), std::mem::take(&mut sum)));
                bytes = 0;
            }
        }
        if !within.is_empty() {
            facts.push(counted(within, sum));
        }
        facts
    }
}

fn counted(within: Vec<String>, changes: BTreeMap<String, u64>) -> Sighting {
    let why = if changes.is_empty() {
        "more names, deeper ones or longer ones than are listed".to_owned()
    } else {
        "more changes than are listed one by one".to_owned()
    };
    Sighting::Fact(HostFact::MutationsCounted { within, changes, why })
}

fn name(op: FileOp) -> &'static str {
    match op {
        FileOp::Create => "create",
        FileOp::Write => "write",
        FileOp::Delete => "delete",
        FileOp::Chmod => "chmod",
        FileOp::Symlink => "symlink",
        FileOp::Rename => "rename",
    }
}

fn host(source: std::io::Error) -> ObserveError {
    ObserveError::Host { what: "the workspace disk", source }
}

fn unseen(error: DiskError) -> ObserveError {
    match error {
        DiskError::Io(source) => host(source),
        error => ObserveError::Unprepared(error.to_string()),
    }
}

fn at_rest(why: &str) -> ObserveError {
    ObserveError::Implausible(format!("the workspace disk at rest: {why}"))
}
