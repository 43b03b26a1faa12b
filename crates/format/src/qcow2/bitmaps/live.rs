//! The enabled bitmaps of an image that is open for writing, and their marks in its header.
//!
//! A *session* lasts from the first change to the closing of the image. Its marks on disk:
//!
//! - The flag `in-use` of each enabled bitmap marks the bitmap as not saved, so other programs do
//!   not use the bitmap.
//! - The autoclear bit [`LIVE_BITMAPS`] tells this program that bitmaps which are enabled and in
//!   use contain all changes. Other programs clear unknown autoclear bits before they change the
//!   disk.
//!
//! Steps that begin a session, each durable before the next: bitmaps that lack changes are
//! disabled; the autoclear bit is set; the flags are set; the change is recorded in the bitmaps;
//! the change is made. Reason for the first step: these bitmaps must not be mistaken for bitmaps of
//! the session. Steps that end a session, each durable before the next: the bitmaps' bits are
//! written; the flags are cleared; the autoclear bit is cleared. After a crash between any two
//! steps, every program that uses the bitmaps finds all changes in them.
//!
//! If there is no space for a bitmap's bits, the bitmap becomes coarser (`coarser`). If a change
//! cannot be recorded even then, because the storage is full or fails, the bitmap is lost. Before
//! the change is made, the bitmap is durably disabled and keeps `in-use`, so every program sees
//! that the bitmap lacks changes. Neither the disabling nor a coarser bitmap needs space. The
//! guest's change succeeds in both cases.
//!
//! When a session ends, the header of a side file gets the time of the raw disk's last change
//! (`side_file`).
//!
//! Flags are changed in place, because each flag lies in one sector, and its meaning does not
//! depend on the flags of other bitmaps.

mod coarser;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_lock::Semaphore;
use blockhouse_core::sync::run_all;
use blockhouse_core::{ByteRange, Durability, Error, ErrorKind, Result, Storage, SyncMode, rare};
use parking_lot::{Mutex, RwLock};

use crate::qcow2::layout::bitmap_directory::{
    self, BITMAPS_CONSISTENT, BitmapEntry, BitmapFlags, BitsCluster, DirectoryLocation,
    LIVE_BITMAPS,
};
use crate::qcow2::layout::cluster_ranges::ClusterRanges;
use crate::qcow2::layout::data_file_mark::{DataFileMark, Voucher};
use crate::qcow2::layout::header::{Header, Incompatible, SECTOR};
use crate::qcow2::layout::names;
use crate::qcow2::layout::options::BitmapActivity;
use crate::qcow2::layout::table_io;
use crate::qcow2::layout::table_write::TableWrite;
use crate::qcow2::writeback::Metadata;

use super::reader::BitsReader;
use super::side_file;
use super::tracker::LiveBitmap;

/// Maximum number of enabled bitmaps. Reason: each one costs an operation when a change begins.
pub(crate) const MAX_LIVE: usize = 64;
/// Bytes of the disk that are recorded at a time. A multiple of the largest cluster.
const MAX_RECORDED: u64 = 256 << 20;
/// Maximum number of bitmaps that are written at the same time.
const MAX_IN_FLIGHT: usize = 16;

/// See the module's documentation.
pub(crate) struct LiveBitmaps {
    set: RwLock<Arc<BitmapSet>>,
    /// Whether any bitmap is enabled, or may be enabled because the loaded bitmaps were forgotten.
    has_live: AtomicBool,
    /// Whether the bitmaps have to be read before the next change.
    is_forgotten: AtomicBool,
    /// Whether the session has begun.
    has_begun: AtomicBool,
    /// Whether the header durably has the mark of a session, [`LIVE_BITMAPS`].
    is_marked: AtomicBool,
    /// Held to begin or end the session, to drop or coarsen a bitmap, and to write a voucher.
    begin_lock: Semaphore,
    /// Whether a write of flags is in flight, or has failed or was dropped. If so, flags that are
    /// read from the disk may not be durable.
    is_flags_write_unknown: AtomicBool,
    /// Function that makes the vouchers of a side file.
    vouch: OnceLock<fn() -> Option<Voucher>>,
    /// The observer of bitmaps that become coarser or are lost.
    loss_observer: OnceLock<BitmapLossObserver>,
    /// Names of the lost bitmaps, and the times at which they were lost.
    losses: Mutex<Vec<(Vec<u8>, Duration)>>,
    activity: BitmapActivity,
}

