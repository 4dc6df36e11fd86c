//! Every limit of the init, with its reason.

use hotcell_wire::{HEADER_LEN, MAX_PAYLOAD, STREAM_CHUNK};
use std::time::Duration;

/// Output of execs is only read while less than this waits for the channel, so
/// that a control frame waits behind little (and the kernel's ring). The driver
/// takes 32 KiB per write.
pub const OUT_DATA_BYTES: usize = 2 * STREAM_CHUNK;
/// No frame of the host is read while this much waits for the channel: answers
/// to a host that does not listen must not pile up.
pub const OUT_STOP_BYTES: usize = 8 * (HEADER_LEN + MAX_PAYLOAD);
/// Bytes taken from the channel in one turn of the loop. The driver hands out pages, one for each read.
pub const READ_BYTES: usize = 64 * 1024;
/// Texts of execs that are still being received, together: four of the largest.
pub const COLLECTING_BYTES: usize = 4 * hotcell_wire::MAX_EXEC_TEXT;
/// Stdin credit is handed back in steps of this, not byte by byte.
pub const STDIN_CREDIT_STEP: u32 = hotcell_wire::STREAM_WINDOW / 4;

/// Clients of the request socket at once.
pub const CLIENTS: usize = 32;
/// How long the host may think about a request.
pub const REQUEST_PATIENCE: Duration = Duration::from_secs(30);
/// How long a client may be silent before its place is given to the next.
pub const CLIENT_IDLE: Duration = Duration::from_secs(10);

/// How long boot waits for a device that the kernel finds by itself.
pub const DEVICE_PATIENCE: Duration = Duration::from_secs(20);
/// How long the end of the machine waits for the host to take the last words.
pub const LAST_WORDS_PATIENCE: Duration = Duration::from_millis(500);
/// How long the channel must look closed before the host counts as gone. Data and the news that
/// the host has opened its end come through different queues, in either order; a clone's host sends
/// its configuration in the moment in which it connects.
pub const ABSENCE: Duration = Duration::from_millis(250);
/// How long a machine whose host says nothing waits before it reads ahead. A host that boots a machine for a run has
/// sent its configuration long before the channel opens.
pub const BEFORE_READING_AHEAD: Duration = Duration::from_millis(20);
/// How long quiescing waits for a workload that was killed to be gone.
pub const QUIESCE_PATIENCE: Duration = Duration::from_secs(10);

/// Memory that the workload never gets: kernel, init, page tables of boot.
/// Measured at 512 MiB: the kernel's unreclaimable part is about 30 MiB.
pub const RESERVE_BYTES: u64 = 48 * 1024 * 1024;
/// Least memory that a workload is given, whatever was asked for.
pub const LEAST_MEMORY_BYTES: u64 = 16 * 1024 * 1024;
/// `/run`: sockets and pid files.
pub const RUN_BYTES: u64 = 4 * 1024 * 1024;
/// `/tmp` and `/dev/shm` until the host says otherwise. This and the next two are what most runs have: a clone
/// of a template then has nothing to change.
pub const TMP_BYTES: u64 = 64 * 1024 * 1024;
/// Processes until the host says otherwise.
pub const PIDS: u32 = 256;
/// User and group that own `/workspace`, and of the process that waits for the next order, where the kernel command line
/// has no `hotcell.owner`.
pub const OWNER: (u32, u32) = (1000, 1000);
/// Inodes of a tmpfs per page of its size, at least: a million empty files cost
/// kernel memory that the size limit does not count.
pub const TMP_BYTES_PER_INODE: u64 = 4096;
/// Open files of a process: soft as everywhere, hard enough for servers.
pub const OPEN_FILES: (u64, u64) = (1024, 16 * 1024);

const _: () = assert!(OUT_DATA_BYTES < OUT_STOP_BYTES);
const _: () = assert!(LEAST_MEMORY_BYTES < RESERVE_BYTES);
