//! A load: a number of requests in flight, each followed by the next.
//!
//! Benchmarks use it. It is part of this crate because this crate is optimized in every build, and
//! the command line is not.

use blockhouse_core::{Buffer, Durability, Request, Result, Storage, rare};
use futures_util::future::try_join_all;

use crate::disk::Disk;

/// A request of a load; its buffer decides its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    /// The offset in bytes.
    pub offset: u64,
    /// The durability of a write; `None` for a read.
    pub write: Option<Durability>,
    /// Whether a flush follows.
    pub then_flush: bool,
}

/// The requests that are sent one after the other.
pub trait LoadSequence {
    /// The next request; `None` ends the sequence.
    fn next_request(&mut self) -> Option<LoadRequest>;

    /// The request, and the flush after it, have succeeded.
    fn request_ended(&mut self) {}
}

/// Sends the requests of all sequences, one of each at a time, from and into its buffer.
///
/// # Errors
/// The first error of a request; the other requests in flight are dropped.
pub async fn send_load<'a, S: Storage>(
    disk: &Disk<S>,
    sequences: Vec<(Box<dyn LoadSequence + 'a>, Buffer)>,
) -> Result<()> {
    let sequences = sequences.into_iter().map(|(mut sequence, mut buffer)| async move {
        while let Some(LoadRequest { offset, write, then_flush }) = sequence.next_request() {
            let request = match write {
                Some(durability) => Request::Write { offset, from: buffer.lend(), durability },
                None => Request::Read { offset, into: buffer.lend() },
            };
            rare(disk.submit(request)).await?;
            if then_flush {
                rare(disk.submit(Request::Flush)).await?;
            }
            sequence.request_ended();
        }
        Ok(())
    });
    try_join_all(sequences).await.map(drop)
}
