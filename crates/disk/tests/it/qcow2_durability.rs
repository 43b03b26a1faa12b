//! The cost of durable requests on a qcow2 image, counted in storage operations: one FUA
//! write for each host extent where the mapping is durable already, FUA writes in the order of the
//! tables for a lone write that needs space, shared flushes for everything else.

use std::rc::Rc;

use blockhouse_core::{ByteRange, Durability, Fua, FuaCost, Request, Storage, SyncMode, Unmap};
use blockhouse_format::qcow2::{CreateOptions, Switch};
use blockhouse_sim::{Config, Latency, Operation};
use futures_util::future::join_all;

use crate::common::{DATA, Rig, blocks_of, discard, steady, write, zeroes};

const CLUSTER: u64 = 65_536;
const SIZE: u64 = 64 * CLUSTER;

const FUA: Durability = Durability::Data;
const PLAIN: Durability = Durability::None;

/// The storage operations in their order; reads of tables left out.
fn changes(rig: &Rig) -> Vec<Operation> {
    rig.log().into_iter().filter(|operation| !matches!(operation, Operation::Read(_))).collect()
}

/// How many durable writes, plain writes and flushes there were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    fua: usize,
    plain: usize,
    flushes: usize,
}

fn cost(rig: &Rig) -> Cost {
    let changes = changes(rig);
    let count = |wanted: fn(&Operation) -> bool| changes.iter().filter(|one| wanted(one)).count();
    let cost = Cost {
        fua: count(|one| matches!(one, Operation::Write(_, Durability::Data))),
        plain: count(|one| matches!(one, Operation::Write(_, Durability::None))),
        flushes: count(|one| matches!(one, Operation::Flush(_))),
    };
    let known = cost.fua + cost.plain + cost.flushes;
    assert_eq!(known, changes.len(), "nothing else was done: {changes:?}");
    cost
}

/// The entry's place, where all that was done is data and refcount without FUA, a flush, and the
/// entry by FUA.
#[track_caller]
fn entry_behind_one_flush(rig: &Rig) -> ByteRange {
    let done = changes(rig);
    let [
        Operation::Write(_, PLAIN),
        Operation::Write(_, PLAIN),
        Operation::Flush(SyncMode::Data),
        Operation::Write(entry, FUA),
    ] = done[..]
    else {
        panic!("{done:?}");
    };
    entry
}

const ONE_FUA: Cost = Cost { fua: 1, plain: 0, flushes: 0 };

fn rig(config: Config) -> Rig {
    let rig = Rig::qcow2_with_room(config, CreateOptions::new(SIZE), SIZE);
    // The first table of all is made for every test alike.
    rig.submit(write(SIZE - CLUSTER, 4096, 1, PLAIN)).unwrap();
    settle(&rig);
    rig
}

/// The same in a file that every new cluster makes longer.
fn growing(config: Config) -> Rig {
    let rig = Rig::qcow2(config, CreateOptions::new(SIZE));
    rig.submit(write(SIZE - CLUSTER, 4096, 1, PLAIN)).unwrap();
    settle(&rig);
    rig
}

/// Everything so far is durable, and not counted.
fn settle(rig: &Rig) {
    rig.submit(Request::Flush).unwrap();
    rig.log();
}

/// Clusters `first` to `first + count` are mapped, one after the other in the file, durably.
fn mapped(rig: &Rig, first: u64, count: u64) {
    rig.submit(write(first * CLUSTER, (count * CLUSTER) as usize, 2, PLAIN)).unwrap();
    settle(rig);
}

#[test]
fn a_durable_overwrite_is_one_fua_write_and_no_flush() {
    for block in [1, 512, 4096] {
        let rig = rig(blocks_of(block));
        mapped(&rig, 0, 4);
        for offset in [0, CLUSTER / 2, 3 * CLUSTER - 4096] {
            rig.submit(write(offset, 8192, 3, FUA)).unwrap();
            let done = changes(&rig);
            assert!(
                matches!(done[..], [Operation::Write(range, FUA)] if range.length() == 8192),
                "blocks of {block}, at {offset}: {done:?}"
            );
        }
    }
}

