//! The folder of templates.

use super::files::{Saved, digest_of_blocks};
use super::{FORMAT, Inputs, Manifest, Template, TemplateError, at};
use crate::process::boot_id;
use hotcell_ledger::Digest;
use hotcell_sys::host::tsc_khz;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

const MANIFEST: &str = "template.json";
/// Names of what is being made or removed begin with this.
const HIDDEN: &str = ".new.";
/// Largest manifest and state that are read, bytes; a microvm's state has some 64 KiB.
const MAX_SMALL: u64 = 16 << 20;
/// How far the counter's rate may be from what the guest was told: a second in half an hour. Measuring it errs by less.
const MAX_TSC_ERROR_PPM: u64 = 500;

/// The folder of all templates of one user.
#[derive(Clone, Debug)]
pub struct TemplateStore {
    dir: PathBuf,
}

/// A template, or why it can't be used and is made anew when it is asked for.
pub type Usable = Result<Template, String>;

impl TemplateStore {
    /// The folder `templates` in the cache; made when a template is.
    pub fn in_cache(cache: &Path) -> TemplateStore {
        TemplateStore { dir: cache.join("templates") }
    }

    /// The template that depends on these, if there is one that can be used.
    pub(crate) fn find(&self, inputs: &Inputs) -> Option<Template> {
        let id = inputs.id();
        self.open(&id.to_hex()).ok().filter(|found| found.id == id && found.manifest.inputs == *inputs)
    }

    /// Opens and checks all that can be checked without reading RAM and disk.
    fn open(&self, id: &str) -> Usable {
        let dir = self.dir.join(id);
        let file = |name: &str| File::open(dir.join(name)).map_err(|error| format!("{name}: {error}"));
        let small = |name: &str| {
            let mut bytes = Vec::new();
            file(name)?
                .take(MAX_SMALL)
                .read_to_end(&mut bytes)
                .map_err(|error| format!("{name}: {error}"))?;
            Ok::<_, String>(bytes)
        };
        let manifest: Manifest =
            serde_json::from_slice(&small(MANIFEST)?).map_err(|error| format!("{MANIFEST}: {error}"))?;
        if manifest.format != FORMAT || manifest.inputs.id().to_hex() != id {
            return Err(format!("{MANIFEST} is of another template or another release"));
        }
        let (ram, disk, state) = (file("ram")?, file("disk")?, small("state")?);
        if !manifest.ram.is(&ram) || !manifest.disk.is(&disk) {
            return Err("its memory or disk is not the file that was hashed".into());
        }
        if Digest::of(&state) != manifest.state.digest() {
            return Err("its state does not have the digest that was recorded".into());
        }
        if let Some(told) = manifest.tsc_khz
            && boot_id().as_deref() != Some(&manifest.host_boot)
        {
            // The same host after a reboot, or a cache that was carried to another one.
            let now = tsc_khz().unwrap_or(0);
            if u64::from(told.abs_diff(now)) * 1_000_000 > u64::from(told) * MAX_TSC_ERROR_PPM {
                return Err(format!("its clock counts {told} kHz, this host's {now} kHz"));
            }
        }
        Ok(Template { id: manifest.inputs.id(), manifest, ram, state, disk })
    }

