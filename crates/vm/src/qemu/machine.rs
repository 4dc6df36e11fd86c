//! The VMM process and its machine: inspected before it runs, watched, killed, and seen to be gone.

use super::devices::{children, is_expected, memory_of, written_elsewhere};
use super::qmp::{Qmp, QmpError};
use super::saved;
use crate::backend::{LiveVm, StartError, VmmFacts};
use crate::console::{Captured, Console};
use crate::jail::{HostJail, RunCgroups, VmmWatch};
use crate::memory::GuestMemory;
use crate::registry::Registration;
use crate::teardown::{Check, TeardownFailed, TeardownProof, TeardownReport};
use crate::template::Template;
use hotcell_sys::host::{JailedChild, OpenService};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, pidfd_send_signal};
use serde_json::json;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long the VMM may take to answer a control command. It answers in
/// milliseconds; a busy host may take long.
pub(super) const CONTROL_DEADLINE: Duration = Duration::from_secs(20);
/// How long a killed VMM may take to be gone. The kernel needs milliseconds,
/// longer where it must free much memory.
const KILL_DEADLINE: Duration = Duration::from_secs(10);
/// How long a VMM whose control channel broke may take to end by itself, so that its own message can be told.
const LAST_WORDS_DEADLINE: Duration = Duration::from_millis(500);

/// What QEMU counts of each block node.
const BLOCK_STATISTICS: &str = "query-blockstats";

/// The VMM process; ended when it is dropped, whoever drops it.
pub(super) struct Vmm {
    pub(super) child: JailedChild,
}

impl Vmm {
    fn kill(&self) {
        let _ = pidfd_send_signal(&self.child.pidfd, Signal::KILL);
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.kill();
        if wait_readable(&self.child.pidfd, KILL_DEADLINE) {
            let _ = self.child.wait();
        }
    }
}

pub(super) struct QemuVm {
    pub(super) vmm: Vmm,
    /// While it starts; a VMM whose guest runs opens nothing by name.
    pub(super) opens: Option<OpenService>,
    pub(super) cgroups: RunCgroups,
    pub(super) console: Console,
    pub(super) messages: Console,
    pub(super) disk: File,
    pub(super) watch: Option<VmmWatch>,
    pub(super) channel: Option<UnixStream>,
    pub(super) qmp: Option<Qmp>,
    pub(super) memory: Option<GuestMemory>,
    pub(super) facts: VmmFacts,
    pub(super) registration: Registration,
}

impl QemuVm {
    /// Asks the VMM what machine it made and `/proc` how it is held, and refuses
    /// what was not asked for. Only then the machine executes its first instruction.
    pub(super) fn inspect(
        &mut self,
        stream: UnixStream,
        jail: &HostJail,
        template: Option<&Template>,
        root: &File,
    ) -> Result<(), StartError> {
        let answer = Qmp::open(stream, CONTROL_DEADLINE).and_then(|(mut qmp, version)| {
            if let Some(template) = template {
                saved::restore(&mut qmp, template)?;
            }
            let mut devices = Vec::new();
            for place in
                ["/machine", "/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached"]
            {
                devices.extend(children(&qmp.call("qom-list", json!({"path": place}))?));
            }
            let root = qmp.call("query-named-block-nodes", json!({"flat": true}))?;
            let memory = memory_of(&mut qmp)?;
            Ok((qmp, version, devices, root, memory))
        });
        let (qmp, version, mut devices, nodes, regions) = match answer {
            Ok(answer) => answer,
            Err(error) => return Err(self.control_failed(error)),
        };
        let node = |name: &str| nodes.as_array().and_then(|all| all.iter().find(|n| n["node-name"] == name));
        self.facts.root_read_only =
            ["root", "root-file"].iter().all(|name| node(name).is_some_and(|node| node["ro"] == true));
        devices.sort();
        self.facts.unexpected_devices = devices.iter().filter(|kind| !is_expected(kind)).cloned().collect();
        self.facts.devices = devices;
        self.facts.version = version;
        self.qmp = Some(qmp);
        self.memory = Some(GuestMemory { pid: self.facts.process.pid, regions });
        if !self.facts.unexpected_devices.is_empty() {
            return Err(StartError::UnexpectedDevice(self.facts.unexpected_devices.join(", ")));
        }
        if !self.facts.root_read_only {
            return Err(StartError::WritableRoot);
        }
        self.facts.jail = jail.measure(&self.facts.process)?;
        let watch = VmmWatch::begin(self.facts.process.clone(), Some(root));
        let doing = "look at the VMM process";
        self.watch = Some(watch.map_err(|source| StartError::Io { doing, source })?);
        if let Some(opens) = self.opens.take() {
            opens.end();
        }
        let started = self.qmp.as_mut().map(|qmp| qmp.call("cont", json!({})));
        match started {
            Some(Err(error)) => Err(self.control_failed(error)),
            _ => Ok(()),
        }
    }

