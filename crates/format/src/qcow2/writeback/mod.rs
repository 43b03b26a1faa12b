//! Runs steps, and writes their changes to the disk in an order that keeps the image consistent if
//! a crash happens at any point.
//!
//! The life cycle of a writeback. One writeback runs at a time; tasks that need a writeback share
//! it.
//!
//! 1. A task needs changes to be durable (a flush, a durable write that allocated, the dirty limit,
//!    closing). If a writeback runs, the task waits for its end, and then for another writeback if
//!    the first writeback began before the task's changes.
//! 2. A writeback that serves writes without FUA waits for the data of other such writes in flight,
//!    because otherwise these writes would need another writeback at once. Every writeback waits
//!    for the table writes of a dropped writeback.
//! 3. Under the lock, the writeback copies all dirty metadata (`tables`), and takes the pending
//!    frees (`allocator`).
//! 4. Without the lock, the writeback writes the copy (`order`).
//! 5. Under the lock: the copy is clean, and the frees are freeable. If the writeback failed or its
//!    future was dropped, everything in the copy is dirty again, and the next writeback writes it
//!    again.
//! 6. The writeback frees the freeable clusters (`reclaim`).
//!
//! Locking: the image has one lock, which protects [`State`]; it is held for short times, never
//! during I/O. A blocked step releases the lock (`steps`). The semaphores are acquired without the
//! lock. Their order is: the lock for L2 tables, the lock for the end of the file, the lock for
//! frees, the lock for the header.

mod fill_reserve;
mod header;
mod order;
mod reclaim;
mod run;
mod steps;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_lock::Semaphore;
use blockhouse_core::Storage;
use blockhouse_core::sync::{EpochGuard, Epochs};
use event_listener::Event;
use parking_lot::{Mutex, MutexGuard};

use crate::qcow2::allocator::Allocator;
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::options::{Access, Discard};
use crate::qcow2::mapping::{Mapper, Mapping};
use crate::qcow2::tables::{Step, TableWriter, Tables};

pub(crate) use run::WritebackBlock;

use header::AutoclearState;

/// The state that the lock of the image protects.
pub(crate) struct State {
    pub(crate) tables: Tables,
    pub(crate) allocator: Allocator,
    pub(crate) mapping: Mapping,
    /// Whether a writeback runs, or writebacks are blocked ([`WritebackBlock`]).
    is_running: bool,
}

impl State {
    /// The state that a step of the mapping works on.
    pub(crate) fn mapper(&mut self) -> Mapper<'_> {
        self.mapping.mapper(&mut self.tables, &mut self.allocator)
    }

    /// As [`mapper`](Self::mapper), but returns `Blocked` while the tables are frozen.
    pub(crate) fn thawed_mapper(&mut self) -> Step<Mapper<'_>> {
        self.tables.freeze.wait_thawed()?;
        Ok(self.mapper())
    }
}

/// The metadata of an open image, and the I/O that its steps need; see the module's documentation.
pub(crate) struct Metadata<S: Storage> {
    geometry: Geometry,
    access: Access,
    discard: Discard,
    /// Whether the guest's data is encrypted. If so, zeros in the file do not read as zeros on the
    /// guest's disk.
    is_encrypted: bool,
    writer: TableWriter<S>,
    state: Mutex<State>,
    /// Bytes of the guest's disk: a copy of the header's field that is read without the lock.
    size: AtomicU64,
    autoclear: AutoclearState,
    /// Notified when a writeback has ended, or writebacks are no longer blocked.
    done: Event,
    reads: Epochs,
    /// The data writes in flight for which a writeback waits.
    data_writes: Epochs,
    // Semaphores of one permit replace mutexes, because the mutex of the same crate reads the clock
    // under contention.
    /// Held by the task that lowers refcounts, or changes the image as a whole.
    free_lock: Semaphore,
    /// Whether a warning was logged about clusters that cannot be freed.
    has_warned_of_frees: AtomicBool,
    /// Held by the task that reserves space at the end of the file.
    end_lock: Semaphore,
    /// Held by the task that reserves a cluster for an L2 table.
    l2_alloc_lock: Semaphore,
}

impl<S: Storage> Metadata<S> {
    /// The metadata of an image in `storage`.
    pub(crate) fn new(
        storage: S,
        (tables, allocator, mapping): (Tables, Allocator, Mapping),
        access: Access,
        discard: Discard,
    ) -> Self {
        Self {
            geometry: tables.geometry(),
            access,
            discard,
            is_encrypted: tables.header().encryption.is_some(),
            writer: TableWriter::new(storage),
            size: AtomicU64::new(tables.header().size),
            autoclear: AutoclearState::new(tables.header()),
            state: Mutex::new(State { tables, allocator, mapping, is_running: false }),
            done: Event::new(),
            reads: Epochs::new(),
            data_writes: Epochs::new(),
            free_lock: Semaphore::new(1),
            has_warned_of_frees: AtomicBool::new(false),
            end_lock: Semaphore::new(1),
            l2_alloc_lock: Semaphore::new(1),
        }
    }

    /// The sizes of the image's structures, which never change.
    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes of the guest's disk.
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Sets the copy of the disk's size that is read without the lock. The header, or the snapshot
    /// that is shown, has changed the size before.
    pub(crate) fn publish_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// The storage that contains the image's tables.
    pub(crate) fn storage(&self) -> &S {
        self.writer.storage()
    }

    pub(crate) fn writer(&self) -> &TableWriter<S> {
        &self.writer
    }

    /// Sets the data file, which has the guest's clusters.
    pub(crate) fn set_data_file(&mut self, data: S) {
        self.writer.set_data_file(data);
    }

    /// Acquires the lock, which must not be held during I/O.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Begins a lookup for reading.
    pub(crate) fn begin_read(&self) -> ReadGuard<'_> {
        ReadGuard { _read: self.reads.enter() }
    }

    /// Waits for reads in flight, which may have looked up clusters that were freed since.
    pub(crate) async fn reads_ended(&self) {
        self.reads.synchronize().await;
    }

    /// Begins a data write without FUA whose metadata is written after it.
    pub(crate) fn begin_data_write(&self) -> DataWriteGuard<'_> {
        DataWriteGuard { _data: self.data_writes.enter() }
    }
}

/// Prevents the reallocation of clusters that a read has looked up. See [`Format::begin_read`].
///
/// [`Format::begin_read`]: crate::Format::begin_read
pub struct ReadGuard<'a> {
    _read: EpochGuard<'a>,
}

/// Makes the next flush wait for the data of a write. See [`Format::begin_data_write`].
///
/// [`Format::begin_data_write`]: crate::Format::begin_data_write
pub struct DataWriteGuard<'a> {
    _data: EpochGuard<'a>,
}
