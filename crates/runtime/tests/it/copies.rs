//! Files in and out. A hostile packer gets nothing outside its stage, nothing over its limits, and nothing half.

use crate::lab::*;
use hotcell_decide::{Direction, HostFact, Verdict};
use hotcell_ledger::Digest;
use hotcell_runtime::{CopyError, GetRequest, PutRequest, Run};
use hotcell_testkit::{FakeGuest, FromHost};
use hotcell_wire::{ExecEnd, ExecEnded, GuestFrame, Program, STREAM_CHUNK, STREAM_WINDOW, Stage, Stream};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};
use tar::{Builder, EntryType, Header};

/// One entry: name, kind, what a link leads to, content.
type Entry<'a> = (&'a str, EntryType, &'a str, &'a [u8]);
const FILE: EntryType = EntryType::Regular;
const DIR: EntryType = EntryType::Directory;

fn entry(builder: &mut Builder<Vec<u8>>, (name, kind, link, data): Entry<'_>) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(if kind == DIR { 0o755 } else { 0o4640 });
    header.set_mtime(1_000_000_000);
    header.set_size(data.len() as u64);
    // By force: the builder refuses bad names.
    let old = header.as_old_mut();
    old.name[..name.len()].copy_from_slice(name.as_bytes());
    old.linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_cksum();
    builder.append(&header, data).unwrap();
}

fn archive(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    entries.iter().for_each(|one| entry(&mut builder, *one));
    builder.into_inner().unwrap()
}

/// Sends bytes as the packer's output, within the credit, and says that it ended.
fn pack(guest: &mut FakeGuest, id: u32, bytes: &[u8], code: i32) {
    let mut credit = STREAM_WINDOW as usize;
    for chunk in bytes.chunks(STREAM_CHUNK) {
        while credit < chunk.len() {
            match guest.receive() {
                Some(FromHost::Credit(_, Stream::Stdout, more)) => credit += more as usize,
                Some(FromHost::KillTree(_)) => return killed(guest, id),
                Some(_) => {}
                None => return,
            }
        }
        credit -= chunk.len();
        guest.send(id, &GuestFrame::Stdout(chunk));
    }
    guest.exited(id, code);
}

fn killed(guest: &mut FakeGuest, id: u32) {
    let code = 9.into();
    let ended = ExecEnded { how: ExecEnd::Signalled, stage: Stage::None, stragglers: 0, reserved: 0, code };
    guest.send(id, &GuestFrame::ExecEnded(&ended));
}

/// A guest that answers every packer so, and is honest besides.
fn packs(bytes: impl Fn() -> Vec<u8> + Send + Sync + 'static, code: i32) -> Lab {
    Lab::new(move |guest| {
        guest.boot();
        loop {
            match guest.receive() {
                Some(FromHost::Exec { id, program: Program::Pack, .. }) => pack(guest, id, &bytes(), code),
                Some(FromHost::Quiesce) => {
                    guest.send(0, &GuestFrame::Quiesced);
                }
                Some(_) => {}
                None => return,
            }
        }
    })
}

fn get(run: &Run, path: &str) -> Result<hotcell_runtime::CopyResult, CopyError> {
    run.get(GetRequest::into_bundle(path))
}

/// Whatever the packer sent, it did not work and nothing is left of it, and the run goes on to a good end.
#[track_caller]
fn assert_refused(bytes: Vec<u8>, words: &str) {
    let lab = packs(move || bytes.clone(), 0);
    let outside = lab.home.path().join("outside");
    fs::write(&outside, b"safe").unwrap();
    let target = lab.home.path().join("target");
    let run = lab.start_with(|policy| policy.limits.copy_files = 40);
    for request in [GetRequest::into_bundle("/workspace/t"), GetRequest::to("/workspace/t", &target)] {
        let error = run.get(request).unwrap_err().to_string();
        assert!(error.contains(words), "{words:?} is not in {error:?}");
    }
    let report = finish(run);
    let record = assert_allowed(&lab, &report);
    assert!(!record.has("copied") && record.has("copy_ended"), "{:?}", record.names());
    assert_eq!(fs::read(&outside).unwrap(), b"safe");
    assert!(!target.exists() && !record.dir.join("files").exists());
    for dir in [lab.home.path(), &record.dir] {
        let parts =
            entries(dir).iter().filter(|path| path.to_string_lossy().contains(".hotcell-part")).count();
        assert_eq!(parts, 0, "a stage is left in {}", dir.display());
    }
}

