//! The changes of a disk according to a persistent bitmap of its image or of an NBD server.

use std::path::Path;

use blockhouse_core::{ByteRange, Result, rare};
use blockhouse_storage::{Location, NbdStorage};
use futures_util::future::LocalBoxFuture;

use blockhouse_disk::{DirtyMap, ImageDisk};

/// Maximum memory for the changes, in bytes. A larger bitmap gets a coarser granularity.
const MAX_BYTES: u64 = 64 << 20;
/// The finest granularity, in bytes, in which dirty extents of another server are recorded.
const MIN_GRANULARITY: u64 = 4096;

/// The changes of `disk`, which was opened as `name`, since the bitmap was created. The bitmap is
/// in the image or its side file, or the server offers it as `qemu:dirty-bitmap:BITMAP`. The disk
/// must not change during the call.
///
/// # Errors
/// There is no such bitmap, it lacks changes, or the server does not offer it.
pub fn changed_since<'a>(
    name: &'a Path,
    disk: &'a ImageDisk,
    bitmap: &'a str,
) -> LocalBoxFuture<'a, Result<DirtyMap>> {
    rare(async move {
        let least = DirtyMap::min_granularity(disk.size(), MAX_BYTES);
        let Location::Nbd { uri, reconnect } = Location::of(name)? else {
            return disk.bitmaps().copy(bitmap, least).await;
        };
        if disk.image().has_side_file() {
            return disk.bitmaps().copy(bitmap, least).await;
        }
        let told = NbdStorage::connect_for_bitmap(uri, reconnect, bitmap).await?;
        let map = DirtyMap::new(disk.size(), least.max(MIN_GRANULARITY))?;
        let mut rest = ByteRange::between(0, disk.size());
        while !rest.is_empty() {
            let (is_dirty, length) = told.dirty_extent(rest).await?;
            if is_dirty {
                map.mark(rest.truncate(length));
            }
            rest = rest.skip(length);
        }
        Ok(map)
    })
}
