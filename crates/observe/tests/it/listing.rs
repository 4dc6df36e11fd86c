//! What a listing says, and what two of them come to.

use crate::image::Image;
use hotcell_decide::{Mutation, metadata_digest};
use hotcell_ledger::{Digest, FileOp};
use hotcell_observe::disk::{
    Bounds, Change, Disk, DiskError, Effort, Geometry, Kind, Listing, SPARSE, Unread, changes,
};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};

const WHOLE: Effort = Effort { trust_inodes: false, hash_bytes: u64::MAX };
const NOTHING: Digest = Digest::ZERO;

fn listing(image: &Image) -> Listing {
    let file = image.file();
    Listing::take(&file, &Geometry::read(&file).unwrap(), None, WHOLE).unwrap()
}

fn change(op: FileOp, path: &str, before: Digest, after: Digest) -> Change {
    Change { op, path: path.into(), before, after }
}

/// Every change must be one that the judge takes.
fn checked(changes: Vec<Change>) -> Vec<Change> {
    for one in &changes {
        Mutation::new(one.op, &one.path, one.before, one.after).unwrap();
    }
    changes
}

#[test]
fn every_kind_of_name_is_listed_with_its_digest() {
    let image = Image::new(16, &[], |tree| {
        fs::write(tree.join("a"), b"hello").unwrap();
        fs::create_dir_all(tree.join("deep/er")).unwrap();
        fs::write(tree.join("deep/er/empty"), b"").unwrap();
        symlink("a", tree.join("short")).unwrap();
        symlink("x".repeat(200), tree.join("long")).unwrap();
        fs::set_permissions(tree.join("a"), PermissionsExt::from_mode(0o640)).unwrap();
        let big = File::create(tree.join("big")).unwrap();
        big.write_all_at(&vec![7; 3 << 20], 0).unwrap();
    });
    image.change("mknod pipe p\nmknod null c 1 3\n");
    let listing = listing(&image);
    let get = |path: &str| listing.get(path).unwrap_or_else(|| panic!("{path}: {listing:#?}"));
    assert_eq!(get("/workspace/a").content, Digest::of(b"hello"));
    assert_eq!(get("/workspace/a").mode, 0o640);
    assert_eq!(get("/workspace/a").size, 5);
    assert_eq!(get("/workspace/big").content, Digest::of(&vec![7; 3 << 20]));
    assert_eq!(get("/workspace/deep/er/empty").content, Digest::of(b""));
    assert_eq!(
        (get("/workspace/deep").kind, get("/workspace/deep").content),
        (Kind::Directory, Digest::of(b""))
    );
    assert_eq!(
        (get("/workspace/short").kind, get("/workspace/short").content),
        (Kind::Link, Digest::of(b"a"))
    );
    assert_eq!(get("/workspace/long").content, Digest::of("x".repeat(200).as_bytes()));
    assert_eq!(get("/workspace/pipe").kind, Kind::Fifo);
    assert_eq!(get("/workspace/null").kind, Kind::Character(0x103));
    assert_eq!((get("/workspace").uid, get("/workspace").gid), (1000, 1000));
    assert_eq!(listing.entries().len(), 11, "and lost+found: {listing:#?}");
    assert!(listing.unread().is_empty() && listing.damage().is_none() && listing.later() == 0);
    let privileged: Vec<&str> = listing.privileged().map(|(path, _)| path).collect();
    assert_eq!(privileged, ["/workspace/null"]);
}

#[test]
fn every_kind_of_change_is_one_mutation_with_both_digests() {
    let image = Image::new(16, &[], |tree| {
        for name in ["same", "written", "gone", "moved", "moded"] {
            fs::write(tree.join(name), name).unwrap();
        }
        symlink("old", tree.join("link")).unwrap();
        fs::create_dir(tree.join("dir")).unwrap();
        fs::write(tree.join("dir/inner"), b"i").unwrap();
    });
    let before = listing(&image);
    assert_eq!(checked(changes(&before, &before)), []);
    fs::write(image.home.path().join("new"), b"new bytes").unwrap();
    image.change(
        "write new new\nrm gone\nrm written\nwrite new written\nln moved other\nunlink moved\nsif moded mode 0100600\n\
         rm link\nsymlink link elsewhere\nln dir folder\nunlink dir\nsymlink fresh a\n",
    );
    let after = listing(&image);
    let of = |text: &str| Digest::of(text.as_bytes());
    let old_mode = before.get("/workspace/moded").unwrap();
    let meta = |mode| metadata_digest(mode, old_mode.uid, old_mode.gid);
    assert_eq!(
        checked(changes(&before, &after)),
        [
            change(FileOp::Rename, "/workspace/dir", of(""), NOTHING),
            change(FileOp::Rename, "/workspace/folder", NOTHING, of("")),
            change(FileOp::Rename, "/workspace/dir/inner", of("i"), NOTHING),
            change(FileOp::Rename, "/workspace/folder/inner", NOTHING, of("i")),
            change(FileOp::Rename, "/workspace/moved", of("moved"), NOTHING),
            change(FileOp::Rename, "/workspace/other", NOTHING, of("moved")),
            change(FileOp::Delete, "/workspace/gone", of("gone"), NOTHING),
            change(FileOp::Symlink, "/workspace/link", of("old"), of("elsewhere")),
            change(FileOp::Chmod, "/workspace/moded", meta(old_mode.mode), meta(0o600)),
            change(FileOp::Write, "/workspace/written", of("written"), of("new bytes")),
            change(FileOp::Symlink, "/workspace/fresh", NOTHING, of("a")),
            change(FileOp::Create, "/workspace/new", NOTHING, of("new bytes")),
        ]
        .into_iter()
        .collect::<Vec<_>>()
    );
}

