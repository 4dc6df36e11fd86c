//! A run as its caller describes it, before sealing; and a spec.json read back.
//!
//! Environment values may be secrets, so a record keeps their names and the BLAKE3
//! of each value, never the value. argv is recorded whole: secrets do not belong
//! there, `ps` shows it too. A digest hides only what can't be guessed; a short
//! password is found by trying. Pass those as files.
//!
//! Reading a spec.json gives a draft again, so that a stranger can seal it and
//! compare the bytes. Its environment then holds digests only, and whoever would
//! start it finds no value to pass ([`EnvValue::reveal`]).

use crate::draft::PolicyDraft;
use crate::isolation;
use crate::limits::MAX_SPEC_BYTES;
use crate::service::Service;
use crate::spec::SealedSpec;
use crate::violation::{Findings, Violations};
use core::fmt;
use hotcell_ledger::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The first field of a spec.json.
pub const SPEC_FORMAT: &str = "hotcell-spec-1";

/// A measured image: a name for people, digests for everything else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRef {
    /// The name under which it was asked for.
    pub name: String,
    /// Digest of the kernel file.
    #[serde(with = "crate::hex")]
    pub kernel: Digest,
    /// Digest of the initramfs file.
    #[serde(with = "crate::hex")]
    pub initramfs: Digest,
    /// Digest of the root image.
    #[serde(with = "crate::hex")]
    pub root: Digest,
}

/// The value of an environment variable: at hand, or known by its digest only.
#[derive(Clone, PartialEq, Eq)]
pub struct EnvValue {
    plain: Option<String>,
    digest: Digest,
}

impl EnvValue {
    /// The value, where this process was given it; none in a draft that was read back.
    pub fn reveal(&self) -> Option<&str> {
        self.plain.as_deref()
    }

    /// BLAKE3 of the value: what the record keeps.
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

impl From<&str> for EnvValue {
    fn from(value: &str) -> EnvValue {
        EnvValue { plain: Some(value.to_owned()), digest: Digest::of(value.as_bytes()) }
    }
}

impl From<String> for EnvValue {
    fn from(value: String) -> EnvValue {
        EnvValue { digest: Digest::of(value.as_bytes()), plain: Some(value) }
    }
}

/// Shows the digest, so that a value never ends up in a log.
impl fmt::Debug for EnvValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EnvValue({})", self.digest)
    }
}

/// The command that a run starts first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment: nothing is inherited from the host.
    pub env: BTreeMap<String, EnvValue>,
    /// Working directory.
    pub cwd: String,
}

impl Command {
    /// A command in `/workspace` with an empty environment.
    pub fn new(argv: impl IntoIterator<Item = impl Into<String>>) -> Command {
        Command {
            argv: argv.into_iter().map(Into::into).collect(),
            env: BTreeMap::new(),
            cwd: "/workspace".into(),
        }
    }
}

/// A run as its caller describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct RunDraft {
    /// `[a-z0-9][a-z0-9-]{7,63}`.
    pub run_id: String,
    /// What boots.
    pub image: ImageRef,
    /// Kernel arguments beyond our own.
    pub kernel_args: Vec<String>,
    /// A vsock CID; absent: no vsock device.
    pub vsock_cid: Option<u32>,
    /// What is started first; absent where a library calls `exec` itself.
    pub command: Option<Command>,
    /// What it may do.
    pub policy: PolicyDraft,
    /// Digest of the environment baseline file, where the image has one.
    pub baseline: Option<Digest>,
    /// Digest of the binary allowlist file, where the image has one.
    pub binaries: Option<Digest>,
    /// Digest of the fingerprint file that the policy names.
    pub fingerprint: Option<Digest>,
    /// Root services that the image declares: the only processes that may be root.
    pub services: Vec<Service>,
}

impl RunDraft {
    /// A run of an image under a policy, and nothing else said.
    pub fn new(run_id: impl Into<String>, image: ImageRef, policy: PolicyDraft) -> RunDraft {
        RunDraft {
            run_id: run_id.into(),
            image,
            kernel_args: Vec::new(),
            vsock_cid: None,
            command: None,
            policy,
            baseline: None,
            binaries: None,
            fingerprint: None,
            services: Vec::new(),
        }
    }

