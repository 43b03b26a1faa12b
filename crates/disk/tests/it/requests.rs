//! The requests that a disk accepts and refuses, and the receivers of the errors.

use blockhouse_core::{Durability, ErrorKind, Fallback, Offload, Request, Storage, Unmap, errno};
use blockhouse_disk::{Access, BlockStatus, BlockStatusCache, Discard, Disk, Options};
use blockhouse_sim::Operation::{Discard as DiscardOperation, Prefetch, WriteZeroes};
use blockhouse_sim::{Config, Fault, OperationKind, Sim, SimDisk, Support};

use crate::common::{Rig, blocks_of, discard, memory, span, steady, write, zeroes};

const SIZE: usize = 1 << 20;
const END: u64 = SIZE as u64;

fn rig() -> Rig {
    Rig::new(steady(), SIZE, Options::default())
}

fn read(offset: u64, length: usize) -> Request {
    Request::Read { offset, into: memory(length, 0) }
}

#[test]
fn past_the_end_writes_find_no_room_and_others_make_no_sense() {
    let rig = rig();
    let refused = |request| {
        let error = rig.submit(request).unwrap_err();
        (error.kind(), error.errno())
    };
    for offset in [END - 511, END, END + 512, u64::MAX - 10] {
        let no_room = (ErrorKind::PastEnd, errno::ENOSPC);
        assert_eq!(refused(write(offset, 512, 1, Durability::None)), no_room);
        let no_sense = (ErrorKind::InvalidInput, errno::EINVAL);
        assert_eq!(refused(read(offset, 512)), no_sense);
        if offset < u64::MAX - 512 {
            assert_eq!(refused(zeroes(offset, 512, Durability::None)), no_room);
            assert_eq!(refused(discard(offset, 512)), no_sense);
            assert_eq!(refused(Request::Prefetch { range: span(offset, 512) }), no_sense);
        }
    }
    assert_eq!(rig.log(), []);
    for request in [write(END - 512, 512, 1, Durability::None), read(END - 512, 512)] {
        rig.submit(request).unwrap();
    }
}

#[test]
fn an_empty_request_inside_the_disk_is_nothing() {
    let rig = rig();
    for offset in [0, 100, END] {
        rig.submit(read(offset, 0)).unwrap();
        rig.submit(write(offset, 0, 1, Durability::Data)).unwrap();
        rig.submit(zeroes(offset, 0, Durability::Data)).unwrap();
        rig.submit(discard(offset, 0)).unwrap();
    }
    assert_eq!(rig.log(), []);
    assert!(rig.submit(read(END + 1, 0)).is_err());
}

#[test]
fn a_read_only_disk_can_be_read_and_flushed() {
    let options = Options { access: Access::ReadOnly, ..Options::default() };
    let rig = Rig::new(steady(), SIZE, options);
    for change in [
        write(0, 512, 1, Durability::None),
        write(END, 512, 1, Durability::None),
        zeroes(0, 512, Durability::None),
        discard(0, 512),
    ] {
        let error = rig.submit(change).unwrap_err();
        assert_eq!((error.kind(), error.errno()), (ErrorKind::ReadOnly, errno::EPERM));
    }
    let disk = rig.disk.clone();
    let grown = rig.sim.block_on(async move { disk.resize(2 * END).await });
    assert_eq!(grown.unwrap_err().kind(), ErrorKind::ReadOnly);
    assert_eq!(rig.log(), []);
    assert_eq!(rig.read(0, 512), vec![0xee; 512]);
    rig.submit(Request::Flush).unwrap();
}

#[test]
fn an_error_reaches_exactly_its_request() {
    for victim in 0..6 {
        let rig = rig();
        rig.storage.fail(Fault::nth(victim, errno::EIO));
        let requests: Vec<_> = (0..6)
            .map(|i| match i % 2 {
                0 => rig.start(write(i * 4096, 4096, i as u8, Durability::None)),
                _ => rig.start(read(i * 4096, 4096)),
            })
            .collect();
        rig.sim.run();
        // Operations start in an order of the simulation's choosing.
        let failed: Vec<_> =
            requests.into_iter().filter_map(|request| request.output().unwrap().err()).collect();
        assert_eq!(failed.len(), 1);
        assert_eq!(failed[0].errno(), errno::EIO);
        assert!(failed[0].to_string().contains("simulated disk"), "{}", failed[0]);
        rig.submit(Request::Flush).unwrap();
    }
}

