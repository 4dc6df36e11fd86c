//! Whose executions the host has allowed: one permit for each exec that it began.
//!
//! The host redeems a spawn token before it begins an exec; what the token was
//! bound to comes with the exec as its permit, and reaches the gate before the
//! exec's first process has its order.
//!
//! ```text
//! granted --first file, the one that the permit names--> starting --its last file--> begun
//!    |                                                                                 |
//!    +-- another file: used up, refused                 more executions: only where the permit
//!                                                       says that the tree may start others
//! any --first process ended--> over: nothing of the tree executes any more --last process ended--> forgotten
//! ```
//! Who executes is read from the kernel: the cgroup that a process was born in
//! and cannot leave. So no secret travels into the guest, where it could be
//! stolen or handed on. One `execve` may ask for several files: a script, its
//! interpreter, a loader. How many is read from the files, as the kernel reads them.
//! What it does not do: judge files (see `gate`).
//! Who may call: the gate.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// What the host allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Permit {
    /// Digest of the file that may be started; zero where the host could not
    /// know it, as for a file of `/workspace`.
    pub(crate) binary: [u8; 32],
    /// Whether the processes of the tree may execute other files.
    pub(crate) spawn: bool,
}

/// Why an execution has no permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denial {
    /// No exec of the host's, or one whose permit is used up.
    NoToken,
    /// The permit is for another file.
    BinaryMismatch,
    /// The exec has ended.
    DeadParent,
}

#[derive(Debug)]
enum State {
    Granted,
    /// Its first process is between two files of one `execve`.
    Starting(i32),
    Begun,
    Over,
}

/// The permits of all execs.
#[derive(Debug, Default)]
pub(crate) struct Permits {
    by_exec: HashMap<u32, (Permit, State)>,
}

impl Permits {
    /// Before the exec's first process has its order. An exec gets one permit, ever.
    pub(crate) fn grant(&mut self, exec: u32, permit: Permit) {
        self.by_exec.entry(exec).or_insert((permit, State::Granted));
    }

    /// Its first process has ended.
    pub(crate) fn end(&mut self, exec: u32) {
        if let Some((_, state)) = self.by_exec.get_mut(&exec) {
            *state = State::Over;
        }
    }

    /// Its last process has ended.
    pub(crate) fn gone(&mut self, exec: u32) {
        self.by_exec.remove(&exec);
    }

    /// The exec that alone may have processes: whoever executes is of its tree,
    /// since all processes of the workload are born in an exec's cgroup.
    pub(crate) fn only(&self) -> Option<u32> {
        let mut execs = self.by_exec.keys();
        execs.next().copied().filter(|_| execs.next().is_none())
    }

    /// A refused file uses a fresh permit up, as a wrong token is.
    pub(crate) fn refused(&mut self, exec: u32) {
        if let Some((_, state @ (State::Granted | State::Starting(_)))) = self.by_exec.get_mut(&exec) {
            *state = State::Begun;
        }
    }

    /// Whether process `pid` of an exec may execute a file that is approved.
    /// `follows`: the kernel will ask for another file before this one runs.
    pub(crate) fn ask(
        &mut self,
        exec: u32,
        pid: i32,
        digest: &[u8; 32],
        follows: bool,
    ) -> Result<(), Denial> {
        let (permit, state) = self.by_exec.get_mut(&exec).ok_or(Denial::NoToken)?;
        let next = if follows { State::Starting(pid) } else { State::Begun };
        match *state {
            State::Granted if permit.binary == [0; 32] || permit.binary == *digest => *state = next,
            State::Granted => {
                *state = State::Begun;
                return Err(Denial::BinaryMismatch);
            }
            State::Starting(first) if first == pid => *state = next,
            State::Starting(_) | State::Begun if permit.spawn => {}
            State::Starting(_) | State::Begun => return Err(Denial::NoToken),
            State::Over => return Err(Denial::DeadParent),
        }
        Ok(())
    }
}

/// Most program headers: the kernel takes no more than 64 KiB of them (`load_elf_phdrs`).
const MAX_HEADERS: usize = 65_536 / PROGRAM_HEADER;
/// `struct elf64_phdr`.
const PROGRAM_HEADER: usize = 56;
/// `PT_INTERP` of `linux/elf.h`.
const INTERPRETER: [u8; 4] = 3u32.to_le_bytes();

