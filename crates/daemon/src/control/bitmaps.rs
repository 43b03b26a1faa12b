//! The methods of bitmaps.

use blockhouse_disk::{BitmapAction, NewBitmap};
use serde_json::Value;

use super::bitmap_methods::{BitmapAddParams, BitmapInfo, BitmapMergeParams, BitmapParams};
use super::methods::{DiskParams, PauseResult};
use super::outcome::{Outcome, params, result, unknown};
use super::pause_log::log;
use crate::running::recording::ensure_side_file;
use crate::running::recording::remove_empty_side_file;
use crate::running::transactions::{PartChange, transact};
use crate::running::{Running, RunningDisk};

/// Executes a method `bitmap.*`.
pub(super) async fn call(running: &Running, method: &str, given: Value) -> Outcome {
    match method {
        "bitmap.list" => {
            let DiskParams { disk } = params(given)?;
            let claimed = running.claim_disk(&disk).await?;
            result(list(running, &claimed.disk).await?)
        }
        "bitmap.add" => {
            let BitmapAddParams { disk, name, granularity, disabled, transient } = params(given)?;
            let claimed = running.claim_disk(&disk).await?;
            let new = NewBitmap { name, granularity, is_enabled: !disabled };
            let bitmaps = claimed.disk.disk.bitmaps();
            let before =
                if transient { None } else { ensure_side_file(running, &claimed.disk).await? };
            let added =
                if transient { bitmaps.add_transient(&new).await } else { bitmaps.add(&new).await };
            if added.is_err() && before.is_some() {
                remove_empty_side_file(running, &claimed.disk).await;
            }
            let mut pause = added.map_err(anyhow::Error::from)?;
            pause.length += before.unwrap_or_default();
            let what = format!("added the bitmap {:?}", new.name);
            result(PauseResult { pause_us: log(&claimed.disk, pause, &what) })
        }
        "bitmap.remove" => change(running, params(given)?, BitmapAction::Remove).await,
        "bitmap.clear" => change(running, params(given)?, BitmapAction::Clear).await,
        "bitmap.enable" => change(running, params(given)?, BitmapAction::Enable).await,
        "bitmap.disable" => change(running, params(given)?, BitmapAction::Disable).await,
        "bitmap.merge" => {
            let BitmapMergeParams { disk, name, source, source_disk } = params(given)?;
            if let Some(from) = source_disk.filter(|other| *other != disk) {
                let change = PartChange::MergeFrom { name, disk: from, source };
                let pause = transact(running, vec![(disk, change)], Vec::new()).await?;
                return result(PauseResult { pause_us: pause.as_micros() as u64 });
            }
            let claimed = running.claim_disk(&disk).await?;
            let disk = &claimed.disk.disk;
            let merged = disk.bitmaps().merge(&name, disk, &source).await;
            let pause = merged.map_err(anyhow::Error::from)?;
            let what = format!("merged the bitmap {source:?} into {name:?}");
            result(PauseResult { pause_us: log(&claimed.disk, pause, &what) })
        }
        _ => Err(unknown(method)),
    }
}

async fn list(running: &Running, disk: &RunningDisk) -> anyhow::Result<Vec<BitmapInfo>> {
    let bitmaps = disk.disk.bitmaps();
    let mut infos = Vec::new();
    for bitmap in bitmaps.list().await? {
        let is_busy = running.offers_bitmap(disk, &bitmap.name);
        let count = if bitmap.is_inconsistent {
            None
        } else {
            Some(bitmaps.dirty_bytes(&bitmap.name).await?)
        };
        infos.push(BitmapInfo::new(bitmap, is_busy, count));
    }
    Ok(infos)
}

async fn change(
    running: &Running,
    BitmapParams { disk, name }: BitmapParams,
    action: BitmapAction,
) -> Outcome {
    let claimed = running.claim_disk(&disk).await?;
    if action == BitmapAction::Remove {
        running.check_bitmap_unused(&claimed.disk, &name)?;
    }
    let changed = claimed.disk.disk.bitmaps().change(&name, action).await;
    let pause = changed.map_err(anyhow::Error::from)?;
    let done = match action {
        BitmapAction::Remove => "removed",
        BitmapAction::Clear => "cleared",
        BitmapAction::Enable => "enabled",
        BitmapAction::Disable => "disabled",
    };
    result(PauseResult {
        pause_us: log(&claimed.disk, pause, &format!("{done} the bitmap {name:?}")),
    })
}
