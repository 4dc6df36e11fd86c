//! The two threads on the byte channel: one reads frames, one writes them.
//!
//! The reader routes stream data straight to the exec's sinks, within the credit
//! that the host gave, and hands everything else to the driver. Whatever breaks
//! the protocol ends the channel: there is no second chance for a hostile peer.
//! Both threads end when the machine is gone. What the driver says goes before what
//! streams say, so that an order to kill waits behind no data.

use crate::stream::Sinks;
use crossbeam_channel::{Receiver, Sender, select};
use hotcell_ledger::Digest;
use hotcell_wire::{
    Clock, Configure, Decision, EXEC_ALLOW_FRAME, ExecBegin, ExecEnded, ExecRule, FrameReader, GuestFrame,
    HostFrame, MAX_PAYLOAD, MAX_RESOURCE, Reply, Stream,
};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

/// Bytes read from the channel at once.
const READ_CHUNK: usize = 64 * 1024;

/// What the driver hears from the channel.
#[derive(Debug)]
pub(crate) enum FromGuest {
    /// The init is up; it was at `uptime_ns` of its own clock when it said so, and was heard at `heard`.
    Ready { kernel_release: String, uptime_ns: u64, heard: Instant },
    /// An exec ended, and all its output is with its sinks.
    Ended { exec: u32, ended: ExecEnded },
    /// More stdin may be sent.
    StdinCredit { exec: u32, bytes: u32 },
    /// Nobody reads stdin any more.
    StdinClosed { exec: u32 },
    /// A capability is asked for.
    Request { id: u32, exec: u32, capability: u8, resource: Vec<u8>, justification: Vec<u8> },
    /// The guest's own account.
    Claim { kind: hotcell_wire::ClaimKind, subject: u64, parent: u64, value: i32, text: Vec<u8> },
    /// It has told of every process.
    Rolled { roll: u32 },
    /// The workload is gone and the disks are written out.
    Quiesced,
    /// The init can't go on.
    Fatal { text: String },
    /// The channel ended.
    Lost { why: Lost },
}

/// Why a channel ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// The far end closed or failed: the machine is gone, or going.
    Closed(String),
    /// The guest broke the protocol.
    Misbehaved(String),
}

/// What is sent to the guest.
#[derive(Debug)]
pub(crate) enum ToGuest {
    Configure(Box<Configure>),
    Clock(Clock),
    ExecBegin(u32, ExecBegin),
    /// Texts of any length; cut into frames here.
    ExecText(u32, Vec<u8>),
    ExecStart(u32),
    Stdin(u32, Vec<u8>),
    StdinEof(u32),
    KillTree(u32),
    Credit(u32, Stream, u32),
    /// Nobody reads this output any more.
    CloseOutput(u32, Stream),
    Reply(u32, Decision, String),
    Quiesce,
    /// Tell of every process, then answer with this number.
    RollCall(u32),
    /// The whole list of files that may be executed, and whether those on the workspace may; cut into frames here.
    ExecGate(Vec<[u8; 32]>, bool),
}

/// Reads until the channel ends; the last message is [`FromGuest::Lost`].
pub(crate) fn read_frames(mut channel: UnixStream, sinks: &Sinks, to_driver: &Sender<FromGuest>) {
    let mut reader = FrameReader::new();
    let mut chunk = vec![0; READ_CHUNK];
    let why = 'lost: loop {
        let count = match channel.read(&mut chunk) {
            Ok(0) => break Lost::Closed("the guest's channel closed".into()),
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => break Lost::Closed(error.to_string()),
        };
        reader.push(chunk.get(..count).unwrap_or_default());
        loop {
            let (header, payload) = match reader.next() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(reject) => break 'lost Lost::Misbehaved(reject.to_string()),
            };
            let frame = match GuestFrame::parse(header, payload) {
                Ok(frame) => frame,
                Err(reject) => break 'lost Lost::Misbehaved(reject.to_string()),
            };
            match route(header.id, frame, sinks) {
                Ok(Some(message)) => {
                    if to_driver.send(message).is_err() {
                        break 'lost Lost::Closed("the run is over".into());
                    }
                }
                Ok(None) => {}
                Err(why) => break 'lost Lost::Misbehaved(why),
            }
        }
    };
    sinks.end_all();
    let _ = to_driver.send(FromGuest::Lost { why });
}

fn route(id: u32, frame: GuestFrame<'_>, sinks: &Sinks) -> Result<Option<FromGuest>, String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Some(match frame {
        GuestFrame::Stdout(bytes) => return sinks.push(id, Stream::Stdout, bytes).map(|()| None),
        GuestFrame::Stderr(bytes) => return sinks.push(id, Stream::Stderr, bytes).map(|()| None),
        GuestFrame::ExecEnded(ended) => {
            sinks.end(id)?;
            FromGuest::Ended { exec: id, ended: *ended }
        }
        GuestFrame::Ready(ready) => FromGuest::Ready {
            kernel_release: ready.kernel_release.to_owned(),
            uptime_ns: ready.uptime_ns,
            heard: Instant::now(),
        },
        GuestFrame::StdinCredit(bytes) => FromGuest::StdinCredit { exec: id, bytes },
        GuestFrame::StdinClosed => FromGuest::StdinClosed { exec: id },
        GuestFrame::Request(request) => FromGuest::Request {
            id,
            exec: request.exec,
            capability: request.capability,
            resource: request.resource.to_vec(),
            justification: request.justification.to_vec(),
        },
        GuestFrame::Claim(claim) => FromGuest::Claim {
            kind: claim.kind,
            subject: claim.subject,
            parent: claim.parent,
            value: claim.value,
            text: claim.text.to_vec(),
        },
        GuestFrame::ExecDecision(decision) => FromGuest::Claim {
            kind: hotcell_wire::ClaimKind::Tool,
            subject: decision.exec.into(),
            parent: 0,
            value: 0,
            text: exec_decision_text(&decision).into_bytes(),
        },
        GuestFrame::Quiesced => FromGuest::Quiesced,
        // Nothing is decided by these.
        GuestFrame::Started | GuestFrame::Log(_) => return Ok(None),
        GuestFrame::Pong([a, b, c, d, ..]) => {
            FromGuest::Rolled { roll: u32::from_le_bytes([*a, *b, *c, *d]) }
        }
        GuestFrame::Fatal(bytes) => FromGuest::Fatal { text: text(bytes) },
        _ => return Err("a frame of a kind that is not handled".into()),
    }))
}

