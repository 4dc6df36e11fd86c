//! The request socket: how the workload asks for capabilities and narrates.
//!
//! One message is one frame, as on the channel: a `Request` or a `Claim` of
//! the guest's; the answer to either is a `Reply` of the host's, or a `Log`
//! with the reason why there is none.
//!
//! What it guarantees: at most [`CLIENTS`] clients with one message each in
//! memory; which exec asks is read from the kernel, not from the message; a
//! client that is silent gives its place to the next.
//! What it does not: decide, or vouch for anything: all of this is testimony.

use crate::cgroup;
use crate::channel::Channel;
use crate::last::{Doing, Failure};
use crate::limits::{CLIENT_IDLE, CLIENTS, REQUEST_PATIENCE};
use crate::poll::{Poll, Source};
use crate::view::REQUEST_DIRECTORY;
use hotcell_wire::{
    Claim, ClaimKind, Decision, FrameReader, GuestFrame, HEADER_LEN, HostFrame, MAX_JUSTIFICATION,
    MAX_RESOURCE, Reply, Request,
};
use rustix::fs::{Mode, chmod};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    listen as listen_on, recv, send, socket_with,
};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Connections that the kernel keeps while all places are taken.
const BACKLOG: i32 = 16;
/// The largest message: a request with both texts at their limit, and its head.
const MESSAGE_BYTES: usize = HEADER_LEN + 12 + MAX_RESOURCE + MAX_JUSTIFICATION;
/// The name of the socket in its directory, which is read-only where the workload sees it: it can't be replaced.
const NAME: &str = "request";

/// Binds the socket where the workload sees it as `/run/hotcell/request`.
pub(crate) fn listen() -> Result<OwnedFd, Failure> {
    let path = format!("{REQUEST_DIRECTORY}/{NAME}");
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let bound = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&socket, &SocketAddrUnix::new(path.as_str())?)?;
        chmod(path.as_str(), Mode::from_raw_mode(0o666))?;
        listen_on(&socket, BACKLOG)?;
        Ok::<_, Errno>(socket)
    };
    bound().doing(|| format!("listen on {path}"))
}

/// The socket and its clients.
#[derive(Debug)]
pub(crate) struct Requests {
    listener: OwnedFd,
    knocking: bool,
    clients: BTreeMap<u32, Client>,
    last_client: u32,
    last_request: u32,
}

#[derive(Debug)]
struct Client {
    socket: OwnedFd,
    exec: u32,
    readable: bool,
    asked: Option<Asked>,
    deadline: Instant,
}

#[derive(Debug)]
struct Asked {
    request: u32,
    capability: u8,
}

impl Requests {
    pub(crate) fn new(listener: OwnedFd) -> Requests {
        Requests { listener, knocking: false, clients: BTreeMap::new(), last_client: 0, last_request: 0 }
    }

    pub(crate) fn hear_knock(&mut self) {
        self.knocking = true;
    }

