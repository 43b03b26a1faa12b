//! Futures of what is rare, compiled once.
//!
//! The body of an async function is compiled again in each crate that awaits it, with all that it
//! awaits itself: nearly half of what the command line's crate had was the path of requests. A
//! call through a pointer ends that. An allocation is nothing beside a rare thing, which waits for
//! a device.

use futures_util::future::LocalBoxFuture;

/// A future on the heap, whose body is compiled where its type is first known.
///
/// The compiler uses the copy of an upstream crate, even when it optimizes, because this function
/// is never inlined.
#[inline(never)]
pub fn rare<'a, T>(future: impl Future<Output = T> + 'a) -> LocalBoxFuture<'a, T> {
    Box::pin(future)
}
