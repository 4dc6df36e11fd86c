//! Reading again and again: what is told, how much of it, and what a disk that makes no sense comes to.

use crate::image::Image;
use hotcell_decide::{DiskMoment, HostFact, ViolationKind};
use hotcell_ledger::{Digest, FileOp};
use hotcell_observe::disk::{Explain, Explained, MAX_LISTED, Scanner};
use hotcell_observe::{ObserveError, Sighting};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// Disks of one identity: one can take the place of another under a scanner.
const SAME: [&str; 4] = ["-U", "a1b2c3d4-0000-4000-8000-000000000001", "-N", "8192"];

fn disk(fill: impl FnOnce(&Path)) -> Image {
    Image::new(32, &SAME, fill)
}

/// What a guest would have done meanwhile.
fn becomes(image: &Image, other: &Image) {
    let to = File::options().write(true).open(&image.path).unwrap();
    to.write_all_at(&other.bytes(), 0).unwrap();
    // A while ago, so that a reading is sure.
    to.set_modified(SystemTime::now() - Duration::from_secs(1)).unwrap();
}

fn files(tree: &Path, count: usize) {
    for number in 0..count {
        let dir = tree.join(format!("d{}", number % 50));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(number.to_string()), number.to_string()).unwrap();
    }
}

fn all_granted() -> Explain {
    Box::new(|_| Explained::By("/workspace".into()))
}

fn out_granted() -> Explain {
    Box::new(|path| match path.starts_with("/workspace/out") {
        true => Explained::By("/workspace/out".into()),
        false => Explained::No,
    })
}

fn mutations(seen: &[Sighting]) -> Vec<(FileOp, &str)> {
    let mutation = |sighting| match sighting {
        &Sighting::Mutation { op, ref path, .. } => Some((op, path.as_str())),
        Sighting::Fact(_) => None,
    };
    seen.iter().filter_map(mutation).collect()
}

fn counted(seen: &[Sighting]) -> BTreeMap<String, u64> {
    let mut sum = BTreeMap::new();
    for sighting in seen {
        if let Sighting::Fact(HostFact::MutationsCounted { within, changes, .. }) = sighting {
            for place in within {
                *sum.entry(place.clone()).or_default() += changes.values().sum::<u64>();
            }
        }
    }
    sum
}

fn last_read(seen: &[Sighting]) -> (DiskMoment, u64, u64, Option<String>) {
    let read = seen.iter().rev().find_map(|sighting| match sighting {
        Sighting::Fact(HostFact::DiskRead { at, names, changes, unread, .. }) => {
            Some((*at, *names, *changes, unread.clone()))
        }
        _ => None,
    });
    read.unwrap_or_else(|| panic!("no reading: {seen:?}"))
}

#[test]
fn explained_changes_beyond_a_bound_are_counted_where_they_lie() {
    let image = disk(|_| ());
    let mut scanner = Scanner::new(image.file(), all_granted());
    assert_eq!(last_read(&scanner.arm().unwrap()), (DiskMoment::Armed, 2, 0, None));
    becomes(&image, &disk(|tree| files(tree, 3000)));
    let seen = scanner.read().unwrap();
    let made = 3000 + 50;
    assert_eq!(mutations(&seen).len(), MAX_LISTED);
    assert_eq!(counted(&seen), BTreeMap::from([("/workspace".to_owned(), (made - MAX_LISTED) as u64)]));
    let end = scanner.finish(true).unwrap();
    assert_eq!((mutations(&end).len(), counted(&end).len()), (0, 0));
    assert_eq!(last_read(&end), (DiskMoment::Quiet, made as u64 + 2, 0, None));
}

