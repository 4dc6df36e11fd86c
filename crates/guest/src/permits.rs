//! Whose executions the host has allowed: one permit for each exec that it began.
//!
//! The host redeems a spawn token before it begins an exec; what the token was
//! bound to comes with the exec as its permit, and is in the memory that PID 1 and the gate share
//! before the exec's first process has its order.
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
//! Who may call: PID 1, which grants and ends them; the gate, which reads them and remembers what was used.

use crate::approved::{self, DIGEST};
use hotcell_wire::MAX_EXECS;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// Words that the permits take.
pub(crate) const WORDS: usize = MAX_EXECS * (1 + DIGEST);
/// In a slot's head above the exec's number: its tree may execute other files.
const SPAWN: u64 = 1 << 32;
/// Its first process has ended.
const OVER: u64 = 1 << 33;

/// The permits of all execs that have processes: PID 1 writes them, the gate reads them. Memory that both have, because a
/// message would wake the gate for each, and the way through a socket is long where it is translated for every run.
///
/// A slot is a head, the exec's number and two flags, or zero where it is free; and the permit's digest, which is written
/// before the head and does not change while the head is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    heads: &'static [AtomicU64],
    digests: &'static [AtomicU64],
}

impl Table {
    /// An empty one in [`WORDS`] words that are all zero; `None` where they are fewer.
    pub(crate) fn new(words: &'static [AtomicU64]) -> Option<Table> {
        let (heads, digests) = words.split_at_checked(MAX_EXECS)?;
        (words.len() == WORDS).then_some(Table { heads, digests })
    }

    fn slots(self) -> impl Iterator<Item = (&'static AtomicU64, &'static [AtomicU64])> {
        self.heads.iter().zip(self.digests.chunks_exact(DIGEST))
    }

    fn head(self, exec: u32) -> Option<&'static AtomicU64> {
        self.heads.iter().find(|head| exec != 0 && exec_in(head.load(Ordering::Acquire)) == exec)
    }

    /// PID 1, before the exec's first process has its order. An exec gets one permit, ever. Whether there was room.
    pub(crate) fn grant(self, exec: u32, permit: Permit) -> bool {
        if exec == 0 || self.head(exec).is_some() {
            return exec != 0;
        }
        let free = self.slots().find(|(head, _)| head.load(Ordering::Relaxed) == 0);
        let Some((head, digest)) = free else { return false };
        for (word, bytes) in digest.iter().zip(permit.binary.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        head.store(u64::from(exec) | if permit.spawn { SPAWN } else { 0 }, Ordering::Release);
        true
    }

    /// PID 1: the exec's first process has ended.
    pub(crate) fn end(self, exec: u32) {
        if let Some(head) = self.head(exec) {
            head.fetch_or(OVER, Ordering::AcqRel);
        }
    }

    /// PID 1: its last process has ended.
    pub(crate) fn gone(self, exec: u32) {
        if let Some(head) = self.head(exec) {
            head.store(0, Ordering::Release);
        }
    }

    /// The gate: the exec's permit, and whether its first process has ended. A slot is given to another exec only once
    /// this one has no process that could ask.
    fn permit(self, exec: u32) -> Option<(Permit, bool)> {
        let found = |head: u64| exec != 0 && exec_in(head) == exec;
        let (head, digest) = self.slots().find(|(head, _)| found(head.load(Ordering::Acquire)))?;
        let binary = approved::read(digest);
        let head = head.load(Ordering::Acquire);
        found(head).then_some((Permit { binary, spawn: head & SPAWN != 0 }, head & OVER != 0))
    }

    /// The gate: the exec that alone may have processes. Whoever executes is of its tree, since all processes of the
    /// workload are born in an exec's cgroup.
    pub(crate) fn only(self) -> Option<u32> {
        let mut execs =
            self.heads.iter().map(|head| exec_in(head.load(Ordering::Acquire))).filter(|exec| *exec != 0);
        execs.next().filter(|_| execs.next().is_none())
    }
}

fn exec_in(head: u64) -> u32 {
    head as u32
}

/// How far an exec's use of its permit has come.
#[derive(Clone, Copy, Debug)]
enum Used {
    /// Its first process is between two files of one `execve`.
    Starting(i32),
    Begun,
}

/// The permits, as the gate uses them up.
#[derive(Debug)]
pub(crate) struct Permits {
    table: Table,
    used: HashMap<u32, Used>,
}

impl Permits {
    pub(crate) fn new(table: Table) -> Permits {
        Permits { table, used: HashMap::new() }
    }

    /// As [`Table::only`].
    pub(crate) fn only(&self) -> Option<u32> {
        self.table.only()
    }

    /// A refused file uses a fresh permit up, as a wrong token is.
    pub(crate) fn refused(&mut self, exec: u32) {
        self.note(exec, Used::Begun);
    }

