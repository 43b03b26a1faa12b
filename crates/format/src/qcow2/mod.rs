//! qcow2 images, versions 2 and 3. The design is told in docs/qcow2.md; the format is QEMU's
//! `docs/interop/qcow2.txt`.
//!
//! Nothing in a file is believed before it was checked: every offset and size is bounded before it
//! is used, tables are read into bounded memory, and what is wrong is an error that names the
//! structure and its offset.

mod alloc;
mod backing;
mod bitmaps;
mod check;
mod claims;
mod commit;
mod compress;
mod counts;
mod create;
mod data_file;
mod deferred_free;
mod draft;
mod edit;
mod entry;
mod extensions;
mod features;
mod file_end;
mod frozen;
mod geometry;
mod header;
mod kept;
mod ledger;
mod make_room;
mod map;
mod packed;
mod pending;
mod prepare;
mod rebuild;
mod recorded;
mod recount;
mod refcount;
mod references;
mod repair;
mod repair_snapshots;
mod resize;
mod room;
mod round;
mod slice_cache;
mod snapshot;
mod snapshot_table;
mod snapshots;
mod space;
mod sparse_reader;
mod state;
mod table_io;
mod truncation;
mod vm_state;
mod writing;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use async_lock::Semaphore;
use blockhouse_core::sync::{EpochGuard, Epochs, WaitGroup};
use blockhouse_core::{ByteRange, Durability, Error, ErrorKind, Extent, Result, Storage};
use event_listener::Event;
use parking_lot::Mutex;

pub use check::{CheckReport, check};
pub use compress::{Compression, compress, decompress};
pub use create::{CreateOptions, Preallocation, Switch, Version, create, create_with};
pub use data_file::DataFile;
pub use features::Features;
pub use repair::{Repair, Repaired, repair};
pub use snapshot::NewSnapshot;
pub use snapshot_table::Snapshot;
pub use truncation::Truncation;
pub use vm_state::{VmStateCluster, VmStateTables};

use crate::{Abort, Intent};
use deferred_free::DeferredFrees;
use geometry::Geometry;
use header::{Header, Incompatible, Reason, Refusal};
use pending::Pending;
use room::Room;
use slice_cache::{Fetch, SliceCache, SliceId};
use space::Space;
use state::{Blocked, HeaderWrites, State, Step};

/// A qcow2 image.
pub struct Qcow2<S: Storage> {
    storage: S,
    /// Where the guest's clusters are, if not in `storage`.
    data: Option<S>,
    data_file: Option<DataFile>,
    /// What the file has lost.
    truncation: Option<Truncation>,
    geometry: Geometry,
    compression: Compression,
    backing: Option<Backing>,
    access: Access,
    /// The guest's disk in bytes; the truth is in the header, this is for asking without the lock.
    size: AtomicU64,
    discard: Discard,
    state: Mutex<State>,
    round_ended: Event,
    /// Why tables could not be written.
    failure: OnceLock<Error>,
    /// Whether the image says things that the first change makes untrue.
    has_autoclear: AtomicBool,
    first_change: Semaphore,
    table_writes: WaitGroup,
    reads: Epochs,
    /// Data of durable writes that need a round.
    arriving: Epochs,
    /// Held by the one who counts clusters down, or changes the image as a whole.
    freeing: Semaphore,
    /// Held by the one who changes the header; and its writes.
    header_changes: Semaphore,
    header_writes: WaitGroup,
    /// Held by the one who changes the image as a whole.
    drafting: Semaphore,
    /// Which snapshot it was opened on.
    snapshot: OnceLock<Snapshot>,
    /// Held by the one who gets space for tables at the end, and for L2 tables.
    claiming: Semaphore,
    making_tables: Semaphore,
}

/// What becomes of the space of clusters that the guest discards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// The host's file keeps it for other clusters.
    Keep,
    /// The host's file gets a hole.
    Punch,
}

/// What an image is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading only: nothing is written to the file.
    ReadOnly,
    /// Reading and writing.
    ReadWrite,
}

/// How an image is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// What for.
    pub access: Access,
    /// How many bytes of L2 tables and refcount blocks are kept in memory. At least four tables and
    /// what takes space for them are.
    pub cache_size: u64,
    /// What becomes of discarded space.
    pub discard: Discard,
    /// How many bytes of freed clusters may always wait for a writeback that is run for another reason,
    /// however short the file is.
    pub min_waiting_frees: u64,
}

