//! Changes of the header on disk, and flushes.
//!
//! 1. Before the first change of an image its autoclear bits are cleared, durably, except the bits
//!    of features that this program keeps consistent (bitmaps, for example). If a redo log is
//!    attached, the same write sets the session bits. Other programs clear the session bits before
//!    they change the image. Another process with a redo log sets different session bits. So a
//!    replay detects changes by both.
//! 2. If an image that is open for writing contradicts itself, it is marked as corrupt, durably,
//!    and not changed again while it is open.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_lock::Semaphore;
use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode, rare};

use crate::qcow2::layout::bitmap_directory::{BITMAPS_CONSISTENT, LIVE_BITMAPS};
use crate::qcow2::layout::header::{Header, Incompatible, SESSION, SESSION_BITS};
use crate::qcow2::layout::options::Access;
use crate::qcow2::tables::RedoLog;

use super::Metadata;

/// The state of the autoclear bits before the first change.
pub(super) struct AutoclearState {
    /// Whether the bits must be changed before the first change.
    is_due: AtomicBool,
    /// The bits that remain set, because this program keeps their features consistent: the bits of
    /// bitmaps.
    kept: AtomicU64,
    lock: Semaphore,
}

impl AutoclearState {
    pub(super) fn new(header: &Header) -> Self {
        let is_due = header.autoclear != header.preserved_autoclear() & header.autoclear;
        Self { is_due: AtomicBool::new(is_due), kept: AtomicU64::new(0), lock: Semaphore::new(1) }
    }
}

/// The autoclear bits of an image that is being changed: the preserved bits and the `kept` bits if
/// they are set, and the bits of the session.
fn autoclear_bits(header: &Header, kept: u64, session: u64) -> u64 {
    header.autoclear & (header.preserved_autoclear() | kept) | session
}

/// Keeps the autoclear bits correct when changes begin.
pub(crate) struct Autoclear<'a, S: Storage>(&'a Metadata<S>);

impl<S: Storage> Autoclear<'_, S> {
    /// Whether [`begin_changes`](Self::begin_changes) has anything to do.
    pub(crate) fn needs_begin_changes(&self) -> bool {
        self.0.autoclear.is_due.load(Ordering::Acquire)
    }

    /// Durably clears or sets the autoclear bits so that they are correct. Called before the first
    /// change.
    pub(crate) async fn begin_changes(&self) -> Result<()> {
        if self.needs_begin_changes() {
            let _alone = self.0.autoclear.lock.acquire().await;
            if !self.needs_begin_changes() {
                // Another change has begun first.
                return Ok(());
            }
            let session = self.0.state.lock().tables.redo.session();
            let kept = self.kept_autoclear();
            self.0
                .rewrite_header(|header| header.autoclear = autoclear_bits(header, kept, session))
                .await?;
            // The kept bits or the session may have changed during the write.
            self.look_at_autoclear();
        }
        Ok(())
    }

    /// Called before a change that leaves the guest's data as it is. Keeps the bits of bitmaps,
    /// which stay consistent with the disk. Makes the other autoclear bits correct, durably.
    pub(crate) async fn begin_changes_beside_guest_data(&self) -> Result<()> {
        if !self.needs_begin_changes() {
            return Ok(());
        }
        let _alone = self.0.autoclear.lock.acquire().await;
        let (wanted, is_on_disk) = {
            let state = self.0.state.lock();
            let headers = &state.tables.headers;
            let kept = BITMAPS_CONSISTENT | LIVE_BITMAPS;
            let wanted = autoclear_bits(headers.disk(), kept, state.tables.redo.session());
            // An earlier write of the bits may have failed.
            (wanted, headers.disk().autoclear == wanted && !headers.is_write_unknown())
        };
        if !is_on_disk {
            self.0.rewrite_header(|header| header.autoclear = wanted).await?;
        }
        Ok(())
    }

    /// Called before a change if it is not known yet whether a redo log will be replayed. The
    /// session bits stay as they are.
    pub(crate) async fn begin_changes_before_replay(&self) -> Result<()> {
        let kept = self.kept_autoclear() | SESSION_BITS;
        self.0
            .rewrite_header(|header| {
                header.autoclear &= header.preserved_autoclear() | kept;
            })
            .await
    }

    /// Attaches an empty redo log: later changes are recorded in the log.
    pub(crate) fn attach_redo_log(&self, log: RedoLog) {
        self.0.state.lock().tables.redo = log;
        self.look_at_autoclear();
    }

    /// Keeps these autoclear bits from now on: every change keeps their features consistent.
    pub(crate) fn keep_autoclear(&self, kept: u64) {
        self.0.autoclear.kept.store(kept, Ordering::Release);
        self.look_at_autoclear();
    }

    fn kept_autoclear(&self) -> u64 {
        self.0.autoclear.kept.load(Ordering::Acquire)
    }

    /// Determines whether the autoclear bits must be updated before the first change of the image.
    fn look_at_autoclear(&self) {
        let state = self.0.state.lock();
        // Read under the lock, so that the last call sees the last change.
        let kept = self.kept_autoclear();
        let headers = &state.tables.headers;
        let wanted = autoclear_bits(headers.disk(), kept, state.tables.redo.session());
        // If a write of the bits is in flight or failed, they may not be on disk.
        let is_due = headers.disk().autoclear != wanted || headers.is_write_unknown();
        self.0.autoclear.is_due.store(is_due, Ordering::Release);
    }
}

