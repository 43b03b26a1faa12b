//! The vocabulary of Blockhouse, floor 0 of the house.
//!
//! Requests, extents, durability, errors, buffers that the kernel may own for a while, and the
//! [`Storage`] trait that every floor above speaks. No I/O and no threads live here.

mod buf;
mod durability;
mod error;
mod extent;
mod in_flight;
mod iovector;
mod request;
mod shared_copy;
mod storage;
mod work_budget;

pub use buf::{BLOCK_ALIGNMENT, Buffer, BufferPool};
pub use durability::{Durability, Fua, SyncMode};
pub use error::{Error, ErrorKind, Result, errno};
pub use extent::{ByteRange, Extent, ExtentFlags, ExtentState};
pub use in_flight::{InFlight, InFlightLimits, InFlightPermit, ReleaseInFlight};
pub use iovector::{IoVector, IoVectorList, Segment};
pub use request::{Fallback, Request, Unmap};
pub use shared_copy::{copy_from_shared, copy_to_shared, fill_shared};
pub use storage::{
    Alignment, Allocation, Capabilities, FuaCost, GroupCommit, Offload, ReadAfterDiscard, Storage,
    WriteCache,
};
pub use work_budget::{WorkBudget, yield_now};
