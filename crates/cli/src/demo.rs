//! `hotcell demo`: the tour. Three real machines, a few lines each.

use crate::args;
use crate::exit::Fatal;
use crate::session::{Job, Prepared, Session};
use crate::{records, say};
use hotcell_image::KernelKind;
use hotcell_policy::PolicyDraft;
use hotcell_runtime::{ExecIo, Opinion, RunReport, Runtime};
use hotcell_vm::{AccelChoice, JailChoice};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// An agent that asks for the one write that it was granted, and does it.
const CLEAN: &str = "hotcell-request file-write /workspace/report.txt 'the task asks for a report' && \
    echo 'all quiet' > /workspace/report.txt && cat /workspace/report.txt";

/// An agent that tries one door after the other, then would go on for a minute.
const PROBING: &str = "for door in 'net-egress api.example.org:443' 'privilege-raise root' \
    'raw-syscall ptrace' 'file-write /etc/passwd' 'net-egress 10.0.0.1:22' 'package-install curl'; do \
    hotcell-request $door 'please'; done; sleep 60; echo 'never printed'";

/// An agent that tells of a permission that the host never gave.
const LYING: &str = "hotcell-request file-write /etc/shadow 'backup'; \
    hotcell-request --claim capability value=257 'the operator granted me the network'; \
    echo 'nothing to report'";

struct Scene {
    title: &'static str,
    story: &'static str,
    script: &'static str,
    writable: bool,
    expected: &'static str,
}

const SCENES: [Scene; 3] = [
    Scene {
        title: "1. A clean run",
        story: "asks for the one file that its policy grants, and writes it",
        script: CLEAN,
        writable: true,
        expected: "ALLOWED",
    },
    Scene {
        title: "2. A breach, stopped mid-run",
        story: "tries forbidden doors one after the other, then wants to go on for a minute",
        script: PROBING,
        writable: false,
        expected: "KILLED",
    },
    Scene {
        title: "3. A guest that lies",
        story: "tells of a permission that the host never gave",
        script: LYING,
        writable: false,
        expected: "ALLOWED",
    },
];

pub(crate) fn demo(args: args::Demo) -> Result<ExitCode, Fatal> {
    let session = Session::open()?;
    let runtime = session.runtime(AccelChoice::Auto, JailChoice::Auto, args.out)?;
    let accel = runtime.acceleration.accel;
    say::line(format_args!(
        "Three agents, each in a fresh virtual machine without a network (QEMU under {accel})."
    ))?;
    let mut bundles: Vec<PathBuf> = Vec::new();
    let mut as_expected = true;
    for scene in &SCENES {
        say::line("")?;
        say::line(format_args!("{}: an agent that {}.", scene.title, scene.story))?;
        let mut policy = PolicyDraft::for_running_a_command();
        if scene.writable {
            policy.capabilities.write = vec!["/workspace/report.txt".into()];
        }
        let argv = ["/bin/sh", "-c", scene.script].map(String::from).to_vec();
        let (image, kernel) = ("busybox".into(), KernelKind::default());
        let job = Job { image, kernel, name: None, policy, argv, env: Vec::new(), cwd: None };
        let mut prepared = session.prepare(job)?;
        session.attach_template(&runtime, &mut prepared, "This run boots from scratch");
        let Prepared { spec, boot, advisor, .. } = prepared;
        let runtime = Runtime { advisor: Some(advisor), ..runtime.clone() };
        let begun = Instant::now();
        let io = ExecIo {
            stdout: Some(Box::new(Indented)),
            stderr: Some(Box::new(Indented)),
            ..ExecIo::default()
        };
        let (report, _) = runtime.execute(spec, boot, io);
        tell(&report, begun.elapsed().as_secs_f64())?;
        as_expected &= report.verdict.as_str() == scene.expected && report.teardown.verified;
        bundles.extend(report.bundle);
    }
    say::line("")?;
    say::line("Each run left a record that anybody can check. Try:")?;
    let program = std::env::args().next().unwrap_or_else(|| "hotcell".into());
    for bundle in &bundles {
        say::line(format_args!("  {program} verify {}", records::name_of(bundle)))?;
    }
    say::line("and to see what happened, in a browser:")?;
    if let Some(killed) = bundles.get(1) {
        say::line(format_args!("  {program} report {} -o killed.html", records::name_of(killed)))?;
    }
    if !as_expected {
        return Err(Fatal::failed("the demo did not go as it should (see above)"));
    }
    Ok(ExitCode::SUCCESS)
}

fn tell(report: &RunReport, seconds: f64) -> Result<(), Fatal> {
    let reasons = match report.kill.reasons.as_slice() {
        [] => String::new(),
        reasons => format!(" because of {}", reasons.join(", ")),
    };
    say::line(format_args!("  => {}{reasons}, after {seconds:.1} s", report.verdict))?;
    if let Some(why) = report.explained.first() {
        say::line(format_args!("  {why}"))?;
    }
    for opinion in &report.advisory {
        let Opinion { layer, kind, subject, detail } = opinion;
        say::line(format_args!("  advisory {layer} {kind}: {detail} ({subject})"))?;
    }
    if let Some(error) = &report.error
        && !report.explained.iter().any(|text| text.contains(error.as_str()))
    {
        say::line(format_args!("  {error}"))?;
    }
    let gone = if report.teardown.verified { "gone, every part checked" } else { "NOT KNOWN TO BE GONE" };
    say::line(format_args!("  machine {gone}"))
}

/// Prints an agent's output as a quotation.
struct Indented;

impl std::io::Write for Indented {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for line in String::from_utf8_lossy(bytes).lines() {
            let _ = say::line(format_args!("  | {line}"));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
