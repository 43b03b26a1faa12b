//! Bitmaps of images that crash: they have each block whose content is not what it was when they
//! were added.

use blockhouse_core::{Buffer, ByteRange, Durability, ErrorKind, Request};
use blockhouse_disk::{BitmapAction, BitmapActivity, Disk, NewBitmap};
use blockhouse_sim::{Rng, SimDisk};

/// Enabled ones, and bytes of the disk for each bit.
const ENABLED: [(&str, u64); 2] = [("fine", 512), ("coarse", 2048)];

/// Few and short extents, so that many of them come and go.
pub fn any_activity(random: &mut Rng) -> BitmapActivity {
    BitmapActivity {
        extent_size: [512, 2048, 4096][random.usize(..3)],
        max_active: [1, 2, 4, 100][random.usize(..4)],
    }
}

/// Adds bitmaps to a disk with this content. Sometimes they have recorded something already.
pub async fn add(disk: &Disk<SimDisk>, content: &[u8], random: &mut Rng) {
    let bitmaps = disk.bitmaps();
    for (name, granularity) in ENABLED {
        let granularity = Some(granularity);
        let new = NewBitmap { name: name.to_owned(), granularity, is_enabled: true };
        bitmaps.add(&new).await.expect("room");
    }
    let new = NewBitmap { name: "idle".to_owned(), granularity: None, is_enabled: false };
    bitmaps.add(&new).await.expect("room");
    if random.bool() {
        let at = random.usize(..content.len() / 512) * 512;
        let mut buffer = Buffer::new(512);
        buffer.bytes_mut().copy_from_slice(&content[at..at + 512]);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset: at as u64, from, durability }).await.expect("room");
    }
    if random.u8(..4) == 0 {
        bitmaps.change("fine", BitmapAction::Clear).await.expect("room");
    }
}

/// Whether the bitmaps of a disk that was opened again have all that is not as it was, and an idle
/// one nothing.
///
/// Whether an enabled one says that it lacks changes: it may where an operation of the image's
/// storage has failed.
///
/// # Errors
/// In words, what is missing.
pub async fn check(
    disk: &Disk<SimDisk>,
    checkpoint: &[u8],
    found: &[u8],
    has_failed: bool,
) -> std::result::Result<bool, String> {
    let mut is_any_lost = false;
    for (name, granularity) in ENABLED {
        let Some(changed) = dirty(disk, name).await? else {
            is_any_lost = true;
            continue;
        };
        for (number, part) in (0..).zip(found.chunks(granularity as usize)) {
            let at = number * granularity as usize;
            // The new part of a longer disk is recorded as a whole.
            let is_as_before = checkpoint.get(at..at + part.len()) == Some(part);
            if !is_as_before && !changed.get(number).copied().unwrap_or_default() {
                return Err(format!("'{name}' lacks the change of {granularity} bytes at {at}"));
            }
        }
    }
    match dirty(disk, "idle").await? {
        Some(_) if is_any_lost && !has_failed => {
            Err("a bitmap lacks changes, and nothing has failed".to_owned())
        }
        Some(bits) if !bits.contains(&true) => Ok(is_any_lost),
        Some(_) => Err("a disabled bitmap recorded something".to_owned()),
        None => Err("a disabled bitmap lacks changes".to_owned()),
    }
}

/// The bits of a bitmap; `None` where it says that it lacks changes.
async fn dirty(disk: &Disk<SimDisk>, name: &str) -> std::result::Result<Option<Vec<bool>>, String> {
    let failed = |error| format!("the bitmap '{name}': {error}");
    let listed = disk.bitmaps().list().await.map_err(failed)?;
    let bitmap = listed.iter().find(|bitmap| bitmap.name == name).ok_or("a bitmap is gone")?;
    let all = ByteRange::between(0, disk.size());
    let extents = match disk.bitmaps().extents(name, all, usize::MAX).await {
        Err(error) if error.kind() == ErrorKind::LacksChanges => return Ok(None),
        extents => extents.map_err(failed)?,
    };
    let mut bits = Vec::new();
    let mut end = 0;
    for extent in extents {
        end += extent.length;
        bits.resize(end.div_ceil(bitmap.granularity) as usize, extent.is_dirty);
    }
    if end == disk.size() { Ok(Some(bits)) } else { Err(format!("'{name}' ends at {end}")) }
}
