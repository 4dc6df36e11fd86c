//! `hotcell kernel`: build, ls.

use crate::args;
use crate::bar::Bar;
use crate::exit::Fatal;
use crate::session::Session;
use hotcell_image::{Kernel, KernelKind};
use hotcell_vm::TemplateStore;
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
                forget(&session.templates(), &old.digest().to_hex())?;
            }
            let done = if new { "built" } else { "is there already, from the current source" };
            println!("{} {done}. `hotcell run --kernel slim` boots it", line(KernelKind::Slim, &kernel));
        }
        args::Kernel::Ls => {
            for kind in KernelKind::ALL {
                if let Some(kernel) = session.store.present_kernel(kind).map_err(Fatal::failed)? {
                    println!("{}", line(kind, &kernel));
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes the templates of a kernel that is no more.
fn forget(templates: &TemplateStore, kernel: &str) -> Result<(), Fatal> {
    for (id, template) in templates.list().map_err(Fatal::failed)? {
        if template.is_ok_and(|template| template.inputs().get("kernel").is_some_and(|of| of == kernel)) {
            templates.remove(&id).map_err(Fatal::failed)?;
        }
    }
    Ok(())
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
