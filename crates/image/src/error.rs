//! Why nothing was built.

use std::io;
use std::path::{Path, PathBuf};

/// Why an image, kernel or initramfs could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// A name that can't be an image's.
    #[error(
        "`{name}` is no image name: {why}. Use 1 to 64 of a-z 0-9 . _ -, beginning with a letter or digit"
    )]
    Name {
        /// What was given.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// There is no image of this name.
    #[error(
        "there is no image `{name}`. `hotcell image ls` lists the images, `hotcell image build` makes one"
    )]
    NoImage {
        /// What was asked for.
        name: String,
    },
    /// A program that is needed is not there.
    #[error("{program} is not installed. {install}")]
    NotInstalled {
        /// Which program.
        program: String,
        /// How to have it.
        install: &'static str,
    },
    /// A program that is there fails.
    #[error("{program} failed: {why}. {advice}")]
    Program {
        /// Which program.
        program: String,
        /// What it said.
        why: String,
        /// What to do.
        advice: &'static str,
    },
    /// No kernel package is to be had.
    #[error(
        "no guest kernel: apt knows neither {0}. Run `apt-get update` (needs root) and try again; \
         Hotcell takes its guest kernel from Debian's or Ubuntu's package"
    )]
    NoKernelPackage(String),
    /// The kernel package lacks something.
    #[error("the kernel package {package} has no {what}")]
    KernelLacks {
        /// Which package.
        package: String,
        /// What is missing.
        what: String,
    },
    /// A file in the store is damaged.
    #[error("{path} is damaged: {why}. Remove it and run the command again")]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A tree that can't be an image.
    #[error("the image can't hold {path}: {why}")]
    Entry {
        /// Where in the image.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// More than an image may have.
    #[error("the source is too much for an image: {why}")]
    TooMuch {
        /// Of what.
        why: String,
    },
    /// A source that can't be read, or is not what it says.
    #[error("{what}: {why}")]
    Source {
        /// Which part of it.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// A build that was asked for wrongly.
    #[error("{0}")]
    Request(String),
    /// A file can't be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Names the file in an I/O error.
pub(crate) fn at(path: &Path) -> impl Fn(io::Error) -> ImageError {
    move |source| ImageError::Io { path: path.to_owned(), source }
}
