//! A machine saved, and a machine that goes on from there.
//!
//! ```text
//!  template:  boots like any, memory shared ─▶ the guest opens its port ─▶ quiet ─▶ stop ─▶ state out, RAM and disk copied ─▶ destroyed
//!  clone:     made stopped, memory private from the template's file ─▶ state in ─▶ inspected like any machine ─▶ cont
//! ```
//! QEMU's migration carries the devices; memory that is shared is left out of it
//! (`x-ignore-shared`) and copied by us, without the pages that are zero. Both ways go through a
//! socket pair, so that the VMM opens no file, and a clone is given bytes that were
//! hashed in this process a moment before.
//! Nothing that a run brought ever was in a machine that is saved: the guest's init waits for the
//! frame that would make it a run's.

use super::args::CHANNEL_ID;
use super::machine::{CONTROL_DEADLINE, QemuVm};
use super::qmp::{Qmp, QmpError};
use crate::process::ProcessId;
use crate::template::{Part, Saved, Template, TemplateError, at, copy_blocks, write_whole};
use hotcell_sys::host::process_time;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Largest state that is taken, bytes; a microvm's has some 64 KiB.
const MAX_STATE: usize = 16 << 20;
/// A guest that waits uses next to no processor time: at most this in [`QUIET_FOR`].
const QUIET: Duration = Duration::from_millis(10);
const QUIET_FOR: Duration = Duration::from_millis(100);
/// After this long it is saved also if it is not quiet: the workings of its kernel differ in nothing that matters.
const QUIET_PATIENCE: Duration = Duration::from_secs(5);
/// How often a machine that is being saved is looked at.
const STEP: Duration = Duration::from_millis(5);

fn not_saved(error: impl std::fmt::Display) -> TemplateError {
    TemplateError::Save(error.to_string())
}

/// Our end of the pair that the state goes through; the VMM knows the other as `state`.
fn state_socket(qmp: &mut Qmp) -> Result<UnixStream, QmpError> {
    let on = |name: &str| json!({"capability": name, "state": true});
    let capabilities = json!({"capabilities": [on("x-ignore-shared"), on("events")]});
    qmp.call("migrate-set-capabilities", capabilities)?;
    let (ours, theirs) = UnixStream::pair()?;
    qmp.give("state", theirs.as_fd())?;
    Ok(ours)
}

impl QemuVm {
    /// Waits until the guest waits for its host, stops it, and writes what it is into `dir`.
    pub(super) fn save(
        &mut self,
        dir: &Path,
        tsc_khz: Option<u32>,
        boot_deadline: Duration,
    ) -> Result<Saved, TemplateError> {
        let workspace = self.registration.dir().join("workspace.img");
        let process = self.facts.process.clone();
        let deadline = Instant::now() + boot_deadline;
        let opened = |data: &Value| data["id"] == CHANNEL_ID && data["open"] == true;
        let words =
            || format!("its guest was not ready in time. Its last words:\n{}", self.console.last_lines(15));
        let Some(qmp) = self.qmp.as_mut() else { return Err(not_saved("it has no control channel")) };
        match qmp.wait_event("VSERPORT_CHANGE", opened, deadline) {
            Ok(_) => {}
            Err(QmpError::Io(error)) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(not_saved(words()));
            }
            Err(error) => {
                return Err(not_saved(format!("{error}. Its last words:\n{}", self.console.last_lines(15))));
            }
        }
        wait_until_quiet(&process);
        let state = state_of(qmp).map_err(not_saved)?;
        let ram = memory_of(&process).map_err(not_saved)?;
        let part = |name: &str, copy: &dyn Fn(&Path) -> io::Result<Part>| {
            let path = dir.join(name);
            copy(&path).map_err(at(&path))
        };
        let disk = File::open(&workspace).map_err(at(&workspace))?;
        Ok(Saved {
            ram: part("ram", &|path| copy_blocks(&ram, path))?,
            state: part("state", &|path| write_whole(&state, path))?,
            disk: part("disk", &|path| copy_blocks(&disk, path))?,
            tsc_khz,
        })
    }
}

/// The guest's kernel has some work left when its init waits; what is done now need not be done in each clone.
fn wait_until_quiet(process: &ProcessId) {
    let ran = || process_time(process.pid).ok().map(Duration::from_nanos);
    let end = Instant::now() + QUIET_PATIENCE;
    let mut before = ran();
    while Instant::now() < end {
        std::thread::sleep(QUIET_FOR);
        let now = ran();
        if before.zip(now).is_none_or(|(before, now)| now.saturating_sub(before) <= QUIET) {
            return;
        }
        before = now;
    }
}

/// Stops the machine and takes its devices' state.
fn state_of(qmp: &mut Qmp) -> Result<Vec<u8>, QmpError> {
    qmp.call("stop", json!({}))?;
    let mut ours = state_socket(qmp)?;
    qmp.call("migrate", json!({"uri": "fd:state"}))?;
    ours.set_read_timeout(Some(STEP))?;
    let deadline = Instant::now() + CONTROL_DEADLINE;
    let (mut state, mut chunk) = (Vec::new(), vec![0; 1 << 16]);
    let mut completed = false;
    loop {
        match ours.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => state.extend_from_slice(chunk.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // All that was written before it said that it is done has come.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && completed => break,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        let answer = qmp.call("query-migrate", json!({}))?;
        match answer["status"].as_str() {
            Some("completed") => completed = true,
            Some("failed" | "cancelled") => return Err(QmpError::Protocol("the saving of its state".into())),
            _ => {}
        }
        if state.len() > MAX_STATE || Instant::now() > deadline {
            return Err(QmpError::Protocol("the saving of its state: it does not end".into()));
        }
    }
    if completed || qmp.call("query-migrate", json!({}))?["status"] == "completed" {
        return Ok(state);
    }
    Err(QmpError::Protocol("the saving of its state".into()))
}

/// The memory file of a machine that was made to be saved; it has no name but in the VMM.
fn memory_of(process: &ProcessId) -> io::Result<File> {
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid))? {
        let path = entry?.path();
        let target = fs::read_link(&path)?;
        if target.to_string_lossy().starts_with("/memfd:memory-backend-memfd") {
            return File::open(path);
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "the VMM has no memory file"))
}

/// Gives a machine that was made to take one the template's state. It stays stopped.
pub(super) fn restore(qmp: &mut Qmp, template: &Template) -> Result<(), QmpError> {
    let mut ours = state_socket(qmp)?;
    qmp.call("migrate-incoming", json!({"uri": "fd:state"}))?;
    ours.set_write_timeout(Some(CONTROL_DEADLINE))?;
    ours.write_all(template.state())?;
    drop(ours);
    let over = |data: &Value| matches!(data["status"].as_str(), Some("completed" | "failed" | "cancelled"));
    let ended = qmp.wait_event("MIGRATION", over, Instant::now() + CONTROL_DEADLINE)?;
    if ended["status"] == "completed" {
        return Ok(());
    }
    Err(QmpError::Protocol("the template's state".into()))
}