#[test]
fn a_durable_overwrite_across_clusters_is_one_fua_write_for_each_host_extent() {
    let rig = rig(steady());
    mapped(&rig, 0, 4);
    rig.submit(write(4096, 3 * CLUSTER as usize, 3, FUA)).unwrap();
    assert_eq!(cost(&rig), ONE_FUA, "four clusters in one run");
    // Written in this order, 8 to 10 lie in three places.
    for cluster in [10, 9, 8] {
        mapped(&rig, cluster, 1);
    }
    rig.submit(write(8 * CLUSTER + 512, 2 * CLUSTER as usize + 1024, 3, FUA)).unwrap();
    assert_eq!(cost(&rig), Cost { fua: 3, plain: 0, flushes: 0 });
}

#[test]
fn neighbours_that_are_not_durable_yet_do_not_matter() {
    let rig = rig(steady());
    mapped(&rig, 0, 1);
    rig.submit(write(CLUSTER, 4096, 3, PLAIN)).unwrap();
    rig.log();
    rig.submit(write(0, 4096, 4, FUA)).unwrap();
    assert_eq!(cost(&rig), ONE_FUA);
}

#[test]
fn a_plain_write_behind_the_end_of_the_file_is_no_longer_than_the_guests() {
    let rig = Rig::qcow2(steady(), CreateOptions::new(SIZE));
    mapped(&rig, 0, 1);
    for (cluster, durability, length) in [(5, PLAIN, 4096), (9, FUA, CLUSTER), (3, PLAIN, 4096)] {
        rig.submit(write(cluster * CLUSTER + 8192, 4096, 3, durability)).unwrap();
        let done = changes(&rig);
        let data = |one: &Operation| match one {
            Operation::Write(range, _) if range.length() > 512 => Some(range.length()),
            _ => None,
        };
        let found: Vec<u64> = done.iter().filter_map(data).collect();
        assert_eq!(found[0], length, "cluster {cluster}: {done:?}");
    }
    for (cluster, at, byte) in [(5, 0, 0), (5, 8192, 3), (5, 12_288, 0), (3, CLUSTER - 512, 0)] {
        let found = rig.read(cluster * CLUSTER + at, 512);
        assert_eq!(found, [byte; 512], "cluster {cluster}, {at}");
    }
}

#[test]
fn the_file_is_longer_than_needed_until_the_disk_is_closed() {
    let rig = Rig::qcow2(steady(), CreateOptions::new(SIZE));
    let before = rig.storage.size();
    for cluster in 0..40 {
        rig.submit(write(cluster * CLUSTER, 4096, 1, PLAIN)).unwrap();
    }
    let is_lengthening = |one: &&Operation| matches!(one, Operation::Lengthen(_));
    assert_eq!(rig.log().iter().filter(is_lengthening).count(), 1);
    let disk = rig.disk.clone();
    rig.sim.block_on(async move { disk.close().await }).unwrap();
    // The data, and at most a table for each 32 MiB of it and for the refcounts.
    let grown = rig.storage.size() - before;
    assert!((40 * CLUSTER..=44 * CLUSTER).contains(&grown), "grew by {grown}");
}

#[test]
fn space_that_was_used_before_is_filled_whole() {
    let rig = Rig::qcow2(steady(), CreateOptions::new(SIZE));
    mapped(&rig, 0, 2);
    // The cluster in the middle of the file comes free.
    rig.submit(discard(0, CLUSTER)).unwrap();
    settle(&rig);
    settle(&rig);
    rig.submit(write(4 * CLUSTER, 4096, 3, PLAIN)).unwrap();
    let done = changes(&rig);
    assert!(
        matches!(done[..], [Operation::Write(range, PLAIN)] if range.length() == CLUSTER),
        "{done:?}"
    );
}

#[test]
fn a_lone_durable_write_that_needs_space_is_three_fua_writes_in_order() {
    let rig = rig(steady());
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    let done = changes(&rig);
    let [
        Operation::Write(data, FUA),
        Operation::Write(refcount, FUA),
        Operation::Write(entry, FUA),
    ] = done[..]
    else {
        panic!("{done:?}");
    };
    assert_eq!(data.length(), CLUSTER, "zeros around the guest's bytes go with them");
    assert!(refcount.length() <= 4096 && entry.length() <= 4096);
    assert!(refcount.offset() < entry.offset(), "a new image has its refcounts in front");
    rig.submit(write(0, 4096, 4, FUA)).unwrap();
    assert_eq!(cost(&rig), ONE_FUA, "from now on");
}

