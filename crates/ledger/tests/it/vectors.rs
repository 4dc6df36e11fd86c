//! The published vectors, byte for byte.

use hotcell_ledger::*;
use serde_json::Value;

fn vectors() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../vectors/ames_v1_conformance.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn hex(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn digest(text: &Value) -> Digest {
    Digest::from_hex(text.as_str().unwrap()).unwrap()
}

#[test]
fn domains() {
    let all = [Domain::Event, Domain::MerkleLeaf, Domain::MerkleNode, Domain::Block, Domain::Checkpoint];
    let listed = vectors()["sections"]["domain_separation"].as_array().unwrap().clone();
    assert_eq!(listed.len(), all.len());
    for (domain, vector) in all.into_iter().zip(listed) {
        assert_eq!(domain.tag(), vector["tag"].as_str().unwrap().as_bytes());
        assert_eq!(commit(domain, &[1, 2, 3, 4]), digest(&vector["digest_of_01020304"]));
    }
}

fn vector_events() -> Vec<Event> {
    let listed = vectors()["sections"]["event_encoding"].as_array().unwrap().clone();
    assert_eq!(listed.len(), 6);
    listed
        .iter()
        .map(|vector| {
            let bytes = hex(&vector["canonical_hex"]);
            let event = Event::decode(&bytes).unwrap();
            assert_eq!(event.to_bytes().unwrap(), bytes, "{}", vector["name"]);
            assert_eq!(bytes.len() as u64, vector["canonical_len"].as_u64().unwrap());
            assert_eq!(event.sequence, vector["sequence"].as_u64().unwrap());
            let kind = u8::from_str_radix(&vector["event_type"].as_str().unwrap()[2..], 16).unwrap();
            assert_eq!(event.payload.event_type().byte(), kind);
            assert_eq!(event.digest().unwrap(), digest(&vector["event_digest"]));
            event
        })
        .collect()
}

#[test]
fn events() {
    let events = vector_events();
    assert_eq!(
        events[1].payload,
        Payload::ProcessSpawn {
            binary: Digest::from_bytes([0x11; 32]),
            argv: Digest::from_bytes([0x22; 32]),
            cwd: "/workspace".into(),
        }
    );
    assert_eq!(
        events[2].payload,
        Payload::NetworkRequest {
            protocol: Protocol::Https,
            destination: "huggingface.co".into(),
            bytes_out: 512,
            bytes_in: 4096,
        }
    );
    assert_eq!(
        events[3].payload,
        Payload::CapabilityRequest {
            capability: Capability::PrivilegeRaise,
            granted: false,
            reason: "policy".into(),
        }
    );
    assert_eq!(events[4].payload, Payload::ProcessExit { code: 0 });
}

#[test]
fn merkle_roots() {
    for vector in vectors()["sections"]["merkle_roots"].as_array().unwrap() {
        let n = vector["leaf_count"].as_u64().unwrap() as u8;
        let leaves: Vec<Digest> = (0..n).map(|i| Digest::from_bytes([i + 1; 32])).collect();
        assert_eq!(merkle::root(&leaves), digest(&vector["root"]), "{n} leaves");
        for index in 0..leaves.len() {
            let path = merkle::prove(&leaves, index).unwrap();
            assert!(merkle::verify_inclusion(&leaves[index], &path, &digest(&vector["root"])));
        }
    }
}

/// The writer itself must come to the vectors' block, and an event of it be shown without the others.
#[test]
fn ledger() {
    let ledger = vectors()["sections"]["ledger"].clone();
    let block = &ledger["blocks"][0];
    let mut file = Vec::new();
    let mut writer = LedgerWriter::over(MemorySink(&mut file), Cadence::default());
    let events = vector_events();
    for event in &events {
        let recorded =
            writer.append(event.actor, event.parent, event.payload.clone(), event.timestamp_ns).unwrap();
        assert_eq!(recorded, *event);
    }
    writer.seal_block(block["timestamp_ns"].as_u64().unwrap()).unwrap();
    let checkpoint = writer.finish().unwrap();
    assert_eq!(checkpoint.height, ledger["checkpoint"]["height"].as_u64().unwrap());
    assert_eq!(checkpoint.head, digest(&ledger["head_digest"]));
    assert_eq!(checkpoint.digest(), digest(&ledger["checkpoint"]["digest"]));
    let (header, rest) = file.split_first_chunk::<88>().unwrap();
    assert_eq!(header.to_vec(), hex(&block["header_canonical_hex"]));
    assert_eq!(rest.len(), events.iter().map(|e| e.to_bytes().unwrap().len()).sum::<usize>());
    let header = BlockHeader::from_bytes(header);
    assert_eq!(header.to_bytes().to_vec(), hex(&block["header_canonical_hex"]));
    assert_eq!(header.digest(), digest(&block["block_digest"]));

    let proof = EventProof::new(&events, 3).unwrap();
    assert_eq!(proof.verify(&header).unwrap(), events[3]);
    let mut other = proof.clone();
    *other.event_bytes.last_mut().unwrap() ^= 1;
    assert!(other.verify(&header).is_err());
}

pub(crate) struct MemorySink<'a>(pub(crate) &'a mut Vec<u8>);

impl std::io::Write for MemorySink<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl writer::Sink for MemorySink<'_> {
    fn sync(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
