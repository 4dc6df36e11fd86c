//! What the host sees in the guest's memory kills while the command still runs.
//!
//! Most of these attacks need a guest whose own walls are down. They run with an initramfs
//! that only these tests build: `attacks/accomplice.c` as `/init`, a process with every
//! capability beside Hotcell's own init, and with modules left loadable. The command gives it
//! orders; what is judged is what the host read from outside. The honest twin of each gives
//! none, in the same machine.

use crate::attacks::built;
use crate::harness::{Job, SOON, Slot, home, verify, vmms_of, warm_up};
use crate::machine::{GUEST, Sink, drafted, kernel, runtime, store};
use hotcell_ledger::Digest;
use hotcell_policy::{PolicyDraft, RunDraft};
use hotcell_runtime::{ExecIo, ExecRequest, MeasuredBoot, RunReport, Runtime, Stdin};
use hotcell_vm::TemplateStore;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A file of a newc archive; the kernel takes one archive behind another, and the last of a name.
fn entry(name: &str, mode: u32, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let fields = [0, mode, 0, 0, 1, 0, bytes.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
    out.extend_from_slice(b"070701");
    fields.iter().for_each(|field| write!(out, "{field:08x}").unwrap());
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(bytes);
    out.resize(out.len().next_multiple_of(4), 0);
    out
}

pub(crate) const EXECUTABLE: u32 = 0o100_755;
const FILE: u32 = 0o100_644;

/// What the exit function of the module does.
#[derive(Clone, Copy)]
pub(crate) enum Exit {
    /// Changes one byte of padding between two functions of the kernel's text.
    Text,
    /// Changes the last byte of the interrupt table, which the processor does not use.
    Interrupts,
    /// Goes round and round, with interrupts off.
    Spin,
    /// Takes the newest task off the list of tasks; it goes on running.
    Hide(Listed),
}

/// Where a kernel has its list of tasks.
#[derive(Clone, Copy)]
pub(crate) struct Listed {
    /// From where system calls enter to the list's link to its last node.
    last: i32,
}

impl Listed {
    /// By the profile that a run of this kernel left in the cache.
    pub(crate) fn of(kernel: &Path) -> Listed {
        let digest = Digest::of(&fs::read(kernel).unwrap()).to_hex();
        let kept = || {
            let entries = fs::read_dir(home().join("cache/kernel-profiles")).ok()?;
            let mut entries = entries.map(|entry| entry.unwrap().path());
            entries.find(|path| path.to_string_lossy().ends_with(&format!("-{digest}.json")))
        };
        if kept().is_none() {
            assert_eq!(Job::new(["true"]).start_cold().wait().code, Some(0));
        }
        // A digest of 32 bytes, then the profile.
        let profile: serde_json::Value =
            serde_json::from_slice(&fs::read(kept().unwrap()).unwrap()[32..]).unwrap();
        let number = |path: &str| profile.pointer(path).unwrap().as_u64().unwrap();
        let last = number("/symbols/init_task") + number("/offsets/task_tasks") + 8;
        Listed { last: i32::try_from(last as i64 - number("/symbols/entry_syscall") as i64).unwrap() }
    }
}

impl Exit {
    /// Machine code of at most 48 bytes, in place of the function's own.
    fn code(self) -> Vec<u8> {
        // mov rcx,cr0; mov rdx,rcx; btr rdx,16; mov cr0,rdx, interrupts off: writes to read-only pages go through.
        let open = [0xfa, 0x0f, 0x20, 0xc1, 0x48, 0x89, 0xca, 0x48, 0x0f, 0xba, 0xf2, 0x10, 0x0f, 0x22, 0xc2];
        let close = [0x0f, 0x22, 0xc1, 0xfb, 0xc3];
        let (find, change): (&[u8], &[u8]) = match self {
            // ecx = MSR_LSTAR; rdmsr; cdqe; rcx = [rax + last], the node; rdx, rsi = its neighbours; these are joined,
            // and the node leads to itself; ret
            Exit::Hide(Listed { last }) => {
                let [a, b, c, d] = last.to_le_bytes();
                return vec![
                    0xb9, 0x82, 0x00, 0x00, 0xc0, 0x0f, 0x32, 0x48, 0x98, 0x48, 0x8b, 0x88, a, b, c, d, 0x48,
                    0x8b, 0x11, 0x48, 0x8b, 0x71, 0x08, 0x48, 0x89, 0x16, 0x48, 0x89, 0x72, 0x08, 0x48, 0x89,
                    0x09, 0x48, 0x89, 0x49, 0x08, 0xc3,
                ];
            }
            // From the return address on: four bytes of 0xcc, of which the second becomes 0x90.
            Exit::Text => (
                &[
                    0x48, 0x8b, 0x04, 0x24, 0x81, 0x38, 0xcc, 0xcc, 0xcc, 0xcc, 0x74, 0x05, 0x48, 0xff, 0xc0,
                    0xeb, 0xf3,
                ],
                &[0xc6, 0x40, 0x01, 0x90],
            ),
            // sub rsp,16; sidt [rsp]; mov rax,[rsp+2]; add rsp,16; xor byte [rax+0xffc],1
            Exit::Interrupts => (
                &[
                    0x48, 0x83, 0xec, 0x10, 0x0f, 0x01, 0x0c, 0x24, 0x48, 0x8b, 0x44, 0x24, 0x02, 0x48, 0x83,
                    0xc4, 0x10,
                ],
                &[0x80, 0xb0, 0xfc, 0x0f, 0x00, 0x00, 0x01],
            ),
            // jmp to itself
            Exit::Spin => (&[], &[0xeb, 0xfe]),
        };
        [find, &open, change, &close].concat()
    }
}

/// The kernel's own `virtio_console` under another name, without its init function and with another exit function.
fn attack_module(original: &[u8], exit: Exit) -> Vec<u8> {
    // Nobody signs what a test makes, and the kernel takes modules without a signature.
    let unsigned = original.strip_suffix(b"~Module signature appended~\n").unwrap_or(original);
    let mut bytes = unsigned.to_vec();
    let number = |bytes: &[u8], at: usize, length: usize| {
        bytes[at..at + length].iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte)) as usize
    };
    let (table, count) = (number(&bytes, 40, 8), number(&bytes, 60, 2));
    let section = |bytes: &[u8], index: usize| {
        let at = table + index * 64;
        (number(bytes, at, 4), number(bytes, at + 24, 8), number(bytes, at + 32, 8))
    };
    let (_, names, _) = section(&bytes, number(&bytes, 62, 2));
    let find = |bytes: &[u8], name: &str| {
        (0..count)
            .map(|index| section(bytes, index))
            .find(|(at, ..)| bytes[names + at..].starts_with(format!("{name}\0").as_bytes()))
            .map(|(_, offset, length)| (offset, length))
            .unwrap_or_else(|| panic!("the module has no {name}"))
    };
    let (this, _) = find(&bytes, ".gnu.linkonce.this_module");
    let name = bytes[this..this + 128].windows(15).position(|window| window == b"virtio_console\0").unwrap();
    bytes[this + name..][..14].copy_from_slice(b"hotcell_attack");
    // Relocations that are dropped: the pointer to the init function, which is the first, and those of the code that goes.
    let drop_relocation = |bytes: &mut [u8], at: usize| bytes[at + 8..at + 16].fill(0);
    let (relocations, _) = find(&bytes, ".rela.gnu.linkonce.this_module");
    drop_relocation(&mut bytes, relocations);
    let (code, room) = find(&bytes, ".exit.text");
    let (relocations, length) = find(&bytes, ".rela.exit.text");
    for at in (relocations..relocations + length).step_by(24) {
        // The first is the call that tracing is made of; it stays.
        if number(&bytes, at, 8) > 5 {
            drop_relocation(&mut bytes, at);
        }
    }
    let new = exit.code();
    assert!(5 + new.len() <= room, "{} bytes do not fit into {room}", new.len());
    bytes[code + 5..code + 5 + new.len()].copy_from_slice(&new);
    bytes
}