/// A file system answers FUA with a flush where the file grows: so one flush for all comes first.
#[test]
fn where_the_file_grows_a_lone_durable_write_takes_one_flush() {
    let rig = growing(steady());
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    assert!(entry_behind_one_flush(&rig).length() <= 4096);
    rig.submit(write(0, 4096, 4, FUA)).unwrap();
    assert_eq!(cost(&rig), ONE_FUA, "from now on");
}

#[test]
fn without_refcounts_to_write_two_are_enough() {
    let lazy = CreateOptions { lazy_refcounts: Switch::On, ..CreateOptions::new(SIZE) };
    let rig = Rig::qcow2_with_room(steady(), lazy, SIZE);
    rig.submit(write(0, 4096, 1, PLAIN)).unwrap();
    settle(&rig);
    rig.submit(write(CLUSTER, 4096, 2, FUA)).unwrap();
    assert_eq!(cost(&rig), Cost { fua: 2, plain: 0, flushes: 0 });
}

#[test]
fn a_first_durable_write_writes_the_new_table_beside_the_refcount() {
    let rig = Rig::qcow2_with_room(steady(), CreateOptions::new(SIZE), SIZE);
    rig.submit(write(0, 4096, 1, FUA)).unwrap();
    // Besides, the place of the new table is got from the host before.
    assert_eq!(cost(&rig), Cost { fua: 4, plain: 1, flushes: 0 });
}

#[test]
fn many_durable_writes_that_need_space_share_tables_and_flushes() {
    let rig = rig(steady());
    let together: Vec<_> =
        (0..40).map(|cluster| rig.start(write(cluster * CLUSTER, 4096, 3, FUA))).collect();
    rig.sim.run();
    for task in together {
        task.output().expect("it ended").unwrap();
    }
    let Cost { fua, plain, flushes } = cost(&rig);
    assert!(flushes <= 6, "{flushes} flushes for 40 writes");
    assert!(fua <= 12, "{fua} FUA writes: only the first few are alone");
    assert!(fua + plain <= 40 + 12, "the data, and few tables: {fua} + {plain}");
}

/// The first whose data is there has the tables written for all whose data is on its way.
#[test]
fn writes_that_begin_together_share_one_round_whenever_their_data_arrives() {
    let one_by_fua = Cost { fua: 1, plain: 21, flushes: 1 };
    let without_fua = Cost { fua: 0, plain: 22, flushes: 2 };
    for (fua, expected) in [(Fua::Native, one_by_fua), (Fua::Emulated, without_fua)] {
        let latency = Latency { data: 1..=1000, flush: 50..=50 };
        let rig = growing(Config { fua, latency, ..Config::default() });
        let disk = Rc::clone(&rig.disk);
        let durable = |cluster| write(cluster * CLUSTER, 4096, 3, FUA);
        let outcomes = rig.sim.block_on(async move {
            join_all((0..20).map(|cluster| disk.submit(durable(cluster)))).await
        });
        assert!(outcomes.iter().all(Result::is_ok));
        assert_eq!(cost(&rig), expected, "data, refcounts, and entries behind a flush");
    }
}

#[test]
fn a_round_waits_for_nothing_that_begins_later() {
    let rig = growing(steady());
    let first = rig.start(write(0, 4096, 3, FUA));
    let mut others = Vec::new();
    for cluster in 1..60 {
        rig.wait(DATA - 2);
        others.push(rig.start(write(cluster * CLUSTER, 4096, 3, FUA)));
    }
    assert!(first.output().is_some_and(|done| done.is_ok()), "data arrives all the time");
    rig.sim.run();
    assert!(others.into_iter().all(|task| task.output().is_some_and(|done| done.is_ok())));
}

