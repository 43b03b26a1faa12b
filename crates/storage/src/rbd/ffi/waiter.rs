//! The end of an operation, and its waiter.

use std::io;

/// The end of an operation: bytes, or an errno.
pub(crate) type Completion = io::Result<u64>;

/// The waiter for an operation.
pub(crate) trait Waiter: Send + 'static {
    /// The operation has ended, once; on any thread.
    fn complete(self, completion: Completion);
}
