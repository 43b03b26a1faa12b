//! What the I/O path may ask of an image format.
//!
//! Writing goes in three steps, so that no crash shows a mapping without its data: `map` prepares
//! an extent, the path moves the data, `commit` makes the extent visible (or `abort` gives it back).
//! A format relies on its caller for order: two writes of the same guest bytes may be in flight
//! together only where they need no space of their own.

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Extent, IoVector, Result, Storage, SyncMode, Unmap,
};

use crate::qcow2::{Arriving, Backing, Hold};
use crate::{Qcow2, Raw};

/// An image format over the storage that holds the image. Closed: the path has one arm for each
/// state of an extent, not one for each format.
pub enum Format<S: Storage> {
    /// The image is the disk, byte for byte.
    Raw(Raw<S>),
    /// Tables say where the guest's clusters are.
    Qcow2(Box<Qcow2<S>>),
}

/// What the caller of [`Format::map`] is going to do with the extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Read it. Nothing is allocated.
    Read,
    /// Overwrite all of it. The answer is always `Mapped`; the space may be `NEW`.
    Write,
    /// Make all of it read as zeros: `Mapped` where zeros have to be written, else a state that
    /// reads as zeros once it is committed. The space is kept where it must not be given back.
    Zero(Unmap),
    /// Give its space back: `Mapped` where the storage has to be told, else a state that takes
    /// effect when it is committed.
    Discard,
}

/// Why an extent will not be committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// No operation on its place is in flight (it failed or never started): new space can be used
    /// again at once.
    Ended,
    /// The request was dropped while the storage was at work: it may still write to the place, so
    /// new space must not be used for anything else while the image is open. A leak at most.
    InFlight,
}

/// The cheapest way for a durable write that waits for the format's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// Each write durable by itself, the data's first: [`Format::persist`] then takes no flush.
    ByFua,
    /// Plain writes and [`Format::flush`]: a flush is due anyway, or is shared by many.
    ByFlush,
}

