//! An image in Ceph (RBD) as storage, by librbd.
//!
//! Guarantees:
//! - A write is on all replicas when it completes, because librbd's cache is off. So FUA has no
//!   additional cost, and a flush has nothing to do. If the image's own metadata turns the cache
//!   on, [`Capabilities`] report a volatile cache without FUA, and flushes make writes durable.
//! - Every request ends. A request that the cluster does not answer fails after the timeout in the
//!   configuration, or after 30 seconds if none is configured. The cluster may still carry out such
//!   a request later.
//! - While an image is open for writing, this client holds its exclusive lock. If the client loses
//!   the lock because it was fenced, every later request fails.
//! - Requests begin and complete on loops, without another thread; calls that block in librbd run
//!   on a thread of their own.

mod connection;
#[expect(unsafe_code, reason = "it calls librbd")]
mod ffi;
mod location;
mod names;
mod open;
mod slot;
mod snapshots;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, FuaCost,
    GroupCommit, IoVector, Offload, ReadAfterDiscard, Result, SnapshotChange, Storage,
    StorageChange, StorageSnapshot, SyncMode, Unmap, WriteCache, errno,
};

use connection::Connection;
use ffi::{Command, Extent};
pub use location::RbdLocation;
pub(crate) use location::SCHEME;
pub use names::{clone_rbd_image, create_rbd_image, remove_rbd_image, rename_rbd_image};
use open::Opened;
pub use open::RbdAccess;

/// The longest range of one zero write or discard. The limit bounds memory, because librbd
/// allocates an operation for each object of the range.
const MAX_RANGE: u64 = 1 << 30;
/// The longest range whose extents are queried at once. The limit bounds the time, because without
/// an object map librbd sends a message for each object.
const MAX_STATUS_RANGE: u64 = 4 << 30;
/// If a write past the end makes an image grow, its size is rounded up to a multiple of this.
/// Reason: each change of the size notifies all clients of the image.
const GROWTH: u64 = 64 << 20;

/// An image in Ceph.
pub struct RbdStorage {
    connection: Arc<Connection>,
    /// The pool, and the namespace in it.
    pool: String,
    /// Stored by the blocking call that changes the image's size, also if its future was dropped.
    size: Arc<AtomicU64>,
    is_cached: bool,
}

impl RbdStorage {
    /// Opens an image, and locks it for this `access`.
    ///
    /// If a client that has died holds the lock, waits until the cluster detects that, usually 30
    /// seconds.
    ///
    /// # Errors
    /// `Locked` with the holder's name, if another client has the image open for writing;
    /// `Unsupported` if Ceph's libraries are missing, or the image has no exclusive lock;
    /// `ReadOnly` for writing to a snapshot; other errors with Ceph's errno.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub async fn open(location: RbdLocation, access: RbdAccess) -> Result<Self> {
        let pool = format!("{}/{}", location.pool(), location.namespace().unwrap_or_default());
        let Opened { connection, size, is_cached } = open::open(location, access).await?;
        Ok(Self { connection, pool, size: Arc::new(AtomicU64::new(size)), is_cached })
    }

    /// Changes the part of a range that is inside of the image, in ranges of at most [`MAX_RANGE`]
    /// bytes.
    async fn change_range(
        &self,
        what: &'static str,
        range: ByteRange,
        command: impl Fn(ByteRange) -> Command,
    ) -> Result<()> {
        let end = range.end().min(self.size());
        let mut offset = range.offset();
        while offset < end {
            let part = ByteRange::between(offset, end.min(offset + MAX_RANGE));
            let changed = self.connection.run(what, Some(offset), command(part), false).await;
            self.confined(changed)?;
            offset = part.end();
        }
        Ok(())
    }

    /// Marks the error of a change. Without the cache, a failed change affects no earlier one:
    /// changes that completed before are durable.
    fn confined(&self, changed: Result<u64>) -> Result<()> {
        let changed = changed.map(drop);
        if self.is_cached { changed } else { changed.map_err(Error::confined) }
    }

    /// Makes the image at least `size` bytes long.
    async fn grow(&self, size: u64) -> Result<()> {
        if size > self.size() { self.set_size(size, false).await } else { Ok(()) }
    }

    /// The identity of the image: the pool, the namespace, and the image's id in the pool. The
    /// image's name is not part of the identity.
    ///
    /// # Errors
    /// Errors of the cluster.
    pub async fn id(&self) -> Result<String> {
        let ask = |image: &connection::Image| image.id();
        let id = self.connection.run_blocking("cannot ask for the image's id", ask).await?;
        Ok(format!("{}/{id}", self.pool))
    }

    /// The current size of the image; another client may have changed it.
    ///
    /// # Errors
    /// Errors of the cluster.
    pub async fn query_size(&self) -> Result<u64> {
        let ask = |image: &connection::Image| image.size();
        self.connection.run_blocking("cannot ask for the size", ask).await
    }

    /// Accepts a new size. A size that is less than the current one is ignored.
    pub fn set_min_size(&self, size: u64) {
        self.size.fetch_max(size, Ordering::AcqRel);
    }

    /// Sets the size. Without `may_shrink`, a size that is less than the current one is ignored.
    async fn set_size(&self, size: u64, may_shrink: bool) -> Result<()> {
        let known = Arc::clone(&self.size);
        let resize = move |image: &connection::Image| {
            // An earlier call has changed the size meanwhile.
            let current = known.load(Ordering::Acquire);
            if size != current && (size > current || may_shrink) {
                image.resize(size, may_shrink)?;
                known.store(size, Ordering::Release);
            }
            Ok(())
        };
        self.connection.run_blocking("cannot change the size", resize).await
    }
}

