//! The one interface between the I/O path and the storage of the bytes.
//!
//! A host file, a block device and the simulator's disk are all a [`Storage`]; formats and the I/O
//! path are generic over it, so that tests can put the simulator in the place of a disk. Only
//! optional operations have a default body: every implementation must state what it does for each
//! guarantee.

use std::future::{Future, ready};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::{ByteRange, Durability, Error, ErrorKind, Fua, IoVector, Result, SyncMode, Unmap};

/// A flat range of bytes that can be read, written and made durable.
///
/// The operation of a dropped future still runs to its end, and owns its [`IoVector`] until then.
/// The caller does not learn whether a dropped write has happened. When a future is ready, the
/// vector has been dropped: the lender can use its buffer again.
///
/// The outcome of a dropped flush or durable write is not lost. The next flush first waits until
/// such operations have ended, and fails with the error of one that failed. Reason: the host
/// reports each failure only once.
///
/// The order of operations in flight at the same time is not defined. A caller that needs an order
/// waits for the first before it starts the second.
///
/// Ranges are aligned as [`Capabilities::alignment`] says. One range need not be aligned: the last
/// partial block, if the size is not a multiple of the offset alignment. It starts at the last
/// multiple of the alignment below the size, and ends exactly at the size or at the next multiple
/// of 512.
pub trait Storage: 'static {
    /// The storage's name for messages, usually a path.
    fn name(&self) -> &str;

    /// The storage's abilities and its cheapest operations, for requests that the calling thread
    /// submits. Reason: another thread may reach the storage in another way. The call must be
    /// cheap, because callers make it for each request. A thread's answer may get worse at run time
    /// (the kernel refuses a flag), never better.
    fn capabilities(&self) -> Capabilities;

    /// The size in bytes.
    fn size(&self) -> u64;

    /// Fills `into` with the bytes from `offset` on. Bytes past the end of a file read as zeros.
    fn read(&self, offset: u64, into: IoVector) -> impl Future<Output = Result<()>>;

    /// Stores all bytes of `from` at `offset`, with the given durability. A short write is
    /// continued. Fails with [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace) when there was no
    /// space for all bytes. A write past the end makes the storage longer. A write that fails may
    /// have stored any part of the bytes; [`size`](Self::size) then returns the length that
    /// results.
    ///
    /// A durable write is a write and a flush in one. So its failure, with any errno, may be the
    /// only report that an earlier write was lost. If the storage knows that no other write was
    /// lost, it marks the error with [`Error::confined`](crate::Error::confined).
    ///
    /// No storage emulates a durable write. A write that a single request cannot make durable fails
    /// with [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported), and the caller then writes
    /// and flushes. This concerns [`Durability::Full`], [`Durability::Data`] if
    /// [`Capabilities::fua`] is not native, and the last partial block. A write that the host
    /// refuses although FUA was reported as native fails in the same way; a part of its own bytes
    /// may have been written, and nothing else.
    fn write(
        &self,
        offset: u64,
        from: IoVector,
        durability: Durability,
    ) -> impl Future<Output = Result<()>>;

    /// Makes the range read as zeros without sending zeros, or fails with
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) and changes nothing. Like a
    /// discard or a resize, it is not durable before the next flush.
    fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> impl Future<Output = Result<()>>;

    /// Fills the range with *written* zeros without sending them (no unwritten extents). After a
    /// full flush that began after the return, a durable write to the range is a plain overwrite:
    /// the host has no metadata to write for it. A range past the end makes the storage longer. Not
    /// durable before that flush: after a crash a sector may have its old content or zeros, and a
    /// sector past the old end may have any content. `held` has no bytes; the operation owns it,
    /// and so its guards, until the operation ends.
    ///
    /// Fails with [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported), and changes nothing,
    /// if the zeros would have to be sent. Fails with
    /// [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace) if there is no space; a part of the range
    /// may have been filled.
    fn prepare_zeroes(
        &self,
        _range: ByteRange,
        _held: IoVector,
    ) -> impl Future<Output = Result<()>> {
        let what = "writing zeros without sending them is not supported here";
        ready(Err(Error::new(ErrorKind::Unsupported, what).on(self.name())))
    }

    /// The bytes that the host can still allocate to the storage, unless other files take them
    /// first; `None` if that is unknown, or if all of the storage's space is allocated.
    ///
    /// # Errors
    /// The host's error.
    fn free_space(&self) -> impl Future<Output = Result<Option<u64>>> {
        ready(Ok(None))
    }

    /// Deallocates the space of the range; [`Capabilities::read_after_discard`] says what the range
    /// reads as afterwards. Fails with [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported),
    /// and changes nothing, if the storage cannot.
    fn discard(&self, range: ByteRange) -> impl Future<Output = Result<()>>;

    /// Makes every write that completed before the call durable. Always flushes: the caller decides
    /// whether there is anything to flush, and what a failure means for later flushes.
    fn flush(&self, sync: SyncMode) -> impl Future<Output = Result<()>>;

    /// Changes the size. New bytes read as zeros. Not durable before the next full flush.
    fn resize(&self, size: u64) -> impl Future<Output = Result<()>>;

    /// Fails if the storage is known to be unable to become `size` bytes long, however much space
    /// is free: with [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if it has another
    /// size that never changes, else with [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace).
    /// Changes nothing.
    fn check_size(&self, _size: u64) -> Result<()> {
        Ok(())
    }

    /// Makes the storage at least `size` bytes long if it can, so that not every write has to
    /// lengthen it. New bytes read as zeros. Existing bytes and concurrent writes are not changed.
    /// This is a hint: a storage that cannot become longer keeps its length.
    fn extend_hint(&self, _size: u64) -> impl Future<Output = ()> {
        ready(())
    }

    /// Whether new bytes read as zeros when the storage becomes longer, by a write, a resize or
    /// another program. `false` for a block device: the space that its volume manager adds may hold
    /// anything.
    fn grows_with_zeros(&self) -> bool {
        true
    }

    /// The allocation at the start of `range`, and the number of bytes that have this allocation:
    /// at least one, at most the length of the range. The range must not be empty.
    fn block_status(&self, range: ByteRange) -> impl Future<Output = Result<(Allocation, u64)>>;

    /// Starts to bring the range into the cache, if there is one. Without a cache it does nothing.
    fn prefetch(&self, range: ByteRange) -> impl Future<Output = Result<()>>;

    /// The file that has the bytes of the range at the same offsets, if all of them are in the
    /// host's page cache. Does not wait.
    fn cached_file(&self, _range: ByteRange) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether the storage moves data between a file and a request's memory without touching it, so
    /// that a request whose bytes are in the kernel's pages needs no copy
    /// ([`KernelPages`](crate::KernelPages)).
    fn takes_kernel_pages(&self) -> bool {
        false
    }

    /// The time since the Unix epoch at which any program last changed the storage: a time that
    /// programs cannot set (ctime, not mtime). A change that begins after the return gets a
    /// different value. `None` if unknown. For a block device the value is not a time but the
    /// amount written to it.
    ///
    /// # Errors
    /// The host's error.
    fn last_change(&self) -> impl Future<Output = Result<Option<Duration>>> {
        ready(Ok(None))
    }

    /// Whether [`close`](Self::close) releases something that operations need, so that they fail
    /// afterwards. A storage that implements `close` must return `true`; otherwise callers close
    /// the storage while operations are in flight.
    fn needs_close(&self) -> bool {
        false
    }

    /// Tells the storage that all further requests serve to close it. A storage on another host,
    /// which may never answer, then limits how long these requests wait.
    fn begin_close(&self) {}

    /// Releases what the storage holds on another host, such as a lock. Operations that begin later
    /// may fail. Dropping the storage without `close` releases it too, but may block the thread.
    /// Resources of this process are released by the drop.
    fn close(&self) -> impl Future<Output = Result<()>> {
        ready(Ok(()))
    }

    /// Whether the storage itself takes snapshots of its bytes.
    fn has_snapshots(&self) -> bool {
        false
    }

    /// The snapshots that the storage has taken of itself, in the order in which they were taken.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the storage takes none.
    fn list_snapshots(&self) -> impl Future<Output = Result<Vec<StorageSnapshot>>> {
        ready(Err(without_snapshots(self.name())))
    }

    /// The parts of `range` that were written or deallocated since the storage took a snapshot, in
    /// order of their offsets; no two of them are adjacent. A part's bytes may be the same as
    /// before. Bytes past the end are not reported.
    ///
    /// # Errors
    /// The errors of [`change_snapshots`](Self::change_snapshots); `InvalidInput` also if the
    /// storage was opened on a snapshot that is older than this one.
    fn changes_since(
        &self,
        _snapshot: &str,
        _range: ByteRange,
    ) -> impl Future<Output = Result<Vec<StorageChange>>> {
        ready(Err(without_snapshots(self.name())))
    }

    /// Takes, deletes, renames or applies a snapshot; durable when it returns. The caller ensures
    /// that no other change is in flight.
    ///
    /// # Errors
    /// The errors of [`list_snapshots`](Self::list_snapshots);
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if there is no such snapshot, or
    /// if the name of a new one exists already or is not allowed.
    fn change_snapshots(&self, _change: SnapshotChange<'_>) -> impl Future<Output = Result<()>> {
        ready(Err(without_snapshots(self.name())))
    }
}

