//! Canonical bytes of an event, both ways.
//!
//! Guarantees: `decode(encode(e)) == e` for every event that encodes, and `encode(decode(b)) == b` for every string of
//! bytes that decodes, so that a digest names exactly one event. Decoding allocates at most the bytes that it was
//! given; no bytes make it panic.
//! Does not: judge. A well-formed event may be nonsense; that is [`crate::gate1`]'s business.
//! Called by the writer, the readers, and anybody who holds an event's bytes.

use crate::digest::{Digest, Domain, commit};
use crate::event::{
    ActorId, Capability, DecodeError, EVENT_HEADER_LEN, Event, EventType, FileOp, MAX_PAYLOAD_LEN, NO_PARENT,
    NfcString, Payload, PayloadTooLong, Protocol,
};

const DIGEST_LEN: usize = 32;
const STR_PREFIX_LEN: usize = 4;

impl Payload {
    /// How many bytes the payload has when encoded.
    pub fn encoded_len(&self) -> usize {
        match self {
            Payload::ProcessSpawn { cwd, .. } => 2 * DIGEST_LEN + str_len(cwd),
            Payload::ProcessExit { .. } => 4,
            Payload::FileMutation { path, .. } => 1 + str_len(path) + 2 * DIGEST_LEN,
            Payload::NetworkRequest { destination, .. } => 1 + str_len(destination) + 16,
            Payload::ToolCall { tool, .. } => str_len(tool) + 2 * DIGEST_LEN,
            Payload::CapabilityRequest { reason, .. } => 2 + str_len(reason),
            Payload::MemoryMap { .. } => 17,
            Payload::RunBegin | Payload::RunEnd => 0,
        }
    }

    fn encode_into(&self, out: &mut Vec<u8>) {
        match self {
            Payload::ProcessSpawn { binary, argv, cwd } => {
                out.extend_from_slice(binary.as_bytes());
                out.extend_from_slice(argv.as_bytes());
                put_str(out, cwd);
            }
            Payload::ProcessExit { code } => out.extend_from_slice(&code.to_be_bytes()),
            Payload::FileMutation { op, path, before, after } => {
                out.push(op.byte());
                put_str(out, path);
                out.extend_from_slice(before.as_bytes());
                out.extend_from_slice(after.as_bytes());
            }
            Payload::NetworkRequest { protocol, destination, bytes_out, bytes_in } => {
                out.push(protocol.byte());
                put_str(out, destination);
                out.extend_from_slice(&bytes_out.to_be_bytes());
                out.extend_from_slice(&bytes_in.to_be_bytes());
            }
            Payload::ToolCall { tool, args, result } => {
                put_str(out, tool);
                out.extend_from_slice(args.as_bytes());
                out.extend_from_slice(result.as_bytes());
            }
            Payload::CapabilityRequest { capability, granted, reason } => {
                out.push(capability.byte());
                out.push(u8::from(*granted));
                put_str(out, reason);
            }
            Payload::MemoryMap { addr, length, prot } => {
                out.extend_from_slice(&addr.to_be_bytes());
                out.extend_from_slice(&length.to_be_bytes());
                out.push(*prot);
            }
            Payload::RunBegin | Payload::RunEnd => {}
        }
    }

    #[inline]
    fn decode(event_type: EventType, bytes: &[u8]) -> Result<Payload, DecodeError> {
        let mut fields = Fields(bytes);
        let payload = match event_type {
            EventType::ProcessSpawn => Payload::ProcessSpawn {
                binary: fields.digest()?,
                argv: fields.digest()?,
                cwd: fields.string()?,
            },
            EventType::ProcessExit => Payload::ProcessExit { code: i32::from_be_bytes(fields.array()?) },
            EventType::FileMutation => Payload::FileMutation {
                op: fields.value("file operation", FileOp::from_byte)?,
                path: fields.string()?,
                before: fields.digest()?,
                after: fields.digest()?,
            },
            EventType::NetworkRequest => Payload::NetworkRequest {
                protocol: fields.value("protocol", Protocol::from_byte)?,
                destination: fields.string()?,
                bytes_out: u64::from_be_bytes(fields.array()?),
                bytes_in: u64::from_be_bytes(fields.array()?),
            },
            EventType::ToolCall => {
                Payload::ToolCall { tool: fields.string()?, args: fields.digest()?, result: fields.digest()? }
            }
            EventType::CapabilityRequest => Payload::CapabilityRequest {
                capability: fields.value("capability", Capability::from_byte)?,
                granted: fields.value("truth value", |byte| match byte {
                    0 => Some(false),
                    1 => Some(true),
                    _ => None,
                })?,
                reason: fields.string()?,
            },
            EventType::MemoryMap => Payload::MemoryMap {
                addr: u64::from_be_bytes(fields.array()?),
                length: u64::from_be_bytes(fields.array()?),
                prot: fields.byte()?,
            },
            EventType::RunBegin => Payload::RunBegin,
            EventType::RunEnd => Payload::RunEnd,
        };
        if fields.0.is_empty() { Ok(payload) } else { Err(DecodeError::PayloadShape) }
    }
}

