//! The one interface between the I/O path and whatever holds the bytes.
//!
//! A host file, a block device and the simulator's disk are all a [`Storage`]; formats and the I/O
//! path are generic over it, so that the simulator stands where the disk does. Only what a storage
//! may go without has a default body: each implementation says what it does for every guarantee.

use std::future::{Future, ready};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::{ByteRange, Durability, Error, ErrorKind, Fua, IoVector, Result, SyncMode, Unmap};

/// A flat range of bytes that can be read, written and made durable.
///
/// A future that is dropped before it is ready leaves its operation to complete by itself: the
/// operation owns its [`IoVector`] until then, and whether a dropped write happened is unknown.
/// When a future is ready, the vector has been dropped: the lender can use its buffer again.
///
/// The outcome of a dropped flush or durable write is not lost, because the host reports each
/// failure once: the next flush first waits until such operations have ended, and if one of them
/// failed it fails with that error.
///
/// The order of operations in flight at the same time is not defined. A caller that needs an order
/// waits for the first before it starts the second.
///
/// Ranges are aligned as [`Capabilities::alignment`] says. One more is always welcome: the last
/// partial block, where the size is no multiple of the offset alignment. It starts at the last
/// multiple below the size and ends exactly at the size, or at the next multiple of 512.
pub trait Storage: 'static {
    /// How people call it: a path, mostly. For messages.
    fn name(&self) -> &str;

    /// The storage's abilities, and its cheapest ways, for the thread that asks and carries the
    /// request out: others may have another way to it. Cheap, and asked anew for each request:
    /// a thread's answer may get worse at run time (a kernel that refuses a flag), never
    /// better.
    fn capabilities(&self) -> Capabilities;

    /// The size in bytes.
    fn size(&self) -> u64;

    /// Fills `into` with the bytes from `offset` on. Bytes past the end of a file read as zeros.
    fn read(&self, offset: u64, into: IoVector) -> impl Future<Output = Result<()>>;

    /// Stores all bytes of `from` from `offset` on (never fewer: short writes are continued), as
    /// durable as asked. Fails with [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace) when there
    /// was no room for all bytes. What is written past the end makes the storage longer. A write
    /// that fails may have stored any part of the bytes, and [`size`](Self::size) says how long
    /// that has made the storage.
    ///
    /// A durable write is a write and a flush in one, so its failure may be the only report of an
    /// earlier write that was lost, whatever its errno. Where the storage knows that it is not, it
    /// says so by [`Error::confined`](crate::Error::confined).
    ///
    /// No storage emulates it. What a single request cannot make durable fails with
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported), and the caller writes and
    /// flushes: [`Durability::Full`], [`Durability::Data`] where [`Capabilities::fua`] is not
    /// native, and the last partial block. So does a write that the host refuses although FUA was
    /// said to be native; nothing but a part of its own bytes was written then.
    fn write(
        &self,
        offset: u64,
        from: IoVector,
        durability: Durability,
    ) -> impl Future<Output = Result<()>>;

    /// Makes the range read as zeros without sending zeros, or fails with
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) and nothing changed. Not durable
    /// before the next flush, as little as a discard or a resize.
    fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> impl Future<Output = Result<()>>;

    /// Fills the range with zeros that are *written*, without sending them: once a full flush that
    /// began after the return has ended, a durable write to the range costs what an overwrite
    /// costs, and nothing of the host's metadata. What lies past the end makes the storage
    /// longer. Not durable before that flush: after a crash a sector may hold what it held
    /// before, or zeros; past the end as it was, anything. `held` has no bytes; the operation owns
    /// it until it ends, and with it its guards.
    ///
    /// Fails with [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) and nothing changed
    /// where zeros have to be sent for that, and with
    /// [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace) where there is no room, with a part of
    /// the range filled at most.
    fn prepare_zeroes(
        &self,
        _range: ByteRange,
        _held: IoVector,
    ) -> impl Future<Output = Result<()>> {
        let what = "writing zeros without sending them is not supported here";
        ready(Err(Error::new(ErrorKind::Unsupported, what).on(self.name())))
    }

    /// How many bytes the host could still give to the storage, which others may take first; `None`
    /// where that is not known, or where the storage has all its space.
    ///
    /// # Errors
    /// The host's.
    fn free_space(&self) -> impl Future<Output = Result<Option<u64>>> {
        ready(Ok(None))
    }

    /// Gives the space of the range back; [`Capabilities::read_after_discard`] says what it reads
    /// as afterwards. Fails with [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) and
    /// nothing changed where the storage cannot.
    fn discard(&self, range: ByteRange) -> impl Future<Output = Result<()>>;

    /// Makes every write that completed before the call durable. Always does the work: whether
    /// there is anything to flush, and what a failure means for later flushes, is decided above.
    fn flush(&self, sync: SyncMode) -> impl Future<Output = Result<()>>;

    /// Changes the size. New bytes read as zeros. Not durable before the next full flush.
    fn resize(&self, size: u64) -> impl Future<Output = Result<()>>;

    /// Fails with [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace) where it is known that the
    /// storage cannot become `size` bytes long, whatever room there is. Changes nothing.
    fn check_size(&self, _size: u64) -> Result<()> {
        Ok(())
    }

    /// Makes the storage at least `size` bytes long if it can do that by itself, so that writes do
    /// not lengthen it one by one. New bytes read as zeros; what is there stays, whatever
    /// happens at the same time. It is a hint: a storage that cannot leaves its length alone.
    fn extend_hint(&self, _size: u64) -> impl Future<Output = ()> {
        ready(())
    }

    /// Whether bytes read as zeros that the storage gets when it becomes longer, by a write, a
    /// resize or another program. Not those of a block device: what its volume manager gives it
    /// may hold anything.
    fn grows_with_zeros(&self) -> bool {
        true
    }

    /// The status of the start of `range`, and for how many bytes it holds (at least one, at most
    /// the length of the range, which must not be empty).
    fn block_status(&self, range: ByteRange) -> impl Future<Output = Result<(Allocation, u64)>>;

    /// Starts to bring the range into the cache, if there is one. Without a cache it does nothing.
    fn prefetch(&self, range: ByteRange) -> impl Future<Output = Result<()>>;

    /// The file that has the bytes of the range at the same offsets, if all of them are in the
    /// host's page cache. Does not wait.
    fn cached_file(&self, _range: ByteRange) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When the storage was changed for the last time, by whatever program, since the Unix epoch:
    /// by a clock that no program can set for it. No change that begins after the return has
    /// this time. `None` where nothing tells. Of a block device it is no time, but says how
    /// much was written to it.
    ///
    /// # Errors
    /// The host's.
    fn last_change(&self) -> impl Future<Output = Result<Option<Duration>>> {
        ready(Ok(None))
    }

    /// Whether [`close`](Self::close) gives something back, so that operations fail afterwards. A
    /// storage with a `close` of its own says so here: otherwise it is closed while operations
    /// are in flight.
    fn needs_close(&self) -> bool {
        false
    }

    /// Requests from now on are made to close it: a storage of another host, which may never
    /// answer, limits how long that waits.
    fn begin_close(&self) {}

    /// Gives back what the storage holds on another host, such as a lock. Operations that begin
    /// later may fail. A storage that is dropped without it gives that back as well, but may
    /// block its thread until then. What is only of this process goes with the drop.
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
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where it takes none.
    fn list_snapshots(&self) -> impl Future<Output = Result<Vec<StorageSnapshot>>> {
        ready(Err(without_snapshots(self.name())))
    }

    /// The parts of `range` that were written, or given back, since the storage took a snapshot, in
    /// order; none of them touches the next. A part may have the bytes that it had. What is
    /// past the end is no change.
    ///
    /// # Errors
    /// As [`change_snapshots`](Self::change_snapshots); `InvalidInput` also where the snapshot is
    /// younger than what the storage was opened on.
    fn changes_since(
        &self,
        _snapshot: &str,
        _range: ByteRange,
    ) -> impl Future<Output = Result<Vec<StorageChange>>> {
        ready(Err(without_snapshots(self.name())))
    }

    /// Takes, deletes, renames or applies a snapshot; durable when it returns. The caller keeps
    /// other changes away.
    ///
    /// # Errors
    /// As [`list_snapshots`](Self::list_snapshots);
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) where there is no such
    /// snapshot, or the name of a new one is taken or cannot be used.
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
    /// Takes one of this name.
    Create(&'a str),
    /// Deletes this one.
    Delete(&'a str),
    /// Gives one another name.
    Rename {
        /// Its name so far.
        from: &'a str,
        /// Its name from now on.
        to: &'a str,
    },
    /// Makes the storage what it was when this one was taken, its size included.
    Apply(&'a str),
}

/// A part of a storage that has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageChange {
    /// Where.
    pub range: ByteRange,
    /// The present allocation.
    pub allocation: Allocation,
}

/// A snapshot that a storage has taken of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageSnapshot {
    /// Unique in the storage.
    pub id: u64,
    /// Unique in the storage, too.
    pub name: String,
    /// When it was taken, since 1970-01-01 UTC.
    pub created: Duration,
    /// Bytes of the storage when it was taken.
    pub size: u64,
}

