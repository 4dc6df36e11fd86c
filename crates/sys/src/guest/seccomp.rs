//! From a table of refused system calls to the kernel's filter.
//!
//! What it is for: [`Filter::compile`] turns rules into a classic BPF program,
//! [`Filter::install`] puts it on the calling thread. The table itself is
//! policy and lies with its caller.
//! What it guarantees: another machine's calls (32-bit ones on x86-64) end the
//! process, calls beyond the newest that the table's writer knew (the x32 ABI
//! is far beyond) are answered as not implemented, and a rule's argument tests
//! all hold where it applies; of several rules for one call the first that
//! applies decides.
//! What it does not: look behind pointers, which no such filter can.
//!
//! ```text
//! ld arch; not ours -> kill         ld nr
//! binary search over stretches of calls with one answer:
//!   jge nr, upper half, lower half  (a stretch's answer: one of a few shared returns)
//! a call with tests, per rule:
//!   per test: ld arg; and mask; jeq value.. -> next test | next rule
//!             ret errno
//!   after the last rule: ret allow
//! ```
//! A search, not a list, and a short one: at each installation (one per exec) the kernel runs the
//! filter for every call number there is, to remember those that are always allowed, and translates it
//! to machine code in many passes. With a list of 80 rules that took longer than fork and exec together,
//! and with five instructions for each call a sixth of an exec.

use std::collections::BTreeMap;
use std::io;

/// What a rule answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The call fails with this errno.
    Errno(i32),
    /// The call waits until whoever holds the filter's listener answers; once nobody holds it, there is no such call.
    Ask,
}

/// A test of one argument: whether its low 32 bits, masked, are among `values`.
///
/// The kernel itself looks at 32 bits of every argument that the table tests
/// (`int`, `unsigned int`, and clone flags through `lower_32_bits`).
#[derive(Clone, Copy, Debug)]
pub struct Argument {
    /// Which argument, from 0 to 5.
    pub index: u8,
    /// Bits that count.
    pub mask: u32,
    /// The values.
    pub values: &'static [u32],
    /// `true`: the rule applies where the value is among them; `false`: where it is not.
    pub among: bool,
}

/// A system call that is refused, always or where all of `when` hold.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Its number.
    pub call: libc::c_long,
    /// Tests; none: always.
    pub when: &'static [Argument],
    /// The answer.
    pub verdict: Verdict,
}

/// Why a table does not compile: a mistake of its writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterError {
    /// More instructions than the kernel takes, or a jump that is too long.
    TooLong,
    /// A system call number or argument index that does not exist, or a test of no value.
    Number,
}

impl std::fmt::Display for FilterError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FilterError::TooLong => "the seccomp table is too long",
            FilterError::Number => "the seccomp table names a call or argument that does not exist",
        })
    }
}

impl std::error::Error for FilterError {}

/// A compiled filter.
#[derive(Debug)]
pub struct Filter {
    program: Vec<libc::sock_filter>,
    #[cfg(feature = "host")]
    asks: bool,
}

/// `AUDIT_ARCH_X86_64`: EM_X86_64, 64 bit, little-endian.
const AUDIT_ARCH: u32 = 0xC000_003E;
/// Offsets in `struct seccomp_data`.
const NR: u32 = 0;
const ARCH: u32 = 4;
const ARGS: u32 = 16;
/// `BPF_MAXINSNS`.
const MAX_INSTRUCTIONS: usize = 4096;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const fn op(code: u16, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: 0, k }
}

