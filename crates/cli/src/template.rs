//! `hotcell template`: ls, rm, prune.

use crate::args;
use crate::exit::Fatal;
use crate::home::find_qemu;
use crate::say;
use crate::session::Session;
use hotcell_image::KernelKind;
use hotcell_ledger::Digest;
use hotcell_vm::{Template, TemplateStore, Usable};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::process::ExitCode;

/// Digits of an id that people see; as many name one of millions.
const SHOWN_DIGITS: usize = 12;

pub(crate) fn template(command: args::Template) -> Result<ExitCode, Fatal> {
    let session = Session::open()?;
    let store = session.templates();
    match command {
        args::Template::Ls(args) => return list(&session, &store, &args),
        args::Template::Rm(args) => {
            let all = store.list().map_err(Fatal::failed)?;
            let doomed = match args.all {
                true => all,
                false => args.ids.iter().map(|id| named(&all, id)).collect::<Result<_, _>>()?,
            };
            if doomed.is_empty() {
                say::line("there is no template")?;
            }
            remove(&session, &store, doomed)?;
        }
        args::Template::Prune => prune(&session, &store)?,
    }
    Ok(ExitCode::SUCCESS)
}

type Listed = (String, Usable);

/// The template of this id, or of the only id that begins so.
fn named(all: &[Listed], id: &str) -> Result<Listed, Fatal> {
    let mut meant = all.iter().filter(|(whole, _)| whole.starts_with(id));
    match (meant.next(), meant.next()) {
        (Some((whole, _)), None) => Ok((whole.clone(), Err(String::new()))),
        (None, _) => {
            Err(Fatal::failed(format_args!("there is no template {id}: `hotcell template ls` lists them")))
        }
        (Some(_), Some(_)) => Err(Fatal::usage(format_args!("{id} begins the ids of several templates"))),
    }
}

/// Runs that go on from one hold it open and are not disturbed.
fn remove(session: &Session, store: &TemplateStore, doomed: Vec<Listed>) -> Result<(), Fatal> {
    let names = Names::read(session)?;
    for (id, _) in doomed {
        let what = store.list().map_err(Fatal::failed)?.into_iter().find(|(listed, _)| *listed == id);
        let what = what.and_then(|(_, found)| found.ok()).map(|template| names.line(&template));
        store.remove(&id).map_err(Fatal::failed)?;
        say::line(format_args!(
            "removed {}  {}",
            short(&id),
            what.unwrap_or_else(|| "that could not be used".into())
        ))?;
    }
    Ok(())
}

/// Removes what no image, kernel, QEMU or Hotcell that is here can use.
fn prune(session: &Session, store: &TemplateStore) -> Result<(), Fatal> {
    // Before the images are listed: one that is built meanwhile, and its template, are not looked at.
    let all = store.list().map_err(Fatal::failed)?;
    let here = Here::read(session)?;
    let (mut kept, mut freed) = (0, 0);
    for (id, found) in all {
        let why = match &found {
            Ok(template) => match here.why_useless(template.inputs()) {
                Some(why) => why.to_owned(),
                None => {
                    kept += 1;
                    continue;
                }
            },
            Err(why) => why.clone(),
        };
        freed += found.as_ref().map_or(0, Template::filled);
        store.remove(&id).map_err(Fatal::failed)?;
        say::line(format_args!("removed {}: {why}", short(&id)))?;
    }
    say::line(format_args!("{} freed; {} kept", mib(freed), hotcell_verify::counted(kept, "template")))
}

/// What a template of use depends on.
struct Here {
    roots: BTreeSet<String>,
    /// Of each kernel its initramfs.
    kernels: BTreeMap<String, String>,
    vmm: Option<String>,
}

impl Here {
    fn read(session: &Session) -> Result<Here, Fatal> {
        let roots = session.store.roots().map_err(Fatal::failed)?.into_iter().map(|(_, root)| root).collect();
        let mut kernels = BTreeMap::new();
        for kind in KernelKind::ALL {
            if let Some(kernel) = session.store.present_kernel(kind).map_err(Fatal::failed)? {
                let initramfs = session.store.initramfs(&kernel).map_err(Fatal::failed)?;
                kernels.insert(kernel.digest().to_hex(), initramfs.digest.to_hex());
            }
        }
        let vmm = find_qemu().ok().and_then(|qemu| Digest::of_reader(File::open(qemu).ok()?).ok());
        Ok(Here { roots, kernels, vmm: vmm.map(|digest| digest.to_hex()) })
    }

    fn why_useless(&self, inputs: &BTreeMap<String, String>) -> Option<&'static str> {
        let of = |what: &str| inputs.get(what).map(String::as_str).unwrap_or_default();
        let kernel = self.kernels.get(of("kernel"));
        [
            (!self.roots.contains(of("root")), "its image is no more, or was built anew"),
            (of("hotcell") != env!("CARGO_PKG_VERSION"), "another Hotcell made it"),
            (kernel.is_none(), "its kernel is no more"),
            (kernel.is_some_and(|initramfs| initramfs != of("initramfs")), "another Hotcell made it"),
            (self.vmm.as_deref().is_some_and(|vmm| vmm != of("vmm")), "another QEMU made it"),
        ]
        .into_iter()
        .find_map(|(useless, why)| useless.then_some(why))
    }
}

