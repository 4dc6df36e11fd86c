//! What a reading of the disk costs, by the number of files. Prints; asserts nothing about time.
//!
//! ```text
//! cargo test --release -p hotcell-observe --test it -- --ignored --nocapture cost
//! ```

use crate::image::Image;
use hotcell_observe::disk::{Effort, Geometry, Listing, changes};
use std::fs;
use std::time::Instant;

fn median(mut take: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..7)
        .map(|_| {
            let begun = Instant::now();
            take();
            begun.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[3]
}

#[test]
#[ignore = "a measurement"]
fn readings_by_number_of_files() {
    for (files, mib) in [(0, 1024), (100, 1024), (1000, 1024), (10_000, 1024), (60_000, 4096)] {
        let image = Image::new(mib, &[], |tree| {
            for number in 0..files {
                let dir = tree.join(format!("d{}", number / 200));
                fs::create_dir_all(&dir).unwrap();
                fs::write(dir.join(format!("file-{number}")), vec![number as u8; 2000]).unwrap();
            }
        });
        let file = image.file();
        let geometry = Geometry::read(&file).unwrap();
        let whole = Effort { trust_inodes: false, hash_bytes: u64::MAX };
        let again = Effort { trust_inodes: true, hash_bytes: u64::MAX };
        let first = Listing::take(&file, &geometry, None, whole).unwrap();
        assert!(first.entries().len() >= files && first.damage().is_none());
        let all = median(|| drop(Listing::take(&file, &geometry, None, whole).unwrap()));
        let unchanged = median(|| drop(Listing::take(&file, &geometry, Some(&first), again).unwrap()));
        let compared = median(|| assert!(changes(&first, &first).is_empty()));
        let digest = median(|| assert!(!first.digest().is_zero()));
        println!(
            "{files:6} files: whole {all:8.2} ms, again {unchanged:8.2} ms, compare {compared:7.2} ms, digest of the list {digest:7.2} ms"
        );
    }
}
