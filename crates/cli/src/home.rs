//! Where Hotcell keeps things, from the environment. The only reader of it.

use std::env;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The folders.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    state: PathBuf,
    cache: PathBuf,
}

/// What to do where the folders are another's, or read-only.
pub(crate) const OWN_HOME: &str =
    "set HOTCELL_HOME to a folder that you may write, or have this one given to you (chown)";

/// No folder can be derived from the environment.
#[derive(Debug, thiserror::Error)]
#[error("neither HOTCELL_HOME nor HOME is set to an absolute path: set HOTCELL_HOME to a folder of yours")]
pub(crate) struct NoHome;

impl Home {
    pub(crate) fn from_env() -> Result<Home, NoHome> {
        let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        if let Some(home) = env::var_os("HOTCELL_HOME").filter(|home| !home.is_empty()) {
            let home = env::current_dir().unwrap_or_default().join(home);
            return Ok(Home::below(&home));
        }
        let user = absolute("HOME");
        let folder = |variable: &str, default: &str| {
            absolute(variable).or_else(|| Some(user.as_ref()?.join(default))).map(|base| base.join("hotcell"))
        };
        let state = folder("XDG_STATE_HOME", ".local/state").ok_or(NoHome)?;
        let cache = folder("XDG_CACHE_HOME", ".cache").ok_or(NoHome)?;
        Ok(Home { state, cache })
    }

    /// Both folders in one.
    pub(crate) fn below(home: &Path) -> Home {
        Home { state: home.join("state"), cache: home.join("cache") }
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
