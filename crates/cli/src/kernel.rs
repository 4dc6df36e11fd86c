//! `hotcell kernel`: build, ls.

use crate::args;
use crate::bar::Bar;
use crate::exit::Fatal;
use crate::say;
use crate::session::Session;
use hotcell_image::{Kernel, KernelKind};
use std::process::ExitCode;

pub(crate) fn kernel(command: &args::Kernel) -> Result<ExitCode, Fatal> {
    let session = Session::open()?;
    match command {
        args::Kernel::Build => {
            let old = session.store.present_kernel(KernelKind::Slim).ok().flatten();
            let mut bar = Bar::new();
            let built = session.store.build_slim(&mut bar);
            bar.end();
            let (kernel, new) = built.map_err(Fatal::failed)?;
            if let Some(old) = old.filter(|_| new) {
                session.forget_templates("kernel", &old.digest().to_hex())?;
            }
            let done = if new { "built" } else { "is there already, from the current source" };
            let kernel = line(KernelKind::Slim, &kernel);
            say::line(format_args!("{kernel} {done}. `hotcell run --kernel slim` boots it"))?;
        }
        args::Kernel::Ls => {
            for kind in KernelKind::ALL {
                if let Some(kernel) = session.store.present_kernel(kind).map_err(Fatal::failed)? {
                    say::line(line(kind, &kernel))?;
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn line(kind: KernelKind, kernel: &Kernel) -> String {
    format!("{}  {}  ({})", kind.as_str(), kernel.release(), kernel.package())
}

impl From<args::Kernels> for KernelKind {
    fn from(kernel: args::Kernels) -> KernelKind {
        match kernel {
            args::Kernels::Cloud => KernelKind::Cloud,
            args::Kernels::Slim => KernelKind::Slim,
        }
    }
}
