//! An honest bundle, and the tools of somebody who would alter it.

use hotcell_decide::{Broker, CapabilityRequest, Check, Direction, HostFact, OutputStream, Verdict};
use hotcell_ledger::*;
use hotcell_policy::{ImageRef, PolicyDraft, RunDraft};
use std::path::{Path, PathBuf};

pub(crate) const SEED: [u8; 32] = [7; 32];

pub(crate) struct Bundle {
    pub(crate) dir: tempfile::TempDir,
}

pub(crate) struct Plan {
    /// Told apart runs.
    pub(crate) run_id: &'static str,
    /// How many guest processes.
    pub(crate) execs: u64,
    /// A host fact before the end.
    pub(crate) fact: Option<HostFact>,
    /// The verdict and reasons that report and record state.
    pub(crate) verdict: (Verdict, &'static [&'static str]),
    pub(crate) seed: [u8; 32],
}

impl Default for Plan {
    fn default() -> Plan {
        Plan { run_id: "run-00000001", execs: 3, fact: None, verdict: (Verdict::Allowed, &[]), seed: SEED }
    }
}

impl Plan {
    pub(crate) fn build(&self) -> Bundle {
        let bundle = Bundle { dir: tempfile::tempdir().unwrap() };
        let put = |name: &str, bytes: &str| std::fs::write(bundle.path(name), bytes).unwrap();
        std::fs::create_dir(bundle.path("objects")).unwrap();
        std::fs::create_dir_all(bundle.path("files/deep dir")).unwrap();
        put("files/deep dir/out.txt", "copied out");
        put("console.log", "booting");
        let part = |what: &str| Digest::of(what.as_bytes());
        let image = ImageRef {
            name: "busybox".into(),
            kernel: part("kernel"),
            initramfs: part("initramfs"),
            root: part("root"),
        };
        let draft = RunDraft::new(self.run_id, image, PolicyDraft::for_running_a_command());
        let sealed = draft.seal().unwrap();
        let spec = String::from_utf8(sealed.to_json()).unwrap();
        put("spec.json", &spec);
        let (verdict, reasons) = self.verdict;
        put("report.json", &format!(r#"{{"run_id":"{}","verdict":"{verdict}","other":[1,2]}}"#, self.run_id));

        let cadence = Cadence { max_events: 4, ..Cadence::default() };
        let mut writer = LedgerWriter::create(bundle.path("ledger.ames"), cadence).unwrap();
        let mut now = 1_000_000;
        let mut add = |actor, parent, payload| {
            now += 1000;
            writer.append(actor, parent, payload, now).unwrap();
        };
        let fact = |fact: &HostFact| {
            let (payload, object) = fact.to_payload().unwrap();
            bundle.object(std::str::from_utf8(&object).unwrap());
            payload
        };
        let (host, vm) = (ActorId::HOST, ActorId::VM);
        let spawn = |argv: &str| Payload::ProcessSpawn {
            binary: Digest::of(b"not kept"),
            argv: bundle.object(argv),
            cwd: "/".into(),
        };
        add(host, None, Payload::RunBegin);
        add(host, None, spawn(&spec));
        let begun = HostFact::Spec { run_id: self.run_id.into(), spec: sealed.digest(), layers: Vec::new() };
        add(host, None, fact(&begun));
        for what in ["kernel", "initramfs", "root"] {
            add(host, None, fact(&HostFact::Measured { what: what.into(), digest: part(what), bytes: 1 }));
        }
        add(host, None, fact(&HostFact::SwitchProven { rules: 39 }));
        add(vm, Some(host), spawn(r#"["qemu"]"#));
        let manifest = bundle.object("a manifest");
        let isolation = HostFact::Isolation {
            backend: "fake".into(),
            accel: "tcg".into(),
            jail: "none".into(),
            details: [("manifest".to_owned(), manifest.to_hex())].into(),
        };
        add(host, None, fact(&isolation));
        add(host, None, fact(&HostFact::Ready { boot_ms: 1, kernel_release: "6.1".into() }));
        for n in 0..self.execs {
            let actor = ActorId::new(0x1000 + n).unwrap();
            add(actor, Some(vm), spawn(&format!(r#"["sh","{n}"]"#)));
            let path = format!("/workspace/{n}");
            let request = CapabilityRequest::new(Capability::FileWrite, &path, "", actor);
            let decision = Broker::decide(sealed.policy().capabilities(), &request);
            let (payload, object) = decision.to_payload(&request);
            bundle.object(std::str::from_utf8(&object).unwrap());
            add(host, None, payload);
            let output = format!("output {n}");
            let kept = bundle.object(&output);
            add(
                host,
                None,
                fact(&HostFact::Output {
                    exec: n,
                    stream: OutputStream::Stdout,
                    total_bytes: output.len() as u64,
                    kept_bytes: output.len() as u64,
                    truncated: false,
                    whole: kept,
                    kept,
                }),
            );
            add(actor, Some(vm), Payload::ProcessExit { code: 0 });
        }
        let copied = HostFact::Copied {
            direction: Direction::Out,
            path: "/deep dir/out.txt".into(),
            bytes: 10,
            digest: Digest::of(b"copied out"),
            mode: 0o100_644,
        };
        add(host, None, fact(&copied));
        if let Some(extra) = &self.fact {
            add(host, None, fact(extra));
        }
        let after = HostFact::Measured { what: "root_after".into(), digest: part("root"), bytes: 1 };
        add(host, None, fact(&after));
        let check = Check { what: "VMM process".into(), gone: true, detail: "reaped".into() };
        add(host, None, fact(&HostFact::Teardown { verified: true, ms: 1, checks: vec![check] }));
        add(vm, Some(host), Payload::ProcessExit { code: 0 });
        let reasons = reasons.iter().map(ToString::to_string).collect();
        add(host, None, fact(&HostFact::Verdict { verdict, reasons, timed_out: false }));
        add(host, None, Payload::ProcessExit { code: 0 });
        add(host, None, Payload::RunEnd);
        let ledger = writer.close().unwrap();
        bundle::seal(bundle.dir.path(), self.run_id, &ledger, &SigningKey::from_seed(&self.seed)).unwrap();
        bundle
    }
}

impl Bundle {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn object(&self, content: &str) -> Digest {
        let name = Digest::of(content.as_bytes());
        std::fs::write(self.path("objects").join(name.to_hex()), content).unwrap();
        name
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), bytes).unwrap();
    }

    pub(crate) fn remove(&self, name: &str) {
        std::fs::remove_file(self.path(name)).unwrap();
    }

    /// Flips a bit of a file.
    pub(crate) fn flip(&self, name: &str, at: usize, bit: u8) {
        let mut bytes = self.read(name);
        bytes[at] ^= 1 << bit;
        self.write(name, bytes);
    }

    pub(crate) fn blocks(&self) -> Vec<Block> {
        blocks(&self.read("ledger.ames"))
    }

    pub(crate) fn set_blocks(&self, blocks: &[Block]) {
        let bytes: Vec<u8> =
            blocks.iter().flat_map(|b| [&b.header.to_bytes()[..], &b.events.concat()].concat()).collect();
        self.write("ledger.ames", bytes);
    }

    /// Replaces the note by one over the bundle as it is now, signed with this key.
    pub(crate) fn seal_again(&self, seed: [u8; 32]) {
        let origin = String::from_utf8(self.read("checkpoint.note")).unwrap();
        let run_id = origin.lines().next().unwrap().strip_prefix("hotcell/").unwrap().to_owned();
        let ledger = ClosedLedger::open(self.path("ledger.ames")).unwrap();
        bundle::seal(self.dir.path(), &run_id, &ledger, &SigningKey::from_seed(&seed)).unwrap();
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) header: BlockHeader,
    pub(crate) events: Vec<Vec<u8>>,
}

pub(crate) fn blocks(mut bytes: &[u8]) -> Vec<Block> {
    let mut blocks = Vec::new();
    while !bytes.is_empty() {
        let (header, mut rest) = bytes.split_first_chunk::<88>().unwrap();
        let header = BlockHeader::from_bytes(header);
        let mut events = Vec::new();
        for _ in 0..header.event_count {
            let (_, len) = Event::decode_prefix(rest).unwrap();
            events.push(rest[..len].to_vec());
            rest = &rest[len..];
        }
        blocks.push(Block { header, events });
        bytes = rest;
    }
    blocks
}

/// What an attacker does who knows the format: heights, counts, roots and links made to fit again, from this block on.
pub(crate) fn reseal(blocks: &mut [Block], from: usize) {
    for i in from..blocks.len() {
        let leaves: Vec<Digest> = blocks[i].events.iter().map(|e| commit(Domain::Event, e)).collect();
        let prev_hash = if i == 0 { Digest::ZERO } else { blocks[i - 1].header.digest() };
        let header = &mut blocks[i].header;
        *header = BlockHeader {
            height: i as u64,
            prev_hash,
            event_count: leaves.len() as u64,
            events_root: merkle::root(&leaves),
            timestamp_ns: header.timestamp_ns,
        };
    }
}

/// Sequences made dense again.
pub(crate) fn renumber(blocks: &mut [Block]) {
    for (n, event) in blocks.iter_mut().flat_map(|b| &mut b.events).enumerate() {
        event[1..9].copy_from_slice(&(n as u64).to_be_bytes());
    }
}

pub(crate) fn first_object(bundle: &Bundle, content: &str) -> String {
    let name = format!("objects/{}", Digest::of(content.as_bytes()));
    assert!(Path::new(&bundle.path(&name)).exists(), "{content}");
    name
}
