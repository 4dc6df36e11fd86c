//! What a machine may be: checked before anything exists, all violations at once.
//!
//! The reference design refused the left column with checks. Most of it can't be
//! written down here; what remains is checked. Each row has a test of its name.
//!
//! | refused | closed by | test |
//! |---|---|---|
//! | a network device | type: no field, the JSON field is unknown | `no_network_can_be_said` |
//! | a share of the host | type: no field | `no_host_share_can_be_said` |
//! | a writable root disk | type: a root is a [`Digest`](hotcell_ledger::Digest) and nothing else | `no_writable_disk_can_be_said` |
//! | a disk that outlives the run | type: the overlay is a size, never a path | `no_persistent_disk_can_be_said` |
//! | persistent state | type: no field | `no_persistent_state_can_be_said` |
//! | rootfs and overlay the same path | type: neither has a path | `no_disk_path_can_be_said` |
//! | vcpus, memory, timeout out of range | check `out_of_range` | `numbers_out_of_range` |
//! | a run id of another form | check `run_id` | `run_ids` |
//! | kernel arguments that weaken the guest | check `kernel_argument` | `kernel_arguments` |
//! | a vsock CID below 3 | check `vsock_cid` | `vsock_cids` |
//! | an image that was not measured | check `image_digest` | `unmeasured_images` |

use crate::limits::{FIRST_VSOCK_CID, MAX_ARG_BYTES, MAX_COMMAND_BYTES, MAX_KERNEL_ARGS};
use crate::path::CleanPath;
use crate::run::{Command, RunDraft};
use crate::service;
use crate::violation::{Code, Findings, Violations};

/// The rules of isolation. There is one set of them and no way to choose another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IsolationPolicy;

impl IsolationPolicy {
    /// Checks a draft and its policy; says everything that is wrong.
    pub fn validate(&self, draft: &RunDraft) -> Result<(), Violations> {
        let mut findings = Findings::default();
        check(draft, &mut findings);
        let _ = draft.policy.clone().check(&mut findings);
        findings.finish()
    }
}

pub(crate) fn check(draft: &RunDraft, findings: &mut Findings) {
    if !is_run_id(&draft.run_id) {
        findings.add(
            Code::RunId,
            format!(
                "run id {:?}: 8 to 64 characters of a-z, 0-9 and `-` are allowed, the first not a `-`",
                draft.run_id
            ),
        );
    }
    check_image(draft, findings);
    check_kernel_args(&draft.kernel_args, findings);
    if let Some(cid) = draft.vsock_cid
        && (cid < FIRST_VSOCK_CID || cid == u32::MAX)
    {
        findings.add(
            Code::VsockCid,
            format!(
                "vsock CID {cid}: 0 to 2 and {} are reserved; leave it out, or use {FIRST_VSOCK_CID} or more",
                u32::MAX
            ),
        );
    }
    if let Some(command) = &draft.command {
        check_command(command, findings);
    }
    let services = draft.services.iter().map(|service| (service.name.as_str(), service.argv.as_slice()));
    if let Err(error) = service::check_all(services) {
        findings.add(Code::Service, error.to_string());
    }
    if draft.fingerprint.is_some() != draft.policy.profile.fingerprint.is_some() {
        findings.add(
            Code::Profile,
            "[profile] fingerprint: the file was named but not loaded, or loaded but not named: \
             give both the path and the digest of what was read from it",
        );
    }
    for (what, digest) in
        [("baseline", draft.baseline), ("binaries", draft.binaries), ("fingerprint", draft.fingerprint)]
    {
        if digest.is_some_and(|digest| digest.is_zero()) {
            findings.add(
                Code::Profile,
                format!("{what}: the digest is zero: leave it out where there is no such file"),
            );
        }
    }
}