    pub(crate) fn hear_client(&mut self, id: u32) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.readable = true;
        }
    }

    /// Takes in whoever waits, as far as there are places.
    pub(crate) fn accept(&mut self, poll: &Poll, now: Instant) {
        while self.knocking && self.make_place() {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match accept_with(&self.listener, flags) {
                Ok(socket) => self.admit(socket, poll, now),
                Err(Errno::AGAIN) => self.knocking = false,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // Out of memory or files: the next knock tries again.
                Err(_) => self.knocking = false,
            }
        }
    }

    fn admit(&mut self, socket: OwnedFd, poll: &Poll, now: Instant) {
        // The peer's pid in PID 1's own namespace.
        let exec =
            socket_peercred(&socket).map_or(0, |peer| cgroup::exec_of(peer.pid.as_raw_nonzero().get()));
        self.last_client = self.last_client.wrapping_add(1);
        if poll.watch(&socket, Source::Client(self.last_client)).is_ok() {
            let deadline = now + CLIENT_IDLE;
            let client = Client { socket, exec, readable: true, asked: None, deadline };
            self.clients.insert(self.last_client, client);
        }
    }

    /// Whether there is a place, after sending away the one who has been silent longest.
    fn make_place(&mut self) -> bool {
        if self.clients.len() >= CLIENTS {
            let silent = self.clients.iter().filter(|(_, client)| client.asked.is_none());
            let Some((&id, _)) = silent.min_by_key(|(_, client)| client.deadline) else { return false };
            self.clients.remove(&id);
        }
        true
    }

    /// Whether [`Requests::pump`] would do something now.
    pub(crate) fn can_pump(&self) -> bool {
        self.clients.values().any(|client| client.readable && client.asked.is_none())
    }

    /// Reads one message of each client that has none under way.
    pub(crate) fn pump(&mut self, channel: &mut Channel, now: Instant) {
        let mut gone = Vec::new();
        for (&id, client) in &mut self.clients {
            // Testimony never gets in the way of the exec frames: it waits in the client's socket.
            if !channel.takes_data() {
                break;
            }
            if client.readable && client.asked.is_none() {
                self.last_request = self.last_request.wrapping_add(1);
                if !client.pump(self.last_request, channel, now) {
                    gone.push(id);
                }
            }
        }
        for id in gone {
            self.clients.remove(&id);
        }
    }

    /// The host has answered.
    pub(crate) fn reply(&mut self, request: u32, reply: &Reply<'_>, channel: &mut Channel, now: Instant) {
        let mut clients = self.clients.values_mut();
        let asked =
            |client: &&mut Client| client.asked.as_ref().is_some_and(|asked| asked.request == request);
        // Nobody: it has gone, or run out of patience.
        let Some(client) = clients.find(asked) else { return };
        let Some(Asked { capability, .. }) = client.asked.take() else { return };
        client.deadline = now + CLIENT_IDLE;
        client.answer(&|out| HostFrame::Reply(*reply).encode(out, request, 0));
        // The init's own account of the same, to be compared with what the host recorded.
        let granted = i32::from(reply.decision == Decision::Allow);
        let claim = Claim {
            kind: ClaimKind::Capability,
            subject: client.exec.into(),
            parent: 0,
            value: i32::from(capability) | granted << 8,
            text: reply.reason.as_bytes(),
        };
        channel.send(0, &GuestFrame::Claim(claim));
    }

    /// Lets go of those whose time is over.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.clients.retain(|_, client| {
            let over = client.deadline <= now;
            if over && client.asked.is_some() {
                client.refuse("the host did not answer in time");
            }
            !over
        });
    }

    /// When [`Requests::expire`] has something to do next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.clients.values().map(|client| client.deadline).min()
    }
}

impl Client {
    /// Reads and handles one message; `false`: the client is done with.
    fn pump(&mut self, request: u32, channel: &mut Channel, now: Instant) -> bool {
        let mut message = [0; MESSAGE_BYTES];
        let length = match recv(&self.socket, &mut message, RecvFlags::TRUNC) {
            Ok((_, 0)) => return false,
            Ok((_, length)) => length,
            Err(Errno::AGAIN) => {
                self.readable = false;
                return true;
            }
            Err(Errno::INTR) => return true,
            Err(_) => return false,
        };
        let Some(message) = message.get(..length) else {
            self.refuse("the message is too long");
            return false;
        };
        let mut reader = FrameReader::new();
        reader.push(message);
        let frame = match reader.next() {
            Ok(Some((header, payload))) if HEADER_LEN + payload.len() == length => {
                GuestFrame::parse(header, payload)
            }
            Ok(_) => {
                self.refuse("a message must be one whole frame");
                return false;
            }
            Err(reject) => Err(reject),
        };
        match frame {
            Ok(GuestFrame::Request(asked)) => {
                channel.send(request, &GuestFrame::Request(Request { exec: self.exec, ..asked }));
                self.asked = Some(Asked { request, capability: asked.capability });
                self.deadline = now + REQUEST_PATIENCE;
            }
            Ok(GuestFrame::Claim(mut claim)) => {
                // Who speaks of nobody speaks of itself.
                if claim.subject == 0 {
                    claim.subject = self.exec.into();
                }
                channel.send(0, &GuestFrame::Claim(claim));
                self.deadline = now + CLIENT_IDLE;
                let noted = Reply { decision: Decision::Allow, reason: "noted" };
                self.answer(&|out| HostFrame::Reply(noted).encode(out, 0, 0));
            }
            Ok(_) => {
                self.refuse("only requests and claims are taken here");
                return false;
            }
            Err(reject) => {
                self.refuse(&reject.to_string());
                return false;
            }
        }
        true
    }

    fn refuse(&self, why: &str) {
        self.answer(&|out| GuestFrame::Log(why.as_bytes()).encode(out, 0, 0));
    }

    /// A client that does not take its answer goes without.
    fn answer(&self, encode: &dyn Fn(&mut Vec<u8>) -> bool) {
        let mut message = Vec::new();
        if encode(&mut message) {
            let _ = send(&self.socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }
}