/// L2 tables of 64 GiB and their refcounts, at clusters of 64 KiB.
const DEFAULT_CACHE_SIZE: u64 = 10 << 20;

impl Default for OpenOptions {
    /// For reading and writing, with the tables of 64 GiB in memory.
    fn default() -> Self {
        Self {
            access: Access::ReadWrite,
            cache_size: DEFAULT_CACHE_SIZE,
            discard: Discard::Punch,
            min_waiting_frees: deferred_free::MIN_WAITING,
        }
    }
}

/// What an image says of the file behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Its name, as bytes of the host's file system; relative to the image's folder.
    pub name: Vec<u8>,
    /// Its format, if the image says it.
    pub format: Option<String>,
}

impl<S: Storage> Qcow2<S> {
    /// Opens the image in `storage`.
    ///
    /// # Errors
    /// `Corrupt` when a structure contradicts the format, `Unsupported` when the image needs what
    /// is not built or clusters are smaller than the storage's blocks; both name structure and
    /// offset. Or what the storage answers.
    pub async fn open(storage: S, options: OpenOptions) -> Result<Self> {
        let header = read_header(&storage).await?;
        check_access(&storage, &header, options.access)?;
        let l1_bytes = header.l1_entries as usize * 8;
        let l1 = table_io::read(&storage, header.l1_offset, l1_bytes).await?;
        let table_bytes = (header.refcount_table_clusters as usize) << header.geometry.cluster_bits;
        let table = table_io::read(&storage, header.refcount_table_offset, table_bytes).await?;
        let geometry = header.geometry;
        let (l1, table) = (table_io::words_of(&l1), table_io::words_of(&table));
        let truncation = truncation::find(&storage, &header, (&l1, &table), options.access).await?;
        // Of a file that was cut off its last cluster is not whole.
        let clusters = match truncation {
            Some(_) => storage.size() >> geometry.cluster_bits,
            None => geometry.clusters_for(storage.size()),
        };
        let slices = (options.cache_size / geometry.slice_size()).max(geometry.least_slices());
        let has_backing = header.backing.is_some();
        let mut state = State {
            geometry,
            data_block: 1,
            fills: WaitGroup::new(),
            name: storage.name().into(),
            disk_header: header.clone(),
            header_writes: HeaderWrites::default(),
            l1,
            refcount_table: table,
            cache: SliceCache::new(slices as usize),
            space: Space::new(clusters),
            room: Room::default(),
            header,
            pending: Pending::default(),
            new_tables: HashMap::new(),
            l1_changed: BTreeSet::new(),
            refcount_table_changed: BTreeSet::new(),
            frees: DeferredFrees::new(options.min_waiting_frees),
            backing_end: if has_backing { u64::MAX } else { 0 },
            open_end: None,
            metadata: HashSet::new(),
            version: 0,
            durable_version: 0,
            round_is_running: false,
            frozen: None,
        };
        if options.access == Access::ReadWrite {
            state.note_metadata()?;
        }
        let image = Self {
            data: None,
            truncation,
            data_file: state.header.data_file.clone(),
            geometry,
            compression: state.header.compression,
            backing: state.header.backing.clone(),
            access: options.access,
            discard: options.discard,
            size: AtomicU64::new(state.header.size),
            has_autoclear: AtomicBool::new(
                state.header.autoclear & !state.header.lasting_autoclear() != 0,
            ),
            first_change: Semaphore::new(1),
            state: Mutex::new(state),
            storage,
            round_ended: Event::new(),
            failure: OnceLock::new(),
            table_writes: WaitGroup::new(),
            reads: Epochs::new(),
            arriving: Epochs::new(),
            // Semaphores of one: the mutex of the same crate looks at the clock.
            freeing: Semaphore::new(1),
            header_changes: Semaphore::new(1),
            header_writes: WaitGroup::new(),
            drafting: Semaphore::new(1),
            snapshot: OnceLock::new(),
            claiming: Semaphore::new(1),
            making_tables: Semaphore::new(1),
        };
        let is_dirty = image.state.lock().disk_header.incompatible.contains(Incompatible::DIRTY);
        if options.access == Access::ReadWrite && is_dirty {
            image.begin_changes().await?;
            image.rebuild_refcounts().await?;
        }
        Ok(image)
    }

