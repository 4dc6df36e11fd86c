//! The broker: every rule, the bounds, and what no policy can grant.
mod common;

use common::spec_with;
use hotcell_decide::broker::{MAX_JUSTIFICATION_CHARS, MAX_REQUEST_BYTES, MAX_RESOURCE_CHARS};
use hotcell_decide::{Broker, CapabilityRequest, Decision, Rule};
use hotcell_ledger::{ActorId, Capability, Digest, Payload};
use hotcell_policy::{CapabilitiesDraft, SealedSpec};
use proptest::prelude::*;

const PIN: &str = "numpy==2.3.1 sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

fn policy() -> SealedSpec {
    spec_with(|p| {
        p.capabilities = CapabilitiesDraft {
            write: vec!["/tmp/exact".into()],
            write_trees: vec!["/workspace/out".into()],
            spawn: true,
            packages: vec![PIN.into()],
        };
    })
}

fn decide(capability: Capability, resource: &str) -> Decision {
    let request = CapabilityRequest::new(capability, resource, "", ActorId::FIRST_GUEST);
    Broker::decide(policy().policy().capabilities(), &request)
}

#[test]
fn every_rule_decides_something() {
    use Capability::{FileWrite, NetEgress, PackageInstall, PrivilegeRaise, ProcessSpawn, RawSyscall};
    use Decision::{Allow, Defer, Deny};
    let long = "a".repeat(MAX_RESOURCE_CHARS + 1);
    let other = PIN.replace("0011", "0012");
    let table = [
        (NetEgress, "127.0.0.1:80", Deny(Rule::NeverGranted)),
        (RawSyscall, "read", Deny(Rule::NeverGranted)),
        (PrivilegeRaise, "", Deny(Rule::NeverGranted)),
        (FileWrite, "", Deny(Rule::MalformedResource)),
        (FileWrite, "/workspace/out/a\0", Deny(Rule::MalformedResource)),
        (FileWrite, long.as_str(), Deny(Rule::MalformedResource)),
        (FileWrite, "workspace/out/a", Deny(Rule::MalformedPath)),
        (FileWrite, "/../workspace/out/a", Deny(Rule::MalformedPath)),
        (FileWrite, "/tmp/exact", Allow(Rule::WriteExact)),
        (FileWrite, "/tmp//./exact", Allow(Rule::WriteExact)),
        (FileWrite, "/tmp/exact/below", Deny(Rule::WriteNotListed)),
        (FileWrite, "/workspace/out", Allow(Rule::WriteTree)),
        (FileWrite, "/workspace/out/a/b", Allow(Rule::WriteTree)),
        (FileWrite, "/workspace/output", Deny(Rule::WriteNotListed)),
        (FileWrite, "/workspace/out/../../etc/passwd", Deny(Rule::WriteNotListed)),
        (FileWrite, "/workspace/out/*", Allow(Rule::WriteTree)),
        (FileWrite, "/work*", Deny(Rule::WriteNotListed)),
        (ProcessSpawn, "/bin/ls", Allow(Rule::SpawnAllowed)),
        (PackageInstall, "numpy==2.3.1", Defer(Rule::PackageListed)),
        (PackageInstall, PIN, Defer(Rule::PackageListed)),
        (PackageInstall, other.as_str(), Deny(Rule::PackageOtherArtifact)),
        (PackageInstall, "numpy==2.3.2", Deny(Rule::PackageNotListed)),
        (PackageInstall, "numpy", Deny(Rule::PackageNotPinned)),
        (PackageInstall, "numpy~=2.3", Deny(Rule::PackageNotPinned)),
    ];
    for (capability, resource, expected) in table {
        assert_eq!(decide(capability, resource), expected, "{capability:?} {resource:?}");
    }
    let off = spec_with(|p| p.capabilities.spawn = false);
    let request = CapabilityRequest::new(ProcessSpawn, "/bin/ls", "", ActorId::FIRST_GUEST);
    assert_eq!(Broker::decide(off.policy().capabilities(), &request), Deny(Rule::SpawnOff));
    let seen: Vec<Rule> = table.iter().map(|(_, _, d)| d.rule()).collect();
    let only = [Rule::MalformedJustification, Rule::SpawnOff];
    assert!(Rule::ALL.iter().all(|rule| seen.contains(rule) || only.contains(rule)));
}