    fn note(&mut self, exec: u32, used: Used) {
        if self.used.len() >= MAX_EXECS {
            let table = self.table;
            self.used.retain(|exec, _| table.permit(*exec).is_some());
        }
        // Who has no permit has none that could be used up.
        if self.table.permit(exec).is_some() {
            self.used.insert(exec, used);
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
        let (permit, over) = self.table.permit(exec).ok_or(Denial::NoToken)?;
        let next = if follows { Used::Starting(pid) } else { Used::Begun };
        match self.used.get(&exec) {
            _ if over => Err(Denial::DeadParent),
            None if permit.binary == [0; 32] || permit.binary == *digest => {
                self.note(exec, next);
                Ok(())
            }
            None => {
                self.note(exec, Used::Begun);
                Err(Denial::BinaryMismatch)
            }
            Some(Used::Starting(first)) if *first == pid => {
                self.note(exec, next);
                Ok(())
            }
            Some(_) if permit.spawn => Ok(()),
            Some(_) => Err(Denial::NoToken),
        }
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
    use hotcell_sys::guest::SharedWords;

    const SHELL: [u8; 32] = [1; 32];
    const OTHER: [u8; 32] = [2; 32];

    /// Exec 7 has a permit for the shell.
    fn permits(spawn: bool) -> (Table, Permits) {
        let table = Table::new(SharedWords::new(WORDS).unwrap().words()).unwrap();
        assert!(table.grant(7, Permit { binary: SHELL, spawn }));
        (table, Permits::new(table))
    }

    #[test]
    fn without_a_token_nothing_is_executed() {
        let (_, mut permits) = permits(true);
        assert_eq!(permits.ask(0, 10, &SHELL, false), Err(Denial::NoToken));
        assert_eq!(permits.ask(8, 10, &SHELL, false), Err(Denial::NoToken));
    }

    #[test]
    fn a_token_is_for_one_file_and_used_up_by_another() {
        let (_, mut permits) = permits(false);
        assert_eq!(permits.ask(7, 10, &OTHER, false), Err(Denial::BinaryMismatch));
        assert_eq!(permits.ask(7, 10, &SHELL, false), Err(Denial::NoToken), "it can't be tried again");
        let (_, mut unlisted) = self::permits(false);
        unlisted.refused(7);
        assert_eq!(unlisted.ask(7, 10, &SHELL, false), Err(Denial::NoToken));
    }

    #[test]
    fn a_token_is_for_one_execution_unless_its_tree_may_start_others() {
        let (_, mut single) = permits(false);
        assert_eq!(single.ask(7, 10, &SHELL, false), Ok(()));
        assert_eq!(single.ask(7, 10, &SHELL, false), Err(Denial::NoToken), "a replay");
        assert_eq!(single.ask(7, 11, &OTHER, false), Err(Denial::NoToken));
        let (_, mut tree) = permits(true);
        assert_eq!(tree.ask(7, 10, &SHELL, false), Ok(()));
        assert_eq!(tree.ask(7, 11, &OTHER, false), Ok(()));
    }

    #[test]
    fn a_script_and_its_interpreter_are_one_execution() {
        let (_, mut permits) = permits(false);
        assert_eq!(permits.ask(7, 10, &SHELL, true), Ok(()), "a script");
        assert_eq!(permits.ask(7, 11, &OTHER, false), Err(Denial::NoToken), "another process");
        assert_eq!(permits.ask(7, 10, &OTHER, true), Ok(()), "its interpreter");
        assert_eq!(permits.ask(7, 10, &OTHER, false), Ok(()), "the interpreter's loader");
        assert_eq!(permits.ask(7, 10, &OTHER, false), Err(Denial::NoToken), "and no more");
    }

    #[test]
    fn nothing_of_an_exec_that_has_ended_is_executed() {
        let (table, mut permits) = permits(true);
        assert_eq!(permits.ask(7, 10, &SHELL, false), Ok(()));
        table.end(7);
        assert_eq!(permits.ask(7, 11, &SHELL, false), Err(Denial::DeadParent));
        assert!(table.grant(7, Permit { binary: SHELL, spawn: true }));
        assert_eq!(permits.ask(7, 11, &SHELL, false), Err(Denial::DeadParent), "a number is used once");
        table.gone(7);
        assert_eq!(permits.ask(7, 11, &SHELL, false), Err(Denial::NoToken));
    }

    #[test]
    fn one_exec_is_known_without_a_look_and_of_two_none() {
        let (table, permits) = permits(true);
        assert_eq!(permits.only(), Some(7));
        assert!(table.grant(8, Permit { binary: OTHER, spawn: false }));
        assert_eq!(permits.only(), None);
        table.end(7);
        assert_eq!(permits.only(), None, "its processes may still be there");
        table.gone(7);
        assert_eq!(permits.only(), Some(8));
        table.gone(8);
        assert_eq!(permits.only(), None);
    }

    #[test]
    fn a_slot_is_used_again_and_what_was_used_is_forgotten_with_it() {
        let (table, mut permits) = permits(false);
        let other = Permit { binary: OTHER, spawn: true };
        assert!(!table.grant(0, other), "no exec has this number");
        for exec in 8..7 + MAX_EXECS as u32 {
            assert!(table.grant(exec, other));
            assert_eq!(permits.ask(exec, 10, &OTHER, false), Ok(()));
        }
        assert!(!table.grant(5000, other), "as many as there may be");
        assert_eq!(permits.ask(7, 10, &SHELL, false), Ok(()));
        table.gone(7);
        table.end(0);
        table.gone(0);
        assert!(table.grant(5000, other));
        assert_eq!(
            permits.ask(5000, 10, &SHELL, false),
            Err(Denial::BinaryMismatch),
            "not what was there before"
        );
        assert_eq!(permits.ask(5000, 10, &SHELL, false), Ok(()), "its tree may execute what is approved");
        assert_eq!(permits.used.len(), MAX_EXECS);
        assert!(!permits.used.contains_key(&7));
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
