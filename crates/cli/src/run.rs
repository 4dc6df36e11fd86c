//! `hotcell run`.

use crate::args::{self, Run};
use crate::exit::{FAILED, Fatal, KILLED, TIMED_OUT};
use crate::session::{Job, Prepared, Session};
use crate::{ending, say, watch};
use hotcell_ledger::file::read_regular_text;
use hotcell_policy::PolicyDraft;
use hotcell_runtime::{CopyError, CopyResult, GetRequest, PutRequest};
use hotcell_runtime::{ExecIo, ExecRequest, ExecResult, Output, RunReport, Stdin};
use hotcell_vm::{AccelChoice, JailChoice};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) fn run(args: args::Run) -> Result<ExitCode, Fatal> {
    let (json, name) = (args.json, args.name.clone().unwrap_or_default());
    run_recorded(args).inspect_err(|fatal| {
        // Whoever reads the last line gets an object also where nothing was begun.
        if json {
            print_json(&RunReport::refused(&name, &fatal.to_string()), false);
        }
    })
}

fn run_recorded(args: args::Run) -> Result<ExitCode, Fatal> {
    let mut policy = match &args.policy {
        Some(path) => read_policy(path)?,
        None => PolicyDraft::for_running_a_command(),
    };
    if let Some(timeout) = args.timeout {
        policy.limits.timeout_s = timeout;
    }
    // Looked at before anything exists: a source that can't be copied costs no machine.
    let puts = args.put.iter().map(|(source, target)| Ok((target, PutRequest::new(source, target)?)));
    let puts = puts.collect::<Result<Vec<_>, CopyError>>().map_err(Fatal::failed)?;
    let session = Session::open()?;
    let Run { image, name, argv, env, cwd, get: gets, accel, jail, kernel, out, cold, .. } = args;
    let asked_user = args.user;
    let plan = args.watch.then(watch::Plan::new);
    let named = image.clone();
    let job = Job { image, kernel: kernel.into(), name, policy, argv, env, cwd };
    // Neither needs the other, and each takes as long as a good part of a machine's start.
    let (runtime, prepared) = std::thread::scope(|scope| {
        let runtime = scope.spawn(|| session.runtime(accel.into(), jail.into(), out));
        let prepared = session.prepare(job);
        (runtime.join(), prepared)
    });
    let mut runtime = runtime.map_err(|_| Fatal::failed("looking at this host panicked"))??;
    let mut prepared = prepared?;
    if !cold {
        session.attach_template(&runtime, &mut prepared, "This run boots from scratch");
    }
    let Prepared { spec, boot, advisor, user } = prepared;
    let user = asked_user.unwrap_or(user);
    runtime.advisor = Some(advisor);
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])
        .map_err(|error| Fatal::failed(format!("can't handle signals: {error}")))?;
    let request = spec.command().map(|command| ExecRequest {
        uid: user.0,
        gid: user.1,
        last: gets.is_empty(),
        ..ExecRequest::from(command)
    });
    let line_open = Arc::new(AtomicBool::new(false));
    let watched = plan.as_ref();
    let stdin = inherited(io::stdin().as_fd()).filter(|_| !watched.is_some_and(watch::Plan::takes_stdin));
    let io = ExecIo {
        stdin: stdin.map_or(Stdin::Empty, Stdin::Descriptor),
        stdout: watched
            .and_then(watch::Plan::stdout)
            .or_else(|| passing(io::stdout().as_fd(), Some(Arc::clone(&line_open)))),
        stderr: watched.and_then(watch::Plan::stderr).or_else(|| passing(io::stderr().as_fd(), None)),
    };
    let (run, watch) = match plan {
        Some(plan) => {
            let (run, glimpses) = runtime.start_watched(spec, boot);
            let watch = plan.begin(run.id(), glimpses);
            (run, Some(watch))
        }
        None => (runtime.start(spec, boot), None),
    };
    let say = |line: String| match &watch {
        Some(watch) => watch.say(&line),
        None => say::note(line),
    };
    let interrupter = run.interrupter();
    let handle = signals.handle();
    let watcher = std::thread::spawn(move || {
        for signal in signals.forever() {
            interrupter.interrupt(signal);
        }
    });
    let mut all_put = true;
    for (path, mut put) in puts {
        (put.uid, put.gid) = user;
        all_put = all_put && copied(&run, "put", path, run.put(put), &say);
    }
    // A command without its files is not what was asked for.
    let request = request.filter(|_| all_put);
    let result = request.and_then(|request| run.exec(request, io).wait().ok());
    if result.is_some() {
        for path in gets {
            let get = GetRequest { uid: user.0, gid: user.1, ..GetRequest::into_bundle(&path) };
            copied(&run, "get", &path, run.get(get), &say);
        }
    }
    let report = run.finish();
    handle.close();
    let _ = watcher.join();
    if watch.is_some_and(watch::Watch::end) {
        line_open.store(true, Ordering::Relaxed);
    }
    ending::say(&named, &report, result.as_ref());
    if args.json {
        print_json(&report, line_open.load(Ordering::Relaxed));
    }
    Ok(ExitCode::from(exit_code(&report, result.as_ref())))
}