/// The kind of loss of a bitmap whose storage is full or fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapLoss {
    /// The bitmap reports more bytes as changed than were changed.
    Precision,
    /// The bitmap lacks changes.
    Changes,
}

/// The callback that gets the name of each bitmap that becomes coarser or is lost, and the reason.
/// The callback must not block.
pub type BitmapLossObserver = Arc<dyn Fn(&str, BitmapLoss, &Error) + Send + Sync>;

/// The bitmaps of an image.
#[derive(Clone, Default)]
struct BitmapSet {
    location: Option<DirectoryLocation>,
    /// The directory's entries as read, but updated for lost or coarser bitmaps.
    entries: Vec<BitmapEntry>,
    roles: Vec<Role>,
    /// The bitmaps in which changes are recorded.
    live: Vec<Arc<LiveBitmap>>,
}

/// The use of a bitmap by a session.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The bitmap is enabled, so changes are recorded in it.
    Live,
    /// The bitmap lacks changes.
    Lost,
    /// The bitmap is disabled.
    Idle,
}

impl Role {
    fn of(entry: &BitmapEntry, header: &Header) -> Self {
        match entry.is_inconsistent(header) {
            true => Self::Lost,
            false if entry.flags.contains(BitmapFlags::AUTO) => Self::Live,
            false => Self::Idle,
        }
    }
}

/// Checks clusters that are written in place when changes are recorded. Each cluster must belong to
/// one bitmap and to no other metadata that the image needs.
struct Places<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    taken: ClusterRanges,
    /// False for an image with the dirty bit (lazy refcounts) whose references are not counted
    /// again yet.
    are_refcounts_known: bool,
}

impl<'a, S: Storage> Places<'a, S> {
    fn new(metadata: &'a Metadata<S>, header: &Header) -> Self {
        let are_refcounts_known = !header.incompatible.contains(Incompatible::DIRTY);
        Self { metadata, taken: ClusterRanges::default(), are_refcounts_known }
    }

    /// # Errors
    /// `Corrupt` if these bytes are past the end of the file, belong to other metadata, or may be
    /// reallocated because their refcount is 0.
    async fn take(&mut self, offset: u64, length: u64) -> Result<()> {
        let geometry = self.metadata.geometry();
        let clusters = geometry.cluster_of(offset)..geometry.clusters_for(offset + length);
        let storage = self.metadata.storage();
        let refuse = |what| Error::new(ErrorKind::Corrupt, what).on(storage.name()).at(offset);
        if offset >= storage.size() {
            return Err(refuse("a bitmap is past the end of the file"));
        }
        let is_active =
            clusters.clone().any(|cluster| self.metadata.lock().tables.active.contains(&cluster));
        if is_active || self.taken.overlaps(&clusters) {
            return Err(refuse("a bitmap overlaps other metadata"));
        }
        for cluster in clusters.clone().filter(|_| self.are_refcounts_known) {
            if self.metadata.step(|state| state.tables.refcounts().get(cluster)).await? == 0 {
                return Err(refuse("the refcount of a bitmap's cluster is 0"));
            }
        }
        self.taken.insert(clusters);
        Ok(())
    }
}