/// Whether the kernel asks for another file before it runs this one: a script's
/// interpreter, a dynamic program's loader. A file in doubt has none, so that
/// what is in doubt is not executed.
pub(crate) fn needs_another(file: &File) -> bool {
    let mut head = [0; 64];
    if file.read_exact_at(&mut head[..2], 0).is_ok() && head.starts_with(b"#!") {
        return true;
    }
    // 64-bit, little-endian.
    if file.read_exact_at(&mut head, 0).is_err() || !head.starts_with(b"\x7fELF\x02\x01") {
        return false;
    }
    // e_phoff, e_phentsize, e_phnum of `struct elf64_hdr`.
    let number = |at: usize| -> u64 {
        let mut bytes = [0; 8];
        let from = head.get(at..at + 8).unwrap_or_default();
        bytes.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        u64::from_le_bytes(bytes)
    };
    let (offset, sizes) = (number(32), number(54));
    let (size, count) = ((sizes & 0xffff) as usize, (sizes >> 16 & 0xffff) as usize);
    if size != PROGRAM_HEADER || count > MAX_HEADERS {
        return false;
    }
    let mut headers = vec![0; count * PROGRAM_HEADER];
    file.read_exact_at(&mut headers, offset).is_ok()
        && headers.chunks_exact(PROGRAM_HEADER).any(|header| header.starts_with(&INTERPRETER))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHELL: [u8; 32] = [1; 32];
    const OTHER: [u8; 32] = [2; 32];

    fn permits(spawn: bool) -> Permits {
        let mut permits = Permits::default();
        permits.grant(7, Permit { binary: SHELL, spawn });
        permits
    }

    #[test]
    fn without_a_token_nothing_is_executed() {
        assert_eq!(permits(true).ask(0, 10, &SHELL, false), Err(Denial::NoToken));
        assert_eq!(permits(true).ask(8, 10, &SHELL, false), Err(Denial::NoToken));
    }

    #[test]
    fn a_token_is_for_one_file_and_used_up_by_another() {
        let mut permits = permits(false);
        assert_eq!(permits.ask(7, 10, &OTHER, false), Err(Denial::BinaryMismatch));
        assert_eq!(permits.ask(7, 10, &SHELL, false), Err(Denial::NoToken), "it can't be tried again");
        let mut unlisted = self::permits(false);
        unlisted.refused(7);
        assert_eq!(unlisted.ask(7, 10, &SHELL, false), Err(Denial::NoToken));
    }

    #[test]
    fn a_token_is_for_one_execution_unless_its_tree_may_start_others() {
        let mut single = permits(false);
        assert_eq!(single.ask(7, 10, &SHELL, false), Ok(()));
        assert_eq!(single.ask(7, 10, &SHELL, false), Err(Denial::NoToken), "a replay");
        assert_eq!(single.ask(7, 11, &OTHER, false), Err(Denial::NoToken));
        let mut tree = permits(true);
        assert_eq!(tree.ask(7, 10, &SHELL, false), Ok(()));
        assert_eq!(tree.ask(7, 11, &OTHER, false), Ok(()));
    }

    #[test]
    fn a_script_and_its_interpreter_are_one_execution() {
        let mut permits = permits(false);
        assert_eq!(permits.ask(7, 10, &SHELL, true), Ok(()), "a script");
        assert_eq!(permits.ask(7, 11, &OTHER, false), Err(Denial::NoToken), "another process");
        assert_eq!(permits.ask(7, 10, &OTHER, true), Ok(()), "its interpreter");
        assert_eq!(permits.ask(7, 10, &OTHER, false), Ok(()), "the interpreter's loader");
        assert_eq!(permits.ask(7, 10, &OTHER, false), Err(Denial::NoToken), "and no more");
    }

    #[test]
    fn nothing_of_an_exec_that_has_ended_is_executed() {
        let mut permits = permits(true);
        assert_eq!(permits.ask(7, 10, &SHELL, false), Ok(()));
        permits.end(7);
        assert_eq!(permits.ask(7, 11, &SHELL, false), Err(Denial::DeadParent));
        permits.grant(7, Permit { binary: SHELL, spawn: true });
        assert_eq!(permits.ask(7, 11, &SHELL, false), Err(Denial::DeadParent), "a number is used once");
        permits.gone(7);
        assert_eq!(permits.ask(7, 11, &SHELL, false), Err(Denial::NoToken));
    }

    #[test]
    fn one_exec_is_known_without_a_look_and_of_two_none() {
        let mut permits = permits(true);
        assert_eq!(permits.only(), Some(7));
        permits.grant(8, Permit { binary: OTHER, spawn: false });
        assert_eq!(permits.only(), None);
        permits.end(7);
        assert_eq!(permits.only(), None, "its processes may still be there");
        permits.gone(7);
        assert_eq!(permits.only(), Some(8));
        permits.gone(8);
        assert_eq!(permits.only(), None);
    }

    #[test]
    fn what_the_kernel_opens_next_is_read_from_the_file() {
        let dir = std::env::temp_dir().join(format!("hotcell-permits-{}", std::process::id()));
        let needs = |bytes: &[u8]| {
            std::fs::write(&dir, bytes).unwrap();
            needs_another(&File::open(&dir).unwrap())
        };
        let mut program = vec![0; 64 + 3 * PROGRAM_HEADER];
        program[..6].copy_from_slice(b"\x7fELF\x02\x01");
        program[32] = 64;
        (program[54], program[56]) = (56, 3);
        assert!(needs(b"#!/bin/sh"));
        assert!(!needs(b"# !/bin/sh") && !needs(b"") && !needs(b"\x7fELF"));
        assert!(!needs(&program), "static");
        program[64 + PROGRAM_HEADER] = 3;
        assert!(needs(&program), "dynamic");
        program[56] = 1;
        assert!(!needs(&program), "the header lies behind the last one");
        program[56] = 4;
        assert!(!needs(&program), "more headers than there are");
        (program[54], program[56]) = (55, 3);
        assert!(!needs(&program), "headers of another size");
        std::fs::remove_file(&dir).unwrap();
    }
}