impl<S: Storage> Metadata<S> {
    /// Access to the autoclear bits, which are corrected before the first change.
    pub(crate) fn autoclear(&self) -> Autoclear<'_, S> {
        Autoclear(self)
    }

    /// Changes the header on disk, durably.
    pub(crate) async fn rewrite_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        self.change_header(change).await?;
        self.sync(SyncMode::Data).await
    }

    /// Replaces the header on disk, durably, by the header of a transaction. After any error, even
    /// ENOSPC, it is unknown which header is on disk, so further writes fail.
    pub(crate) async fn switch_header(&self, mut new: Header) -> Result<()> {
        let switched = self.rewrite_header(|header| {
            // A read may have found the image corrupt since the transaction began.
            new.incompatible |= header.incompatible & Incompatible::CORRUPT;
            *header = new;
        });
        switched.await.inspect_err(|error| self.writer.fail(error))
    }

    /// As [`rewrite_header`](Self::rewrite_header), without a flush of the data: for fields that do
    /// not depend on the data.
    pub(crate) async fn write_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        self.writer.check_failure()?;
        self.change_header(change).await?;
        self.writer.flush_image(SyncMode::Data).await
    }

    /// Changes the header on disk. The change is durable with the next flush.
    pub(super) async fn change_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let patch = |bytes: &mut [u8]| self.state.lock().tables.headers.begin_write(change, bytes);
        let number = self.writer.write_header(patch).await?;
        self.state.lock().tables.headers.end_write(number);
        Ok(())
    }

    /// Flushes the data file, if there is one, and the image.
    pub(crate) async fn sync(&self, sync: SyncMode) -> Result<()> {
        self.writer.check_failure()?;
        self.sync_despite_failure(sync).await
    }

    async fn sync_despite_failure(&self, sync: SyncMode) -> Result<()> {
        let covered = self.state.lock().tables.headers.last_ended();
        self.writer.flush(sync).await?;
        self.state.lock().tables.headers.set_durable(covered);
        Ok(())
    }

    pub(super) fn is_marked_dirty(&self) -> bool {
        self.state.lock().tables.headers.disk().incompatible.contains(Incompatible::DIRTY)
    }

    /// Flushes an image whose changes are all written, for another process that opens it. The
    /// session bits remain set, because this process may continue, and the other process keeps a
    /// redo log too.
    pub(crate) async fn settle(&self) -> Result<()> {
        self.sync(SyncMode::Data).await?;
        self.mark_clean(0).await
    }

    /// Flushes an image whose changes are all written, and marks it as clean.
    pub(crate) async fn finish(&self) -> Result<()> {
        self.sync(SyncMode::Data).await?;
        let ended = if self.state.lock().tables.redo.is_attached() { SESSION_BITS } else { 0 };
        self.mark_clean(ended).await
    }

    /// Durably clears the dirty bit and these autoclear bits, if the image is open for writing.
    async fn mark_clean(&self, ended: u64) -> Result<()> {
        let is_session = self.state.lock().tables.headers.disk().autoclear & ended & SESSION != 0;
        if self.access == Access::ReadOnly || !(is_session || self.is_marked_dirty()) {
            return Ok(());
        }
        self.rewrite_header(|header| {
            header.incompatible.remove(Incompatible::DIRTY);
            header.autoclear &= !ended;
        })
        .await
    }

    /// Returns the outcome of a step. If the outcome is a `Corrupt` error, and the image is open
    /// for writing, the image is marked as corrupt on disk and not changed again while it is open.
    pub(crate) async fn marking<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome
            && error.kind() == ErrorKind::Corrupt
            && self.access == Access::ReadWrite
        {
            self.writer.record(error);
            if self.geometry.version >= 3 {
                // The caller returns the first error.
                let _ = rare(self.mark_as_corrupt()).await;
            }
        }
        outcome
    }

    /// Durably marks the image as corrupt, even if writes of tables failed before. If the storage
    /// fails a flush, the error of the flush is returned.
    async fn mark_as_corrupt(&self) -> Result<()> {
        if self.state.lock().tables.headers.is_marked_durably(Incompatible::CORRUPT) {
            return Ok(());
        }
        self.change_header(|header| header.incompatible.insert(Incompatible::CORRUPT)).await?;
        self.sync_despite_failure(SyncMode::Data).await
    }

    /// Fails for an image that is open for reading only.
    pub(crate) fn check_writable(&self) -> Result<()> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::ReadOnly => {
                let what = "the image is open for reading only";
                Err(Error::new(ErrorKind::ReadOnly, what).on(self.storage().name()))
            }
        }
    }

    /// Refuses changes of an image whose tables were found to be corrupt.
    pub(crate) fn check_intact(&self) -> Result<()> {
        match self.writer.failure() {
            Some(error) if error.kind() == ErrorKind::Corrupt => {
                let hint = "the image is not changed from here on: repair it (check --repair all)";
                Err(error.duplicate().hint(hint))
            }
            _ => Ok(()),
        }
    }
}