impl BitmapSet {
    async fn read<S: Storage>(
        metadata: &Metadata<S>,
        header: &Header,
        activity: BitmapActivity,
    ) -> Result<Self> {
        let entries = bitmap_directory::read(metadata.storage(), header).await?;
        // `read` has checked the location just now.
        let location = DirectoryLocation::of(header).unwrap_or_default();
        let roles: Vec<Role> = entries.iter().map(|entry| Role::of(entry, header)).collect();
        let mut set = Self { location, entries, roles, live: Vec::new() };
        if set.count_live() > MAX_LIVE {
            return Ok(set);
        }
        let (storage, geometry) = (metadata.storage(), header.geometry);
        let block = u64::from(storage.capabilities().alignment.offset);
        let mut places = Places::new(metadata, header);
        if let Some(DirectoryLocation { offset, length, .. }) = location {
            places.take(offset, length).await?;
        }
        for (entry, role) in set.entries.iter().zip(&set.roles) {
            if *role != Role::Live {
                continue;
            }
            let reader = BitsReader::open(storage, geometry, entry, header.size).await?;
            places.take(entry.table_offset, entry.table_length()).await?;
            for cluster in reader.table() {
                if let BitsCluster::Stored(offset) = cluster {
                    places.take(*offset, geometry.cluster_size()).await?;
                }
            }
            let table = reader.into_table();
            let live = LiveBitmap::new(entry, table, header.size, geometry, (activity, block));
            set.live.push(Arc::new(live));
        }
        Ok(set)
    }

    /// The names of enabled bitmaps, in their order.
    fn live_names(&self) -> impl Iterator<Item = &[u8]> {
        let live = self.entries.iter().zip(&self.roles).filter(|(_, role)| **role == Role::Live);
        live.map(|(entry, _)| &*entry.name)
    }

    /// The enabled bitmap of this name.
    fn find(&self, name: &[u8]) -> Option<Arc<LiveBitmap>> {
        let index = self.live_names().position(|other| other == name)?;
        self.live.get(index).cloned()
    }

    fn name_of(&self, bitmap: &Arc<LiveBitmap>) -> Option<&[u8]> {
        let index = self.live.iter().position(|other| Arc::ptr_eq(other, bitmap))?;
        self.live_names().nth(index)
    }

    /// The set with these bitmaps marked as lost; `None` if none of them is live.
    fn without(&self, is_lost: impl Fn(&Arc<LiveBitmap>) -> bool) -> Option<Self> {
        let Self { location, mut entries, mut roles, live } = self.clone();
        let recorded = entries.iter_mut().zip(&mut roles).filter(|(_, role)| **role == Role::Live);
        for ((entry, role), _) in recorded.zip(&live).filter(|(_, bitmap)| is_lost(bitmap)) {
            *role = Role::Lost;
            entry.flags = entry.flags.union(BitmapFlags::IN_USE).difference(BitmapFlags::AUTO);
        }
        let kept: Vec<_> = live.iter().filter(|bitmap| !is_lost(bitmap)).cloned().collect();
        (kept.len() < live.len()).then_some(Self { location, entries, roles, live: kept })
    }

    fn count_live(&self) -> usize {
        self.roles.iter().filter(|role| **role == Role::Live).count()
    }

    /// Writes the flags that differ from `wanted`. Returns whether any flags differed; the written
    /// flags are not durable yet.
    async fn write_flags<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        wanted: impl Fn(Role, BitmapFlags) -> BitmapFlags,
    ) -> Result<bool> {
        self.write_directory(metadata, |bytes| {
            let positions = bitmap_directory::flags_positions(&self.entries);
            for ((position, entry), role) in positions.zip(&self.entries).zip(&self.roles) {
                let flags = wanted(*role, entry.flags).bits();
                bytes[position..position + 4].copy_from_slice(&flags.to_be_bytes());
            }
        })
        .await
    }

    /// Changes the directory in place. Returns whether any byte changed; the change is not durable
    /// yet.
    async fn write_directory<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<bool> {
        let Some(DirectoryLocation { offset, length, .. }) = self.location else {
            return Ok(false);
        };
        metadata.writer().check_failure()?;
        let block = (metadata.storage().capabilities().alignment.offset as usize).max(SECTOR);
        let length = (length as usize).next_multiple_of(block);
        let old = table_io::read(metadata.storage(), offset, length).await?;
        let mut new = old.clone();
        change(&mut new);
        let blocks = old.chunks(block).zip(new.chunks(block)).zip((offset..).step_by(block));
        let changed = blocks.filter(|((old, new), _)| old != new);
        let writes: Vec<TableWrite> =
            changed.map(|((_, new), offset)| TableWrite { offset, bytes: new.to_vec() }).collect();
        metadata.writer().write(&writes, Durability::None).await?;
        Ok(!writes.is_empty())
    }
}

