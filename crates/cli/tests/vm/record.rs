//! A bundle's ledger, read for what it says.

use hotcell_ledger::reader::Entry;
use hotcell_ledger::{ActorId, Digest, Event, FileOp, LedgerReader, Payload};
use serde_json::Value;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::Path;

/// Events and host facts in their order.
pub(crate) struct Record {
    pub(crate) events: Vec<Event>,
    pub(crate) facts: Vec<Fact>,
    /// What the host decided on, in order: capability, resource, actor.
    pub(crate) asked: Vec<Value>,
}

pub(crate) struct Fact {
    pub(crate) value: Value,
}

impl Record {
    /// Reads all that is sealed.
    pub(crate) fn read(bundle: &Path) -> Record {
        let file = File::open(bundle.join("ledger.ames")).unwrap();
        let mut reader = LedgerReader::new(BufReader::new(file));
        let mut events = Vec::new();
        while let Ok(Some(entry)) = reader.next_entry() {
            if let Entry::Event(event) = entry {
                events.push(event);
            }
        }
        assert!(!events.is_empty(), "an empty record proves nothing");
        let facts = events.iter().filter_map(|event| {
            let Payload::ToolCall { tool, args, .. } = &event.payload else { return None };
            if event.actor != ActorId::HOST || !tool.as_str().starts_with("hotcell.") {
                return None;
            }
            let object = fs::read(bundle.join("objects").join(args.to_hex())).ok()?;
            let value = serde_json::from_slice(&object).ok()?;
            Some(Fact { value })
        });
        let asked = events.iter().filter(|event| event.actor == ActorId::HOST).filter_map(|event| {
            let Payload::CapabilityRequest { reason, .. } = &event.payload else { return None };
            let object = bundle.join("objects").join(reason.as_str().rsplit(' ').next()?);
            serde_json::from_slice(&fs::read(object).ok()?).ok()
        });
        Record { facts: facts.collect(), asked: asked.collect(), events }
    }

    /// The facts of one kind.
    pub(crate) fn facts<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.facts.iter().map(|fact| &fact.value).filter(move |value| value["fact"] == kind)
    }

    /// The one fact of this kind.
    #[track_caller]
    pub(crate) fn fact<'a>(&'a self, kind: &'a str) -> &'a Value {
        let found: Vec<&Value> = self.facts(kind).collect();
        assert_eq!(found.len(), 1, "{kind}: {found:?}");
        found[0]
    }

    /// The host's decisions: whether granted, in order.
    pub(crate) fn decisions(&self) -> Vec<bool> {
        let decision = |event: &Event| match &event.payload {
            Payload::CapabilityRequest { granted, .. } if event.actor == ActorId::HOST => Some(*granted),
            _ => None,
        };
        self.events.iter().filter_map(decision).collect()
    }

    /// Changes that the host saw on the disk: operation, path, before, after; in order.
    pub(crate) fn mutations(&self) -> Vec<(FileOp, String, Digest, Digest)> {
        let mutation = |event: &Event| match &event.payload {
            Payload::FileMutation { op, path, before, after } if event.actor == ActorId::HOST => {
                Some((*op, path.as_str().to_owned(), *before, *after))
            }
            _ => None,
        };
        self.events.iter().filter_map(mutation).collect()
    }

    /// Events that the guest caused to be written in its own band, execs' starts and ends and answers to roll calls, which
    /// come with time, apart.
    pub(crate) fn testimony(&self) -> usize {
        let told = |event: &&Event| {
            event.actor.get() >= ActorId::FIRST_GUEST.get()
                && !event.actor.is_host_band()
                && !matches!(event.payload, Payload::ProcessSpawn { .. } | Payload::ProcessExit { .. })
                && !matches!(&event.payload, Payload::ToolCall { tool, .. } if tool.as_str().starts_with("processes "))
        };
        self.events.iter().filter(told).count()
    }
}