    fn control_failed(&mut self, error: QmpError) -> StartError {
        if !wait_readable(&self.vmm.child.pidfd, LAST_WORDS_DEADLINE) {
            return StartError::Control(error.to_string());
        }
        let status = match self.vmm.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        // The process is gone, so its end of the pipe is closed and the reader ends.
        let deadline = Instant::now() + LAST_WORDS_DEADLINE;
        let mut stderr = self.messages.last_lines(3);
        while stderr.is_empty() && Instant::now() < deadline {
            std::thread::yield_now();
            stderr = self.messages.last_lines(3);
        }
        StartError::Died { status, stderr }
    }
}

impl LiveVm for QemuVm {
    fn facts(&self) -> &VmmFacts {
        &self.facts
    }

    fn take_channel(&mut self) -> Option<UnixStream> {
        self.channel.take()
    }

    fn exit_event(&self) -> io::Result<OwnedFd> {
        self.vmm.child.pidfd.try_clone()
    }

    fn console(&self) -> Captured {
        self.console.captured()
    }

    fn last_words(&self) -> String {
        let (messages, console) = (self.messages.last_lines(5), self.console.last_lines(15));
        format!("{messages}\n{console}").trim().to_owned()
    }

    fn memory(&self) -> Option<GuestMemory> {
        self.memory.clone()
    }

    fn root_bytes_written(&mut self) -> Option<u64> {
        written_elsewhere(&self.qmp.as_mut()?.call(BLOCK_STATISTICS, json!({"query-nodes": true})).ok()?)
    }

    fn root_bytes_so_far(&mut self) -> Option<u64> {
        written_elsewhere(&self.qmp.as_mut()?.ask(BLOCK_STATISTICS, json!({"query-nodes": true}))?)
    }

    fn held_back(&mut self) -> Option<String> {
        let event = self.qmp.as_mut()?.take_event(|event| {
            event["event"] == "STOP"
                || event["event"] == "BLOCK_IO_ERROR" && event["data"]["action"] == "stop"
        })?;
        let data = &event["data"];
        Some(match (data["node-name"].as_str(), data["reason"].as_str()) {
            (Some(node), Some(reason)) => {
                format!("the file behind its disk {node:?} takes no more: {reason}")
            }
            _ => "it does not say why".to_owned(),
        })
    }

    fn disk(&self) -> io::Result<Option<File>> {
        self.disk.try_clone().map(Some)
    }

    fn take_watch(&mut self) -> Option<VmmWatch> {
        self.watch.take()
    }

    fn kill(&self) {
        self.vmm.kill();
    }

    fn destroy(self: Box<Self>) -> Result<TeardownProof, TeardownFailed> {
        let begun = Instant::now();
        self.kill();
        let QemuVm {
            vmm, opens, cgroups, console, messages, disk, channel, qmp, facts, registration, ..
        } = *self;
        let ended = wait_readable(&vmm.child.pidfd, KILL_DEADLINE);
        let reaped = ended.then(|| vmm.child.wait());
        let exists = facts.process.exists();
        let process = Check {
            what: format!("VMM process {}", facts.process.pid),
            gone: !exists,
            detail: match reaped {
                Some(Ok(status)) => format!("reaped, {status}"),
                Some(Err(error)) => format!("can't be reaped: {error}"),
                None => format!("still there {} s after SIGKILL", KILL_DEADLINE.as_secs()),
            },
        };
        let mut checks = vec![process];
        checks.extend(cgroups.remove());
        // Both sockets are ends of pairs: with ours dropped, nothing of them is left
        // to name; that the far end is closed shows that no other process holds it.
        if let Some(channel) = channel {
            checks.push(closed("channel", &channel));
        }
        drop((qmp, disk));
        if let Some(opens) = opens {
            opens.end();
        }
        if !exists {
            console.finish();
            messages.finish();
        }
        let report = TeardownReport { checks, ms: begun.elapsed().as_millis() as u64 };
        registration.conclude(report)
    }
}

/// The far end of a socket pair is closed when reading ends.
fn closed(what: &str, stream: &UnixStream) -> Check {
    let mut byte = [0; 4096];
    let mut left = 1024;
    let outcome = loop {
        if let Err(error) = stream.set_nonblocking(true) {
            break Err(error);
        }
        match io::Read::read(&mut &*stream, &mut byte) {
            Ok(0) => break Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break Ok(()),
            Ok(_) if left > 0 => left -= 1,
            Ok(_) => break Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => break Err(error),
        }
    };
    let (gone, detail) = match outcome {
        Ok(()) => (true, "far end closed".to_owned()),
        Err(error) => (false, format!("far end still open: {error}")),
    };
    Check { what: what.into(), gone, detail }
}

fn wait_readable(fd: &OwnedFd, deadline: Duration) -> bool {
    let end = Instant::now() + deadline;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout =
            rustix::time::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}