impl Event {
    /// Appends the canonical bytes to `out`, which is left as it was on error.
    pub fn encode_into(&self, out: &mut Vec<u8>) -> Result<(), PayloadTooLong> {
        let payload_len = self.payload.encoded_len();
        let len = match u32::try_from(payload_len) {
            Ok(len) if payload_len <= MAX_PAYLOAD_LEN => len,
            _ => return Err(PayloadTooLong(payload_len)),
        };
        let [s0, s1, s2, s3, s4, s5, s6, s7] = self.sequence.to_be_bytes();
        let [t0, t1, t2, t3, t4, t5, t6, t7] = self.timestamp_ns.to_be_bytes();
        let [a0, a1, a2, a3, a4, a5, a6, a7] = self.actor.get().to_be_bytes();
        let [p0, p1, p2, p3, p4, p5, p6, p7] = self.parent.map_or(NO_PARENT, ActorId::get).to_be_bytes();
        let [l0, l1, l2, l3] = len.to_be_bytes();
        let header: [u8; EVENT_HEADER_LEN] = [
            self.payload.event_type().byte(),
            s0,
            s1,
            s2,
            s3,
            s4,
            s5,
            s6,
            s7,
            t0,
            t1,
            t2,
            t3,
            t4,
            t5,
            t6,
            t7,
            a0,
            a1,
            a2,
            a3,
            a4,
            a5,
            a6,
            a7,
            p0,
            p1,
            p2,
            p3,
            p4,
            p5,
            p6,
            p7,
            l0,
            l1,
            l2,
            l3,
            0,
            0,
            0,
            0,
        ];
        out.reserve(EVENT_HEADER_LEN + payload_len);
        out.extend_from_slice(&header);
        self.payload.encode_into(out);
        Ok(())
    }

    /// The canonical bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, PayloadTooLong> {
        let mut out = Vec::new();
        self.encode_into(&mut out)?;
        Ok(out)
    }

    /// The event that these bytes are, all of them.
    pub fn decode(bytes: &[u8]) -> Result<Event, DecodeError> {
        let (event, len) = Event::decode_prefix(bytes)?;
        match bytes.len().saturating_sub(len) {
            0 => Ok(event),
            trailing => Err(DecodeError::Trailing(trailing)),
        }
    }

    /// The event that these bytes begin with, and how many of them it takes.
    #[inline]
    pub fn decode_prefix(bytes: &[u8]) -> Result<(Event, usize), DecodeError> {
        let payload_len = Event::payload_len_of_header(bytes)?;
        let short = DecodeError::ShortHeader { have: bytes.len() };
        let mut fields = Fields(bytes);
        let event_type = fields.byte()?;
        let sequence = u64::from_be_bytes(fields.array()?);
        let timestamp_ns = u64::from_be_bytes(fields.array()?);
        let actor = ActorId::new(u64::from_be_bytes(fields.array()?)).ok_or(DecodeError::ReservedActor)?;
        let parent = ActorId::new(u64::from_be_bytes(fields.array()?));
        let (_, after_header) = bytes.split_at_checked(EVENT_HEADER_LEN).ok_or(short)?;
        let payload_bytes = after_header
            .get(..payload_len)
            .ok_or(DecodeError::ShortPayload { says: payload_len, have: after_header.len() })?;
        let event_type = EventType::from_byte(event_type).ok_or(DecodeError::UnknownType(event_type))?;
        let payload = Payload::decode(event_type, payload_bytes)?;
        Ok((Event { sequence, timestamp_ns, actor, parent, payload }, EVENT_HEADER_LEN + payload_len))
    }

    /// Checks what a header alone can show, and returns how long the payload behind it is: at most
    /// [`MAX_PAYLOAD_LEN`], so that a reader knows how much to fetch before it fetches it.
    #[inline]
    pub(crate) fn payload_len_of_header(bytes: &[u8]) -> Result<usize, DecodeError> {
        let header: &[u8; EVENT_HEADER_LEN] =
            bytes.first_chunk().ok_or(DecodeError::ShortHeader { have: bytes.len() })?;
        let &[kind, .., l0, l1, l2, l3, r0, r1, r2, r3] = header;
        if EventType::from_byte(kind).is_none() {
            return Err(DecodeError::UnknownType(kind));
        }
        let reserved = u32::from_be_bytes([r0, r1, r2, r3]);
        if reserved != 0 {
            return Err(DecodeError::Reserved(reserved));
        }
        let payload_len = usize::try_from(u32::from_be_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        if payload_len > MAX_PAYLOAD_LEN {
            return Err(DecodeError::PayloadTooLong(payload_len));
        }
        Ok(payload_len)
    }

    /// The EVENT digest of the canonical bytes.
    pub fn digest(&self) -> Result<Digest, PayloadTooLong> {
        Ok(commit(Domain::Event, &self.to_bytes()?))
    }
}

fn str_len(text: &NfcString) -> usize {
    STR_PREFIX_LEN + text.as_str().len()
}

/// The length fits: a payload is checked against [`MAX_PAYLOAD_LEN`] before any of it is written.
fn put_str(out: &mut Vec<u8>, text: &NfcString) {
    let bytes = text.as_str().as_bytes();
    out.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(bytes);
}

/// What is left of a payload to be decoded.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(DecodeError::PayloadShape)?;
        self.0 = tail;
        Ok(*head)
    }

    fn byte(&mut self) -> Result<u8, DecodeError> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    fn digest(&mut self) -> Result<Digest, DecodeError> {
        Ok(Digest::from_bytes(self.array()?))
    }

    fn value<T>(&mut self, field: &'static str, of: impl Fn(u8) -> Option<T>) -> Result<T, DecodeError> {
        let value = self.byte()?;
        of(value).ok_or(DecodeError::UnknownValue { field, value })
    }

    fn string(&mut self) -> Result<NfcString, DecodeError> {
        let len = usize::try_from(u32::from_be_bytes(self.array()?)).unwrap_or(usize::MAX);
        let (text, tail) = self.0.split_at_checked(len).ok_or(DecodeError::PayloadShape)?;
        self.0 = tail;
        let text: &'a str = core::str::from_utf8(text).map_err(|_| DecodeError::NotUtf8)?;
        Ok(NfcString::as_recorded(text))
    }
}
