//! Looks at a running VMM again and again: does it still have what it had when it was let go, and no more?
//!
//! The attack: guest code that broke out into the VMM process. It is still behind the walls, so
//! what it does next shows from outside: it opens a file, makes a socket or a process, maps a program,
//! loses its filter. What is compared is what the same process had before its guest
//! executed one instruction ([`VmmWatch::begin`]), so a weaker jail is no breach.
//!
//! | seen | breach |
//! |---|---|
//! | another user, group, namespace, program | yes |
//! | more capabilities, fewer filters, no-new-privileges or seccomp gone, on any thread | yes |
//! | a child | yes |
//! | a descriptor of a file, folder, device or socket that it did not have | yes, seen twice |
//! | a descriptor of another kind, but those that a VMM makes while it runs | yes, seen twice |
//! | the root image open for writing | yes, of its own kind |
//! | an executable mapping of a file that it did not have, or more executable memory | yes, seen twice |
//! | threads, closed descriptors, other memory | no: a VMM does that |
//!
//! One whose first thread ended while others live can't be read, which is an error and no end.
//!
//! Not seen: what came and went between two looks. Called by the runtime's observing thread.

use super::measure::{Status, threads};
use crate::process::{ProcessId, proc_text};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Between the look that finds something new open or mapped and the one that confirms it: the C library may open a file
/// for an instant.
const CONFIRM: Duration = Duration::from_millis(5);
/// Readings of a process that can't be read and has not ended: a killed one is gone by then.
const TRIES: u32 = 50;
/// Kernel objects without a file that QEMU makes while its guest runs.
const MADE_WHILE_RUNNING: &[&str] =
    &["[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "[io_uring]", "kvm-vcpu", "kvm-vm"];
/// Namespaces by their names in `/proc/PID/ns`.
const NAMESPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];
/// Breaches that one look tells.
const MAX_BREACHES: usize = 16;

/// Something that a VMM must not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach {
    /// It is the root image, open for writing; else any other.
    pub writable_root: bool,
    /// Which process, descriptor or mapping.
    pub subject: String,
    /// What was seen.
    pub detail: String,
}

/// A VMM and what it may have.
#[derive(Debug)]
pub struct VmmWatch {
    process: ProcessId,
    /// Readable once all of its threads have ended.
    end: OwnedFd,
    root: Option<(u64, u64)>,
    allowed: Seen,
    /// As they were at the last look: what is the same file under the same number needs no second question.
    descriptors: BTreeMap<String, Descriptor>,
    buffer: Vec<u8>,
}

/// What is open under a number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Descriptor {
    file: (u64, u64),
    /// What it is.
    what: String,
    /// What that is called.
    name: String,
}

/// What one look sees.
#[derive(Clone, Debug)]
struct Seen {
    status: Status,
    namespaces: BTreeMap<&'static str, String>,
    program: (u64, u64),
    children: BTreeSet<i32>,
    /// By their numbers.
    descriptors: BTreeMap<String, Descriptor>,
    /// Numbers whose file is the root image, open for writing.
    writable_root: Vec<String>,
    /// Files that are mapped executable: device and inode to the name.
    mapped: BTreeMap<String, String>,
    /// Bytes of executable memory that no file is behind.
    executable_bytes: u64,
}

impl VmmWatch {
    /// Takes what the process has now as what it may have. `root` is the root image.
    ///
    /// # Errors
    /// The process is gone, or may not be looked at.
    pub fn begin(process: ProcessId, root: Option<&fs::File>) -> io::Result<VmmWatch> {
        let root = root.map(fs::File::metadata).transpose()?.map(|file| (file.dev(), file.ino()));
        let number = Pid::from_raw(process.pid).ok_or(io::ErrorKind::NotFound)?;
        let end = pidfd_open(number, PidfdFlags::empty())?;
        let mut buffer = Vec::new();
        let allowed = Seen::of(&process, root, &BTreeMap::new(), &mut buffer)?;
        // The descriptor is of this very process, and so is what was seen.
        if !process.exists() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let descriptors = allowed.descriptors.clone();
        Ok(VmmWatch { process, end, root, allowed, descriptors, buffer })
    }

    /// What is wrong now. Nothing, where the process has ended.
    ///
    /// # Errors
    /// It exists and can't be looked at.
    pub fn look(&mut self) -> io::Result<Vec<Breach>> {
        let first = match self.seen()? {
            Some(seen) => self.breaches(&seen),
            None => return Ok(Vec::new()),
        };
        if first.is_empty() {
            return Ok(first);
        }
        std::thread::sleep(CONFIRM);
        let Some(second) = self.seen()? else { return Ok(Vec::new()) };
        let second = self.breaches(&second);
        Ok(first.into_iter().filter(|breach| second.contains(breach)).take(MAX_BREACHES).collect())
    }

