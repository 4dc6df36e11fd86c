//! The phases of a run: a struct each, every step consumes the last, every
//! failure leads to [`TornDown`].
//!
//! ```text
//! Sealed ─register─▶ Registered ─measure─▶ Measured ─boot─▶ Booted ─attend─▶ Exited ─tear_down─▶ TornDown ─close─▶ report
//! ```
//! One thread runs them all (the machine dies with that thread) and owns the
//! ledger and the decisions.

use crate::aftermath::{self, RootImage};
use crate::bundle::{Bundle, CONSOLE, REPORT, SPEC};
use crate::driver::{Attended, attend, random};
use crate::glimpse::Shown;
use crate::measured::MeasuredBoot;
use crate::recorder::{RecordError, Recorder};
use crate::report::{Isolation, RunReport, Teardown, Timings, milliseconds};
use crate::run::{Call, Runtime};
use crossbeam_channel::Receiver;
use hotcell_decide::{Authorizer, Check, HostFact, Judge, LayerState, Verdict, VerdictFold};
use hotcell_ledger::{Cadence, Digest, LedgerWriter, NfcString, Payload, bundle};
use hotcell_policy::{BinaryPolicy, EnvironmentBaseline, Manifest, SealedSpec};
use hotcell_vm::{
    Captured, FileDigests, LiveVm, Registration, StartFailed, TeardownFailed, TeardownReport, Template,
    VmmFacts,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;

/// Nothing exists yet.
pub(crate) struct Sealed {
    pub(crate) runtime: Runtime,
    pub(crate) spec: SealedSpec,
    pub(crate) boot: MeasuredBoot,
    pub(crate) shown: Shown,
}

/// What the image is measured against.
struct Environment {
    baseline: Option<EnvironmentBaseline>,
    binaries: Option<BinaryPolicy>,
}

/// The run is written down, its bundle begun.
struct Registered {
    runtime: Runtime,
    spec: SealedSpec,
    boot: MeasuredBoot,
    environment: Environment,
    registration: Registration,
    recorder: Recorder,
}

/// What will boot is recorded.
struct Measured(Registered);

/// Why nothing was measured.
enum Unmeasured {
    /// There was no room for a record, so there is none.
    Refused(Box<RunReport>),
    TornDown(Box<TornDown>),
}

/// A machine exists.
pub(crate) struct Booted {
    pub(crate) runtime: Runtime,
    pub(crate) spec: SealedSpec,
    pub(crate) recorder: Recorder,
    pub(crate) contents: Option<Manifest>,
    pub(crate) owner: (u32, u32),
    pub(crate) authorizer: Option<Authorizer>,
    pub(crate) vm: Box<dyn LiveVm>,
    pub(crate) root: RootImage,
    pub(crate) started: Instant,
    pub(crate) timings: Timings,
    /// The measured kernel, for whoever reads its memory.
    pub(crate) kernel: Option<File>,
    /// What this machine's init keeps in its memory, and no other machine's.
    pub(crate) nonce: [u8; 32],
    /// It goes on from a template.
    pub(crate) cloned: bool,
}

/// The run is over, the machine may still be there.
struct Exited {
    runtime: Runtime,
    spec: SealedSpec,
    recorder: Recorder,
    vm: Box<dyn LiveVm>,
    root: RootImage,
    /// The VMM ended and nobody had ended it.
    alone: bool,
    timings: Timings,
    error: Option<String>,
}

/// The machine is gone, or known not to be.
struct TornDown {
    runtime: Runtime,
    spec: SealedSpec,
    recorder: Recorder,
    facts: Option<VmmFacts>,
    console: Captured,
    report: TeardownReport,
    /// The record can't be written to any more.
    broken: Option<String>,
    timings: Timings,
    error: Option<String>,
}

/// Runs all phases; the thread's whole life.
pub(crate) fn drive(sealed: Sealed, calls: Receiver<Call>) -> RunReport {
    let begun = Instant::now();
    let registered = match sealed.register() {
        Ok(registered) => registered,
        Err(report) => return *report,
    };
    let measured = match registered.measure() {
        Ok(measured) => Ok(measured),
        Err(Unmeasured::Refused(report)) => return *report,
        Err(Unmeasured::TornDown(torn_down)) => Err(torn_down),
    };
    let torn_down = match measured.and_then(Measured::boot) {
        Ok(booted) => booted.attend(&calls).tear_down(),
        Err(torn_down) => *torn_down,
    };
    // Nobody is answered any more: callers see the end of the channel.
    drop(calls);
    torn_down.close(begun)
}

impl Sealed {
    fn register(self) -> Result<Registered, Box<RunReport>> {
        let Sealed { runtime, spec, boot, shown } = self;
        let failed = |error: String| Box::new(RunReport::unrecorded(spec.run_id(), Verdict::Failed, error));
        for (what, measured, sealed) in [
            ("kernel", boot.kernel.digest, spec.image().kernel),
            ("initramfs", boot.initramfs.digest, spec.image().initramfs),
            ("root image", boot.root.digest, spec.image().root),
        ] {
            if measured != sealed {
                return Err(failed(format!("the {what} at hand is not the one that the spec names")));
            }
        }
        let baseline = boot.contents.as_ref().map(EnvironmentBaseline::from_manifest);
        let binaries = boot.contents.as_ref().map(Manifest::binaries);
        if binaries.as_ref().map(BinaryPolicy::digest) != spec.binaries() {
            return Err(failed("the image's binary allowlist is not the one that the spec names".into()));
        }
        if boot.contents.as_ref().map_or(&[][..], Manifest::services) != spec.services() {
            return Err(failed("the image's root services are not those that the spec names".into()));
        }
        let fold = VerdictFold::new(&spec, baseline.as_ref()).map_err(|error| failed(error.to_string()))?;
        let bundle =
            Bundle::create(&runtime.out, spec.run_id()).map_err(|error| failed(error.to_string()))?;
        let begun = runtime
            .registry
            .register(spec.run_id(), bundle.dir())
            .map_err(|error| error.to_string())
            .and_then(|registration| {
                let written = bundle.put_file(SPEC, &spec.to_json()).map_err(|error| error.to_string());
                let ledger = written.and_then(|()| {
                    LedgerWriter::create(bundle.ledger(), Cadence::default()).map_err(|e| e.to_string())
                });
                match ledger {
                    Ok(ledger) => Ok((registration, ledger)),
                    Err(error) => {
                        let _ = registration.abandon();
                        Err(format!("can't write the bundle at {}: {error}", bundle.dir().display()))
                    }
                }
            });
        match begun {
            Ok((registration, ledger)) => {
                let recorder = Recorder::new(ledger, bundle, fold, runtime.clock.clone(), shown);
                let environment = Environment { baseline, binaries };
                Ok(Registered { runtime, spec, boot, environment, registration, recorder })
            }
            Err(error) => {
                bundle.discard();
                Err(failed(error))
            }
        }
    }
}

impl Registered {
    fn measure(mut self) -> Result<Measured, Unmeasured> {
        match guarded(|| self.record_beginning()) {
            Ok(()) => Ok(Measured(self)),
            // A disk that has no room for the beginning: nothing has happened that a record could tell of.
            Err(Broken::Record(why)) => Err(Unmeasured::Refused(Box::new(self.refuse(&why)))),
            Err(broken) => Err(Unmeasured::TornDown(Box::new(self.never_started(broken)))),
        }
    }

    fn refuse(self, why: &str) -> RunReport {
        let Registered { spec, recorder, registration, .. } = self;
        let (_, bundle) = recorder.abandon();
        let dir = bundle.dir().display();
        let error =
            format!("can't write the bundle at {dir}: {why}. Choose a writable `--out` with space left");
        bundle.discard();
        let gone = registration.abandon().gone;
        let mut report = RunReport::unrecorded(spec.run_id(), Verdict::Failed, error);
        report.teardown.verified = gone;
        report
    }

    fn record_beginning(&mut self) -> Result<(), RecordError> {
        let Registered { spec, boot, environment, recorder, .. } = self;
        // Named by the spec, so that whoever verifies has what the judge had.
        if let Some(baseline) = &environment.baseline {
            recorder.bundle().put_object(&baseline.to_bytes())?;
        }
        if let Some(binaries) = &environment.binaries {
            recorder.bundle().put_object(&binaries.to_bytes())?;
        }
        recorder.host_lifecycle(Payload::RunBegin)?;
        let spec_json = spec.to_json();
        let spec_digest = recorder.bundle().put_object(&spec_json)?;
        recorder.host_lifecycle(Payload::ProcessSpawn {
            binary: own_digest(&self.runtime.digests),
            argv: spec_digest,
            cwd: NfcString::new("/"),
        })?;
        let layers = layers(spec);
        recorder.host(&HostFact::Spec { run_id: spec.run_id().into(), spec: spec_digest, layers })?;
        for (what, input) in [("kernel", &boot.kernel), ("initramfs", &boot.initramfs), ("root", &boot.root)]
        {
            let fact = HostFact::Measured { what: what.into(), digest: input.digest, bytes: input.bytes };
            recorder.host(&fact)?;
        }
        for (what, digest, bytes) in boot.template.iter().flat_map(Template::parts) {
            recorder.host(&HostFact::Measured { what: what.into(), digest, bytes })?;
        }
        let proven = match Judge::prove(spec) {
            Ok(rules) => HostFact::SwitchProven { rules: rules as u64 },
            Err(unproven) => HostFact::fault("kill switch", &unproven),
        };
        recorder.host(&proven)
    }

    /// The end of a run whose machine was never started.
    fn never_started(self, broken: Broken) -> TornDown {
        let Registered { runtime, spec, mut recorder, registration, .. } = self;
        let check = registration.abandon();
        let report = TeardownReport { checks: vec![check], ms: 0 };
        let (error, broken) = broken.settle(&mut recorder, "measure");
        TornDown {
            runtime,
            spec,
            recorder,
            facts: None,
            console: Captured::default(),
            report,
            broken,
            timings: Timings::new(),
            error: Some(error),
        }
    }
}

impl Measured {
    fn boot(self) -> Result<Booted, Box<TornDown>> {
        let Measured(registered) = self;
        if registered.recorder.trip().is_some() {
            let unproven = Broken::Known("the kill switch does not work".into());
            return Err(Box::new(registered.never_started(unproven)));
        }
        let Registered { runtime, spec, boot, environment, registration, mut recorder } = registered;
        let mut boot = boot;
        let (contents, owner) = (boot.contents.take(), boot.owner);
        let template = boot.template.as_ref().map(Template::id);
        let authorizer = environment.binaries.map(Authorizer::new);
        let started = Instant::now();
        let begun = guarded(|| {
            let open = |file: &File| file.try_clone().map_err(|error| error.to_string());
            let kept = (open(&boot.kernel.file)?, RootImage(open(&boot.root.file)?));
            boot.plan(&runtime, &spec).map(|plan| (plan, kept)).map_err(|error| error.to_string())
        });
        let started_vm = match begun {
            Ok((plan, kept)) => {
                match catch_unwind(AssertUnwindSafe(|| runtime.backend.start(registration, plan))) {
                    Ok(Ok(vm)) => Ok((vm, kept)),
                    Ok(Err(failed)) => Err((Broken::Known(failed.error.to_string()), failed)),
                    Err(panic) => {
                        let text = panic_text(&*panic);
                        Err((Broken::Panic(text.clone()), StartFailed::panicked(text)))
                    }
                }
            }
            Err(broken) => {
                let failed = StartFailed::not_begun(registration, broken.to_string());
                // A disk that can't be made is no hole in the record.
                let broken = match broken {
                    Broken::Record(text) => Broken::Known(text),
                    other => other,
                };
                Err((broken, failed))
            }
        };
        let (vm, (kernel, root)) = match started_vm {
            Ok(started) => started,
            Err((broken, StartFailed { teardown, .. })) => {
                let report = match teardown {
                    Ok(proof) => proof.report().clone(),
                    Err(failed) => failed.report,
                };
                let (error, broken) = broken.settle(&mut recorder, "start");
                return Err(Box::new(TornDown {
                    runtime,
                    spec,
                    recorder,
                    facts: None,
                    console: Captured::default(),
                    report,
                    broken,
                    timings: Timings::new(),
                    error: Some(error),
                }));
            }
        };
        let timings = Timings::from([("vmm_start", milliseconds(started.elapsed()))]);
        let recorded = guarded(|| record_machine(&mut recorder, vm.facts(), template));
        let mut nonce = [0; 32];
        random(&mut nonce);
        let booted = Booted {
            runtime,
            spec,
            recorder,
            contents,
            owner,
            authorizer,
            vm,
            root,
            started,
            timings,
            kernel: Some(kernel),
            nonce,
            cloned: template.is_some(),
        };
        match recorded {
            Ok(()) => Ok(booted),
            Err(broken) => {
                let mut exited = booted.exited(None, false);
                let (error, broken) = broken.settle(&mut exited.recorder, "start");
                exited.error = Some(error);
                let mut torn_down = exited.tear_down();
                torn_down.broken = torn_down.broken.or(broken);
                Err(Box::new(torn_down))
            }
        }
    }
}

fn record_machine(
    recorder: &mut Recorder,
    facts: &VmmFacts,
    template: Option<Digest>,
) -> Result<(), RecordError> {
    let start = template.map_or_else(|| "cold".to_owned(), |id| format!("clone of template {id}"));
    recorder.vm_spawned(facts.executable, &facts.argv)?;
    let mut details = BTreeMap::from([
        ("accel_why".to_owned(), facts.acceleration.why.clone()),
        ("devices".to_owned(), facts.devices.join(" ")),
        ("root_read_only".to_owned(), facts.root_read_only.to_string()),
        ("start".to_owned(), start),
        ("unexpected_devices".to_owned(), facts.unexpected_devices.join(" ")),
        ("version".to_owned(), facts.version.clone()),
        ("vmm_pid".to_owned(), facts.process.pid.to_string()),
    ]);
    details.extend(facts.jail.details());
    recorder.host(&HostFact::Isolation {
        backend: facts.backend.into(),
        accel: facts.acceleration.accel.to_string(),
        jail: facts.jail.to_string(),
        details,
    })
}

impl Booted {
    fn attend(mut self, calls: &Receiver<Call>) -> Exited {
        let attended = catch_unwind(AssertUnwindSafe(|| attend(&mut self, calls)));
        let (error, alone) = match attended {
            Ok(Attended { error, alone }) => (error, alone),
            Err(panic) => {
                // From here on the machine does nothing any more; a backend that can't even do this is torn down next.
                let _ = catch_unwind(AssertUnwindSafe(|| self.vm.kill()));
                (Some(record_fault(&mut self.recorder, "driver", panic_text(&*panic))), false)
            }
        };
        self.exited(error, alone)
    }

    fn exited(self, error: Option<String>, alone: bool) -> Exited {
        let Booted { runtime, spec, recorder, vm, root, timings, .. } = self;
        Exited { runtime, spec, recorder, vm, root, alone, timings, error }
    }
}

impl Exited {
    fn tear_down(self) -> TornDown {
        let Exited { runtime, spec, mut recorder, vm, root, alone, mut timings, mut error } = self;
        let root = root.hash();
        let facts = catch_unwind(AssertUnwindSafe(|| vm.facts().clone()));
        let console = catch_unwind(AssertUnwindSafe(|| vm.console()));
        let begun = Instant::now();
        let destroyed = catch_unwind(AssertUnwindSafe(|| vm.destroy()));
        let took = milliseconds(begun.elapsed());
        let mut faults = Vec::new();
        let report = match destroyed {
            Ok(Ok(proof)) => proof.report().clone(),
            Ok(Err(failed)) => failed.report,
            Err(panic) => {
                faults.push(panic_text(&*panic));
                TeardownFailed::unknown().report
            }
        };
        let facts = facts.map_err(|panic| faults.push(panic_text(&*panic))).ok();
        let console = console.map_err(|panic| faults.push(panic_text(&*panic))).unwrap_or_default();
        for fault in faults {
            let text = record_fault(&mut recorder, "teardown", fault);
            error.get_or_insert(text);
        }
        timings.insert("teardown", took);
        // The kill first, the writing after.
        let broken = guarded(|| {
            recorder.kill()?;
            let (ended, code) = aftermath::vm_exited(&report, alone);
            recorder.host(&ended)?;
            for fact in aftermath::outlived(&runtime.registry, spec.run_id()) {
                recorder.host(&fact)?;
            }
            recorder.host(&root.fact())?;
            recorder.vm_exited(code)
        })
        .err()
        .map(|broken| broken.to_string());
        TornDown { runtime, spec, recorder, facts, console, report, broken, timings, error }
    }
}

impl TornDown {
    fn close(self, begun: Instant) -> RunReport {
        let TornDown { runtime, spec, mut recorder, facts, console, report, broken, timings, error } = self;
        let mut run_report = RunReport::unrecorded(spec.run_id(), Verdict::Killed, String::new());
        run_report.error = error;
        run_report.timings_ms = timings;
        run_report.timings_ms.insert("record", milliseconds(recorder.spent()));
        run_report.bundle = Some(recorder.bundle().dir().to_owned());
        run_report.teardown = Teardown { verified: report.verified(), ms: report.ms };
        if let Some(facts) = &facts {
            run_report.isolation = Isolation {
                backend: facts.backend.into(),
                accel: facts.acceleration.accel.to_string(),
                jail: facts.jail.to_string(),
            };
        }
        let checks = report.checks.iter().map(|check| Check {
            what: check.what.clone(),
            gone: check.gone,
            detail: check.detail.clone(),
        });
        let fact =
            HostFact::Teardown { verified: report.verified(), ms: report.ms, checks: checks.collect() };
        let broken =
            broken.or_else(|| guarded(|| recorder.host(&fact)).err().map(|broken| broken.to_string()));
        if let Some(why) = broken {
            // The record has no end: INCOMPLETE for a verifier, KILLED here.
            let (derived, _) = recorder.abandon();
            run_report.conclude(&derived);
            run_report.verdict = Verdict::Killed;
            run_report.kill.reasons.push("record_failed".into());
            run_report.error.get_or_insert(why);
            return run_report;
        }
        let (closed, derived, bundle) = match guarded(|| recorder.close()) {
            Ok(closed) => closed,
            Err(broken) => {
                run_report.kill.reasons.push(broken.reason().into());
                run_report.error.get_or_insert(broken.to_string());
                return run_report;
            }
        };
        run_report.conclude(&derived);
        let sealed = guarded(|| {
            if let Some(advisor) = &runtime.advisor {
                run_report.advisory = advisor(&closed);
            }
            // Up to here: what follows is the sealing of this very file.
            run_report.timings_ms.insert("total", milliseconds(begun.elapsed()));
            if console.total > 0 {
                bundle.put_file(CONSOLE, &console.bytes)?;
            }
            let mut json = serde_json::to_vec_pretty(&run_report)?;
            json.push(b'\n');
            bundle.put_file(REPORT, &json)?;
            bundle::seal(bundle.dir(), spec.run_id(), &closed, &runtime.key)
                .map_err(|error| io::Error::other(error.to_string()))
        });
        if let Err(broken) = sealed {
            // The record says what it says, but nobody has signed it: a verifier finds it not intact.
            run_report.verdict = Verdict::Killed;
            run_report.kill.reasons.push(broken.reason().into());
            run_report.error.get_or_insert(broken.to_string());
        }
        run_report
    }
}

/// Why a phase did not come to its end.
enum Broken {
    /// An error that was foreseen.
    Known(String),
    /// The record could not be written.
    Record(String),
    /// A panic.
    Panic(String),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Broken::Known(text) | Broken::Record(text) | Broken::Panic(text) => f.write_str(text),
        }
    }
}

