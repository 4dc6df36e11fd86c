//! How long an exec takes, and what the gate costs: the same loads in two machines, one with enforcement, one without a list.
//!
//! ```text
//! cargo bench -p hotcell-cli --bench exec [-- ROUNDS]      default 10; uses HOTCELL_HOME or target/bench-home
//! ```
//! Both machines are up from the beginning; each round runs each load once in either, in turn, the order changing
//! from round to round. Two figures for each load: the host's clock from asking for the exec to its end, and the processor
//! time that the machine's QEMU took meanwhile, which a busy host disturbs less. Of both the median of the rounds' ratios,
//! with quartiles and range. The round trip of an exec: from [`Run::exec`] of `true` to its result, one after the other,
//! beside its peer, a shell in the same machine that starts `true` and waits for it. With 0 rounds only these two.
//! The last line is JSON.

use hotcell_image::{Guest, KernelKind, Store};
use hotcell_ledger::SigningKey;
use hotcell_policy::{EnvironmentBaseline, ImageRef, PolicyDraft, RunDraft};
use hotcell_runtime::{ExecIo, ExecRequest, MeasuredBoot, Patience, Run, Runtime};
use hotcell_vm::{AccelChoice, FileDigests, JailChoice, QemuBackend, Registry};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const GUEST: Guest =
    Guest { init: include_bytes!(env!("HOTCELL_INIT")), request: include_bytes!(env!("HOTCELL_REQUEST")) };

/// Name, executions, script.
const LOADS: [(&str, u32, &str); 3] = [
    // Nothing but executing: the worst there is.
    ("1000 x true", 1000, "i=0; while [ $i -lt 1000 ]; do /bin/true; i=$((i+1)); done"),
    // As make does it: a shell for each line, which starts the tools.
    (
        "make-like: 200 targets, sh -c of 4 tools each",
        1000,
        "i=0; while [ $i -lt 200 ]; do /bin/sh -c 'sed s/a/b/ src >o.1; grep -c b o.1 >o.2; cat o.1 o.2 >o.3; /bin/rm o.1 o.2' ; i=$((i+1)); done",
    ),
    // With tools that work a little, as compilers do.
    (
        "make-like: 40 targets, sh -c of sort and md5sum of 200 KiB",
        120,
        "i=0; while [ $i -lt 40 ]; do /bin/sh -c 'sort -r big >o.1; md5sum o.1 >o.2'; i=$((i+1)); done",
    ),
];
/// Round trips of each kind.
const ROUND_TRIPS: usize = 100;
/// What the round trip is measured against: starts by a shell, so many at a time.
const SHELL: &str = "i=0; while [ $i -lt 100 ]; do /bin/true; i=$((i+1)); done";
const SHELL_EXECS: f64 = 100.0;
const SHELL_ROUNDS: usize = 5;
const PREPARE: &str = "seq 300 | sed 's/$/ abcabc/' >src; seq 30000 >big";

fn runtime(home: &Path, out: &Path) -> Result<Runtime, Box<dyn Error>> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let qemu =
        std::env::split_paths(&path).map(|dir| dir.join("qemu-system-x86_64")).find(|path| path.is_file());
    Ok(Runtime {
        registry: Registry::open(&home.join("state/live"))?,
        backend: Arc::new(QemuBackend::new(qemu.ok_or("QEMU is not installed")?, JailChoice::Auto)?),
        acceleration: AccelChoice::Auto.resolve()?,
        out: out.to_owned(),
        cache: home.join("cache"),
        digests: FileDigests::remembered_in(&home.join("cache/digests")),
        key: Arc::new(SigningKey::load_or_create(&home.join("state/key"))?),
        clock: Runtime::host_clock(),
        boot_deadline: Duration::from_secs(120),
        patience: Patience::default(),
        advisor: None,
    })
}

fn start(home: &Path, out: &Path, enforced: bool) -> Result<Run, Box<dyn Error>> {
    let mut say = |text: &str| eprintln!("{text}");
    let store = Store::new(&home.join("cache"), &home.join("state/images"), GUEST);
    let image = store.image("busybox", &mut say)?;
    let kernel = store.kernel(KernelKind::default(), &mut say)?;
    let mut boot = MeasuredBoot::open(&kernel.vmlinuz(), &store.initramfs(&kernel)?.path, &image.root)?;
    let reference = ImageRef {
        name: "busybox".into(),
        kernel: boot.kernel.digest,
        initramfs: boot.initramfs.digest,
        root: boot.root.digest,
    };
    let mut policy = PolicyDraft::for_running_a_command();
    policy.limits.timeout_s = 3600;
    let id = format!("bench-exec-{}-{enforced}", std::process::id());
    let mut draft = RunDraft::new(id, reference, policy);
    if enforced {
        draft.baseline = Some(EnvironmentBaseline::from_manifest(&image.manifest).digest());
        draft.binaries = Some(image.manifest.binaries().digest());
        boot.contents = Some(image.manifest);
    }
    Ok(runtime(home, out)?.start(draft.seal()?, boot))
}

/// Processor seconds of the process that says by its arguments that it is this run's QEMU.
fn processor(run_id: &str) -> Option<f64> {
    let name = format!("hotcell-{run_id}");
    let is_vmm = |entry: &Path| {
        let line = std::fs::read(entry.join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|&byte| byte == 0).collect();
        words.windows(2).any(|pair| pair == [b"-name".as_slice(), name.as_bytes()])
    };
    let entry =
        std::fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path()).find(|entry| is_vmm(entry))?;
    let tasks = std::fs::read_dir(entry.join("task")).ok()?.flatten();
    let nanoseconds = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    Some(nanoseconds.sum::<u64>() as f64 / 1e9)
}