fn without_snapshots(name: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "the storage takes no snapshots of itself").on(name)
}

/// A change of the snapshots that a storage takes of itself, by their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotChange<'a> {
    /// Takes a snapshot of this name.
    Create(&'a str),
    /// Deletes the snapshot of this name.
    Delete(&'a str),
    /// Renames a snapshot.
    Rename {
        /// The present name.
        from: &'a str,
        /// The new name.
        to: &'a str,
    },
    /// Restores the content and the size that the storage had when this snapshot was taken.
    Apply(&'a str),
}

/// A part of a storage that has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageChange {
    /// The changed range.
    pub range: ByteRange,
    /// The present allocation.
    pub allocation: Allocation,
}

/// A snapshot that a storage has taken of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageSnapshot {
    /// The id, unique in the storage.
    pub id: u64,
    /// The name, also unique in the storage.
    pub name: String,
    /// The time at which the snapshot was taken, since 1970-01-01 UTC.
    pub created: Duration,
    /// Bytes of the storage when the snapshot was taken.
    pub size: u64,
}

/// The abilities of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// How single writes are made durable.
    pub fua: Fua,
    /// The cost of a write with native FUA at the physical disk.
    pub fua_cost: FuaCost,
    /// Whether completed writes may sit in a volatile cache.
    pub write_cache: WriteCache,
    /// Whether plain writes and one flush are cheaper than FUA on each of several durable writes.
    pub group_commit: GroupCommit,
    /// The unit of which offsets, lengths and memory addresses must be multiples. This never
    /// changes while the storage is open.
    pub alignment: Alignment,
    /// Whether a range can be made to read as zeros without sending them.
    pub write_zeroes: Offload,
    /// Whether zeros can be written without sending them, so that durable writes to them are
    /// overwrites.
    pub prepare_zeroes: Offload,
    /// Whether space can be given back.
    pub discard: Offload,
    /// The content of a range whose space was given back.
    pub read_after_discard: ReadAfterDiscard,
}

