//! A machine's state out of a snapshot: read ahead in parallel, handed out in order.

use blockhouse_core::{Buffer, ByteRange, Error, ErrorKind, Result, Storage};
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{FuturesOrdered, StreamExt};

use super::{MAX_IN_FLIGHT, MIN_WINDOW};
use crate::Disk;

/// The state of the machine in the snapshot that a disk was opened on.
pub struct VmStateReader<'a, S: Storage> {
    disk: &'a Disk<S>,
    piece: u64,
    /// Where the state lies behind the disk.
    start: u64,
    size: u64,
    /// What has been asked for.
    asked: u64,
    coming: FuturesOrdered<LocalBoxFuture<'a, Result<Buffer>>>,
    spare: Vec<Buffer>,
}

impl<S: Storage> Disk<S> {
    /// The machine's state, of a disk that was opened on a snapshot.
    ///
    /// # Errors
    /// `InvalidInput` for a snapshot without a state or a disk that was not opened on one; `Corrupt` where the
    /// snapshot's tables are too short for it.
    pub fn load_vm_state(&self) -> Result<VmStateReader<'_, S>> {
        let snapshots = self.format.snapshots()?;
        let state = snapshots.vm_state()?;
        if state.is_empty() {
            let what = "the snapshot has no machine's state: it is one of the disk alone";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.name()));
        }
        Ok(VmStateReader {
            disk: self,
            piece: MIN_WINDOW.max(snapshots.cluster_size()),
            start: state.offset(),
            size: state.length(),
            asked: 0,
            coming: FuturesOrdered::new(),
            spare: Vec::new(),
        })
    }
}

impl<S: Storage> VmStateReader<'_, S> {
    /// Bytes of the whole state.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The next bytes of the state, as many as the buffer is long; `None` at the end.
    ///
    /// # Errors
    /// What reading answers.
    pub async fn next(&mut self) -> Result<Option<Buffer>> {
        while self.coming.len() < MAX_IN_FLIGHT && self.asked < self.size {
            let length = self.piece.min(self.size - self.asked);
            let range =
                ByteRange::between(self.start + self.asked, self.start + self.asked + length);
            let buffer = self.spare.pop().unwrap_or_else(|| Buffer::new(self.piece as usize));
            self.coming.push_back(Box::pin(read_piece(self.disk, range, buffer)));
            self.asked += length;
        }
        self.coming.next().await.transpose()
    }

    /// Takes a buffer back that was read through.
    pub fn recycle(&mut self, buffer: Buffer) {
        if self.spare.len() < MAX_IN_FLIGHT {
            self.spare.push(buffer);
        }
    }
}

async fn read_piece<S: Storage>(
    disk: &Disk<S>,
    range: ByteRange,
    mut buffer: Buffer,
) -> Result<Buffer> {
    // Whole clusters, which suit every storage.
    let whole = range.align_outward(disk.cluster_size().unwrap_or(1));
    buffer.set_len(whole.length() as usize);
    disk.read(whole, buffer.lend()).await?;
    buffer.set_len(range.length() as usize);
    Ok(buffer)
}