/// Whether a text can be a run's id: `[a-z0-9][a-z0-9-]{7,63}`.
pub fn is_run_id(text: &str) -> bool {
    (8..=64).contains(&text.len())
        && !text.starts_with('-')
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

fn check_image(draft: &RunDraft, findings: &mut Findings) {
    let image = &draft.image;
    let name_ok = (1..=128).contains(&image.name.len())
        && image.name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && image.name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    if !name_ok {
        findings.add(
            Code::ImageName,
            format!(
                "image name {:?}: letters, digits, `.`, `_` and `-` are allowed, 1 to 128 of them",
                image.name
            ),
        );
    }
    for (part, digest) in [("kernel", image.kernel), ("initramfs", image.initramfs), ("root", image.root)] {
        if digest.is_zero() {
            findings.add(
                Code::ImageDigest,
                format!("the image's {part} was not measured: measure it before sealing"),
            );
        }
    }
}

fn check_kernel_args(args: &[String], findings: &mut Findings) {
    if args.len() > MAX_KERNEL_ARGS {
        findings.add(
            Code::TooMany,
            format!("{} kernel arguments, at most {MAX_KERNEL_ARGS} are allowed", args.len()),
        );
    }
    for arg in args {
        if let Some(why) = weakness(arg) {
            findings.add(Code::KernelArgument, format!("kernel argument {arg:?} is refused: {why}"));
        }
    }
}

/// Why a kernel argument may not be given. The kernel reads `-` and `_` in names
/// alike, splits at blanks and lets quotes hide them; the last of two equal
/// arguments wins, so nothing that we set ourselves may be set again.
fn weakness(arg: &str) -> Option<&'static str> {
    if arg.is_empty() || arg.len() > 256 {
        return Some("1 to 256 characters are allowed");
    }
    if !arg.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-,:=/@+".contains(&b)) {
        return Some(
            "only letters, digits and `._-,:=/@+` are allowed; blanks and quotes would smuggle in another",
        );
    }
    let name = arg.split('=').next().unwrap_or(arg).to_ascii_lowercase().replace('-', "_");
    if name.chars().all(|c| c == '_') {
        return Some("it would end the kernel's own arguments");
    }
    match name.as_str() {
        "rw" => Some("the root is read-only"),
        "single" | "s" | "emergency" | "rescue" | "1" | "2" | "3" | "4" | "5" => {
            Some("the guest has no other way to start than its measured init")
        }
        "init" | "rdinit" => Some("PID 1 is the measured init"),
        "root" | "rootflags" | "rootfstype" | "rootdelay" | "initrd" | "ramdisk_size" | "noinitrd" => {
            Some("the root is the measured image")
        }
        "ip" | "nfsroot" | "nfsrootdebug" | "netconsole" | "netdev" => Some("there is no network"),
        "lockdown"
        | "lsm"
        | "security"
        | "selinux"
        | "apparmor"
        | "enforcing"
        | "module.sig_enforce"
        | "mitigations"
        | "nosmep"
        | "nosmap"
        | "nopti"
        | "pti"
        | "kaslr"
        | "nokaslr"
        | "init_on_alloc"
        | "randomize_kstack_offset" => Some("the guest's protections are not the run's to set"),
        "kgdboc" | "kgdbwait" | "kdb" | "sysrq_always_enabled" | "debugfs" | "nomodule" | "modprobe" => {
            Some("it opens a door into the guest kernel")
        }
        name if name.starts_with("systemd.") || name.starts_with("hotcell.") || name.starts_with("rd.") => {
            Some("it speaks to an init, and PID 1 takes its orders from the host alone")
        }
        _ => None,
    }
}

