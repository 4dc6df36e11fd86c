//! The command line as it is typed.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Runs an AI agent that nobody trusts in a fresh virtual machine with no way
/// out, watches it from the host, proves that the machine is gone, and leaves a
/// record that anybody can verify.
#[derive(Debug, Parser)]
#[command(name = "hotcell", version, propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command in a fresh machine and record it.
    Run(Run),
    /// Check a record: chain, signature, lineage, objects, verdict.
    Verify(Verify),
    /// The tour: a clean run, a breach stopped mid-run, a lying guest.
    Demo(Demo),
    /// Say what this host can do, proven by trying it.
    Doctor(Json),
    /// List the runs that live, and those whose owner died.
    Ps(Json),
    /// End what dead owners left.
    Reap(Json),
    /// Images that machines boot.
    #[command(subcommand)]
    Image(Image),
    /// Show the public half of the key that signs your records.
    Key,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The image to boot.
    #[arg(long, default_value = "busybox", value_name = "NAME")]
    pub(crate) image: String,
    /// What the run may do; without it: write in /workspace, start the image's programs, and nothing else.
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) policy: Option<PathBuf>,
    /// What makes the machine.
    #[arg(long, value_enum, default_value_t = Backend::Qemu)]
    pub(crate) backend: Backend,
    /// What executes guest code: KVM where it really works, else TCG.
    #[arg(long, value_enum, default_value_t = Accel::Auto)]
    pub(crate) accel: Accel,
    /// How the process that makes the machine is held: what the host gives, or all of it.
    #[arg(long, value_enum, default_value_t = Jail::Auto)]
    pub(crate) jail: Jail,
    /// Name of the run: 8 to 64 of a-z 0-9 -, beginning with a letter or digit.
    #[arg(long, value_name = "ID")]
    pub(crate) name: Option<String>,
    /// Folder in which the record is made.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Seconds that the run may take, 1 to 3600; overrides the policy's.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) timeout: Option<u32>,
    /// Print the result as one JSON object, the last line on stdout.
    #[arg(long)]
    pub(crate) json: bool,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) argv: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Backend {
    /// QEMU microvm.
    Qemu,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Accel {
    /// KVM where it really executes guest code, else TCG.
    Auto,
    /// KVM or no run.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Jail {
    /// All that the host can give; what it can't is said and recorded.
    Auto,
    /// Every part, or no run.
    Required,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// The record's folder.
    #[arg(value_name = "BUNDLE")]
    pub(crate) bundle: PathBuf,
    /// A checkpoint that was kept elsewhere; may be given several times.
    #[arg(long, value_name = "NOTE")]
    pub(crate) checkpoint: Vec<PathBuf>,
    /// A public key that you trust, as `hotcell key` shows it; may be given several times.
    #[arg(long, value_name = "PUBKEY")]
    pub(crate) key: Vec<String>,
    /// Print the result as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A command whose one flag is the form of its answer.
#[derive(Debug, Args)]
pub(crate) struct Json {
    /// Print the result as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Folder in which the three records are made.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// List the images.
    Ls,
}