    /// Checks everything and seals it, or says all that is wrong. Nothing was created yet either way.
    pub fn seal(self) -> Result<SealedSpec, Violations> {
        let mut findings = Findings::default();
        isolation::check(&self, &mut findings);
        let policy = self.policy.clone().check(&mut findings);
        findings.finish().map(|()| SealedSpec::from_checked(self, policy))
    }

    /// Reads a bundle's spec.json. Sealing the result gives the same bytes, or the file is not one of ours.
    pub fn from_spec_json(bytes: &[u8]) -> Result<RunDraft, SpecError> {
        if bytes.len() > MAX_SPEC_BYTES {
            return Err(SpecError::TooLong { bytes: bytes.len() });
        }
        let file: SpecFile =
            serde_json::from_slice(bytes).map_err(|error| SpecError::Unreadable(error.to_string()))?;
        if file.format != SPEC_FORMAT {
            return Err(SpecError::Format(file.format));
        }
        let command = file.command.map(|command| Command {
            argv: command.argv,
            env: command
                .env
                .into_iter()
                .map(|(name, HexDigest(digest))| (name, EnvValue { plain: None, digest }))
                .collect(),
            cwd: command.cwd,
        });
        Ok(RunDraft {
            run_id: file.run_id,
            image: file.image,
            kernel_args: file.kernel_args,
            vsock_cid: file.vsock_cid,
            command,
            policy: file.policy,
            baseline: file.baseline,
            binaries: file.binaries,
            fingerprint: file.fingerprint,
            services: file.services,
        })
    }
}

/// Why bytes are not a spec.json.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// More bytes than any spec of ours has.
    #[error("the spec has {bytes} bytes, over {MAX_SPEC_BYTES}")]
    TooLong {
        /// How many.
        bytes: usize,
    },
    /// Not JSON, or not with our fields.
    #[error("the spec can't be read: {0}")]
    Unreadable(String),
    /// Another format, perhaps a later one.
    #[error("the spec has the format {0:?}, not {SPEC_FORMAT:?}: use the release that wrote it")]
    Format(String),
}

/// The bytes of spec.json: fields in this order, no blanks, maps sorted by key.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpecFile {
    format: String,
    run_id: String,
    image: ImageRef,
    kernel_args: Vec<String>,
    vsock_cid: Option<u32>,
    command: Option<CommandFile>,
    policy: PolicyDraft,
    #[serde(with = "crate::hex::option")]
    baseline: Option<Digest>,
    #[serde(with = "crate::hex::option")]
    binaries: Option<Digest>,
    #[serde(with = "crate::hex::option")]
    fingerprint: Option<Digest>,
    /// Absent where there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    services: Vec<Service>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CommandFile {
    argv: Vec<String>,
    env: BTreeMap<String, HexDigest>,
    cwd: String,
}

