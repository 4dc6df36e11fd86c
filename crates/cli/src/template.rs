//! `hotcell template`: ls, rm.

use crate::args;
use crate::exit::Fatal;
use crate::home::Home;
use crate::say;
use hotcell_vm::{Template, TemplateStore};
use std::process::ExitCode;

pub(crate) fn template(command: args::Template) -> Result<ExitCode, Fatal> {
    let home = Home::from_env().map_err(Fatal::failed)?;
    let store = TemplateStore::in_cache(home.cache());
    match command {
        args::Template::Ls(args) => list(&store, &args),
        args::Template::Rm(args) => {
            let ids = if args.all { ids(&store)? } else { args.ids };
            for id in ids {
                store.remove(&id).map_err(Fatal::failed)?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn ids(store: &TemplateStore) -> Result<Vec<String>, Fatal> {
    Ok(store.list().map_err(Fatal::failed)?.into_iter().map(|(id, _)| id).collect())
}

fn list(store: &TemplateStore, args: &args::TemplateLs) -> Result<ExitCode, Fatal> {
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
    if args.json {
        let rows: Vec<_> = rows.iter().map(|(id, found)| as_json(id, found)).collect();
        say::json(&serde_json::json!({ "templates": rows }))?;
    } else {
        for (id, found) in &rows {
            match found {
                Ok(template) => {
                    say::line(format_args!("{id}  {} MiB", template.filled().div_ceil(1 << 20)))?;
                }
                Err(why) => say::line(format_args!("{id}  not used: {why}"))?,
            }
        }
    }
    if damaged && args.verify {
        return Err(Fatal::failed("a template is damaged: the next run that needs it makes it anew"));
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(id: &str, found: &Result<Template, String>) -> serde_json::Value {
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
                "id": id, "usable": true, "bytes": template.filled(), "parts": parts, "inputs": template.inputs(),
            })
        }
        Err(why) => serde_json::json!({ "id": id, "usable": false, "why": why }),
    }
}
