//! Raw images: the guest's disk is the storage, byte for byte.
//!
//! Every extent is `Mapped` at its own offset without flags. So a durable overwrite is one write,
//! and the host manages holes. A disk has whole sectors: if the storage ends inside a sector, the
//! rest of the sector reads as zeros, and a write to it extends the storage.

use blockhouse_core::{ByteRange, Error, ErrorKind, Extent, Result, Storage};

use super::extent_at_own_offset;
use crate::Intent;

/// The unit of disk sizes, in bytes.
const SECTOR: u64 = 512;

/// A raw image.
pub struct Raw<S: Storage> {
    storage: S,
    /// The storage's block size in bytes.
    block: u64,
}

impl<S: Storage> Raw<S> {
    /// Opens `storage` as a raw image. Reads nothing: [`probe`](crate::probe) checks whether the
    /// first bytes look like another format.
    ///
    /// # Errors
    /// `InvalidInput` if the size of the storage, rounded up to whole sectors, exceeds 64 bits.
    pub fn open(storage: S) -> Result<Self> {
        if storage.size().checked_next_multiple_of(SECTOR).is_none() {
            check_size(storage.size(), storage.name())?;
        }
        let block = u64::from(storage.capabilities().alignment.offset);
        Ok(Self { storage, block })
    }

    /// The size of the storage, rounded up to whole sectors.
    pub(crate) fn size(&self) -> u64 {
        self.storage.size().next_multiple_of(SECTOR)
    }

    /// The storage.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// One extent for all of `range`, except that a last partial block is an extent of its own: a
    /// storage accepts no other unaligned range. For zeroing and discards, the last block border
    /// before the end of the storage also ends an extent, because the storage can zero and discard
    /// only before its end.
    pub(crate) fn map(&self, range: ByteRange, intent: Intent) -> Extent {
        let end = match intent {
            Intent::Read | Intent::Write => self.size(),
            Intent::Zero(_) | Intent::Discard => self.storage.size(),
        };
        let blocks_end = end & !(self.block - 1);
        let guest = if range.offset() < blocks_end {
            range.truncate(blocks_end - range.offset())
        } else {
            range
        };
        extent_at_own_offset(guest)
    }

    pub(crate) async fn resize(&self, size: u64) -> Result<()> {
        check_size(size, self.storage.name())?;
        self.storage.resize(size).await
    }
}

fn check_size(size: u64, name: &str) -> Result<()> {
    if size.is_multiple_of(SECTOR) {
        return Ok(());
    }
    let what = format!("a raw image of {size} bytes is no multiple of {SECTOR}");
    let hint = match size.checked_next_multiple_of(SECTOR) {
        Some(next) => format!("the next size that is one has {next} bytes"),
        None => "choose a smaller size".to_owned(),
    };
    Err(Error::new(ErrorKind::InvalidInput, what).on(name).hint(hint))
}
