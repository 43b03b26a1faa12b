//! A write whose future was dropped may still arrive, with the padding around its own bytes: data
//! that is acknowledged there later must be out of its reach.

use blockhouse_core::{ByteRange, Durability, Request, Unmap};
use blockhouse_format::qcow2::{CreateOptions, Switch};
use blockhouse_sim::Operation;

use crate::common::{Rig, steady, write, zeroes};

const CLUSTER: u64 = 65_536;
const PLAIN: Durability = Durability::None;

/// Where data was written to, tables and short writes left out.
fn places(rig: &Rig, least: u64) -> Vec<ByteRange> {
    let log = rig.log().into_iter();
    log.filter_map(|operation| match operation {
        Operation::Write(range, _) if range.length() >= least => Some(range),
        _ => None,
    })
    .collect()
}

/// Gives up a write into units that the cluster already has a place for, then writes beside it.
fn later_writes_go_elsewhere(rig: &Rig, unit: u64) {
    let given_up = rig.start(write(3 * unit + 100, 1000, 2, PLAIN));
    // It waits for the old surroundings, then it is in flight.
    rig.wait(1);
    let zombie = loop {
        match places(rig, unit)[..] {
            [] => rig.wait(1),
            [zombie] => break zombie,
            ref several => panic!("{several:?}"),
        }
    };
    given_up.cancel();
    rig.submit(write(3 * unit + 1100, 500, 3, Durability::Full)).unwrap();
    for place in places(rig, 500) {
        assert!(!place.overlaps(zombie), "{place} is in reach of what was given up: {zombie}");
    }
    assert_eq!(rig.read(3 * unit + 1100, 500), [3; 500]);
    assert_eq!(rig.read(0, 100), [1; 100]);
}

#[test]
fn in_a_cluster_of_subclusters() {
    let image = CreateOptions { extended_l2: Switch::On, ..CreateOptions::new(4 * CLUSTER) };
    let rig = Rig::qcow2(steady(), image);
    rig.submit(write(0, 100, 1, PLAIN)).unwrap();
    rig.submit(Request::Flush).unwrap();
    rig.log();
    later_writes_go_elsewhere(&rig, CLUSTER / 32);
}

#[test]
fn in_zeros_that_have_kept_their_place() {
    let rig = Rig::qcow2(steady(), CreateOptions::new(8 * CLUSTER));
    rig.submit(write(0, 4 * CLUSTER as usize, 1, PLAIN)).unwrap();
    let Request::WriteZeroes { range, fallback, durability, .. } =
        zeroes(3 * CLUSTER, CLUSTER, PLAIN)
    else {
        unreachable!("zeros")
    };
    let unmap = Unmap::Forbidden;
    rig.submit(Request::WriteZeroes { range, unmap, fallback, durability }).unwrap();
    rig.submit(Request::Flush).unwrap();
    rig.log();
    later_writes_go_elsewhere(&rig, CLUSTER);
}
