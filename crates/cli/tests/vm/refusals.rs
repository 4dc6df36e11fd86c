//! What was asked wrongly, or can't be done here: said in a paragraph that helps,
//! and nothing is left behind.

use crate::harness::{Job, SOON, home, hotcell, warm_up};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn assert_paragraph(output: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    assert!(!text.trim().is_empty() && !text.contains("panicked"), "{text}");
}

/// Runs `hotcell run FLAGS -- true` where no machine may come of it.
fn refused(flags: &[&str], code: i32, words: &[&str]) {
    let out = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let mut command = hotcell();
    command.args(["run", "--name", "test-refused-run"]);
    if !flags.contains(&"--accel") {
        command.args(["--accel", "tcg"]);
    }
    if !flags.contains(&"--out") {
        command.arg("--out").arg(out.path());
    }
    let output = command.args(flags).args(["--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{flags:?}: {output:?}");
    assert_paragraph(&output, words);
    if code == 125 {
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text.trim_end().rsplit("\n\n").next().unwrap();
        assert!(
            text.starts_with("hotcell: ") && last.len() == text.trim_end().len(),
            "one paragraph: {text}"
        );
    }
    assert!(output.stdout.is_empty(), "{output:?}");
    assert!(begun.elapsed() < SOON, "{flags:?} took {:?}", begun.elapsed());
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0, "{flags:?} left something in --out");
    assert!(!home().join("state/live/test-refused-run").exists(), "{flags:?} left an entry");
    assert!(!home().join("state/runs/test-refused-run").exists(), "{flags:?} left a record");
}

fn with_policy(toml: &str, words: &[&str]) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), toml).unwrap();
    refused(&["--policy", file.path().to_str().unwrap()], 125, words);
}

#[test]
fn wrong_flags_are_usage_errors() {
    refused(&["--nonsense"], 2, &["--nonsense"]);
    refused(&["--timeout", "0"], 2, &["--timeout", "1..=3600"]);
    refused(&["--timeout", "3601"], 2, &["--timeout", "1..=3600"]);
    refused(&["--timeout", "soon"], 2, &["--timeout"]);
    refused(&["--network", "host"], 2, &["--network"]);
    refused(&["--accel", "xen"], 2, &["kvm", "tcg"]);
    let nothing = hotcell().args(["run", "--"]).output().unwrap();
    assert_eq!(nothing.status.code(), Some(2));
    assert_paragraph(&nothing, &["CMD"]);
}

