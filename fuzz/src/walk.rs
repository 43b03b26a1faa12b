//! Going through a disk as a reader does, whatever its image is.

use blockhouse_core::{Buffer, ByteRange, Request, Storage};
use blockhouse_disk::{BlockStatusCache, Disk};

use crate::assert_tells_the_place;

/// How much of a disk is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Extents, from the first on.
    pub extents: usize,
    /// Bytes that are read of each.
    pub read: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { extents: 1000, read: 64 << 10 }
    }
}

/// How many extents of a bitmap are looked at.
const MAX_EXTENTS: usize = 1000;
/// How many bitmaps are read.
const MAX_BITMAPS: usize = 4;

/// Reads the beginning of each extent.
///
/// # Panics
/// When an extent has no length or too many bytes, or an error does not tell the place.
pub async fn read_extents<S: Storage>(disk: &Disk<S>, limits: Limits) {
    let mut rest = ByteRange::between(0, disk.size());
    let mut cache = BlockStatusCache::default();
    for _ in 0..limits.extents {
        if rest.is_empty() {
            break;
        }
        let length = match disk.block_status(rest, &mut cache).await {
            Ok((_, length)) => length,
            Err(error) => {
                assert_tells_the_place(&error);
                disk.image().cluster_size().unwrap_or(rest.length()).min(rest.length())
            }
        };
        assert!((1..=rest.length()).contains(&length), "an extent of {length} bytes");
        read(disk, rest.truncate(length.min(limits.read))).await;
        rest = rest.skip(length);
    }
}

/// Reads the last bytes of the disk, which the walk over the first extents may not reach.
///
/// # Panics
/// When an error does not tell the place.
pub async fn read_last_bytes<S: Storage>(disk: &Disk<S>, limits: Limits) {
    let start = disk.size().saturating_sub(limits.read);
    read(disk, ByteRange::between(start, disk.size())).await;
}

async fn read<S: Storage>(disk: &Disk<S>, range: ByteRange) {
    let mut buffer = Buffer::new(range.length() as usize);
    let read = disk.submit(Request::Read { offset: range.offset(), into: buffer.lend() });
    if let Err(error) = read.await {
        assert_tells_the_place(&error);
    }
}

/// Reads what the bitmaps of a disk say, whatever its image is.
///
/// # Panics
/// When extents are not those of the disk, or an error does not tell the place.
pub async fn read_bitmaps<S: Storage>(disk: &Disk<S>) {
    let listed = match disk.bitmaps().list().await {
        Ok(listed) => listed,
        Err(error) => return assert_tells_the_place(&error),
    };
    let all = ByteRange::between(0, disk.size());
    for bitmap in listed.iter().take(MAX_BITMAPS) {
        match disk.bitmaps().extents(&bitmap.name, all, MAX_EXTENTS).await {
            Ok(extents) => {
                let length: u64 = extents.iter().map(|extent| extent.length).sum();
                assert!(length == all.length() || extents.len() >= MAX_EXTENTS);
                assert!(length <= all.length() && extents.iter().all(|extent| extent.length > 0));
            }
            Err(error) => assert_tells_the_place(&error),
        }
    }
}
