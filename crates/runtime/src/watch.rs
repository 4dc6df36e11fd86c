//! The observing thread of a run: calls every observer at the cadence and hands the driver what they saw.
//!
//! ```text
//!  driver                                  thread `observe-<run>`
//!    begin ───────────────────────────────▶ prepare        while the guest boots
//!    Ask::Arm, at ready ──────────────────▶ arm            Told::Armed, and only then the first exec
//!                                           look, look, …  Told::Seen
//!    Ask::LastLook, when quiet ───────────▶ last_look      Told::LastLooked
//!    Ask::PostMortem, VMM dead ───────────▶ post_mortem    Told::Over
//! ```
//! Another observer is one more line in [`observers`]. Guarantees: an observer that fails or
//! panics, a queue that the driver does not empty and the thread's own end are each an
//! evaluator failure. Not guaranteed: that looks are as often as the
//! cadence says; how they were is recorded (`watched`).

use crate::disk;
use crate::glimpse::{Glimpse, Shown};
use crate::phases::Booted;
use crate::vmm::VmmObserver;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded, never};
use hotcell_decide::fact::MAX_ROLL;
use hotcell_decide::{HostFact, ProcessRules, SeenProcess};
use hotcell_observe::disk::DiskObserver;
use hotcell_observe::ram::{RamObserver, RamPlan, Region, VmmMemory};
use hotcell_observe::{ObserveError, Observer, Roll, Sighting, Sightings};
use hotcell_policy::WorkspaceExec;
use hotcell_wire::NONCE_MARK;
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeSet;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time from one look to the next: a fifth of what a kill may take, so that an occasional long look does no harm.
pub(crate) const CADENCE: Duration = Duration::from_millis(50);
/// Messages that the driver has not taken. It takes one in microseconds, so more than this means that it hangs.
const TOLD: usize = 1024;

/// What watches this machine, in the order in which they look.
fn observers(run: &mut Booted) -> io::Result<Vec<Box<dyn Observer>>> {
    let mut all: Vec<Box<dyn Observer>> = Vec::new();
    if let (Some(memory), Some(kernel)) = (run.vm.memory(), run.kernel.take()) {
        let regions = memory.regions.iter().map(|region| Region {
            guest: region.guest,
            host: region.host,
            bytes: region.bytes,
        });
        all.push(Box::new(RamObserver::new(RamPlan {
            source: Box::new(VmmMemory::new(memory.pid, regions.collect())),
            kernel,
            kernel_digest: run.spec.image().kernel.to_hex(),
            cache: run.runtime.cache.clone(),
            marked: [NONCE_MARK.as_slice(), &run.nonce].concat(),
            rules: process_rules(run),
            shown: run.recorder.shown().is_watched(),
            cloned: run.cloned,
        })));
    }
    if let Some(disk) = run.vm.disk()? {
        let explain = disk::explain(run.spec.policy().capabilities(), run.recorder.copied());
        all.push(Box::new(DiskObserver::new(disk, explain)));
    }
    if let Some(watch) = run.vm.take_watch() {
        all.push(Box::new(VmmObserver::new(watch)));
    }
    Ok(all)
}

/// Programs of the declared root services: as declared, and where links lead.
fn services(run: &Booted) -> BTreeSet<String> {
    let declared = run.spec.services().iter().filter_map(|service| service.argv.first());
    let resolved = |path: &String| Some(run.contents.as_ref()?.resolve(path)?.0.as_str().to_owned());
    declared.flat_map(|path| [Some(path.clone()), resolved(path)]).flatten().collect()
}

/// Which processes this run may have.
fn process_rules(run: &Booted) -> ProcessRules {
    let approved = run.contents.as_ref().map(|contents| {
        let executable = contents.entries().filter(|(_, entry)| entry.is_executable());
        executable.map(|(path, _)| path.as_str().to_owned()).collect()
    });
    ProcessRules {
        approved,
        services: services(run),
        workspace_executes: run.spec.policy().workspace_exec() == WorkspaceExec::Allow,
    }
}

/// What the driver asks of the thread.
enum Ask {
    Arm,
    /// Write down who is there, as this roll.
    Roll(u64),
    LastLook,
    PostMortem,
}