/// The rule of `exit.rs`: 2 where the words alone can't be, 125 where what they name can't be had.
#[test]
fn what_is_typed_wrongly_exits_with_2_and_what_can_not_be_had_with_125() {
    warm_up();
    let home = home().to_str().unwrap();
    let none = "0".repeat(64);
    let of_run: [(&[&str], i32); 15] = [
        (&["--name", "short"], 2),
        (&["--image", "a/b"], 2),
        (&["--timeout", "0"], 2),
        (&["--cwd", "relative"], 2),
        (&["--get", "relative"], 2),
        (&["--get", "/workspace/../../etc"], 2),
        (&["--put", "x"], 2),
        (&["--put", "/etc/hosts:/etc/hosts"], 2),
        (&["--env", "=x"], 2),
        (&["--user", "root"], 2),
        (&["-it"], 2),
        (&["--image", "nosuch"], 125),
        (&["--policy", "/nonexistent"], 125),
        (&["--policy", "/etc/hosts"], 125),
        (&["--put", "/nonexistent:/workspace/x"], 125),
    ];
    let of_others: [(&[&str], i32); 27] = [
        (&[], 2),
        (&["frobnicate"], 2),
        (&["images"], 2),
        (&["run", "--"], 2),
        (&["run", "busybox", "true"], 2),
        (&["ps", "--frob"], 2),
        (&["image", "show", "../x"], 2),
        (&["image", "rm", "UPPER"], 2),
        (&["image", "build", "x"], 2),
        (&["image", "build", "a b", "--from", "busybox"], 2),
        (&["image", "build", "x", "--from", "nonsense:y"], 2),
        (&["image", "build", "x", "--from", "debian:bookworm", "--include", "a b"], 2),
        (&["image", "rebuild", "busybox", "--from-run", "nosuch"], 2),
        (&["template", "rm"], 2),
        (&["verify"], 2),
        (&["verify", "nosuch"], 2),
        (&["verify", "/nonexistent"], 2),
        (&["verify", home], 2),
        (&["verify", home, "--key", "nonsense"], 2),
        (&["report", "nosuch"], 2),
        (&["report", home], 2),
        (&["profile", "absorb", "nosuch", "-o", "/nonexistent/x"], 2),
        (&["image", "show", "nosuch"], 125),
        (&["image", "rm", "nosuch"], 125),
        (&["image", "build", "x", "--from", "dir:/nonexistent"], 125),
        (&["template", "rm", &none], 125),
        (&["--help"], 0),
    ];
    let mut wrong = Vec::new();
    let of_run = of_run.iter().map(|(flags, code)| {
        let words: Vec<&str> = ["run"].iter().chain(*flags).chain(&["--", "true"]).copied().collect();
        (words, *code)
    });
    for (words, code) in of_run.chain(of_others.iter().map(|(words, code)| (words.to_vec(), *code))) {
        let output = hotcell().args(&words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let silent = code != 0 && said.trim().is_empty();
        if output.status.code() != Some(code) || silent || said.contains("panicked") {
            wrong.push(format!("{words:?}: {:?}, not {code}: {said}", output.status.code()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn images_that_do_not_exist_or_are_paths_are_refused() {
    warm_up();
    refused(&["--image", "nosuch"], 125, &["no image `nosuch`", "hotcell image ls"]);
    for path in ["a/b", "..", "../../etc", "/etc", ".hidden", ""] {
        refused(&["--image", path], 2, &["no image name", "begin"]);
    }
}

#[test]
fn policies_that_can_not_be_read_or_say_unknown_things_are_refused() {
    refused(&["--policy", "/nonexistent/policy.toml"], 125, &["/nonexistent/policy.toml", "No such file"]);
    refused(&["--policy", "/"], 125, &["policy /", "not a regular file"]);
    with_policy("[limits", &["not TOML"]);
    with_policy("[limits]\nmemroy_mib = 512\n", &["memroy_mib", "nearest key is `memory_mib`"]);
    with_policy("[limit]\nvcpus = 1\n", &["nearest table is [limits]"]);
    with_policy("[network]\nallow = true\n", &["no network device", "--put"]);
    with_policy("[capabilities]\nnet_egress = [\"packages.example.org\"]\n", &["no network device"]);
    with_policy("[limits]\ntimeout_s = 0\n", &["timeout_s", "1..=3600"]);
    with_policy("[capabilities]\nwrite = [\"/etc/passwd\"]\n", &["/etc/passwd"]);
    with_policy("[capabilities]\npackages = [\"numpy\"]\n", &["numpy"]);
}

/// Whatever a flag names: what is no file is said at once, and nothing of any length is read.
#[test]
fn what_a_flag_names_is_a_file_of_bounded_length() {
    warm_up();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    fs::File::create(at("long")).unwrap().set_len(1 << 40).unwrap();
    let record = Job::sh("true").run();
    let bundle = record.bundle().to_str().unwrap().to_owned();
    for (name, why) in [
        (at("pipe"), "not a regular file"),
        ("/dev/zero".into(), "not a regular file"),
        (at(""), "not a regular file"),
        (at("long"), "longer than"),
    ] {
        refused(&["--policy", &name], 125, &[&name, why]);
        let policy = format!("[profile]\nfingerprint = \"{name}\"\n");
        with_policy(&policy, &[&name, why]);
        for flag in ["--checkpoint", "--key"] {
            let output = hotcell().args(["verify", &bundle, flag, &name]).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{output:?}");
            assert_paragraph(&output, &[&name]);
        }
    }
}

#[test]
fn names_that_are_bad_or_taken_are_refused() {
    warm_up();
    for name in ["short", "UPPERCASE-NAME", "../../../escape", "-starts-with-a-dash", "with space in it"] {
        let flag = format!("--name={name}");
        let out = tempfile::tempdir().unwrap();
        let output = hotcell()
            .args(["run", "--accel", "tcg", &flag, "--out"])
            .arg(out.path())
            .args(["--", "true"])
            .output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(2), "{name}: {output:?}");
        assert_paragraph(&output, &["--name <ID>", "8 to 64"]);
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
    }
    let out = tempfile::tempdir().unwrap();
    let taken = out.path().join("test-taken-name");
    fs::create_dir(&taken).unwrap();
    fs::write(taken.join("mine"), "precious").unwrap();
    let output = hotcell()
        .args(["run", "--accel", "tcg", "--name", "test-taken-name", "--out"])
        .arg(out.path())
        .args(["--", "true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_paragraph(&output, &["exists already", "--name"]);
    assert_eq!(fs::read(taken.join("mine")).unwrap(), b"precious", "a record was written over");
    assert_eq!(fs::read_dir(&taken).unwrap().count(), 1);
}

#[test]
fn an_out_that_can_not_be_written_is_refused() {
    warm_up();
    refused(&["--out", "/proc/hotcell"], 125, &["/proc/hotcell", "writable `--out`"]);
    refused(&["--out", "/dev/null"], 125, &["/dev/null"]);
}

#[test]
fn a_full_file_system_ends_the_run_before_anything_starts() {
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
    warm_up();
    let dir = tempfile::tempdir().unwrap();
    // The size of one page: a folder fits, a record does not.
    if mount("none", dir.path(), "tmpfs", MountFlags::empty(), c"size=4k").is_err() {
        println!("NOT RUN: mounting a small file system needs root");
        return;
    }
    refused(&["--out", dir.path().to_str().unwrap()], 125, &["can't write the bundle", "space"]);
    let left = fs::read_dir(dir.path()).unwrap().count();
    unmount(dir.path(), UnmountFlags::DETACH).unwrap();
    assert_eq!(left, 0, "the refused run left something");
}

#[test]
fn kvm_or_nothing_is_refused_where_there_is_no_kvm() {
    warm_up();
    let out = tempfile::tempdir().unwrap();
    // Without the device there is nothing to try; with it the answer is the probe's.
    if Path::new("/dev/kvm").exists() {
        println!("NOT RUN: /dev/kvm exists here; the probe's answers are tested in hotcell-vm");
        return;
    }
    let output = hotcell()
        .args(["run", "--accel", "kvm", "--out"])
        .arg(out.path())
        .args(["--", "true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_paragraph(&output, &["KVM was asked for", "--accel"]);
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
}

#[test]
fn folders_that_others_may_write_are_used_by_no_command() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    fs::create_dir(&home).unwrap();
    for (mode, code) in [(0o777, 125), (0o755, 0)] {
        fs::set_permissions(&home, fs::Permissions::from_mode(mode)).unwrap();
        let output = hotcell().env("HOTCELL_HOME", &home).args(["image", "ls"]).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let run = hotcell().env("HOTCELL_HOME", &home).args(["ps"]).output().unwrap();
        assert_eq!(run.status.code(), Some(code), "{run:?}");
        if code != 0 {
            assert_paragraph(&output, &["written by everybody", &format!("chmod go-w {}", home.display())]);
            assert_eq!(fs::read_dir(&home).unwrap().count(), 0, "nothing was made");
        }
    }
}

#[test]
fn without_a_home_nothing_is_guessed() {
    let mut command = hotcell();
    for name in ["HOTCELL_HOME", "HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"] {
        command.env_remove(name);
    }
    let output = command.args(["run", "--accel", "tcg", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_paragraph(&output, &["set HOTCELL_HOME"]);
}

/// A program in the VMM's place. Static: the VMM's jail has no shell to run a script with.
fn fake_qemu(main: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("qemu-system-x86_64");
    let includes = "#include <stdio.h>\n#include <string.h>\n#include <unistd.h>\n";
    let source = format!("{includes}int main(int argc, char **argv) {{ (void)argc; (void)argv; {main} }}\n");
    fs::write(dir.path().join("fake.c"), source).unwrap();
    let built = Command::new("cc")
        .args(["-static", "-o"])
        .args([&program, &dir.path().join("fake.c")])
        .status()
        .expect("cc is installed: the guest's programs are linked with it");
    assert!(built.success());
    (dir, program)
}

fn failed_start(main: &str, word: &str, patience: Duration) {
    let (_dir, program) = fake_qemu(main);
    failed_start_of(&program, word, patience);
}

fn failed_start_of(program: &Path, word: &str, patience: Duration) {
    let begun = Instant::now();
    let outcome = Job::new(["true"]).flags(["--cold"]).env("HOTCELL_QEMU", program).run();
    assert_eq!(outcome.code, Some(125), "{outcome:?}");
    assert_eq!(outcome.verdict(), "FAILED");
    assert!(outcome.err().contains(word), "{outcome:?}");
    assert!(begun.elapsed() < patience, "{outcome:?}");
    // The record says why, and it is whole.
    assert_eq!(outcome.record().facts("failed").count(), 1);
}

#[test]
fn a_qemu_that_is_not_there_is_said_before_anything_is_made() {
    let out = tempfile::tempdir().unwrap();
    let output = hotcell()
        .env("HOTCELL_QEMU", "/nonexistent/qemu")
        .args(["run", "--accel", "tcg", "--out"])
        .arg(out.path())
        .args(["--", "true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_paragraph(&output, &["HOTCELL_QEMU", "/nonexistent/qemu", "unset"]);
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
}

#[test]
fn a_qemu_that_dies_at_start_is_quoted() {
    let main = "fputs(\"qemu: the moon is in the wrong phase\\n\", stderr); return 1;";
    failed_start(main, "the moon is in the wrong phase", SOON);
}

#[test]
fn a_qemu_that_can_not_be_executed_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("qemu-system-x86_64");
    fs::write(&program, "#!/nonexistent/interpreter\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    failed_start_of(&program, "qemu-system-x86", SOON);
}

#[test]
fn a_qemu_that_hangs_is_given_up_and_ended() {
    // The control channel's own deadline is 20 s.
    failed_start("sleep(600); return 0;", "does not answer", SOON * 2);
}

/// What stands in QEMU's place and executes it, with these arguments left out.
fn qemu_without(left_out: &str) -> (tempfile::TempDir, PathBuf) {
    let main = format!(
        "int kept = 0; for (int i = 0; i < argc; i++) \
         {{ if (!strcmp(argv[i], \"{left_out}\")) i++; else argv[kept++] = argv[i]; }} \
         argv[kept] = 0; execv(\"{}\", argv); return 9;",
        crate::machine::qemu().display()
    );
    fake_qemu(&main)
}

#[test]
fn a_vmm_that_is_held_by_less_than_this_host_gives_never_runs_its_guest() {
    let (_dir, program) = qemu_without("-sandbox");
    let outcome = Job::new(["true"]).flags(["--cold"]).env("HOTCELL_QEMU", &program).run();
    assert_eq!((outcome.code, outcome.verdict()), (Some(125), "FAILED"), "{outcome:?}");
    assert!(outcome.err().contains("not confined as this host can confine it"), "{outcome:?}");
    let record = outcome.record();
    assert_eq!((record.facts("failed").count(), record.facts("ready").count()), (1, 0));
    let console = fs::read(outcome.bundle().join("console.log")).unwrap_or_default();
    assert!(console.is_empty(), "its guest executed something: {}", String::from_utf8_lossy(&console));
    // The control: the same stand-in that leaves nothing out is no reason to refuse.
    let (_dir, program) = qemu_without("-no-such-argument");
    Job::new(["true"]).flags(["--cold"]).env("HOTCELL_QEMU", &program).run().assert_allowed(0);
}

/// One bit of a file that the machine would boot or load, changed since it was built or fetched.
#[test]
fn an_image_a_kernel_or_a_module_that_changed_since_it_was_built_is_refused() {
    warm_up();
    let files =
        ["state/images/busybox/root.sqfs", "cache/kernels/cloud/vmlinuz", "cache/kernels/cloud/virtio.ko"];
    for changed in files {
        let other = tempfile::tempdir().unwrap();
        for folder in ["state/images/busybox", "cache/kernels/cloud"] {
            fs::create_dir_all(other.path().join(folder)).unwrap();
            for file in fs::read_dir(home().join(folder)).unwrap().map(|file| file.unwrap()) {
                fs::copy(file.path(), other.path().join(folder).join(file.file_name())).unwrap();
            }
        }
        let path = other.path().join(changed);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).unwrap();
        let mut command = hotcell();
        command.env("HOTCELL_HOME", other.path()).args([
            "run",
            "--accel",
            "tcg",
            "--name",
            "test-changed",
            "--",
            "true",
        ]);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(125), "{changed}: {output:?}");
        assert_paragraph(&output, &[Path::new(changed).file_name().unwrap().to_str().unwrap(), "digest"]);
        assert!(!other.path().join("state/runs/test-changed").exists(), "{changed}: a machine was made");
    }
}