    /// Before the first change: clears the autoclear bits, durably. They stand for what writers must
    /// know to keep it true (bitmaps of changed clusters, for example).
    async fn begin_changes(&self) -> Result<()> {
        if self.has_autoclear.load(Ordering::Acquire) {
            let _alone = self.first_change.acquire().await;
            self.rewrite_header(|header| header.autoclear &= header.lasting_autoclear()).await?;
            self.has_autoclear.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// The size of the guest's disk in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Where the last cluster ends.
    pub fn end(&self) -> u64 {
        self.size().next_multiple_of(self.geometry.cluster_size())
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.geometry.cluster_size()
    }

    /// Bytes of what is allocated to the guest at a time: a subcluster, or a cluster where there are
    /// none.
    pub fn subcluster_size(&self) -> u64 {
        self.geometry.unit_size()
    }

    /// How the image's compressed clusters are packed.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// The file behind this one, where unallocated clusters are read from; what lies beyond its end
    /// reads as zeros.
    pub fn backing(&self) -> Option<&Backing> {
        self.backing.as_ref()
    }

    /// Says how long the file behind this one is: what lies beyond its end there reads as zeros.
    pub fn set_backing_size(&self, size: u64) {
        self.state.lock().backing_end = size;
    }

    /// The image itself, where its tables are.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// As [`Format::map`](crate::Format::map).
    pub async fn map(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        self.check_data()?;
        if intent == Intent::Read {
            let mapped = self.step(|state| state.map_read(range)).await;
            return self.check_data_end(self.marking(mapped).await?);
        }
        self.check_writable()?;
        self.check_intact()?;
        if self.has_autoclear.load(Ordering::Acquire) {
            Box::pin(self.begin_changes()).await?;
        }
        let mapped = self.step(|state| {
            state.check_thawed()?;
            match intent {
                Intent::Read => state.map_read(range),
                Intent::Write => state.map_write(range),
                Intent::Zero(unmap) => state.map_zero(range, unmap),
                Intent::Discard => state.map_discard(range),
            }
        });
        self.marking(mapped.await).await
    }

    /// As [`Format::begin_read`](crate::Format::begin_read).
    pub fn begin_read(&self) -> ReadGuard<'_> {
        ReadGuard { _read: self.reads.enter() }
    }

    /// As [`Format::begin_data_write`](crate::Format::begin_data_write).
    pub fn begin_data_write(&self) -> DataWriteGuard<'_> {
        DataWriteGuard { _data: self.arriving.enter() }
    }

    /// As [`Format::link`](crate::Format::link). Dropped before its end, it is an abort.
    pub async fn link(&self, extent: Extent, data: Durability) -> Result<()> {
        let unfinished = Committing { state: &self.state, extent };
        let committed = self.step(|state| state.commit(extent, data)).await;
        let dropped = self.marking(committed).await?;
        std::mem::forget(unfinished);
        if !dropped.is_empty() {
            for free in dropped {
                self.free_clusters(free).await;
            }
            self.reclaim_if_much().await;
        }
        Ok(())
    }

    /// As [`Format::abort`](crate::Format::abort).
    pub fn abort(&self, extent: Extent, why: Abort) {
        self.state.lock().abort(extent, why);
    }

