//! Why a queue can no longer be used.

use super::descriptor::MAX_ENTRIES;

/// An error of the driver or its front-end that makes the queue unusable.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The queue's size is not allowed by virtio, or too large.
    #[error("a queue of {0} entries; it must be a power of two up to {MAX_ENTRIES}")]
    Size(u16),
    /// A part of the queue is not in the guest's memory.
    #[error("the {0} at {1:#x} is not in the guest's memory, or misaligned")]
    Misplaced(&'static str, u64),
    /// More entries are available than the queue has.
    #[error("{0} requests made available at once in a queue of {1}")]
    TooManyAvailable(u16, u16),
    /// A descriptor's index is outside of the table.
    #[error("descriptor {0} of a table of {1}")]
    NoSuchDescriptor(u16, usize),
    /// A chain is longer than allowed, or endless.
    #[error("a chain of more than {0} descriptors")]
    Endless(usize),
    /// An indirect table is inside of another one, or its descriptor also has `NEXT`.
    #[error("an indirect table that virtio does not allow: flags {0:#x}, {1} bytes")]
    Indirect(u16, u32),
    /// Memory that the front-end shares can no longer be accessed, for example because its file was
    /// truncated. Data read from it is invalid.
    #[error("memory that the front-end shares has vanished")]
    MemoryLost,
    /// A request has no byte for the status, so its outcome cannot be reported.
    #[error("a request without a place for its status")]
    NoStatus,
}
