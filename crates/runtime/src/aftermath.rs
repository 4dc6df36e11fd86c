//! What is looked at once a machine is gone: the root image, and whether anything of the run still lives.
//!
//! Hashing the root image takes as long as before the run, some hundred milliseconds for a Debian image, so it
//! goes on while the machine is taken down. It begins after the VMM's end: nobody can write any more.
//! Called by the run's phases.

use hotcell_decide::{HostFact, ViolationKind};
use hotcell_ledger::Digest;
use hotcell_vm::{Registry, TeardownReport};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::thread::JoinHandle;

/// Processes that are named where a run left some.
const MAX_NAMED: usize = 8;

/// The open file that was hashed and booted.
pub(crate) struct RootImage(pub(crate) File);

/// Its digest on the way.
pub(crate) struct Hashing(io::Result<JoinHandle<io::Result<(Digest, u64)>>>);

impl RootImage {
    /// Begins to hash it, on a thread of its own.
    pub(crate) fn hash(self) -> Hashing {
        let hash = move || {
            let bytes = self.0.metadata()?.len();
            // Clones of the descriptor share its place, so it is read by place.
            Digest::of_reader(At { file: &self.0, at: 0 }).map(|digest| (digest, bytes))
        };
        Hashing(std::thread::Builder::new().name("root-after".into()).spawn(hash))
    }
}

impl Hashing {
    /// The fact: measured again, or a fault.
    pub(crate) fn fact(self) -> HostFact {
        let joined = self.0.and_then(|thread| {
            thread.join().unwrap_or_else(|panic| Err(io::Error::other(crate::phases::panic_text(&*panic))))
        });
        match joined {
            Ok((digest, bytes)) => HostFact::Measured { what: "root_after".into(), digest, bytes },
            Err(error) => HostFact::fault("root image", &error),
        }
    }
}

struct At<'a> {
    file: &'a File,
    at: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// How the VMM process ended, and its code where there is one: negative for a signal. The backend
/// says so in its first check.
fn vmm_end(report: &TeardownReport) -> (String, Option<i32>) {
    let detail = report.checks.iter().find(|check| check.what.contains("VMM")).map(|check| &*check.detail);
    let status = detail.map_or("unknown", |detail| detail.strip_prefix("reaped, ").unwrap_or(detail));
    let number = |text: &str| text.split(' ').next().and_then(|word| word.parse::<i32>().ok());
    let code = match (status.strip_prefix("exit status: "), status.strip_prefix("signal: ")) {
        (Some(code), _) => number(code),
        (_, Some(signal)) => number(signal).map(|signal| -signal),
        _ => None,
    };
    (status.to_owned(), code)
}

/// The VMM ended: `alone` where nobody had ended it. A guest that restarts its machine ends the VMM with 0, which is the
/// guest's doing; with anything else the VMM itself broke.
pub(crate) fn vm_exited(report: &TeardownReport, alone: bool) -> (HostFact, i32) {
    let (status, code) = vmm_end(report);
    let broke = alone && code.is_some_and(|code| code != 0);
    (HostFact::VmExited { expected: !broke, status }, code.unwrap_or(-9))
}

/// Processes that carry this run's mark and should be gone.
pub(crate) fn outlived(registry: &Registry, run_id: &str) -> Vec<HostFact> {
    let left = registry.outlived(run_id).into_iter().take(MAX_NAMED);
    left.map(|process| HostFact::Violation {
        kind: ViolationKind::ProcessOutlivedRun,
        subject: format!("process {}", process.pid),
        detail: "it carries this run's mark and lives after the teardown".into(),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hotcell_vm::Check;

    fn report(detail: &str) -> TeardownReport {
        let check = Check { what: "VMM process 7".into(), gone: true, detail: detail.into() };
        TeardownReport { checks: vec![check], ms: 0 }
    }

    #[test]
    fn a_vmm_that_breaks_by_itself_is_unexpected_and_no_other() {
        for (detail, alone, expected, code) in [
            ("reaped, signal: 9 (SIGKILL)", false, true, -9),
            ("reaped, signal: 11 (SIGSEGV) (core dumped)", true, false, -11),
            ("reaped, exit status: 1", true, false, 1),
            ("reaped, exit status: 0", true, true, 0),
            ("reaped, exit status: 1", false, true, 1),
            ("still there 10 s after SIGKILL", false, true, -9),
        ] {
            let (fact, got) = vm_exited(&report(detail), alone);
            assert!(
                matches!(fact, HostFact::VmExited { expected: e, .. } if e == expected),
                "{detail} {fact:?}"
            );
            assert_eq!(got, code, "{detail}");
        }
    }

    #[test]
    fn a_root_image_is_hashed_whole_wherever_its_descriptor_stands() {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, b"the image").unwrap();
        let HostFact::Measured { digest, bytes, .. } = RootImage(file).hash().fact() else {
            panic!("no digest")
        };
        assert_eq!((digest, bytes), (Digest::of(b"the image"), 9));
    }
}
