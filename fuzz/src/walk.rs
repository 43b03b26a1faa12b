//! Going through a disk as a reader does, whatever its image is.

use blockhouse_core::{Buffer, ByteRange, Fua, Request, Storage};
use blockhouse_disk::{Access, BlockStatusCache, Disk, ImageFormat, Options};
use blockhouse_format::ForeignKind;
use blockhouse_sim::Sim;

use crate::memory::Memory;
use crate::{assert_tells_the_place, in_bounded_memory};

/// How many extents are looked at, and how much of each is read.
const MAX_EXTENTS: usize = 1000;
const MAX_READ: u64 = 64 << 10;
/// How many bitmaps are read.
const MAX_BITMAPS: usize = 4;

/// Reads the beginning of each extent.
///
/// # Panics
/// When an extent has no length or too many bytes, or an error does not tell the place.
pub async fn read_extents(disk: &Disk<Memory>) {
    let mut rest = ByteRange::between(0, disk.size());
    let mut cache = BlockStatusCache::default();
    for _ in 0..MAX_EXTENTS {
        if rest.is_empty() {
            break;
        }
        let length = match disk.block_status(rest, &mut cache).await {
            Ok((_, length)) => length,
            Err(error) => {
                assert_tells_the_place(&error);
                disk.cluster_size().unwrap_or(rest.length()).min(rest.length())
            }
        };
        assert!((1..=rest.length()).contains(&length), "an extent of {length} bytes");
        let mut buffer = Buffer::new(length.min(MAX_READ) as usize);
        let read = disk.submit(Request::Read { offset: rest.offset(), into: buffer.lend() });
        if let Err(error) = read.await {
            assert_tells_the_place(&error);
        }
        rest = rest.skip(length);
    }
}

/// Reads what the bitmaps of a disk say, whatever its image is.
///
/// # Panics
/// When extents are not those of the disk, or an error does not tell the place.
pub async fn read_bitmaps(disk: &Disk<Memory>) {
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

/// Any bytes as an image of another program: it is opened, read and checked, or refused with an error that names the
/// place. Nothing is written.
///
/// # Panics
/// When that is not so.
pub fn look_at_foreign(kind: ForeignKind, data: &[u8]) {
    for block in [1, 512] {
        in_bounded_memory(|| {
            let sim = Sim::new(0);
            let storage = Memory::new(&sim, block, Fua::Native, data.to_vec());
            sim.block_on(read_and_check(kind, storage.clone()));
            assert!(storage.content() == data, "it was changed");
        });
    }
}

async fn read_and_check(kind: ForeignKind, storage: Memory) {
    let options = Options { access: Access::ReadOnly, ..Options::default() };
    let file = ByteRange::between(0, storage.size());
    let opened = match Disk::open(storage.clone(), ImageFormat::Foreign(kind), options).await {
        Ok(disk) if !disk.extent_files().is_empty() => {
            let ranges = vec![file; disk.extent_files().len()];
            disk.with_extents(storage, &ranges).await
        }
        opened => opened,
    };
    match opened {
        Ok(disk) => {
            read_extents(&disk).await;
            match disk.check().await {
                Ok(report) => {
                    assert!(
                        report.is_none_or(|found| found.problems.len() as u64 <= found.corruptions)
                    );
                }
                Err(error) => assert_tells_the_place(&error),
            }
        }
        Err(error) => assert_tells_the_place(&error),
    }
}
