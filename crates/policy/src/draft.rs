//! The policy file as a draft, and what sealing makes of it.
//!
//! Every key is optional; an absent one means the default that DESIGN.md states.
//! The library's default grants nothing. There is no key that disables a layer:
//! `every_key_is_pinned` below lists all of them.

use crate::capability::CapabilityPolicy;
use crate::limits::{
    COPY_FILES, COPY_MIB, DENIAL_BURST, DENIAL_EWMA, DENIAL_WINDOW_S, DISK_MIB, FractionRange, IntRange,
    MEMORY_MIB, MUTATION_BURST, MUTATION_EWMA, MUTATION_WINDOW_S, OUTPUT_MIB, PIDS, TIMEOUT_S, TMP_MIB,
    VCPUS,
};
use crate::path::PathPolicy;
use crate::violation::{Code, Findings, Violations};
use serde::{Deserialize, Serialize};

/// A policy as an operator writes it; see the module `parse` for the file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyDraft {
    /// What the machine may use.
    pub limits: LimitsDraft,
    /// What the workload may be granted.
    pub capabilities: CapabilitiesDraft,
    /// Where programs may run from.
    pub exec: ExecDraft,
    /// When accumulated observations trip the kill switch.
    pub thresholds: ThresholdsDraft,
    /// What the run is compared with afterwards.
    pub profile: ProfileDraft,
    /// Settings of single backends.
    pub backend: BackendDraft,
}

/// `[limits]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsDraft {
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Guest memory.
    pub memory_mib: u32,
    /// The overlay disk behind `/workspace`.
    pub disk_mib: u32,
    /// `/tmp`.
    pub tmp_mib: u32,
    /// Processes of the workload.
    pub pids: u32,
    /// Kept output per stream.
    pub output_mib: u32,
    /// Bytes copied in, and out.
    pub copy_mib: u32,
    /// Files copied in, and out.
    pub copy_files: u32,
    /// Wall-clock time.
    pub timeout_s: u32,
}

impl Default for LimitsDraft {
    fn default() -> LimitsDraft {
        LimitsDraft {
            vcpus: VCPUS.default,
            memory_mib: MEMORY_MIB.default,
            disk_mib: DISK_MIB.default,
            tmp_mib: TMP_MIB.default,
            pids: PIDS.default,
            output_mib: OUTPUT_MIB.default,
            copy_mib: COPY_MIB.default,
            copy_files: COPY_FILES.default,
            timeout_s: TIMEOUT_S.default,
        }
    }
}

/// `[capabilities]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CapabilitiesDraft {
    /// Exact paths that may be written.
    pub write: Vec<String>,
    /// Trees that may be written.
    pub write_trees: Vec<String>,
    /// Whether processes of the image may be started.
    pub spawn: bool,
    /// `name==version sha256:…` that an image rebuild may add.
    pub packages: Vec<String>,
}

/// Whether files written to the workspace may be executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkspaceExec {
    /// `/workspace` is mounted `noexec`.
    #[default]
    Deny,
    /// Programs built there run, and are recorded by digest.
    Allow,
}

/// `[exec]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExecDraft {
    /// Whether files written to the workspace may be executed.
    pub workspace: WorkspaceExec,
}

/// `[thresholds]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ThresholdsDraft {
    /// Denials within the window.
    pub denial_burst: u32,
    /// The window.
    pub denial_window_s: u32,
    /// The average of denials over decisions.
    pub denial_ewma: f64,
    /// Unexplained mutations within the window.
    pub mutation_burst: u32,
    /// The window.
    pub mutation_window_s: u32,
    /// The average of unexplained mutations over mutations.
    pub mutation_ewma: f64,
}

