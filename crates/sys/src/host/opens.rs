//! The files that a jailed program opens: each is asked for, while somebody answers.
//!
//! ```text
//!  program ──openat(path)──▶ kernel ──asks──▶ OpenService ─ any other path ─▶ "go on": the jail decides
//!                                                  └─ the gift's path ─▶ a descriptor of ours, as it is open here
//!  service ended: openat ─▶ ENOSYS, for good
//! ```
//! What it is for: a VMM that insists on opening its memory file for writing gets
//! a descriptor that can only be read; and one whose guest runs opens nothing more.
//! What it guarantees: once the service has ended, or its thread or process is
//! gone, no call of the program opens a file by name. The gift is what was handed
//! in here, whatever lies at its path in the jail.
//! What it does not: judge the other paths. Going on means that the kernel reads
//! the path again, which the program may have changed meanwhile; the jail's root
//! is what holds, not this.
//! Who may call: `hotcell-vm`.

use rustix::event::{PollFd, PollFlags, poll};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, PipeWriter};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::thread::JoinHandle;

// linux/seccomp.h: _IOWR('!', 0, struct seccomp_notif), _IOWR('!', 1, struct seccomp_notif_resp),
// _IOW('!', 3, struct seccomp_notif_addfd).
const NOTIF_RECV: libc::Ioctl = request(3, size_of::<libc::seccomp_notif>(), 0);
const NOTIF_SEND: libc::Ioctl = request(3, size_of::<libc::seccomp_notif_resp>(), 1);
const NOTIF_ADDFD: libc::Ioctl = request(1, size_of::<libc::seccomp_notif_addfd>(), 3);
// linux/seccomp.h: _IOW('!', 4, __u64).
const NOTIF_SET_FLAGS: libc::Ioctl = request(1, size_of::<u64>(), 4);
/// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`.
const WAKE_ON_THE_SAME_CPU: u64 = 1;
/// `SECCOMP_USER_NOTIF_FLAG_CONTINUE`.
const GO_ON: u32 = 1;

const fn request(direction: u32, size: usize, number: u32) -> libc::Ioctl {
    (direction << 30 | (size as u32) << 16 | (b'!' as u32) << 8 | number) as libc::Ioctl
}

/// The opens of one program, to be answered. Dropped, there are none.
#[derive(Debug)]
pub struct Opens {
    listener: OwnedFd,
}

/// A file that is given for a path.
#[derive(Debug)]
pub struct Gift {
    /// The path that the program names, as it opens it for reading and writing: exactly these bytes. It need not exist.
    pub path: CString,
    /// The open file that it gets, with the rights that it was opened with here.
    pub file: File,
}

/// Answers on a thread of its own.
#[derive(Debug)]
pub struct OpenService {
    stop: PipeWriter,
    thread: JoinHandle<()>,
}

impl Opens {
    pub(super) fn new(listener: OwnedFd) -> Opens {
        // Who asks waits for the answer, so that there is nothing to gain from a second processor. A VMM opens some
        // hundred files as it starts. Kernels before 6.6 don't know it.
        // SAFETY: the request takes a number and touches no memory.
        let _ = unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_SET_FLAGS, WAKE_ON_THE_SAME_CPU) };
        Opens { listener }
    }

    /// Answers one call. `Ok(false)`: nobody is left who could ask.
    fn answer(&self, gift: Option<&Gift>) -> io::Result<bool> {
        // SAFETY: plain data for which all zeroes is a valid value; the kernel wants it zeroed.
        let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the request writes one `seccomp_notif`, which `asked` is.
        let got = unsafe { libc::ioctl(self.listener.as_raw_fd(), NOTIF_RECV, &raw mut asked) };
        if got < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                // Whoever asked has been killed meanwhile.
                Some(libc::ENOENT | libc::EINTR) => Ok(true),
                _ => Err(error),
            };
        }
        let mut answer = libc::seccomp_notif_resp { id: asked.id, val: 0, error: 0, flags: GO_ON };
        if let Some(gift) = gift.filter(|gift| names(&asked, gift)) {
            answer.flags = 0;
            let add = libc::seccomp_notif_addfd {
                id: asked.id,
                flags: 0,
                srcfd: gift.file.as_raw_fd() as u32,
                newfd: 0,
                newfd_flags: libc::O_CLOEXEC as u32,
            };
            // SAFETY: the request reads one `seccomp_notif_addfd`, which `add` is. The kernel refuses an id whose asker is gone.
            match unsafe { libc::ioctl(self.listener.as_raw_fd(), NOTIF_ADDFD, &raw const add) } {
                number @ 0.. => answer.val = number.into(),
                _ => answer.error = -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
            }
        }
        // SAFETY: the request reads one `seccomp_notif_resp`, which `answer` is.
        let sent = unsafe { libc::ioctl(self.listener.as_raw_fd(), NOTIF_SEND, &raw mut answer) };
        let error = io::Error::last_os_error();
        if sent < 0 && error.raw_os_error() != Some(libc::ENOENT) { Err(error) } else { Ok(true) }
    }
}