/// Seconds by the clock and of the processor.
fn seconds(run: &Run, script: &str) -> Result<[f64; 2], Box<dyn Error>> {
    let mut request = ExecRequest::new(["/bin/sh", "-c", script]);
    request.env = vec![("PATH".into(), "/bin:/usr/bin".into())];
    let spent = processor(run.id()).ok_or("the machine's QEMU is not found")?;
    let begun = Instant::now();
    let result = run.exec(request, ExecIo::default()).wait()?;
    let took = begun.elapsed().as_secs_f64();
    let spent = processor(run.id()).ok_or("the machine's QEMU is gone")? - spent;
    if result.code == 0 {
        Ok([took, spent])
    } else {
        Err(format!("a load ended with {}", result.code).into())
    }
}

/// Milliseconds from asking for `true` to its end.
fn round_trip(run: &Run) -> Result<f64, Box<dyn Error>> {
    let begun = Instant::now();
    let result = run.exec(ExecRequest::new(["/bin/true"]), ExecIo::default()).wait()?;
    let took = begun.elapsed().as_secs_f64() * 1e3;
    if result.code == 0 { Ok(took) } else { Err(format!("true ended with {}", result.code).into()) }
}

fn quantile(sorted: &[f64], at: f64) -> f64 {
    let place = sorted.len().saturating_sub(1) as f64 * at;
    let value = |at: f64| sorted.get(at as usize).copied().unwrap_or(f64::NAN);
    let (below, above) = (value(place.floor()), value(place.ceil()));
    below + (above - below) * place.fract()
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

fn main() -> Result<(), Box<dyn Error>> {
    let rounds: usize = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(10);
    let bench_home = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/bench-home");
    let home = std::env::var_os("HOTCELL_HOME").map_or_else(bench_home, PathBuf::from);
    std::fs::create_dir_all(&home)?;
    let out = home.join("bench-out");
    let enforced = if rounds > 0 { [false, true].as_slice() } else { &[true] };
    let machines =
        enforced.iter().map(|enforced| start(&home, &out, *enforced)).collect::<Result<Vec<_>, _>>()?;
    for machine in &machines {
        // Its QEMU can be found only once it surely runs.
        round_trip(machine)?;
        if rounds > 0 {
            seconds(machine, PREPARE)?;
        }
    }
    let mut trips = Vec::new();
    let live = machines.last().ok_or("no machine")?;
    let mut shell = Vec::new();
    for _ in 0..SHELL_ROUNDS {
        let [clock, _] = seconds(live, SHELL)?;
        shell.push(clock * 1e3 / SHELL_EXECS);
    }
    let shell = sorted(shell);
    let peer = quantile(&shell, 0.5);
    println!("a shell's own start of true in the machine: p50 {peer:.1} ms");
    trips.push(format!(r#""shell": {shell:.2?}"#));
    for (name, pause) in [("back_to_back", Duration::ZERO), ("after_60_ms", Duration::from_millis(60))] {
        let mut took = Vec::new();
        for _ in 0..ROUND_TRIPS {
            std::thread::sleep(pause);
            took.push(round_trip(live)?);
        }
        let took = sorted(took);
        let [p50, p95, least] = [0.5, 0.95, 0.0].map(|at| quantile(&took, at));
        let ratio = p50 / peer;
        println!(
            "round trip of true, {name}: p50 {p50:.1} ms ({ratio:.2} x the shell's), p95 {p95:.1} ms, least {least:.1} ms"
        );
        trips.push(format!(r#""{name}": {took:.2?}"#));
    }
    println!("| load | executions | measure | without | with | ratio: median | quartiles | range |");
    println!("|---|---|---|---|---|---|---|---|");
    for (name, executions, script) in LOADS.into_iter().filter(|_| rounds > 0) {
        // For each round: without, with; of each the clock and the processor.
        let mut took = Vec::new();
        for round in 0..rounds {
            let mut pair = [[0.0; 2]; 2];
            for turn in 0..2 {
                let which = (round + turn) % 2;
                if let (Some(machine), Some(slot)) = (machines.get(which), pair.get_mut(which)) {
                    *slot = seconds(machine, script)?;
                }
            }
            took.push(pair);
        }
        for (measure, at) in [("clock", 0), ("processor", 1)] {
            let of = |pair: &[[f64; 2]; 2]| pair.map(|figures| figures.get(at).copied().unwrap_or(f64::NAN));
            let pairs: Vec<[f64; 2]> = took.iter().map(of).collect();
            let without = sorted(pairs.iter().map(|[without, _]| *without).collect());
            let with = sorted(pairs.iter().map(|[_, with]| *with).collect());
            let ratios = sorted(pairs.iter().map(|[without, with]| with / without).collect());
            let at = |q| quantile(&ratios, q);
            println!(
                "| {name} | {executions} | {measure} | {:.2} s | {:.2} s | {:.3} | {:.3} to {:.3} | {:.3} to {:.3} |",
                quantile(&without, 0.5),
                quantile(&with, 0.5),
                at(0.5),
                at(0.25),
                at(0.75),
                at(0.0),
                at(1.0)
            );
        }
    }
    println!(r#"{{"round_trip_ms": {{{}}}}}"#, trips.join(", "));
    for machine in machines {
        let report = machine.finish();
        assert_eq!(report.verdict.as_str(), "ALLOWED", "{report:?}");
    }
    Ok(())
}
