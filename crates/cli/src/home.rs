//! Where Hotcell keeps things, from the environment. The only reader of it.

use std::env;
use std::fs::{DirBuilder, File, Metadata};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The folders.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    state: PathBuf,
    cache: PathBuf,
}

/// What to do where the folders are another's, or read-only.
pub(crate) const OWN_HOME: &str =
    "set HOTCELL_HOME to a folder that you may write and nobody else, or have this one given to you (chown)";

/// Why there are no folders to work with.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoHome {
    /// None can be derived from the environment.
    #[error(
        "neither HOTCELL_HOME nor HOME is set to an absolute path: set HOTCELL_HOME to a folder of yours"
    )]
    Unnamed,
    /// Somebody else can change what is in them.
    #[error("{0}. Or {OWN_HOME}")]
    NotOurs(String),
}

impl Home {
    /// The folders that the environment names, where they are ours alone.
    pub(crate) fn from_env() -> Result<Home, NoHome> {
        let home = Home::named()?;
        home.is_ours_alone().map_err(NoHome::NotOurs)?;
        Ok(home)
    }

    /// The same, whoever can write them.
    pub(crate) fn named() -> Result<Home, NoHome> {
        let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        if let Some(home) = env::var_os("HOTCELL_HOME").filter(|home| !home.is_empty()) {
            let home = env::current_dir().unwrap_or_default().join(home);
            return Ok(Home::below(&home));
        }
        let user = absolute("HOME");
        let folder = |variable: &str, default: &str| {
            absolute(variable).or_else(|| Some(user.as_ref()?.join(default))).map(|base| base.join("hotcell"))
        };
        let state = folder("XDG_STATE_HOME", ".local/state").ok_or(NoHome::Unnamed)?;
        let cache = folder("XDG_CACHE_HOME", ".cache").ok_or(NoHome::Unnamed)?;
        Ok(Home { state, cache })
    }

    /// Both folders in one.
    pub(crate) fn below(home: &Path) -> Home {
        Home { state: home.join("state"), cache: home.join("cache") }
    }

    /// Whether nobody but their owner and root can change what the folders hold: keys, images, templates, whom a run belongs to.
    /// Folders that are not there yet are made for their owner alone, and so only those above them count.
    pub(crate) fn is_ours_alone(&self) -> Result<(), String> {
        let own = rustix::process::geteuid().as_raw();
        let folders = [self.state.as_path(), &self.cache];
        let inside =
            folders.iter().flat_map(|dir| dir.read_dir()).flatten().flatten().map(|entry| entry.path());
        let kept = folders.iter().map(PathBuf::from).chain(inside.filter(|path| path.is_dir()));
        let above = folders.iter().flat_map(|dir| dir.ancestors().skip(1)).map(PathBuf::from);
        for (dir, is_kept) in kept.map(|dir| (dir, true)).chain(above.map(|dir| (dir, false))) {
            let Ok(meta) = dir.metadata() else { continue };
            let (owner, dir) = (meta.uid(), dir.display());
            if is_kept && ![own, 0].contains(&owner) {
                return Err(format!("{dir} belongs to user {owner}, who can change what is kept there"));
            }
            // In a sticky folder above, others rename and remove only what is theirs; in one of ours they still make new files.
            let sticky = meta.mode() & 0o1000 != 0 && !is_kept;
            if let Some(who) = others_that_write(&meta, own).filter(|_| !sticky) {
                return Err(format!(
                    "{dir} can be written by {who}, who can change what is kept there: chmod go-w {dir}"
                ));
            }
        }
        Ok(())
    }

    /// Makes the folders where they are not there, and tries whether all that is kept in them can be written.
    pub(crate) fn writable(&self) -> Result<(), String> {
        let below = [self.images(), self.runs(), self.cache.join("workspace")];
        for dir in [self.state.clone(), self.cache.clone()].into_iter().chain(below) {
            let fault = |error: std::io::Error| format!("{} can't be written: {error}", dir.display());
            DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(fault)?;
            let trial = dir.join(format!(".trial-{}", std::process::id()));
            File::create_new(&trial).map_err(fault)?;
            std::fs::remove_file(&trial).map_err(fault)?;
        }
        Ok(())
    }