impl Broken {
    /// What a report calls it.
    fn reason(&self) -> &'static str {
        match self {
            Broken::Panic(_) => "evaluator_failure",
            Broken::Known(_) | Broken::Record(_) => "record_failed",
        }
    }

    /// Writes down what happened, if that can be; the error's text, and whether the record is broken.
    fn settle(self, recorder: &mut Recorder, stage: &str) -> (String, Option<String>) {
        let text = self.to_string();
        let fact = match self {
            Broken::Known(_) => HostFact::failed(stage, &text),
            Broken::Panic(_) => HostFact::fault(stage, &text),
            Broken::Record(_) => return (text.clone(), Some(text)),
        };
        let broken = guarded(|| recorder.host(&fact)).err().map(|broken| broken.to_string());
        (text, broken)
    }
}

/// Runs one step; its error and its panic come back as a value.
fn guarded<T, E: std::fmt::Display>(step: impl FnOnce() -> Result<T, E>) -> Result<T, Broken> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Broken::Record(error.to_string())),
        Err(panic) => Err(Broken::Panic(panic_text(&*panic))),
    }
}

/// Records a fault, if that can be; gives the text for the report.
fn record_fault(recorder: &mut Recorder, stage: &str, text: String) -> String {
    let broken = guarded(|| recorder.host(&HostFact::fault(stage, &text)));
    broken.err().map_or(text, |broken| broken.to_string())
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panic: {}", text.unwrap_or_else(|| "without a text".into()))
}

