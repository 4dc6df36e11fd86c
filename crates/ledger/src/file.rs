//! Files that somebody names: opened without waiting, taken only where they are files, read to a bound.
//!
//! What it guarantees: a pipe that nobody writes to hangs no one, a device or a folder is an error, and a file of any length
//! takes no more memory than the caller allows. A symbolic link is followed: who names a file means what it leads to.
//! Who may call: whoever reads a file that a person named, or that another could have put in its place.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a regular file to read.
///
/// # Errors
/// The system's; `InvalidInput` where it is no regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    use rustix::fs::OFlags;
    let flags = i32::try_from((OFlags::NONBLOCK | OFlags::NOCTTY).bits()).unwrap_or(0);
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        let why = "not a regular file: write what it holds to one, and name that";
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    }
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// As [`open_regular`]; `FileTooLarge` where it is longer.
pub fn read_regular(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One more, for a file that grows while it is read.
    open_regular(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length <= most) {
        Ok(bytes)
    } else {
        let why = format!("longer than {most} bytes, the most that is read of such a file");
        Err(io::Error::new(io::ErrorKind::FileTooLarge, why))
    }
}

/// The same of text.
///
/// # Errors
/// As [`read_regular`]; `InvalidData` where it is not UTF-8.
pub fn read_regular_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read_regular(path, most)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not UTF-8 text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_a_device_and_a_folder_are_errors_at_once_and_a_long_file_is_one() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        for path in [at("pipe"), "/dev/zero".into(), dir.path().to_owned()] {
            let error = read_regular(&path, 10).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path:?}: {error}");
        }
        std::fs::write(at("ten"), "0123456789").unwrap();
        std::os::unix::fs::symlink("ten", at("link")).unwrap();
        assert_eq!(read_regular_text(&at("link"), 10).unwrap(), "0123456789");
        assert_eq!(read_regular(&at("ten"), 9).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        std::fs::write(at("latin"), b"\xe9").unwrap();
        assert_eq!(read_regular_text(&at("latin"), 9).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(read_regular(&at("none"), 9).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
