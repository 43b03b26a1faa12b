//! One enabled bitmap of an image that is open for writing: each change is recorded in the bitmap
//! before the change is made.
//!
//! The steps of a change:
//!
//! 1. The bits of the change are set in memory. Bits are grouped in *extents* of equal length. If a
//!    bit of the change was not set and its extent is not active, the extent becomes active. Before
//!    the change is made, the page of bits is written durably, with all bits of active extents set.
//!    After any crash the bitmap on disk therefore contains the change.
//! 2. Further changes in an active extent, and changes of blocks whose bits are already set on
//!    disk, need no I/O.
//! 3. If many extents are active, extents without recent changes become inactive: their pages are
//!    written with only the bits that are set, and flushed.
//!
//! So after a crash, excess bits are set in at most `max_active` extents ([`BitmapActivity`]), and
//! in the extents of requests in flight.
//!
//! At most one write of each page is in flight; changes that need a write in the meantime share the
//! next write. A cluster of bits is allocated in the same order as an L2 table: refcount and zeros
//! become durable, then the entry of the table. If there is no space for a cluster, the whole
//! bitmap becomes coarser (`coarser`), or the table's entry states that all bits of the cluster are
//! set. Neither way needs space.

mod coarser;

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use async_lock::{Semaphore, SemaphoreGuard};
use blockhouse_core::sync::{Condvar, run_all};
use blockhouse_core::{ByteRange, Durability, Error, ErrorKind, Result, Storage, SyncMode};
use parking_lot::Mutex;

use crate::qcow2::layout::bitmap_directory::{BitmapEntry, BitsCluster};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::options::BitmapActivity;
use crate::qcow2::layout::table_io;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::layout::words;
use crate::qcow2::writeback::Metadata;

use super::number_map::NumberMap;
use super::page::{Marked, Page, WriteEnd};
use super::reader::Bits;

/// Bytes of a page, the unit in which bits are written, unless clusters are smaller or the
/// storage's blocks are larger.
const PAGE: u64 = 4096;
/// The maximum number of concurrent writes of pages.
const MAX_IN_FLIGHT: usize = 16;

/// See the module's documentation.
pub(super) struct LiveBitmap {
    geometry: Geometry,
    /// The maximum number of extents in which bits may be set on disk in excess, not counting
    /// extents of requests in flight.
    max_active: usize,
    granularity_bits: u32,
    /// Number of bits that cover the disk.
    bits: u64,
    /// Bytes of a page.
    page_size: u64,
    /// Bits of an extent, all in one page.
    extent_bits: u64,
    table_offset: u64,
    /// Whether the bitmap became coarser, because there was no space for its bits.
    is_coarser: AtomicBool,
    state: Mutex<State>,
    /// Notified when a write of a page has ended.
    written: Condvar,
    /// Held by the task that allocates clusters of bits.
    allocating: Semaphore,
    /// Held by the task that makes extents inactive.
    resting: Semaphore,
}

/// Whether this bitmap, or one that replaces it, records changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// This bitmap records changes.
    Open,
    /// Another bitmap has replaced this one, or is about to replace it.
    Superseded,
    /// The replacement was begun and not finished, so the bitmap lacks changes.
    Abandoned,
}

struct State {
    phase: Phase,
    table: Vec<BitsCluster>,
    pages: NumberMap<Page>,
    /// Active extents, in the order in which they became active.
    active: VecDeque<u64>,
    /// The number of inactive extents in which excess bits may still be set on disk.
    going_to_rest: usize,
    /// Whether a write of the table is in flight, or its outcome is unknown because the write
    /// failed, or was dropped and may still be in flight.
    is_table_write_unknown: bool,
    /// Whether [`write_exactly`](LiveBitmap::write_exactly) has written bits that no flush has
    /// covered, so that bits that are read from the disk may not be durable.
    is_exact_write_unknown: bool,
}