/// What the host copies in is told once, as what it has become.
#[test]
fn half_of_a_copy_under_way_is_not_told_and_the_whole_of_it_once() {
    let image = disk(|_| ());
    let under_way = Arc::new(AtomicBool::new(true));
    let asked = Arc::clone(&under_way);
    let explain: Explain = Box::new(move |path| match path.starts_with("/workspace/in") {
        true if asked.load(Ordering::Relaxed) => Explained::Copying,
        true => Explained::Copied,
        false => Explained::No,
    });
    let mut scanner = Scanner::new(image.file(), explain);
    scanner.arm().unwrap();
    becomes(&image, &disk(|tree| fs::write(tree.join("in"), b"half").unwrap()));
    assert_eq!(mutations(&scanner.read().unwrap()), []);
    // The control: what is no copy is told at once.
    becomes(
        &image,
        &disk(|tree| {
            fs::write(tree.join("in"), b"half and more").unwrap();
            fs::write(tree.join("other"), b"not copied").unwrap();
        }),
    );
    assert_eq!(mutations(&scanner.read().unwrap()), [(FileOp::Create, "/workspace/other")]);
    under_way.store(false, Ordering::Relaxed);
    becomes(
        &image,
        &disk(|tree| {
            fs::write(tree.join("in"), b"half and the other half").unwrap();
            fs::write(tree.join("other"), b"not copied").unwrap();
        }),
    );
    let seen = scanner.read().unwrap();
    let whole = Digest::of(b"half and the other half");
    let told = seen.iter().filter(|sighting| {
        matches!(sighting, Sighting::Mutation { op: FileOp::Create, path, before, after }
            if path == "/workspace/in" && *before == Digest::ZERO && *after == whole)
    });
    assert_eq!((told.count(), mutations(&seen).len()), (1, 1), "{seen:?}");
}

#[test]
fn what_nothing_explains_comes_first() {
    let image = disk(|_| ());
    let mut scanner = Scanner::new(image.file(), out_granted());
    scanner.arm().unwrap();
    becomes(
        &image,
        &disk(|tree| {
            fs::create_dir(tree.join("out")).unwrap();
            files(&tree.join("out"), 200);
            fs::write(tree.join("zz"), b"elsewhere").unwrap();
        }),
    );
    let seen = scanner.read().unwrap();
    assert_eq!(mutations(&seen)[0], (FileOp::Create, "/workspace/zz"));
    assert_eq!(mutations(&seen).len(), 252);
}

#[test]
fn a_run_lists_only_so_much() {
    let (empty, full) = (disk(|_| ()), disk(|tree| files(tree, 2000)));
    let image = disk(|_| ());
    let mut scanner = Scanner::new(image.file(), all_granted());
    scanner.arm().unwrap();
    let (mut listed, mut told) = (0, 0);
    for _ in 0..6 {
        for state in [&full, &empty] {
            becomes(&image, state);
            let seen = scanner.read().unwrap();
            listed += mutations(&seen).len();
            told += counted(&seen).values().sum::<u64>();
        }
    }
    assert_eq!(listed, hotcell_observe::disk::MAX_LISTED_OF_RUN);
    let end = scanner.finish(true).unwrap();
    told += counted(&end).values().sum::<u64>();
    assert_eq!(listed as u64 + told, 12 * 2050, "none is lost");
}

#[test]
fn a_disturbed_reading_is_put_off_unless_it_saw_what_nothing_explains() {
    let image = disk(|_| ());
    let other = disk(|tree| fs::write(tree.join("zz"), b"elsewhere").unwrap());
    for (explain, put_off) in [(all_granted(), 10), (out_granted(), 0)] {
        becomes(&image, &disk(|_| ()));
        let mut scanner = Scanner::new(image.file(), explain);
        scanner.arm().unwrap();
        becomes(&image, &other);
        // It is always being written, by its times.
        let soon = SystemTime::now() + Duration::from_secs(3600);
        File::options().write(true).open(&image.path).unwrap().set_modified(soon).unwrap();
        let mut empty = 0;
        while scanner.read().unwrap().is_empty() {
            empty += 1;
        }
        assert_eq!(empty, put_off);
    }
}

