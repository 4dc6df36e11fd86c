//! Why the kill switch trips: every reason by its stable name, what it means in words, and what to do.
//!
//! A name is what reports, scripts and other people's verifiers read; it is never
//! given another meaning. Absolute reasons need one occurrence. Accumulating ones
//! need many, in a window or on average. Words and cure stand in each reason's own row, so
//! that none can lack them; `docs/reasons.md` is held against them.

use crate::fact::cut;
use core::fmt;

/// Characters of an occurrence's own words that a person is shown; the record has all of it.
const MAX_DETAIL: usize = 300;

macro_rules! reasons {
    ($(#[doc = $words:literal] $variant:ident = $name:literal, $absolute:literal, $cure:expr;)+) => {
        /// Why the kill switch tripped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Reason { $(#[doc = $words] $variant),+ }

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

            /// What broke, in words.
            pub const fn words(self) -> &'static str {
                // A doc comment begins with the blank behind its slashes.
                match self { $(Reason::$variant => $words.trim_ascii()),+ }
            }

            /// What to do: the grant that would allow it, where one would.
            pub const fn cure(self) -> &'static str {
                match self { $(Reason::$variant => $cure),+ }
            }
        }
    };
}

/// Of what no grant covers and an honest workload never does.
const NO_GRANT: &str = "No policy allows this: do not trust what ran";
/// Of what goes against the host, not the workload.
const HOST: &str =
    "Look at this host with `hotcell doctor` and run it again; if it comes again, report it as a defect";
/// Of a record that no working Hotcell writes.
const RECORD: &str = "A record that was written right has nothing like it: run it again; if it comes again, report it as a defect";
/// Of programs that the image does not have.
const PROGRAM: &str = "Build an image that has the program, or let files of the workspace execute: [exec] workspace = \"allow\"";
/// Of what only root may do.
const ROOT: &str =
    "No policy gives root; what needs it can be a root service of the image: `hotcell image build --service`";
const DENIALS: &str = "Grant what it needs under [capabilities] (write, write_trees, spawn, packages; nothing else can be), \
     or raise what begins with denial_ under [thresholds]";
const MUTATIONS: &str = "Grant the files under [capabilities] write or their folder under write_trees, \
     or raise what begins with mutation_ under [thresholds]";

