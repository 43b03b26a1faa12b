//! Requests that do not fit the storage's blocks, and what they exclude.

use blockhouse_core::{Buffer, Durability, ErrorKind, Fallback, Request, Unmap};
use blockhouse_disk::Options;
use blockhouse_sim::Operation::{Read, Write, WriteZeroes};
use blockhouse_sim::{Config, Support};

use crate::common::{
    DATA, FLUSH, Rig, assert_same, blocks_of, discard, span, steady, write, zeroes,
};

const SIZE: usize = 1 << 20;

fn rig() -> Rig {
    Rig::new(blocks_of(4096), SIZE, Options::default())
}

fn plain(offset: u64, length: u64) -> blockhouse_sim::Operation {
    Write(span(offset, length), Durability::None)
}

#[test]
fn a_write_inside_a_block_reads_it_and_writes_it_back() {
    let rig = rig();
    rig.submit(write(5000, 10, 1, Durability::None)).unwrap();
    assert_eq!(rig.log(), [Read(span(4096, 4096)), plain(4096, 4096)]);
    let mut expected = vec![0xee; 4096];
    expected[904..914].fill(1);
    assert_same(&rig.read(4096, 4096), &expected);
}

#[test]
fn only_blocks_that_are_cut_are_read() {
    let rig = rig();
    rig.submit(write(4096, 5000, 1, Durability::None)).unwrap();
    assert_eq!(rig.log(), [Read(span(8192, 4096)), plain(4096, 8192)]);
    rig.submit(write(4000, 4192, 1, Durability::None)).unwrap();
    assert_eq!(rig.log(), [Read(span(0, 4096)), plain(0, 8192)]);
}

#[test]
fn writes_to_one_block_follow_each_other() {
    let rig = rig();
    let begun = rig.now();
    let writes: Vec<_> =
        (0..8).map(|i| rig.start(write(i * 512, 512, i as u8, Durability::None))).collect();
    rig.sim.run();
    assert!(writes.iter().all(|write| write.output().unwrap().is_ok()));
    assert_eq!(rig.now() - begun, 8 * 2 * DATA);
    let expected: Vec<u8> = (0..8).flat_map(|i| [i; 512]).collect();
    assert_same(&rig.read(0, 4096), &expected);
}

#[test]
fn writes_that_share_no_block_do_not_wait() {
    let rig = rig();
    let begun = rig.now();
    let unaligned: Vec<_> =
        (0..8).map(|i| rig.start(write(i * 4096 + 100, 100, 1, Durability::None))).collect();
    rig.sim.run();
    assert!(unaligned.iter().all(|write| write.output().is_some()));
    assert_eq!(rig.now() - begun, 2 * DATA);
}

#[test]
fn aligned_writes_do_not_wait_for_each_other_even_where_they_overlap() {
    let rig = rig();
    let begun = rig.now();
    let aligned: Vec<_> =
        (0..8).map(|i| rig.start(write(i * 4096, 8192, 1, Durability::None))).collect();
    rig.sim.run();
    assert!(aligned.iter().all(|write| write.output().is_some()));
    assert_eq!(rig.now() - begun, DATA);
}

#[test]
fn whatever_changes_a_block_waits_for_one_who_changes_it_in_part() {
    let others = [
        write(4096, 4096, 2, Durability::None),
        zeroes(0, 8192, Durability::None),
        crate::common::discard(4096, 4096),
    ];
    for other in others {
        let rig = rig();
        let begun = rig.now();
        let in_part = rig.start(write(5000, 10, 1, Durability::None));
        rig.wait(1);
        let other = rig.start(other);
        rig.sim.run();
        assert!(in_part.output().unwrap().is_ok() && other.output().unwrap().is_ok());
        assert_eq!(rig.now() - begun, 3 * DATA);
    }
}

#[test]
fn a_dropped_write_keeps_its_blocks_until_the_storage_is_through() {
    let rig = rig();
    let given_up = rig.start(write(0, 512, 1, Durability::None));
    // It has read the block and is writing it back.
    rig.wait(DATA + DATA / 2);
    given_up.cancel();
    rig.submit(write(512, 512, 2, Durability::None)).unwrap();
    rig.sim.run();
    assert_same(&rig.read(0, 1024), &[[1; 512], [2; 512]].concat());
}