#[test]
fn a_device_or_a_program_of_root_is_a_violation_unless_it_was_there() {
    let image = disk(|tree| fs::write(tree.join("a"), b"a").unwrap());
    image.change("mknod old c 1 3\n");
    let mut scanner = Scanner::new(image.file(), all_granted());
    scanner.arm().unwrap();
    image.change("mknod new b 8 0\nmknod whiteout c 0 0\nsif a mode 0104755\nsif a uid 0\n");
    let told = |seen: &[Sighting]| {
        let violation = |sighting: &Sighting| match sighting {
            Sighting::Fact(HostFact::Violation { kind, subject, .. }) => Some((*kind, subject.clone())),
            _ => None,
        };
        seen.iter().filter_map(violation).collect::<Vec<_>>()
    };
    let kind = ViolationKind::UnexplainedPrivilege;
    let seen = scanner.read().unwrap();
    assert_eq!(told(&seen), [(kind, "/workspace/a".to_owned()), (kind, "/workspace/new".to_owned())]);
    assert_eq!(told(&scanner.finish(true).unwrap()), [], "each is told once");
}

#[test]
fn damage_is_nothing_on_a_moving_disk_an_error_at_rest_and_on_record_after_a_kill() {
    let image = disk(|tree| files(tree, 10));
    let mut scanner = Scanner::new(image.file(), all_granted());
    scanner.arm().unwrap();
    // The last byte of a directory's block belongs to its checksum.
    let bytes = image.bytes();
    let name = bytes.windows(2).position(|part| part == b"d9").unwrap();
    let file = File::options().write(true).open(&image.path).unwrap();
    let block = name / 1024 * 1024;
    file.write_all_at(&[bytes[block + 1023] ^ 1], block as u64 + 1023).unwrap();
    let root = scanner.read().unwrap();
    assert_eq!(root, [], "the root directory can't be read now, so nothing is known to have changed");
    let at_rest = scanner.finish(true).unwrap_err();
    assert!(
        matches!(at_rest, ObserveError::Implausible(_)) && at_rest.to_string().contains("at rest"),
        "{at_rest}"
    );
    let dead = scanner.finish(false).unwrap();
    let (at, names, changes, unread) = last_read(&dead);
    assert_eq!((at, names, changes), (DiskMoment::Dead, 0, 0));
    assert!(unread.unwrap().contains("checksum"));
    // One file that makes no sense leaves the others readable.
    file.write_all_at(&bytes, 0).unwrap();
    let inode = bytes
        .chunks(256)
        .position(|inode| inode[0..2] == 0x81a4u16.to_le_bytes() && inode[4] == 1 && inode[0x1a] == 1);
    file.write_all_at(&[7], inode.unwrap() as u64 * 256 + 0x64).unwrap();
    assert!(mutations(&scanner.read().unwrap()).is_empty());
    assert!(scanner.finish(true).is_err());
    let (at, names, _, unread) = last_read(&scanner.finish(false).unwrap());
    assert_eq!((at, names), (DiskMoment::Dead, 22), "it counts as it was");
    assert!(unread.is_some());
}

#[test]
fn a_disk_that_is_written_all_the_time_is_read_and_nothing_is_invented() {
    let image = disk(|tree| {
        files(tree, 500);
        fs::write(tree.join("moving"), vec![b'm'; 4096]).unwrap();
    });
    let mut scanner = Scanner::new(image.file(), all_granted());
    scanner.arm().unwrap();
    let bytes = image.bytes();
    let at = bytes.windows(4096).position(|part| part.iter().all(|&byte| byte == b'm')).unwrap();
    let (path, stop) = (image.path.clone(), std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let stopped = std::sync::Arc::clone(&stop);
    let writer = std::thread::spawn(move || {
        let file = File::options().write(true).open(path).unwrap();
        let mut number = 0u8;
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            number = number.wrapping_add(1);
            file.write_all_at(&[number; 4096], at as u64).unwrap();
        }
    });
    for _ in 0..20 {
        assert_eq!(scanner.read().unwrap(), []);
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    writer.join().unwrap();
    let end = scanner.finish(true).unwrap();
    assert_eq!(
        mutations(&end),
        [(FileOp::Write, "/workspace/moving")],
        "bytes without an inode show at the end"
    );
}
