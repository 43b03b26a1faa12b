//! Reads VM state from a snapshot: in parallel ahead of the caller, which gets it in order.

use blockhouse_core::{Buffer, ByteRange, Error, ErrorKind, Result, Storage, rare};
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{FuturesOrdered, StreamExt};

use super::{MAX_WRITES, MIN_WINDOW};
use crate::disk::Disk;
use crate::layer::Reader;

/// The state of the machine in the snapshot that a disk was opened on.
pub struct VmStateReader<'a, S: Storage> {
    disk: &'a Disk<S>,
    chunk_size: u64,
    /// Start of the state, past the end of the disk.
    start: u64,
    size: u64,
    /// Bytes that have been requested.
    requested: u64,
    read_ahead: FuturesOrdered<LocalBoxFuture<'a, Result<Buffer>>>,
    spare: Vec<Buffer>,
}

impl<'a, S: Storage> VmStateReader<'a, S> {
    /// A reader of the machine's state, for a disk that was opened on a snapshot.
    ///
    /// # Errors
    /// `InvalidInput` for a snapshot without a state or a disk that was not opened on one;
    /// `Corrupt` if the snapshot's tables are too short for the state.
    pub fn new(disk: &'a Disk<S>) -> Result<Self> {
        let states = disk.format().vm_states()?;
        let state = states.location()?;
        if state.is_empty() {
            let what = "the snapshot has no machine's state: it is one of the disk alone";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(disk.name()));
        }
        Ok(Self {
            disk,
            chunk_size: MIN_WINDOW.max(states.cluster_size()),
            start: state.offset(),
            size: state.length(),
            requested: 0,
            read_ahead: FuturesOrdered::new(),
            spare: Vec::new(),
        })
    }

    /// Bytes of the whole state.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The next bytes of the state, which fill the returned buffer; `None` at the end.
    ///
    /// # Errors
    /// Errors of a read of the disk.
    pub async fn next(&mut self) -> Result<Option<Buffer>> {
        while self.read_ahead.len() < MAX_WRITES && self.requested < self.size {
            let length = self.chunk_size.min(self.size - self.requested);
            let range = ByteRange::between(
                self.start + self.requested,
                self.start + self.requested + length,
            );
            let buffer = self.spare.pop().unwrap_or_else(|| Buffer::new(self.chunk_size as usize));
            self.read_ahead.push_back(rare(read_chunk(self.disk, range, buffer)));
            self.requested += length;
        }
        self.read_ahead.next().await.transpose()
    }

    /// Takes a used buffer back.
    pub fn recycle(&mut self, buffer: Buffer) {
        if self.spare.len() < MAX_WRITES {
            self.spare.push(buffer);
        }
    }
}

async fn read_chunk<S: Storage>(
    disk: &Disk<S>,
    range: ByteRange,
    mut buffer: Buffer,
) -> Result<Buffer> {
    // Whole clusters are aligned for every storage.
    let whole = range.align_outward(disk.image().cluster_size().unwrap_or(1));
    buffer.set_len(whole.length() as usize);
    disk.image().layer().read_aligned(whole, buffer.lend(), Reader::Read).await?;
    buffer.set_len(range.length() as usize);
    Ok(buffer)
}