/// The next step of a change after its bits were set in memory.
pub(super) enum Next {
    /// The bits are durable on disk already.
    Done,
    /// Read this page, and set the bits again.
    Load(u64),
    /// Make these pages durable up to these versions.
    Write(Vec<(u64, u64)>),
    /// Use the bitmap that replaces this one.
    AskOther,
    /// Fail the change: this bitmap lacks changes.
    Abandoned,
}

impl Next {
    pub(super) fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }
}

impl LiveBitmap {
    /// A bitmap of a disk of `size` bytes, with its table.
    pub(super) fn new(
        entry: &BitmapEntry,
        table: Vec<BitsCluster>,
        size: u64,
        geometry: Geometry,
        (activity, block): (BitmapActivity, u64),
    ) -> Self {
        let page_size = PAGE.min(geometry.cluster_size()).max(block);
        let extent_bits = (activity.extent_size >> entry.granularity_bits).clamp(1, page_size * 8);
        Self {
            geometry,
            max_active: activity.max_active,
            granularity_bits: entry.granularity_bits,
            bits: entry.bits_for(size),
            page_size,
            extent_bits,
            table_offset: entry.table_offset,
            is_coarser: AtomicBool::new(false),
            state: Mutex::new(State {
                phase: Phase::Open,
                table,
                pages: NumberMap::default(),
                active: VecDeque::new(),
                going_to_rest: 0,
                is_table_write_unknown: false,
                is_exact_write_unknown: false,
            }),
            written: Condvar::new(),
            allocating: Semaphore::new(1),
            resting: Semaphore::new(1),
        }
    }

    /// Bits of a page.
    pub(super) fn page_bits(&self) -> u64 {
        self.page_size * 8
    }

    /// The maximum number of unchanged bytes of the disk that are marked as changed after a crash.
    pub(super) fn max_excess(&self) -> u64 {
        let extent_size = self.extent_bits << self.granularity_bits;
        extent_size.saturating_mul(self.max_active as u64)
    }

    /// The bits of a range of the disk.
    fn bits_of(&self, range: ByteRange) -> Range<u64> {
        let start = range.offset() >> self.granularity_bits;
        let end = range.end().div_ceil(1 << self.granularity_bits);
        start.min(self.bits)..end.min(self.bits)
    }

    /// Sets the bits of `range` in memory.
    pub(super) fn mark(&self, range: ByteRange) -> Next {
        let bits = self.bits_of(range);
        let mut writes = Vec::new();
        let mut state = self.state.lock();
        let State { phase, pages, active, .. } = &mut *state;
        match phase {
            Phase::Open => {}
            Phase::Superseded => return Next::AskOther,
            Phase::Abandoned => return Next::Abandoned,
        }
        let mut at = bits.start;
        while at < bits.end {
            let number = at / self.page_bits();
            let end = bits.end.min((number + 1) * self.page_bits());
            let Some(page) = pages.get_mut(&number) else { return Next::Load(number) };
            let mut needed = 0;
            while at < end {
                let extent = at / self.extent_bits;
                let extent_end = end.min((extent + 1) * self.extent_bits);
                let first = number * self.page_bits();
                let in_page = extent - first / self.extent_bits;
                match page.mark(in_page, self.extent_bits, at - first..extent_end - first) {
                    Marked::Durable => {}
                    Marked::Needs(version) => needed = needed.max(version),
                    Marked::Activated(version) => {
                        needed = needed.max(version);
                        active.push_back(extent);
                    }
                }
                at = extent_end;
            }
            if needed > 0 {
                writes.push((number, needed));
            }
        }
        if writes.is_empty() { Next::Done } else { Next::Write(writes) }
    }