#[test]
fn badly_placed_memory_is_copied_and_nothing_more() {
    let rig = rig();
    let mut buffer = Buffer::new(4096 + 7);
    buffer.bytes_mut().fill(3);
    let from = buffer.lend_range(7, 4096);
    rig.submit(Request::Write { offset: 0, from, durability: Durability::None }).unwrap();
    assert_eq!(rig.log(), [plain(0, 4096)]);
    let into = buffer.lend_range(7, 4096);
    rig.submit(Request::Read { offset: 0, into }).unwrap();
    assert_eq!(rig.log(), [Read(span(0, 4096))]);
    assert_eq!(rig.disk.stats().counters().bounced, 2);
}

#[test]
fn long_requests_go_piece_by_piece() {
    let rig = rig();
    let length = 600 << 10;
    rig.submit(write(1, length, 5, Durability::Data)).unwrap();
    let piece = 256 << 10;
    assert_eq!(
        rig.log(),
        [
            Read(span(0, 4096)),
            plain(0, piece),
            plain(piece, piece),
            Read(span(600 << 10, 4096)),
            plain(2 * piece, (88 << 10) + 4096),
            blockhouse_sim::Operation::Flush(blockhouse_core::SyncMode::Data),
        ]
    );
    let read = rig.read(0, (600 << 10) + 512);
    assert!(read[0] == 0xee && read[1..=length].iter().all(|&byte| byte == 5));
    assert!(read[length + 1..].iter().all(|&byte| byte == 0xee));
}

#[test]
fn a_last_partial_block_is_read_and_written_as_it_is() {
    let size = 8192 + 1536;
    let rig = Rig::new(blocks_of(4096), size, Options::default());
    rig.submit(write(8192 + 100, 1436, 1, Durability::None)).unwrap();
    assert_eq!(rig.log(), [Read(span(8192, 1536)), plain(8192, 1536)]);
    rig.submit(write(4096, 4096 + 1536, 2, Durability::Data)).unwrap();
    let durable = Write(span(4096, 4096), Durability::Data);
    let flush = blockhouse_sim::Operation::Flush(blockhouse_core::SyncMode::Data);
    assert_eq!(rig.log(), [durable, plain(8192, 1536), flush], "FUA is for whole blocks");
    assert_same(&rig.read(0, size), &[vec![0xee; 4096], vec![2; 4096 + 1536]].concat());
    rig.submit(zeroes(0, size as u64, Durability::None)).unwrap();
    // And no longer than before.
    assert_same(&rig.storage.content(), &vec![0; size]);
}

#[test]
fn a_disk_smaller_than_a_block_works() {
    let rig = Rig::new(blocks_of(4096), 1024, Options::default());
    rig.submit(write(512, 100, 1, Durability::None)).unwrap();
    assert_eq!(rig.read(500, 200), [vec![0xee; 12], vec![1; 100], vec![0xee; 88]].concat());
}

#[test]
fn growing_turns_the_last_partial_block_into_an_ordinary_one() {
    let rig = Rig::new(blocks_of(4096), 4096 + 512, Options::default());
    let at_the_end = rig.start(write(4096 + 100, 100, 1, Durability::None));
    rig.wait(1);
    let disk = rig.disk.clone();
    let resize = rig.sim.spawn(async move { disk.resize(8192).await });
    let after = rig.start(write(4096 + 200, 4096 - 200, 2, Durability::None));
    rig.sim.run();
    at_the_end.output().unwrap().unwrap();
    resize.output().unwrap().unwrap();
    let refused = after.output().unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PastEnd, "it was asked before the disk had grown");
    rig.submit(write(4096 + 200, 4096 - 200, 2, Durability::None)).unwrap();
    assert_eq!(rig.read(4096, 4096), [vec![0xee; 100], vec![1; 100], vec![2; 4096 - 200]].concat());
}

#[test]
fn requests_that_meet_a_growing_disk_see_its_new_last_block() {
    let rig = Rig::new(blocks_of(4096), 4096 + 512, Options::default());
    let disk = rig.disk.clone();
    let resize = rig.sim.spawn(async move { disk.resize(8192).await });
    rig.wait(1);
    // All of the last partial block when they begin, but only a part of the one it becomes.
    let in_part = rig.start(write(4096, 512, 1, Durability::None));
    let mut buffer = Buffer::new(512);
    let read = rig.start(Request::Read { offset: 4096, into: buffer.lend() });
    rig.wait(DATA + FLUSH + DATA / 2);
    assert!(resize.output().is_some_and(|outcome| outcome.is_ok()));
    let whole = rig.start(write(4096, 4096, 2, Durability::None));
    rig.sim.run();
    for task in [in_part, read, whole] {
        task.output().unwrap().unwrap();
    }
    assert_same(&rig.read(4096, 4096)[512..], &[2; 4096 - 512]);
}

