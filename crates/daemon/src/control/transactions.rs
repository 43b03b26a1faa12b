//! The method `disk.transaction`.

use std::num::NonZeroU64;

use blockhouse_config::text_fields::check_absolute;
use blockhouse_disk::{BitmapAction, BitmapChange, NewBitmap};
use blockhouse_jobs::CopyMode;

use super::bitmap_methods::{BitmapAddParams, BitmapMergeParams, BitmapParams};
use super::methods::PauseResult;
use super::outcome::{Outcome, invalid, result};
use super::rpc::Failure;
use super::transaction_methods::{BackupPartParams, BitmapChangeParams, TransactionParams};
use crate::jobs::JobSetup;
use crate::running::Running;
use crate::running::transactions::{self, BackupKind, BackupPart, PartChange};

/// Changes bitmaps, and begins backups, at one moment.
pub(super) async fn transact(running: &Running, given: TransactionParams) -> Outcome {
    let TransactionParams { bitmaps, backups } = given;
    if bitmaps.is_empty() && backups.is_empty() {
        return Err(invalid("a transaction without a change; name one".into()));
    }
    let backups = backups.into_iter().map(backup).collect::<Result<_, _>>()?;
    let pause =
        transactions::transact(running, bitmaps.into_iter().map(change).collect(), backups).await?;
    result(PauseResult { pause_us: pause.as_micros() as u64 })
}

fn backup(given: BackupPartParams) -> Result<BackupPart, Failure> {
    let BackupPartParams { disk, name, target_disk, bitmap, sync_bitmap, scratch, speed } = given;
    if sync_bitmap && bitmap.is_none() {
        return Err(invalid("sync-bitmap needs bitmap".into()));
    }
    let speed = speed.and_then(NonZeroU64::new);
    let kind = match target_disk {
        Some(_) if scratch.is_some() => {
            return Err(invalid(
                "a job has its scratch file beside the image: leave scratch out".into(),
            ));
        }
        Some(target) => BackupKind::Copied { target, bitmap, is_synced: sync_bitmap },
        None if bitmap.is_some() || speed.is_some() => {
            return Err(invalid(
                "only a job has a bitmap and a speed: name its target-disk".into(),
            ));
        }
        None => {
            scratch.iter().try_for_each(|path| check_absolute(path)).map_err(invalid)?;
            BackupKind::Served { scratch }
        }
    };
    let job = JobSetup { name: Some(name), disk, mode: CopyMode::Background, speed };
    Ok(BackupPart { job, kind })
}

/// The name of the disk, and the change of its bitmaps.
fn change(given: BitmapChangeParams) -> (String, PartChange) {
    let own = |(disk, change)| (disk, PartChange::Own(change));
    let changed =
        |BitmapParams { disk, name }, action| own((disk, BitmapChange::Change { name, action }));
    match given {
        BitmapChangeParams::Add(BitmapAddParams {
            disk,
            name,
            granularity,
            disabled,
            transient,
        }) => {
            let new = NewBitmap { name, granularity, is_enabled: !disabled };
            if transient {
                own((disk, BitmapChange::AddTransient(new)))
            } else {
                own((disk, BitmapChange::Add(new)))
            }
        }
        BitmapChangeParams::Remove(bitmap) => changed(bitmap, BitmapAction::Remove),
        BitmapChangeParams::Clear(bitmap) => changed(bitmap, BitmapAction::Clear),
        BitmapChangeParams::Enable(bitmap) => changed(bitmap, BitmapAction::Enable),
        BitmapChangeParams::Disable(bitmap) => changed(bitmap, BitmapAction::Disable),
        BitmapChangeParams::Merge(BitmapMergeParams { disk, name, source, source_disk }) => {
            match source_disk.filter(|other| *other != disk) {
                Some(from) => (disk, PartChange::MergeFrom { name, disk: from, source }),
                None => own((disk, BitmapChange::Merge { name, source })),
            }
        }
    }
}