/// Digest of the running Hotcell executable; zero where it can't be read.
fn own_digest(digests: &FileDigests) -> Digest {
    digests.open(Path::new("/proc/self/exe")).map_or(Digest::ZERO, |own| own.digest)
}

/// Which layers can find something in this run, and on what they stand.
fn layers(spec: &SealedSpec) -> Vec<LayerState> {
    let state = |layer: &str, armed: bool, basis: &str| LayerState {
        layer: layer.into(),
        armed,
        basis: basis.into(),
    };
    let given = |digest: Option<Digest>, with: &str, without: &str| match digest {
        Some(digest) => (true, format!("{with} {digest}")),
        None => (false, without.to_owned()),
    };
    let (l3, l3_basis) = given(spec.binaries(), "allowlist", "the image has no binary allowlist");
    let (l5, l5_basis) = given(spec.fingerprint(), "fingerprint", "no fingerprint was given to compare with");
    // Whether the disk could be watched in this run stands in `hotcell.armed`.
    let (_, baseline) = given(spec.baseline(), "; baseline", "; the image has no environment baseline");
    let l7_basis = format!("the workspace disk, read by the host{baseline}");
    vec![
        state("L1", true, "one machine, no network device, destroyed after"),
        state("L2", true, "the sealed capability policy"),
        state("L3", l3, &l3_basis),
        state("L4", true, "tokens for what the host starts"),
        state("L5", l5, &l5_basis),
        state("L6", true, "the guest's narrative against the host's decisions"),
        state("L7", true, &l7_basis),
        state("L8", true, "AMES-V1, signed checkpoint"),
        state("L9", true, "every host observation as it is recorded"),
    ]
}