impl Default for ThresholdsDraft {
    fn default() -> ThresholdsDraft {
        ThresholdsDraft {
            denial_burst: DENIAL_BURST.default,
            denial_window_s: DENIAL_WINDOW_S.default,
            denial_ewma: DENIAL_EWMA.default,
            mutation_burst: MUTATION_BURST.default,
            mutation_window_s: MUTATION_WINDOW_S.default,
            mutation_ewma: MUTATION_EWMA.default,
        }
    }
}

/// `[profile]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProfileDraft {
    /// A file that `hotcell profile absorb` wrote. Named here by its path only.
    pub fingerprint: Option<String>,
}

/// `[backend]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BackendDraft {
    /// `[backend.kata]`
    pub kata: KataDraft,
}

/// `[backend.kata]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KataDraft {
    /// The Unix socket of the Docker daemon; absent: the backend's own default.
    pub docker_host: Option<String>,
    /// The name under which Docker knows the Kata runtime.
    pub runtime_name: String,
}

impl Default for KataDraft {
    fn default() -> KataDraft {
        KataDraft { docker_host: None, runtime_name: "kata".into() }
    }
}

impl PolicyDraft {
    /// What `hotcell run` without `--policy` grants, since running a command plainly
    /// means it: the workspace tree is writable, and processes of the image may start.
    pub fn for_running_a_command() -> PolicyDraft {
        PolicyDraft {
            capabilities: CapabilitiesDraft {
                write_trees: vec!["/workspace".into()],
                spawn: true,
                ..CapabilitiesDraft::default()
            },
            ..PolicyDraft::default()
        }
    }

    /// Checks everything and seals it, or says all that is wrong.
    pub fn seal(self) -> Result<SealedPolicy, Violations> {
        let mut findings = Findings::default();
        let sealed = self.check(&mut findings);
        findings.finish().map(|()| sealed)
    }

    /// The sealed form, worth something only where no finding was added.
    pub(crate) fn check(self, findings: &mut Findings) -> SealedPolicy {
        let limits = &self.limits;
        for (key, value, range) in [
            ("vcpus", limits.vcpus, VCPUS),
            ("memory_mib", limits.memory_mib, MEMORY_MIB),
            ("disk_mib", limits.disk_mib, DISK_MIB),
            ("tmp_mib", limits.tmp_mib, TMP_MIB),
            ("pids", limits.pids, PIDS),
            ("output_mib", limits.output_mib, OUTPUT_MIB),
            ("copy_mib", limits.copy_mib, COPY_MIB),
            ("copy_files", limits.copy_files, COPY_FILES),
            ("timeout_s", limits.timeout_s, TIMEOUT_S),
        ] {
            check_int("limits", key, i64::from(value), range, findings);
        }
        check_tmp(limits, findings);
        let thresholds = &self.thresholds;
        for (key, value, range) in [
            ("denial_burst", thresholds.denial_burst, DENIAL_BURST),
            ("denial_window_s", thresholds.denial_window_s, DENIAL_WINDOW_S),
            ("mutation_burst", thresholds.mutation_burst, MUTATION_BURST),
            ("mutation_window_s", thresholds.mutation_window_s, MUTATION_WINDOW_S),
        ] {
            check_int("thresholds", key, i64::from(value), range, findings);
        }
        check_fraction("thresholds", "denial_ewma", thresholds.denial_ewma, DENIAL_EWMA, findings);
        check_fraction("thresholds", "mutation_ewma", thresholds.mutation_ewma, MUTATION_EWMA, findings);
        let paths = PathPolicy::standard();
        let capabilities = CapabilityPolicy::check(&self.capabilities, &paths, findings);
        check_text(self.profile.fingerprint.as_deref(), "[profile] fingerprint", findings);
        let kata = &self.backend.kata;
        check_text(Some(&kata.runtime_name), "[backend.kata] runtime_name", findings);
        if let Some(host) = &kata.docker_host
            && !host.strip_prefix("unix://").is_some_and(|path| path.starts_with('/') && !path.contains('\0'))
        {
            findings.add(
                Code::DockerHost,
                format!(
                    "[backend.kata] docker_host: {host:?} is not a socket of this machine: write `unix:///path/to/docker.sock`"
                ),
            );
        }
        SealedPolicy { draft: self, capabilities, paths }
    }
}