#[test]
fn bounds_end_where_they_say() {
    let ask = |resource: usize, justification: String| {
        let path = format!("/workspace/out/{}", "é".repeat(resource - 15));
        let request =
            CapabilityRequest::new(Capability::FileWrite, &path, &justification, ActorId::FIRST_GUEST);
        assert!(request.to_object().len() <= MAX_REQUEST_BYTES);
        assert_eq!(CapabilityRequest::from_object(&request.to_object()), Some(request.clone()));
        Broker::decide(policy().policy().capabilities(), &request)
    };
    assert_eq!(ask(MAX_RESOURCE_CHARS, String::new()), Decision::Allow(Rule::WriteTree));
    assert_eq!(ask(MAX_RESOURCE_CHARS + 1, String::new()), Decision::Deny(Rule::MalformedResource));
    assert_eq!(ask(MAX_RESOURCE_CHARS + 100_000, String::new()), Decision::Deny(Rule::MalformedResource));
    let text = |len| "\u{1}".repeat(len);
    assert_eq!(ask(40, text(MAX_JUSTIFICATION_CHARS)), Decision::Allow(Rule::WriteTree));
    assert_eq!(ask(40, text(MAX_JUSTIFICATION_CHARS + 1)), Decision::Deny(Rule::MalformedJustification));
    assert_eq!(ask(40, text(1 << 20)), Decision::Deny(Rule::MalformedJustification));
    assert_eq!(ask(40, "a\0".into()), Decision::Deny(Rule::MalformedJustification));
}

#[test]
fn the_reason_text_is_as_the_record_profile_says() {
    let request = CapabilityRequest::new(Capability::NetEgress, "a:1", "why", ActorId::FIRST_GUEST);
    let object = request.to_object();
    assert_eq!(
        String::from_utf8(object.clone()).unwrap(),
        r#"{"capability":"NET_EGRESS","resource":"a:1","justification":"why","actor":4096}"#
    );
    let (payload, stored) = Broker::decide(policy().policy().capabilities(), &request).to_payload(&request);
    assert_eq!(stored, object);
    let Payload::CapabilityRequest { granted, reason, .. } = payload else { panic!("another payload") };
    assert!(!granted);
    assert_eq!(reason.as_str(), format!("deny never_granted {}", Digest::of(&object)));
}

#[test]
fn a_request_object_has_one_spelling() {
    for text in [
        r#"{"capability":"NET_EGRESS","resource":"a","justification":"","actor":4096,"x":1}"#,
        r#"{"capability":"net_egress","resource":"a","justification":"","actor":4096}"#,
        r#"{"capability":"NET_EGRESS","resource":"a","justification":"", "actor":4096}"#,
        r#"{"capability":"NET_EGRESS","resource":"a","justification":"","actor":18446744073709551615}"#,
        "",
    ] {
        assert_eq!(CapabilityRequest::from_object(text.as_bytes()), None, "{text}");
    }
}

fn any_policy() -> impl Strategy<Value = CapabilitiesDraft> {
    let path = prop::sample::select(vec!["/workspace", "/workspace/a", "/tmp", "/run/x", "/dev/shm"]);
    (
        prop::collection::vec(path.clone(), 0..4),
        prop::collection::vec(path, 0..4),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(write, trees, spawn, packages)| CapabilitiesDraft {
            write: write.into_iter().map(Into::into).collect(),
            write_trees: trees.into_iter().map(Into::into).collect(),
            spawn,
            packages: if packages { vec![PIN.into()] } else { vec![] },
        })
}

proptest! {
    #![proptest_config(common::cases(256))]

    #[test]
    fn no_policy_grants_what_is_never_granted(
        capabilities in any_policy(),
        capability in prop::sample::select(Capability::ALL.to_vec()),
        resource in "(/?(workspace|etc|\\.\\.|tmp|a)){0,6}|numpy==2.3.1|.{0,20}",
        justification in "[a-zA-Z ;/]{0,50}",
    ) {
        let spec = spec_with(|p| p.capabilities = capabilities);
        let policy = spec.policy().capabilities();
        let request = CapabilityRequest::new(capability, &resource, &justification, ActorId::FIRST_GUEST);
        let decision = Broker::decide(policy, &request);
        match capability {
            Capability::NetEgress | Capability::RawSyscall | Capability::PrivilegeRaise => {
                prop_assert_eq!(decision, Decision::Deny(Rule::NeverGranted));
            }
            Capability::PackageInstall => prop_assert!(!decision.is_granted()),
            Capability::FileWrite if decision.is_granted() => {
                let path = hotcell_policy::CleanPath::clean(&resource).unwrap();
                prop_assert_ne!(spec.policy().paths().region(&path), hotcell_policy::Region::Immutable);
            }
            _ => {}
        }
        let silent = CapabilityRequest::new(capability, &resource, "", ActorId::FIRST_GUEST);
        prop_assert_eq!(Broker::decide(policy, &silent), decision, "the justification was consulted");
        prop_assert_eq!(CapabilityRequest::from_object(&request.to_object()), Some(request));
        prop_assert!(capability.as_str().bytes().all(|b| b.is_ascii_uppercase() || b == b'_'));
    }
}