#[test]
fn hostile_archives_get_nowhere() {
    let top: Entry<'_> = ("workspace/t", DIR, "", b"");
    for (entries, words) in [
        (vec![("../../outside", FILE, "", b"evil".as_slice())], "`..`"),
        (vec![top, ("workspace/t/../../../outside", FILE, "", b"evil")], "`..`"),
        (vec![("/tmp/outside", FILE, "", b"evil")], "absolute"),
        (vec![("workspace/other", FILE, "", b"evil")], "not asked for"),
        (vec![("workspace/tt", FILE, "", b"evil")], "not asked for"),
        (vec![("workspace", DIR, "", b"")], "not asked for"),
        (vec![top, ("workspace/t/a", FILE, "", b"1"), ("workspace/t/a", FILE, "", b"2")], "twice"),
        (vec![top, ("workspace/t/a", DIR, "", b""), ("workspace/t/a", FILE, "", b"2")], "twice"),
        (vec![top, ("workspace/t/no/where", FILE, "", b"1")], "no directory of the archive"),
        (vec![("workspace/t", EntryType::Symlink, "/etc", b"")], "is a link"),
        (vec![top, ("workspace/t/h", EntryType::Link, "workspace/t/none", b"")], "did not come before"),
        (vec![top, ("workspace/t/h", EntryType::Link, "etc/passwd", b"")], "not asked for"),
        (vec![top, ("workspace/t/h", EntryType::Link, "../outside", b"")], "`..`"),
        (vec![("workspace/t", EntryType::Char, "", b"")], "neither file"),
        (vec![("workspace/t", EntryType::Fifo, "", b"")], "neither file"),
        (vec![], "sent nothing"),
    ] {
        assert_refused(archive(&entries), words);
    }
}

#[test]
fn a_link_that_came_out_leads_no_later_entry_out() {
    // To a target of the host, where links are made, both ways of using one are refused.
    for link in ["d", "."] {
        let bytes = archive(&[
            ("workspace/t", DIR, "", b""),
            ("workspace/t/d", DIR, "", b""),
            ("workspace/t/l", EntryType::Symlink, link, b""),
            ("workspace/t/l/file", FILE, "", b"through the link"),
        ]);
        let lab = packs(move || bytes.clone(), 0);
        let run = lab.start();
        let target = lab.home.path().join("target");
        let error = run.get(GetRequest::to("/workspace/t", &target)).unwrap_err().to_string();
        assert!(error.contains("no directory of the archive"), "{error}");
        assert!(!target.exists());
        assert_allowed(&lab, &finish(run));
    }
}

