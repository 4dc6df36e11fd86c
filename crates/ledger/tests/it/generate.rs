//! Events that a property test draws from.

use hotcell_ledger::*;
use proptest::prelude::*;

pub(crate) fn digest() -> impl Strategy<Value = Digest> {
    prop_oneof![Just(Digest::ZERO), any::<[u8; 32]>().prop_map(Digest::from_bytes)]
}

fn text() -> impl Strategy<Value = NfcString> {
    any::<String>().prop_map(|s| NfcString::new(&s))
}

pub(crate) fn payload() -> impl Strategy<Value = Payload> {
    prop_oneof![
        (digest(), digest(), text()).prop_map(|(binary, argv, cwd)| Payload::ProcessSpawn {
            binary,
            argv,
            cwd
        }),
        any::<i32>().prop_map(|code| Payload::ProcessExit { code }),
        (prop::sample::select(FileOp::ALL), text(), digest(), digest())
            .prop_map(|(op, path, before, after)| Payload::FileMutation { op, path, before, after }),
        (prop::sample::select(Protocol::ALL), text(), any::<u64>(), any::<u64>()).prop_map(
            |(protocol, destination, bytes_out, bytes_in)| Payload::NetworkRequest {
                protocol,
                destination,
                bytes_out,
                bytes_in
            }
        ),
        (text(), digest(), digest()).prop_map(|(tool, args, result)| Payload::ToolCall {
            tool,
            args,
            result
        }),
        (prop::sample::select(Capability::ALL), any::<bool>(), text()).prop_map(
            |(capability, granted, reason)| Payload::CapabilityRequest { capability, granted, reason }
        ),
        (any::<u64>(), any::<u64>(), any::<u8>()).prop_map(|(addr, length, prot)| Payload::MemoryMap {
            addr,
            length,
            prot
        }),
        Just(Payload::RunBegin),
        Just(Payload::RunEnd),
    ]
}

pub(crate) fn event() -> impl Strategy<Value = Event> {
    (any::<u64>(), any::<u64>(), 0..u64::MAX, any::<Option<u64>>(), payload()).prop_map(
        |(sequence, timestamp_ns, actor, parent, payload)| Event {
            sequence,
            timestamp_ns,
            actor: ActorId::new(actor).unwrap(),
            parent: parent.and_then(ActorId::new),
            payload,
        },
    )
}

pub(crate) fn spawn(cwd: &str) -> Payload {
    Payload::ProcessSpawn { binary: Digest::of(b"bin"), argv: Digest::of(b"argv"), cwd: cwd.into() }
}

pub(crate) fn tool(name: &str) -> Payload {
    Payload::ToolCall { tool: name.into(), args: Digest::of(b"args"), result: Digest::ZERO }
}