/// The flags of a bitmap while a session lasts.
fn in_session(role: Role, flags: BitmapFlags) -> BitmapFlags {
    match role {
        Role::Lost => flags.difference(BitmapFlags::AUTO),
        Role::Live => flags.union(BitmapFlags::IN_USE),
        Role::Idle => flags,
    }
}

/// Whether an error shows that the storage of a bitmap is full or fails.
fn is_of_its_place(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Io)
}

/// The first bytes of `range`, up to a multiple of [`MAX_RECORDED`], to be recorded together.
fn first_recorded(range: ByteRange) -> ByteRange {
    range.truncate(MAX_RECORDED - range.offset() % MAX_RECORDED)
}

impl LiveBitmaps {
    /// The state for an image whose bitmaps are not loaded yet.
    pub(crate) fn new(activity: BitmapActivity) -> Self {
        Self {
            set: RwLock::default(),
            has_live: AtomicBool::new(false),
            is_forgotten: AtomicBool::new(false),
            has_begun: AtomicBool::new(false),
            is_marked: AtomicBool::new(false),
            begin_lock: Semaphore::new(1),
            is_flags_write_unknown: AtomicBool::new(false),
            vouch: OnceLock::new(),
            loss_observer: OnceLock::new(),
            losses: Mutex::default(),
            activity,
        }
    }

