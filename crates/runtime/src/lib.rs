//! The run itself.
//!
//! ```text
//!  RunDraft ──seal──▶ SealedSpec ──Runtime::start──▶ Run ──exec…──▶ finish ──▶ RunReport
//!
//!  Sealed ─▶ Registered ─▶ Measured ─▶ Booted ─▶ Exited ─▶ TornDown ─▶ Closed
//!     │           │            │          │                    ▲
//!     └─ FAILED   └────────────┴──────────┴── any failure ─────┘
//! ```
//! What it guarantees: every path goes through teardown, and the teardown is
//! checked and recorded; the kill decision is made on each host observation as it
//! is recorded, and the machine is stopped before anything is written about it;
//! whatever nobody foresaw ends KILLED.
//! What it does not: it forms no opinions (a caller passes an [`Advisor`], which
//! sees only the closed record), and builds no images.
//! Who may call: the command line, evaluation, and anyone who embeds Hotcell.
#![forbid(unsafe_code)]

mod aftermath;
mod bundle;
mod channel;
mod clock;
mod copy;
mod disk;
mod driver;
mod exec;
mod glimpse;
mod measured;
mod phases;
mod recorder;
mod report;
mod run;
mod stdin;
mod stream;
mod text;
mod vmm;
mod watch;

pub use bundle::{BundleError, CONSOLE, REPORT, SPEC};
pub use clock::{Clock, HostClock};
pub use copy::{CopyError, CopyResult, FILES, GetRequest, PutRequest};
pub use exec::{ExecRequest, ExecResult, WORKLOAD_USER};
pub use glimpse::{Glimpse, Glimpses, NoGlimpse};
pub use hotcell_decide::{ExecHow, SeenProcess};
pub use measured::{MeasureError, MeasuredBoot};
pub use recorder::RecordError;
pub use report::{Gate1, Isolation, Kill, Opinion, RunReport, Teardown};
pub use run::{Advisor, Exec, ExecError, Interrupter, Patience, Run, Runtime};
pub use stream::{ExecIo, Output, Stdin, StreamTotals};
pub use text::Text;