#[test]
fn a_host_without_room_is_reported_as_that() {
    let rig = Rig::new(blocks_of(4096), SIZE, Options::default());
    rig.storage.fail(Fault::chance(1.0, errno::ENOSPC).of(OperationKind::Write));
    for offset in [0, 100] {
        let error = rig.submit(write(offset, 4096, 1, Durability::None)).unwrap_err();
        assert_eq!((error.kind(), error.errno()), (ErrorKind::NoSpace, errno::ENOSPC));
    }
    rig.storage.clear_faults();
    rig.submit(write(100, 4096, 1, Durability::None)).unwrap();
}

#[test]
fn discards_stay_inside_the_range_and_are_never_an_error() {
    let rig = Rig::new(blocks_of(4096), SIZE, Options::default());
    rig.submit(discard(100, 12288)).unwrap();
    rig.submit(discard(100, 4096)).unwrap();
    assert_eq!(rig.log(), [DiscardOperation(span(4096, 8192))]);
    let config = Config { discard: Support::FailsOnFirstUse, ..steady() };
    let refusing = Rig::new(config, SIZE, Options::default());
    for _ in 0..3 {
        refusing.submit(discard(0, 4096)).unwrap();
    }
    assert_eq!(refusing.log(), [DiscardOperation(span(0, 4096))], "not tried again");
    assert_eq!(refusing.disk.capabilities().discard, Offload::Unavailable);
}

#[test]
fn a_disk_that_ignores_discards_keeps_its_space() {
    let options = Options { discard: Discard::Ignore, ..Options::default() };
    let rig = Rig::new(steady(), SIZE, options);
    rig.submit(discard(0, 4096)).unwrap();
    rig.submit(zeroes(0, 4096, Durability::None)).unwrap();
    assert_eq!(rig.log(), [WriteZeroes(span(0, 4096), Unmap::Forbidden)]);
    assert_eq!(rig.disk.capabilities().discard, Offload::Unavailable);
}

#[test]
fn block_status_tells_data_from_holes() {
    let rig = rig();
    rig.submit(zeroes(8192, 4096, Durability::None)).unwrap();
    let status = |offset, length| {
        let disk = rig.disk.clone();
        rig.sim.block_on(async move {
            disk.block_status(span(offset, length), &mut BlockStatusCache::default()).await
        })
    };
    assert_eq!(status(0, END).unwrap(), (BlockStatus::Data, 8192));
    assert_eq!(status(8192, END - 8192).unwrap(), (BlockStatus::Hole, 4096));
    assert_eq!(status(9000, 10).unwrap(), (BlockStatus::Hole, 10));
    assert!(status(0, 0).is_err() && status(END - 1, 2).is_err());
}

#[test]
fn a_prefetch_reaches_the_storage() {
    let rig = rig();
    rig.submit(Request::Prefetch { range: span(100, 200) }).unwrap();
    assert_eq!(rig.log(), [Prefetch(span(100, 200))]);
}

#[test]
fn a_disk_is_made_of_sectors_and_never_gets_shorter() {
    let sim = Sim::new(1);
    let odd = SimDisk::new(&sim, steady(), vec![0; 1000]);
    assert_eq!(Disk::raw(odd, Options::default()).expect("a disk").size(), 1024);

    let rig = rig();
    for size in [END - 512, END + 100] {
        let disk = rig.disk.clone();
        let error = rig.sim.block_on(async move { disk.resize(size).await }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
    assert_eq!(rig.storage.size(), END);
    assert_eq!(rig.log(), []);
}

#[test]
fn requests_are_counted() {
    let rig = rig();
    rig.submit(read(0, 1000)).unwrap();
    rig.submit(write(0, 512, 1, Durability::None)).unwrap();
    rig.submit(zeroes(0, 512, Durability::None)).unwrap();
    rig.submit(discard(0, 512)).unwrap();
    let pending = rig.start(read(0, 512));
    rig.wait(1);
    let stats = rig.disk.stats().counters();
    assert_eq!((stats.reads, stats.read_bytes), (2, 1512));
    assert_eq!((stats.writes, stats.written_bytes), (1, 512));
    assert_eq!((stats.zero_writes, stats.discards, stats.in_flight), (1, 1, 1));
    rig.sim.run();
    pending.output().unwrap().unwrap();
    assert_eq!(rig.disk.stats().counters().in_flight, 0);
}

#[test]
fn a_quick_zero_write_is_quick_where_it_can_be() {
    let rig = rig();
    let quick = Request::WriteZeroes {
        range: span(0, 8192),
        unmap: Unmap::Forbidden,
        fallback: Fallback::Forbidden,
        durability: Durability::None,
    };
    rig.submit(quick).unwrap();
    assert_eq!(rig.log(), [WriteZeroes(span(0, 8192), Unmap::Forbidden)]);
}