    /// Reads the bitmaps of an image that is open for writing, outside of a session. Changes
    /// nothing on disk. If the directory or an enabled bitmap is damaged, all bitmaps are lost with
    /// the first change.
    ///
    /// # Errors
    /// Errors of the storage; an earlier failure to write metadata.
    pub(crate) async fn load<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        // After a failed write, the old or the new header may be on disk. With the refcounts of the
        // wrong header's tables, intact bitmaps would look damaged.
        metadata.writer().check_failure()?;
        let header = metadata.lock().tables.headers.disk().clone();
        let set = match BitmapSet::read(metadata, &header, self.activity).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => BitmapSet::default(),
            set => set?,
        };
        // The bit is durable before the first change, because opening for writing flushes the file.
        self.is_marked.store(header.autoclear & LIVE_BITMAPS != 0, Ordering::Release);
        let kept = if set.location.is_some() { BITMAPS_CONSISTENT | LIVE_BITMAPS } else { 0 };
        let has_live = set.count_live() > 0;
        *self.set.write() = Arc::new(set);
        metadata.autoclear().keep_autoclear(kept);
        self.is_forgotten.store(false, Ordering::Release);
        self.has_live.store(has_live, Ordering::Release);
        Ok(())
    }

    /// Discards the loaded bitmaps, outside of a session. They are [loaded](Self::load) again
    /// before or with the next change.
    pub(crate) fn forget(&self) {
        self.has_live.store(true, Ordering::Release);
        self.is_forgotten.store(true, Ordering::Release);
        *self.set.write() = Arc::default();
    }

    fn set(&self) -> Arc<BitmapSet> {
        Arc::clone(&self.set.read())
    }

    /// Waits until no bitmap is being replaced by a coarser one or marked as lost.
    pub(crate) async fn settled(&self) {
        drop(self.begin_lock.acquire().await);
    }

    /// The enabled bitmap of this name, of an image that is open for writing.
    pub(super) fn find(&self, name: &[u8]) -> Option<Arc<LiveBitmap>> {
        self.set().find(name)
    }

    /// Whether the image has bitmaps that are consistent with the disk, or has not loaded them.
    pub(crate) fn has_any(&self) -> bool {
        self.is_forgotten.load(Ordering::Acquire) || self.set().location.is_some()
    }

    /// Maximum number of unchanged bytes that an enabled bitmap may report as changed; 0 if the
    /// header has no mark of a session. Reason for such bytes: a process died while it recorded
    /// changes.
    pub(crate) fn excess<S: Storage>(&self, metadata: &Metadata<S>) -> u64 {
        if metadata.lock().tables.headers.disk().autoclear & LIVE_BITMAPS == 0 {
            return 0;
        }
        let set = self.set();
        set.live.iter().map(|bitmap| bitmap.max_excess()).max().unwrap_or(0).min(metadata.size())
    }

    /// As [`record`](Self::record), but without I/O. `None` if a bitmap must be read or written, or
    /// if the session has not begun.
    pub(crate) fn try_record(&self, range: ByteRange) -> Option<ByteRange> {
        if !self.has_live.load(Ordering::Acquire) {
            return Some(range);
        }
        let range = first_recorded(range);
        let is_recorded = self.has_begun.load(Ordering::Acquire)
            && self.set.read().live.iter().all(|bitmap| bitmap.mark(range).is_done());
        is_recorded.then_some(range)
    }

    /// Records durably that the first bytes of `range` are about to change. Returns these bytes.
    ///
    /// A bitmap without space for the record becomes coarser. If the change cannot be recorded even
    /// then, the bitmap is lost: it lacks changes.
    ///
    /// # Errors
    /// Errors of the storage if not even the loss can be recorded; `InvalidInput` if too many
    /// bitmaps are enabled. After an error the change must not be made.
    pub(crate) async fn record<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        range: ByteRange,
    ) -> Result<ByteRange> {
        if let Some(range) = self.try_record(range) {
            return Ok(range);
        }
        loop {
            let range = first_recorded(range);
            self.begin_session(metadata).await?;
            if rare(self.record_in_all(metadata, range)).await? {
                return Ok(range);
            }
            // A bitmap was being made coarser: wait until that ends, and try again.
            self.settled().await;
        }
    }

    /// Records a change in all enabled bitmaps. Returns false if a coarser bitmap replaced one of
    /// them, so that the caller must retry.
    async fn record_in_all<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        range: ByteRange,
    ) -> Result<bool> {
        let set = self.set();
        let (lost, are_all) = (Mutex::new(Vec::new()), AtomicBool::new(true));
        let records = set.live.iter().map(async |bitmap| {
            match self.record_in(metadata, bitmap, range).await {
                Ok(is_recorded) => {
                    are_all.fetch_and(is_recorded, Ordering::Relaxed);
                    Ok(())
                }
                Err(error) if is_of_its_place(&error) => {
                    lost.lock().push((Arc::clone(bitmap), error));
                    Ok(())
                }
                Err(error) => Err(error),
            }
        });
        run_all(MAX_IN_FLIGHT, records).await?;
        let lost = lost.into_inner();
        if !lost.is_empty() {
            self.give_up(metadata, lost).await?;
        }
        Ok(are_all.into_inner())
    }

    fn tell(&self, name: &[u8], loss: BitmapLoss, why: &Error) {
        if let Some(observer) = self.loss_observer.get() {
            observer(&names::listed(name), loss, why);
        }
    }

    /// Marks these bitmaps as lost, durably.
    async fn give_up<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        lost: Vec<(Arc<LiveBitmap>, Error)>,
    ) -> Result<()> {
        let _alone = self.begin_lock.acquire().await;
        let before = self.set();
        let is_lost = |one: &Arc<_>| lost.iter().any(|(other, _)| Arc::ptr_eq(one, other));
        let Some(set) = before.without(is_lost) else { return Ok(()) };
        self.set_flags(metadata, &set, in_session).await?;
        self.has_live.store(set.count_live() > 0, Ordering::Release);
        let set = Arc::new(set);
        *self.set.write() = Arc::clone(&set);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        for (bitmap, error) in &lost {
            let Some(name) = before.name_of(bitmap) else { continue };
            self.losses.lock().push((name.to_vec(), now));
            self.tell(name, BitmapLoss::Changes, error);
        }
        Ok(())
    }

    /// Durably changes the flags on disk that differ from `wanted`. After a write that failed or
    /// was dropped the function always flushes, because flags that are read back may still be lost
    /// in a crash.
    async fn set_flags<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        set: &BitmapSet,
        wanted: impl Fn(Role, BitmapFlags) -> BitmapFlags,
    ) -> Result<()> {
        // A bitmap whose replacement was dropped lacks changes, also before it is lost in `set`.
        let without_abandoned = set.without(|bitmap| bitmap.is_abandoned());
        let set = without_abandoned.as_ref().unwrap_or(set);
        let was_unknown = self.is_flags_write_unknown.swap(true, Ordering::AcqRel);
        if was_unknown {
            metadata.writer().drained().await;
        }
        if set.write_flags(metadata, wanted).await? || was_unknown {
            metadata.sync(SyncMode::Data).await?;
        }
        self.is_flags_write_unknown.store(false, Ordering::Release);
        Ok(())
    }

    /// Calls `observer` for each bitmap that becomes coarser or is lost from now on. Later
    /// observers are ignored.
    pub(crate) fn observe_losses(&self, observer: BitmapLossObserver) {
        // If an observer is already set, it remains.
        let _ = self.loss_observer.set(observer);
    }

    /// The last time, since the Unix epoch, at which this process lost the bitmap of this name.
    pub(crate) fn lost_at(&self, name: &str) -> Option<Duration> {
        let losses = self.losses.lock();
        let of_name = losses.iter().rev().find(|(lost, _)| names::listed(lost) == name);
        of_name.map(|&(_, when)| when)
    }

    /// Begins the session, unless it has begun or no bitmap is enabled. Called before any change.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub(crate) async fn begin_session<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        if self.has_live.load(Ordering::Acquire) && !self.has_begun.load(Ordering::Acquire) {
            rare(self.begin(metadata)).await?;
            // If `begin` has found damaged bitmaps, their autoclear bits must be cleared.
            metadata.autoclear().begin_changes().await?;
        }
        Ok(())
    }

    /// Begins the session, if it has not begun meanwhile.
    async fn begin<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        let _alone = self.begin_lock.acquire().await;
        if self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        if self.is_forgotten.load(Ordering::Acquire) {
            self.load(metadata).await?;
        }
        let set = self.set();
        let count = set.count_live();
        if count == 0 {
            return Ok(());
        }
        if count > MAX_LIVE {
            let what = format!(
                "{count} bitmaps are enabled, and changes are recorded in {MAX_LIVE} at most"
            );
            return Err(Error::new(ErrorKind::InvalidInput, what)
                .on(metadata.storage().name())
                .hint("disable some of them (bitmap disable)"));
        }
        self.disable_lost(metadata).await?;
        // The voucher of a side file is also set if a process that died began the session, because
        // this process continues that session.
        let voucher = self.voucher();
        if !self.is_marked.load(Ordering::Acquire) || voucher.is_some() {
            metadata
                .rewrite_header(|header| {
                    header.autoclear |= LIVE_BITMAPS;
                    if let Some(voucher) = voucher {
                        DataFileMark::set_voucher(header, voucher);
                    }
                })
                .await?;
            self.is_marked.store(true, Ordering::Release);
        }
        self.set_flags(metadata, &set, in_session).await?;
        self.has_begun.store(true, Ordering::Release);
        Ok(())
    }

    /// Disables bitmaps that lack changes, unless the header has the mark of a session. Called
    /// before the header gets the mark, because these bitmaps must not be mistaken for bitmaps of
    /// the session.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) async fn disable_lost<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        if self.is_marked.load(Ordering::Acquire) {
            return Ok(());
        }
        let disabled = |role, flags: BitmapFlags| match role {
            Role::Lost => flags.difference(BitmapFlags::AUTO),
            Role::Live | Role::Idle => flags,
        };
        self.set_flags(metadata, &self.set(), disabled).await
    }

    /// Makes each session begin with a voucher from `vouch`.
    pub(crate) fn vouch_by(&self, vouch: fn() -> Option<Voucher>) {
        // If a function is already set, that function remains, because the process has only one
        // clock.
        let _ = self.vouch.set(vouch);
    }

    /// The voucher that this process can give at this moment.
    pub(crate) fn voucher(&self) -> Option<Voucher> {
        self.vouch.get().and_then(|vouch| vouch())
    }

    /// Writes a voucher durably while a session is active. Never writes after the session's end,
    /// when another process may have the image.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) async fn renew_voucher<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        if !self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        let _alone = self.begin_lock.acquire().await;
        let Some(voucher) = self.voucher().filter(|_| self.has_begun.load(Ordering::Acquire))
        else {
            return Ok(());
        };
        // Flushes the side file only: the guest's data need not be stable.
        metadata.write_header(|header| DataFileMark::set_voucher(header, voucher)).await
    }

    /// Records that this program changed the size of the disk and, if the image is a side file, the
    /// size of the data file. Does nothing in a session: the end of the session records it.
    ///
    /// # Errors
    /// Errors of the storage. The side file is then refused later.
    pub(crate) async fn note_resize<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        let autoclear = metadata.lock().tables.headers.disk().autoclear;
        match autoclear & LIVE_BITMAPS {
            0 => side_file::renew_mark(metadata).await,
            _ => Ok(()),
        }
    }

    /// Ends the session, also if another process began it and died, so that the bitmaps are valid
    /// for all programs. No change may be in flight. The next change begins a new session.
    ///
    /// # Errors
    /// Errors of the storage. The bitmaps then remain marked, and contain all changes.
    pub(crate) async fn end<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        let header = metadata.lock().tables.headers.disk().clone();
        // A resize of a side file leaves the mark of a session in the header. If the bitmaps could
        // not be read after the resize, they are read now.
        if self.is_forgotten.load(Ordering::Acquire) && header.autoclear & LIVE_BITMAPS != 0 {
            self.load(metadata).await?;
        }
        let set = self.set();
        if header.autoclear & LIVE_BITMAPS == 0 || set.location.is_none() {
            // Outside of a session no changes are recorded. If a bitmap is enabled, the mark keeps
            // its time, so that changes that the bitmap lacks stay detectable.
            let is_free = !self.is_forgotten.load(Ordering::Acquire) && set.count_live() == 0;
            return if is_free { side_file::renew_mark(metadata).await } else { Ok(()) };
        }
        metadata.check_writable()?;
        let abandoned = set.live.iter().filter(|bitmap| bitmap.is_abandoned());
        let abandoned = abandoned.map(|bitmap| (Arc::clone(bitmap), bitmap.abandoned()));
        self.give_up(metadata, abandoned.collect()).await?;
        let _alone = self.begin_lock.acquire().await;
        let set = self.set();
        // Writes of a change that was dropped may still be in flight.
        metadata.writer().drained().await;
        run_all(MAX_IN_FLIGHT, set.live.iter().map(|bitmap| bitmap.write_exactly(metadata)))
            .await?;
        metadata.sync(SyncMode::Data).await?;
        set.live.iter().for_each(|bitmap| bitmap.note_exact());
        self.has_begun.store(false, Ordering::Release);
        self.set_flags(metadata, &set, |role, flags| match role {
            Role::Lost => flags.difference(BitmapFlags::AUTO),
            Role::Live => flags.difference(BitmapFlags::IN_USE),
            Role::Idle => flags,
        })
        .await?;
        let changed = side_file::stable_change(metadata).await?;
        self.is_marked.store(false, Ordering::Release);
        metadata
            .rewrite_header(|header| {
                header.autoclear &= !LIVE_BITMAPS;
                if let Some(changed) = changed {
                    DataFileMark::set_changed(header, changed);
                }
            })
            .await
    }
}