/// What the thread tells.
pub(crate) enum Told {
    /// One look's sightings.
    Seen(Sightings),
    /// Every observer has its state to compare with.
    Armed,
    /// A roll was written down, or could not be.
    Rolled,
    /// The last look at the live machine is over.
    LastLooked,
    /// Nothing more comes.
    Over,
    /// An observer can't see. Before arming nothing of the workload ran.
    Blind { observer: &'static str, armed: bool, error: String },
}

/// The thread, as the driver holds it. Dropping it ends the thread and waits for it: a look takes milliseconds.
pub(crate) struct Watch {
    ask: Option<Sender<Ask>>,
    told: Receiver<Told>,
    died: Arc<OnceLock<String>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Begins to watch: `None` where nothing can be observed of this machine.
    pub(crate) fn begin(run: &mut Booted) -> std::io::Result<Option<Watch>> {
        let observers = observers(run)?;
        if observers.is_empty() {
            return Ok(None);
        }
        Watch::spawn(run.spec.run_id(), observers, CADENCE, run.recorder.shown().clone()).map(Some)
    }

    fn spawn(
        run_id: &str,
        observers: Vec<Box<dyn Observer>>,
        cadence: Duration,
        shown: Shown,
    ) -> std::io::Result<Watch> {
        let (ask, asked) = bounded(4);
        let (tell, told) = bounded(TOLD);
        let died = Arc::new(OnceLock::new());
        let own = Arc::clone(&died);
        let thread = std::thread::Builder::new().name(format!("observe-{run_id}")).spawn(move || {
            let mut eyes = Eyes {
                observers,
                tell,
                cadence,
                armed: false,
                kept: Kept::default(),
                shown,
                last: Vec::new(),
            };
            let _ = match catch_unwind(AssertUnwindSafe(|| eyes.watch(&asked))) {
                Ok(Ok(()) | Err(Stop::Gone)) => Ok(()),
                Ok(Err(Stop::Overflow)) => own.set("the driver does not take what is observed".into()),
                Err(panic) => own.set(crate::phases::panic_text(&*panic)),
            };
        })?;
        Ok(Watch { ask: Some(ask), told, died, thread: Some(thread) })
    }

    /// What the thread tells; disconnected when it has ended.
    pub(crate) fn told(&self) -> Receiver<Told> {
        self.told.clone()
    }

    /// Why the thread ended, where it says.
    pub(crate) fn why_dead(&self) -> String {
        self.died.get().cloned().unwrap_or_else(|| "the observing thread ended".into())
    }

    pub(crate) fn arm(&self) {
        self.ask(Ask::Arm);
    }

    pub(crate) fn roll(&self, roll: u64) {
        self.ask(Ask::Roll(roll));
    }

    pub(crate) fn last_look(&self) {
        self.ask(Ask::LastLook);
    }

    pub(crate) fn post_mortem(&self) {
        self.ask(Ask::PostMortem);
    }

