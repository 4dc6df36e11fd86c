//! Damaged and hostile disks: an error or a listing, never a panic, never more work than the bounds.
//! `fuzz/fuzz_targets/disk.rs` goes on from here.

use crate::image::Image;
use hotcell_observe::disk::{DiskError, Effort, Geometry, Listing, changes};
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::sync::OnceLock;

const WHOLE: Effort = Effort { trust_inodes: false, hash_bytes: 64 << 20 };

fn honest(options: &'static [&'static str]) -> Vec<u8> {
    let image = Image::new(4, options, |tree| {
        for number in 0..40 {
            fs::write(tree.join(format!("f{number}")), vec![1; number * 300]).unwrap();
        }
        fs::create_dir(tree.join("d")).unwrap();
        symlink("target ".repeat(20), tree.join("d/link")).unwrap();
    });
    image.bytes()
}

/// Checksums hide damage from everything behind them, so most of it is done where there are none.
fn without_checksums() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| honest(&["-O", "^metadata_csum"]))
}

fn with_checksums() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| honest(&[]))
}

fn read(bytes: &Vec<u8>, honest: &[u8]) {
    let before = honest.to_vec();
    let geometry = Geometry::read(&before).unwrap();
    let first = Listing::take(&before, &geometry, None, WHOLE).unwrap();
    assert!(first.entries().len() > 40);
    if let Ok(second) = Listing::take(bytes, &geometry, Some(&first), WHOLE) {
        for one in changes(&first, &second) {
            hotcell_decide::Mutation::new(one.op, &one.path, one.before, one.after).unwrap();
        }
    }
    if let Ok(geometry) = Geometry::read(bytes) {
        let _ = Listing::take(bytes, &geometry, None, WHOLE);
    }
}

/// Places that hold structures: all but the blocks of files.
fn structures(bytes: &[u8]) -> Vec<usize> {
    bytes
        .chunks(256)
        .enumerate()
        .filter(|(_, part)| part.iter().any(|&b| b > 1))
        .map(|(at, _)| at * 256)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn damage_is_an_error_or_a_listing(
        checksums: bool,
        damage in prop::collection::vec((any::<prop::sample::Index>(), 0usize..256, any::<u8>()), 1..12),
    ) {
        let honest = if checksums { with_checksums() } else { without_checksums() };
        let places = structures(honest);
        let mut bytes = honest.to_vec();
        for (place, offset, value) in damage {
            let at = place.get(&places) + offset;
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        read(&bytes, honest);
    }

    #[test]
    fn a_disk_that_ends_early_is_an_error_or_a_listing(length in 0usize..(4 << 20)) {
        let honest = with_checksums();
        read(&honest[..length].to_vec(), honest);
    }
}

#[test]
fn every_flipped_byte_of_a_checked_structure_shows() {
    let honest = with_checksums();
    let geometry = Geometry::read(&honest.to_vec()).unwrap();
    let first = Listing::take(&honest.to_vec(), &geometry, None, WHOLE).unwrap();
    // The inode of the first file: a change of any byte but its access time is damage.
    let (_, entry) = first.entries().find(|(path, _)| *path == "/workspace/f7").unwrap();
    let table =
        (0..honest.len()).step_by(256).find(|&at| honest[at..at + 4] == [0xed, 0x41, 0xe8, 0x03]).unwrap()
            - 256;
    let at = table + (entry.identity.0 as usize - 1) * 256;
    for offset in 0..256 {
        let mut bytes = honest.to_vec();
        bytes[at + offset] ^= 0x10;
        let second = Listing::take(&bytes, &geometry, Some(&first), WHOLE).unwrap();
        assert!(second.damage().is_some(), "byte {offset}");
    }
}

#[test]
fn a_journal_or_an_unknown_feature_is_refused() {
    let image = Image::new(16, &["-O", "has_journal"], |_| ());
    let error = Geometry::read(&image.file()).unwrap_err();
    assert!(matches!(error, DiskError::Unsupported(_)), "{error}");
    let image = Image::new(16, &["-O", "inline_data"], |_| ());
    assert!(matches!(Geometry::read(&image.file()), Err(DiskError::Unsupported(_))));
    assert!(Geometry::read(&vec![0; 1 << 20]).is_err());
    assert!(Geometry::read(&Vec::new()).is_err());
}

/// Every one of 40 names leads to one large file through its own inode, so hashing them costs far more than the disk
/// holds: the reading stops at what it may hash.
#[test]
fn files_that_share_blocks_do_not_multiply_the_work() {
    let bytes = without_checksums().to_vec();
    let geometry = Geometry::read(&bytes).unwrap();
    let tight = Effort { trust_inodes: false, hash_bytes: 4096 };
    let listing = Listing::take(&bytes, &geometry, None, tight).unwrap();
    assert!(listing.hashed_bytes() <= 8192, "{}", listing.hashed_bytes());
    assert!(listing.later() > 20);
}