impl<S: Storage> Format<S> {
    /// The format's name, as on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Raw(_) => "raw",
            Self::Qcow2(_) => "qcow2",
        }
    }

    /// The size of the guest's disk in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.size(),
            Self::Qcow2(qcow2) => qcow2.size(),
        }
    }

    /// Where the last byte that has a place ends: at least [`size`](Self::size), and beyond it
    /// where the format allocates in larger units. Block-aligned operations stop here.
    pub fn end(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.size(),
            Self::Qcow2(qcow2) => qcow2.end(),
        }
    }

    /// The image itself.
    pub fn storage(&self) -> &S {
        match self {
            Self::Raw(raw) => raw.storage(),
            Self::Qcow2(qcow2) => qcow2.storage(),
        }
    }

    /// Where the host offsets of extents point to: the image, or its data file.
    pub fn data(&self) -> &S {
        match self {
            Self::Raw(raw) => raw.storage(),
            Self::Qcow2(qcow2) => qcow2.data(),
        }
    }

    /// Whether each part of the disk has its place there from the first, so that what others write there
    /// is read here.
    pub fn is_all_placed(&self) -> bool {
        match self {
            Self::Raw(_) => true,
            Self::Qcow2(qcow2) => qcow2.is_raw_disk(),
        }
    }

    /// Memory that a write takes more from than the guest gave, for an extent whose `whole` is more than
    /// its own bytes: the format knows when the write has ended, also when nobody waits for it.
    #[must_use]
    pub fn filling(&self, from: IoVector) -> IoVector {
        match self {
            Self::Raw(_) => from,
            Self::Qcow2(qcow2) => qcow2.filling(from),
        }
    }

    /// The place of the first bytes of `range`: an extent that starts where `range` does, is not
    /// empty and does not reach beyond it. Its host offset is as well aligned as its guest offset,
    /// up to the storage's alignment.
    ///
    /// `range` must not be empty, must lie before [`end`](Self::end), and for all intents but
    /// `Read` must be aligned as the storage demands (or stop at the end). Every extent of those
    /// intents is handed back by exactly one of [`commit`](Self::commit) and
    /// [`abort`](Self::abort).
    pub async fn map(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        match self {
            Self::Raw(raw) => Ok(raw.map(range, intent)),
            Self::Qcow2(qcow2) => qcow2.map(range, intent).await,
        }
    }

    /// A place for the compressed form of one guest cluster, `length` bytes: an extent that is `NEW`
    /// and `Compressed`, whose length may be more than was asked for (the rest is padding of any
    /// content). It starts and ends as the storage's alignment demands.
    ///
    /// `guest` is the whole cluster, or ends with the disk; `length`, rounded up to the storage's
    /// alignment, is less than a cluster. Handed back by exactly one of [`commit`](Self::commit) and
    /// [`abort`](Self::abort), as those of [`map`](Self::map).
    ///
    /// # Errors
    /// `Unsupported` where the format has no compressed clusters; or what [`map`](Self::map) answers
    /// a write.
    pub async fn map_compressed(&self, guest: ByteRange, length: u64) -> Result<Extent> {
        match self {
            Self::Raw(raw) => {
                let what = "raw images have no compressed clusters";
                Err(Error::new(ErrorKind::Unsupported, what).on(raw.storage().name()))
            }
            Self::Qcow2(qcow2) => qcow2.map_compressed(guest, length).await,
        }
    }

    /// Whoever maps for reading takes this before and drops it when the data is read: until then the
    /// places of the answer are not given to anybody else, whatever is written, discarded and flushed
    /// meanwhile. Must not be held while waiting for anything but reads. `None` where places never
    /// change their owner.
    pub fn hold(&self) -> Option<Hold> {
        match self {
            Self::Raw(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.hold()),
        }
    }

    /// Whoever writes data plainly, for which tables have to be made durable right behind it, takes this
    /// before and drops it when the data is there, whether it could be written or not: a
    /// [`flush`](Self::flush) or [`persist_together`](Self::persist_together) that has to write tables
    /// first waits for it, and serves both. So it must be polled to its end or dropped, must not wait for
    /// anything but the storage meanwhile, and is meant for data that does not take long. `None` where
    /// no tables are.
    pub fn arriving(&self) -> Option<Arriving> {
        match self {
            Self::Raw(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.arriving()),
        }
    }

    /// The data of `extent` arrived in the storage, `data` durable: makes the extent visible.
    /// Durable with the next [`flush`](Self::flush). Where no data was moved, it is durable.
    pub async fn commit(&self, extent: Extent, data: Durability) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.commit(extent),
            Self::Qcow2(qcow2) => qcow2.commit(extent, data).await,
        }
    }

    /// The data of `extent` did not arrive. Never waits, so that it can be called from a drop.
    pub fn abort(&self, extent: Extent, why: Abort) {
        match self {
            Self::Raw(raw) => raw.abort(extent, why),
            Self::Qcow2(qcow2) => qcow2.abort(extent, why),
        }
    }

    /// Makes everything committed so far durable: first the data, then the format's own tables. Waits
    /// for data that is [`arriving`](Self::arriving).
    pub async fn flush(&self, sync: SyncMode) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.flush(sync).await,
            Self::Qcow2(qcow2) => qcow2.flush(sync).await,
        }
    }

    /// Makes the mappings committed so far durable, with the data behind them. Unlike
    /// [`flush`](Self::flush) it need not make any other data durable: enough for a write whose
    /// extents are all new, or were written durably.
    pub async fn persist(&self) -> Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.persist().await,
        }
    }

    /// As [`persist`](Self::persist), for extents whose data was written plainly: those that are
    /// [`arriving`](Self::arriving) are waited for, and served with the same tables and flushes.
    pub async fn persist_together(&self) -> Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.persist_together().await,
        }
    }

    /// How the extents that are prepared now would become durable with the fewest operations. Only
    /// advice: both ways are always right.
    pub fn persistence(&self) -> Persistence {
        match self {
            Self::Raw(_) => Persistence::ByFlush,
            Self::Qcow2(qcow2) => qcow2.persistence(),
        }
    }

    /// Makes [`map`](Self::map) for a change answer up to `size`, which may lie beyond the end, so that
    /// what [`resize`](Self::resize) would bring to light can be made zeros before. The size stays.
    pub async fn reserve(&self, size: u64) -> Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.reserve(size).await,
        }
    }

    /// Makes the guest's disk longer. New bytes read as zeros, but those of the last cluster and of a
    /// backing file. Durable with the next full flush. Refuses a size that is no multiple of 512. The
    /// caller keeps requests away from the bytes between the old size and the new one.
    pub async fn resize(&self, size: u64) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.resize(size).await,
            Self::Qcow2(qcow2) => qcow2.resize(size).await,
        }
    }

    /// Makes the guest's disk shorter; what lies beyond is lost, and its space given back. Durable with
    /// the next full flush; a crash before leaves the old size with zeros, or what is in the backing
    /// file, here and there beyond the new one. Refuses a size that is no multiple of 512, and images
    /// of version 2 with snapshots. The caller keeps requests away from the bytes from the new size on.
    pub async fn shrink(&self, size: u64) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.resize(size).await,
            Self::Qcow2(qcow2) => qcow2.shrink(size).await,
        }
    }

    /// Gives everything back that the image has itself, so that all reads as the backing file (or zeros,
    /// where there is none). Durable when it returns; a crash before leaves some of it. No request may be
    /// in flight.
    ///
    /// # Errors
    /// `Unsupported` where the format has nothing behind it; or what the storage answers.
    pub async fn empty(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => Err(raw.has_no_backing()),
            Self::Qcow2(qcow2) => qcow2.empty().await,
        }
    }

    /// Gives the image another backing file, or none: see [`Qcow2::set_backing`].
    ///
    /// # Errors
    /// As there; `Unsupported` where the format has no backing files.
    pub async fn set_backing(&self, backing: Option<Backing>) -> Result<()> {
        match self {
            Self::Raw(raw) => Err(raw.has_no_backing()),
            Self::Qcow2(qcow2) => qcow2.set_backing(backing).await,
        }
    }

    /// Brings everything to a durable end. Nothing may be in flight, and nothing be changed after.
    pub async fn close(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.flush(SyncMode::Data).await,
            Self::Qcow2(qcow2) => qcow2.close().await,
        }
    }
}
