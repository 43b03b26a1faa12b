//! Compiles the futures of rare operations once.
//!
//! The body of an async function is compiled again in each crate that awaits it, together with
//! everything that it awaits. The request path made up nearly half of the command line's crate. A
//! call through a pointer avoids this. The cost of an allocation is negligible in a rare operation,
//! which waits for a device.

use futures_util::future::LocalBoxFuture;

/// A future on the heap, whose body is compiled where its type is first known.
///
/// Because this function is never inlined, the compiler uses the copy of an upstream crate even
/// when it optimizes. For disks on real storage, `blockhouse-instances` has
/// that copy.
#[inline(never)]
pub fn rare<'a, T>(future: impl Future<Output = T> + 'a) -> LocalBoxFuture<'a, T> {
    Box::pin(future)
}
