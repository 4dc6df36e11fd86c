//! Does KVM really execute guest code, and at what speed?
//!
//! `/dev/kvm` may exist where no hardware virtualisation stands behind it (nested
//! clouds): guest code is then interpreted, a hundred times slower, and fails at
//! the first instruction that the interpreter lacks. So the probe runs a short
//! loop in a tiny virtual machine and times it. It never boots a kernel.

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit};
use std::time::Instant;

/// Rounds of the probe's loop: some 0.05 ms where code runs natively, 75 ms
/// where it was seen interpreted.
const ROUNDS: u32 = 50_000;
/// Slowest speed that counts as execution. Hardware does a round a cycle or two
/// (over 500 million a second); interpreters stay under 10 million.
const MIN_ROUNDS_PER_SECOND: u64 = 100_000_000;
/// Slower than this is no pause of the host but an interpreter: no second try.
const HOPELESS_ROUNDS_PER_SECOND: u64 = MIN_ROUNDS_PER_SECOND / 20;
/// Tries; one pause of the host must not condemn KVM.
const TRIES: usize = 3;

/// Where the loop lies in the probe's guest.
const CODE_ADDRESS: u64 = 0x1000;

/// What the probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvmProbe {
    /// Guest code runs at hardware speed.
    Usable {
        /// Rounds of the probe's loop per second.
        rounds_per_second: u64,
    },
    /// KVM is there, but nothing executes at speed behind it.
    TooSlow {
        /// Rounds of the probe's loop per second.
        rounds_per_second: u64,
    },
    /// KVM can't be opened or can't run the loop; the text says why.
    Unusable(String),
}

/// Runs the probe. Takes about a millisecond where KVM works.
pub fn probe_kvm() -> KvmProbe {
    let mut best = 0;
    for _ in 0..TRIES {
        match run_loop() {
            Ok(rate) => best = best.max(rate),
            Err(why) => return KvmProbe::Unusable(why),
        }
        if best >= MIN_ROUNDS_PER_SECOND {
            return KvmProbe::Usable { rounds_per_second: best };
        }
        if best < HOPELESS_ROUNDS_PER_SECOND {
            break;
        }
    }
    KvmProbe::TooSlow { rounds_per_second: best }
}

fn run_loop() -> Result<u64, String> {
    let kvm = Kvm::new().map_err(|error| format!("/dev/kvm: {error}"))?;
    let vm = kvm.create_vm().map_err(|error| format!("no virtual machine: {error}"))?;
    // mov ecx, ROUNDS; l: dec ecx; jnz l; hlt — in 16-bit code with 32-bit operands.
    let mut code = vec![0x66, 0xb9];
    code.extend_from_slice(&ROUNDS.to_le_bytes());
    code.extend_from_slice(&[0x66, 0x49, 0x75, 0xfc, 0xf4]);
    let mut page = Page::boxed(&code);
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: CODE_ADDRESS,
        memory_size: size_of::<Page>() as u64,
        userspace_addr: &raw mut *page as u64,
    };
    // SAFETY: the region is exactly the page behind `page`, page-aligned by its
    // type; `page` is dropped after `vm` (declared before `vcpu`, and `vm` is
    // dropped explicitly below on success and by scope order on error, where the
    // page is not used again), and nothing else refers to it meanwhile.
    unsafe { vm.set_user_memory_region(region) }.map_err(|error| format!("no guest memory: {error}"))?;
    let mut vcpu = vm.create_vcpu(0).map_err(|error| format!("no virtual processor: {error}"))?;
    let mut sregs = vcpu.get_sregs().map_err(|error| format!("no registers: {error}"))?;
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).map_err(|error| format!("no registers: {error}"))?;
    let mut regs = vcpu.get_regs().map_err(|error| format!("no registers: {error}"))?;
    regs.rip = CODE_ADDRESS;
    regs.rflags = 2;
    vcpu.set_regs(&regs).map_err(|error| format!("no registers: {error}"))?;
    let start = Instant::now();
    let exit = vcpu.run().map_err(|error| format!("guest code does not run: {error}"))?;
    let elapsed = start.elapsed();
    if !matches!(exit, VcpuExit::Hlt) {
        return Err(format!("guest code does not run: the loop ended with {exit:?}"));
    }
    drop(vcpu);
    drop(vm);
    drop(page);
    Ok(u64::from(ROUNDS) * 1_000_000_000 / (elapsed.as_nanos() as u64).max(1))
}

#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl Page {
    fn boxed(code: &[u8]) -> Box<Page> {
        let mut page = Box::new(Page([0xf4; 4096]));
        for (to, from) in page.0.iter_mut().zip(code) {
            *to = *from;
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probe_answers_and_says_why() {
        match probe_kvm() {
            KvmProbe::Usable { rounds_per_second } => assert!(rounds_per_second >= MIN_ROUNDS_PER_SECOND),
            KvmProbe::TooSlow { rounds_per_second } => assert!(rounds_per_second < MIN_ROUNDS_PER_SECOND),
            KvmProbe::Unusable(why) => assert!(!why.is_empty()),
        }
    }
}