#[test]
fn limits_hold_from_the_header_alone() {
    let many = |count: usize| {
        let names: Vec<String> = (0..count).map(|n| format!("workspace/t/{n}")).collect();
        let mut all: Vec<Entry<'_>> = vec![("workspace/t", DIR, "", b"")];
        all.extend(names.iter().map(|name| (name.as_str(), FILE, "", b"".as_slice())));
        archive(&all)
    };
    assert_refused(many(40), "copy_files, 40");
    // A sparse terabyte: its header, and zeroes for as long as they are taken.
    let mut header = Header::new_gnu();
    header.set_entry_type(FILE);
    header.set_path("workspace/t").unwrap();
    header.set_mode(0o644);
    header.set_mtime(0);
    header.set_size(1 << 40);
    header.set_cksum();
    assert_refused([header.as_bytes().to_vec(), vec![0; 4 << 20]].concat(), "copy_mib, 1024 MiB");
    let deep = || {
        let names: Vec<String> = (0..34).map(|depth| format!("workspace/t{}", "/d".repeat(depth))).collect();
        archive(&names.iter().map(|name| (name.as_str(), DIR, "", b"".as_slice())).collect::<Vec<_>>())
    };
    let lab = packs(deep, 0);
    let run = lab.start();
    assert!(get(&run, "/workspace/t").unwrap_err().to_string().contains("too deep"));
    let target = lab.home.path().join("target");
    assert!(run.get(GetRequest::to("/workspace/t", &target)).is_ok(), "no record's limits hold there");
    assert_allowed(&lab, &finish(run));
}

#[test]
fn cut_archives_rubbish_and_a_packer_that_failed_leave_nothing() {
    let whole = archive(&[("workspace/t", DIR, "", b""), ("workspace/t/f", FILE, "", &[7; 3000])]);
    assert_refused(whole[..2000].to_vec(), "has no end");
    assert_refused(vec![b'x'; 4096], "no proper archive");
    let sent = whole.clone();
    let lab = packs(move || sent.clone(), 1);
    let run = lab.start();
    let error = get(&run, "/workspace/t").unwrap_err().to_string();
    assert!(error.contains("ended with"), "{error}");
    let record = assert_allowed(&lab, &finish(run));
    assert!(!record.dir.join("files").exists());
}

#[test]
fn what_can_be_kept_is_kept_and_what_not_is_said() {
    let bytes = archive(&[
        ("workspace/t", DIR, "", b""),
        ("workspace/t/new\nline", FILE, "", b"content"),
        ("workspace/t/same", EntryType::Link, "workspace/t/new\nline", b""),
        ("workspace/t/inside", EntryType::Symlink, "same", b""),
        ("workspace/t/abs", EntryType::Symlink, "/etc/passwd", b""),
        ("workspace/t/up", EntryType::Symlink, "../../x", b""),
        ("workspace/t/null", EntryType::Char, "", b""),
        ("workspace/t/Case", FILE, "", b"A"),
        ("workspace/t/case", FILE, "", b"a"),
    ]);
    let lab = packs(move || bytes.clone(), 0);
    let target = lab.home.path().join("target");
    let run = lab.start();
    let kept = get(&run, "/workspace/t").unwrap();
    let outside = run.get(GetRequest::to("/workspace/t", &target)).unwrap();
    assert!(get(&run, "/workspace/t").unwrap_err().to_string().contains("there already"));
    assert!(run.get(GetRequest::to("/workspace/t", &target)).is_err(), "nothing is replaced");
    let report = finish(run);
    let record = assert_allowed(&lab, &report);
    assert_eq!((kept.entries, kept.bytes, kept.left_out.len()), (5, 9, 4), "{kept:?}");
    assert_eq!((outside.entries, outside.left_out.len()), (6, 3), "{outside:?}");
    let in_bundle = record.dir.join("files/workspace/t");
    for place in [in_bundle.as_path(), &target] {
        let file = fs::metadata(place.join("new\nline")).unwrap();
        assert_eq!((file.permissions().mode() & 0o7777, file.mtime()), (0o640, 1_000_000_000));
        assert_eq!(fs::metadata(place.join("same")).unwrap().ino(), file.ino());
        assert_eq!(
            (fs::read(place.join("Case")).unwrap(), fs::read(place.join("case")).unwrap()),
            (b"A".into(), b"a".into())
        );
        assert!(
            place.join("abs").symlink_metadata().is_err() && place.join("null").symlink_metadata().is_err()
        );
    }
    assert_eq!(fs::read_link(target.join("inside")).unwrap(), Path::new("same"));
    assert!(in_bundle.join("inside").symlink_metadata().is_err());
    let digest = Digest::of(b"content");
    assert!(record.facts.iter().any(
        |(fact, ..)| matches!(fact, HostFact::Copied { direction: Direction::Out, path, digest: of, .. }
        if path == "/workspace/t/new\nline" && *of == digest)
    ));
}