/// The content of a discarded range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadAfterDiscard {
    /// Zeros. After a crash, each sector of the range has zeros or its old content.
    Zeros,
    /// Undefined: the range may even read as the old content of another range.
    Undefined,
}

/// Whether the storage has its own operation for a purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// The storage has the operation, as far as is known. The first use may still fail; after that
    /// the answer is `Unavailable`.
    Available,
    /// The storage does not have the operation.
    Unavailable,
}

/// The cost of a durable write at the disk, where FUA is native.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FuaCost {
    /// One request: the disk has FUA, or no volatile cache.
    NoFlush,
    /// An extra flush. Concurrent writes may share a flush; consecutive writes need one each.
    ExtraFlush,
}

/// Whether one shared flush is cheaper than FUA on each of several durable writes in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupCommit {
    /// A shared flush is never cheaper.
    Never,
    /// A shared flush may be cheaper, which only a measurement shows. Until then writes share one
    /// if `shares_first`.
    Measured {
        /// Whether a shared flush is more likely to be cheaper.
        shares_first: bool,
    },
    /// A shared flush counts as cheaper from this many durable writes on. For simulated storages,
    /// whose runs must be repeatable.
    From(usize),
}

/// Whether completed writes may be lost when the power fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCache {
    /// Completed writes may be lost until a flush.
    Volatile,
    /// Writes are stable when they complete.
    None,
}

/// The alignment that direct I/O requires. Both values are powers of two; 1 means no requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// The alignment of offsets and lengths, in bytes.
    pub offset: u32,
    /// The alignment of memory addresses, in bytes.
    pub memory: u32,
}

impl Alignment {
    /// An alignment without requirements.
    pub const BYTE: Self = Self { offset: 1, memory: 1 };

    /// Whether an operation can be submitted without a bounce buffer.
    pub fn admits(self, offset: u64, vector: &IoVector) -> bool {
        let length = vector.len() as u64;
        (offset | length) & (u64::from(self.offset) - 1) == 0
            && vector.is_aligned(self.memory as usize, self.offset as usize)
    }
}

/// The allocation of a range of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Space is allocated and holds data.
    Data,
    /// No space is allocated; reads as zeros.
    Hole,
}