    /// Records durably that `range` changes. Returns `false` if another bitmap replaces this one:
    /// the caller then uses the other bitmap.
    ///
    /// # Errors
    /// Errors of the storage. The change must not be made then.
    pub(super) async fn record<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        range: ByteRange,
    ) -> Result<bool> {
        loop {
            match self.mark(range) {
                Next::Done => return Ok(true),
                Next::AskOther => return Ok(false),
                Next::Abandoned => return Err(self.abandoned()),
                Next::Load(page) => self.load(metadata, page).await?,
                Next::Write(pages) => {
                    let are_all = AtomicBool::new(true);
                    let writes = pages.into_iter().map(async |(page, version)| {
                        let is_durable = self.make_durable(metadata, page, version).await?;
                        are_all.fetch_and(is_durable, Ordering::Relaxed);
                        Ok(())
                    });
                    run_all(MAX_IN_FLIGHT, writes).await?;
                    self.have_some_rest(metadata).await;
                    if are_all.into_inner() {
                        return Ok(self.state.lock().phase == Phase::Open);
                    }
                }
            }
        }
    }

    /// Whether the bitmap lacks changes, because its replacement was begun and not finished.
    pub(super) fn is_abandoned(&self) -> bool {
        self.state.lock().phase == Phase::Abandoned
    }

    /// The error for a change that cannot be recorded, because the bitmap lacks earlier changes.
    pub(super) fn abandoned(&self) -> Error {
        let what = "a request ended while a bitmap became coarser";
        Error::new(ErrorKind::Io, what).at(self.table_offset)
    }

    /// Records that the bitmap has become coarser. Returns false if it was coarser already.
    pub(super) fn note_coarser(&self) -> bool {
        !self.is_coarser.swap(true, Ordering::AcqRel)
    }

    /// Bytes of the disk per bit, as a power of two.
    pub(super) fn granularity_bits(&self) -> u32 {
        self.granularity_bits
    }

    /// The bits of a page, from memory or, if the page is not in memory, from the disk. A page that
    /// is read from the disk is not kept in memory. `None` if another bitmap replaces this one.
    pub(super) async fn page_of<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        number: u64,
    ) -> Result<Option<Bits>> {
        let bits = self.page_now(metadata, number).await;
        match self.state.lock().phase {
            Phase::Open => bits.map(Some),
            Phase::Superseded => Ok(None),
            Phase::Abandoned => Err(self.abandoned()),
        }
    }

    async fn page_now<S: Storage>(&self, metadata: &Metadata<S>, number: u64) -> Result<Bits> {
        let in_memory = || {
            let state = self.state.lock();
            Some(Bits::Some(state.pages.get(&number)?.bits().to_vec()))
        };
        match in_memory() {
            Some(bits) => Ok(bits),
            None => {
                let bits = self.read(metadata, number).await?;
                // If another task has set bits during the read, the page is in memory now.
                Ok(in_memory().unwrap_or(bits))
            }
        }
    }

    /// The location of a page.
    fn location_of(&self, page: u64) -> Result<BitsCluster> {
        let in_cluster = self.geometry.cluster_size() / self.page_size;
        match self.state.lock().table.get((page / in_cluster) as usize) {
            Some(BitsCluster::Stored(cluster)) => {
                Ok(BitsCluster::Stored(cluster + page % in_cluster * self.page_size))
            }
            Some(&other) => Ok(other),
            None => Err(self.past_table()),
        }
    }

    fn past_table(&self) -> Error {
        let what = "the table of a bitmap does not reach as far as the disk";
        Error::new(ErrorKind::Corrupt, what)
            .at(self.table_offset)
            .hint("remove the bitmap, and make a full backup")
    }

    /// The bits of a page on disk.
    async fn read<S: Storage>(&self, metadata: &Metadata<S>, page: u64) -> Result<Bits> {
        self.settle_exact_writes(metadata).await?;
        Ok(match self.location_of(page)? {
            BitsCluster::Stored(offset) => {
                let length = self.page_size as usize;
                Bits::Some(table_io::read(metadata.storage(), offset, length).await?)
            }
            BitsCluster::Zeros => Bits::Zeros,
            BitsCluster::Ones => Bits::Ones,
        })
    }

    async fn load<S: Storage>(&self, metadata: &Metadata<S>, page: u64) -> Result<()> {
        let bits = match self.read(metadata, page).await? {
            Bits::Zeros => vec![0; self.page_size as usize],
            Bits::Ones => vec![0xff; self.page_size as usize],
            Bits::Some(bits) => bits,
        };
        // Another task may have loaded the page during the read, and changed it.
        self.state.lock().pages.entry(page).or_insert_with(|| Page::new(bits));
        Ok(())
    }

    /// Writes a page durably. Returns whether the page is durable up to the version: false if
    /// another bitmap is about to replace this one, because then no page is written.
    async fn make_durable<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        page: u64,
        version: u64,
    ) -> Result<bool> {
        while let Some(write) = self.begin_write(page, |page| !page.is_durable(version)).await {
            write.run(metadata, Durability::Data).await?;
        }
        Ok(self.state.lock().pages.get(&page).is_none_or(|page| page.is_durable(version)))
    }

    /// Waits until no write of the page is in flight, and then begins a write if `is_needed`
    /// returns true; `None` if not, or if another bitmap replaces this one.
    async fn begin_write(
        &self,
        number: u64,
        is_needed: impl Fn(&Page) -> bool,
    ) -> Option<PageWrite<'_>> {
        loop {
            let writing = {
                let mut state = self.state.lock();
                if state.phase != Phase::Open {
                    return None;
                }
                let page = state.pages.get_mut(&number)?;
                if !is_needed(page) {
                    return None;
                }
                if !page.is_writing() {
                    let was_dropped = page.begin_write();
                    let end = WriteEnd::Dropped;
                    return Some(PageWrite { bitmap: self, page: number, was_dropped, end });
                }
                self.written.listen()
            };
            writing.await;
        }
    }

    /// The offset of a page. If its cluster is missing, the cluster is allocated. `None` if the
    /// table states, without a cluster, that all bits are set.
    async fn place<S: Storage>(&self, metadata: &Metadata<S>, page: u64) -> Result<Option<u64>> {
        loop {
            match self.location_of(page)? {
                BitsCluster::Stored(offset) => return Ok(Some(offset)),
                BitsCluster::Ones => return Ok(None),
                BitsCluster::Zeros => {
                    let in_cluster = self.geometry.cluster_size() / self.page_size;
                    self.allocate(metadata, page / in_cluster).await?;
                }
            }
        }
    }

    /// For each missing cluster of bits that `range` needs, marks all of the disk that the cluster
    /// covers as changed, durably. `None` if no cluster is missing, or if another bitmap replaces
    /// this one; otherwise whether this is the first time that the bitmap becomes coarser. No
    /// replacement may begin meanwhile.
    ///
    /// # Errors
    /// Errors of the storage. The change must not be made then.
    pub(super) async fn fill_lacking<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        range: ByteRange,
    ) -> Result<Option<bool>> {
        let (bits, in_cluster) = (self.bits_of(range), self.geometry.cluster_size() * 8);
        if self.state.lock().phase != Phase::Open {
            return Ok(None);
        }
        let mut is_lacking = false;
        for cluster in bits.start / in_cluster..bits.end.div_ceil(in_cluster) {
            if let Some(_alone) = self.begin_allocation(metadata, cluster).await? {
                self.refer(metadata, cluster, BitsCluster::Ones).await?;
                is_lacking = true;
            }
        }
        Ok(is_lacking.then(|| self.note_coarser()))
    }

    /// Waits until no other task changes the table; `None` if the table's entry already has a
    /// cluster, or states that all bits are set.
    async fn begin_allocation<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        cluster: u64,
    ) -> Result<Option<SemaphoreGuard<'_>>> {
        let alone = self.allocating.acquire().await;
        let is_unknown = {
            let state = self.state.lock();
            match state.table.get(cluster as usize) {
                Some(BitsCluster::Zeros) => state.is_table_write_unknown,
                Some(BitsCluster::Stored(_) | BitsCluster::Ones) => return Ok(None),
                None => return Err(self.past_table()),
            }
        };
        if is_unknown {
            metadata.writer().drained().await;
        }
        Ok(Some(alone))
    }

    /// Allocates a cluster of bits, all clear.
    async fn allocate<S: Storage>(&self, metadata: &Metadata<S>, cluster: u64) -> Result<()> {
        let Some(_alone) = self.begin_allocation(metadata, cluster).await? else { return Ok(()) };
        let allocated = metadata.step(|state| {
            state.tables.freeze.wait_thawed()?;
            state.tables.check_dirty_limit()?;
            let allocated = state.allocator.allocate(&mut state.tables, 1)?;
            state.tables.note_change();
            Ok(allocated)
        });
        let allocated = metadata.marking(allocated.await).await?;
        let host = self.geometry.bytes_of(allocated.clone());
        if let Err(error) = self.fill_and_refer(metadata, cluster, host).await {
            // If the entry may be on disk, the cluster remains allocated. At worst, the cluster
            // leaks.
            if !self.state.lock().is_table_write_unknown {
                let mut state = metadata.lock();
                let state = &mut *state;
                state.allocator.free_unlinked(&mut state.tables, allocated);
            }
            return Err(error);
        }
        Ok(())
    }

    async fn fill_and_refer<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        cluster: u64,
        host: ByteRange,
    ) -> Result<()> {
        metadata.writer().write_zeros(host).await?;
        metadata.flush_allocated().await?;
        self.refer(metadata, cluster, BitsCluster::Stored(host.offset())).await
    }

    /// Changes an entry of the table, durably.
    async fn refer<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        cluster: u64,
        to: BitsCluster,
    ) -> Result<()> {
        let block = u64::from(metadata.storage().capabilities().alignment.offset).max(512);
        let first = cluster * 8 / block * block;
        let write = {
            let mut state = self.state.lock();
            state.is_table_write_unknown = true;
            let start = first as usize / 8;
            let end = (start + block as usize / 8).min(state.table.len());
            let mut words: Vec<u64> =
                state.table[start..end].iter().map(|entry| entry.word()).collect();
            words[cluster as usize - start] = to.word();
            TableWrite { offset: self.table_offset + first, bytes: words::bytes_of(&words) }
        };
        metadata.writer().write(&[write], Durability::Data).await?;
        let mut state = self.state.lock();
        state.is_table_write_unknown = false;
        state.table[cluster as usize] = to;
        Ok(())
    }

    /// Makes extents inactive if many are active.
    async fn have_some_rest<S: Storage>(&self, metadata: &Metadata<S>) {
        let (rest_at, rest_to) = (self.max_active * 3 / 4, self.max_active / 2);
        loop {
            let (active, going_to_rest) = {
                let state = self.state.lock();
                (state.active.len(), state.going_to_rest)
            };
            let _alone = match self.resting.try_acquire() {
                _ if active <= rest_at && active + going_to_rest <= self.max_active => return,
                Some(alone) => alone,
                None if active + going_to_rest <= self.max_active => return,
                // Another task is making extents inactive: wait for it.
                None => {
                    drop(self.resting.acquire().await);
                    continue;
                }
            };
            let stale = self.rest_down_to(rest_to);
            // If the writes fail, excess bits remain set on disk in these extents, and their pages
            // remain stale, until closing writes them again. A failed flush is recorded by the
            // writer.
            if self.write_stale(metadata, stale).await.is_ok() {
                let _ = metadata.sync(SyncMode::Data).await;
            }
            self.state.lock().going_to_rest = 0;
            return;
        }
    }

    /// Makes extents inactive, until `count` are left: first extents that have been active longest
    /// and were not changed lately, then any extents. Returns the pages in which bits are set on
    /// disk in excess.
    fn rest_down_to(&self, count: usize) -> BTreeSet<u64> {
        let mut state = self.state.lock();
        let State { pages, active, going_to_rest, .. } = &mut *state;
        let before = active.len();
        let in_page = self.page_bits() / self.extent_bits;
        let mut stale = BTreeSet::new();
        for _ in 0..2 * active.len() {
            if active.len() <= count {
                break;
            }
            let Some(extent) = active.pop_front() else { break };
            let number = extent / in_page;
            // A page that is no longer in memory has its bits on disk.
            let Some(page) = pages.get_mut(&number) else { continue };
            if !page.rest(extent % in_page, self.extent_bits) {
                active.push_back(extent);
            } else if page.is_stale() {
                stale.insert(number);
            }
        }
        // Only this task makes extents inactive.
        *going_to_rest = before - active.len();
        stale
    }

    async fn write_stale<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        stale: BTreeSet<u64>,
    ) -> Result<()> {
        let writes = stale.into_iter().map(async |page| {
            match self.begin_write(page, Page::is_stale).await {
                Some(write) => write.run(metadata, Durability::None).await,
                None => Ok(()),
            }
        });
        run_all(MAX_IN_FLIGHT, writes).await
    }

    /// Writes the bits without any excess bits; durable with the next flush. No change may be in
    /// flight. Pages are dropped from memory, because all changes are recorded on disk even after a
    /// failure.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(super) async fn write_exactly<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        let pages = {
            let mut state = self.state.lock();
            state.active.clear();
            state.is_exact_write_unknown = true;
            std::mem::take(&mut state.pages)
        };
        let inexact =
            pages.into_iter().filter_map(|(number, page)| Some((number, page.into_inexact()?)));
        let writes: Vec<TableWrite> = inexact
            .filter_map(|(number, bytes)| match self.location_of(number) {
                Ok(BitsCluster::Stored(offset)) => Some(TableWrite { offset, bytes }),
                // Without a cluster, bits that are set only in memory belong to changes that were
                // not made.
                Ok(BitsCluster::Zeros | BitsCluster::Ones) | Err(_) => None,
            })
            .collect();
        metadata.writer().write(&writes, Durability::None).await
    }

    /// Records that a flush has covered [`write_exactly`](Self::write_exactly).
    pub(super) fn note_exact(&self) {
        self.state.lock().is_exact_write_unknown = false;
    }

    /// Makes those writes of [`write_exactly`](Self::write_exactly) durable that were dropped, or
    /// that no flush has covered. Reason: the writes may contain bits of changes that failed, and
    /// no earlier write made these bits durable.
    async fn settle_exact_writes<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        if self.state.lock().is_exact_write_unknown {
            metadata.writer().drained().await;
            metadata.sync(SyncMode::Data).await?;
            self.note_exact();
        }
        Ok(())
    }
}