    fn check_writable(&self) -> Result<()> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::ReadOnly => {
                let what = "the image is open for reading only";
                Err(Error::new(ErrorKind::ReadOnly, what).on(self.storage.name()))
            }
        }
    }

    /// Refuses changes of an image whose tables were found to be wrong.
    fn check_intact(&self) -> Result<()> {
        match self.failure.get() {
            Some(error) if error.kind() == ErrorKind::Corrupt => {
                let hint = "nothing is changed any more: repair the image (check --repair all)";
                Err(error.duplicate().hint(hint))
            }
            _ => Ok(()),
        }
    }

    /// The outcome of a step. Where the image contradicts itself, it is marked as corrupt on disk and
    /// not changed again while it is open, if it is open for writing.
    async fn marking<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome
            && error.kind() == ErrorKind::Corrupt
            && self.access == Access::ReadWrite
        {
            self.remember(error);
            if self.geometry.version >= 3 {
                // The error that counts is the one that led here.
                let _ = self.mark_as_corrupt().await;
            }
        }
        outcome
    }

    /// Tries a step until nothing blocks it.
    async fn step<T>(&self, mut step: impl FnMut(&mut State) -> Step<T>) -> Result<T> {
        loop {
            match self.step_if_roomy(&mut step).await? {
                Some(value) => return Ok(value),
                None => self.relieve().await?,
            }
        }
    }

    /// Tries a step until nothing blocks it but too many changes: `None` then.
    async fn step_if_roomy<T>(
        &self,
        mut step: impl FnMut(&mut State) -> Step<T>,
    ) -> Result<Option<T>> {
        loop {
            let outcome = {
                let mut state = self.state.lock();
                state.cache.begin_step();
                step(&mut state)
            };
            match outcome {
                Ok(value) => return Ok(Some(value)),
                Err(Blocked::Failed(error)) => return Err(error),
                Err(Blocked::Missing(slice)) => self.load(slice).await?,
                Err(Blocked::Wait(event)) => event.await,
                // It takes steps itself.
                Err(Blocked::NoRoom(need)) => Box::pin(self.make_room(need)).await?,
                Err(Blocked::Crowded) => return Ok(None),
            }
        }
    }

    /// Brings a slice into the cache. It is read once, whoever asks.
    async fn load(&self, id: SliceId) -> Result<()> {
        let fetch = self.state.lock().cache.fetch(id.offset);
        let ticket = match fetch {
            Fetch::Present => return Ok(()),
            Fetch::Wait(event) => {
                event.await;
                return Ok(());
            }
            Fetch::Read(ticket) => ticket,
        };
        let fetching = Fetching { state: &self.state, offset: id.offset, ticket };
        let length = self.geometry.slice_size() as usize;
        let bytes = table_io::read(&self.storage, id.offset, length).await?;
        self.state.lock().cache.loaded(id, &fetching.ticket, bytes.into());
        Ok(())
    }
}

/// Keeps places that were looked up for reading what they are. See [`Format::begin_read`].
///
/// [`Format::begin_read`]: crate::Format::begin_read
pub struct ReadGuard<'a> {
    _read: EpochGuard<'a>,
}

/// Has the next flush wait for data. See [`Format::begin_data_write`].
///
/// [`Format::begin_data_write`]: crate::Format::begin_data_write
pub struct DataWriteGuard<'a> {
    _data: EpochGuard<'a>,
}

/// A commit under way.
struct Committing<'a> {
    state: &'a Mutex<State>,
    extent: Extent,
}

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        self.state.lock().abort(self.extent, Abort::Ended);
    }
}

/// A slice that is being read. Dropped, also unfinished, it lets others go on.
struct Fetching<'a> {
    state: &'a Mutex<State>,
    offset: u64,
    ticket: Arc<Event>,
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        self.state.lock().cache.fetch_ended(self.offset, &self.ticket);
    }
}

/// Autoclear features that stay true when tables are repaired: bitmaps that are in step, and a data
/// file that reads as the disk.
const KNOWN_AUTOCLEAR: u64 = bitmaps::IN_STEP | header::RAW_DATA_FILE;

async fn read_header<S: Storage>(storage: &S) -> Result<Header> {
    let refuse = |refusal: Refusal| {
        let kind = match refusal.reason {
            Reason::Corrupt => ErrorKind::Corrupt,
            Reason::Unsupported => ErrorKind::Unsupported,
        };
        Error::new(kind, refusal.what).on(storage.name()).at(refusal.offset)
    };
    let first = table_io::read(storage, 0, header::SECTOR).await?;
    let bits = header::cluster_bits(&first).map_err(refuse)?;
    let block = storage.capabilities().alignment.offset;
    if 1 << bits < u64::from(block) {
        let what = format!("clusters of {} bytes in a storage of blocks of {block}", 1u64 << bits);
        return Err(Error::new(ErrorKind::Unsupported, what)
            .on(storage.name())
            .hint("open it through the page cache (--cache writeback)"));
    }
    let bytes = table_io::read(storage, 0, 1 << bits).await?;
    Header::parse(&bytes).map_err(refuse)
}

fn check_access<S: Storage>(storage: &S, header: &Header, access: Access) -> Result<()> {
    if access == Access::ReadWrite && header.incompatible.contains(Incompatible::CORRUPT) {
        let what = "the image is marked as corrupt and can only be read";
        return Err(Error::new(ErrorKind::Corrupt, what)
            .on(storage.name())
            .at(72)
            .hint("repair it first (check --repair all)"));
    }
    if access == Access::ReadWrite
        && let Some(fault) = &header.snapshot_fault
    {
        return Err(Error::new(ErrorKind::Corrupt, fault.what.clone())
            .on(storage.name())
            .at(fault.offset)
            .hint("check --repair all removes the snapshots that cannot be used; it can be read as it is"));
    }
    Ok(())
}