/// What templates belong to, by the names that people gave.
struct Names {
    images: BTreeMap<String, Vec<String>>,
    kernels: BTreeMap<String, &'static str>,
}

impl Names {
    fn read(session: &Session) -> Result<Names, Fatal> {
        let mut images: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, root) in session.store.roots().map_err(Fatal::failed)? {
            images.entry(root).or_default().push(name.to_string());
        }
        let mut kernels = BTreeMap::new();
        for kind in KernelKind::ALL {
            // A damaged one has no digest that could be told.
            if let Ok(Some(kernel)) = session.store.present_kernel(kind) {
                kernels.insert(kernel.digest().to_hex(), kind.as_str());
            }
        }
        Ok(Names { images, kernels })
    }

    fn images(&self, template: &Template) -> &[String] {
        template.inputs().get("root").and_then(|root| self.images.get(root)).map_or(&[], Vec::as_slice)
    }

    fn line(&self, template: &Template) -> String {
        let images = match self.images(template) {
            [] => "no image that is here".to_owned(),
            names => names.join(", "),
        };
        let kernel = template.inputs().get("kernel").and_then(|kernel| self.kernels.get(kernel));
        format!("{images}, kernel {}, {}", kernel.unwrap_or(&"no more here"), mib(template.filled()))
    }
}

fn short(id: &str) -> &str {
    id.get(..SHOWN_DIGITS).unwrap_or(id)
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

fn list(session: &Session, store: &TemplateStore, args: &args::TemplateLs) -> Result<ExitCode, Fatal> {
    let mut damaged = false;
    let mut rows = Vec::new();
    for (id, found) in store.list().map_err(Fatal::failed)? {
        let found = found.and_then(|template| {
            if args.verify {
                store.verify(&id)?;
            }
            Ok(template)
        });
        damaged |= found.is_err();
        rows.push((id, found));
    }
    let names = Names::read(session)?;
    if args.json {
        let rows: Vec<_> = rows.iter().map(|(id, found)| as_json(id, found, &names)).collect();
        say::json(&serde_json::json!({ "templates": rows }))?;
    } else {
        if rows.is_empty() {
            say::line("there is no template")?;
        }
        for (id, found) in &rows {
            match found {
                Ok(template) => {
                    let intact = if args.verify { ", intact" } else { "" };
                    say::line(format_args!("{}  {}{intact}", short(id), names.line(template)))?;
                }
                Err(why) => say::line(format_args!("{}  not used: {why}", short(id)))?,
            }
        }
    }
    if damaged && args.verify {
        return Err(Fatal::failed("a template is damaged: the next run that needs it makes it anew"));
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(id: &str, found: &Usable, names: &Names) -> serde_json::Value {
    match found {
        Ok(template) => {
            let parts: Vec<_> = template
                .parts()
                .iter()
                .map(|(name, digest, bytes)| {
                    serde_json::json!({ "name": name, "digest": digest.to_hex(), "bytes": bytes })
                })
                .collect();
            serde_json::json!({
                "id": id, "usable": true, "images": names.images(template), "bytes": template.filled(), "parts": parts,
                "inputs": template.inputs(),
            })
        }
        Err(why) => serde_json::json!({ "id": id, "usable": false, "why": why }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_use_is_what_all_that_is_here_can_use() {
        let here = Here {
            roots: BTreeSet::from(["root".to_owned()]),
            kernels: BTreeMap::from([("kernel".to_owned(), "initramfs".to_owned())]),
            vmm: Some("vmm".into()),
        };
        let version = env!("CARGO_PKG_VERSION");
        let whole: BTreeMap<String, String> = [
            ("root", "root"),
            ("kernel", "kernel"),
            ("initramfs", "initramfs"),
            ("vmm", "vmm"),
            ("hotcell", version),
            ("disk_mib", "any"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        assert_eq!(here.why_useless(&whole), None);
        for name in ["root", "kernel", "initramfs", "vmm", "hotcell"] {
            let mut other = whole.clone();
            other.insert(name.into(), "another".into());
            assert!(here.why_useless(&other).is_some(), "{name}");
            other.remove(name);
            assert!(here.why_useless(&other).is_some(), "without {name}");
        }
        // Where there is no QEMU to compare with, none is of no use for that.
        let other = BTreeMap::from_iter(whole.into_iter().chain([("vmm".into(), "another".into())]));
        assert_eq!(Here { vmm: None, ..here }.why_useless(&other), None);
    }

    #[test]
    fn an_id_may_be_cut_where_it_names_one() {
        let all: Vec<Listed> = ["aa11", "aa22", "b"].map(|id| (id.to_owned(), Err(String::new()))).into();
        let id = |text: &str| named(&all, text).map(|(id, _)| id).map_err(|error| error.to_string());
        assert_eq!((id("b"), id("aa1")), (Ok("b".into()), Ok("aa11".into())));
        assert!(id("aa").unwrap_err().contains("several") && id("c").unwrap_err().contains("template ls"));
    }
}
