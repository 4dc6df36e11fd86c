//! The command line as it is typed.

use clap::{Args, Parser, Subcommand, ValueEnum};
use hotcell_image::ImageName;
use hotcell_policy::{CleanPath, is_run_id};
use hotcell_runtime::PutRequest;
use std::path::PathBuf;

const ENVIRONMENT: &str = "Environment:
  HOTCELL_HOME  folder for state and cache; else $XDG_STATE_HOME/hotcell and $XDG_CACHE_HOME/hotcell
  HOTCELL_QEMU  absolute path of the QEMU to use; else the qemu-system-x86_64 of the PATH";

/// Runs an AI agent that nobody trusts in a fresh virtual machine with no way
/// out, watches it from the host, proves that the machine is gone, and leaves a
/// record that anybody can verify.
#[derive(Debug, Parser)]
#[command(name = "hotcell", version, propagate_version = true, arg_required_else_help = true, after_help = ENVIRONMENT)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command in a fresh machine and record it.
    Run(Run),
    /// Check a record: chain, signature, lineage, objects, verdict.
    Verify(hotcell_verify::Question),
    /// The tour: a clean run, a breach stopped mid-run, a lying guest.
    Demo(Demo),
    /// Say what this host can do, proven by trying it.
    Doctor(Json),
    /// List the runs that live, and those whose owner died; with --all those that are over, too.
    Ps(Ps),
    /// End what dead owners left.
    Reap(Json),
    /// Images that machines boot.
    #[command(subcommand)]
    Image(Image),
    /// Kernels that machines boot.
    #[command(subcommand)]
    Kernel(Kernel),
    /// Templates that runs go on from; the first run of an image makes its own.
    #[command(subcommand)]
    Template(Template),
    /// Draw a record that was found intact as a page for people.
    Report(Report),
    /// Fingerprints of how an agent asks, to compare later runs with.
    #[command(subcommand)]
    Profile(Profile),
    /// Show the public half of the key that signs your records.
    Key,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The image to boot.
    #[arg(long, default_value = "busybox", value_name = "NAME", value_parser = image_name)]
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
    /// The kernel to boot.
    #[arg(long, value_enum, default_value_t = Kernels::Cloud)]
    pub(crate) kernel: Kernels,
    /// Boot from scratch instead of going on from the image's template.
    #[arg(long)]
    pub(crate) cold: bool,
    /// Name of the run: 8 to 64 of a-z 0-9 -, beginning with a letter or digit.
    #[arg(long, value_name = "ID", value_parser = run_name)]
    pub(crate) name: Option<String>,
    /// Folder in which the record is made.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Seconds that the run may take, 1 to 3600; overrides the policy's.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) timeout: Option<u32>,
    /// Copy a file or folder of this host into the machine before the command runs; DST is an absolute path in /workspace,
    /// /tmp or /dev/shm, and what SRC becomes. May be given several times.
    #[arg(long, value_name = "SRC:DST", value_parser = put)]
    pub(crate) put: Vec<(PathBuf, String)>,
    /// Copy a file or folder out of the machine after the command, into the record's folder `files`. May be given several
    /// times.
    #[arg(long, value_name = "PATH", value_parser = guest_path)]
    pub(crate) get: Vec<String>,
    /// A variable of the command's environment. May be given several times.
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) env: Vec<(String, String)>,
    /// The command's working directory, an absolute path in the machine; else the image's, else /workspace.
    #[arg(long, value_name = "DIR", value_parser = guest_path)]
    pub(crate) cwd: Option<String>,
    /// Numbers of the command's user and group, not 0; else the image's.
    #[arg(long, value_name = "UID[:GID]", value_parser = user)]
    pub(crate) user: Option<(u32, u32)>,
    /// Show processes, files, decisions and the verdict while the run goes on; without a terminal on stderr, as lines.
    #[arg(long)]
    pub(crate) watch: bool,
    /// Print the result as one JSON object, the last line on stdout.
    #[arg(long)]
    pub(crate) json: bool,
    /// The command and its arguments; without one, the image's own.
    #[arg(last = true, value_name = "CMD")]
    pub(crate) argv: Vec<String>,
}

/// The last `:/` parts the two, since the guest's path is absolute and a path of this host may have a colon.
fn put(text: &str) -> Result<(PathBuf, String), String> {
    match text.rsplit_once(":/") {
        Some((source, target)) if !source.is_empty() => {
            let target = guest_path(&format!("/{target}"))?;
            PutRequest::check_target(&target)?;
            Ok((source.into(), target))
        }
        _ => Err("write SRC:DST, DST an absolute path in the machine".into()),
    }
}