/// Writes what comes, until the driver hangs up or the channel ends.
pub(crate) fn write_frames(channel: Arc<UnixStream>, control: &Receiver<ToGuest>, data: &Receiver<ToGuest>) {
    let mut sequence = 0u32;
    let mut bytes = Vec::with_capacity(READ_CHUNK);
    loop {
        let mut from_stream = None;
        select! {
            recv(control) -> first => match first {
                Ok(first) => encode(&first, &mut bytes, &mut sequence),
                Err(_) => return,
            },
            // The driver keeps a sender as long as it keeps the other queue's.
            recv(data) -> first => match first {
                Ok(first) => from_stream = Some(first),
                Err(_) => return,
            },
        }
        // An exec is begun on one queue before its streams speak on the other: whatever the driver said before this
        // message was sent goes out before it.
        while bytes.len() < READ_CHUNK
            && let Ok(next) = control.try_recv()
        {
            encode(&next, &mut bytes, &mut sequence);
        }
        if let Some(message) = from_stream {
            while let Ok(next) = control.try_recv() {
                encode(&next, &mut bytes, &mut sequence);
            }
            encode(&message, &mut bytes, &mut sequence);
        }
        if (&*channel).write_all(&bytes).is_err() {
            return;
        }
        bytes.clear();
    }
}

/// The guest's word on a file that was executed by exception or refused, as the
/// name of a tool call: `exec <rule> <digest> <path>`.
fn exec_decision_text(decision: &hotcell_wire::ExecDecision<'_>) -> String {
    let rule = match decision.rule {
        ExecRule::Workspace => "workspace",
        ExecRule::Unknown => "unknown",
        ExecRule::Elsewhere => "elsewhere",
        ExecRule::Unreadable => "unreadable",
        ExecRule::NoToken => "no_token",
        ExecRule::BinaryMismatch => "binary_mismatch",
        ExecRule::DeadParent => "dead_parent",
    };
    let digest = Digest::from_bytes(decision.digest);
    let mut text = format!("exec {rule} {digest} {}", String::from_utf8_lossy(decision.path));
    if decision.untold > 0 {
        text.push_str(&format!(" (and {} before it that were not told)", decision.untold));
    }
    text.truncate(text.floor_char_boundary(MAX_RESOURCE));
    text
}

fn encode(message: &ToGuest, out: &mut Vec<u8>, sequence: &mut u32) {
    let mut put = |id: u32, frame: HostFrame<'_>| {
        if frame.encode(out, id, *sequence) {
            *sequence = sequence.wrapping_add(1);
        }
    };
    match message {
        ToGuest::Configure(configure) => put(0, HostFrame::Configure(configure)),
        ToGuest::Clock(clock) => put(0, HostFrame::Clock(clock)),
        ToGuest::ExecBegin(id, begin) => put(*id, HostFrame::ExecBegin(begin)),
        ToGuest::ExecText(id, text) => {
            for part in text.chunks(MAX_PAYLOAD) {
                put(*id, HostFrame::ExecText(part));
            }
        }
        ToGuest::ExecStart(id) => put(*id, HostFrame::ExecStart),
        ToGuest::Stdin(id, bytes) => put(*id, HostFrame::Stdin(bytes)),
        ToGuest::StdinEof(id) => put(*id, HostFrame::StdinEof),
        ToGuest::KillTree(id) => put(*id, HostFrame::KillTree),
        ToGuest::Credit(id, stream, bytes) => {
            put(*id, HostFrame::Credit { stream: *stream, bytes: *bytes });
        }
        ToGuest::CloseOutput(id, stream) => put(*id, HostFrame::CloseOutput(*stream)),
        ToGuest::Reply(id, decision, reason) => {
            put(*id, HostFrame::Reply(Reply { decision: *decision, reason }));
        }
        ToGuest::Quiesce => put(0, HostFrame::Quiesce),
        ToGuest::RollCall(roll) => {
            put(*roll, HostFrame::RollCall);
            // What is told comes before the answer to this.
            let mut nonce = [0; 32];
            nonce[..4].copy_from_slice(&roll.to_le_bytes());
            put(0, HostFrame::Ping(&nonce));
        }
        ToGuest::ExecGate(digests, workspace) => {
            for part in digests.chunks(EXEC_ALLOW_FRAME) {
                put(0, HostFrame::ExecAllow(part));
            }
            put(0, HostFrame::ExecEnforce { workspace: *workspace });
        }
    }
}
