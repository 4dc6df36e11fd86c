//! How fast the ledger is, beside BLAKE3 alone over the same bytes in the same run.
//!
//! `cargo bench -p hotcell-ledger`. One core. Per iteration 100,000 events of a run's usual mixture; throughput is in
//! events. `raw_blake3/one_stream` hashes the ledger's bytes as one message: the physical limit; `raw_blake3/per_event`
//! hashes each event by itself, and no more: the limit of a format with one digest for each event.
#![allow(missing_docs, clippy::unwrap_used)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use hotcell_ledger::reader::Entry;
use hotcell_ledger::writer::{Sink, SyncEvery};
use hotcell_ledger::*;
use std::hint::black_box;
use std::io::{self, Write};

const EVENTS: u64 = 100_000;

type Step = (ActorId, Option<ActorId>, Payload);

struct Memory(Vec<u8>);

impl Write for Memory {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sink for Memory {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The events of a run in rounds of spawn, mutation, fact, decision, exit.
fn payloads() -> Vec<Step> {
    let mut steps = vec![(ActorId::HOST, None, Payload::RunBegin)];
    let spawn = |cwd: &str| Payload::ProcessSpawn {
        binary: Digest::of(b"b"),
        argv: Digest::of(b"a"),
        cwd: cwd.into(),
    };
    steps.push((ActorId::HOST, None, spawn("/")));
    steps.push((ActorId::VM, Some(ActorId::HOST), spawn("/")));
    let mut id = ActorId::FIRST_GUEST.get();
    while steps.len() as u64 + 8 < EVENTS {
        let actor = ActorId::new(id).unwrap();
        id += 1;
        steps.push((actor, Some(ActorId::VM), spawn("/workspace")));
        let path = format!("/workspace/out_{id}.txt").as_str().into();
        let (before, after) = (Digest::ZERO, Digest::of(&id.to_be_bytes()));
        steps.push((ActorId::VM, None, Payload::FileMutation { op: FileOp::Create, path, before, after }));
        steps.push((
            ActorId::HOST,
            None,
            Payload::ToolCall { tool: "hotcell.output".into(), args: after, result: after },
        ));
        let reason = "allow write_trees".into();
        let decision =
            Payload::CapabilityRequest { capability: Capability::FileWrite, granted: true, reason };
        steps.push((ActorId::HOST, None, decision));
        steps.push((actor, None, Payload::ProcessExit { code: 0 }));
    }
    steps.push((ActorId::VM, None, Payload::ProcessExit { code: 0 }));
    steps.push((ActorId::HOST, None, Payload::ProcessExit { code: 0 }));
    while (steps.len() as u64) < EVENTS - 1 {
        steps.insert(3, (ActorId::HOST, None, Payload::MemoryMap { addr: 0, length: 0, prot: 0 }));
    }
    steps.push((ActorId::HOST, None, Payload::RunEnd));
    steps
}

fn write(sink: Memory, steps: Vec<Step>) -> Vec<u8> {
    let mut sink = sink;
    let cadence = Cadence { sync: SyncEvery::Close, ..Cadence::default() };
    let mut writer = LedgerWriter::over(&mut sink, cadence);
    for (now, (actor, parent, payload)) in steps.into_iter().enumerate() {
        black_box(writer.append(actor, parent, payload, now as u64 * 1000).unwrap());
    }
    writer.finish().unwrap();
    drop(writer);
    sink.0
}

fn verify(bytes: &[u8], with_gate1: bool) -> Checkpoint {
    let mut reader = LedgerReader::new(black_box(bytes));
    let mut lineage = Lineage::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        if let Entry::Event(event) = black_box(&entry)
            && with_gate1
        {
            assert!(lineage.observe(event).is_empty());
        }
    }
    reader.checkpoint()
}

/// The best of many short turns, one after another, so that a busy machine's noise falls on all alike.
fn table(bytes: &[u8], events: &[Vec<u8>], steps: &[Step]) {
    let names = [
        "BLAKE3, one stream",
        "BLAKE3, each event",
        "append and seal",
        "verify chain",
        "verify chain and Gate 1",
    ];
    let mut best = [f64::MAX; 5];
    for _ in 0..60 {
        let input = steps.to_vec();
        let mut turn = |index: usize, work: &mut dyn FnMut()| {
            let started = std::time::Instant::now();
            work();
            best[index] = best[index].min(started.elapsed().as_secs_f64() * 1e9 / EVENTS as f64);
        };
        turn(0, &mut || _ = black_box(blake3::hash(black_box(bytes))));
        turn(1, &mut || events.iter().for_each(|event| _ = black_box(blake3::hash(black_box(event)))));
        let mut input = Some(input);
        turn(2, &mut || _ = black_box(write(Memory(Vec::with_capacity(bytes.len())), input.take().unwrap())));
        turn(3, &mut || _ = black_box(verify(bytes, false)));
        turn(4, &mut || _ = black_box(verify(bytes, true)));
    }
    println!(
        "| best of 60 | ns an event | million events a second | x one stream | x each event |\n|---|---|---|---|---|"
    );
    for (name, ns) in names.iter().zip(best) {
        println!("| {name} | {ns:.0} | {:.2} | {:.1} | {:.1} |", 1e3 / ns, ns / best[0], ns / best[1]);
    }
}

fn bench(c: &mut Criterion) {
    let steps = payloads();
    assert_eq!(steps.len() as u64, EVENTS);
    let bytes = write(Memory(Vec::new()), steps.clone());
    let mut events: Vec<Vec<u8>> = Vec::new();
    let mut reader = LedgerReader::new(&bytes[..]);
    while let Some(entry) = reader.next_entry().unwrap() {
        if let Entry::Event(event) = entry {
            events.push(event.to_bytes().unwrap());
        }
    }
    println!("{} bytes, {:.1} an event", bytes.len(), bytes.len() as f64 / EVENTS as f64);

    table(&bytes, &events, &steps);

    let mut group = c.benchmark_group("ledger");
    group.throughput(Throughput::Elements(EVENTS)).sample_size(20);
    group.bench_function("append_and_seal", |b| {
        b.iter_batched(
            || (Memory(Vec::with_capacity(bytes.len())), steps.clone()),
            |(sink, steps)| write(sink, steps),
            criterion::BatchSize::LargeInput,
        )
    });
    group.bench_function("verify_chain", |b| b.iter(|| verify(&bytes, false)));
    group.bench_function("verify_chain_and_gate1", |b| b.iter(|| verify(&bytes, true)));
    group.bench_function("raw_blake3/per_event", |b| {
        b.iter(|| {
            events.iter().for_each(|event| {
                black_box(blake3::hash(black_box(event)));
            })
        })
    });
    group.bench_function("raw_blake3/one_stream", |b| b.iter(|| blake3::hash(black_box(&bytes))));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