/// Data that arrives behind the flush of a round is no matter of those whom the round serves.
#[test]
fn a_round_that_is_shared_takes_one_flush_however_much_is_written_meanwhile() {
    const TASKS: u64 = 8;
    const EACH: u64 = 7;
    let rig = growing(Config { latency: Latency { data: 1..=100, flush: 50..=50 }, ..steady() });
    for task in 0..TASKS {
        let disk = Rc::clone(&rig.disk);
        rig.sim.spawn(async move {
            for nth in 0..EACH {
                let offset = (nth * TASKS + task) * CLUSTER;
                disk.submit(write(offset, 4096, 3, FUA)).await.unwrap();
            }
        });
    }
    rig.sim.run();
    let Cost { fua, flushes, .. } = cost(&rig);
    // Each round writes an entry by FUA, or more.
    assert!(flushes <= fua && fua < (TASKS * EACH) as usize, "{flushes} flushes, {fua} by FUA");
}

#[test]
fn a_round_does_not_wait_for_long_writes() {
    let rounds = |length: usize, nth: usize| {
        let rig = growing(steady());
        (0..nth).for_each(|_| rig.wait(1));
        let short = rig.start(write(0, 4096, 3, FUA));
        rig.wait(DATA / 2);
        let other = rig.start(write(8 * CLUSTER, length, 3, FUA));
        rig.sim.run();
        assert!([short, other].into_iter().all(|task| task.output().is_some_and(|it| it.is_ok())));
        cost(&rig).fua
    };
    let often = |length| (0..60).filter(|&nth| rounds(length, nth) == 2).count();
    // The simulator runs a task late now and then, so a count says more than one run.
    let (beside_short, beside_long) = (often(4096), often(32 * CLUSTER as usize));
    assert!(2 * beside_short < beside_long, "{beside_short}, {beside_long} of 60");
}

/// Three durable writes would bring three flushes.
#[test]
fn where_each_durable_write_brings_a_flush_a_lone_one_that_needs_space_takes_two() {
    let rig = rig(Config { fua_cost: FuaCost::ExtraFlush, ..steady() });
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    entry_behind_one_flush(&rig);
    rig.submit(write(0, 4096, 4, FUA)).unwrap();
    assert_eq!(cost(&rig), ONE_FUA, "from now on");
}

/// The easy one to miss: the data of the overwrite is durable by FUA, its mapping is not.
#[test]
fn a_durable_overwrite_of_what_a_plain_write_mapped_makes_the_mapping_durable() {
    let rig = rig(steady());
    rig.submit(write(0, 4096, 3, PLAIN)).unwrap();
    rig.log();
    rig.submit(write(0, 4096, 4, FUA)).unwrap();
    // Data that an entry refers to waits for a flush: so data and refcount are written without FUA
    // before it.
    entry_behind_one_flush(&rig);
    rig.submit(write(0, 4096, 5, FUA)).unwrap();
    assert_eq!(cost(&rig), ONE_FUA);
}

#[test]
fn a_durable_overwrite_beside_the_round_of_its_mapping_waits_for_that_round() {
    let rig = rig(steady());
    let first = rig.start(write(0, 4096, 3, FUA));
    // The data is there, the tables are on their way.
    rig.wait(crate::common::DATA + crate::common::FLUSH + 1);
    let second = rig.start(write(4096, 4096, 4, FUA));
    rig.sim.run();
    assert!([first, second].iter().all(|task| task.output().is_some_and(|done| done.is_ok())));
    assert_eq!(cost(&rig), Cost { fua: 4, plain: 0, flushes: 0 });
}

/// One request over a mapped cluster, an unmapped one and another mapped one.
#[test]
fn a_mixed_request_of_few_extents_goes_by_fua_and_its_tables_after_it() {
    let rig = rig(steady());
    mapped(&rig, 0, 1);
    mapped(&rig, 2, 1);
    rig.submit(write(0, 3 * CLUSTER as usize, 3, FUA)).unwrap();
    assert_eq!(cost(&rig), Cost { fua: 5, plain: 0, flushes: 0 }, "three of data, two of tables");
}