/// What is added to the test's initramfs.
#[derive(Clone, Copy)]
pub(crate) enum Module {
    /// It can be loaded by an order.
    AtHand,
    /// It is among those that the init loads.
    Loaded(Exit),
    /// The kernel's own driver of virtual network devices is among those.
    Tun,
}

/// The driver out of the package that the guest's kernel came from.
fn tun() -> Vec<u8> {
    let facts = fs::read(home().join("cache/kernels/cloud/kernel.json")).unwrap();
    let facts: serde_json::Value = serde_json::from_slice(&facts).unwrap();
    let kept = home().join(format!("tun-{}.ko", facts["release"].as_str().unwrap()));
    if !kept.exists() {
        let dir = tempfile::tempdir().unwrap();
        let script = "apt-get -q download \"$1\" >&2 && dpkg-deb --fsys-tarfile ./*.deb | tar -xf - --wildcards '*/drivers/net/tun.ko*'
            file=$(find . -name 'tun.ko*') && case $file in *.xz) xz -d \"$file\";; *.zst) zstd -qd \"$file\";; esac";
        let mut command = std::process::Command::new("sh");
        let package = facts["package"].as_str().unwrap();
        let status = command.args(["-ec", script, "sh", package]).current_dir(dir.path()).status().unwrap();
        assert!(status.success(), "the kernel's package is not to be had");
        let mut found = Vec::new();
        let mut folders = vec![dir.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for one in fs::read_dir(folder).unwrap().map(|one| one.unwrap().path()) {
                if one.is_dir() {
                    folders.push(one);
                } else if one.file_name().is_some_and(|name| name == "tun.ko") {
                    found = fs::read(&one).unwrap();
                }
            }
        }
        assert!(!found.is_empty(), "the package has no tun.ko");
        let half = kept.with_extension(format!("{}", std::process::id()));
        fs::write(&half, found).unwrap();
        fs::rename(&half, &kept).unwrap();
    }
    fs::read(kept).unwrap()
}

