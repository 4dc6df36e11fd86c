//! `hotcell-request`: asks the host for a capability, or narrates.
//!
//! ```text
//! hotcell-request CAPABILITY RESOURCE [JUSTIFICATION]
//! hotcell-request --claim KIND [subject=N] [parent=N] [value=N] [TEXT]
//! ```
//! Prints `allow`, `deny` or `defer`, a colon and the reason; exits 0, 1, 2;
//! 3 for wrong usage or where no answer came.

use hotcell_wire::{
    Claim, ClaimKind, Decision, FrameReader, GuestFrame, HEADER_LEN, HostFrame, MAX_TEXT, Request,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with,
};
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

/// Where the init listens, as the workload sees it.
const SOCKET: &str = "/run/hotcell/request";
/// Exit code for everything that is not a decision.
const NO_ANSWER: u8 = 3;

const USAGE: &str = "usage: hotcell-request CAPABILITY RESOURCE [JUSTIFICATION]
       hotcell-request --claim KIND [subject=N] [parent=N] [value=N] [TEXT]
CAPABILITY: net-egress package-install file-write process-spawn raw-syscall privilege-raise
KIND: spawn exit file tool capability network";

/// Names and numbers of `ames-v1`.
const CAPABILITIES: [(&str, u8); 6] = [
    ("net-egress", 1),
    ("package-install", 2),
    ("file-write", 3),
    ("process-spawn", 4),
    ("raw-syscall", 5),
    ("privilege-raise", 6),
];

const CLAIMS: [(&str, ClaimKind); 6] = [
    ("spawn", ClaimKind::Spawn),
    ("exit", ClaimKind::Exit),
    ("file", ClaimKind::File),
    ("tool", ClaimKind::Tool),
    ("capability", ClaimKind::Capability),
    ("network", ClaimKind::Network),
];

/// Runs the client with its arguments; gives the exit code.
pub fn run(arguments: impl Iterator<Item = OsString>) -> u8 {
    let arguments: Vec<OsString> = arguments.collect();
    let arguments: Vec<&[u8]> = arguments.iter().map(|argument| argument.as_bytes()).collect();
    match message(&arguments).and_then(|message| converse(&message)) {
        Ok((decision, reason)) => {
            let (name, code) = match decision {
                Decision::Allow => ("allow", 0),
                Decision::Deny => ("deny", 1),
                Decision::Defer => ("defer", 2),
            };
            match writeln!(std::io::stdout(), "{name}: {reason}") {
                Ok(()) => code,
                Err(_) => NO_ANSWER,
            }
        }
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "hotcell-request: {why}");
            NO_ANSWER
        }
    }
}

fn message(arguments: &[&[u8]]) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    let fits = match arguments {
        [b"--claim", kind, fields @ ..] => GuestFrame::Claim(claim(kind, fields)?).encode(&mut out, 0, 0),
        [capability, resource, rest @ ..] if rest.len() <= 1 => {
            let number = CAPABILITIES.iter().find(|(name, _)| name.as_bytes() == *capability);
            let (_, capability) = number.ok_or_else(|| USAGE.to_owned())?;
            let justification = rest.first().copied().unwrap_or_default();
            GuestFrame::Request(Request { exec: 0, capability: *capability, resource, justification })
                .encode(&mut out, 0, 0)
        }
        _ => return Err(USAGE.to_owned()),
    };
    if fits { Ok(out) } else { Err("the texts are too long".to_owned()) }
}

fn claim<'a>(kind: &[u8], fields: &[&'a [u8]]) -> Result<Claim<'a>, String> {
    let usage = || USAGE.to_owned();
    let (_, kind) = CLAIMS.iter().find(|(name, _)| name.as_bytes() == kind).ok_or_else(usage)?;
    let mut claim = Claim { kind: *kind, subject: 0, parent: 0, value: 0, text: b"" };
    for field in fields {
        let number = |prefix: &[u8]| field.strip_prefix(prefix).and_then(|text| str::from_utf8(text).ok());
        if let Some(text) = number(b"subject=") {
            claim.subject = text.parse().map_err(|_| usage())?;
        } else if let Some(text) = number(b"parent=") {
            claim.parent = text.parse().map_err(|_| usage())?;
        } else if let Some(text) = number(b"value=") {
            claim.value = text.parse().map_err(|_| usage())?;
        } else if claim.text.is_empty() {
            claim.text = field;
        } else {
            return Err(usage());
        }
    }
    Ok(claim)
}

fn converse(message: &[u8]) -> Result<(Decision, String), String> {
    let unreachable = |error: rustix::io::Errno| format!("failed to reach the host: {error}");
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(unreachable)?;
    connect(&socket, &SocketAddrUnix::new(SOCKET).map_err(unreachable)?).map_err(unreachable)?;
    send(&socket, message, SendFlags::NOSIGNAL).map_err(unreachable)?;
    let mut answer = [0; HEADER_LEN + 1 + MAX_TEXT];
    let (_, length) = recv(&socket, &mut answer, RecvFlags::empty()).map_err(unreachable)?;
    let mut reader = FrameReader::new();
    reader.push(answer.get(..length).unwrap_or_default());
    match reader.next() {
        Ok(Some((header, payload))) => match HostFrame::parse(header, payload) {
            Ok(HostFrame::Reply(reply)) => Ok((reply.decision, reply.reason.to_owned())),
            _ => Err(String::from_utf8_lossy(payload).into_owned()),
        },
        _ => Err("the connection was closed without an answer".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&[u8]]) -> Result<String, String> {
        let mut reader = FrameReader::new();
        reader.push(&message(arguments)?);
        let (header, payload) = reader.next().unwrap().unwrap();
        Ok(format!("{:?}", GuestFrame::parse(header, payload).unwrap()))
    }

    #[test]
    fn requests_and_claims_are_one_valid_frame() {
        let request = parsed(&[b"file-write", b"/workspace/x", b"why"]).unwrap();
        assert!(request.contains("capability: 3"), "{request}");
        let claim = parsed(&[b"--claim", b"exit", b"subject=7", b"value=-9", b"text"]).unwrap();
        assert!(claim.contains("kind: Exit, subject: 7, parent: 0, value: -9"), "{claim}");
        for wrong in [&[] as &[&[u8]], &[b"net-egress"], &[b"x", b"y"], &[b"--claim", b"x"]] {
            assert!(parsed(wrong).is_err());
        }
        let long = vec![b'x'; 70_000];
        assert!(parsed(&[b"file-write", &long]).is_err());
    }
}