    /// The queue has room for every request there is; a thread that is gone shows by its other channel.
    fn ask(&self, ask: Ask) {
        let _ = self.ask.as_ref().map(|queue| queue.try_send(ask));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ask = None;
        self.told = never();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How the watch was kept.
#[derive(Default)]
struct Kept {
    looks: u64,
    last: Option<Instant>,
    longest_gap: Duration,
}

impl Kept {
    fn looked(&mut self, at: Instant) {
        self.looks += 1;
        let gap = self.last.map_or(Duration::ZERO, |last| at.saturating_duration_since(last));
        self.longest_gap = self.longest_gap.max(gap);
        self.last = Some(at);
    }

    fn to_fact(&self) -> HostFact {
        let used = clock_gettime(ClockId::ThreadCPUTime);
        let cpu_ms = used.tv_sec as u64 * 1000 + used.tv_nsec as u64 / 1_000_000;
        HostFact::Watched { looks: self.looks, longest_gap_ms: self.longest_gap.as_millis() as u64, cpu_ms }
    }
}

/// Why the thread ends before it is asked to.
enum Stop {
    /// The driver is gone.
    Gone,
    /// The driver takes nothing.
    Overflow,
}

struct Eyes {
    observers: Vec<Box<dyn Observer>>,
    tell: Sender<Told>,
    cadence: Duration,
    armed: bool,
    kept: Kept,
    shown: Shown,
    /// The processes that were shown last.
    last: Vec<SeenProcess>,
}

impl Eyes {
    fn watch(&mut self, asked: &Receiver<Ask>) -> Result<(), Stop> {
        self.each(|observer, _| observer.prepare())?;
        let mut next: Option<Instant> = None;
        loop {
            let wait = next.map(|at| at.saturating_duration_since(Instant::now()));
            let ask = match wait {
                Some(wait) => asked.recv_timeout(wait),
                None => asked.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match ask {
                Ok(Ask::Arm) => {
                    self.each(|observer, seen| {
                        let armed = observer.arm(seen)?;
                        seen.fact(HostFact::Armed {
                            observer: observer.name().into(),
                            armed: armed.armed,
                            basis: armed.basis,
                        })
                    })?;
                    self.armed = true;
                    self.kept.looked(Instant::now());
                    self.tell(Told::Armed)?;
                    self.show_processes();
                    next = Some(Instant::now() + self.cadence);
                }
                Ok(Ask::Roll(number)) => {
                    self.each(|observer, seen| match observer.roll(seen)? {
                        Some(roll) => seen.fact(roll_fact(number, roll)),
                        None => Ok(()),
                    })?;
                    self.tell(Told::Rolled)?;
                }
                Ok(Ask::LastLook) => {
                    next = None;
                    self.each(|observer, seen| observer.last_look(seen))?;
                    self.kept.looked(Instant::now());
                    self.tell(Told::LastLooked)?;
                }
                Ok(Ask::PostMortem) => {
                    if self.armed {
                        self.each_with(Sightings::last, |observer, seen| observer.post_mortem(seen))?;
                        let mut last = Sightings::default();
                        let fits = last.fact(self.kept.to_fact());
                        debug_assert!(fits.is_ok(), "one fits");
                        self.tell(Told::Seen(last))?;
                    }
                    return self.tell(Told::Over);
                }
                Err(RecvTimeoutError::Timeout) => {
                    let begun = Instant::now();
                    self.each(|observer, seen| observer.look(seen))?;
                    self.show_processes();
                    self.kept.looked(begun);
                    // What was missed is not caught up with: a host that is late gets later by that.
                    next = Some((begun + self.cadence).max(Instant::now()));
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// For people who look on, where there are any and something has changed.
    fn show_processes(&mut self) {
        if !self.shown.is_watched() {
            return;
        }
        let now = self.observers.iter_mut().find_map(|observer| observer.processes()).unwrap_or_default();
        if now != self.last {
            self.shown.show(|| Glimpse::Processes(now.clone()));
            self.last = now;
        }
    }

    /// One call of every observer; what it saw is told before its error. One that can't see is not asked again,
    /// while the others go on: what they see belongs into the record of a run that is being killed too.
    fn each(
        &mut self,
        call: impl FnMut(&mut dyn Observer, &mut Sightings) -> Result<(), ObserveError>,
    ) -> Result<(), Stop> {
        self.each_with(Sightings::default, call)
    }

    fn each_with(
        &mut self,
        room: fn() -> Sightings,
        mut call: impl FnMut(&mut dyn Observer, &mut Sightings) -> Result<(), ObserveError>,
    ) -> Result<(), Stop> {
        for mut observer in std::mem::take(&mut self.observers) {
            let mut seen = room();
            let called = catch_unwind(AssertUnwindSafe(|| call(observer.as_mut(), &mut seen)));
            if !seen.is_empty() {
                self.tell(Told::Seen(seen))?;
            }
            let error = match called {
                Ok(Ok(())) => {
                    self.observers.push(observer);
                    continue;
                }
                Ok(Err(error)) => error.to_string(),
                Err(panic) => crate::phases::panic_text(&*panic),
            };
            self.tell(Told::Blind { observer: observer.name(), armed: self.armed, error })?;
        }
        Ok(())
    }

    fn tell(&self, told: Told) -> Result<(), Stop> {
        self.tell.try_send(told).map_err(|error| match error {
            TrySendError::Full(_) => Stop::Overflow,
            TrySendError::Disconnected(_) => Stop::Gone,
        })
    }
}

/// The list as it is recorded.
fn roll_fact(roll: u64, now: Roll) -> HostFact {
    let Roll { mut processes, mut own } = now;
    let left_out = processes.len().saturating_sub(MAX_ROLL) + own.len().saturating_sub(MAX_ROLL);
    processes.truncate(MAX_ROLL);
    own.truncate(MAX_ROLL);
    HostFact::ProcessRoll { roll, processes, own, left_out: left_out as u64 }
}

/// Records one look.
pub(crate) fn record(
    recorder: &mut crate::recorder::Recorder,
    seen: Sightings,
) -> Result<(), crate::recorder::RecordError> {
    for sighting in seen {
        match sighting {
            Sighting::Fact(fact) => recorder.host(&fact)?,
            Sighting::Mutation { op, path, before, after } => recorder.mutation(op, &path, before, after)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_observe::Armed;

    const HANG: Duration = Duration::from_secs(30);

    /// Sees one thing in each look, and fails or panics at one of them.
    struct Scripted {
        looks: u64,
        fails_at: u64,
        panics_at: u64,
    }

    fn scripted() -> Scripted {
        Scripted { looks: 0, fails_at: 0, panics_at: 0 }
    }

    impl Observer for Scripted {
        fn name(&self) -> &'static str {
            "scripted"
        }

        fn arm(&mut self, _: &mut Sightings) -> Result<Armed, ObserveError> {
            Ok(Armed { armed: true, basis: "a test".into() })
        }

        fn look(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
            self.looks += 1;
            assert_ne!(self.looks, self.panics_at, "asked to panic");
            seen.fact(HostFact::Timeout { limit_ms: self.looks })?;
            if self.looks == self.fails_at { Err(ObserveError::Flood(1)) } else { Ok(()) }
        }

        fn post_mortem(&mut self, seen: &mut Sightings) -> Result<(), ObserveError> {
            seen.fact(HostFact::Timeout { limit_ms: 0 })
        }
    }

    fn watch(observers: Vec<Scripted>) -> Watch {
        let observers = observers.into_iter().map(|one| Box::new(one) as Box<dyn Observer>).collect();
        Watch::spawn("test", observers, Duration::from_millis(1), Shown::default()).unwrap()
    }

    /// Everything that is told until a message says stop.
    fn until(watch: &Watch, mut stop: impl FnMut(&Told) -> bool) -> (Vec<HostFact>, Told) {
        let mut facts = Vec::new();
        loop {
            let told = watch.told.recv_timeout(HANG).unwrap();
            if stop(&told) {
                return (facts, told);
            }
            if let Told::Seen(seen) = told {
                facts.extend(seen.into_iter().map(|one| match one {
                    Sighting::Fact(fact) => fact,
                    Sighting::Mutation { .. } => unreachable!(),
                }));
            }
        }
    }

    #[test]
    fn looks_come_after_arming_and_the_end_says_how_many() {
        let watch = watch(vec![scripted()]);
        watch.arm();
        let (facts, _) = until(&watch, |told| matches!(told, Told::Armed));
        assert!(matches!(&facts[..], [HostFact::Armed { armed: true, .. }]), "{facts:?}");
        let mut looks = 0;
        until(&watch, |told| {
            looks += u64::from(matches!(told, Told::Seen(_)));
            looks == 3
        });
        watch.last_look();
        until(&watch, |told| matches!(told, Told::LastLooked));
        watch.post_mortem();
        let (facts, _) = until(&watch, |told| matches!(told, Told::Over));
        let [HostFact::Timeout { limit_ms: 0 }, HostFact::Watched { looks, .. }] = facts[..] else {
            panic!("{facts:?}")
        };
        assert!(looks >= 5);
    }

    #[test]
    fn one_that_fails_or_panics_is_told_and_the_others_go_on() {
        for broken in [Scripted { fails_at: 2, ..scripted() }, Scripted { panics_at: 2, ..scripted() }] {
            let watch = watch(vec![broken, scripted()]);
            watch.arm();
            let (_, blind) = until(&watch, |told| matches!(told, Told::Blind { .. }));
            let Told::Blind { observer: "scripted", armed: true, error } = blind else { panic!() };
            assert!(error.contains("sightings") || error.contains("asked to panic"), "{error}");
            watch.post_mortem();
            let (facts, _) = until(&watch, |told| matches!(told, Told::Over));
            let dead = facts.iter().filter(|fact| **fact == HostFact::Timeout { limit_ms: 0 }).count();
            assert_eq!(dead, 1, "the other one's");
        }
    }

    #[test]
    fn a_driver_that_takes_nothing_ends_the_thread_and_the_thread_says_why() {
        let mut watch = watch(vec![scripted()]);
        watch.arm();
        let thread = watch.thread.take().unwrap();
        thread.join().unwrap();
        assert_eq!(watch.why_dead(), "the driver does not take what is observed");
        assert_eq!(watch.told.len(), TOLD);
    }
}
