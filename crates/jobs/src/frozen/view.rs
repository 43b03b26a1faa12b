//! Reading a disk as it was.

use blockhouse_core::{
    Allocation, Buffer, ByteRange, Error, ErrorKind, IoVector, Request, Result, Storage,
};
use blockhouse_disk::{BlockStatus, BlockStatusCache};
use blockhouse_storage::StorageView;
use futures_util::future::LocalBoxFuture;

use super::FrozenDisk;

/// Bytes that are read at a time.
const MAX_READ: u64 = 1 << 20;

impl<S: Storage> FrozenDisk<S> {
    /// Fills `into` with what the disk held from `offset` on. Bytes past its end are zeros.
    ///
    /// # Errors
    /// `Io` once the backup has failed; what the disk or the scratch disk answers.
    pub async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let inside = self.old.source().size().saturating_sub(offset).min(into.len() as u64);
        into.split_off(inside as usize).fill(0);
        let mut rest = ByteRange::between(offset, offset + inside);
        while !rest.is_empty() {
            let (part, is_saved) = self.first_part(rest.truncate(MAX_READ));
            let after = into.split_off(part.length() as usize);
            match is_saved {
                true => self.read_saved(part, into).await?,
                false => self.read_unsaved(part, into).await?,
            }
            into = after;
            rest = rest.skip(part.length());
        }
        Ok(())
    }

    /// The first bytes of a range whose granules are all saved, or all not.
    fn first_part(&self, range: ByteRange) -> (ByteRange, bool) {
        if !self.old.saved().is_dirty(range) {
            return (range, false);
        }
        match self.old.saved().next(range.offset(), MAX_READ) {
            Some(run) if run.offset() <= range.offset() => {
                (range.truncate(run.end() - range.offset()), true)
            }
            Some(run) => (range.truncate(run.offset() - range.offset()), false),
            None => (range, false),
        }
    }

    async fn read_saved(&self, range: ByteRange, into: IoVector) -> Result<()> {
        let offset = range.offset();
        self.old.scratch().submit(Request::Read { offset, into }).await?;
        self.check()
    }

    async fn read_unsaved(&self, range: ByteRange, mut into: IoVector) -> Result<()> {
        let offset = range.offset();
        let mut buffer = Buffer::try_new(range.length() as usize)?;
        let read = Request::Read { offset, into: buffer.lend() };
        self.old.source().submit_unlimited(read).await?;
        // In this order: a change that began while the disk was read had its old bytes saved before, or the backup failed.
        self.check()?;
        let mut rest = range;
        while let Some(run) = self.old.saved().next(rest.offset(), MAX_READ) {
            let start = run.offset().max(rest.offset());
            let end = run.end().min(range.end());
            if start >= end {
                break;
            }
            let into = buffer.lend_range((start - offset) as usize, (end - start) as usize);
            self.old.scratch().submit(Request::Read { offset: start, into }).await?;
            rest = ByteRange::between(end, range.end());
        }
        self.check()?;
        into.copy_from(buffer.bytes());
        Ok(())
    }

    /// What the disk held at the start of `range`, which is on it and not empty, and for how many bytes that holds.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        loop {
            let (part, is_saved) = self.first_part(range);
            let disk = match is_saved {
                true => self.old.scratch(),
                false => self.old.source(),
            };
            let (status, length) =
                disk.block_status(part, &mut BlockStatusCache::default()).await?;
            self.check()?;
            let told = part.truncate(length);
            // As in `read_unsaved`. What is saved stays saved, so this ends.
            let (unchanged, is_saved_now) = self.first_part(told);
            if is_saved_now != is_saved {
                continue;
            }
            let allocation = match status {
                BlockStatus::Data => Allocation::Data,
                BlockStatus::Hole | BlockStatus::Zero => Allocation::Hole,
            };
            return Ok((allocation, unchanged.length()));
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
        self.old.scratch().size()
    }

    fn read(&self, offset: u64, into: IoVector) -> LocalBoxFuture<'_, Result<()>> {
        Box::pin(FrozenDisk::read(self, offset, into))
    }

    fn block_status(&self, range: ByteRange) -> LocalBoxFuture<'_, Result<(Allocation, u64)>> {
        Box::pin(FrozenDisk::block_status(self, range))
    }
}
