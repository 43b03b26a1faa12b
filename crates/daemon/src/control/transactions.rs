//! What the method of transactions does.

use blockhouse_disk::{BitmapAction, BitmapChange, NewBitmap};

use super::bitmap_methods::{BitmapAddParams, BitmapMergeParams, BitmapParams};
use super::methods::PauseResult;
use super::outcome::{Outcome, invalid, result};
use super::transaction_methods::{BitmapChangeParams, TransactionParams};
use crate::running::Running;

/// Changes bitmaps at one moment.
pub(super) async fn transact(running: &Running, given: TransactionParams) -> Outcome {
    let TransactionParams { bitmaps } = given;
    if bitmaps.is_empty() {
        return Err(invalid("a transaction without a change; name one".into()));
    }
    let pause = running.change_bitmaps(bitmaps.into_iter().map(change).collect()).await?;
    result(PauseResult { pause_us: pause.as_micros() as u64 })
}

/// The disk, and what is changed of it.
fn change(given: BitmapChangeParams) -> (String, BitmapChange) {
    let changed = |BitmapParams { disk, name }, action| (disk, BitmapChange::Change { name, action });
    match given {
        BitmapChangeParams::Add(BitmapAddParams { disk, name, granularity, disabled }) => {
            (disk, BitmapChange::Add(NewBitmap { name, granularity, is_enabled: !disabled }))
        }
        BitmapChangeParams::Remove(bitmap) => changed(bitmap, BitmapAction::Remove),
        BitmapChangeParams::Clear(bitmap) => changed(bitmap, BitmapAction::Clear),
        BitmapChangeParams::Enable(bitmap) => changed(bitmap, BitmapAction::Enable),
        BitmapChangeParams::Disable(bitmap) => changed(bitmap, BitmapAction::Disable),
        BitmapChangeParams::Merge(BitmapMergeParams { disk, name, source }) => {
            (disk, BitmapChange::Merge { name, source })
        }
    }
}
