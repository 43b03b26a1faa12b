//! The vocabulary of Blockhouse (layer 0): the requests of exports, the answers of formats, the
//! capabilities of storages.
//!
//! | type | meaning |
//! | --- | --- |
//! | [`Request`] | a request of an export to a disk; a write has a [`Durability`] |
//! | [`IoVector`] | memory for an operation; a [`Buffer`], a [`BufferPool`] or a guest owns it |
//! | [`Storage`] | a host file, the simulator's disk, or your own; it has [`Capabilities`] |
//! | [`Extent`] | the location of a guest's bytes, and the rules for overwriting them |
//! | [`Error`] | one line: the failure, its file and offset, and what to do; and an errno |
//!
//! [`sync`] has the primitives of concurrency that all layers share, [`metrics`] the clock,
//! counters and histograms with which they measure. This crate does no I/O and starts no threads.
//! To open disk images see `blockhouse-disk`; the guide to all crates is `docs/library.md` in the
//! repository.
//!
//! # Memory
//!
//! The kernel may use a request's memory after the future that waits for it is dropped. So a
//! request owns its memory, and a buffer lends it:
//!
//! ```
//! use blockhouse_core::{Buffer, Durability, Request};
//!
//! let mut buffer = Buffer::try_new(4096)?;
//! buffer.bytes_mut().fill(7);
//! let write = Request::Write { offset: 0, from: buffer.lend(), durability: Durability::Data };
//! assert!(buffer.is_lent());
//! // When the request completes, its memory returns to the buffer; here it is dropped instead.
//! drop(write);
//! assert_eq!(buffer.bytes()[0], 7);
//! # Ok::<(), blockhouse_core::Error>(())
//! ```

mod buf;
mod durability;
mod error;
mod extent;
mod in_flight;
mod iovector;
pub mod metrics;
mod rare;
mod request;
mod shared_copy;
mod state_memory;
mod storage;
pub mod sync;
mod tool_progress;
pub mod trial;
mod work_budget;

pub use buf::{BLOCK_ALIGNMENT, Buffer, BufferPool};
pub use durability::{Durability, Fua, SyncMode};
pub use error::{Error, ErrorKind, Result, errno};
pub use extent::{ByteRange, Extent, ExtentFlags, ExtentState};
pub use in_flight::{InFlight, InFlightLimits, InFlightPermit, ReleaseInFlight};
pub use iovector::{IoVector, IoVectorList, KeptVector, KernelPages, PageUse, Segment};
pub use rare::rare;
pub use request::{Fallback, Request, Unmap};
pub use shared_copy::{copy_from_shared, copy_to_shared, fill_shared};
pub use state_memory::{RESERVED_WORDS, StateMemory};
pub use storage::{
    Alignment, Allocation, Capabilities, FuaCost, GroupCommit, Offload, ReadAfterDiscard,
    SnapshotChange, Storage, StorageChange, StorageSnapshot, WriteCache,
};
pub use tool_progress::ToolProgress;
pub use work_budget::{WorkBudget, yield_now};