pub(crate) fn check_int(table: &str, key: &str, value: i64, range: IntRange, findings: &mut Findings) {
    if !range.contains(value) {
        findings.add(
            Code::OutOfRange,
            format!(
                "[{table}] {key}: {value} is outside {}..={} (default {})",
                range.min, range.max, range.default
            ),
        );
    }
}

pub(crate) fn check_fraction(
    table: &str,
    key: &str,
    value: f64,
    range: FractionRange,
    findings: &mut Findings,
) {
    if !range.contains(value) {
        findings.add(
            Code::OutOfRange,
            format!(
                "[{table}] {key}: {value} is outside {}..={} (default {})",
                range.min, range.max, range.default
            ),
        );
    }
}

fn check_tmp(limits: &LimitsDraft, findings: &mut Findings) {
    if limits.tmp_mib > limits.memory_mib {
        findings.add(
            Code::TmpOverMemory,
            format!(
                "[limits] tmp_mib: {} is more than memory_mib ({}), which has to hold it: raise memory_mib or lower tmp_mib",
                limits.tmp_mib, limits.memory_mib
            ),
        );
    }
}

fn check_text(text: Option<&str>, what: &str, findings: &mut Findings) {
    if text.is_some_and(|text| text.is_empty() || text.contains('\0')) {
        findings.add(Code::EmptyName, format!("{what}: the name is empty or contains a NUL byte"));
    }
}

/// A policy that was checked. Made by [`PolicyDraft::seal`] alone; never changes.
#[derive(Clone, Debug, PartialEq)]
pub struct SealedPolicy {
    draft: PolicyDraft,
    capabilities: CapabilityPolicy,
    paths: PathPolicy,
}

impl SealedPolicy {
    /// What the machine may use.
    pub fn limits(&self) -> &LimitsDraft {
        &self.draft.limits
    }

    /// When accumulated observations trip the kill switch.
    pub fn thresholds(&self) -> &ThresholdsDraft {
        &self.draft.thresholds
    }

    /// What the workload may be granted.
    pub fn capabilities(&self) -> &CapabilityPolicy {
        &self.capabilities
    }

    /// Which part of the guest's tree is which.
    pub fn paths(&self) -> &PathPolicy {
        &self.paths
    }

    /// Whether files written to the workspace may be executed.
    pub fn workspace_exec(&self) -> WorkspaceExec {
        self.draft.exec.workspace
    }

    /// Where the operator keeps the fingerprint to compare with.
    pub fn fingerprint_path(&self) -> Option<&str> {
        self.draft.profile.fingerprint.as_deref()
    }

    /// Settings of the Kata backend.
    pub fn kata(&self) -> &KataDraft {
        &self.draft.backend.kata
    }

