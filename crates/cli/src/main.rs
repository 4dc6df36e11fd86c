//! The `hotcell` command: flags, exit codes, composition. The only place that
//! touches terminal, home and environment.
#![forbid(unsafe_code)]

mod args;
mod bar;
mod demo;
mod doctor;
mod exit;
mod home;
mod image;
mod kernel;
mod profile;
mod registry;
mod report;
mod run;
mod session;
mod template;
mod verify;
mod watch;

use clap::Parser;
use exit::Fatal;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = args::Cli::parse();
    dispatch(cli).unwrap_or_else(|fatal| fatal.report())
}

fn dispatch(cli: args::Cli) -> Result<ExitCode, Fatal> {
    match cli.command {
        args::Command::Run(args) => run::run(args),
        args::Command::Image(command) => image::image(command),
        args::Command::Kernel(command) => kernel::kernel(&command),
        args::Command::Template(command) => template::template(command),
        args::Command::Verify(args) => verify::verify(&args),
        args::Command::Demo(args) => demo::demo(args),
        args::Command::Report(args) => report::report(&args.bundle, args.out.as_deref()),
        args::Command::Profile(args::Profile::Absorb { bundles, out }) => profile::absorb(&bundles, &out),
        args::Command::Ps(args) => registry::ps(args.json),
        args::Command::Reap(args) => registry::reap(args.json),
        args::Command::Doctor(args) => doctor::doctor(args.json),
        args::Command::Key => verify::key(),
    }
}
