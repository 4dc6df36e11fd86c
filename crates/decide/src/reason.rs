//! Why the kill switch trips: every reason by its stable name.
//!
//! A name is what reports, scripts and other people's verifiers read; it is never
//! given another meaning. Absolute reasons need one occurrence. Accumulating ones
//! need many, in a window or on average.

use core::fmt;

macro_rules! reasons {
    ($($(#[$meta:meta])* $variant:ident = $name:literal, $absolute:literal;)+) => {
        /// Why the kill switch tripped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Reason { $($(#[$meta])* $variant),+ }

        impl Reason {
            /// Every reason.
            pub const ALL: &'static [Reason] = &[$(Reason::$variant),+];

            /// The stable name.
            pub const fn name(self) -> &'static str {
                match self { $(Reason::$variant => $name),+ }
            }

            /// Whether one occurrence is enough.
            pub const fn is_absolute(self) -> bool {
                match self { $(Reason::$variant => $absolute),+ }
            }
        }
    };
}

reasons! {
    /// A wall did not stand.
    ContainmentFailure = "containment_failure", true;
    /// The machine ended although nobody ended it.
    VmLost = "vm_lost", true;
    /// A connection out of the machine was granted.
    GrantedNetEgress = "granted_net_egress", true;
    /// A system call outside the filter was granted.
    GrantedRawSyscall = "granted_raw_syscall", true;
    /// More privilege was granted.
    GrantedPrivilegeRaise = "granted_privilege_raise", true;
    /// The host saw a network request of a machine that has no network.
    NetworkSeen = "network_seen", true;
    /// What was measured before boot is not what the spec names.
    ImageMismatch = "image_mismatch", true;
    /// A change where nothing can change.
    ImpossibleMutation = "impossible_mutation", true;

    /// Gate 1: an action by an actor that never spawned.
    UnattributedAction = "unattributed_action", true;
    /// Gate 1: an action by an actor that exited.
    ActionAfterExit = "action_after_exit", true;
    /// Gate 1: a spawn whose parent is not live.
    OrphanSpawn = "orphan_spawn", true;
    /// Gate 1: an exit of an actor that is not live.
    ExitWithoutSpawn = "exit_without_spawn", true;
    /// Gate 1: a spawn of an actor that is live.
    DoubleSpawn = "double_spawn", true;
    /// Gate 1: a spawn of an actor that exited.
    RespawnAfterExit = "respawn_after_exit", true;
    /// Gate 1: an actor that is live when the record ends.
    DormantProcess = "dormant_process", true;
    /// Gate 1: more actors than can be followed.
    LineageFull = "lineage_full", true;

    /// A component of the host failed; what it would have seen is unknown.
    EvaluatorFailure = "evaluator_failure", true;
    /// A host-band event or its object can't be read as what it claims to be.
    UnreadableEvidence = "unreadable_evidence", true;
    /// A recorded decision is not what the sealed policy says.
    DecisionMismatch = "decision_mismatch", true;
    /// The record names another spec than the one that is judged by.
    SpecMismatch = "spec_mismatch", true;
    /// The record says that a kill happened for which it holds no cause.
    UnexplainedKill = "unexplained_kill", true;
    /// The machine's end was not proven.
    TeardownUnverified = "teardown_unverified", true;

    /// A process with root or a capability that no approved executable explains.
    UnexplainedPrivilege = "unexplained_privilege", true;
    /// A process of an executable outside the approved set.
    UnapprovedExecutable = "unapproved_executable", true;
    /// A process of an executable on a mount that may not execute.
    ExecutedFromNoexec = "executed_from_noexec", true;
    /// The guest kernel's text or read-only data changed.
    KernelTextChanged = "kernel_text_changed", true;
    /// The guest kernel's system call or interrupt table changed.
    KernelTableChanged = "kernel_table_changed", true;
    /// A kernel module is loaded.
    ModuleLoaded = "module_loaded", true;
    /// The guest kernel has a network device other than loopback.
    NetworkDevice = "network_device", true;
    /// The root is mounted or attached writable.
    WritableRoot = "writable_root", true;
    /// A process that one of the guest kernel's own tables has and another lacks.
    HiddenProcess = "hidden_process", true;
    /// A process in a namespace that did not exist when the guest was ready.
    UnexplainedNamespace = "unexplained_namespace", true;
    /// A mount that appeared, or lost a restriction, after the guest was ready.
    UnexplainedMount = "unexplained_mount", true;
    /// The root image was written to, or has another digest than before.
    RootChanged = "root_changed", true;
    /// The VMM has a file, socket, namespace or privilege that a jailed one has not.
    VmmOutOfJail = "vmm_out_of_jail", true;
    /// A process outlived the run.
    ProcessOutlivedRun = "process_outlived_run", true;
    /// The nonce written inside is not in this VMM's guest memory.
    NotThisVm = "not_this_vm", true;
    /// The workload destroyed the sandbox that it ran in.
    SandboxDestroyed = "sandbox_destroyed", true;

    /// More decisions than a run may ask for.
    RequestFlood = "request_flood", false;
    /// Too many denials within the window.
    DenialBurst = "denial_burst", false;
    /// Too large a part of the decisions were denials.
    DenialEwma = "denial_ewma", false;
    /// Too many unexplained mutations within the window.
    MutationBurst = "mutation_burst", false;
    /// Too large a part of the mutations were unexplained.
    MutationEwma = "mutation_ewma", false;
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_plain() {
        let mut names: Vec<&str> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        assert!(names.iter().all(|name| name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
        assert_eq!(Reason::ALL.iter().filter(|reason| !reason.is_absolute()).count(), 5);
    }
}
