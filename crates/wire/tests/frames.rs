//! Every frame comes back as it was sent, and no bytes make a parser panic.

use hotcell_wire::*;
use proptest::prelude::*;

fn host_frames() -> Vec<HostFrame<'static>> {
    static CONFIGURE: Configure = Configure {
        nonce: [7; 32],
        entropy: [9; 64],
        wall_clock_ns: zerocopy::byteorder::little_endian::U64::new(5),
        tmp_bytes: zerocopy::byteorder::little_endian::U64::new(1 << 20),
        pids: zerocopy::byteorder::little_endian::U32::new(256),
        memory_bytes: zerocopy::byteorder::little_endian::U64::new(0),
        workspace_uid: zerocopy::byteorder::little_endian::U32::new(1000),
        workspace_gid: zerocopy::byteorder::little_endian::U32::new(1000),
        workspace_exec: 0,
        reserved: [0; 7],
    };
    static BEGIN: ExecBegin = ExecBegin {
        program: Program::Pack,
        stdin: 1,
        spawn: 1,
        last: 1,
        binary: [5; 32],
        uid: zerocopy::byteorder::little_endian::U32::new(1000),
        gid: zerocopy::byteorder::little_endian::U32::new(1000),
        text_len: zerocopy::byteorder::little_endian::U32::new(77),
    };
    static CLOCK: Clock = Clock {
        uptime_ns: zerocopy::byteorder::little_endian::U64::new(5),
        wall_clock_ns: zerocopy::byteorder::little_endian::U64::new(6),
    };
    vec![
        HostFrame::Configure(&CONFIGURE),
        HostFrame::ExecBegin(&BEGIN),
        HostFrame::ExecText(b"text"),
        HostFrame::ExecStart,
        HostFrame::Stdin(b"in"),
        HostFrame::StdinEof,
        HostFrame::Signal(15),
        HostFrame::KillTree,
        HostFrame::Credit { stream: Stream::Stderr, bytes: 4096 },
        HostFrame::Reply(Reply { decision: Decision::Defer, reason: "next image" }),
        HostFrame::Quiesce,
        HostFrame::Ping(&[3; 32]),
        HostFrame::ExecAllow(&[[1; 32], [2; 32]]),
        HostFrame::ExecEnforce { workspace: true },
        HostFrame::Clock(&CLOCK),
        HostFrame::RollCall,
    ]
}

fn guest_frames() -> Vec<GuestFrame<'static>> {
    static ENDED: ExecEnded = ExecEnded {
        how: ExecEnd::Signalled,
        stage: Stage::None,
        stragglers: 1,
        reserved: 0,
        code: zerocopy::byteorder::little_endian::I32::new(9),
    };
    vec![
        GuestFrame::Ready(Ready { kernel_release: "6.1", uptime_ns: 12 }),
        GuestFrame::Started,
        GuestFrame::Stdout(b"out"),
        GuestFrame::Stderr(b"err"),
        GuestFrame::ExecEnded(&ENDED),
        GuestFrame::StdinCredit(9),
        GuestFrame::StdinClosed,
        GuestFrame::Request(Request { exec: 1, capability: 3, resource: b"/x", justification: b"why" }),
        GuestFrame::Claim(Claim { kind: ClaimKind::Exit, subject: 4, parent: 1, value: -9, text: b"t" }),
        GuestFrame::Quiesced,
        GuestFrame::Pong(&[1; 32]),
        GuestFrame::Log(b"log"),
        GuestFrame::Fatal(b"fatal"),
        GuestFrame::ExecDecision(ExecDecision {
            exec: 3,
            rule: ExecRule::Unknown,
            untold: 2,
            digest: [8; 32],
            path: b"/bin/x",
        }),
    ]
}

#[test]
fn every_frame_comes_back() {
    let mut bytes = Vec::new();
    for (sequence, frame) in host_frames().iter().enumerate() {
        assert!(frame.encode(&mut bytes, 5, sequence as u32));
    }
    let mut reader = FrameReader::new();
    reader.push(&bytes);
    for frame in host_frames() {
        let (header, payload) = reader.next().unwrap().unwrap();
        assert_eq!(HostFrame::parse(header, payload), Ok(frame));
    }
    let mut bytes = Vec::new();
    for (sequence, frame) in guest_frames().iter().enumerate() {
        assert!(frame.encode(&mut bytes, 5, sequence as u32));
    }
    let mut reader = FrameReader::new();
    reader.push(&bytes);
    for frame in guest_frames() {
        let (header, payload) = reader.next().unwrap().unwrap();
        assert_eq!(GuestFrame::parse(header, payload), Ok(frame));
    }
}

#[test]
fn a_byte_more_or_less_is_refused_where_the_shape_is_fixed() {
    let free = [0x03, 0x05, 0x0A, 0x41, 0x43, 0x44, 0x48, 0x49, 0x4C, 0x4D, 0x4E];
    let mut bytes = Vec::new();
    for (sequence, frame) in host_frames().iter().enumerate() {
        assert!(frame.encode(&mut bytes, 5, sequence as u32));
    }
    for (sequence, frame) in guest_frames().iter().enumerate() {
        assert!(frame.encode(&mut bytes, 5, (sequence + host_frames().len()) as u32));
    }
    let mut reader = FrameReader::new();
    reader.push(&bytes);
    let mut checked = 0;
    while let Some((header, payload)) = reader.next().unwrap() {
        if free.contains(&header.kind) {
            continue;
        }
        let longer = [payload, &[0]].concat();
        let both = |bytes: &[u8]| {
            HostFrame::parse(header, bytes).is_err() && GuestFrame::parse(header, bytes).is_err()
        };
        assert!(both(&longer), "kind {:#x} takes a byte more", header.kind);
        if !payload.is_empty() {
            assert!(both(&payload[1..]), "kind {:#x} takes a byte less", header.kind);
        }
        checked += 1;
    }
    assert_eq!(checked, 19);
}

#[test]
fn the_guest_may_not_speak_as_the_host() {
    let header = FrameHeader { kind: 0x0A, id: 0, sequence: 0, length: 1 };
    assert_eq!(GuestFrame::parse(header, &[1]), Err(Reject::Kind(0x0A)));
    let header = FrameHeader { kind: 0x41, id: 0, sequence: 0, length: 8 };
    assert_eq!(HostFrame::parse(header, &[1; 8]), Err(Reject::Kind(0x41)));
}

proptest! {
    #[test]
    fn no_bytes_panic(kind: u8, payload in proptest::collection::vec(any::<u8>(), 0..2048)) {
        let header = FrameHeader { kind, id: 0, sequence: 0, length: payload.len() as u32 };
        let _ = GuestFrame::parse(header, &payload);
        let _ = HostFrame::parse(header, &payload);
        let _ = ExecText::decode(&payload);
        let mut reader = FrameReader::new();
        reader.push(&payload);
        while let Ok(Some(_)) = reader.next() {}
    }
}