impl Drop for RbdStorage {
    /// Releases the lock and closes the image; blocks for some round trips to the cluster.
    fn drop(&mut self) {
        drop(self.connection.take_image());
    }
}

impl Storage for RbdStorage {
    fn name(&self) -> &str {
        self.connection.name()
    }

    fn capabilities(&self) -> Capabilities {
        let (fua, write_cache) = if self.is_cached {
            (Fua::Emulated, WriteCache::Volatile)
        } else {
            (Fua::Native, WriteCache::None)
        };
        Capabilities {
            fua,
            fua_cost: FuaCost::NoFlush,
            write_cache,
            group_commit: GroupCommit::Never,
            alignment: Alignment::BYTE,
            write_zeroes: Offload::Available,
            prepare_zeroes: Offload::Unavailable,
            discard: Offload::Available,
            // librbd does not discard ranges that are less than its discard granularity.
            read_after_discard: ReadAfterDiscard::Undefined,
        }
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let inside = self.size().saturating_sub(offset).min(into.len() as u64);
        into.split_off(inside as usize).fill(0);
        if into.is_empty() {
            return Ok(());
        }
        let (what, command) = ("cannot read", Command::Read(offset, into));
        let read = self.connection.run(what, Some(offset), command, false).await?;
        if read != inside {
            let what = "another client has made the image shorter: cannot read";
            return Err(Error::new(ErrorKind::Io, what).on(self.name()).at(offset));
        }
        Ok(())
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        let is_durable = match (durability, self.is_cached) {
            (Durability::None, _) => false,
            (Durability::Data, false) => true,
            (Durability::Data | Durability::Full, _) => {
                let what = "no single write to an image in Ceph is as durable as this";
                return Err(Error::new(ErrorKind::Unsupported, what).on(self.name()).at(offset));
            }
        };
        if from.is_empty() {
            return Ok(());
        }
        let end = offset.checked_add(from.len() as u64);
        let end = end.ok_or_else(|| {
            let source = io::Error::from_raw_os_error(errno::EFBIG);
            self.connection.error("cannot write", Some(offset), source)
        })?;
        if end > self.size() {
            self.grow(end.checked_next_multiple_of(GROWTH).unwrap_or(end)).await?;
        }
        let (what, command) = ("cannot write", Command::Write(offset, from));
        let written = self.connection.run(what, Some(offset), command, is_durable).await;
        self.confined(written)
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        let is_thick = unmap == Unmap::Forbidden;
        let command = |range| Command::WriteZeroes { range, is_thick };
        self.change_range("cannot write zeros", range, command).await
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        self.change_range("cannot discard", range, Command::Discard).await
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        self.connection.detached().drained().await?;
        self.connection.run("cannot flush", None, Command::Flush, true).await.map(drop)
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.set_size(size, true).await
    }

    async fn extend_hint(&self, size: u64) {
        // An error is ignored, because the write that needs the space will report it.
        let _ = self.grow(size).await;
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        let inside = self.size().saturating_sub(range.offset()).min(range.length());
        if inside == 0 {
            return Ok((Allocation::Hole, range.length()));
        }
        let start = range.offset();
        let asked = ByteRange::between(start, start + inside.min(MAX_STATUS_RANGE));
        let ask = move |image: &connection::Image| image.first_extent(asked);
        let extent = self.connection.run_blocking("cannot find the holes", ask).await;
        Ok(match extent.map_err(|error| error.at(start))? {
            Extent::Data(length) => (Allocation::Data, length),
            Extent::Hole(length) => (Allocation::Hole, length),
        })
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }

    fn needs_close(&self) -> bool {
        true
    }

    async fn close(&self) -> Result<()> {
        self.connection.close().await
    }

    fn has_snapshots(&self) -> bool {
        true
    }

    async fn list_snapshots(&self) -> Result<Vec<StorageSnapshot>> {
        let list = |image: &connection::Image| image.snapshots();
        self.connection.run_blocking("cannot list the snapshots", list).await
    }

    async fn changes_since(&self, snapshot: &str, range: ByteRange) -> Result<Vec<StorageChange>> {
        snapshots::changes_since(&self.connection, snapshot, range).await
    }

    async fn change_snapshots(&self, change: SnapshotChange<'_>) -> Result<()> {
        snapshots::change(&self.connection, &self.size, change).await
    }
}