/// A machine with an accomplice, over the image `busybox`.
pub(crate) struct Taken {
    pub(crate) runtime: Runtime,
    pub(crate) boot: MeasuredBoot,
    pub(crate) draft: RunDraft,
    pub(crate) out: tempfile::TempDir,
    _slot: Slot,
}

impl Taken {
    pub(crate) fn new(module: Module) -> Taken {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // It takes a slot of its own.
        warm_up();
        let slot = Slot::take();
        let out = tempfile::tempdir().unwrap();
        let (store, kernel) = (store(), kernel());
        let image = store.image("busybox", &mut |_| {}).unwrap();
        let mut archive = fs::read(store.initramfs(&kernel).unwrap().path).unwrap();
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(entry("init", EXECUTABLE, &built("accomplice.c")));
        archive.extend(entry("hotcell-init", EXECUTABLE, &lenient(GUEST.init)));
        let modules = kernel.modules().unwrap();
        let console = modules.iter().find(|module| module.name == "virtio_console").unwrap();
        match module {
            Module::AtHand => {
                archive.extend(entry("attack.ko", FILE, &attack_module(&console.bytes, Exit::Text)));
            }
            Module::Loaded(_) | Module::Tun => {
                let bytes = match module {
                    Module::Loaded(exit) => attack_module(&console.bytes, exit),
                    _ => tun(),
                };
                let names = modules.iter().map(|module| format!("{}.ko\n", module.name));
                let order: String = names.chain(["attack.ko\n".to_owned()]).collect();
                archive.extend(entry("modules/attack.ko", FILE, &bytes));
                archive.extend(entry("modules/order", FILE, order.as_bytes()));
            }
        }
        archive.extend(entry("TRAILER!!!", 0, &[]));
        let initramfs = out.path().join("initramfs");
        fs::write(&initramfs, archive).unwrap();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let run_id = format!("test-taken-{}-{count}", std::process::id());
        let mut policy = PolicyDraft::default();
        policy.capabilities.spawn = true;
        let (draft, boot) = drafted(run_id, (&image, image.manifest.clone()), policy, Some(&initramfs));
        let runtime = runtime(&out.path().join("runs"), Duration::from_secs(120));
        Taken { runtime, boot, draft, out, _slot: slot }
    }

    /// Goes on from a template, as runs do; without this the machine boots.
    pub(crate) fn cloned(mut self) -> Taken {
        let store = TemplateStore::in_cache(&home().join("cache"));
        let spec = self.draft.clone().seal().unwrap();
        self.boot.template = self.runtime.template(&store, &spec, &self.boot, &mut |_| {}).unwrap();
        assert!(self.boot.template.is_some());
        self
    }

    /// Runs a command; gives the report, what it said, and whether it came to its end.
    pub(crate) fn run(self, script: &str) -> Seen {
        self.run_and(script, || ())
    }

    /// As [`run`](Taken::run), and does something else once the command has said its first word.
    pub(crate) fn run_and(self, script: &str, then: impl FnOnce() + Send + 'static) -> Seen {
        let run_id = self.draft.run_id.clone();
        let run = self.runtime.start(self.draft.seal().unwrap(), self.boot);
        let said = Sink::default();
        let (stdin, go) = io::pipe().unwrap();
        let go = Box::new(move || {
            // A command that reads nothing has no use for it.
            let _ = (&go).write_all(b"go\n");
            then();
        });
        let stdout = Box::new(Answering { said: said.clone(), go: Some(go) });
        let io = ExecIo { stdin: Stdin::Descriptor(stdin.into()), stdout: Some(stdout), ..ExecIo::default() };
        let exec = run.exec(ExecRequest::new(["/bin/sh", "-c", script]), io);
        let ended = exec.wait();
        let begun = Instant::now();
        let report = run.finish();
        assert!(begun.elapsed() < SOON, "the end took {:?}", begun.elapsed());
        assert!(vmms_of(&run_id).is_empty(), "a VMM is left");
        assert!(report.teardown.verified, "{report:?}");
        let bundle = report.bundle.clone().unwrap();
        assert_eq!(verify(&bundle), 0, "the record of {report:?}");
        let said = said.text();
        let console = fs::read_to_string(bundle.join("console.log")).unwrap_or_default();
        Seen { report, said, console, code: ended.ok().map(|result| result.code), _out: self.out }
    }
}