    fn seen(&mut self) -> io::Result<Option<Seen>> {
        let mut tries = TRIES;
        loop {
            let seen = Seen::of(&self.process, self.root, &self.descriptors, &mut self.buffer);
            // Of a process that is ending anything may be missing, and it ends in steps: its files go before it is a zombie.
            if self.has_ended()? {
                return Ok(None);
            }
            tries -= 1;
            match seen {
                Err(_) if tries > 0 => std::thread::sleep(CONFIRM),
                Err(error) => return Err(error),
                Ok(seen) => {
                    self.descriptors.clone_from(&seen.descriptors);
                    return Ok(Some(seen));
                }
            }
        }
    }

    /// Whether none of its threads lives: one whose first thread alone has ended goes on.
    fn has_ended(&self) -> io::Result<bool> {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(poll(&mut [PollFd::new(&self.end, PollFlags::IN)], Some(&now))? > 0)
    }

    fn breaches(&self, now: &Seen) -> Vec<Breach> {
        let allowed = &self.allowed;
        let process = || format!("VMM process {}", self.process.pid);
        let mut all = Vec::new();
        let mut breach = |subject: String, detail: String| {
            all.push(Breach { writable_root: false, subject, detail });
        };
        for weaker in now.status.weaker_than(&allowed.status) {
            breach(process(), weaker);
        }
        for (name, link) in &now.namespaces {
            if allowed.namespaces.get(name) != Some(link) {
                breach(process(), format!("its {name} namespace is another: {link}"));
            }
        }
        if now.program != allowed.program {
            breach(process(), "it executes another program".to_owned());
        }
        for child in now.children.difference(&allowed.children) {
            breach(process(), format!("it has a child, {child}"));
        }
        let had: BTreeSet<&String> = allowed.descriptors.values().map(|one| &one.what).collect();
        for (number, Descriptor { what, name, .. }) in &now.descriptors {
            if !had.contains(what) && !is_made_while_running(what) {
                breach(format!("descriptor {number}"), format!("{name} was not open when it was let go"));
            }
        }
        for (file, name) in now.mapped.iter().filter(|(file, _)| !allowed.mapped.contains_key(*file)) {
            let detail = format!("{name} ({file}) was not mapped when it was let go");
            breach("executable mapping".to_owned(), detail);
        }
        if now.executable_bytes > allowed.executable_bytes {
            let more = now.executable_bytes - allowed.executable_bytes;
            breach("executable memory".to_owned(), format!("{more} bytes more than when it was let go"));
        }
        for number in &now.writable_root {
            all.push(Breach {
                writable_root: true,
                subject: format!("descriptor {number}"),
                detail: "the VMM has the root image open for writing".to_owned(),
            });
        }
        all
    }
}

/// Of pipes and of what [`MADE_WHILE_RUNNING`] names every one is like another.
fn is_made_while_running(what: &str) -> bool {
    let object = what.strip_prefix("anon_inode:");
    what.starts_with("pipe:")
        || object.is_some_and(|object| MADE_WHILE_RUNNING.iter().any(|known| object.starts_with(known)))
}

impl Seen {
    fn of(
        process: &ProcessId,
        root: Option<(u64, u64)>,
        before: &BTreeMap<String, Descriptor>,
        buffer: &mut Vec<u8>,
    ) -> io::Result<Seen> {
        let base = PathBuf::from(format!("/proc/{}", process.pid));
        let mut namespaces = BTreeMap::new();
        for name in NAMESPACES {
            let link = fs::read_link(base.join("ns").join(name))?;
            namespaces.insert(name, link.to_string_lossy().into_owned());
        }
        let program = fs::metadata(base.join("exe"))?;
        let (mut descriptors, mut writable_root) = (BTreeMap::new(), Vec::new());
        for entry in fs::read_dir(base.join("fd"))? {
            let path = entry?.path();
            // One that was closed meanwhile.
            let Ok(file) = fs::metadata(&path) else { continue };
            let number = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let Some(open) = descriptor(&path, &file, before.get(&number)) else { continue };
            if root == Some(open.file) && is_writable(&path) {
                writable_root.push(number.clone());
            }
            descriptors.insert(number, open);
        }
        let (mapped, executable_bytes) = executable(proc_text(&base.join("maps"), buffer)?);
        let threads = threads(process)?;
        Ok(Seen {
            status: Status::of(&threads, buffer)?,
            namespaces,
            program: (program.dev(), program.ino()),
            children: children(&threads, buffer),
            descriptors,
            writable_root,
            mapped,
            executable_bytes,
        })
    }
}