    /// Makes the template that depends on these, unless somebody else has meanwhile: one maker works at a time.
    pub(crate) fn make(
        &self,
        inputs: Inputs,
        save: impl FnOnce(&Path) -> Result<Saved, TemplateError>,
    ) -> Result<Template, TemplateError> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir).map_err(at(&self.dir))?;
        let _lock = self.lock()?;
        if let Some(made) = self.find(&inputs) {
            return Ok(made);
        }
        let id = inputs.id().to_hex();
        let (new, place) = (self.dir.join(format!("{HIDDEN}{id}")), self.dir.join(&id));
        // One of the same id that can't be used; clones that run have their own descriptors of it.
        self.hide(&id)?;
        DirBuilder::new().mode(0o700).create(&new).map_err(at(&new))?;
        let written = save(&new).and_then(|saved| {
            let Saved { ram, state, disk, tsc_khz } = saved;
            let host_boot = boot_id().unwrap_or_default();
            let manifest =
                Manifest { format: FORMAT, inputs: inputs.clone(), tsc_khz, host_boot, ram, state, disk };
            let path = new.join(MANIFEST);
            let bytes = serde_json::to_vec_pretty(&manifest).map_err(|error| at(&path)(error.into()))?;
            super::files::write_whole(&bytes, &path).map_err(at(&path))?;
            fs::set_permissions(&new, Permissions::from_mode(0o500)).map_err(at(&new))?;
            fs::rename(&new, &place).map_err(at(&place))?;
            File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(at(&self.dir))
        });
        if let Err(error) = written {
            let _ = self.clear_hidden();
            return Err(error);
        }
        for (old, _) in self.list()? {
            let manifest: Option<Manifest> = fs::read(self.dir.join(&old).join(MANIFEST))
                .ok()
                .and_then(|text| serde_json::from_slice(&text).ok());
            if manifest.is_some_and(|old| old.inputs.superseded_by(&inputs)) {
                self.hide(&old)?;
            }
        }
        self.open(&id).map_err(|why| at(&place)(io::Error::other(why)))
    }

    /// All templates, by id: each one, or why it can't be used.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn list(&self) -> Result<Vec<(String, Usable)>, TemplateError> {
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(at(&self.dir)(error)),
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut ids: Vec<String> = names.filter(|name| Digest::from_hex(name).is_some()).collect();
        ids.sort();
        Ok(ids.into_iter().map(|id| (id.clone(), self.open(&id))).collect())
    }

    /// Reads all of a template and compares it with its digests.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn verify(&self, id: &str) -> Result<(), String> {
        let template = self.open(id)?;
        for (name, file, part) in [
            ("ram", &template.ram, &template.manifest.ram),
            ("disk", &template.disk, &template.manifest.disk),
        ] {
            let digest = digest_of_blocks(file).map_err(|error| format!("{name}: {error}"))?;
            if digest != part.digest() {
                return Err(format!("{name} has the digest {digest}, {} was recorded", part.digest()));
            }
        }
        Ok(())
    }

    /// Removes a template. Clones that run go on: they hold what they need open.
    ///
    /// # Errors
    /// There is none of this id, or it can't be removed.
    pub fn remove(&self, id: &str) -> Result<(), TemplateError> {
        let place = self.dir.join(id);
        if Digest::from_hex(id).is_none() || !place.is_dir() {
            return Err(at(&place)(io::Error::new(
                io::ErrorKind::NotFound,
                "there is no template of this id",
            )));
        }
        let _lock = self.lock()?;
        self.hide(id)
    }

    fn lock(&self) -> Result<File, TemplateError> {
        let path = self.dir.join(".lock");
        let file = File::options().create(true).write(true).truncate(false).open(&path).map_err(at(&path))?;
        flock(&file, FlockOperation::LockExclusive).map_err(|errno| at(&path)(errno.into()))?;
        Ok(file)
    }

    /// Out of sight in one step, then away. The lock must be held.
    fn hide(&self, id: &str) -> Result<(), TemplateError> {
        let place = self.dir.join(id);
        self.clear_hidden()?;
        if !place.exists() {
            return Ok(());
        }
        let hidden = self.dir.join(format!("{HIDDEN}old.{id}"));
        // A folder can be renamed only by who may write it: its `..` is an entry of it.
        fs::set_permissions(&place, Permissions::from_mode(0o700)).map_err(at(&place))?;
        fs::rename(&place, &hidden).map_err(at(&place))?;
        self.clear_hidden()
    }

    /// Removes what is hidden, also what a killed maker left: the lock says that it is gone.
    fn clear_hidden(&self) -> Result<(), TemplateError> {
        for entry in fs::read_dir(&self.dir).map_err(at(&self.dir))?.flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(HIDDEN.as_bytes()) {
                let path = entry.path();
                fs::set_permissions(&path, Permissions::from_mode(0o700)).map_err(at(&path))?;
                fs::remove_dir_all(&path).map_err(at(&path))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::files::{copy_blocks, write_whole};
    use std::collections::BTreeMap;
    use std::io::Write;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn inputs(kernel: &str) -> Inputs {
        Inputs(BTreeMap::from([
            ("kernel".to_owned(), kernel.to_owned()),
            ("vcpus".to_owned(), "1".to_owned()),
        ]))
    }

    fn save(dir: &Path) -> Result<Saved, TemplateError> {
        let mut ram = tempfile::tempfile().unwrap();
        ram.write_all(&[9; 100_000]).unwrap();
        Ok(Saved {
            ram: copy_blocks(&ram, &dir.join("ram")).unwrap(),
            state: write_whole(b"state", &dir.join("state")).unwrap(),
            disk: copy_blocks(&ram, &dir.join("disk")).unwrap(),
            tsc_khz: None,
        })
    }

    fn store() -> (tempfile::TempDir, TemplateStore) {
        let home = tempfile::tempdir().unwrap();
        let store = TemplateStore::in_cache(home.path());
        (home, store)
    }

    #[test]
    fn a_template_is_found_by_all_of_what_it_depends_on() {
        let (_home, store) = store();
        let made = store.make(inputs("a"), save).unwrap();
        assert_eq!(store.find(&inputs("a")).unwrap().id(), made.id());
        assert!(store.find(&inputs("b")).is_none());
        assert_eq!(made.filled(), 2 * 100_000 + 5);
        let mut more = inputs("a");
        more.0.insert("cpu".into(), "x".into());
        assert!(store.find(&more).is_none());
        assert_ne!(inputs("a 5 vcpus").id(), inputs("a").id());
        assert_eq!(store.verify(&made.id().to_hex()), Ok(()));
        store.remove(&made.id().to_hex()).unwrap();
        assert!(store.find(&inputs("a")).is_none() && store.list().unwrap().is_empty());
        assert!(store.remove("../templates").is_err());
    }

    #[test]
    fn a_template_of_an_older_release_goes_when_the_newer_one_is_made() {
        let (_home, store) = store();
        store.make(inputs("a"), save).unwrap();
        let but = |name: &str, value: &str| {
            let mut other = inputs("a");
            other.0.insert(name.into(), value.into());
            other
        };
        let (two, slim, newer) = (but("vcpus", "2"), but("kernel", "another"), but("hotcell", "9.9.9"));
        store.make(two.clone(), save).unwrap();
        store.make(slim.clone(), save).unwrap();
        assert_eq!(store.list().unwrap().len(), 3, "another shape or another kernel is no newer release");
        store.make(newer, save).unwrap();
        assert!(
            store.find(&inputs("a")).is_none() && store.find(&two).is_some() && store.find(&slim).is_some()
        );
    }

    #[test]
    fn two_makers_make_one_and_what_a_killed_one_left_is_cleared() {
        let (_home, store) = store();
        fs::create_dir_all(store.dir.join(".new.dead/x")).unwrap();
        let count = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let made = store.make(inputs("a"), |dir| {
                        count.fetch_add(1, Ordering::Relaxed);
                        save(dir)
                    });
                    made.unwrap();
                });
            }
        });
        assert_eq!(count.into_inner(), 1);
        assert!(!store.dir.join(".new.dead").exists());
        let failed = store.make(inputs("b"), |dir| {
            fs::write(dir.join("ram"), "half").unwrap();
            Err(TemplateError::Save("no".into()))
        });
        assert!(failed.is_err());
        let names: Vec<_> =
            fs::read_dir(&store.dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "the lock and one template: {names:?}");
    }

    #[test]
    fn a_damaged_template_is_made_anew() {
        let (_home, store) = store();
        let made = store.make(inputs("a"), save).unwrap();
        let dir = store.dir.join(made.id().to_hex());
        for part in ["ram", "state", "disk"] {
            fs::set_permissions(dir.join(part), Permissions::from_mode(0o600)).unwrap();
            let mut file = File::options().write(true).open(dir.join(part)).unwrap();
            file.write_all(b"X").unwrap();
            assert!(store.find(&inputs("a")).is_none(), "{part}");
            let (_, listed) = store.list().unwrap().remove(0);
            assert!(listed.is_err());
            store.make(inputs("a"), save).unwrap();
            assert!(store.find(&inputs("a")).is_some(), "{part}");
        }
    }
}
