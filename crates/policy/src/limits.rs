//! Every number that an operator may set, with its range, its default and the reason.
//!
//! No range reaches a value that would switch something off: an average over
//! verdicts of 0 and 1 never reaches 1, so its threshold stays below; a burst
//! stays within what a run can produce in its window.

/// A closed range of whole numbers with its default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntRange {
    /// Smallest allowed.
    pub min: u32,
    /// Largest allowed.
    pub max: u32,
    /// What an absent key means.
    pub default: u32,
}

/// A closed range of fractions with its default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FractionRange {
    /// Smallest allowed.
    pub min: f64,
    /// Largest allowed.
    pub max: f64,
    /// What an absent key means.
    pub default: f64,
}

/// Virtual CPUs. More than eight buys an agent nothing but a wider attack surface for races.
pub const VCPUS: IntRange = IntRange { min: 1, max: 8, default: 1 };
/// Guest memory. Below 128 MiB a distribution kernel does not boot reliably.
pub const MEMORY_MIB: IntRange = IntRange { min: 128, max: 16_384, default: 512 };
/// The overlay disk behind `/workspace`. Below 16 MiB ext4 has no room for its journal.
pub const DISK_MIB: IntRange = IntRange { min: 16, max: 131_072, default: 1024 };
/// `/tmp`, in guest memory.
pub const TMP_MIB: IntRange = IntRange { min: 1, max: 8192, default: 64 };
/// Processes of the workload. Eight is a shell, a pipeline and something to start them.
pub const PIDS: IntRange = IntRange { min: 8, max: 32_768, default: 256 };
/// Kept output per stream; what comes after is counted and digested, not kept.
pub const OUTPUT_MIB: IntRange = IntRange { min: 1, max: 1024, default: 16 };
/// What is copied into a run's machine, and again out of it, in files: as much as a disk may hold.
pub const COPY_MIB: IntRange = IntRange { min: 1, max: 131_072, default: 1024 };
/// Files, directories and links copied in, and again out. Each is a fact and an object in the record, and each file that
/// stays in the bundle is one more: with the most decisions of a run they are under the 100,000 that a verifier looks at.
pub const COPY_FILES: IntRange = IntRange { min: 1, max: 16_384, default: 4096 };
/// Wall-clock time of a run.
pub const TIMEOUT_S: IntRange = IntRange { min: 1, max: 3600, default: 300 };

/// Denials within the window that trip the switch.
pub const DENIAL_BURST: IntRange = IntRange { min: 1, max: 100, default: 5 };
/// The window of the burst; never longer than the longest run.
pub const DENIAL_WINDOW_S: IntRange = IntRange { min: 1, max: 3600, default: 60 };
/// The average of denials over decisions that trips the switch.
pub const DENIAL_EWMA: FractionRange = FractionRange { min: 0.05, max: 0.95, default: 0.35 };
/// Unexplained mutations within the window that trip the switch.
pub const MUTATION_BURST: IntRange = IntRange { min: 1, max: 100, default: 3 };
/// The window of the burst; never longer than the longest run.
pub const MUTATION_WINDOW_S: IntRange = IntRange { min: 1, max: 3600, default: 60 };
/// The average of unexplained mutations over mutations that trips the switch.
pub const MUTATION_EWMA: FractionRange = FractionRange { min: 0.05, max: 0.95, default: 0.30 };

/// Entries of one list of a policy. The broker and the monitor walk these lists for each decision.
pub const MAX_LIST: usize = 1024;
/// Bytes of one argument or one variable: Linux's MAX_ARG_STRLEN.
pub const MAX_ARG_BYTES: usize = 128 * 1024;
/// Bytes of argv and environment together; below Linux's own limit for an 8 MiB stack.
pub const MAX_COMMAND_BYTES: usize = 1024 * 1024;
/// Kernel arguments beyond our own.
pub const MAX_KERNEL_ARGS: usize = 32;
/// Bytes of a spec.json that is read back.
pub const MAX_SPEC_BYTES: usize = 8 * 1024 * 1024;
/// Root services of an image.
pub const MAX_SERVICES: usize = 8;
/// Bytes of one service's program and arguments.
pub const MAX_SERVICE_BYTES: usize = 4096;
/// The first vsock CID that is not reserved for hypervisor, loopback or host.
pub const FIRST_VSOCK_CID: u32 = 3;

impl IntRange {
    /// Whether the value lies in the range.
    pub const fn contains(&self, value: i64) -> bool {
        value >= self.min as i64 && value <= self.max as i64
    }
}

impl FractionRange {
    /// Whether the value lies in the range; NaN does not.
    pub const fn contains(&self, value: f64) -> bool {
        value >= self.min && value <= self.max
    }
}

const ALL_INT: [IntRange; 13] = [
    VCPUS,
    MEMORY_MIB,
    DISK_MIB,
    TMP_MIB,
    PIDS,
    OUTPUT_MIB,
    COPY_MIB,
    COPY_FILES,
    TIMEOUT_S,
    DENIAL_BURST,
    DENIAL_WINDOW_S,
    MUTATION_BURST,
    MUTATION_WINDOW_S,
];
const _: () = {
    let mut at = 0;
    while at < ALL_INT.len() {
        #[allow(clippy::indexing_slicing, reason = "a constant index, evaluated by the compiler")]
        let range = ALL_INT[at];
        assert!(range.contains(range.default as i64) && range.min >= 1);
        at += 1;
    }
    assert!(DENIAL_EWMA.contains(DENIAL_EWMA.default) && DENIAL_EWMA.max < 1.0);
    assert!(MUTATION_EWMA.contains(MUTATION_EWMA.default) && MUTATION_EWMA.max < 1.0);
    assert!(TMP_MIB.default <= MEMORY_MIB.min);
    assert!(DENIAL_WINDOW_S.max <= TIMEOUT_S.max && MUTATION_WINDOW_S.max <= TIMEOUT_S.max);
};