/// The init, with two kernel settings under names that do not exist: it goes on without, as for kernels that lack them.
fn lenient(init: &[u8]) -> Vec<u8> {
    let mut bytes = init.to_vec();
    for (name, other) in [
        (&b"kernel/modules_disabled"[..], &b"kernel/modules_undecided"[..]),
        (b"kernel/yama/ptrace_scope", b"kernel/yama/ptrace_scopf"),
    ] {
        let mut found = 0;
        for at in 0..bytes.len() - name.len() {
            if bytes[at..].starts_with(name) {
                bytes[at..at + name.len()].copy_from_slice(&other[..name.len()]);
                found += 1;
            }
        }
        assert_eq!(found, 1, "the init has each setting once");
    }
    bytes
}

pub(crate) struct Seen {
    pub(crate) report: RunReport,
    pub(crate) said: String,
    pub(crate) console: String,
    /// The command's own end; `None` where it was running still.
    pub(crate) code: Option<i32>,
    _out: tempfile::TempDir,
}

impl std::fmt::Debug for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}\nsaid {:?}, code {:?}, console:\n{}", self.report, self.said, self.code, self.console)
    }
}

/// Collects what a command says, and answers the first of it: what it said has come then, whatever happens next.
struct Answering {
    said: Sink,
    go: Option<Box<dyn FnOnce() + Send>>,
}