/// The only write in flight of a page. If the guard is dropped before the write's end, the write
/// may still be in flight.
struct PageWrite<'a> {
    bitmap: &'a LiveBitmap,
    page: u64,
    was_dropped: bool,
    end: WriteEnd,
}

impl PageWrite<'_> {
    async fn run<S: Storage>(
        mut self,
        metadata: &Metadata<S>,
        durability: Durability,
    ) -> Result<()> {
        if self.was_dropped {
            metadata.writer().drained().await;
        }
        let place = match metadata.writer().check_failure() {
            Ok(()) => self.bitmap.place(metadata, self.page).await,
            Err(error) => Err(error),
        };
        let offset = place.inspect_err(|_| self.end = WriteEnd::Failed)?;
        let content = self.bitmap.state.lock().pages.get_mut(&self.page).map(|page| {
            page.begin_content();
            page.content(self.bitmap.extent_bits)
        });
        let Some((bytes, version)) = content else {
            self.end = WriteEnd::Failed;
            let what = "a bitmap was closed before it recorded a change";
            return Err(Error::new(ErrorKind::Io, what).on(metadata.storage().name()));
        };
        if let Some(offset) = offset {
            let write = TableWrite { offset, bytes };
            let written = metadata.writer().write(&[write], durability).await;
            written.inspect_err(|_| self.end = WriteEnd::Failed)?;
        }
        self.end = match durability {
            Durability::None => WriteEnd::Written,
            Durability::Data | Durability::Full => WriteEnd::Durable(version),
        };
        Ok(())
    }
}

impl Drop for PageWrite<'_> {
    fn drop(&mut self) {
        if let Some(page) = self.bitmap.state.lock().pages.get_mut(&self.page) {
            page.end_write(self.end);
        }
        self.bitmap.written.notify_all();
    }
}