#[derive(Serialize, Deserialize)]
#[serde(transparent)]
struct HexDigest(#[serde(with = "crate::hex")] Digest);

/// The canonical bytes of a draft that was checked.
pub(crate) fn to_spec_json(draft: &RunDraft) -> Vec<u8> {
    let command = draft.command.as_ref().map(|command| CommandFile {
        argv: command.argv.clone(),
        env: command.env.iter().map(|(name, value)| (name.clone(), HexDigest(value.digest()))).collect(),
        cwd: command.cwd.clone(),
    });
    let file = SpecFile {
        format: SPEC_FORMAT.to_owned(),
        run_id: draft.run_id.clone(),
        image: draft.image.clone(),
        kernel_args: draft.kernel_args.clone(),
        vsock_cid: draft.vsock_cid,
        command,
        policy: draft.policy.clone(),
        baseline: draft.baseline,
        binaries: draft.binaries,
        fingerprint: draft.fingerprint,
        services: draft.services.clone(),
    };
    // Strings, numbers that were checked to be finite, and maps with text keys: nothing that JSON can't say.
    serde_json::to_vec(&file).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn draft() -> RunDraft {
        let image = ImageRef {
            name: "busybox".into(),
            kernel: Digest::of(b"kernel"),
            initramfs: Digest::of(b"initramfs"),
            root: Digest::of(b"root"),
        };
        let mut draft = RunDraft::new("demo-0001", image, PolicyDraft::for_running_a_command());
        let mut command = Command::new(["/bin/sh", "-c", "echo hello"]);
        command.env.insert("TOKEN".into(), "hunter2-hunter2".into());
        draft.command = Some(command);
        draft
    }

    #[test]
    fn a_secret_is_not_in_the_spec_but_its_digest_is() {
        let spec = draft().seal().unwrap();
        let text = String::from_utf8(spec.to_json()).unwrap();
        assert!(!text.contains("hunter2"));
        assert!(text.contains("\"TOKEN\"") && text.contains(&Digest::of(b"hunter2-hunter2").to_hex()));
        assert!(!format!("{spec:?}").contains("hunter2"));
        assert_eq!(spec.command().unwrap().env["TOKEN"].reveal(), Some("hunter2-hunter2"));
    }

    #[test]
    fn a_spec_read_back_seals_to_the_same_bytes_and_has_no_secrets() {
        let bytes = draft().seal().unwrap().to_json();
        let again = RunDraft::from_spec_json(&bytes).unwrap();
        assert_eq!(again.command.as_ref().unwrap().env["TOKEN"].reveal(), None);
        assert_eq!(again.seal().unwrap().to_json(), bytes);
    }

    #[test]
    fn the_bytes_are_pinned() {
        let spec = draft().seal().unwrap();
        let text = String::from_utf8(spec.to_json()).unwrap();
        assert!(text.starts_with(
            r#"{"format":"hotcell-spec-1","run_id":"demo-0001","image":{"name":"busybox","kernel":""#
        ));
        assert!(text.contains(
            r#""policy":{"limits":{"vcpus":1,"memory_mib":512,"disk_mib":1024,"tmp_mib":64,"pids":256,"output_mib":16,"copy_mib":1024,"copy_files":4096,"timeout_s":300},"capabilities":{"write":[],"write_trees":["/workspace"],"spawn":true,"packages":[]},"exec":{"workspace":"deny"},"thresholds":{"denial_burst":5,"denial_window_s":60,"denial_ewma":0.35,"mutation_burst":3,"mutation_window_s":60,"mutation_ewma":0.3},"profile":{"fingerprint":null},"backend":{"kata":{"docker_host":null,"runtime_name":"kata"}}}"#
        ));
        assert_eq!(spec.digest(), Digest::of(text.as_bytes()));
    }

    #[test]
    fn another_format_is_refused_by_name() {
        let text = String::from_utf8(draft().seal().unwrap().to_json()).unwrap();
        let later = text.replace("hotcell-spec-1", "hotcell-spec-2");
        assert_eq!(
            RunDraft::from_spec_json(later.as_bytes()),
            Err(SpecError::Format("hotcell-spec-2".into()))
        );
        assert!(matches!(RunDraft::from_spec_json(b"{}"), Err(SpecError::Unreadable(_))));
        assert!(matches!(RunDraft::from_spec_json(b""), Err(SpecError::Unreadable(_))));
        let twice = text.replacen("{\"format\"", "{\"run_id\":\"demo-0002\",\"format\"", 1);
        assert!(matches!(RunDraft::from_spec_json(twice.as_bytes()), Err(SpecError::Unreadable(_))));
    }

    proptest! {
        #[test]
        fn thresholds_survive_bit_for_bit(denial in 0.05f64..=0.95, mutation in 0.05f64..=0.95) {
            let mut draft = draft();
            draft.policy.thresholds.denial_ewma = denial;
            draft.policy.thresholds.mutation_ewma = mutation;
            let bytes = draft.seal().unwrap().to_json();
            let again = RunDraft::from_spec_json(&bytes).unwrap().seal().unwrap();
            prop_assert_eq!(again.policy().thresholds().denial_ewma.to_bits(), denial.to_bits());
            prop_assert_eq!(again.to_json(), bytes);
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = RunDraft::from_spec_json(&bytes);
        }
    }
}
