//! The `hotcell` command: flags, exit codes, composition. The only place that
//! touches terminal, home and environment.
#![forbid(unsafe_code)]
// `say` does it, and ends no command where nobody listens.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod bar;
mod demo;
mod doctor;
mod ending;
mod exit;
mod habits;
mod home;
mod image;
mod kernel;
#[cfg(test)]
mod pages;
mod profile;
mod records;
mod registry;
mod report;
mod run;
mod say;
mod session;
mod template;
mod verify;
mod watch;

use clap::Parser;
use exit::Fatal;
use signal_hook::consts::SIGXFSZ;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    // A limit on the size of files is a disk that takes no more: an error of the write, and no sudden death that leaves a run.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return unread(&error),
    };
    dispatch(cli).unwrap_or_else(|fatal| {
        let code = fatal.report();
        // Whatever failed first for it, and however its own words put it.
        if fatal.is_failure()
            && let Ok(home) = home::Home::from_env()
            && let Err(why) = home.writable()
        {
            say::note(format_args!("{why}: {}", home::OWN_HOME));
        }
        code
    })
}

/// A command line that can't be read, or a question about it.
fn unread(error: &clap::Error) -> ExitCode {
    // Whoever closed the stream does not want it.
    let _ = error.print();
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(hint) = habits::hint(error, &words) {
        say::note(hint);
    }
    if error.use_stderr() { ExitCode::from(exit::USAGE) } else { ExitCode::SUCCESS }
}

fn dispatch(cli: args::Cli) -> Result<ExitCode, Fatal> {
    match cli.command {
        args::Command::Run(args) => run::run(args),
        args::Command::Image(command) => image::image(command),
        args::Command::Kernel(command) => kernel::kernel(&command),
        args::Command::Template(command) => template::template(command),
        args::Command::Verify(args) => verify::verify(args),
        args::Command::Demo(args) => demo::demo(args),
        args::Command::Report(args) => report::report(&args.bundle, args.out.as_deref()),
        args::Command::Profile(args::Profile::Absorb { bundles, out }) => profile::absorb(&bundles, &out),
        args::Command::Ps(args) => registry::ps(&args),
        args::Command::Reap(args) => registry::reap(args.json),
        args::Command::Doctor(args) => doctor::doctor(args.json),
        args::Command::Key => verify::key(),
    }
}