fn check_command(command: &Command, findings: &mut Findings) {
    let argv = &command.argv;
    if argv.first().is_none_or(String::is_empty) {
        findings.add(Code::CommandLine, "the command is empty: name a program after `--`");
    }
    for (index, arg) in argv.iter().enumerate() {
        if arg.contains('\0') || arg.len() > MAX_ARG_BYTES {
            findings.add(
                Code::CommandLine,
                format!("argument {index} contains a NUL byte or is longer than {MAX_ARG_BYTES} bytes"),
            );
        }
    }
    match CleanPath::clean(&command.cwd) {
        Ok(path) if path.as_str() == command.cwd => {}
        Ok(path) => findings.add(
            Code::WorkingDirectory,
            format!(
                "working directory {:?} has another plain spelling: write {:?}",
                command.cwd,
                path.as_str()
            ),
        ),
        Err(error) => {
            findings.add(Code::WorkingDirectory, format!("working directory {:?}: {error}", command.cwd))
        }
    }
    let mut total: usize = argv.iter().map(String::len).sum();
    for (name, value) in &command.env {
        if name.is_empty() || name.contains(['=', '\0']) {
            findings.add(
                Code::Environment,
                format!("variable {name:?}: a name is not empty and has no `=` or NUL byte"),
            );
        }
        let value = value.reveal().unwrap_or_default();
        if value.contains('\0') || name.len() + value.len() > MAX_ARG_BYTES {
            findings.add(
                Code::Environment,
                format!(
                    "variable {name:?}: its value contains a NUL byte or is longer than {MAX_ARG_BYTES} bytes"
                ),
            );
        }
        total += name.len() + value.len();
    }
    if total > MAX_COMMAND_BYTES {
        findings.add(
            Code::CommandLine,
            format!("arguments and environment have {total} bytes, at most {MAX_COMMAND_BYTES} are allowed: copy data in with --put"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::draft;
    use hotcell_ledger::Digest;

    fn codes(change: impl FnOnce(&mut RunDraft)) -> Vec<Code> {
        let mut draft = draft();
        change(&mut draft);
        let validated = IsolationPolicy
            .validate(&draft)
            .map_err(|violations| violations.codes())
            .err()
            .unwrap_or_default();
        let sealed = draft.seal().map_err(|violations| violations.codes()).err().unwrap_or_default();
        assert_eq!(validated, sealed, "validate and seal must agree");
        validated
    }

    fn unsayable(pointer: &str, key: &str, value: serde_json::Value) {
        let sealed = draft().seal().unwrap().to_json();
        let mut spec: serde_json::Value = serde_json::from_slice(&sealed).unwrap();
        assert!(RunDraft::from_spec_json(&serde_json::to_vec(&spec).unwrap()).is_ok(), "the twin is read");
        spec.pointer_mut(pointer).unwrap().as_object_mut().unwrap().insert(key.into(), value);
        let error = RunDraft::from_spec_json(&serde_json::to_vec(&spec).unwrap()).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }

    #[test]
    fn no_network_can_be_said() {
        for pointer in
            ["", "/image", "/command", "/policy", "/policy/limits", "/policy/backend", "/policy/backend/kata"]
        {
            unsayable(pointer, "network", serde_json::json!({"mode": "user"}));
        }
    }

    #[test]
    fn no_host_share_can_be_said() {
        for pointer in ["", "/image", "/command", "/policy"] {
            unsayable(pointer, "host_share", serde_json::json!("/home"));
        }
    }

    #[test]
    fn no_writable_disk_can_be_said() {
        unsayable("/image", "writable", serde_json::json!(true));
        unsayable("", "disks", serde_json::json!([{"path": "/dev/sda", "read_only": false}]));
    }

    #[test]
    fn no_persistent_disk_can_be_said() {
        unsayable("/policy/limits", "disk_persistent", serde_json::json!(true));
    }

    #[test]
    fn no_persistent_state_can_be_said() {
        unsayable("", "state_dir", serde_json::json!("/var/lib/x"));
        unsayable("", "snapshot", serde_json::json!("x"));
    }

    #[test]
    fn no_disk_path_can_be_said() {
        unsayable("/image", "root_path", serde_json::json!("/x"));
        unsayable("", "overlay", serde_json::json!("/x"));
    }

    #[test]
    fn numbers_out_of_range() {
        assert_eq!(codes(|d| d.policy.limits.vcpus = 0), [Code::OutOfRange]);
        assert_eq!(codes(|d| d.policy.limits.memory_mib = 16_385), [Code::OutOfRange]);
        assert_eq!(codes(|d| d.policy.limits.timeout_s = 3601), [Code::OutOfRange]);
        assert!(codes(|d| d.policy.limits.timeout_s = 3600).is_empty());
    }

    #[test]
    fn run_ids() {
        for good in ["demo-0001", "a0000000", "00000000", &"a".repeat(64), "a-------"] {
            assert!(codes(|d| d.run_id = good.into()).is_empty(), "{good}");
        }
        for bad in [
            "",
            "demo-01",
            "-demo-0001",
            "Demo-0001",
            "demo_0001",
            "demo/0001",
            "démo-0001",
            "demo-0001\n",
            &"a".repeat(65),
        ] {
            assert_eq!(codes(|d| d.run_id = bad.into()), [Code::RunId], "{bad}");
        }
    }

    #[test]
    fn kernel_arguments() {
        for bad in [
            "rw",
            "RW",
            "single",
            "S",
            "s",
            "1",
            "emergency",
            "init=/bin/sh",
            "init",
            "rdinit=/bin/sh",
            "root=/dev/sda",
            "quiet rw",
            "quiet\trw",
            "\"a rw\"",
            "--",
            "-",
            "lockdown=none",
            "ip=dhcp",
            "systemd.unit=rescue.target",
            "hotcell.x=1",
            "",
            "nokaslr",
            "module-sig",
            "module.sig-enforce=0",
        ] {
            let expected: &[Code] = if bad == "module-sig" { &[] } else { &[Code::KernelArgument] };
            assert_eq!(codes(|d| d.kernel_args = vec![bad.into()]), expected, "{bad}");
        }
        for good in [
            "ro",
            "quiet",
            "console=ttyS0,115200",
            "loglevel=3",
            "panic=-1",
            "rwx",
            "initcall_debug",
            "singles",
        ] {
            assert!(codes(|d| d.kernel_args = vec![good.into()]).is_empty(), "{good}");
        }
        assert_eq!(codes(|d| d.kernel_args = vec!["quiet".into(); MAX_KERNEL_ARGS + 1]), [Code::TooMany]);
    }

    #[test]
    fn vsock_cids() {
        for cid in [0, 1, 2, u32::MAX] {
            assert_eq!(codes(|d| d.vsock_cid = Some(cid)), [Code::VsockCid]);
        }
        assert!(codes(|d| d.vsock_cid = Some(3)).is_empty());
        assert_eq!(draft().seal().unwrap().vsock_cid(), None);
    }

    #[test]
    fn unmeasured_images() {
        assert_eq!(codes(|d| d.image.kernel = Digest::ZERO), [Code::ImageDigest]);
        assert_eq!(codes(|d| d.image.name = "../x".into()), [Code::ImageName]);
    }

    #[test]
    fn commands_that_cannot_be_passed_on() {
        let command = |change: fn(&mut Command)| codes(|d| change(d.command.as_mut().unwrap()));
        assert_eq!(command(|c| c.argv.clear()), [Code::CommandLine]);
        assert_eq!(command(|c| c.argv = vec![String::new()]), [Code::CommandLine]);
        assert_eq!(command(|c| c.argv.push("a\0b".into())), [Code::CommandLine]);
        assert_eq!(command(|c| c.argv.push("a".repeat(MAX_ARG_BYTES + 1))), [Code::CommandLine]);
        assert_eq!(command(|c| c.argv = vec!["a".repeat(MAX_ARG_BYTES); 9]), [Code::CommandLine]);
        assert_eq!(command(|c| c.cwd = "workspace".into()), [Code::WorkingDirectory]);
        assert_eq!(command(|c| c.cwd = "/workspace/".into()), [Code::WorkingDirectory]);
        assert_eq!(command(|c| drop(c.env.insert("A=B".into(), "x".into()))), [Code::Environment]);
        assert_eq!(command(|c| drop(c.env.insert("A".into(), "x\0".into()))), [Code::Environment]);
        assert!(codes(|d| d.command = None).is_empty());
    }

    #[test]
    fn a_fingerprint_is_named_and_loaded_or_neither() {
        assert_eq!(codes(|d| d.fingerprint = Some(Digest::of(b"f"))), [Code::Profile]);
        assert_eq!(codes(|d| d.policy.profile.fingerprint = Some("f".into())), [Code::Profile]);
        assert!(
            codes(|d| {
                d.policy.profile.fingerprint = Some("f".into());
                d.fingerprint = Some(Digest::of(b"f"));
            })
            .is_empty()
        );
    }

    #[test]
    fn everything_at_once() {
        let all = codes(|d| {
            d.run_id = "x".into();
            d.kernel_args = vec!["rw".into(), "single".into()];
            d.vsock_cid = Some(2);
            d.policy.limits.vcpus = 99;
            d.policy.capabilities.packages = vec!["x".into()];
        });
        assert_eq!(
            all,
            [
                Code::RunId,
                Code::KernelArgument,
                Code::KernelArgument,
                Code::VsockCid,
                Code::OutOfRange,
                Code::PackagePin
            ]
        );
    }
}
