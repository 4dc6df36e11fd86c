//! A small client of QEMU's control protocol: one command, one answer, a deadline; or one command, and its answer when it has come.
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
    /// A command was sent whose answer nobody waits for and that has not come. Answers come in the order of commands.
    asked: bool,
    answered: Option<Value>,
}

impl Qmp {
    /// Greets; returns the VMM's version.
    pub(crate) fn open(stream: UnixStream, deadline: Duration) -> Result<(Qmp, String), QmpError> {
        let (pending, events) = (Vec::new(), VecDeque::new());
        let mut qmp = Qmp { stream, pending, events, deadline, asked: false, answered: None };
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

    /// The answer to what was asked so the last time, if it has come and nobody took it; asks again unless one is on its way.
    /// Waits for nothing.
    pub(crate) fn ask(&mut self, command: &str, arguments: Value) -> Option<Value> {
        self.take_in();
        let answer = self.answered.take();
        if !self.asked
            && let Ok(request) = request(command, arguments)
        {
            // One that can't be sent is to a VMM whose end others notice.
            self.asked = self.stream.write_all(&request).is_ok();
        }
        answer
    }

    /// The first of the events that have come and were not looked at yet that is `wanted`; waits for nothing.
    pub(crate) fn take_event(&mut self, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        self.take_in();
        std::mem::take(&mut self.events).into_iter().find(wanted)
    }

    /// Takes in what has come.
    fn take_in(&mut self) {
        let mut chunk = [0; 4096];
        loop {
            while let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                match serde_json::from_slice::<Value>(&line) {
                    Ok(event) if event.get("event").is_some() => self.keep(event),
                    Ok(mut answer) if std::mem::take(&mut self.asked) => {
                        self.answered = answer.get_mut("return").map(Value::take);
                    }
                    _ => {}
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
            if std::mem::take(&mut self.asked) {
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
    fn what_was_asked_is_answered_later_and_is_no_answer_to_anything_else() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            theirs.write_all(GREETING.as_bytes()).unwrap();
            let commands = io::BufRead::lines(io::BufReader::new(theirs.try_clone().unwrap()));
            for (number, _) in commands.map_while(Result::ok).enumerate() {
                let answer = format!("{{\"event\":\"RESUME\"}}\n{{\"return\":{number}}}\n");
                theirs.write_all(answer.as_bytes()).unwrap();
            }
        });
        let (mut qmp, _) = Qmp::open(ours, Duration::from_secs(5)).unwrap();
        assert_eq!(qmp.ask("first", json!({})), None);
        assert_eq!(qmp.call("second", json!({})).unwrap(), 2, "what came before it is the first's");
        assert_eq!(qmp.ask("third", json!({})), None);
        let end = Instant::now() + Duration::from_secs(5);
        let mut answer = None;
        while answer.is_none() && Instant::now() < end {
            answer = qmp.ask("while none is on its way", json!({}));
        }
        assert_eq!(answer.unwrap(), 3);
        assert_eq!(qmp.take_event(|_| true).unwrap()["event"], "RESUME");
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
