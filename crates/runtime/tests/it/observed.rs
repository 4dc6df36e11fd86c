//! A machine whose memory can't be understood does not run anything.

use crate::lab::Lab;
use hotcell_decide::Verdict;
use hotcell_testkit::{FakeMachine, honest};
use hotcell_vm::{GuestMemory, MemoryRegion};

/// Memory of this very process, of which the kernel file of these tests knows nothing.
fn machine() -> FakeMachine {
    let region = MemoryRegion { guest: 0, host: 4096, bytes: 4096 };
    let memory = Some(GuestMemory { pid: std::process::id() as i32, regions: vec![region] });
    FakeMachine { memory, ..FakeMachine::new(honest) }
}

#[test]
fn a_kernel_that_says_nothing_of_itself_is_refused() {
    let lab = Lab::with(machine());
    let (report, result) = lab.run(&["true"]);
    assert_eq!(report.verdict, Verdict::Failed, "{report:?}");
    assert!(report.error.as_ref().unwrap().contains("not a bzImage"), "{report:?}");
    assert!(result.is_err(), "nothing ran: {result:?}");
}
