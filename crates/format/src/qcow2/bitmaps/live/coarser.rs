//! Records a change when there is no space for its bits.
//!
//! The whole bitmap becomes coarser, so that it fits into its allocated clusters and never needs
//! more. Each step is durable before the next one:
//!
//! 1. Tasks that record changes in the bitmap wait (`tracker/coarser`).
//! 2. The bitmap is marked as lacking changes. After a crash before step 4 the mark remains.
//! 3. The bits, the table and the directory entry of the new bitmap are written over those of the
//!    old one.
//! 4. The new bitmap is marked as recording changes, and replaces the old bitmap.
//!
//! If a bitmap has no cluster, or the coarser bitmap would exceed a limit, the disk ranges of the
//! clusters that the change lacks are marked as changed instead (`LiveBitmap::fill_lacking`).
//! Neither way needs space.

use std::sync::Arc;

use blockhouse_core::{ByteRange, Durability, Error, ErrorKind, Result, Storage, SyncMode};

use crate::qcow2::layout::bitmap_directory::{self, BitmapEntry};
use crate::qcow2::writeback::Metadata;

use super::{BitmapLoss, BitmapSet, LiveBitmap, LiveBitmaps, Role, in_session};

impl BitmapSet {
    /// The index of an enabled bitmap in `entries`, and in `live`.
    fn index_of(&self, bitmap: &Arc<LiveBitmap>) -> Option<(usize, usize)> {
        let nth = self.live.iter().position(|other| Arc::ptr_eq(other, bitmap))?;
        let mut live = (0..).zip(&self.roles).filter(|(_, role)| **role == Role::Live);
        live.nth(nth).map(|(index, _)| (index, nth))
    }

    /// Writes the fields of an entry that have the granularity and the size of its bitmap's table.
    /// Durable with the next flush.
    async fn write_entry<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        index: usize,
        entry: &BitmapEntry,
    ) -> Result<()> {
        let written = self.write_directory(metadata, |bytes| {
            if let Some(flags) = bitmap_directory::flags_positions(&self.entries).nth(index) {
                entry.put_size(bytes, flags);
            }
        });
        written.await.map(drop)
    }
}

impl LiveBitmaps {
    /// Records a change in a bitmap. Returns `false` if another bitmap replaces this one: the
    /// caller then uses the other bitmap.
    ///
    /// # Errors
    /// Errors of the storage. The caller must not make the change then.
    pub(super) async fn record_in<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        bitmap: &Arc<LiveBitmap>,
        range: ByteRange,
    ) -> Result<bool> {
        let why = match bitmap.record(metadata, range).await {
            Err(error) if error.kind() == ErrorKind::NoSpace && bitmap.lacks_room(range) => error,
            outcome => return outcome,
        };
        if self.coarsen(metadata, bitmap, &why).await? {
            return Ok(false);
        }
        {
            // No other task makes the bitmap coarser meanwhile: its table has one writer.
            let _alone = self.begin_lock.acquire().await;
            if bitmap.fill_lacking(metadata, range).await? == Some(true) {
                self.tell_coarser(bitmap, &why);
            }
        }
        bitmap.record(metadata, range).await
    }

    fn tell_coarser(&self, bitmap: &Arc<LiveBitmap>, why: &Error) {
        if let Some(name) = self.set().name_of(bitmap) {
            self.tell(name, BitmapLoss::Precision, why);
        }
    }

    /// Makes a whole bitmap coarser, if it has a cluster and the coarser bitmap exceeds no limit.
    /// Returns whether the bitmap is no longer in use, because it was replaced or lost.
    ///
    /// # Errors
    /// Errors of the storage. If anything was already changed on disk, the bitmap then lacks
    /// changes.
    async fn coarsen<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        bitmap: &Arc<LiveBitmap>,
        why: &Error,
    ) -> Result<bool> {
        let _alone = self.begin_lock.acquire().await;
        let before = self.set();
        let Some((index, nth)) = before.index_of(bitmap) else { return Ok(true) };
        let Some(mut superseded) = bitmap.supersede(metadata).await else {
            return Err(bitmap.abandoned());
        };
        let entry = &before.entries[index];
        let Some(coarser) = superseded.coarser(metadata, entry, metadata.size()).await? else {
            return Ok(false);
        };
        let Some(lost) = before.without(|other| Arc::ptr_eq(other, bitmap)) else {
            return Ok(false);
        };
        superseded.begin_changes();
        self.set_flags(metadata, &lost, in_session).await?;
        metadata.writer().write(&coarser.writes, Durability::None).await?;
        before.write_entry(metadata, index, &coarser.entry).await?;
        metadata.sync(SyncMode::Data).await?;
        let block = u64::from(metadata.storage().capabilities().alignment.offset);
        let geometry = metadata.geometry();
        let mut after = BitmapSet::clone(&before);
        let live = LiveBitmap::new(
            &coarser.entry,
            coarser.table,
            metadata.size(),
            geometry,
            (self.activity, block),
        );
        after.live[nth] = Arc::new(live);
        after.entries[index] = coarser.entry;
        self.set_flags(metadata, &after, in_session).await?;
        let after = Arc::new(after);
        *self.set.write() = Arc::clone(&after);
        superseded.finish();
        if after.live[nth].note_coarser() && bitmap.note_coarser() {
            self.tell_coarser(&after.live[nth], why);
        }
        let mut state = metadata.lock();
        let state = &mut *state;
        for range in coarser.free {
            state.allocator.free_unlinked(&mut state.tables, geometry.clusters_of(range));
        }
        Ok(true)
    }
}
