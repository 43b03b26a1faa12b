//! Copies of disks that go on, and backups of disks that do not change.

use std::sync::Arc;

use blockhouse_core::{Buffer, ByteRange, Durability, Request};
use blockhouse_disk::{DirtyMap, Disk};
use blockhouse_jobs::{Completion, JobControl, JobEnd, JobStage, Mirror, MirrorOptions};
use blockhouse_sim::{Sim, SimDisk};

use crate::guests;
use crate::scene::{self, clock};

const SIZE: usize = 256 << 10;
const GRANULARITY: u64 = 4096;

/// Seeds of the disks' kinds.
const SEEDS: std::ops::Range<u64> = 0..24;

/// Two disks of these bytes.
fn disks(sim: &Sim, bytes: [u8; 2]) -> [Arc<Disk<SimDisk>>; 2] {
    let mut random = sim.fork_prng();
    bytes.map(|byte| {
        let (own, mut random) = (sim.clone(), random.fork());
        let content = vec![byte; SIZE];
        sim.block_on(
            async move { scene::disk(&own, &mut random, &content).await.expect("a disk").disk },
        )
    })
}

async fn write(disk: &Disk<SimDisk>, range: ByteRange, byte: u8) {
    let mut buffer = Buffer::new(range.length() as usize);
    buffer.bytes_mut().fill(byte);
    let (offset, from, durability) = (range.offset(), buffer.lend(), Durability::None);
    disk.submit(Request::Write { offset, from, durability }).await.expect("it takes it");
}

fn is_copied(end: &JobEnd) -> bool {
    matches!(end, JobEnd::Completed { completion: Completion::Copy, .. })
}

#[test]
fn a_disk_goes_on_by_itself_after_a_copy_of_it() {
    for seed in SEEDS {
        let sim = Sim::new(seed);
        let [source, target] = disks(&sim, [7, 1]);
        let (clock, control) = (clock(&sim), Arc::new(JobControl::default()));
        let (from, to, asked) = (Arc::clone(&source), Arc::clone(&target), Arc::clone(&control));
        let mirror = Mirror::new(from, to, MirrorOptions::default(), Arc::clone(&control), clock);
        let mirror = mirror.expect("disks that fit").before_completion(|| panic!("it is moved"));
        let told = Arc::clone(&control);
        let running = sim.spawn(async move {
            let end = mirror.run().await;
            told.end(end.clone());
            end
        });
        sim.block_on(async move {
            asked.next_stage(&JobStage::Running).await;
            scene::complete(&asked, Completion::Copy).await;
            let end = running.join().await;
            assert!(is_copied(&end), "{seed}: {end:?}");
            assert!(!source.is_replaced());
            write(&source, ByteRange::between(0, GRANULARITY), 9).await;
            let [source, target] = [guests::read(&source).await, guests::read(&target).await];
            assert_eq!(source.expect("it reads")[..4096], [9; 4096]);
            assert!(target.expect("it reads") == vec![7; SIZE], "{seed}");
        });
    }
}

#[test]
fn a_backup_of_certain_ranges_leaves_all_else_as_it_is() {
    for seed in SEEDS {
        let sim = Sim::new(seed);
        let [source, target] = disks(&sim, [7, 1]);
        let only = DirtyMap::new(SIZE as u64, GRANULARITY).expect("memory");
        let ranges = [ByteRange::between(8192, 12_288), ByteRange::between(65_536, 81_920)];
        ranges.iter().for_each(|range| _ = only.mark(*range));
        let (clock, control) = (clock(&sim), Arc::new(JobControl::default()));
        let to = Arc::clone(&target);
        control.complete(Completion::Copy);
        let mirror =
            Mirror::backup(source, to, Some(only), control, clock).expect("disks that fit");
        sim.block_on(async move {
            let end = mirror.run().await;
            assert!(is_copied(&end), "{seed}: {end:?}");
            let found = guests::read(&target).await.expect("it reads");
            let mut expected = vec![1; SIZE];
            for range in ranges {
                expected[range.offset() as usize..range.end() as usize].fill(7);
            }
            assert!(found == expected, "{seed}");
        });
    }
}

#[test]
fn a_backup_of_all_of_a_disk_is_what_the_disk_is() {
    let sim = Sim::new(3);
    let [source, target] = disks(&sim, [7, 1]);
    let (clock, control) = (clock(&sim), Arc::new(JobControl::default()));
    let to = Arc::clone(&target);
    control.complete(Completion::Copy);
    let mirror = Mirror::backup(source, to, None, control, clock).expect("disks that fit");
    sim.block_on(async move {
        assert!(is_copied(&mirror.run().await));
        assert!(guests::read(&target).await.expect("it reads") == vec![7; SIZE]);
    });
}
