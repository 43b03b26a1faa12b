//! Transactions: changes of bitmaps of one or several disks at one moment.
//!
//! Guarantee: all changes are made, durably, or none is, unless a storage fails at the last write of one of several images. Guests' changes
//! are held off meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockhouse_disk::{BitmapAction, BitmapChange, change_bitmaps};
use blockhouse_engine::timeout;
use futures_util::future::try_join_all;

use super::backups::MAX_FREEZE_TIME;
use super::{Running, RunningDisk};
use crate::claims::Name;

/// A disk, and what is changed of its bitmaps, in this order.
type DiskChanges = (Arc<RunningDisk>, Vec<BitmapChange>);

impl Running {
    /// Changes bitmaps of disks, all at one moment; for how long guests' changes were held off.
    ///
    /// # Errors
    /// There is no such disk or bitmap, one is there already or is offered to clients, a disk has no bitmaps that can be changed, or is too
    /// busy. Nothing has changed then.
    pub(crate) async fn change_bitmaps(
        &self,
        changes: Vec<(String, BitmapChange)>,
    ) -> Result<Duration> {
        let names = changes.iter().map(|(disk, _)| Name::Disk(disk.clone()));
        let _claim = self.claims.claim(names.collect::<Vec<_>>()).await;
        let parts = self.by_disk(changes)?;
        let mut recorded = Vec::new();
        let outcome = self.change_claimed(&parts, &mut recorded).await;
        if outcome.is_err() {
            for disk in recorded {
                self.take_room_back(disk).await;
            }
        }
        outcome
    }

    fn by_disk(&self, changes: Vec<(String, BitmapChange)>) -> Result<Vec<DiskChanges>> {
        let mut parts: Vec<DiskChanges> = Vec::new();
        for (name, change) in changes {
            if let BitmapChange::Change { name: bitmap, action: BitmapAction::Remove } = &change {
                self.disk(&name)?.check_bitmap_unused(bitmap)?;
            }
            match parts.iter_mut().find(|(disk, _)| disk.name() == name) {
                Some((_, changes)) => changes.push(change),
                None => parts.push((self.disk(&name)?, vec![change])),
            }
        }
        Ok(parts)
    }

    /// `recorded` gets the raw disks that have got a place for bitmaps.
    async fn change_claimed<'a>(
        &self,
        parts: &'a [DiskChanges],
        recorded: &mut Vec<&'a RunningDisk>,
    ) -> Result<Duration> {
        for (disk, changes) in parts {
            let is_added = changes.iter().any(|change| matches!(change, BitmapChange::Add(_)));
            if is_added && self.make_room_for_bitmaps(disk).await?.is_some() {
                recorded.push(disk);
            }
            disk.disk.bitmaps().prepare().await?;
        }
        let began = Instant::now();
        let quiescing = try_join_all(parts.iter().map(|(disk, _)| disk.disk.quiesced()));
        let quiesced = timeout(MAX_FREEZE_TIME, quiescing).await.with_context(|| {
            format!("the disks do not come to rest in {MAX_FREEZE_TIME:?}: try again")
        })??;
        let all: Vec<_> =
            quiesced.iter().zip(parts).map(|(disk, (_, changes))| (disk, &changes[..])).collect();
        change_bitmaps(&all).await?;
        drop(quiesced);
        let pause = began.elapsed();
        for (disk, changes) in parts {
            tracing::info!(
                "{}: {} changes of bitmaps; changes were held off for {pause:?}",
                disk.name(),
                changes.len()
            );
        }
        Ok(pause)
    }
}
