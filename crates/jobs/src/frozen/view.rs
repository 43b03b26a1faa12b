//! Reads of a frozen disk.

use blockhouse_core::{
    Allocation, Buffer, ByteRange, Error, ErrorKind, IoVector, Request, Result, Storage, rare,
};
use blockhouse_disk::{BlockStatus, BlockStatusCache};
use blockhouse_storage::StorageView;
use futures_util::future::LocalBoxFuture;
use futures_util::{StreamExt, TryStreamExt, stream};

use super::FrozenDisk;
use super::region::Place;

/// Maximum bytes of one read.
const MAX_READ: u64 = 1 << 20;
/// Maximum reads in flight. Data that was saved in many steps is in many locations.
const MAX_READS: usize = 16;

impl<S: Storage> FrozenDisk<S> {
    /// Fills `into` with the disk's bytes at the freeze, from `offset` on. Bytes past the end are
    /// zeros.
    ///
    /// # Errors
    /// `Io` once the backup has failed; errors of the disk or the scratch disk.
    pub async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let inside = self.old.size().saturating_sub(offset).min(into.len() as u64);
        into.split_off(inside as usize).fill(0);
        let parts = self.parts(ByteRange::between(offset, offset + inside));
        let reads = stream::iter(parts.map(|(part, place)| {
            let after = into.split_off(part.length() as usize);
            let into = std::mem::replace(&mut into, after);
            self.read_part(part, place, into)
        }));
        reads.buffer_unordered(MAX_READS).try_collect().await
    }

    /// The parts of a range, each with its one location.
    fn parts(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, Place)> + '_ {
        let mut rest = range;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (place, length) = self.old.index().lookup(rest.truncate(MAX_READ));
            let part = rest.truncate(length);
            rest = rest.skip(length);
            Some((part, place))
        })
    }

    async fn read_part(&self, part: ByteRange, place: Place, mut into: IoVector) -> Result<()> {
        match place {
            Place::Zeros => into.fill(0),
            Place::Log(at) => self.read_log(at, into).await?,
            Place::Source => self.read_source(part, into).await?,
        }
        self.check()
    }

    async fn read_log(&self, at: u64, into: IoVector) -> Result<()> {
        let outcome = self.old.log().read(at, into).await;
        // If the backup has failed, its reason says more than the error of the log.
        self.check().and(outcome)
    }

    async fn read_source(&self, range: ByteRange, mut into: IoVector) -> Result<()> {
        let offset = range.offset();
        let mut buffer = Buffer::try_new(range.length() as usize)?;
        let read = Request::Read { offset, into: buffer.lend() };
        self.old.source().submit_unlimited(read).await?;
        // The check follows the read: if a change began during the read, its old bytes were saved
        // before, or the backup failed.
        self.check()?;
        for (part, place) in self.parts(range) {
            let mut into =
                buffer.lend_range((part.offset() - offset) as usize, part.length() as usize);
            match place {
                Place::Source => {}
                Place::Zeros => into.fill(0),
                Place::Log(at) => self.read_log(at, into).await?,
            }
        }
        into.copy_from(buffer.bytes());
        Ok(())
    }

    /// The disk's status at the freeze at the start of `range`, and the number of bytes with that
    /// status. `range` is on the disk and not empty.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        loop {
            let (place, length) = self.old.index().lookup(range);
            let told = match place {
                Place::Zeros => (Allocation::Hole, length),
                Place::Log(_) => (Allocation::Data, length),
                Place::Source => {
                    let mut cache = BlockStatusCache::default();
                    let part = range.truncate(length);
                    let (status, length) = self.old.source().block_status(part, &mut cache).await?;
                    // As in `read_source`, a change may have begun meanwhile. Saved blocks stay
                    // saved, so the loop ends.
                    let (place, unchanged) = self.old.index().lookup(part.truncate(length));
                    if place != Place::Source {
                        continue;
                    }
                    match status {
                        BlockStatus::Data => (Allocation::Data, unchanged),
                        BlockStatus::Hole | BlockStatus::Zero => (Allocation::Hole, unchanged),
                    }
                }
            };
            self.check()?;
            return Ok(told);
        }
    }

    fn check(&self) -> Result<()> {
        match self.failure() {
            None => Ok(()),
            Some(why) => {
                let what = format!("the backup has failed: {why}");
                Err(Error::new(ErrorKind::Io, what).on(self.old.source().name()))
            }
        }
    }
}

impl<S: Storage + Send + Sync> StorageView for FrozenDisk<S> {
    fn name(&self) -> &str {
        self.old.source().name()
    }

    fn size(&self) -> u64 {
        self.old.size()
    }

    fn read(&self, offset: u64, into: IoVector) -> LocalBoxFuture<'_, Result<()>> {
        rare(FrozenDisk::read(self, offset, into))
    }

    fn block_status(&self, range: ByteRange) -> LocalBoxFuture<'_, Result<(Allocation, u64)>> {
        rare(FrozenDisk::block_status(self, range))
    }
}