/// What is open there. What it is called is asked again only if it is another file, or of those kernel objects
/// that all share one.
fn descriptor(path: &Path, file: &Metadata, before: Option<&Descriptor>) -> Option<Descriptor> {
    /// The type of a file in its mode; the objects have none.
    const TYPE: u32 = 0o170_000;
    let place = (file.dev(), file.ino());
    if let Some(before) = before.filter(|before| before.file == place && file.mode() & TYPE != 0) {
        return Some(before.clone());
    }
    let name = fs::read_link(path).ok()?.to_string_lossy().into_owned();
    // Names can be changed, also by whoever removes or replaces a file that is in use; the file stays.
    let what = match name.starts_with('/') {
        true => format!("file {}:{}", place.0, place.1),
        false => name.clone(),
    };
    Some(Descriptor { file: place, what, name })
}

/// Whether a descriptor may be written through, by the mode of its link in `/proc/PID/fd`; one that is gone may not.
fn is_writable(path: &Path) -> bool {
    const OWNER_WRITES: u32 = 0o200;
    fs::symlink_metadata(path).is_ok_and(|link| link.mode() & OWNER_WRITES != 0)
}

/// Children of all threads. A kernel that does not list them gives none: in the jail nothing can be started anyhow.
fn children(threads: &[PathBuf], buffer: &mut Vec<u8>) -> BTreeSet<i32> {
    let mut all = BTreeSet::new();
    for task in threads {
        let list = proc_text(&task.join("children"), buffer).unwrap_or_default();
        all.extend(list.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
    }
    all
}

/// Files that are mapped executable, by place, and how much executable memory has none.
fn executable(maps: &str) -> (BTreeMap<String, String>, u64) {
    let (mut files, mut bytes) = (BTreeMap::new(), 0);
    for line in maps.lines() {
        // range, permissions, offset, device, inode, name: proc(5)
        let mut words = line.split_ascii_whitespace();
        let (Some(range), Some(permissions)) = (words.next(), words.next()) else { continue };
        if !permissions.contains('x') {
            continue;
        }
        let (device, inode) = (words.nth(1).unwrap_or_default(), words.next().unwrap_or_default());
        let name = words.next().unwrap_or_default();
        if inode != "0" {
            files.insert(format!("{device} {inode}"), name.to_owned());
        } else if !name.starts_with("[v") {
            let (from, to) = range.split_once('-').unwrap_or_default();
            let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
            bytes += number(to).saturating_sub(number(from));
        }
    }
    (files, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command, Stdio};

    /// Stands for a VMM: a shell that does one thing after it was let go.
    struct StandIn {
        child: Child,
        watch: VmmWatch,
    }

    impl StandIn {
        fn let_go(then: &str, root: Option<&fs::File>) -> StandIn {
            let mut stand_in = StandIn::held("true", then, root);
            assert_eq!(stand_in.watch.look().unwrap(), [], "before it does anything");
            stand_in.go();
            stand_in
        }

        /// One that did `first` before it was looked at, and does `then` once it is let go.
        fn held(first: &str, then: &str, root: Option<&fs::File>) -> StandIn {
            StandIn::of("bash", &format!("{first}; echo up; read go; {then}; echo done; read end"), root)
        }

        /// What says that it is up.
        fn of(program: &str, script: &str, root: Option<&fs::File>) -> StandIn {
            let mut child = Command::new(program)
                .args(["-c", script])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .process_group(0)
                .spawn()
                .unwrap();
            assert_eq!(next_line(&mut child), "up\n");
            let watch = VmmWatch::begin(ProcessId::of(child.id() as i32).unwrap(), root).unwrap();
            StandIn { child, watch }
        }

        fn go(&mut self) {
            self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
            assert_eq!(next_line(&mut self.child), "done\n");
        }
    }

    /// It says one line and then waits, so that nothing is read beyond.
    fn next_line(child: &mut Child) -> String {
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line
    }

    impl Drop for StandIn {
        fn drop(&mut self) {
            // With what it started.
            let group = rustix::process::Pid::from_child(&self.child);
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            let _ = self.child.wait();
        }
    }

    fn breaches(then: &str) -> Vec<String> {
        let mut stand_in = StandIn::let_go(then, None);
        let found = stand_in.watch.look().unwrap();
        assert!(found.iter().all(|breach| !breach.writable_root));
        found.into_iter().map(|breach| format!("{}: {}", breach.subject, breach.detail)).collect()
    }

    /// A template or the VMM's program may be replaced while machines run from it.
    #[test]
    fn a_file_that_is_renamed_or_removed_is_the_same_file() {
        let dir = tempfile::tempdir().unwrap();
        let (held, other) = (dir.path().join("held"), dir.path().join("other"));
        fs::write(&held, "x").unwrap();
        let [first, then] = [8, 9].map(|number| format!("exec {number}<{}", held.display()));
        let mut stand_in = StandIn::held(&first, &then, None);
        fs::rename(&held, &other).unwrap();
        assert_eq!(stand_in.watch.look().unwrap(), []);
        fs::remove_file(&other).unwrap();
        assert_eq!(stand_in.watch.look().unwrap(), []);
        // The control: another file of the old name is another file.
        fs::write(&held, "y").unwrap();
        stand_in.go();
        assert_eq!(stand_in.watch.look().unwrap().len(), 1);
    }

    #[test]
    fn a_process_that_does_what_it_did_is_left_alone() {
        assert_eq!(breaches("true"), [""; 0]);
        assert_eq!(breaches("exec 8</dev/null; exec 8<&-"), [""; 0], "closed again");
    }

    #[test]
    fn a_file_a_socket_and_a_child_are_breaches() {
        let file = breaches("exec 9</etc/passwd");
        assert!(matches!(&file[..], [one] if one.starts_with("descriptor 9: /etc/passwd")), "{file:?}");
        let child = breaches("sleep 100 >/dev/null 2>&1 & disown");
        assert!(child.iter().any(|one| one.contains("it has a child")), "{child:?}");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let socket = breaches(&format!("exec 7<>/dev/tcp/127.0.0.1/{port}"));
        assert!(matches!(&socket[..], [one] if one.starts_with("descriptor 7: socket:")), "{socket:?}");
    }

    #[test]
    fn another_program_is_a_breach() {
        let found = {
            let mut stand_in = StandIn::let_go("echo done; exec sleep 100", None);
            let end = std::time::Instant::now() + Duration::from_secs(20);
            loop {
                let found = stand_in.watch.look().unwrap();
                // A look in the middle of the exec sees one of them alone.
                let mapped = found.iter().any(|breach| breach.subject == "executable mapping");
                let program = found.iter().any(|breach| breach.detail == "it executes another program");
                if mapped && program || std::time::Instant::now() > end {
                    break found;
                }
            }
        };
        let texts: Vec<&str> = found.iter().map(|breach| breach.detail.as_str()).collect();
        assert!(texts.contains(&"it executes another program"), "{texts:?}");
        assert!(found.iter().any(|breach| breach.subject == "executable mapping"), "{texts:?}");
    }

    #[test]
    fn the_root_image_open_for_writing_is_told_apart() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("root");
        fs::write(&path, b"image").unwrap();
        let root = fs::File::open(&path).unwrap();
        for (how, writable) in [("<", false), (">>", true), ("<>", true)] {
            let mut stand_in = StandIn::let_go(&format!("exec 9{how}{}", path.display()), Some(&root));
            let found = stand_in.watch.look().unwrap();
            assert_eq!(found.iter().any(|breach| breach.writable_root), writable, "{how} {found:?}");
        }
    }

    #[test]
    fn an_ended_process_has_no_breach() {
        let mut stand_in = StandIn::let_go("exec 9</etc/passwd", None);
        stand_in.child.kill().unwrap();
        while !stand_in.watch.process.is_zombie() {
            std::thread::yield_now();
        }
        assert_eq!(stand_in.watch.look().unwrap(), []);
        stand_in.child.wait().unwrap();
        assert_eq!(stand_in.watch.look().unwrap(), []);
    }

    /// Of such a process hardly anything can be read, while its other threads do what they like.
    #[test]
    fn a_process_whose_first_thread_alone_has_ended_is_read_again_and_again_and_then_an_error() {
        let script = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start()\n\
                      print('up', flush=True); input(); ctypes.CDLL(None).syscall(60, 0)";
        let mut stand_in = StandIn::of("python3", script, None);
        assert_eq!(stand_in.watch.look().unwrap(), []);
        stand_in.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        while !stand_in.watch.process.is_zombie() {
            std::thread::yield_now();
        }
        let begun = std::time::Instant::now();
        stand_in.watch.look().unwrap_err();
        assert!(begun.elapsed() >= CONFIRM * (TRIES - 1), "it was read {TRIES} times");
    }

    #[test]
    fn executable_memory_and_mappings_are_read_from_maps() {
        let maps = "55d0-55d1 r-xp 00000000 08:01 77 /usr/bin/qemu\n7f00-7f08 rwxp 00000000 00:00 0 \n\
                    7f10-7f11 r--p 00000000 08:01 78 /usr/lib/x.so\n7ffe-7fff r-xp 00000000 00:00 0 [vdso]\n\
                    ffff-fffff --xp 00000000 00:00 0 [vsyscall]\n";
        assert_eq!(
            executable(maps),
            (BTreeMap::from([("08:01 77".to_owned(), "/usr/bin/qemu".to_owned())]), 8)
        );
    }
}