impl Write for Answering {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.said.write(bytes)?;
        if let Some(go) = self.go.take() {
            go();
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Gives the order once, when its first word has come, then goes on for longer than anybody waits.
pub(crate) fn order(name: &str) -> String {
    format!("echo working; read go; echo {name} >/tmp/order; sleep 60; echo UNSEEN")
}

/// Killed for this reason, while the command ran.
#[track_caller]
pub(crate) fn assert_seen(seen: &Seen, reason: &str) {
    assert_eq!(seen.report.verdict.as_str(), "KILLED", "{seen:?}");
    assert_eq!(seen.report.kill.reasons, [reason], "{seen:?}");
    assert!(seen.report.kill.absolute, "{seen:?}");
    assert_eq!((seen.said.as_str(), seen.code), ("working\n", None), "the command was running: {seen:?}");
}

/// The same machine without the order is let be.
#[track_caller]
pub(crate) fn assert_spared(seen: &Seen) {
    assert_eq!((seen.report.verdict.as_str(), seen.code), ("ALLOWED", Some(0)), "{seen:?}");
}

pub(crate) const HONEST: &str = "echo working; sleep 2";

#[test]
fn a_module_that_is_loaded_later_is_seen() {
    assert_seen(&Taken::new(Module::AtHand).run(&order("load")), "module_loaded");
    assert_spared(&Taken::new(Module::AtHand).run(HONEST));
}

#[test]
fn kernel_text_that_is_changed_is_seen() {
    assert_seen(&Taken::new(Module::Loaded(Exit::Text)).run(&order("unload")), "kernel_text_changed");
    // Of a clone the host's kernel tells which pages were written to.
    assert_seen(
        &Taken::new(Module::Loaded(Exit::Text)).cloned().run(&order("unload")),
        "kernel_text_changed",
    );
    // The twin has the module too, loaded by its init before it said ready.
    assert_spared(&Taken::new(Module::Loaded(Exit::Text)).cloned().run(HONEST));
}

#[test]
fn a_process_that_is_hidden_from_the_list_is_seen() {
    let hide = Module::Loaded(Exit::Hide(Listed::of(&kernel().vmlinuz())));
    let seen = Taken::new(hide).cloned().run(&order("unload"));
    assert_seen(&seen, "hidden_process");
    assert_spared(&Taken::new(hide).cloned().run(HONEST));
}

#[test]
fn a_mount_that_appears_is_seen() {
    assert_seen(&Taken::new(Module::AtHand).cloned().run(&order("mount")), "unexplained_mount");
}

#[test]
fn a_mount_that_loses_a_restriction_is_seen() {
    assert_seen(&Taken::new(Module::AtHand).cloned().run(&order("executable")), "unexplained_mount");
}

#[test]
fn a_process_in_a_namespace_of_its_own_is_seen() {
    assert_seen(&Taken::new(Module::AtHand).cloned().run(&order("namespace")), "unexplained_namespace");
    assert_spared(&Taken::new(Module::AtHand).cloned().run(HONEST));
}

#[test]
fn an_interrupt_table_that_is_changed_is_seen() {
    assert_seen(&Taken::new(Module::Loaded(Exit::Interrupts)).run(&order("unload")), "kernel_table_changed");
    assert_spared(&Taken::new(Module::Loaded(Exit::Interrupts)).run(HONEST));
}

#[test]
fn a_root_that_is_mounted_writable_is_seen() {
    assert_seen(&Taken::new(Module::AtHand).run(&order("remount")), "writable_root");
}

#[test]
fn a_network_device_that_appears_is_seen() {
    assert_seen(&Taken::new(Module::Tun).run(&order("tun")), "network_device");
    // The twin has the driver, and no device.
    assert_spared(&Taken::new(Module::Tun).run(HONEST));
}

#[test]
fn a_root_that_stays_read_only_and_a_process_of_an_ordinary_user_are_let_be() {
    // The twins of the attack before and the one after, in one machine.
    let script = "echo rebind >/tmp/order; while [ -e /tmp/order ]; do sleep 0.1; done
        echo agent >/tmp/order; while [ -e /tmp/order ]; do sleep 0.1; done; sleep 2";
    let seen = Taken::new(Module::AtHand).run(script);
    assert_spared(&seen);
    assert!(seen.console.contains("rebind 0 ") && seen.console.contains("agent 0 "), "{seen:?}");
}

#[test]
fn a_root_process_of_the_image_that_nobody_declared_is_seen() {
    assert_seen(&Taken::new(Module::AtHand).run(&order("root")), "unexplained_privilege");
}

/// What the advisory layers say of its processes.
fn opinions(seen: &Seen) -> Vec<(String, String)> {
    let bundle = seen.report.bundle.as_ref().unwrap();
    let ledger = hotcell_ledger::ClosedLedger::open(bundle.join("ledger.ames")).unwrap();
    let all = hotcell_advisory::assess(&ledger, None).unwrap();
    let kinds = all.into_iter().map(|one| (format!("{:?}", one.kind), one.detail));
    kinds.filter(|(kind, _)| kind.starts_with("Processes")).collect()
}

/// Rolls of which both accounts are in the record.
fn rolls(seen: &Seen) -> usize {
    let record = crate::record::Record::read(seen.report.bundle.as_ref().unwrap());
    record.facts("process_roll").count()
}

#[test]
fn a_process_that_the_init_does_not_find_is_named_by_the_opinions_and_moves_no_ruling() {
    let seen =
        Taken::new(Module::AtHand).run("sleep 1234 & sleep 1; echo hide >/tmp/order; sleep 14; kill $!");
    assert_spared(&seen);
    let found = opinions(&seen);
    assert_eq!(found.len(), 1, "{found:?} {seen:?}");
    assert_eq!(found[0].0, "ProcessesOmitted");
    assert!(found[0].1.contains("(/bin/busybox)"), "{found:?}");
}

#[test]
fn a_process_that_the_guest_invents_is_named_by_the_opinions_and_an_honest_account_by_none() {
    // In the name of the workload's exec, which is all that a workload can reach of the guest's account.
    let claim = "hotcell-request --claim tool subject=1 \"processes $roll 1/1 at 1 4242:1\"";
    let invents = format!("for roll in 2 3 4 5 6; do {claim}; done; sleep 14");
    let seen = Taken::new(Module::AtHand).run(&invents);
    assert_spared(&seen);
    let found = opinions(&seen);
    assert_eq!(
        found.iter().map(|(kind, _)| kind.as_str()).collect::<Vec<_>>(),
        ["ProcessesInvented"],
        "{seen:?}"
    );
    assert!(found[0].1.ends_with(": 4242"), "{found:?}");
    // Short lives, a tree, orphans, many at once, a leader that is gone.
    let busy = "for i in 1 2 3; do (sleep 9 & sleep 7) & done; n=0; while [ $n -lt 200 ]; do /bin/true; n=$((n+1)); done; sleep 8";
    let seen = Taken::new(Module::AtHand).run(busy);
    assert_spared(&seen);
    assert!(rolls(&seen) >= 2, "{seen:?}");
    assert_eq!(opinions(&seen), []);
}
