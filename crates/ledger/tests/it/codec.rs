//! Canonical both ways, on everything that a generator draws and on damaged bytes.

use crate::generate::{event, tool};
use hotcell_ledger::event::MAX_PAYLOAD_LEN;
use hotcell_ledger::*;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn decode_is_the_inverse(event in event(), more in any::<Vec<u8>>()) {
        let bytes = event.to_bytes().unwrap();
        prop_assert_eq!(&Event::decode(&bytes).unwrap(), &event);
        let mut longer = bytes.clone();
        longer.extend_from_slice(&more);
        prop_assert_eq!(Event::decode_prefix(&longer).unwrap(), (event, bytes.len()));
        if !more.is_empty() {
            prop_assert_eq!(Event::decode(&longer), Err(DecodeError::Trailing(more.len())));
        }
    }

    #[test]
    fn what_decodes_has_one_encoding(event in event(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut bytes = event.to_bytes().unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        if let Ok(other) = Event::decode(&bytes) {
            prop_assert_ne!(&other, &event);
            prop_assert_eq!(other.to_bytes().unwrap(), bytes);
        }
    }

    #[test]
    fn a_cut_event_is_none(event in event(), at in any::<prop::sample::Index>()) {
        let bytes = event.to_bytes().unwrap();
        prop_assert!(Event::decode(&bytes[..at.index(bytes.len())]).is_err());
    }

    #[test]
    fn any_bytes(bytes in any::<Vec<u8>>()) {
        if let Ok(event) = Event::decode(&bytes) {
            prop_assert_eq!(event.to_bytes().unwrap(), bytes);
        }
    }
}

fn base() -> Vec<u8> {
    Event { sequence: 1, timestamp_ns: 2, actor: ActorId::HOST, parent: None, payload: tool("x") }
        .to_bytes()
        .unwrap()
}

#[test]
fn rejects_what_the_format_rejects() {
    let with = |at: usize, value: u8| {
        let mut bytes = base();
        bytes[at] = value;
        Event::decode(&bytes)
    };
    assert_eq!(with(0, 0x08), Err(DecodeError::UnknownType(0x08)));
    assert_eq!(with(40, 1), Err(DecodeError::Reserved(1)));
    assert!(matches!(with(36, 255), Err(DecodeError::ShortPayload { .. })));
    assert_eq!(with(36, 3), Err(DecodeError::PayloadShape));
    assert!(matches!(with(33, 255), Err(DecodeError::PayloadTooLong(_))));
    assert_eq!(with(45, 0xff), Err(DecodeError::NotUtf8));
    let mut bytes = base();
    bytes[17..25].fill(0xff);
    assert_eq!(Event::decode(&bytes), Err(DecodeError::ReservedActor));
    assert_eq!(Event::decode(&base()[..40]), Err(DecodeError::ShortHeader { have: 40 }));

    let event = |payload| Event { sequence: 0, timestamp_ns: 0, actor: ActorId::HOST, parent: None, payload };
    let mut bytes = event(Payload::CapabilityRequest {
        capability: Capability::FileWrite,
        granted: true,
        reason: NfcString::default(),
    })
    .to_bytes()
    .unwrap();
    bytes[42] = 2;
    assert_eq!(Event::decode(&bytes), Err(DecodeError::UnknownValue { field: "truth value", value: 2 }));
    bytes[41] = 0;
    assert_eq!(Event::decode(&bytes), Err(DecodeError::UnknownValue { field: "capability", value: 0 }));
}

#[test]
fn the_longest_payload_and_one_byte_more() {
    let event = |len: usize| Event {
        sequence: 0,
        timestamp_ns: 0,
        actor: ActorId::HOST,
        parent: None,
        payload: tool(&"a".repeat(len - 68)),
    };
    let bytes = event(MAX_PAYLOAD_LEN).to_bytes().unwrap();
    assert_eq!(Event::decode(&bytes).unwrap(), event(MAX_PAYLOAD_LEN));
    let mut out = vec![7];
    assert_eq!(
        event(MAX_PAYLOAD_LEN + 1).encode_into(&mut out),
        Err(event::PayloadTooLong(MAX_PAYLOAD_LEN + 1))
    );
    assert_eq!(out, [7]);
}

/// A verifier takes the bytes as they are: text that is not NFC decodes and re-encodes to itself.
#[test]
fn text_is_normalised_when_made_and_never_when_read() {
    let decomposed = "e\u{301}";
    assert_eq!(NfcString::new(decomposed).as_str(), "\u{e9}");
    let mut bytes =
        Event { sequence: 0, timestamp_ns: 0, actor: ActorId::HOST, parent: None, payload: tool("abc") }
            .to_bytes()
            .unwrap();
    bytes[45..48].copy_from_slice(decomposed.as_bytes());
    let event = Event::decode(&bytes).unwrap();
    assert!(matches!(&event.payload, Payload::ToolCall { tool, .. } if tool.as_str() == decomposed));
    assert_eq!(event.to_bytes().unwrap(), bytes);
}