const fn jump(code: u16, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

const fn refusal(errno: i32) -> libc::sock_filter {
    op(RETURN, libc::SECCOMP_RET_ERRNO | (errno as u32 & libc::SECCOMP_RET_DATA))
}

const fn answer(verdict: Verdict) -> libc::sock_filter {
    match verdict {
        Verdict::Errno(errno) => refusal(errno),
        Verdict::Ask => op(RETURN, libc::SECCOMP_RET_USER_NOTIF),
    }
}

const ALLOW: libc::sock_filter = op(RETURN, libc::SECCOMP_RET_ALLOW);

impl Filter {
    /// Compiles `rules`; calls above `newest` are not implemented.
    ///
    /// # Errors
    /// The table is wrong.
    pub fn compile(newest: libc::c_long, rules: &[Rule]) -> Result<Filter, FilterError> {
        let number = |call| u32::try_from(call).map_err(|_| FilterError::Number);
        let mut calls: BTreeMap<u32, Vec<&Rule>> = BTreeMap::new();
        for rule in rules {
            calls.entry(number(rule.call)?).or_default().push(rule);
        }
        let program = Search::default().program(&stretches(number(newest)?, &calls)?);
        if program.len() > MAX_INSTRUCTIONS {
            return Err(FilterError::TooLong);
        }
        Ok(Filter {
            program,
            #[cfg(feature = "host")]
            asks: rules.iter().any(|rule| rule.verdict == Verdict::Ask),
        })
    }

    /// Whether a rule of it asks.
    #[cfg(feature = "host")]
    pub(crate) fn asks(&self) -> bool {
        self.asks
    }

    /// Puts the filter on the calling thread, for good, its children and what it executes. Where a
    /// rule asks, nobody is there to answer: such a call is not implemented.
    ///
    /// # Errors
    /// The kernel's; `EACCES` without no-new-privileges.
    pub fn install(&self) -> io::Result<()> {
        self.put(0).map(|_| ())
    }

    /// The same, and a descriptor, closed on exec, through which the calls that ask are answered.
    #[cfg(feature = "host")]
    pub(crate) fn install_asking(&self) -> io::Result<std::os::fd::RawFd> {
        self.put(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER).map(|listener| listener as std::os::fd::RawFd)
    }

    fn put(&self, flags: libc::c_ulong) -> io::Result<libc::c_long> {
        let program = libc::sock_fprog {
            len: self.program.len() as libc::c_ushort,
            filter: self.program.as_ptr().cast_mut(),
        };
        // SAFETY: `program` names `len` instructions that live through the call; the kernel copies and
        // checks them and writes nothing.
        let result = unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }
}

/// What a call gets.
enum Answer {
    /// This return.
    Always(u32),
    /// Tests and returns; all ways end.
    Tested(Vec<libc::sock_filter>),
}

/// Calls that follow each other and have one answer.
struct Stretch {
    first: u32,
    answer: Answer,
}

/// All calls that a program can name, in order.
fn stretches(newest: u32, calls: &BTreeMap<u32, Vec<&Rule>>) -> Result<Vec<Stretch>, FilterError> {
    let beyond = newest.checked_add(1).ok_or(FilterError::Number)?;
    let mut found: Vec<Stretch> = Vec::new();
    let mut add = |first, answer| {
        // What was to be allowed after a call, and has a rule of its own.
        found.pop_if(|last| last.first == first);
        match (found.last().map(|last| &last.answer), &answer) {
            (Some(Answer::Always(last)), Answer::Always(this)) if last == this => {}
            _ => found.push(Stretch { first, answer }),
        }
    };
    add(0, Answer::Always(ALLOW.k));
    for (&call, rules) in calls.range(..beyond) {
        let mut tests = Vec::new();
        for rule in rules {
            tests.extend(body(rule)?);
        }
        let answer = match tests.as_slice() {
            [first, ..] if first.code == RETURN => Answer::Always(first.k),
            _ => Answer::Tested(tests.into_iter().chain([ALLOW]).collect()),
        };
        add(call, answer);
        add(call + 1, Answer::Always(ALLOW.k));
    }
    add(beyond, Answer::Always(refusal(libc::ENOSYS).k));
    Ok(found)
}

/// A program, written from its end to its beginning, since jumps lead forward only.
#[derive(Default)]
struct Search {
    reversed: Vec<libc::sock_filter>,
    /// Returns by what they answer: where the last of each is.
    returns: BTreeMap<u32, usize>,
}

/// A conditional jump reaches 255 instructions; two may be written before it.
const REACH: usize = 253;

impl Search {
    fn program(mut self, stretches: &[Stretch]) -> Vec<libc::sock_filter> {
        let entry = self.find(stretches);
        // What was written last comes next.
        debug_assert_eq!(entry + 1, self.reversed.len());
        self.reversed.extend([
            op(LOAD, NR),
            op(RETURN, libc::SECCOMP_RET_KILL_PROCESS),
            jump(JUMP_EQUAL, AUDIT_ARCH, 1, 0),
            op(LOAD, ARCH),
        ]);
        self.reversed.reverse();
        self.reversed
    }

    fn write(&mut self, instruction: libc::sock_filter) -> usize {
        if instruction.code == RETURN {
            self.returns.insert(instruction.k, self.reversed.len());
        }
        self.reversed.push(instruction);
        self.reversed.len() - 1
    }

    /// Writes what finds a call's answer; where that begins.
    fn find(&mut self, stretches: &[Stretch]) -> usize {
        let (lower, upper) = stretches.split_at(stretches.len() / 2);
        match (lower, upper) {
            (_, []) => self.write(ALLOW),
            ([], [only, ..]) => match &only.answer {
                Answer::Always(k) => {
                    self.returns.get(k).copied().unwrap_or_else(|| self.write(op(RETURN, *k)))
                }
                Answer::Tested(tests) => {
                    tests.iter().rev().fold(0, |_, instruction| self.write(*instruction))
                }
            },
            (lower, [first, ..]) => {
                let (above, below) = (self.find(upper), self.find(lower));
                let (above, below) = (self.near(above), self.near(below));
                let distance = |place| (self.reversed.len() - place - 1) as u8;
                let (above, below) = (distance(above), distance(below));
                self.write(jump(JUMP_AT_LEAST, first.first, above, below))
            }
        }
    }

    /// The place, or one that leads there and can be reached by a conditional jump.
    fn near(&mut self, place: usize) -> usize {
        let distance = self.reversed.len() - place - 1;
        match self.reversed.get(place) {
            Some(_) if distance < REACH => place,
            Some(instruction) if instruction.code == RETURN => self.write(*instruction),
            _ => self.write(op(JUMP, distance as u32)),
        }
    }
}

/// The instructions of one rule; where a test fails they lead past their end.
fn body(rule: &Rule) -> Result<Vec<libc::sock_filter>, FilterError> {
    if rule.when.is_empty() {
        return Ok(vec![answer(rule.verdict)]);
    }
    let length: usize = rule.when.iter().map(|test| 2 + test.values.len()).sum::<usize>() + 1;
    let mut out = Vec::new();
    for test in rule.when {
        if test.index > 5 || test.values.is_empty() {
            return Err(FilterError::Number);
        }
        // Little-endian: the low half comes first.
        out.push(op(LOAD, ARGS + 8 * u32::from(test.index)));
        out.push(op(AND, test.mask));
        let test_end = out.len() + test.values.len();
        for (position, &value) in test.values.iter().enumerate() {
            let here = out.len() + 1;
            let to = |target: usize| u8::try_from(target - here).map_err(|_| FilterError::TooLong);
            let last = position + 1 == test.values.len();
            let (hit, miss) = if test.among {
                (to(test_end)?, if last { to(length)? } else { 0 })
            } else {
                (to(length)?, 0)
            };
            out.push(jump(JUMP_EQUAL, value, hit, miss));
        }
    }
    out.push(answer(rule.verdict));
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the program as the kernel would; gives its return value.
    fn run(filter: &Filter, arch: u32, nr: u32, args: [u32; 6]) -> u32 {
        let (mut pc, mut acc) = (0, 0);
        loop {
            let i = filter.program[pc];
            pc += 1;
            match i.code {
                LOAD if i.k == NR => acc = nr,
                LOAD if i.k == ARCH => acc = arch,
                LOAD => acc = args[((i.k - ARGS) / 8) as usize],
                AND => acc &= i.k,
                JUMP_EQUAL => pc += usize::from(if acc == i.k { i.jt } else { i.jf }),
                JUMP_AT_LEAST => pc += usize::from(if acc >= i.k { i.jt } else { i.jf }),
                JUMP => pc += i.k as usize,
                RETURN => return i.k,
                other => panic!("instruction {other}"),
            }
        }
    }

    const RULES: &[Rule] = &[
        Rule { call: 10, when: &[], verdict: Verdict::Errno(1) },
        Rule {
            call: 20,
            when: &[
                Argument { index: 0, mask: !0, values: &[2, 10], among: true },
                Argument { index: 1, mask: 0xf, values: &[3, 10], among: true },
            ],
            verdict: Verdict::Errno(2),
        },
        Rule {
            call: 20,
            when: &[Argument { index: 0, mask: !0, values: &[1, 2, 10], among: false }],
            verdict: Verdict::Errno(3),
        },
        Rule {
            call: 30,
            when: &[Argument { index: 2, mask: 0x30, values: &[0], among: false }],
            verdict: Verdict::Errno(4),
        },
        Rule { call: 31, when: &[], verdict: Verdict::Errno(5) },
    ];

    fn answered(nr: u32, args: [u32; 6]) -> Option<u32> {
        let filter = Filter::compile(100, RULES).unwrap();
        match run(&filter, AUDIT_ARCH, nr, args) {
            libc::SECCOMP_RET_ALLOW => None,
            other => Some(other & 0xffff),
        }
    }

    #[test]
    fn rules_apply_where_all_their_tests_hold_and_nowhere_else() {
        assert_eq!(answered(9, [0; 6]), None);
        assert_eq!(answered(10, [0; 6]), Some(1));
        assert_eq!(answered(20, [2, 3 | 0x800, 0, 0, 0, 0]), Some(2));
        assert_eq!(answered(20, [10, 10, 0, 0, 0, 0]), Some(2));
        assert_eq!(answered(20, [2, 1, 0, 0, 0, 0]), None);
        assert_eq!(answered(20, [1, 3, 0, 0, 0, 0]), None);
        assert_eq!(answered(20, [17, 1, 0, 0, 0, 0]), Some(3));
        assert_eq!(answered(30, [0, 0, 0x20, 0, 0, 0]), Some(4));
        assert_eq!(answered(30, [0, 0, 0x40, 0, 0, 0]), None);
        assert_eq!(answered(31, [0; 6]), Some(5));
    }

    #[test]
    fn every_call_of_a_long_table_is_found() {
        let even: Vec<Rule> =
            (0..500).map(|n| Rule { call: 2 * n, when: &[], verdict: Verdict::Errno(7) }).collect();
        let filter = Filter::compile(2000, &even).unwrap();
        for nr in 0..1100 {
            let refused = run(&filter, AUDIT_ARCH, nr, [0; 6]) != libc::SECCOMP_RET_ALLOW;
            assert_eq!(refused, nr < 1000 && nr % 2 == 0, "call {nr}");
        }
    }

    #[test]
    fn other_machines_and_unknown_calls_get_nowhere() {
        let filter = Filter::compile(100, RULES).unwrap();
        let i386 = 0x4000_0003;
        assert_eq!(run(&filter, i386, 9, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
        assert_eq!(answered(100, [0; 6]), None);
        assert_eq!(answered(101, [0; 6]), Some(libc::ENOSYS as u32));
        let x32 = 0x4000_0000;
        assert_eq!(answered(x32 | 10, [0; 6]), Some(libc::ENOSYS as u32));
    }

    #[test]
    fn wrong_tables_do_not_compile() {
        let index = Rule {
            call: 1,
            when: &[Argument { index: 6, mask: 0, values: &[], among: true }],
            verdict: Verdict::Errno(1),
        };
        assert_eq!(Filter::compile(1, &[index]).err(), Some(FilterError::Number));
        let negative = Rule { call: -1, when: &[], verdict: Verdict::Errno(1) };
        assert_eq!(Filter::compile(1, &[negative]).err(), Some(FilterError::Number));
        const MANY: &[u32] = &[7; 300];
        let far = Rule {
            call: 1,
            when: &[Argument { index: 0, mask: !0, values: MANY, among: true }],
            verdict: Verdict::Errno(1),
        };
        assert_eq!(Filter::compile(1, &[far]).err(), Some(FilterError::TooLong));
        let many: Vec<Rule> = (0..4000)
            .map(|call| Rule { call, when: &[], verdict: Verdict::Errno((call % 2000) as i32) })
            .collect();
        assert_eq!(Filter::compile(4000, &many).err(), Some(FilterError::TooLong));
    }

    /// The rules, read as they stand.
    fn meant(newest: u32, rules: &[Rule], nr: u32, args: [u32; 6]) -> u32 {
        let applies = |rule: &&Rule| {
            rule.call == i64::from(nr)
                && rule.when.iter().all(|test| {
                    let value = args[usize::from(test.index)] & test.mask;
                    test.values.contains(&value) == test.among
                })
        };
        match rules.iter().find(applies) {
            _ if nr > newest => refusal(libc::ENOSYS).k,
            Some(rule) => answer(rule.verdict).k,
            None => libc::SECCOMP_RET_ALLOW,
        }
    }

    #[test]
    fn whatever_the_table_every_call_gets_what_the_first_rule_that_applies_says() {
        const TESTS: [&[Argument]; 4] = [
            &[],
            &[Argument { index: 0, mask: !0, values: &[0, 2], among: true }],
            &[Argument { index: 5, mask: 3, values: &[1], among: false }],
            &[
                Argument { index: 0, mask: 2, values: &[0], among: false },
                Argument { index: 1, mask: 1, values: &[1], among: true },
            ],
        ];
        let mut state = 1u32;
        let mut draw = move |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % below
        };
        for table in 0..200 {
            // From none to so many that jumps no longer reach.
            let rules: Vec<Rule> = (0..draw(3 * table + 1))
                .map(|_| Rule {
                    call: draw(700).into(),
                    when: TESTS[draw(4) as usize],
                    verdict: Verdict::Errno(draw(5) as i32),
                })
                .collect();
            let newest = 100 + draw(650);
            let filter = Filter::compile(newest.into(), &rules).unwrap();
            for nr in (0..760).chain([0x4000_0000, u32::MAX]) {
                let args = [draw(4), draw(4), 0, 0, 0, draw(4)];
                let (got, meant) = (run(&filter, AUDIT_ARCH, nr, args), meant(newest, &rules, nr, args));
                assert_eq!(got, meant, "table {table}, call {nr} {args:?}");
            }
        }
    }
}