    pub(crate) fn cache(&self) -> &Path {
        &self.cache
    }

    pub(crate) fn registry(&self) -> PathBuf {
        self.state.join("live")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.state.join("images")
    }

    pub(crate) fn runs(&self) -> PathBuf {
        self.state.join("runs")
    }

    pub(crate) fn key(&self) -> PathBuf {
        self.state.join("key")
    }
}

/// Who else may write in a folder. A user's own group, which distributions make for each, is nobody else.
fn others_that_write(meta: &Metadata, own: u32) -> Option<&'static str> {
    match meta.mode() {
        mode if mode & 0o002 != 0 => Some("everybody"),
        mode if mode & 0o020 != 0 && meta.gid() != own => Some("its group"),
        _ => None,
    }
}

/// A program on the caller's PATH or in the places where distributions put it.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/libexec"];
    env::split_paths(&path)
        .chain(usual.iter().map(PathBuf::from))
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
}

/// Names the QEMU to use, for hosts where it is not on the PATH.
const QEMU_VARIABLE: &str = "HOTCELL_QEMU";

/// The VMM's program, or what to do to have one.
pub(crate) fn find_qemu() -> Result<PathBuf, String> {
    const NAME: &str = "qemu-system-x86_64";
    match env::var_os(QEMU_VARIABLE).filter(|named| !named.is_empty()) {
        Some(named) => {
            let program = PathBuf::from(named);
            if program.is_absolute() && program.is_file() {
                return Ok(program);
            }
            let named = program.display();
            Err(format!(
                "{QEMU_VARIABLE} is {named}, which is no absolute path of a program: set it to one, or unset it"
            ))
        }
        None => find_program(NAME).ok_or_else(|| {
            format!("{NAME} is not installed. Debian, Ubuntu: apt-get install qemu-system-x86")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, create_dir_all, set_permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn folders_that_others_can_write_or_own_are_not_ours_alone() {
        let dir = tempfile::tempdir().unwrap();
        let above = dir.path().join("above");
        let home = Home::below(&above.join("home"));
        assert_eq!(home.is_ours_alone(), Ok(()), "what is not there yet is made for us alone");
        create_dir_all(home.registry()).unwrap();
        create_dir_all(home.cache().join("templates")).unwrap();
        assert_eq!(home.is_ours_alone(), Ok(()));
        let folders = [
            above.clone(),
            above.join("home"),
            home.state.clone(),
            home.registry(),
            home.cache.join("templates"),
        ];
        for folder in &folders {
            let is_above = !folder.starts_with(&home.state) && !folder.starts_with(&home.cache);
            for (mode, fits) in [(0o777, false), (0o757, false), (0o1777, is_above), (0o755, true)] {
                set_permissions(folder, Permissions::from_mode(mode)).unwrap();
                let told = home.is_ours_alone();
                assert_eq!(told.is_ok(), fits, "{} {mode:o}: {told:?}", folder.display());
                assert!(fits || told.unwrap_err().contains(&format!("chmod go-w {}", folder.display())));
            }
        }
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // Another group; our own is nobody else.
        set_permissions(&home.state, Permissions::from_mode(0o775)).unwrap();
        assert_eq!(home.is_ours_alone(), Ok(()));
        chown(&home.state, None, Some(12_345)).unwrap();
        assert!(home.is_ours_alone().unwrap_err().contains("its group"));
        chown(&home.state, Some(12_345), Some(0)).unwrap();
        set_permissions(&home.state, Permissions::from_mode(0o755)).unwrap();
        assert!(home.is_ours_alone().unwrap_err().contains("belongs to user 12345"));
    }
}