#[test]
fn a_put_is_on_record_before_the_guest_has_all_of_it() {
    let came = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&came);
    let lab = Lab::new(move |guest| {
        guest.boot();
        loop {
            match guest.receive() {
                Some(FromHost::Stdin(id, bytes)) => {
                    seen.lock().unwrap().extend_from_slice(&bytes);
                    guest.send(id, &GuestFrame::StdinCredit(bytes.len() as u32));
                }
                Some(FromHost::StdinEof(id)) => {
                    guest.exited(id, 0);
                }
                Some(FromHost::Quiesce) => {
                    guest.send(0, &GuestFrame::Quiesced);
                }
                Some(_) => {}
                None => return,
            }
        }
    });
    let source = lab.home.path().join("source");
    fs::create_dir_all(source.join("d")).unwrap();
    fs::write(source.join("d/file"), vec![5; 3 << 20]).unwrap();
    let run = lab.start();
    let result = run.put(PutRequest::new(&source, "/workspace/s").unwrap()).unwrap();
    assert_eq!((result.entries, result.bytes, result.place), (3, 3 << 20, None));
    let record = assert_allowed(&lab, &finish(run));
    let names: Vec<_> = record.names().into_iter().filter(|name| name.starts_with("cop")).collect();
    assert_eq!(names, ["copied", "copied", "copied", "copy_ended"]);
    let bytes = came.lock().unwrap().clone();
    let mut archive = tar::Archive::new(&*bytes);
    let names: Vec<String> = archive
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().display().to_string())
        .collect();
    assert_eq!(names, ["s", "s/d", "s/d/file"]);
}

#[test]
fn limits_hold_on_the_way_in_and_a_refused_put_costs_nothing() {
    let lab = Lab::honest();
    let source = lab.home.path().join("source");
    fs::create_dir_all(&source).unwrap();
    for name in 0..10 {
        fs::write(source.join(name.to_string()), [0; 300_000]).unwrap();
    }
    let run = lab.start_with(|policy| (policy.limits.copy_mib, policy.limits.copy_files) = (1, 30));
    let put = |path: &Path| run.put(PutRequest::new(path, "/workspace/x").unwrap());
    let error = put(&source).unwrap_err();
    assert!(matches!(&error, CopyError::Refused(why) if why.contains("copy_mib, 1 MiB")), "{error}");
    assert!(put(&source.join("1")).is_ok(), "what was refused is not counted");
    let small = lab.home.path().join("small");
    fs::create_dir_all(&small).unwrap();
    (0..30).for_each(|name| fs::write(small.join(name.to_string()), b"").unwrap());
    assert!(put(&small).unwrap_err().to_string().contains("copy_files, 30"));
    assert_allowed(&lab, &finish(run));
}

#[test]
fn a_run_that_could_not_do_a_copy_is_failed_where_its_caller_says_so() {
    let lab = packs(Vec::new, 1);
    let run = lab.start();
    let error = get(&run, "/workspace/t").unwrap_err();
    run.fail("get", &error.to_string());
    let report = finish(run);
    assert_eq!(report.verdict, Verdict::Failed, "{report:?}");
    assert_failed(&lab, &report, "not copied");
}

#[test]
fn a_copy_ends_with_its_run() {
    let lab = Lab::new(|guest| {
        guest.boot();
        guest.ignore();
    })
    .impatient();
    let run = lab.start_with(|policy| policy.limits.timeout_s = 1);
    let error = get(&run, "/workspace/t").unwrap_err();
    assert!(matches!(error, CopyError::RunEnded(_)), "{error}");
    assert_killed(&lab, &finish(run), &["sandbox_destroyed"]);
}
