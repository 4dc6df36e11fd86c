//! Any bytes on a workspace disk: an error or a listing, and every change between two listings is one that the judge takes.
//!
//! ```text
//! 1 byte: with checksums or without | 8 bytes each: where (u32), what (u32)
//! ```
//! The words are written onto an honest disk, which `mke2fs` makes once. With checksums the fuzzer sees them refuse;
//! without it gets behind them.
#![no_main]

use hotcell_decide::Mutation;
use hotcell_observe::disk::{Effort, Geometry, Listing, changes};
use libfuzzer_sys::fuzz_target;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

fn honest(checksums: bool) -> &'static (Vec<u8>, Geometry, Listing) {
    static DISKS: [OnceLock<(Vec<u8>, Geometry, Listing)>; 2] = [OnceLock::new(), OnceLock::new()];
    DISKS[usize::from(checksums)].get_or_init(|| {
        let home = tempfile::tempdir().unwrap();
        let (tree, disk) = (home.path().join("tree"), home.path().join("disk"));
        std::fs::create_dir_all(tree.join("d/e")).unwrap();
        for number in 0..12 {
            std::fs::write(tree.join(format!("d/file{number}")), vec![1; number * 700]).unwrap();
        }
        std::os::unix::fs::symlink("t".repeat(90), tree.join("link")).unwrap();
        std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let features = if checksums { "^has_journal,^resize_inode" } else { "^has_journal,^resize_inode,^metadata_csum" };
        let made = Command::new("mke2fs")
            .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
            .args(["-q", "-F", "-t", "ext4", "-N", "32", "-O", features, "-m", "0", "-d"])
            .args([&tree, &disk])
            .stdin(Stdio::null())
            .status();
        assert!(made.unwrap().success(), "mke2fs makes the honest disk");
        let bytes = std::fs::read(&disk).unwrap();
        let geometry = Geometry::read(&bytes).unwrap();
        let listing = Listing::take(&bytes, &geometry, None, WHOLE).unwrap();
        assert!(listing.entries().len() > 15 && listing.damage().is_none());
        (bytes, geometry, listing)
    })
}

const WHOLE: Effort = Effort { trust_inodes: false, hash_bytes: 8 << 20 };

fuzz_target!(|input: &[u8]| {
    let Some((first, words)) = input.split_first() else { return };
    let (honest, geometry, before) = honest(first & 1 == 0);
    let mut bytes = honest.clone();
    for word in words.chunks_exact(8) {
        let at = u32::from_le_bytes(word[..4].try_into().unwrap()) as usize % bytes.len();
        let length = (bytes.len() - at).min(4);
        bytes[at..at + length].copy_from_slice(&word[4..4 + length]);
    }
    for effort in [WHOLE, Effort { trust_inodes: true, hash_bytes: 4096 }] {
        if let Ok(after) = Listing::take(&bytes, geometry, Some(before), effort) {
            assert!(after.hashed_bytes() <= effort.hash_bytes.max(1 << 20));
            for change in changes(before, &after) {
                Mutation::new(change.op, &change.path, change.before, change.after).unwrap();
            }
        }
    }
    if let Ok(geometry) = Geometry::read(&bytes) {
        let _ = Listing::take(&bytes, &geometry, None, WHOLE);
    }
});