#[test]
fn a_mixed_request_of_many_extents_shares_the_flushes_of_one_round() {
    let rig = rig(steady());
    for cluster in [0, 2, 4, 6] {
        mapped(&rig, cluster, 1);
    }
    rig.submit(write(0, 8 * CLUSTER as usize, 3, FUA)).unwrap();
    let done = changes(&rig);
    let Cost { fua, plain, flushes } = {
        let count = |wanted: fn(&Operation) -> bool| done.iter().filter(|one| wanted(one)).count();
        Cost {
            fua: count(|one| matches!(one, Operation::Write(_, Durability::Data))),
            plain: count(|one| matches!(one, Operation::Write(_, Durability::None))),
            flushes: count(|one| matches!(one, Operation::Flush(_))),
        }
    };
    // Eight of data, the refcounts, the one flush for both, and then the entries.
    assert_eq!((fua, plain, flushes), (1, 9, 1));
    assert!(matches!(done.last(), Some(Operation::Write(_, FUA))));
}

#[test]
fn a_mixed_request_without_new_space_ends_in_exactly_one_flush() {
    // On raw images: zeros that the storage writes by itself, and data, unaligned at both ends.
    let rig = Rig::new(blocks_of(4096), SIZE as usize, blockhouse_disk::Options::default());
    rig.submit(zeroes(100, 3 * 4096, FUA)).unwrap();
    let done = changes(&rig);
    let flushes = done.iter().filter(|one| matches!(one, Operation::Flush(_))).count();
    assert_eq!((flushes, done.last()), (1, Some(&Operation::Flush(SyncMode::Data))), "{done:?}");
}

#[test]
fn durable_zeros_and_discards_cost_their_tables_alone() {
    for unmap in [Unmap::Allowed, Unmap::Forbidden] {
        let rig = rig(steady());
        mapped(&rig, 0, 4);
        let range = crate::common::span(0, CLUSTER);
        let fallback = blockhouse_core::Fallback::Allowed;
        rig.submit(Request::WriteZeroes { range, unmap, fallback, durability: FUA }).unwrap();
        let done = changes(&rig);
        assert!(matches!(done[0], Operation::Write(_, FUA)), "the entry: {done:?}");
        assert!(!done.iter().any(|one| matches!(one, Operation::Flush(_))), "{done:?}");
    }
    let rig = rig(steady());
    mapped(&rig, 0, 4);
    let range = crate::common::span(CLUSTER, CLUSTER);
    rig.submit(Request::Discard { range, durability: FUA }).unwrap();
    let done = changes(&rig);
    // The reference goes first, then the space goes back to the host.
    assert!(matches!(done[..], [Operation::Write(_, FUA), Operation::Discard(_)]), "{done:?}");
}

#[test]
fn a_plain_request_costs_nothing_but_its_data() {
    let rig = rig(steady());
    rig.submit(write(0, 4096, 3, PLAIN)).unwrap();
    assert_eq!(cost(&rig), Cost { fua: 0, plain: 1, flushes: 0 });
    rig.submit(discard(0, CLUSTER)).unwrap();
    assert_eq!(changes(&rig), []);
}

#[test]
fn full_durability_is_always_a_full_flush() {
    for is_mapped in [false, true] {
        let rig = rig(steady());
        if is_mapped {
            mapped(&rig, 0, 1);
        }
        rig.submit(write(0, 4096, 3, Durability::Full)).unwrap();
        let done = changes(&rig);
        assert!(matches!(done.first(), Some(Operation::Write(_, PLAIN))), "{done:?}");
        assert_eq!(done.last(), Some(&Operation::Flush(SyncMode::Full)), "{done:?}");
        rig.submit(zeroes(0, CLUSTER, Durability::Full)).unwrap();
        assert_eq!(changes(&rig).last(), Some(&Operation::Flush(SyncMode::Full)));
    }
}

#[test]
fn without_fua_everything_falls_back_to_flushes() {
    let rig = rig(Config { fua: Fua::Emulated, ..steady() });
    mapped(&rig, 0, 1);
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    assert_eq!(cost(&rig), Cost { fua: 0, plain: 1, flushes: 1 }, "an overwrite");
    rig.submit(write(CLUSTER, 4096, 3, FUA)).unwrap();
    assert_eq!(cost(&rig), Cost { fua: 0, plain: 3, flushes: 2 }, "new space");
}

#[test]
fn where_nothing_is_stable_nothing_is_flushed() {
    let rig = rig(Config { fua: Fua::Ignored, ..steady() });
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    assert_eq!(cost(&rig), Cost { fua: 0, plain: 1, flushes: 0 });
}
