//! What a look at a live machine's memory costs, and what it reads: `look PID KERNEL [LOOKS]`.
//!
//! PID is the VMM's (`hotcell ps --json`), KERNEL the file that it booted. The guest's memory is taken to
//! be the VMM's largest mapping, which holds for machines of up to 3 GiB.

use hotcell_decide::ProcessRules;
use hotcell_observe::ram::{RamObserver, RamPlan, ReadError, Region, Source, VmmMemory};
use hotcell_observe::{Observer, Sightings};
use hotcell_sys::host::Range;
use rustix::time::{ClockId, clock_gettime};
use std::cell::Cell;
use std::fs::{self, File};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what is read.
struct Counting {
    memory: VmmMemory,
    counts: Arc<[AtomicU64; 4]>,
}

impl Source for Counting {
    fn regions(&self) -> &[Region] {
        self.memory.regions()
    }

    fn read(&self, ranges: &[Range], into: &mut [u8]) -> Result<(), ReadError> {
        let counts = [1, ranges.len(), into.len(), 0];
        self.counts.iter().zip(counts).for_each(|(sum, more)| {
            sum.fetch_add(more as u64, Ordering::Relaxed);
        });
        self.memory.read(ranges, into)
    }

    fn own_pages(&self, address: u64, pages: usize) -> Option<Vec<bool>> {
        self.counts[3].fetch_add(pages as u64, Ordering::Relaxed);
        self.memory.own_pages(address, pages)
    }
}

thread_local! { static LAST: Cell<u64> = const { Cell::new(0) }; }

/// Microseconds of processor time of this thread since the last call.
fn used_us() -> u64 {
    let used = clock_gettime(ClockId::ThreadCPUTime);
    let now = used.tv_sec as u64 * 1_000_000 + used.tv_nsec as u64 / 1000;
    now - LAST.replace(now)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let (Some(pid), Some(kernel)) =
        (arguments.get(1).and_then(|pid| pid.parse::<i32>().ok()), arguments.get(2))
    else {
        eprintln!("usage: look PID KERNEL [LOOKS]");
        return ExitCode::from(2);
    };
    let looks = arguments.get(3).and_then(|looks| looks.parse().ok()).unwrap_or(200);
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the VMM runs");
    let mapping = |line: &str| {
        let (first, last) = line.split_once(' ')?.0.split_once('-')?;
        let (first, last) = (u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()?);
        Some(Region { guest: 0, host: first, bytes: last - first })
    };
    let largest =
        maps.lines().filter(|line| line.contains(" rw-")).filter_map(mapping).max_by_key(|one| one.bytes);
    let counts: Arc<[AtomicU64; 4]> = Arc::default();
    let memory = VmmMemory::new(pid, largest.into_iter().collect());
    let mut observer = RamObserver::new(RamPlan {
        source: Box::new(Counting { memory, counts: Arc::clone(&counts) }),
        kernel: File::open(kernel).expect("the kernel opens"),
        kernel_digest: "example".into(),
        cache: std::env::temp_dir(),
        marked: Vec::new(),
        rules: ProcessRules::default(),
        shown: false,
        cloned: false,
    });
    observer.prepare().expect("the kernel says what must be known");
    used_us();
    let armed = observer.arm(&mut Sightings::default()).expect("the machine can be observed");
    println!("armed in {} us: {}", used_us(), armed.basis);
    counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
    let mut figures: Vec<u64> = (0..looks)
        .map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            let mut seen = Sightings::default();
            used_us();
            let looked = observer.look(&mut seen);
            let used = used_us();
            looked.expect("a look");
            seen.into_iter().for_each(|sighting| println!("{sighting:?}"));
            used
        })
        .collect();
    figures.sort_unstable();
    let [calls, ranges, bytes, pages] =
        [0, 1, 2, 3].map(|at| counts[at].load(Ordering::Relaxed) / looks as u64);
    println!(
        "{looks} looks: mean {} us, median {} us, p95 {} us of processor time; each {calls} calls, {ranges} ranges, {} KiB, {pages} pages asked",
        figures.iter().sum::<u64>() / looks as u64,
        figures[looks / 2],
        figures[looks * 95 / 100],
        bytes >> 10,
    );
    ExitCode::SUCCESS
}