    /// The draft that this was sealed from, to print or to record.
    pub fn as_draft(&self) -> &PolicyDraft {
        &self.draft
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn keys(value: &Value, prefix: &str, into: &mut Vec<String>) {
        let Value::Object(map) = value else { return into.push(prefix.to_owned()) };
        for (key, value) in map {
            let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            keys(value, &name, into);
        }
    }

    #[test]
    fn every_key_is_pinned_and_none_switches_a_layer() {
        let mut found = Vec::new();
        keys(&serde_json::to_value(PolicyDraft::default()).unwrap(), "", &mut found);
        found.sort();
        let mut expected = [
            "limits.vcpus",
            "limits.memory_mib",
            "limits.disk_mib",
            "limits.tmp_mib",
            "limits.pids",
            "limits.output_mib",
            "limits.copy_mib",
            "limits.copy_files",
            "limits.timeout_s",
            "capabilities.write",
            "capabilities.write_trees",
            "capabilities.spawn",
            "capabilities.packages",
            "exec.workspace",
            "thresholds.denial_burst",
            "thresholds.denial_window_s",
            "thresholds.denial_ewma",
            "thresholds.mutation_burst",
            "thresholds.mutation_window_s",
            "thresholds.mutation_ewma",
            "profile.fingerprint",
            "backend.kata.docker_host",
            "backend.kata.runtime_name",
        ];
        expected.sort_unstable();
        assert_eq!(found, expected, "a new key is a decision: no key may enable or disable a layer");
    }

    #[test]
    fn the_default_grants_nothing() {
        let policy = PolicyDraft::default().seal().unwrap();
        assert_eq!(policy.capabilities(), &CapabilityPolicy::nothing());
        assert_eq!(policy.workspace_exec(), WorkspaceExec::Deny);
    }

    #[test]
    fn running_a_command_grants_the_workspace_and_processes_only() {
        let policy = PolicyDraft::for_running_a_command().seal().unwrap();
        let capabilities = policy.capabilities();
        assert!(capabilities.may_spawn());
        assert_eq!(capabilities.write_trees().iter().map(|p| p.as_str()).collect::<Vec<_>>(), ["/workspace"]);
        assert!(capabilities.write().is_empty() && capabilities.packages().is_empty());
        assert_eq!(policy.workspace_exec(), WorkspaceExec::Deny);
    }

    #[test]
    fn every_violation_is_reported_at_once() {
        let mut draft = PolicyDraft::default();
        draft.limits.vcpus = 9;
        draft.limits.memory_mib = 127;
        draft.limits.tmp_mib = 4096;
        draft.limits.timeout_s = 0;
        draft.thresholds.denial_ewma = f64::NAN;
        draft.thresholds.mutation_ewma = 1.0;
        draft.capabilities.write = vec!["out".into(), "/etc/passwd".into(), "/workspace//a".into()];
        draft.capabilities.packages = vec!["numpy".into()];
        draft.backend.kata.docker_host = Some("tcp://10.0.0.1:2375".into());
        draft.backend.kata.runtime_name = String::new();
        let violations = draft.seal().unwrap_err();
        assert_eq!(
            violations.codes(),
            [
                Code::OutOfRange,
                Code::OutOfRange,
                Code::OutOfRange,
                Code::TmpOverMemory,
                Code::OutOfRange,
                Code::OutOfRange,
                Code::WritePath,
                Code::WriteImmutable,
                Code::WritePath,
                Code::PackagePin,
                Code::EmptyName,
                Code::DockerHost
            ]
        );
    }

    #[test]
    fn each_range_ends_where_it_says() {
        type Field = fn(&mut LimitsDraft) -> &mut u32;
        let set: [(Field, IntRange); 9] = [
            (|l| &mut l.vcpus, VCPUS),
            (|l| &mut l.memory_mib, MEMORY_MIB),
            (|l| &mut l.disk_mib, DISK_MIB),
            (|l| &mut l.tmp_mib, TMP_MIB),
            (|l| &mut l.pids, PIDS),
            (|l| &mut l.output_mib, OUTPUT_MIB),
            (|l| &mut l.copy_mib, COPY_MIB),
            (|l| &mut l.copy_files, COPY_FILES),
            (|l| &mut l.timeout_s, TIMEOUT_S),
        ];
        for (field, range) in set {
            for (value, fine) in
                [(range.min, true), (range.max, true), (range.min - 1, false), (range.max + 1, false)]
            {
                let mut draft = PolicyDraft::default();
                draft.limits.memory_mib = MEMORY_MIB.max;
                *field(&mut draft.limits) = value;
                draft.limits.tmp_mib = draft.limits.tmp_mib.min(if range == TMP_MIB { u32::MAX } else { 1 });
                assert_eq!(draft.seal().is_ok(), fine, "{value} in {range:?}");
            }
        }
    }
}
