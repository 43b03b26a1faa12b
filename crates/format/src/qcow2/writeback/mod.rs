//! Runs steps, and writes their changes to the disk in an order that is right after a crash at any
//! point.
//!
//! The life of a writeback. One runs at a time; tasks that need one share it.
//!
//! 1. A task needs changes to be durable (a flush, a durable write that allocated, the dirty limit,
//!    closing). If a writeback runs, it waits for that one, and then for another one if its changes
//!    came too late.
//! 2. A writeback that serves writes without FUA waits for the data of others like them that is in
//!    flight: else their own writeback would follow at once. It waits for writes of tables of a
//!    dropped writeback.
//! 3. Under the lock it takes a copy of everything that is dirty (`tables`), and the pending frees
//!    (`allocator`).
//! 4. It writes the copy, without the lock (`order`).
//! 5. Under the lock: the copy is clean, and the frees are freeable. Or, where it failed or its
//!    future was dropped, all of it is dirty again, and the next one repeats it.
//! 6. It processes what is freeable (`reclaim`).
//!
//! Locking: [`State`] is what the image's one short lock guards; it is never held over I/O. A step
//! that is blocked gives it back (`steps`). The semaphores are taken without it. Their order is:
//! the lock for L2 tables, the lock for the end of the file, the lock for frees, the lock for the
//! header.

mod fill_reserve;
mod header;
mod order;
mod reclaim;
mod run;
mod steps;

use std::sync::atomic::{AtomicU64, Ordering};

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

/// The state behind the image's one lock.
pub(crate) struct State {
    pub(crate) tables: Tables,
    pub(crate) allocator: Allocator,
    pub(crate) mapping: Mapping,
    /// Whether a writeback runs, or is kept from running.
    is_running: bool,
}

impl State {
    /// The state that a step of the mapping works on.
    pub(crate) fn mapper(&mut self) -> Mapper<'_> {
        self.mapping.mapper(&mut self.tables, &mut self.allocator)
    }

    /// As [`mapper`](Self::mapper), blocked while the tables are frozen.
    pub(crate) fn thawed_mapper(&mut self) -> Step<Mapper<'_>> {
        self.tables.freeze.wait_thawed()?;
        Ok(self.mapper())
    }
}

/// The metadata of an open image, and the I/O that its steps need. See the module's page.
pub(crate) struct Metadata<S: Storage> {
    geometry: Geometry,
    access: Access,
    discard: Discard,
    /// Whether the guest's data is encrypted: then zeros of the file are not zeros of the disk.
    is_encrypted: bool,
    writer: TableWriter<S>,
    state: Mutex<State>,
    /// Bytes of the guest's disk: the truth is in the header, this is for asking without the lock.
    size: AtomicU64,
    autoclear: AutoclearState,
    /// A writeback ended, or may run again.
    done: Event,
    reads: Epochs,
    /// Data of durable writes that a writeback serves.
    data_writes: Epochs,
    // Semaphores of one permit: the mutex of the same crate reads the clock when it is contended.
    /// Held by the task that lowers refcounts, or changes the image as a whole.
    free_lock: Semaphore,
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
            end_lock: Semaphore::new(1),
            l2_alloc_lock: Semaphore::new(1),
        }
    }

    /// Numbers of the image that never change.
    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes of the guest's disk.
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The disk has another size from now on, in the header or in a snapshot that is shown.
    pub(crate) fn publish_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// The image's storage, which has its tables.
    pub(crate) fn storage(&self) -> &S {
        self.writer.storage()
    }

    pub(crate) fn writer(&self) -> &TableWriter<S> {
        &self.writer
    }

    /// The guest's clusters are in another file.
    pub(crate) fn set_data_file(&mut self, data: S) {
        self.writer.set_data_file(data);
    }

    /// Acquires the lock. It must not be held over I/O.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// A lookup for reading begins.
    pub(crate) fn begin_read(&self) -> ReadGuard<'_> {
        ReadGuard { _read: self.reads.enter() }
    }

    /// Waits for reads that may have looked up clusters freed before.
    pub(crate) async fn reads_ended(&self) {
        self.reads.synchronize().await;
    }

    /// Data that needs metadata after it is about to be written without FUA.
    pub(crate) fn begin_data_write(&self) -> DataWriteGuard<'_> {
        DataWriteGuard { _data: self.data_writes.enter() }
    }
}

/// Keeps clusters that were looked up for reading from being reallocated. See
/// [`Format::begin_read`].
///
/// [`Format::begin_read`]: crate::Format::begin_read
pub struct ReadGuard<'a> {
    _read: EpochGuard<'a>,
}

/// Makes the next flush wait for data. See [`Format::begin_data_write`].
///
/// [`Format::begin_data_write`]: crate::Format::begin_data_write
pub struct DataWriteGuard<'a> {
    _data: EpochGuard<'a>,
}