/// Whether a copy was made. Where it could not be, the run is FAILED: it was asked for.
fn copied(
    run: &hotcell_runtime::Run,
    what: &str,
    path: &str,
    outcome: Result<CopyResult, CopyError>,
    say: &dyn Fn(String),
) -> bool {
    match outcome {
        Ok(result) => {
            if let Some(place) = &result.place {
                say(format!("{what} {path}: {}", place.display()));
            }
            for left in &result.left_out {
                say(format!("{what} {path}: left out {left}"));
            }
            return true;
        }
        // Why is the report's to say.
        Err(error @ CopyError::RunEnded(_)) => say(format!("{what} {path}: {error}")),
        Err(error) => run.fail(what, &format!("{path}: {error}")),
    }
    false
}

/// Longest policy file that is read, bytes; one of ours has some hundred.
const MAX_POLICY: u64 = 1 << 20;

fn read_policy(path: &Path) -> Result<PolicyDraft, Fatal> {
    let text = read_regular_text(path, MAX_POLICY)
        .map_err(|error| Fatal::failed(format!("can't read the policy {}: {error}", path.display())))?;
    PolicyDraft::from_toml(&text).map_err(|error| Fatal::failed(format!("{}: {error}", path.display())))
}

fn inherited(stream: impl AsFd) -> Option<OwnedFd> {
    stream.as_fd().try_clone_to_owned().ok()
}

/// Passes bytes on unbuffered; notes whether the last line is open.
fn passing(stream: impl AsFd, line_open: Option<Arc<AtomicBool>>) -> Output {
    struct Passing {
        file: File,
        line_open: Option<Arc<AtomicBool>>,
    }
    impl Write for Passing {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = self.file.write(bytes)?;
            if let (Some(open), Some(last)) = (&self.line_open, bytes.get(..count).and_then(<[u8]>::last)) {
                open.store(*last != b'\n', Ordering::Relaxed);
            }
            Ok(count)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let file = File::from(inherited(stream)?);
    Some(Box::new(Passing { file, line_open }))
}

pub(crate) fn exit_code(report: &RunReport, result: Option<&ExecResult>) -> u8 {
    let verdict = report.verdict.as_str();
    if verdict == "KILLED" {
        return KILLED;
    }
    // Also before the machine was ready, where the verdict is FAILED: it is what the operator asked for.
    if let Some(signal) = report.interrupted {
        return u8::try_from(128 + signal).unwrap_or(FAILED);
    }
    if verdict != "ALLOWED" {
        return FAILED;
    }
    if report.timed_out {
        return TIMED_OUT;
    }
    result.map_or(FAILED, |result| u8::try_from(result.code).unwrap_or(FAILED))
}

fn print_json(report: &RunReport, line_open: bool) {
    let json = serde_json::to_string(report).unwrap_or_default();
    let start = if line_open { "\n" } else { "" };
    // A caller who closed stdout does not want it.
    let _ = io::stdout().write_all(format!("{start}{json}\n").as_bytes());
}

impl From<args::Jail> for JailChoice {
    fn from(jail: args::Jail) -> JailChoice {
        match jail {
            args::Jail::Auto => JailChoice::Auto,
            args::Jail::Required => JailChoice::Required,
        }
    }
}

impl From<args::Accel> for AccelChoice {
    fn from(accel: args::Accel) -> AccelChoice {
        match accel {
            args::Accel::Auto => AccelChoice::Auto,
            args::Accel::Kvm => AccelChoice::Kvm,
            args::Accel::Tcg => AccelChoice::Tcg,
        }
    }
}
