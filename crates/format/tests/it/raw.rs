//! Raw images: sizes, probing, and where bytes are.

use blockhouse_core::{Alignment, ByteRange, ErrorKind, ExtentState, Unmap};
use blockhouse_format::{Format, Intent, probe};
use blockhouse_sim::{Config, Operation, Sim, SimDisk};

fn storage(sim: &Sim, block: u32, content: Vec<u8>) -> SimDisk {
    let alignment = Alignment { offset: block, memory: 1 };
    SimDisk::new(sim, Config { alignment, ..Config::default() }, content)
}

/// The extents of all of a raw image, as (guest offset, length, host offset).
fn extents(block: u32, size: usize, intent: Intent) -> Vec<(u64, u64, u64)> {
    let sim = Sim::new(1);
    let format = Format::raw(storage(&sim, block, vec![0; size])).unwrap();
    sim.block_on(async move {
        let mut rest = ByteRange::between(0, format.end());
        let mut found = Vec::new();
        while !rest.is_empty() {
            let extent = format.map(rest, intent).await.unwrap();
            assert!(extent.is_pure_overwrite());
            let ExtentState::Mapped { host } = extent.state else { panic!("{extent:?}") };
            found.push((extent.guest.offset(), extent.guest.length(), host));
            rest = rest.skip(extent.guest.length());
        }
        found
    })
}

#[test]
fn all_of_a_raw_image_is_one_extent_at_its_own_offset() {
    for intent in [Intent::Read, Intent::Write, Intent::Zero(Unmap::Allowed), Intent::Discard] {
        assert_eq!(extents(1, 1536, intent), [(0, 1536, 0)]);
        assert_eq!(extents(512, 1536, intent), [(0, 1536, 0)]);
        assert_eq!(extents(4096, 8192, intent), [(0, 8192, 0)]);
    }
}

#[test]
fn a_last_partial_block_is_an_extent_of_its_own() {
    assert_eq!(extents(4096, 4096 + 512, Intent::Write), [(0, 4096, 0), (4096, 512, 4096)]);
    assert_eq!(extents(4096, 512, Intent::Read), [(0, 512, 0)]);
}

#[test]
fn sizes_are_whole_sectors() {
    let sim = Sim::new(1);
    for (size, expected) in [(0, 0), (1, 512), (511, 512), (512, 512), (1000, 1024), (1024, 1024)] {
        let raw = Format::raw(storage(&sim, 1, vec![0; size])).unwrap();
        assert_eq!(raw.size(), expected);
    }
}

#[test]
fn a_last_sector_is_zeroed_and_discarded_apart_where_the_file_ends_inside_it() {
    for intent in [Intent::Zero(Unmap::Allowed), Intent::Discard] {
        assert_eq!(extents(1, 1000, intent), [(0, 1000, 0), (1000, 24, 1000)]);
        assert_eq!(extents(4096, 5000, intent), [(0, 4096, 0), (4096, 1024, 4096)]);
    }
    for intent in [Intent::Read, Intent::Write] {
        assert_eq!(extents(1, 1000, intent), [(0, 1024, 0)]);
        assert_eq!(extents(4096, 5000, intent), [(0, 4096, 0), (4096, 1024, 4096)]);
    }
}

#[test]
fn a_new_size_is_checked_before_the_storage_hears_of_it() {
    let sim = Sim::new(1);
    let disk = storage(&sim, 1, vec![0; 512]);
    let format = Format::raw(disk.clone()).unwrap();
    let outcomes = sim.block_on(async move {
        (
            format.size_change().grow(1000).await.map_err(|error| error.kind()),
            format.size_change().grow(1024).await.is_ok(),
        )
    });
    assert_eq!(outcomes, (Err(ErrorKind::InvalidInput), true));
    assert_eq!(disk.take_log(), [Operation::Resize(1024)]);
}

#[test]
fn the_first_bytes_are_looked_at_whatever_the_storage_demands() {
    for block in [1, 512, 4096] {
        for size in [512, 8192] {
            let sim = Sim::new(1);
            let mut content = vec![0; size];
            content[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
            let disk = storage(&sim, block, content);
            let found = sim.block_on(async move { probe::probe(&disk).await });
            assert_eq!(found.unwrap(), Some("qcow2"));
        }
    }
}