/// The abilities of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// How single writes are made durable.
    pub fua: Fua,
    /// The cost of a write with native FUA at the disk below.
    pub fua_cost: FuaCost,
    /// Whether completed writes may sit in a volatile cache.
    pub write_cache: WriteCache,
    /// When durable writes in flight together are cheaper as plain writes with one flush for all.
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
    /// Zeros; after a crash, each of its sectors as zeros or as it was.
    Zeros,
    /// Undefined, also what another range held.
    Undefined,
}

/// Whether the storage has an operation of its own for something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// Yes, as far as is known: it may still refuse at the first try, and is `Unavailable` then.
    Available,
    /// No.
    Unavailable,
}

/// The cost of a durable write at the disk, where FUA is native.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FuaCost {
    /// One request: the disk has FUA, or no cache that could lose it.
    NoFlush,
    /// A flush besides: writes in flight together may share one, several in a row have one each.
    ExtraFlush,
}

/// From how many durable writes in flight on a shared flush is cheaper than FUA on each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupCommit {
    /// It never is: each carries its durability as cheaply as can be.
    Never,
    /// From this many on.
    From(usize),
}

/// Whether completed writes may be lost when the power fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCache {
    /// They may, until a flush.
    Volatile,
    /// They are stable when they complete.
    None,
}

/// The demands of direct I/O. Both are powers of two, 1 for "nothing".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of offsets and lengths, in bytes.
    pub offset: u32,
    /// Of memory addresses, in bytes.
    pub memory: u32,
}

impl Alignment {
    /// No demand.
    pub const BYTE: Self = Self { offset: 1, memory: 1 };

    /// Whether an operation can go down as it is.
    pub fn admits(self, offset: u64, vector: &IoVector) -> bool {
        let length = vector.len() as u64;
        (offset | length) & (u64::from(self.offset) - 1) == 0
            && vector.is_aligned(self.memory as usize, self.offset as usize)
    }
}

/// The space behind a range of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Space is allocated and holds data.
    Data,
    /// No space is allocated; reads as zeros.
    Hole,
}
