//! The end of an operation, and its waiter.

use std::io;

/// The outcome of an operation: a number of bytes, or an errno.
pub(crate) type Completion = io::Result<u64>;

/// The waiter for an operation.
pub(crate) trait Waiter: Send + 'static {
    /// Called once, on any thread, when the operation has ended.
    fn complete(self, completion: Completion);
}
