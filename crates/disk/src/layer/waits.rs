//! Waits for reads of backing files, and reports long waits.

use std::fmt;

use blockhouse_core::metrics::clock;
use blockhouse_core::{ByteRange, Storage};

use super::backing_reads::{BackingRead, Reader};
use super::behind::OpenedLayers;

/// A read of a backing file that is in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingWait {
    reader: Reader,
    range: ByteRange,
    file: String,
    seconds: u64,
}

impl BackingWait {
    /// The file that is read: in a chain, the file whose read is not complete.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Whole seconds since the read began.
    pub fn seconds(&self) -> u64 {
        self.seconds
    }
}

impl fmt::Display for BackingWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = match self.reader {
            Reader::Read => "a read",
            Reader::Change => "a change",
        };
        let (offset, length) = (self.range.offset(), self.range.length());
        let Self { file, seconds, .. } = self;
        write!(
            f,
            "{who} waits for {length} bytes at offset {offset} of its backing file {file} since {seconds} s"
        )
    }
}

impl<S: Storage> OpenedLayers<'_, S> {
    /// Waits until all reads have ended that looked up the backing file before this call.
    pub(crate) async fn reads_ended(self) {
        self.layer().format.reads_ended().await;
        self.layer().backing_reads.ended().await;
    }

    /// The oldest read of a backing file for a change; without such a read, the oldest read of a
    /// backing file.
    pub(crate) fn longest_wait(self) -> Option<BackingWait> {
        let BackingRead { range, reader, since, depth } = self.layer().backing_reads.oldest()?;
        let mut layer = self.layer().layers().nth(depth)?;
        while let Some(next) =
            layer.backing_reads.oldest().and_then(|one| layer.layers().nth(one.depth))
        {
            layer = next;
        }
        let seconds = clock::read_now().nanoseconds_since(since) / 1_000_000_000;
        Some(BackingWait { reader, range, file: layer.name().to_owned(), seconds })
    }
}