#[test]
fn another_kind_under_a_name_is_a_delete_and_a_create() {
    let image = Image::new(16, &[], |tree| fs::write(tree.join("a"), b"file").unwrap());
    let before = listing(&image);
    image.change("rm a\nmkdir a\n");
    let changes = checked(changes(&before, &listing(&image)));
    assert_eq!(
        changes,
        [
            change(FileOp::Delete, "/workspace/a", Digest::of(b"file"), NOTHING),
            change(FileOp::Create, "/workspace/a", NOTHING, Digest::of(b"")),
        ]
    );
}

#[test]
fn a_file_of_holes_costs_what_it_holds() {
    let image = Image::new(16, &[], |tree| {
        let sparse = File::create(tree.join("sparse")).unwrap();
        sparse.set_len(1 << 30).unwrap();
        sparse.write_all_at(b"end", (1 << 30) - 4096).unwrap();
        let some = File::create(tree.join("some")).unwrap();
        some.write_all_at(b"end", 40_000).unwrap();
    });
    let listing = listing(&image);
    let mut some = vec![0; 40_003];
    some[40_000..].copy_from_slice(b"end");
    assert_eq!(listing.get("/workspace/some").unwrap().content, Digest::of(&some));
    let mut block = vec![0; 4096];
    block[..3].copy_from_slice(b"end");
    // Blocks of a small disk have 1024 bytes: what exists is what was written.
    let held: Vec<u8> = block[..1024].to_vec();
    let mut form = SPARSE.to_vec();
    for number in [1u64 << 30, (1 << 30) - 4096, 1024] {
        form.extend(number.to_le_bytes());
    }
    form.extend(held);
    assert_eq!(listing.get("/workspace/sparse").unwrap().content, Digest::of(&form));
    assert!(listing.hashed_bytes() < 64 * 1024);
}

#[test]
fn inodes_that_did_not_change_are_not_read_again_but_at_the_end_they_are() {
    let image = Image::new(16, &[], |tree| fs::write(tree.join("a"), vec![b'a'; 5000]).unwrap());
    let file = image.file();
    let geometry = Geometry::read(&file).unwrap();
    let first = Listing::take(&file, &geometry, None, WHOLE).unwrap();
    assert!(first.hashed_bytes() >= 5000);
    // A kernel that was taken over writes bytes and not the inode.
    let at = image.bytes().windows(5000).position(|part| part.iter().all(|&byte| byte == b'a')).unwrap();
    File::options().write(true).open(&image.path).unwrap().write_all_at(b"b", at as u64).unwrap();
    let quick = Effort { trust_inodes: true, hash_bytes: u64::MAX };
    let second = Listing::take(&file, &geometry, Some(&first), quick).unwrap();
    assert_eq!((second.hashed_bytes(), changes(&first, &second)), (0, vec![]));
    let last = Listing::take(&file, &geometry, Some(&second), WHOLE).unwrap();
    assert_eq!(changes(&second, &last).len(), 1);
}

#[test]
fn what_is_for_a_later_reading_is_unchanged_until_then() {
    let image = Image::new(16, &[], |tree| fs::write(tree.join("large"), vec![1; 50_000]).unwrap());
    let file = image.file();
    let geometry = Geometry::read(&file).unwrap();
    let first = Listing::take(&file, &geometry, None, WHOLE).unwrap();
    fs::write(image.home.path().join("small"), b"s").unwrap();
    fs::write(image.home.path().join("other"), vec![2; 60_000]).unwrap();
    image.change("write small small\nrm large\nwrite other large\nwrite other more\n");
    let tight = Effort { trust_inodes: true, hash_bytes: 1000 };
    let second = Listing::take(&file, &geometry, Some(&first), tight).unwrap();
    assert_eq!(second.later(), 2);
    let seen = changes(&first, &second);
    assert_eq!(seen, [change(FileOp::Create, "/workspace/small", NOTHING, Digest::of(b"s"))]);
    let third =
        Listing::take(&file, &geometry, Some(&second), Effort { hash_bytes: 60_000, ..tight }).unwrap();
    assert_eq!((third.later(), changes(&second, &third).len()), (1, 1));
    let fourth = Listing::take(&file, &geometry, Some(&third), tight).unwrap();
    assert_eq!((fourth.later(), changes(&third, &fourth).len()), (0, 1), "one is read whatever it costs");
}

