//! The same disks read by ours and by `ext4-view`.

use crate::image::Image;
use ext4_view::{Ext4, FileType};
use hotcell_ledger::Digest;
use hotcell_observe::disk::{Effort, Geometry, Kind, Listing};
use std::fs;
use std::os::unix::fs::symlink;

type Row = (String, &'static str, u32, u32, u32, u64, Digest);

fn theirs(fs: &Ext4) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut open = vec![String::new()];
    while let Some(directory) = open.pop() {
        let read = fs.read_dir(if directory.is_empty() { "/" } else { &directory }).unwrap();
        for entry in read {
            let entry = entry.unwrap();
            let name = entry.file_name().as_str().unwrap().to_owned();
            if name == "." || name == ".." {
                continue;
            }
            let path = format!("{directory}/{name}");
            let metadata = fs.symlink_metadata(path.as_str()).unwrap();
            let (kind, content) = match metadata.file_type() {
                FileType::Regular => ("file", Digest::of(&fs.read(path.as_str()).unwrap())),
                FileType::Symlink => ("link", Digest::of(fs.read_link(path.as_str()).unwrap().as_ref())),
                FileType::Directory => {
                    open.push(path.clone());
                    ("directory", Digest::of(b""))
                }
                other => panic!("{path}: {other:?}"),
            };
            let size = if kind == "directory" { 0 } else { metadata.len() };
            let mode = u32::from(metadata.mode());
            rows.push((
                format!("/workspace{path}"),
                kind,
                mode,
                metadata.uid(),
                metadata.gid(),
                size,
                content,
            ));
        }
    }
    rows.sort();
    rows
}

fn ours(listing: &Listing) -> Vec<Row> {
    listing
        .entries()
        .filter(|(path, _)| *path != "/workspace")
        .map(|(path, entry)| {
            let kind = match entry.kind {
                Kind::File => "file",
                Kind::Directory => "directory",
                Kind::Link => "link",
                other => panic!("{path}: {other:?}"),
            };
            (path.to_owned(), kind, entry.mode, entry.uid, entry.gid, entry.size, entry.content)
        })
        .collect()
}

#[test]
fn ours_and_theirs_agree() {
    for (mib, options) in
        [(32, &[][..]), (600, &[]), (32, &["-O", "^extents,^64bit"]), (32, &["-O", "^metadata_csum"])]
    {
        let image = Image::new(mib, options, |tree| {
            for number in 0..300 {
                let dir = tree.join(format!("d{}", number % 7));
                fs::create_dir_all(&dir).unwrap();
                fs::write(dir.join(format!("f{number}")), vec![number as u8 | 1; number * 97]).unwrap();
                symlink("t".repeat(number % 250 + 1), dir.join(format!("l{number}"))).unwrap();
            }
        });
        image.index();
        let file = image.file();
        let whole = Effort { trust_inodes: false, hash_bytes: u64::MAX };
        let listing = Listing::take(&file, &Geometry::read(&file).unwrap(), None, whole).unwrap();
        let theirs = theirs(&Ext4::load_from_path(&image.path).unwrap());
        assert!(theirs.len() > 600);
        assert_eq!(ours(&listing), theirs, "{mib} MiB {options:?}");
    }
}
