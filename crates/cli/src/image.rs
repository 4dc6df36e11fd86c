//! `hotcell image`: build, rebuild, ls, show, rm.

use crate::args;
use crate::bar::Bar;
use crate::exit::Fatal;
use crate::session::{Job, Session};
use crate::verify;
use crate::{records, say};
use hotcell_image::{Image, ImageError, KernelKind, Limits, Pin, Recipe, Source};
use hotcell_ledger::bundle::{BundleDir, FileFault};
use hotcell_policy::limits::MAX_SPEC_BYTES;
use hotcell_policy::{EntryKind, PolicyDraft, RunDraft, ServiceDraft};
use hotcell_verify::{Identity, Options, counted, read_keys, verify_bundle};
use hotcell_vm::{AccelChoice, JailChoice};
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

pub(crate) fn image(command: args::Image) -> Result<ExitCode, Fatal> {
    let session = Session::open()?;
    match command {
        args::Image::Build(args) => build(&session, args)?,
        args::Image::Ls => {
            let names = session.store.list().map_err(Fatal::failed)?;
            if names.is_empty() {
                say::note(
                    "there is no image yet: busybox is built at first use, others by `hotcell image build`",
                );
            }
            for name in names {
                say::line(name)?;
            }
        }
        args::Image::Show(args) => {
            let image = session.store.image(&args.name, &mut |text| say::note(text));
            show(&image.map_err(Fatal::failed)?, args.json)?;
        }
        args::Image::Rebuild(args) => rebuild(&session, &args)?,
        args::Image::Rm(args) => remove(&session, &args.name)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The image, and the templates of its root unless another image has the same.
fn remove(session: &Session, name: &str) -> Result<(), Fatal> {
    // One that is damaged has no root that could be told, and is removed all the same.
    let had = root_of(session, name)?;
    session.store.remove(name).map_err(Fatal::failed)?;
    forget_root(session, had)?;
    say::line(format_args!("removed {name}"))
}

fn root_of(session: &Session, name: &str) -> Result<Option<String>, Fatal> {
    let roots = session.store.roots().map_err(Fatal::failed)?;
    Ok(roots.into_iter().find_map(|(one, root)| (one.as_str() == name).then_some(root)))
}

/// The templates of a root that an image had, if no image has it now.
fn forget_root(session: &Session, had: Option<String>) -> Result<(), Fatal> {
    let Some(had) = had else { return Ok(()) };
    let roots = session.store.roots().map_err(Fatal::failed)?;
    if roots.iter().any(|(_, root)| *root == had) { Ok(()) } else { session.forget_templates("root", &had) }
}

fn build(session: &Session, args: args::ImageBuild) -> Result<(), Fatal> {
    let here =
        std::env::current_dir().map_err(|error| Fatal::failed(format!("no current folder: {error}")))?;
    let source = Source::parse(&args.from, &here).map_err(Fatal::usage)?;
    let mut include: Vec<String> = args.include;
    include.sort();
    include.dedup();
    let services: Result<Vec<ServiceDraft>, _> =
        args.service.iter().map(|text| ServiceDraft::parse(text)).collect();
    let services = services.map_err(Fatal::usage)?;
    let (mirror, keep_setuid) = (args.mirror, args.keep_setuid);
    let recipe = Recipe { include, mirror, services, keep_setuid, ..Recipe::new(source) };
    let image = build_showing(session, &args.name, &recipe, args.pip.as_deref(), None, !args.no_template)?;
    show(&image, args.json)?;
    Ok(())
}

/// Makes the template of what `hotcell run` makes of the image without a policy. Where none can be made now, the first
/// run makes one or boots: the image is built all the same.
fn make_template(session: &Session, name: &str) {
    let job = Job {
        image: name.into(),
        kernel: KernelKind::default(),
        name: None,
        policy: PolicyDraft::for_running_a_command(),
        argv: vec!["true".into()],
        env: Vec::new(),
        cwd: None,
    };
    let made = session.runtime(AccelChoice::Auto, JailChoice::Auto, None).and_then(|runtime| {
        let mut prepared = session.prepare(job)?;
        let made = session.attach_template(&runtime, &mut prepared, "The image's first run tries again");
        Ok(prepared.boot.template.is_some().then_some(made))
    });
    match made {
        Ok(Some(true)) => {
            say::note(format_args!("the template of {name} was made: its runs go on from there"))
        }
        Ok(Some(false)) => say::note(format_args!("the template of {name} was there already")),
        // Why there is none was said.
        Ok(None) => {}
        Err(error) => {
            say::note(format_args!("no template of {name} was made, its first run makes it: {error}"))
        }
    }
}

fn build_showing(
    session: &Session,
    name: &str,
    recipe: &Recipe,
    requirements: Option<&Path>,
    pinned: Option<&str>,
    with_template: bool,
) -> Result<Image, Fatal> {
    let had = root_of(session, name)?;
    let mut bar = Bar::new();
    let built = match pinned {
        Some(pinned) => session.store.build_pinned(name, recipe, pinned, Limits::default(), &mut bar),
        None => session.store.build(name, recipe, requirements, Limits::default(), &mut bar),
    };
    bar.end();
    let image = built.map_err(|error| match error {
        ImageError::Request(_) | ImageError::Name { .. } => Fatal::usage(error),
        error => Fatal::failed(error),
    })?;
    forget_root(session, had)?;
    if with_template {
        make_template(session, name);
    }
    Ok(image)
}

/// Nothing is ever added to a live machine: what a run asked for and its policy
/// approved goes into the next image, if a person says yes.
fn rebuild(session: &Session, args: &args::ImageRebuild) -> Result<(), Fatal> {
    let image = session.store.image(&args.name, &mut |_| ()).map_err(Fatal::failed)?;
    let from_run = &records::find(&args.from_run)?;
    let trusted_keys = read_keys(&args.key).map_err(Fatal::usage)?;
    let options = Options { own_key: verify::own_key(), trusted_keys, ..Options::default() };
    let verification = verify_bundle(from_run, &options).map_err(Fatal::usage)?;
    let verified = verification.into_verified().map_err(|verification| {
        let bundle = from_run.display();
        let why = "nothing is built from it. `hotcell verify` says what is wrong";
        Fatal::failed(format!("the record {bundle} is {}: {why}", verification.outcome().as_str()))
    })?;
    let verification = verified.verification();
    if !verification
        .note
        .as_ref()
        .is_some_and(|note| matches!(note.identity, Identity::Own | Identity::Pinned))
    {
        return Err(Fatal::failed(
            "the record is signed by somebody whom Hotcell does not know: give the key with --key if you trust it",
        ));
    }
    let spec = BundleDir::open(from_run)
        .map_err(FileFault::Io)
        .and_then(|dir| dir.read(b"spec.json", MAX_SPEC_BYTES));
    let spec = spec.map_err(|fault| Fatal::failed(format!("can't read the run's spec.json: {fault}")))?;
    let spec = RunDraft::from_spec_json(&spec).map_err(Fatal::failed)?;
    if spec.image.root.to_hex() != image.details.root {
        return Err(Fatal::failed(format!(
            "the run used the root {}, and {} is now {}: what it asked for belongs to another image. Run again with this one",
            spec.image.root, args.name, image.details.root
        )));
    }
    let pending: Result<Vec<Pin>, _> =
        verification.derived.pending_rebuild.iter().map(|text| Pin::parse(text)).collect();
    let pending = pending.map_err(Fatal::failed)?;
    if pending.is_empty() {
        let name = &args.name;
        return say::line(format_args!(
            "the run asked for no package that its policy approved: {name} stays as it is"
        ));
    }
    let mut recipe = image.details.recipe.clone();
    say::line(format_args!("{} is built again from {}, with", args.name, recipe.source))?;
    for pin in &pending {
        let old = recipe.pins.iter().position(|old| old.name == pin.name).map(|at| recipe.pins.remove(at));
        let instead = old.filter(|old| old != pin).map(|old| format!(" (instead of {})", old.version));
        say::line(format_args!("  {pin}{}", instead.unwrap_or_default()))?;
    }
    recipe.pins.extend(pending);
    recipe.pins.sort();
    recipe.pins.dedup();
    if !args.yes && !asked()? {
        return Err(Fatal::failed("nothing was built"));
    }
    let pinned = image.details.resolved.as_deref();
    let image = build_showing(session, &args.name, &recipe, None, pinned, !args.no_template)?;
    show(&image, false)
}

fn asked() -> Result<bool, Fatal> {
    if !std::io::stdin().is_terminal() {
        return Err(Fatal::usage("nobody is there to be asked: look at the list and give --yes"));
    }
    say::question("Build it? [y/N] ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).map_err(Fatal::failed)?;
    Ok(matches!(answer.trim(), "y" | "yes"))
}

/// Files, executables and so on of an image.
#[derive(Default)]
struct Count {
    files: u64,
    directories: u64,
    links: u64,
    executables: u64,
    set_id: u64,
    bytes: u64,
}

fn count(image: &Image) -> Count {
    let mut count = Count::default();
    for (_, entry) in image.manifest.entries() {
        match &entry.kind {
            EntryKind::File { bytes, .. } => {
                count.files += 1;
                count.bytes += bytes;
                count.set_id += u64::from(entry.mode & 0o6000 != 0);
            }
            EntryKind::Directory => count.directories += 1,
            EntryKind::Symlink { .. } => count.links += 1,
        }
        count.executables += u64::from(entry.is_executable());
    }
    count
}

fn show(image: &Image, json: bool) -> Result<(), Fatal> {
    let (count, details) = (count(image), &image.details);
    if json {
        let manifest: serde_json::Value =
            serde_json::from_slice(&image.manifest.to_json()).unwrap_or_default();
        let value = serde_json::json!({
            "name": image.name.as_str(), "details": details, "files": count.files,
            "directories": count.directories, "links": count.links, "bytes": count.bytes,
            "executables": count.executables, "set_id": count.set_id,
            "baseline": hotcell_policy::EnvironmentBaseline::from_manifest(&image.manifest).digest().to_hex(),
            "binaries": image.manifest.binaries().digest().to_hex(), "manifest": manifest,
        });
        return say::json(&value);
    }
    let mut lines = Vec::new();
    let mut line = |name: &str, value: String| lines.push(format!("{name:<12} {value}"));
    line("image", image.name.to_string());
    line("source", details.recipe.source.to_string());
    if !details.recipe.include.is_empty() {
        line("packages", details.recipe.include.join(", "));
    }
    for pin in &details.recipe.pins {
        line("wheel", pin.to_string());
    }
    if let Some(resolved) = &details.resolved {
        line("pinned", resolved.clone());
    }
    line(
        "size",
        format!(
            "{} MiB, {} MiB unpacked",
            details.root_bytes.div_ceil(1 << 20),
            count.bytes.div_ceil(1 << 20)
        ),
    );
    let Count { files, directories, links, executables, set_id, .. } = count;
    line(
        "entries",
        format!(
            "{}, {directories} {}, {}",
            counted(files, "file"),
            if directories == 1 { "directory" } else { "directories" },
            counted(links, "link")
        ),
    );
    let different = image.manifest.binaries().len();
    line("executables", format!("{}, {different} different", counted(executables, "file")));
    line("set-id", set_id.to_string());
    for (kind, count) in &details.left_out {
        line("left out", format!("{count} {kind}"));
    }
    line("root", details.root.clone());
    line("manifest", details.manifest.clone());
    for service in image.manifest.services() {
        line("service", format!("{} as root: {:?} {}", service.name, service.argv, service.binary));
    }
    let config = &details.config;
    for (name, value) in &config.env {
        line("env", format!("{name}={value}"));
    }
    if let Some(workdir) = &config.workdir {
        line("workdir", workdir.clone());
    }
    let user = config.user.as_deref().unwrap_or("none or root, so the agent");
    line("user", format!("{}:{} ({user})", config.uid, config.gid));
    for (name, words) in [("entrypoint", &config.entrypoint), ("cmd", &config.cmd)] {
        if !words.is_empty() {
            line(name, format!("{words:?}"));
        }
    }
    lines.into_iter().try_for_each(say::line)
}