#[test]
fn what_lies_beyond_the_bounds_is_named() {
    let image = Image::new(64, &["-N", "4096"], |tree| {
        let mut deep = tree.to_owned();
        for _ in 0..140 {
            deep.push("d");
        }
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("hidden"), b"x").unwrap();
    });
    let deep = listing(&image);
    let [(place, why)] = deep.unread() else { panic!("{:?}", deep.unread()) };
    assert_eq!((place.matches("/d").count(), *why), (128, Unread::Bound));
    assert_eq!(deep.bounds().count(), 1);
    assert!(deep.damage().is_none());
    let image = Image::new(16, &[], |tree| {
        let long = (0..16).fold(tree.to_owned(), |path, _| path.join("n".repeat(249)));
        fs::create_dir_all(long).unwrap();
    });
    let long = listing(&image);
    let [(place, why)] = long.unread() else { panic!("{:?}", long.unread()) };
    assert_eq!((place.len(), *why), (10 + 15 * 250, Unread::Bound));
}

#[test]
fn so_many_names_are_listed_and_so_many_structures_looked_at() {
    let image = Image::new(16, &[], |tree| {
        for number in 0..20 {
            fs::write(tree.join(number.to_string()), b"x").unwrap();
        }
    });
    let file = image.file();
    let geometry = Geometry::read(&file).unwrap();
    let whole = listing(&image);
    // The root, lost+found and the files.
    let all = whole.entries().len();
    assert_eq!(all, 22);
    let within = |bounds| Listing::take_within(&file, &geometry, None, WHOLE, bounds);
    let wide = Bounds::default();
    let enough = within(Bounds { names: all, ..wide }).unwrap();
    assert_eq!((enough.entries().len(), enough.unread().len()), (all, 0));
    let less = within(Bounds { names: all - 1, ..wide }).unwrap();
    assert_eq!(less.entries().len(), all - 1);
    assert_eq!(less.unread(), [("/workspace".to_owned(), Unread::Bound)], "the judge is told");
    let needed = (1..10_000).find(|structures| within(Bounds { structures: *structures, ..wide }).is_ok());
    let needed = needed.unwrap();
    assert!(needed > 22, "an inode for each name, {needed}");
    let refused = within(Bounds { structures: needed - 1, ..wide });
    assert!(matches!(refused, Err(DiskError::TooMuch { .. })), "{refused:?}");
    assert_eq!(within(Bounds { structures: needed, ..wide }).unwrap().digest(), whole.digest());
}

#[test]
fn a_large_indexed_directory_is_read_whole() {
    let image = Image::new(64, &["-N", "8192"], |tree| {
        let many = tree.join("many");
        fs::create_dir(&many).unwrap();
        for number in 0..1200 {
            fs::write(
                many.join(format!("a file with a rather long name, as some programs like them: {number}")),
                number.to_string(),
            )
            .unwrap();
        }
    });
    let plain = listing(&image);
    image.index();
    let indexed = listing(&image);
    assert_eq!(indexed.entries().len(), 1203);
    assert!(indexed.unread().is_empty(), "{:?}", indexed.damage());
    assert_eq!(plain.digest(), indexed.digest());
}

#[test]
fn a_file_in_the_older_map_is_read() {
    // The owner of a file may choose it (`chattr -e`). Without extents all files have it.
    let content: Vec<u8> = (0..2_000_000u32).map(|number| (number / 777) as u8).collect();
    let image = Image::new(16, &["-O", "^extents,^64bit"], |tree| {
        fs::write(tree.join("mapped"), &content).unwrap();
    });
    assert_eq!(listing(&image).get("/workspace/mapped").unwrap().content, Digest::of(&content));
}

#[test]
fn a_torn_inode_is_unread_and_its_old_state_stays() {
    let image = Image::new(16, &[], |tree| {
        fs::write(tree.join("a"), b"a").unwrap();
        fs::write(tree.join("b"), b"b").unwrap();
    });
    let mut bytes = image.bytes();
    let geometry = Geometry::read(&bytes).unwrap();
    let first = Listing::take(&bytes, &geometry, None, WHOLE).unwrap();
    let torn = first.get("/workspace/a").unwrap();
    // Inodes of 256 bytes, one group: its table is found by the root directory's known owner and mode.
    let table = bytes
        .chunks_exact(256)
        .position(|inode| inode[..4] == [0xed, 0x41, 0xe8, 0x03])
        .map(|root| (root - 1) * 256)
        .unwrap();
    bytes[table + (torn.identity.0 as usize - 1) * 256 + 4] ^= 1;
    let second = Listing::take(&bytes, &geometry, Some(&first), WHOLE).unwrap();
    assert_eq!(second.unread(), [("/workspace/a".to_owned(), Unread::Damaged)]);
    assert!(second.damage().unwrap().contains("checksum"), "{:?}", second.damage());
    assert_eq!(second.get("/workspace/a"), Some(torn));
    assert_eq!(changes(&first, &second), []);
    assert!(bytes.bytes() == 16 << 20);
}
