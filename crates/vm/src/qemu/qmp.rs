//! A small client of QEMU's control protocol: one command, one answer, a deadline.
//!
//! QEMU runs hostile code's devices, so its answers are bounded and any oddity
//! is an error; of asynchronous events the last few are kept for whoever waits for one.

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longest answer in bytes; a device list of a microvm has some 4 KiB.
const MAX_ANSWER: usize = 1 << 20;
/// Events that are kept. A guest can cause as many as it likes.
const MAX_EVENTS: usize = 64;

/// Why the VMM's control channel failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// The channel broke or the deadline passed.
    #[error("control channel: {0}")]
    Io(#[from] io::Error),
    /// The answer is not what the protocol says.
    #[error("control channel: unexpected answer to {0}")]
    Protocol(String),
    /// The VMM refused the command.
    #[error("the VMM refused {command}: {why}")]
    Refused {
        /// Which command.
        command: String,
        /// Why.
        why: String,
    },
}

/// An open control channel.
#[derive(Debug)]
pub(crate) struct Qmp {
    stream: UnixStream,
    pending: Vec<u8>,
    events: VecDeque<Value>,
    deadline: Duration,
}

impl Qmp {
    /// Greets; returns the VMM's version.
    pub(crate) fn open(stream: UnixStream, deadline: Duration) -> Result<(Qmp, String), QmpError> {
        let mut qmp = Qmp { stream, pending: Vec::new(), events: VecDeque::new(), deadline };
        let greeting = qmp.line(Instant::now() + deadline)?;
        let version = &greeting["QMP"]["version"]["qemu"];
        let (Some(major), Some(minor), Some(micro)) =
            (version["major"].as_u64(), version["minor"].as_u64(), version["micro"].as_u64())
        else {
            return Err(QmpError::Protocol("the greeting".into()));
        };
        qmp.call("qmp_capabilities", json!({}))?;
        Ok((qmp, format!("{major}.{minor}.{micro}")))
    }

    /// Sends one command and waits for its answer.
    pub(crate) fn call(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let request = request(command, arguments)?;
        self.stream.set_write_timeout(Some(self.deadline))?;
        self.stream.write_all(&request)?;
        self.answer(command)
    }

    /// Gives the VMM an open file, for commands that name it.
    pub(crate) fn give(&mut self, name: &str, file: BorrowedFd<'_>) -> Result<(), QmpError> {
        let request = request("getfd", json!({"fdname": name}))?;
        let files = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let sent = sendmsg(&self.stream, &[IoSlice::new(&request)], &mut control, SendFlags::NOSIGNAL)
            .map_err(io::Error::from)?;
        self.stream.write_all(request.get(sent..).unwrap_or_default())?;
        self.answer("getfd").map(|_| ())
    }

    /// Waits for an event, or takes one that has come; gives its data.
    pub(crate) fn wait_event(
        &mut self,
        name: &str,
        wanted: impl Fn(&Value) -> bool,
        deadline: Instant,
    ) -> Result<Value, QmpError> {
        loop {
            if let Some(mut event) = self.events.pop_front() {
                if event["event"] == name && wanted(&event["data"]) {
                    return Ok(event["data"].take());
                }
                continue;
            }
            let line = self.line(deadline)?;
            if line.get("event").is_none() {
                return Err(QmpError::Protocol("nothing".into()));
            }
            self.keep(line);
        }
    }

    /// The first of the events that have come and were not looked at yet that is `wanted`; waits for nothing.
    pub(crate) fn take_event(&mut self, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        let mut chunk = [0; 4096];
        loop {
            while let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                if let Ok(event) = serde_json::from_slice::<Value>(&line)
                    && event.get("event").is_some()
                {
                    self.keep(event);
                }
            }
            match recv(&self.stream, &mut chunk, RecvFlags::DONTWAIT) {
                Ok((_, count @ 1..)) if self.pending.len() <= MAX_ANSWER => {
                    self.pending.extend_from_slice(chunk.get(..count).unwrap_or_default());
                }
                // Nothing more for now, or a VMM whose end others notice.
                _ => break,
            }
        }
        std::mem::take(&mut self.events).into_iter().find(wanted)
    }

    fn keep(&mut self, event: Value) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn answer(&mut self, command: &str) -> Result<Value, QmpError> {
        let deadline = Instant::now() + self.deadline;
        loop {
            let mut answer = self.line(deadline)?;
            if answer.get("event").is_some() {
                self.keep(answer);
                continue;
            }
            if let Some(why) = answer["error"]["desc"].as_str() {
                return Err(QmpError::Refused { command: command.into(), why: why.into() });
            }
            return match answer.get_mut("return") {
                Some(value) => Ok(value.take()),
                None => Err(QmpError::Protocol(command.into())),
            };
        }
    }

    fn line(&mut self, deadline: Instant) -> Result<Value, QmpError> {
        let mut chunk = [0; 4096];
        loop {
            if let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|error| QmpError::Protocol(error.to_string()));
            }
            if self.pending.len() > MAX_ANSWER {
                return Err(QmpError::Protocol("a line without end".into()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(count) => self.pending.extend_from_slice(chunk.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn request(command: &str, arguments: Value) -> Result<Vec<u8>, QmpError> {
    let mut request = serde_json::to_vec(&json!({"execute": command, "arguments": arguments}))
        .map_err(|error| QmpError::Protocol(error.to_string()))?;
    request.push(b'\n');
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(script: &'static [&'static str]) -> UnixStream {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            for line in script {
                theirs.write_all(line.as_bytes()).unwrap();
            }
            let mut rest = Vec::new();
            let _ = theirs.read_to_end(&mut rest);
        });
        ours
    }

    const GREETING: &str = "{\"QMP\":{\"version\":{\"qemu\":{\"major\":7,\"minor\":2,\"micro\":22}}}}\n";

    #[test]
    fn events_are_passed_over_and_refusals_named() {
        let stream = peer(&[
            GREETING,
            "{\"return\":{}}\n",
            "{\"event\":\"RESUME\"}\n",
            "{\"error\":{\"desc\":\"no\"}}\n",
        ]);
        let (mut qmp, version) = Qmp::open(stream, Duration::from_secs(5)).unwrap();
        assert_eq!(version, "7.2.22");
        let error = qmp.call("query-x", json!({})).unwrap_err();
        assert_eq!(error.to_string(), "the VMM refused query-x: no");
    }

    #[test]
    fn an_event_is_taken_once_and_not_waited_for() {
        let stream =
            peer(&[GREETING, "{\"return\":{}}\n", "{\"event\":\"RESUME\"}\n{\"event\":\"STOP\"}\n{\"ev"]);
        let (mut qmp, _) = Qmp::open(stream, Duration::from_secs(5)).unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        let mut taken = None;
        while taken.is_none() && Instant::now() < end {
            taken = qmp.take_event(|event| event["event"] == "STOP");
        }
        assert_eq!(taken.unwrap()["event"], "STOP");
        assert!(qmp.take_event(|_| true).is_none());
    }

    #[test]
    fn silence_ends_by_the_deadline_and_rubbish_is_an_error() {
        let silent = peer(&[]);
        assert!(matches!(Qmp::open(silent, Duration::from_millis(50)), Err(QmpError::Io(_))));
        assert!(matches!(Qmp::open(peer(&["[]\n"]), Duration::from_secs(5)), Err(QmpError::Protocol(_))));
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut theirs = theirs;
            while theirs.write_all(&[b'x'; 4096]).is_ok() {}
        });
        assert!(matches!(Qmp::open(ours, Duration::from_secs(20)), Err(QmpError::Protocol(_))));
    }
}
