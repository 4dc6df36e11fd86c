//! What people type who know Docker, and what Hotcell has in its place.
//!
//! Called where the command line can't be read; adds a hint to clap's own words, and never guesses what was meant.

use clap::error::{ContextKind, ContextValue, ErrorKind};

const NO_TERMINAL: &str =
    "the command reads hotcell's stdin as it is, and there is no terminal in the machine: leave it out";
const NO_SHARE: &str =
    "nothing of this host is shared: `--put SRC:DST` copies files in, `--get PATH` copies them out";
const NO_NETWORK: &str = "no machine has a network, and no setting gives it one: leave it out";
const NO_PRIVILEGE: &str = "no setting lifts a wall; what needs root can be a root service of the image (`hotcell image build --service`)";
const LIMITS: &str = "limits stand in a policy file: `[limits] vcpus, memory_mib, pids, disk_mib`, given as `--policy FILE.toml`";

/// Flags of `docker run`, and what stands here in their place.
const FLAGS: &[(&[&str], &str)] = &[
    (&["-i", "-t", "--interactive", "--tty"], NO_TERMINAL),
    (&["--rm"], "every machine is gone when its run ends, and its record stays: leave it out"),
    (&["-v", "--volume", "--mount", "--volumes-from"], NO_SHARE),
    (&["-e"], "`--env NAME=VALUE`"),
    (&["--env-file"], "`--env NAME=VALUE`, as often as needed"),
    (&["-w", "--workdir"], "`--cwd DIR`"),
    (&["-u"], "`--user UID[:GID]`"),
    (&["-d", "--detach"], "the shell's own `&`; `hotcell ps` lists what lives"),
    (&["--network", "--net", "-p", "--publish", "-P", "--publish-all", "--expose", "--dns"], NO_NETWORK),
    (&["--privileged", "--cap-add", "--device", "--security-opt"], NO_PRIVILEGE),
    (&["-m", "--memory", "-c", "--cpus", "--pids-limit", "--ulimit"], LIMITS),
    (&["--entrypoint"], "the command behind `--`; an image's own entrypoint goes before it"),
    (&["--read-only"], "the root is always read-only: leave it out"),
    (&["--pull"], "`hotcell image build NAME --from docker://REF`"),
];

/// Commands of Docker, and of habit.
const COMMANDS: &[(&[&str], &str)] = &[
    (&["ls", "list", "history"], "`hotcell ps --all`"),
    (&["images"], "`hotcell image ls`"),
    (&["rmi"], "`hotcell image rm NAME`"),
    (&["build"], "`hotcell image build NAME --from SOURCE`"),
    (&["pull"], "`hotcell image build NAME --from docker://REF`"),
    (&["load", "import"], "`hotcell image build NAME --from docker-archive:FILE`"),
    (&["exec", "attach", "start"], "`hotcell run -- CMD`: a machine lives for one run"),
    (&["logs"], "`hotcell report RUN -o FILE.html`"),
    (&["inspect"], "`hotcell image show NAME`, `hotcell verify RUN`"),
    (&["stop", "kill", "rm"], "Ctrl-C, or a signal to `hotcell run`; a machine is gone with its run"),
    (&["cp"], "`hotcell run --put SRC:DST --get PATH`"),
    (&["info", "check"], "`hotcell doctor`"),
    (&["prune"], "`hotcell template prune`, `hotcell reap`"),
];

/// What to say beside clap's own words.
pub(crate) fn hint(error: &clap::Error, words: &[String]) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let typed = text(ContextKind::InvalidSubcommand)?;
            in_place(COMMANDS, typed).map(|ours| format!("in place of `{typed}` Hotcell has {ours}"))
        }
        ErrorKind::UnknownArgument if words.get(1).is_some_and(|word| word == "run") => {
            let typed = text(ContextKind::InvalidArg)?;
            let flag = typed.split('=').next().unwrap_or(typed);
            if !flag.starts_with('-') {
                return Some(format!(
                    "the command goes behind `--`: hotcell run --image NAME -- CMD [ARG]...; is `{}` one of `hotcell image ls`?",
                    typed.escape_debug()
                ));
            }
            in_place(FLAGS, flag).map(|ours| format!("in place of `{flag}`: {ours}"))
        }
        _ => None,
    }
}

fn in_place(table: &[(&[&str], &'static str)], typed: &str) -> Option<&'static str> {
    table.iter().find(|(theirs, _)| theirs.contains(&typed)).map(|(_, ours)| *ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::{CommandFactory, Parser};
    use std::collections::BTreeSet;

    fn asked(words: &str) -> (ErrorKind, Option<String>) {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let error = Cli::try_parse_from(&words).expect_err(&words.join(" "));
        (error.kind(), hint(&error, &words))
    }

    #[test]
    fn a_flag_of_dockers_gets_what_stands_in_its_place() {
        for (flags, ours) in FLAGS {
            for flag in *flags {
                let (_, said) = asked(&format!("hotcell run {flag} x -- true"));
                assert!(said.as_ref().is_some_and(|said| said.contains(ours)), "{flag}: {said:?}");
            }
        }
        for (commands, ours) in COMMANDS {
            for command in *commands {
                let (_, said) = asked(&format!("hotcell {command}"));
                assert!(said.as_ref().is_some_and(|said| said.contains(ours)), "{command}: {said:?}");
            }
        }
        let (_, said) = asked("hotcell run -it --rm busybox sh");
        assert!(said.unwrap().contains("no terminal"));
        let (_, said) = asked("hotcell run --volume=/a:/b -- true");
        assert!(said.unwrap().contains("--put SRC:DST"));
        let (_, said) = asked("hotcell run busybox ls");
        assert!(said.unwrap().contains("behind `--`"));
        // The controls: an unknown flag that nobody has, a flag of ours with a bad value, another command's flag.
        for none in ["hotcell run --nonsense -- true", "hotcell run --timeout 0 -- true", "hotcell ps --rm"] {
            assert_eq!(asked(none).1, None, "{none}");
        }
    }

    /// Whatever a hint names is there.
    #[test]
    fn hints_name_what_hotcell_has() {
        let cli = Cli::command();
        let run = cli.find_subcommand("run").unwrap();
        let flags: BTreeSet<String> =
            run.get_arguments().filter_map(|flag| Some(format!("--{}", flag.get_long()?))).collect();
        for (_, ours) in FLAGS {
            for word in ours.split([' ', '`', ',']).filter(|word| word.len() > 2 && word.starts_with("--")) {
                assert!(flags.contains(word) || ["--from", "--service"].contains(&word), "{word}");
            }
        }
        for (_, ours) in COMMANDS.iter().chain(FLAGS) {
            for command in ours.split("`hotcell ").skip(1) {
                let mut words = command.split(['`', ' ']);
                let first = words.next().unwrap();
                let found = cli.find_subcommand(first).unwrap_or_else(|| panic!("{first}"));
                if found.has_subcommands() {
                    let second = words.next().unwrap();
                    assert!(found.find_subcommand(second).is_some(), "{first} {second}");
                }
            }
        }
    }
}
