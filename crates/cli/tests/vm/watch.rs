//! `hotcell run --watch`: on a terminal, a pseudo one with `setsid` as the shell that would own it, and without one.

use crate::harness::{Job, PATIENCE, Slot, hotcell, verify, vmms_of, wait_until, warm_up};
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";

/// A terminal, and all that was written to it.
struct Terminal {
    user: File,
    /// Held so that its settings can be read after the program's end.
    device: OwnedFd,
    written: Arc<Mutex<Vec<u8>>>,
    child: Child,
    run_id: String,
    out: tempfile::TempDir,
    _slot: Slot,
}

impl Terminal {
    fn run(name: &str, flags: &[&str], policy: &str, script: &str) -> Terminal {
        warm_up();
        let slot = Slot::take();
        let user = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&user).unwrap();
        unlockpt(&user).unwrap();
        let path = ptsname(&user, Vec::new()).unwrap();
        let device = open(&path, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        tcsetwinsize(&device, Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let out = tempfile::tempdir().unwrap();
        let run_id = format!("test-watch-{name}-{}", std::process::id());
        std::fs::write(out.path().join("policy.toml"), policy).unwrap();
        let mut words = vec!["--ctty".to_owned(), "--wait".into()];
        let own = hotcell();
        words.push(own.get_program().to_str().unwrap().to_owned());
        words.extend(["run", "--watch", "--accel", "tcg", "--name", &run_id].map(str::to_owned));
        words.extend(["--out".into(), out.path().to_str().unwrap().to_owned()]);
        words.extend(["--policy".into(), out.path().join("policy.toml").to_str().unwrap().to_owned()]);
        words.extend(flags.iter().map(|&flag| flag.to_owned()));
        words.extend(["--", "/bin/sh", "-c", script].map(str::to_owned));
        let mut command = Command::new("setsid");
        command.args(words).env("TERM", "xterm");
        command.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let end = || device.try_clone().unwrap();
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let user = File::from(user);
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut from, into) = (user.try_clone().unwrap(), Arc::clone(&written));
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut chunk) {
                into.lock().unwrap().extend_from_slice(&chunk[..count]);
            }
        });
        Terminal { user, device, written, child, run_id, out, _slot: slot }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().unwrap()).into_owned()
    }

    /// What the last whole frames drew.
    fn wait_for(&self, text: &str) {
        let last = |text: &str| text[text.len().saturating_sub(8000)..].to_owned();
        let mut seen = String::new();
        let end = std::time::Instant::now() + PATIENCE;
        while !seen.contains(text) {
            assert!(std::time::Instant::now() < end, "never shown: {text:?}, but {:?}", last(&seen));
            std::thread::sleep(std::time::Duration::from_millis(20));
            seen = self.text();
        }
    }

    /// Waits for the end; gives the exit code and what was written after the screen was left.
    fn end(mut self) -> (Option<i32>, String, String) {
        let mut code = None;
        wait_until("the end of hotcell", PATIENCE, || {
            code = self.child.try_wait().unwrap();
            code.is_some()
        });
        assert!(vmms_of(&self.run_id).is_empty(), "a VMM is left");
        assert_eq!(verify(&self.out.path().join(&self.run_id)), 0);
        wait_until("the last line", PATIENCE, || self.text().contains("record:"));
        let modes = tcgetattr(&self.device).unwrap().local_modes;
        assert!(
            modes.contains(LocalModes::ECHO | LocalModes::ICANON),
            "the terminal is as it was: {modes:?}"
        );
        let all = self.text();
        assert_eq!((all.matches(ENTER).count(), all.matches(LEAVE).count()), (1, 1));
        let (screen, after) = all.split_once(LEAVE).unwrap();
        (code.unwrap().code(), screen.to_owned(), after.to_owned())
    }
}

const TREE: &str = "[capabilities]\nwrite_trees = [\"/workspace\"]\nspawn = true\n";

#[test]
fn a_terminal_shows_processes_files_decisions_and_the_verdict_and_is_given_back() {
    let script = r#"echo one >made-by-the-guest; echo x >"$(printf 'bad\033]0;title\007name')"; sync
        hotcell-request net-egress example.test >/dev/null 2>&1; printf 'said \033]0;evil\007\n'
        while [ ! -e stop ]; do sleep 31 & sleep 2; kill $!; done"#;
    let terminal = Terminal::run("tty", &[], TREE, script);
    for text in [
        "no rule broken",
        "create /workspace/made-by-the-guest",
        "sleep 31 (/bin/",
        "deny NET_EGRESS example.test",
        "said ",
    ] {
        terminal.wait_for(text);
    }
    // Typed to nobody; Ctrl-C stops the run.
    let mut user = terminal.user.try_clone().unwrap();
    user.write_all(b"typed\x1a\x1c").unwrap();
    user.write_all(b"\x03").unwrap();
    let (code, screen, after) = terminal.end();
    assert_eq!(code, Some(130), "{after}");
    // The guest's own control characters are words on the screen, and its output comes after it as it was.
    assert!(screen.contains("create /workspace/bad\\x1b]0;title\\x07name"), "{screen}");
    assert!(!screen.contains("\x1b]0;"), "{screen}");
    assert!(after.contains("said \x1b]0;evil\x07"), "{after}");
    assert!(screen.contains("ALLOWED") && after.contains("ALLOWED"), "{after}");
    assert!(!after.contains("typed"), "{after}");
}

#[test]
fn a_kill_is_on_the_screen_and_leaves_the_terminal_as_it_was() {
    let policy = "[capabilities]\nwrite = [\"/workspace/out.txt\"]\nspawn = true\n";
    let script = "for name in x y z; do echo $name >$name; done; sync; sleep 150; echo SURVIVED";
    let (code, screen, after) = Terminal::run("kill", &[], policy, script).end();
    assert_eq!(code, Some(99), "{after}");
    assert!(screen.contains("KILLED: mutation_burst"), "{screen}");
    assert!(after.contains("KILLED (mutation_burst") && !after.contains("SURVIVED"), "{after}");
}

#[test]
fn without_a_terminal_it_is_lines_and_output_passes_byte_for_byte() {
    let script = "printf 'a\\033[2Jb'; echo one >seen; sync; sleep 3; printf 'c\\n'";
    let outcome = Job::sh(script).flags(["--watch"]).run();
    outcome.assert_allowed(0);
    assert_eq!(outcome.stdout, b"a\x1b[2Jbc\n", "{outcome:?}");
    let err = outcome.err();
    for text in
        [" process ", "sleep 3 (/bin/", "file create /workspace/seen", "verdict ALLOWED", "machine gone"]
    {
        assert!(
            err.lines().any(|line| line.starts_with("hotcell: watch: ") && line.contains(text)),
            "{text}: {err}"
        );
    }
    assert!(!err.contains('\x1b'), "{err}");
}
