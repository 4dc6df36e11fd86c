//! The texts of an exec: argv, environment, working directory.
//!
//! They can be larger than a frame (environment values of 64 KiB are normal), so
//! they travel as one bounded byte string in several `ExecText` frames:
//! a list of `tag u8 | length u32 | bytes`, at most [`MAX_EXEC_TEXT`] in all.
//! Bytes are as the kernel takes them: anything but NUL.

use alloc::vec::Vec;

/// Longest byte string of texts: well under the kernel's own limit of a quarter
/// of the stack rlimit (2 MiB), so that what fits here can be executed.
pub const MAX_EXEC_TEXT: usize = 1 << 20;

/// What a field is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FieldTag {
    /// One argument; the first is the program.
    Arg = 1,
    /// One `NAME=value`.
    Env = 2,
    /// The working directory; once.
    Cwd = 3,
}

/// Why texts are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExecTextError {
    /// More than [`MAX_EXEC_TEXT`] bytes.
    TooLong,
    /// A field that does not end, or an unknown tag.
    Malformed,
    /// No argument: there is no program.
    NoProgram,
    /// A NUL byte, which no program can be given.
    Nul,
    /// An environment entry without a name before `=`.
    EnvName,
    /// Two working directories, or a relative one.
    Cwd,
}

impl core::fmt::Display for ExecTextError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            ExecTextError::TooLong => "arguments and environment are over 1 MiB together",
            ExecTextError::Malformed => "malformed exec texts",
            ExecTextError::NoProgram => "no program to run",
            ExecTextError::Nul => "an argument or environment entry has a NUL byte",
            ExecTextError::EnvName => "an environment entry has no name before `=`",
            ExecTextError::Cwd => "the working directory must be one absolute path",
        })
    }
}

impl core::error::Error for ExecTextError {}

/// Checked texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecText {
    /// Arguments, the program first; empty strings are arguments too.
    pub argv: Vec<Vec<u8>>,
    /// `NAME=value` entries in order.
    pub env: Vec<Vec<u8>>,
    /// Absolute working directory; `None`: the image's.
    pub cwd: Option<Vec<u8>>,
}

impl ExecText {
    /// Encodes, after checking what [`ExecText::decode`] checks.
    ///
    /// # Errors
    /// The caller's texts can't be executed; the error says why.
    pub fn encode(&self) -> Result<Vec<u8>, ExecTextError> {
        self.check()?;
        let mut out = Vec::new();
        let fields = self.argv.iter().map(|arg| (FieldTag::Arg, arg));
        let fields = fields.chain(self.env.iter().map(|entry| (FieldTag::Env, entry)));
        for (tag, bytes) in fields.chain(self.cwd.iter().map(|cwd| (FieldTag::Cwd, cwd))) {
            if out.len() + 5 + bytes.len() > MAX_EXEC_TEXT {
                return Err(ExecTextError::TooLong);
            }
            out.push(tag as u8);
            out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            out.extend_from_slice(bytes);
        }
        Ok(out)
    }

    /// Decodes and checks.
    ///
    /// # Errors
    /// The bytes are not what [`ExecText::encode`] makes.
    pub fn decode(mut bytes: &[u8]) -> Result<ExecText, ExecTextError> {
        if bytes.len() > MAX_EXEC_TEXT {
            return Err(ExecTextError::TooLong);
        }
        let mut text = ExecText::default();
        while let Some((&tag, rest)) = bytes.split_first() {
            let (length, rest) = rest.split_first_chunk::<4>().ok_or(ExecTextError::Malformed)?;
            let length = u32::from_le_bytes(*length) as usize;
            let (field, rest) = rest.split_at_checked(length).ok_or(ExecTextError::Malformed)?;
            match tag {
                1 => text.argv.push(field.to_vec()),
                2 => text.env.push(field.to_vec()),
                3 if text.cwd.is_none() => text.cwd = Some(field.to_vec()),
                3 => return Err(ExecTextError::Cwd),
                _ => return Err(ExecTextError::Malformed),
            }
            bytes = rest;
        }
        text.check()?;
        Ok(text)
    }

    fn check(&self) -> Result<(), ExecTextError> {
        if self.argv.first().is_none_or(|program| program.is_empty()) {
            return Err(ExecTextError::NoProgram);
        }
        if self.argv.iter().chain(&self.env).chain(&self.cwd).any(|bytes| bytes.contains(&0)) {
            return Err(ExecTextError::Nul);
        }
        if self.env.iter().any(|entry| !matches!(entry.iter().position(|&b| b == b'='), Some(1..))) {
            return Err(ExecTextError::EnvName);
        }
        if self.cwd.as_ref().is_some_and(|cwd| cwd.first() != Some(&b'/')) {
            return Err(ExecTextError::Cwd);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(argv: &[&[u8]], env: &[&[u8]], cwd: Option<&[u8]>) -> ExecText {
        ExecText {
            argv: argv.iter().map(|a| a.to_vec()).collect(),
            env: env.iter().map(|e| e.to_vec()).collect(),
            cwd: cwd.map(<[u8]>::to_vec),
        }
    }

    #[test]
    fn odd_but_legal_texts_come_back_whole() {
        let big = [b"BIG=".as_slice(), &[b'x'; 65536]].concat();
        let texts =
            text(&[b"/bin/sh", b"", b"a b\n\"'\xff"], &[b"A=b=c\n", b"E=", &big], Some(b"/workspace"));
        assert_eq!(ExecText::decode(&texts.encode().unwrap()), Ok(texts));
    }

    #[test]
    fn what_no_kernel_takes_is_refused_on_both_sides() {
        for (bad, why) in [
            (text(&[], &[], None), ExecTextError::NoProgram),
            (text(&[b""], &[], None), ExecTextError::NoProgram),
            (text(&[b"a\0b"], &[], None), ExecTextError::Nul),
            (text(&[b"a"], &[b"=x"], None), ExecTextError::EnvName),
            (text(&[b"a"], &[b"x"], None), ExecTextError::EnvName),
            (text(&[b"a"], &[], Some(b"rel")), ExecTextError::Cwd),
        ] {
            assert_eq!(bad.encode(), Err(why));
        }
        let long = text(&[b"a", &[b'x'; MAX_EXEC_TEXT]], &[], None);
        assert_eq!(long.encode(), Err(ExecTextError::TooLong));
        for bad in [&[1u8, 4, 0, 0, 0, b'a'] as &[u8], &[9, 0, 0, 0, 0], &[1, 0, 0]] {
            assert_eq!(ExecText::decode(bad), Err(ExecTextError::Malformed));
        }
    }
}
