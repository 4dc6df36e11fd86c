//! The gate before each execve, in real machines: `docs/exec-enforcement.md` has the table
//! of what was tried and what came of it, and is read here as what to expect.
//!
//! The image is made so that it holds executables that its list does not have: the list is
//! made from a manifest in which they are not executable. So what refuses them is the gate
//! and nothing else. The same attempts on this host are the control: all of them succeed.

use crate::attacks::folder as attacks;
use crate::harness::{Slot, verify};
use crate::images::{Built, folder};
use crate::machine::{Sink, drafted, runtime, store};
use crate::record::Record;
use hotcell_ledger::{Digest, Payload};
use hotcell_policy::{Manifest, PolicyDraft};
use hotcell_runtime::{ExecIo, ExecRequest, ExecResult, Run, Stdin};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What came of each attempt: `reached` or the reason of the refusal.
type Rows = BTreeMap<String, String>;

/// The image, and what is needed to try the same on the host.
struct Ground {
    image: Built,
    dir: tempfile::TempDir,
}

fn cc(out: &Path, flags: &[&str]) {
    let source = attacks().join("exec.c");
    let output = Command::new("cc").args(["-O1", "-s", "-o"]).arg(out).args(flags).arg(source).output();
    let output = output.expect("cc is installed: the guest's programs are linked with it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What `/opt` of the root is to whoever executes it: the two files that name it.
fn names_of_unlisted(dir: &Path, root: &str) {
    let loader = format!("-Wl,--dynamic-linker={root}/opt/ld.so");
    cc(&dir.join("bin/dynamic-of-unlisted"), &[&loader]);
    let script = dir.join("bin/script-of-unlisted");
    fs::write(&script, format!("#!{root}/opt/unlisted\n")).unwrap();
    fs::set_permissions(script, fs::Permissions::from_mode(0o755)).unwrap();
}

impl Ground {
    fn build(name: &str) -> Ground {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path();
        folder(dir, &[("bin/script", 0o755, "#!/bin/sh\nexit 42\n")]);
        for part in ["opt", "lib64", "lib/x86_64-linux-gnu"] {
            fs::create_dir_all(dir.join(part)).unwrap();
        }
        cc(&dir.join("bin/tool"), &["-static"]);
        cc(&dir.join("bin/dynamic"), &[]);
        cc(&dir.join("opt/unlisted"), &["-static", "-DCODE=43"]);
        cc(&dir.join("opt/dynamic"), &["-DCODE=43"]);
        cc(&dir.join("opt/library.so"), &["-shared", "-fPIC", "-DLIBRARY"]);
        fs::hard_link(dir.join("opt/unlisted"), dir.join("opt/second-name")).unwrap();
        // The loader and the library that the compiler of this host links with.
        let listed = Command::new("ldd").arg(dir.join("bin/dynamic")).output().unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        let path = |name: &str| {
            let words = listed.split_whitespace();
            words.filter(|word| word.starts_with('/')).find(|word| word.contains(name)).unwrap().to_owned()
        };
        for (name, places) in [
            ("libc.so", &["lib/x86_64-linux-gnu/libc.so.6"][..]),
            ("ld-linux", &["lib64/ld-linux-x86-64.so.2", "opt/ld.so"][..]),
        ] {
            for place in places {
                fs::copy(path(name), dir.join(place)).unwrap();
                fs::set_permissions(dir.join(place), fs::Permissions::from_mode(0o755)).unwrap();
            }
        }
        // Another digest, the same loader.
        let mut loader = fs::read(dir.join("opt/ld.so")).unwrap();
        loader.push(0);
        fs::write(dir.join("opt/ld.so"), loader).unwrap();
        names_of_unlisted(dir, "");
        let image = Built::from(name, &format!("dir:{}", dir.display()), &[]);
        Ground { image, dir: temporary }
    }

    /// A machine whose list lacks everything in `/opt`.
    fn start(&self, out: &Path, policy: PolicyDraft) -> Run {
        let image = store().image(&self.image.0, &mut |_| {}).unwrap();
        let contents = Manifest::new(image.manifest.entries().map(|(path, entry)| {
            let mut entry = entry.clone();
            if path.as_str().starts_with("/opt/") {
                entry.mode &= !0o111;
            }
            (path.clone(), entry)
        }));
        let id = out.file_name().unwrap().to_str().unwrap().to_lowercase().replace(['.', '_'], "-");
        let (draft, boot) = drafted(format!("test{id}"), (&image, contents), policy, None);
        runtime(out, Duration::from_secs(120)).start(draft.seal().unwrap(), boot)
    }

    /// The same attempts on this host.
    fn control(&self) -> Rows {
        let dir = self.dir.path();
        names_of_unlisted(dir, dir.to_str().unwrap());
        let scratch = ["workspace", "tmp", "shm", "lock"].map(|name| dir.join("scratch").join(name));
        scratch.iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        let output = Command::new(dir.join("bin/tool")).arg(dir).args(scratch).output().unwrap();
        rows(&String::from_utf8(output.stdout).unwrap())
    }
}

fn exec(run: &Run, argv: &[&str], stdin: Stdin) -> (ExecResult, String) {
    let stdout = Sink::default();
    let io = ExecIo { stdin, stdout: Some(Box::new(stdout.clone())), stderr: None };
    let result = run.exec(ExecRequest::new(argv.iter().copied()), io).wait().unwrap();
    let text = String::from_utf8(stdout.0.lock().unwrap().clone()).unwrap();
    (result, text)
}

fn rows(text: &str) -> Rows {
    let row = |line: &str| {
        let (name, came) = line.split_once(": ").unwrap();
        (name.to_owned(), came.to_owned())
    };
    let rows: Rows = text.lines().map(row).collect();
    assert!(rows.len() > 30, "{text}");
    rows
}

/// The page's table: attempt, and what came of it under `deny` and under `allow`.
fn page() -> BTreeMap<String, [String; 2]> {
    let page = fs::read_to_string(attacks().join("../docs/exec-enforcement.md")).unwrap();
    let lines = page.lines().skip_while(|line| !line.starts_with("| attempt |")).skip(2);
    lines
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let cell = |at: usize| cells[at].trim_matches('*').to_owned();
            (cells[0].to_owned(), [cell(1), cell(2)])
        })
        .collect()
}

