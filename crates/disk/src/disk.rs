//! The disk as exports see it, and the one choke point of all requests.

use blockhouse_core::{
    Alignment, ByteRange, Capabilities, Durability, Error, ErrorKind, Offload, Request, Result,
    Storage, Sync, WriteCache,
};
use blockhouse_format::{BlockStatus, Format, Raw};

/// Whether a disk may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only; everything else is refused with EPERM.
    ReadOnly,
    /// Reads and writes.
    ReadWrite,
}

/// What becomes of a guest's discards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// The host gets the space back.
    Unmap,
    /// They are acknowledged and nothing happens, and zero writes keep their space.
    Ignore,
}

/// What becomes of flushes and durable writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushPolicy {
    /// They are kept.
    Obey,
    /// They are acknowledged and nothing is flushed: a crash of the host loses data. For disks that
    /// nobody needs afterwards (`--cache unsafe`).
    Ignore,
}

/// How a disk is opened.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether it may be changed.
    pub access: Access,
    /// The least durability of each write; `Data` is what cache modes call writethrough.
    pub durability: Durability,
    /// Whether flushes are kept.
    pub flush: FlushPolicy,
    /// Whether discards are passed on.
    pub discard: Discard,
}

impl Default for Options {
    /// Read and write, a volatile write cache, flushes kept, discards passed on.
    fn default() -> Self {
        Self {
            access: Access::ReadWrite,
            durability: Durability::None,
            flush: FlushPolicy::Obey,
            discard: Discard::Unmap,
        }
    }
}

/// A guest's disk. Shared by reference among all exports and threads.
pub struct Disk<S: Storage> {
    format: Format<S>,
    options: Options,
}

impl<S: Storage> Disk<S> {
    /// A disk over a raw image.
    ///
    /// # Errors
    /// `InvalidInput` when the size is no multiple of 512.
    pub fn raw(storage: S, options: Options) -> Result<Self> {
        Ok(Self { format: Format::Raw(Raw::open(storage)?), options })
    }

    /// How people call it: the path of the image, mostly.
    pub fn name(&self) -> &str {
        self.format.storage().name()
    }

    /// The size in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        self.format.size()
    }

    /// Whether it may be changed.
    pub fn access(&self) -> Access {
        self.options.access
    }

    /// What requests should be aligned to in order to go down as they are. Others are served too.
    pub fn alignment(&self) -> Alignment {
        self.format.storage().capabilities().alignment
    }

    /// What an export may advertise: the storage's capabilities as changed by the options.
    pub fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.format.storage().capabilities();
        if self.options.durability >= Durability::Data {
            capabilities.write_cache = WriteCache::None;
        }
        if self.options.discard == Discard::Ignore {
            capabilities.discard = Offload::Unavailable;
        }
        capabilities
    }

    /// Carries out one request.
    pub async fn submit(&self, request: Request) -> Result<()> {
        let storage = self.format.storage();
        match request {
            Request::Read { offset, into } => storage.read(offset, into).await,
            Request::Write { offset, from, durability } => {
                storage.write(offset, from, durability).await
            }
            Request::WriteZeroes { range, unmap, .. } => storage.write_zeroes(range, unmap).await,
            Request::Discard { range, .. } => storage.discard(range).await,
            Request::Flush => self.format.flush(Sync::Data).await,
            Request::Prefetch { range } => storage.prefetch(range).await,
        }
    }

    /// What stands behind the first bytes of `range`, and how many bytes that holds for (at least
    /// one, at most the length of `range`).
    ///
    /// # Errors
    /// `InvalidInput` when the range is empty or reaches past the end.
    pub async fn status(&self, range: ByteRange) -> Result<(BlockStatus, u64)> {
        if range.is_empty() || range.end() > self.size() {
            let what = format!("no block status for {} bytes", range.length());
            return Err(Error::new(ErrorKind::InvalidInput, what)
                .on(self.name())
                .at(range.offset()));
        }
        self.format.status(range).await
    }

    /// All writes completed so far become durable.
    pub async fn flush(&self) -> Result<()> {
        self.submit(Request::Flush).await
    }

    /// Makes the disk longer; new bytes read as zeros. Durable when it returns.
    pub async fn resize(&self, size: u64) -> Result<()> {
        self.format.resize(size).await?;
        self.format.flush(Sync::Full).await
    }

    /// Makes everything durable, before the disk is dropped.
    pub async fn close(&self) -> Result<()> {
        self.format.flush(Sync::Data).await
    }
}