/// Whether an `openat` asks for the gift. What can't be read is another path.
fn names(asked: &libc::seccomp_notif, gift: &Gift) -> bool {
    if libc::c_long::from(asked.data.nr) != libc::SYS_openat {
        return false;
    }
    let [_, path, flags, ..] = asked.data.args;
    if flags as libc::c_int & libc::O_ACCMODE != libc::O_RDWR {
        return false;
    }
    let wanted = gift.path.as_bytes_with_nul();
    let mut found = vec![0; wanted.len()];
    let memory = File::open(format!("/proc/{}/mem", asked.pid));
    memory.and_then(|memory| memory.read_exact_at(&mut found, path)).is_ok() && found == wanted
}

impl OpenService {
    /// Begins to answer.
    ///
    /// # Errors
    /// No thread or pipe is to be had; the program's opens then fail.
    pub fn start(opens: Opens, gift: Option<Gift>) -> io::Result<OpenService> {
        let (stopped, stop) = io::pipe()?;
        let thread = std::thread::Builder::new().name("opens".into()).spawn(move || {
            loop {
                let mut ready = [
                    PollFd::new(&opens.listener, PollFlags::IN),
                    PollFd::from_borrowed_fd(stopped.as_fd(), PollFlags::IN),
                ];
                match poll(&mut ready, None) {
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(_) => return,
                    Ok(_) => {}
                }
                let [asked, stopped] = ready.map(|one| one.revents());
                // The listener hangs up when the last thread of the program has ended.
                if !stopped.is_empty() || !asked.contains(PollFlags::IN) {
                    return;
                }
                if !matches!(opens.answer(gift.as_ref()), Ok(true)) {
                    return;
                }
            }
        })?;
        Ok(OpenService { stop, thread })
    }

    /// Stops answering: from here on the program opens nothing by name.
    pub fn end(self) {
        drop(self.stop);
        // It does not panic; the listener is gone with the thread either way.
        let _ = self.thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{JailPlan, spawn_jailed, vmm_filter};
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};

    fn shell(script: &str) -> (crate::host::JailedChild, Opens) {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let plan = JailPlan { filter: Some(vmm_filter().unwrap()), ..JailPlan::default() };
        let mut child = spawn_jailed(command, plan).unwrap();
        let opens = child.opens.take().unwrap();
        (child, opens)
    }

    fn said(child: &mut crate::host::JailedChild) -> Vec<String> {
        BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap).collect()
    }

    #[test]
    fn a_gift_is_opened_as_it_is_open_here_whatever_was_asked_for() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"sealed\n").unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        // Opened for reading and writing, as a VMM does it: written where nobody stands between.
        let script = format!(
            "exec 3<>/hotcell/none || exit 3; read line <&3; echo $line; echo x >&3 || echo refused; cat {path}"
        );
        let gift = Gift { path: c"/hotcell/none".into(), file: File::open(&path).unwrap() };
        let (mut child, opens) = shell(&script);
        let service = OpenService::start(opens, Some(gift)).unwrap();
        assert_eq!(said(&mut child), ["sealed", "refused", "sealed"]);
        child.wait().unwrap();
        service.end();
        let gift = Gift {
            path: c"/hotcell/none".into(),
            file: File::options().read(true).write(true).open(&path).unwrap(),
        };
        let (mut child, opens) = shell(&script);
        let service = OpenService::start(opens, Some(gift)).unwrap();
        assert_eq!(
            said(&mut child),
            ["sealed", "sealed", "x"],
            "the control: a descriptor that can be written"
        );
        child.wait().unwrap();
        service.end();
    }

    #[test]
    fn once_nobody_answers_nothing_is_opened() {
        let (go, mut let_go) = io::pipe().unwrap();
        let mut command = Command::new("/bin/sh");
        let script = "echo up; read go; (: </dev/null) && echo opened || echo refused";
        command.args(["-c", script]).stdin(go).stdout(Stdio::piped()).stderr(Stdio::null());
        let plan = JailPlan { filter: Some(vmm_filter().unwrap()), ..JailPlan::default() };
        let mut child = spawn_jailed(command, plan).unwrap();
        let service = OpenService::start(child.opens.take().unwrap(), None).unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "up", "what is answered is opened");
        service.end();
        let_go.write_all(b"\n").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "refused");
        child.wait().unwrap();
    }
}