#[test]
fn the_whole_blocks_of_a_zero_write_are_offloaded_and_its_edges_written() {
    let rig = rig();
    rig.submit(zeroes(4000, 8192, Durability::None)).unwrap();
    assert_eq!(
        rig.log(),
        [
            WriteZeroes(span(4096, 4096), Unmap::Allowed),
            Read(span(0, 4096)),
            plain(0, 4096),
            Read(span(8192, 4096)),
            plain(8192, 4096),
        ]
    );
    assert_same(&rig.read(4000, 8192), &[0; 8192]);
    assert_eq!((rig.read(3999, 1), rig.read(12192, 1)), (vec![0xee], vec![0xee]));
}

#[test]
fn a_quick_zero_write_that_is_refused_changes_nothing() {
    for support in [Support::No, Support::FailsOnFirstUse] {
        let config = Config { write_zeroes: support, ..blocks_of(512) };
        let rig = Rig::new(config, SIZE, Options::default());
        let quick = |offset, length| Request::WriteZeroes {
            range: span(offset, length),
            unmap: Unmap::Allowed,
            fallback: Fallback::Forbidden,
            durability: Durability::Data,
        };
        for request in [quick(100, 4096), quick(0, 4096), quick(10, 20)] {
            assert_eq!(rig.submit(request).unwrap_err().kind(), ErrorKind::Unsupported);
        }
        assert_same(&rig.storage.content(), &vec![0xee; SIZE]);
    }
}

#[test]
fn a_zero_write_that_the_storage_refuses_is_done_by_hand_and_not_tried_again() {
    let config = Config { write_zeroes: Support::FailsOnFirstUse, ..steady() };
    let rig = Rig::new(config, SIZE, Options::default());
    for _ in 0..2 {
        rig.submit(zeroes(0, 4096, Durability::None)).unwrap();
    }
    assert_eq!(
        rig.log(),
        [WriteZeroes(span(0, 4096), Unmap::Allowed), plain(0, 4096), plain(0, 4096)]
    );
}

#[test]
fn a_file_that_ends_inside_a_sector_is_a_disk_of_whole_sectors() {
    for (block, size) in [(1, 1000_usize), (1, 5000), (4096, 1000), (4096, 5000)] {
        let rig = Rig::new(blocks_of(block), size, Options::default());
        let whole = size.next_multiple_of(512);
        assert_eq!(rig.disk.size(), whole as u64);
        let mut model = vec![0xee; size];
        model.resize(whole, 0);
        assert_same(&rig.read(0, whole), &model);
        assert_eq!(rig.storage.content().len(), size, "reading makes no file longer");

        rig.submit(discard(0, whole as u64)).unwrap();
        assert_eq!(rig.disk.size(), whole as u64);
        rig.submit(write(0, whole, 3, Durability::Data)).unwrap();
        assert_eq!(rig.storage.content(), vec![3; whole]);
    }
}

#[test]
fn the_sector_that_a_file_ends_in_can_be_written_zeroed_and_discarded() {
    for (block, size) in [(1, 1000_usize), (1, 5000), (4096, 1000), (4096, 5000)] {
        let whole = size.next_multiple_of(512);
        let (last, offset) = (whole - 2, whole as u64 - 2);
        for request in [
            write(offset, 2, 7, Durability::None),
            zeroes(0, whole as u64, Durability::None),
            zeroes(offset, 2, Durability::None),
            discard(offset, 2),
        ] {
            let rig = Rig::new(blocks_of(block), size, Options::default());
            let mut model = vec![0xee; size];
            model.resize(whole, 0);
            match &request {
                Request::Write { .. } => model[last..].fill(7),
                Request::WriteZeroes { range, .. } => model[range.offset() as usize..].fill(0),
                _ => {}
            }
            let what = format!("{request:?} of {size} bytes in blocks of {block}");
            rig.submit(request).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_same(&rig.read(0, whole), &model);
            assert_eq!(rig.disk.size(), whole as u64, "{what}");
        }
    }
}
