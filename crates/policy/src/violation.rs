//! Refusals of a draft: all of them at once, each with a code that scripts may rely on.
//!
//! A [`Violations`] is never empty: holding one means that the draft was refused.
//! The operator asked wrongly; nothing was created yet.

use core::fmt;

macro_rules! codes {
    ($($(#[$meta:meta])* $variant:ident = $text:literal),+ $(,)?) => {
        /// What was refused. The text of a code never changes its meaning.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Code { $($(#[$meta])* $variant),+ }

        impl Code {
            /// Every code.
            pub const ALL: &'static [Code] = &[$(Code::$variant),+];

            /// The stable name.
            pub const fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $text),+ }
            }
        }
    };
}

codes! {
    /// A key or table that does not exist.
    UnknownKey = "unknown_key",
    /// A key that asks for a network; there is none to configure.
    NetworkKey = "network_key",
    /// A value of the wrong type.
    WrongType = "wrong_type",
    /// A number outside its declared range.
    OutOfRange = "out_of_range",
    /// A temporary filesystem larger than the memory that holds it.
    TmpOverMemory = "tmp_over_memory",
    /// A path to be written that is not absolute and clean.
    WritePath = "write_path",
    /// A path to be written that lies in an immutable region.
    WriteImmutable = "write_immutable",
    /// A package that is not pinned exactly.
    PackagePin = "package_pin",
    /// More entries in a list than the host is willing to hold.
    TooMany = "too_many",
    /// A Docker host that is not a Unix socket of this machine.
    DockerHost = "docker_host",
    /// An empty name where one is needed.
    EmptyName = "empty_name",
    /// A run id of the wrong form.
    RunId = "run_id",
    /// An image name of the wrong form.
    ImageName = "image_name",
    /// An image part that was not measured.
    ImageDigest = "image_digest",
    /// A kernel argument that weakens the guest.
    KernelArgument = "kernel_argument",
    /// A vsock CID that is reserved.
    VsockCid = "vsock_cid",
    /// No command, or one that can't be passed on.
    CommandLine = "command",
    /// A working directory that is not absolute and clean.
    WorkingDirectory = "cwd",
    /// An environment variable that can't be passed on.
    Environment = "env",
    /// A root service that can't be one.
    Service = "service",
    /// A profile file and its digest of which only one was given.
    Profile = "profile",
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One thing that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which rule.
    pub code: Code,
    /// What is wrong and what is allowed.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.message, self.code)
    }
}

/// Everything that was refused; at least one violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violations(Vec<Violation>);

impl Violations {
    /// The violations in the order in which they were found.
    pub fn iter(&self) -> impl Iterator<Item = &Violation> {
        self.0.iter()
    }

    /// Whether this code is among them.
    pub fn has(&self, code: Code) -> bool {
        self.0.iter().any(|violation| violation.code == code)
    }

    /// The codes in the order in which they were found.
    pub fn codes(&self) -> Vec<Code> {
        self.0.iter().map(|violation| violation.code).collect()
    }
}

impl fmt::Display for Violations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, violation) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{violation}")?;
        }
        Ok(())
    }
}

impl core::error::Error for Violations {}

/// Collects violations while a draft is checked.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Violation>);

impl Findings {
    pub(crate) fn add(&mut self, code: Code, message: impl Into<String>) {
        self.0.push(Violation { code, message: message.into() });
    }

    pub(crate) fn finish(self) -> Result<(), Violations> {
        if self.0.is_empty() { Ok(()) } else { Err(Violations(self.0)) }
    }
}
