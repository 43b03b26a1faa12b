//! When the space of discarded clusters goes back to the host, and when others may have it.
#![forbid(unsafe_code)]

mod common;

use std::rc::Rc;

use blockhouse_core::{Discarded, Durability, Request};
use blockhouse_disk::{BlockStatusCache, Content};
use blockhouse_format::qcow2::CreateOptions;
use blockhouse_sim::{Config, Operation};
use common::{Rig, discard, span, steady, write, zeroes};

const CLUSTER: u64 = 65_536;
const PLAIN: Durability = Durability::None;

/// A new image in which the first clusters have data, durably.
fn rig(discarded: Discarded) -> Rig {
    let config = Config { discarded, ..steady() };
    let rig = Rig::qcow2(config, CreateOptions::new(64 * CLUSTER));
    rig.submit(write(0, 4 * CLUSTER as usize, 1, PLAIN)).unwrap();
    rig.submit(Request::Flush).unwrap();
    rig.log();
    rig
}

fn discards(log: &[Operation]) -> usize {
    log.iter().filter(|one| matches!(one, Operation::Discard(_))).count()
}

/// Where the file has the cluster `index` of the guest.
fn place_of(rig: &Rig, index: u64) -> u64 {
    let disk = Rc::clone(&rig.disk);
    let placed = rig.sim.block_on(async move {
        let range = span(index * CLUSTER, CLUSTER);
        disk.placement(range, &mut BlockStatusCache::default()).await
    });
    match placed.unwrap().content {
        Content::Data { host } => host,
        other => panic!("{other:?}"),
    }
}

fn places(log: &[Operation]) -> Vec<u64> {
    let of_data = |one: &Operation| match one {
        Operation::Write(range, _) if range.length() == CLUSTER => Some(range.offset()),
        _ => None,
    };
    log.iter().filter_map(of_data).collect()
}

#[test]
fn space_goes_back_at_once_where_it_reads_as_zeros_then() {
    for request in [discard(CLUSTER, 2 * CLUSTER), zeroes(CLUSTER, 2 * CLUSTER, PLAIN)] {
        let rig = rig(Discarded::Zeros);
        rig.submit(request).unwrap();
        let log = rig.log();
        assert!(matches!(log[..], [Operation::Discard(range)] if range.length() == 2 * CLUSTER));
        rig.submit(Request::Flush).unwrap();
        assert_eq!(discards(&rig.log()), 0, "not once more");
    }
}

#[test]
fn space_goes_back_with_the_next_flush_where_anything_may_come_to_light_in_it() {
    let rig = rig(Discarded::Anything);
    rig.submit(discard(CLUSTER, 2 * CLUSTER)).unwrap();
    assert_eq!(rig.log(), []);
    rig.submit(Request::Flush).unwrap();
    let log = rig.log();
    let tables = log.iter().rposition(|one| matches!(one, Operation::Write(..)));
    let place = log.iter().position(|one| matches!(one, Operation::Discard(_)));
    assert!(tables.is_some() && tables < place, "the tables first: {log:?}");
}

#[test]
fn nobody_gets_a_cluster_that_tables_on_disk_may_still_refer_to() {
    for discarded in [Discarded::Zeros, Discarded::Anything] {
        let rig = rig(discarded);
        let old = place_of(&rig, 1);
        rig.submit(discard(CLUSTER, CLUSTER)).unwrap();
        rig.log();
        rig.submit(write(8 * CLUSTER, CLUSTER as usize, 2, PLAIN)).unwrap();
        assert!(!places(&rig.log()).contains(&old), "before a flush");
        rig.submit(Request::Flush).unwrap();
        rig.log();
        rig.submit(write(9 * CLUSTER, CLUSTER as usize, 3, PLAIN)).unwrap();
        assert_eq!(places(&rig.log()), [old], "after it");
    }
}