/// What the guest's gate told: rule, digest, path.
fn told(record: &Record) -> Vec<(String, String, String)> {
    let name = |event: &hotcell_ledger::Event| match &event.payload {
        Payload::ToolCall { tool, .. } if !event.actor.is_host_band() => {
            let words: Vec<&str> = tool.as_str().splitn(4, ' ').collect();
            match words.as_slice() {
                ["exec", rule, digest, path] => Some(((*rule).into(), (*digest).into(), (*path).into())),
                _ => None,
            }
        }
        _ => None,
    };
    record.events.iter().filter_map(name).collect()
}

const ATTEMPTS: [&str; 6] = ["/bin/tool", "", "/workspace", "/tmp", "/dev/shm", "/run/lock"];

#[test]
fn every_way_to_execute_a_file_ends_as_the_page_says() {
    let ground = Ground::build("exec");
    let page = page();
    assert!(page.len() > 30, "the page was not read");
    for (at, allow) in [(0, false), (1, true)] {
        let out = tempfile::tempdir().unwrap();
        let mut policy = PolicyDraft::for_running_a_command();
        if allow {
            policy.exec.workspace = hotcell_policy::WorkspaceExec::Allow;
        }
        let _slot = Slot::take();
        let run = ground.start(out.path(), policy);
        let (result, text) = exec(&run, &ATTEMPTS, Stdin::Empty);
        assert_eq!(result.code, 0, "{result:?} {text}");
        let found = rows(&text);
        let compiled = fs::read(ground.dir.path().join("opt/unlisted")).unwrap();
        let install = "cat >compiled && chmod 755 compiled && ./compiled";
        let (result, _) = exec(&run, &["/bin/sh", "-c", install], Stdin::Bytes(compiled.clone()));
        assert_eq!(result.code, if allow { 43 } else { 126 }, "{result:?}");
        let report = run.finish();
        assert_eq!(report.verdict.as_str(), "ALLOWED", "{report:?}");
        let bundle = out.path().join(&report.run_id);
        assert_eq!(verify(&bundle), 0);
        let expected: Rows = page.iter().map(|(name, came)| (name.clone(), came[at].clone())).collect();
        assert_eq!(found, expected, "workspace allowed: {allow}");
        // What the gate decided is in the record, by digest and name.
        let told = told(&Record::read(&bundle));
        let has = |rule: &str, path: &str| {
            let digest = Digest::of(&compiled).to_hex();
            told.iter().any(|(r, d, p)| r == rule && *d == digest && p == path)
        };
        assert!(has("unknown", "/opt/unlisted"), "{told:?}");
        assert_eq!(has("workspace", "/workspace/compiled"), allow, "{told:?}");
    }
    let control = ground.control();
    assert!(control.values().all(|came| came == "reached"), "{control:?}");
    assert!(control.keys().eq(page.keys()));
}

#[test]
fn a_token_is_for_one_execution_where_the_policy_grants_no_spawning() {
    let ground = Ground::build("token");
    let mut codes = Vec::new();
    for spawn in [false, true] {
        let out = tempfile::tempdir().unwrap();
        let mut policy = PolicyDraft::for_running_a_command();
        policy.capabilities.spawn = spawn;
        let _slot = Slot::take();
        let run = ground.start(out.path(), policy);
        for argv in [
            &["/bin/tool"][..],
            // A script and its interpreter, a program and its loader: one execution each.
            &["/bin/script"],
            &["/bin/dynamic"],
            &["/bin/sh", "-c", "/bin/tool"],
            &["/bin/sh", "-c", "exec /bin/tool"],
            &["/bin/sh", "-c", "/bin/tool & wait $!"],
            &["/bin/sh", "-c", "/bin/script"],
            &["/bin/sh", "-c", "exec /bin/dynamic"],
        ] {
            codes.push(exec(&run, argv, Stdin::Empty).0.code);
        }
        let report = run.finish();
        assert_eq!(report.verdict.as_str(), "ALLOWED", "{report:?}");
        let bundle = out.path().join(&report.run_id);
        assert_eq!(verify(&bundle), 0);
        let told = told(&Record::read(&bundle));
        let refused: Vec<&str> = told.iter().map(|(rule, ..)| rule.as_str()).collect();
        assert_eq!(refused, if spawn { vec![] } else { vec!["no_token"; 5] }, "{told:?}");
    }
    let (alone, tree) = codes.split_at(8);
    assert_eq!(alone, [42, 42, 42, 126, 126, 126, 126, 126]);
    assert_eq!(tree, [42; 8]);
}