/// A path in the machine, in its plain spelling.
fn guest_path(text: &str) -> Result<String, String> {
    CleanPath::clean(text).map(|path| path.as_str().to_owned()).map_err(|error| error.to_string())
}

fn image_name(text: &str) -> Result<String, String> {
    ImageName::new(text).map(|name| name.to_string()).map_err(|error| error.to_string())
}

fn template_id(text: &str) -> Result<String, String> {
    if !text.is_empty() && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return Ok(text.to_owned());
    }
    Err("an id has the digits 0-9 a-f alone".into())
}

fn run_name(text: &str) -> Result<String, String> {
    if is_run_id(text) {
        return Ok(text.to_owned());
    }
    Err("use 8 to 64 of a-z 0-9 -, beginning with a letter or digit".into())
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("write NAME=VALUE".into()),
    }
}

fn user(text: &str) -> Result<(u32, u32), String> {
    let (uid, gid) = text.split_once(':').unwrap_or((text, text));
    // All ones means "leave as it is" to the kernel.
    let number = |text: &str| text.parse().ok().filter(|number| (1..u32::MAX).contains(number));
    let named = number(uid).zip(number(gid));
    named.ok_or_else(|| "write numbers, not 0: UID or UID:GID".into())
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

/// A command whose one flag is the form of its answer.
#[derive(Debug, Args)]
pub(crate) struct Json {
    /// Print the result as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Ps {
    /// Also the runs that are over, by their records in the folder `runs`, the newest first.
    #[arg(short, long)]
    pub(crate) all: bool,
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
    /// Build an image, or build it anew.
    Build(ImageBuild),
    /// List the images.
    Ls,
    /// Show what an image is and holds.
    Show(ImageShow),
    /// Remove an image. Runs that use it go on.
    Rm(ImageRm),
    /// Build an image again, with the packages that a run asked for and its policy approved.
    Rebuild(ImageRebuild),
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Kernels {
    /// The distribution's cloud kernel, downloaded at first use.
    Cloud,
    /// A smaller one, built from the distribution's source by `hotcell kernel build`.
    Slim,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Kernel {
    /// Build the slim kernel from the distribution's source; takes minutes, and does nothing where it is there.
    Build,
    /// List the kernels that are there.
    Ls,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Template {
    /// List the templates.
    Ls(TemplateLs),
    /// Remove templates. Runs that use them go on, and the next run of the image makes its template anew.
    Rm(TemplateRm),
    /// Remove the templates that no image, kernel, QEMU or Hotcell that is here can use.
    Prune,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateLs {
    /// Hash all of each template and compare it with its digests.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Print the result as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TemplateRm {
    /// Ids, as `hotcell template ls` shows them, or unambiguous beginnings of them.
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with = "all", value_parser = template_id)]
    pub(crate) ids: Vec<String>,
    /// Remove all of them.
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImageRebuild {
    /// Name of the image.
    #[arg(value_name = "NAME", value_parser = image_name)]
    pub(crate) name: String,
    /// The record of the run. It must be intact and signed by you or by a key that you give.
    #[arg(long, value_name = "BUNDLE")]
    pub(crate) from_run: PathBuf,
    /// A public key that you trust, as `hotcell key` shows it; may be given several times.
    #[arg(long, value_name = "PUBKEY")]
    pub(crate) key: Vec<String>,
    /// Do not ask.
    #[arg(long)]
    pub(crate) yes: bool,
    /// Don't make the template that runs of the image start from: the first run makes it.
    #[arg(long)]
    pub(crate) no_template: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImageBuild {
    /// Name of the image.
    #[arg(value_name = "NAME", value_parser = image_name)]
    pub(crate) name: String,
    /// What it is built from.
    #[arg(
        long,
        value_name = "SOURCE",
        help = "busybox | debian:SUITE | oci:DIR[:TAG] | docker-archive:FILE | docker://REF | dir:PATH"
    )]
    pub(crate) from: String,
    /// Debian packages beyond the minimum, with commas between them.
    #[arg(long, value_name = "PKGS", value_delimiter = ',')]
    pub(crate) include: Vec<String>,
    /// pip requirements, each pinned with its hashes; their wheels are installed without running anything of them.
    #[arg(long, value_name = "REQUIREMENTS")]
    pub(crate) pip: Option<PathBuf>,
    /// Debian mirror; without it mmdebstrap's own.
    #[arg(long, value_name = "URL")]
    pub(crate) mirror: Option<String>,
    /// A program of the image that the machine starts as root, without capabilities, before the first command:
    /// NAME=PATH, arguments behind blanks; may be given several times.
    #[arg(long, value_name = "NAME=PATH")]
    pub(crate) service: Vec<String>,
    /// Keep set-user-id and set-group-id bits, which the machine ignores either way.
    #[arg(long)]
    pub(crate) keep_setuid: bool,
    /// Don't make the template that runs of the image start from: the first run makes it.
    #[arg(long)]
    pub(crate) no_template: bool,
    /// Print the result as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImageShow {
    /// Name of the image.
    #[arg(value_name = "NAME", value_parser = image_name)]
    pub(crate) name: String,
    /// Print everything, the manifest included, as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImageRm {
    /// Name of the image.
    #[arg(value_name = "NAME", value_parser = image_name)]
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct Report {
    /// The record: its folder, or the name of its run or the beginning of it.
    #[arg(value_name = "BUNDLE")]
    pub(crate) bundle: PathBuf,
    /// The file to write; without it, standard output.
    #[arg(short, long, value_name = "FILE.html")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Profile {
    /// Make a fingerprint from the records of reference runs.
    Absorb {
        /// Records of runs that behaved as they should.
        #[arg(required = true, value_name = "BUNDLE")]
        bundles: Vec<PathBuf>,
        /// The file to make.
        #[arg(short, long, value_name = "FILE")]
        out: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::collections::{BTreeMap, BTreeSet};

    type Flags = BTreeMap<String, (BTreeSet<String>, BTreeMap<String, String>)>;

    fn commands(command: &clap::Command, path: &str, into: &mut Flags) {
        let below: Vec<&clap::Command> =
            command.get_subcommands().filter(|command| command.get_name() != "help").collect();
        if below.is_empty() {
            let mut defaults = BTreeMap::new();
            let flags = command.get_arguments().filter_map(|flag| {
                let name = format!("--{}", flag.get_long()?);
                if flag.get_action().takes_values()
                    && let Some(default) = flag.get_default_values().first()
                {
                    defaults.insert(name.clone(), format!("`{}`", default.display()));
                }
                (name != "--help" && name != "--version").then_some(name)
            });
            let flags = flags.collect();
            into.insert(path.to_owned(), (flags, defaults));
        }
        for command in below {
            commands(command, &format!("{path} {}", command.get_name()), into);
        }
    }

    #[test]
    fn values_are_taken_apart_where_they_can_only_be() {
        assert_eq!(put("a:b:/workspace/x:y"), Ok(("a:b".into(), "/workspace/x:y".into())));
        assert_eq!(put("a:/b:/tmp/c"), Ok(("a:/b".into(), "/tmp/c".into())));
        for wrong in ["a", "a:b", ":/tmp/b", "a:/etc/b", "a:/tmp/../b", "a:/workspace/\0"] {
            assert!(put(wrong).is_err(), "{wrong}");
        }
        assert_eq!(variable("A=b=c\n"), Ok(("A".into(), "b=c\n".into())));
        assert!(variable("=b").is_err() && variable("A").is_err());
        assert_eq!((user("7"), user("7:8")), (Ok((7, 7)), Ok((7, 8))));
        for wrong in ["0", "1:0", "4294967295", "-1", "root", "1:", ""] {
            assert!(user(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_page_lists_every_command_and_flag() {
        let page =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md")).unwrap();
        let mut found = Flags::new();
        commands(&Cli::command(), "hotcell", &mut found);
        let sections: Vec<(&str, &str)> =
            page.split("\n## ").skip(1).map(|text| text.split_once('\n').unwrap()).collect();
        let listed: BTreeSet<&str> =
            sections.iter().map(|(name, _)| *name).filter(|name| name.starts_with("hotcell ")).collect();
        assert_eq!(listed, found.keys().map(String::as_str).collect());
        for (name, text) in sections {
            let Some((flags, defaults)) = found.get(name) else { continue };
            let rows: Vec<Vec<&str>> = text
                .lines()
                .filter(|line| line.starts_with("| `--"))
                .map(|line| line.split('|').map(str::trim).collect())
                .collect();
            let named: BTreeSet<String> =
                rows.iter().map(|row| row[1].trim_matches('`').to_owned()).collect();
            assert_eq!(&named, flags, "{name}");
            for row in rows {
                if let Some(default) = defaults.get(row[1].trim_matches('`')) {
                    assert_eq!(row[2], default, "{name} {}", row[1]);
                }
            }
        }
    }
}