reasons! {
    /// A wall around the machine did not stand.
    ContainmentFailure = "containment_failure", true, HOST;
    /// The machine ended although nobody ended it.
    VmLost = "vm_lost", true, "Run it again; if it ends again, see whether the host has memory left, and whether the workload breaks its machine";
    /// A connection out of the machine was granted.
    GrantedNetEgress = "granted_net_egress", true, RECORD;
    /// A system call outside the filter was granted.
    GrantedRawSyscall = "granted_raw_syscall", true, RECORD;
    /// More privilege was granted.
    GrantedPrivilegeRaise = "granted_privilege_raise", true, RECORD;
    /// The host saw a network request of a machine that has no network.
    NetworkSeen = "network_seen", true, NO_GRANT;
    /// What was measured before boot is not what the spec names.
    ImageMismatch = "image_mismatch", true, "Build the image again: `hotcell image build`";
    /// A file changed where nothing can change.
    ImpossibleMutation = "impossible_mutation", true, NO_GRANT;

    /// Gate 1: an action by an actor that never spawned.
    UnattributedAction = "unattributed_action", true, RECORD;
    /// Gate 1: an action by an actor that exited.
    ActionAfterExit = "action_after_exit", true, RECORD;
    /// Gate 1: a spawn whose parent is not live.
    OrphanSpawn = "orphan_spawn", true, RECORD;
    /// Gate 1: an exit of an actor that is not live.
    ExitWithoutSpawn = "exit_without_spawn", true, RECORD;
    /// Gate 1: a spawn of an actor that is live.
    DoubleSpawn = "double_spawn", true, RECORD;
    /// Gate 1: a spawn of an actor that exited.
    RespawnAfterExit = "respawn_after_exit", true, RECORD;
    /// Gate 1: an actor that is live when the record ends.
    DormantProcess = "dormant_process", true, RECORD;
    /// Gate 1: more actors than can be followed.
    LineageFull = "lineage_full", true, "No policy raises this: let the workload start fewer processes, or make several runs of it";

    /// A component of the host failed; what it would have seen is unknown.
    EvaluatorFailure = "evaluator_failure", true, HOST;
    /// A host-band event or its object can't be read as what it claims to be.
    UnreadableEvidence = "unreadable_evidence", true, RECORD;
    /// A recorded decision is not what the sealed policy says.
    DecisionMismatch = "decision_mismatch", true, RECORD;
    /// The record names another spec than the one that is judged by.
    SpecMismatch = "spec_mismatch", true, RECORD;
    /// The record says that a kill happened for which it holds no cause.
    UnexplainedKill = "unexplained_kill", true, RECORD;
    /// The machine's end was not proven.
    TeardownUnverified = "teardown_unverified", true, "`hotcell reap` ends what is left; see what `hotcell ps` lists";

    /// A process had root or a capability that no approved executable explains.
    UnexplainedPrivilege = "unexplained_privilege", true, ROOT;
    /// A process ran a program that is not of the image.
    UnapprovedExecutable = "unapproved_executable", true, PROGRAM;
    /// A process ran a program from where nothing may execute.
    ExecutedFromNoexec = "executed_from_noexec", true, PROGRAM;
    /// The guest kernel's text or read-only data changed.
    KernelTextChanged = "kernel_text_changed", true, NO_GRANT;
    /// The guest kernel's system call or interrupt table changed.
    KernelTableChanged = "kernel_table_changed", true, NO_GRANT;
    /// A kernel module was loaded.
    ModuleLoaded = "module_loaded", true, NO_GRANT;
    /// The guest kernel had a network device other than loopback.
    NetworkDevice = "network_device", true, NO_GRANT;
    /// The root was mounted or attached writable.
    WritableRoot = "writable_root", true, NO_GRANT;
    /// A process was in one of the guest kernel's own tables and not in another.
    HiddenProcess = "hidden_process", true, NO_GRANT;
    /// A process was in a namespace that did not exist when the guest was ready.
    UnexplainedNamespace = "unexplained_namespace", true, NO_GRANT;
    /// A mount that appeared, or lost a restriction, after the guest was ready.
    UnexplainedMount = "unexplained_mount", true, NO_GRANT;
    /// The root image was written to, or has another digest than before.
    RootChanged = "root_changed", true, "Build the image again: `hotcell image build`; if no program of this host wrote to it, do not trust what ran";
    /// The VMM had a file, socket, namespace or privilege that a jailed one has not.
    VmmOutOfJail = "vmm_out_of_jail", true, "Do not trust what ran: it may have reached the process that makes its machine";
    /// A process outlived the run.
    ProcessOutlivedRun = "process_outlived_run", true, "`hotcell reap` ends what is left; see what `hotcell ps` lists";
    /// The nonce written inside was not in this VMM's guest memory.
    NotThisVm = "not_this_vm", true, HOST;
    /// The workload destroyed the sandbox that it ran in.
    SandboxDestroyed = "sandbox_destroyed", true, NO_GRANT;

    /// More was asked for than a run may ask for.
    RequestFlood = "request_flood", false, "No policy raises this: let the workload ask less often, or make several runs of it";
    /// Too much that the policy does not grant was asked for within a short time.
    DenialBurst = "denial_burst", false, DENIALS;
    /// Too large a part of what was asked for was not granted.
    DenialEwma = "denial_ewma", false, DENIALS;
    /// Too many files changed within a short time that no grant explains.
    MutationBurst = "mutation_burst", false, MUTATIONS;
    /// Too large a part of the changed files is explained by no grant.
    MutationEwma = "mutation_ewma", false, MUTATIONS;
}

impl Reason {
    /// The reason of this name.
    pub fn named(name: &str) -> Option<Reason> {
        Reason::ALL.iter().copied().find(|reason| reason.name() == name)
    }

    /// One occurrence for people: what broke, where, what to do. `detail` may quote the guest.
    pub fn explained(self, detail: &str) -> String {
        let words = self.words().trim_end_matches('.');
        format!("{words} ({}). {}.", cut(detail, MAX_DETAIL), self.cure())
    }
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

    #[test]
    fn every_reason_has_words_and_a_cure_and_is_found_by_its_name() {
        for reason in Reason::ALL.iter().copied() {
            let (words, cure) = (reason.words(), reason.cure());
            assert!(words.len() > 15 && words.ends_with('.') && !words.starts_with(' '), "{words:?}");
            assert!(cure.len() > 15 && !cure.ends_with('.') && !cure.contains("  "), "{cure:?}");
            assert_eq!(Reason::named(reason.name()), Some(reason));
        }
        assert_eq!(Reason::named("no_such"), None);
        let long = Reason::VmLost.explained(&"x".repeat(5000));
        assert!(long.len() < 800 && long.contains("although nobody ended it (xxx"), "{long}");
    }
}
