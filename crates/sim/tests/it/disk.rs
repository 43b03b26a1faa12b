//! The simulated disk itself: what it leaves to chance and what it insists on.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use blockhouse_core::{
    Alignment, Buffer, ByteRange, Durability, ErrorKind, IoVector, Offload, Storage, SyncMode,
    Unmap, errno,
};
use blockhouse_sim::{
    Config, Fault, Latency, Operation, OperationKind, Rng, Sim, SimDisk, Support,
};

fn disk(sim: &Sim, config: Config) -> SimDisk {
    SimDisk::new(sim, config, vec![0; 8192])
}

fn bytes(length: usize, byte: u8) -> IoVector {
    let mut vector = Buffer::new(length).lend();
    vector.fill(byte);
    vector
}

/// The order in which five writes end that started one after the other.
fn order(seed: u64) -> Vec<u64> {
    let sim = Sim::new(seed);
    let disk = disk(&sim, Config::default());
    let ended = Rc::new(RefCell::new(Vec::new()));
    for number in 0..5 {
        let (disk, ended) = (disk.clone(), Rc::clone(&ended));
        sim.spawn(async move {
            let from = Buffer::new(512).lend();
            disk.write(number * 512, from, Durability::None).await.unwrap();
            ended.borrow_mut().push(number);
        });
    }
    sim.run();
    ended.take()
}

#[test]
fn operations_end_in_any_order_that_the_seed_replays() {
    let orders: HashSet<_> = (0..100).map(order).collect();
    assert!(orders.len() > 50, "{} orders of 120", orders.len());
    assert_eq!(order(3), order(3));
}

#[test]
fn an_operation_that_is_late_holds_up_no_other() {
    let sim = Sim::new(1);
    let disk = disk(&sim, Config::default());
    let hour = Duration::from_secs(3600);
    disk.fail(Fault::late(0, hour).of(OperationKind::DurableWrite));
    let late = disk.clone();
    let written = sim.spawn(async move { late.write(0, bytes(512, 1), Durability::Data).await });
    let (clock, others) = (sim.clock().clone(), disk.clone());
    sim.block_on(async move {
        others.write(512, bytes(512, 2), Durability::None).await.unwrap();
        others.flush(SyncMode::Data).await.unwrap();
        assert!(clock.now() < hour);
    });
    assert!(written.output().is_none() && disk.content()[..1024] == [[0; 512], [2; 512]].concat());
    let crashes: HashSet<_> =
        (0..50).map(|seed| disk.crash(&mut Rng::with_seed(seed))[0]).collect();
    assert_eq!(crashes, [0, 1].into(), "it may happen at any time");
    sim.run();
    assert!(written.output().is_some_and(|outcome| outcome.is_ok()) && sim.clock().now() > hour);
    assert_eq!(disk.content()[0], 1);
}

#[test]
#[should_panic(expected = "misaligned operation")]
fn a_misaligned_offset_is_a_mistake() {
    let sim = Sim::new(1);
    let alignment = Alignment { offset: 512, memory: 1 };
    let disk = disk(&sim, Config { alignment, ..Config::default() });
    let _ = sim.block_on(async move { disk.read(100, Buffer::new(512).lend()).await });
}

#[test]
#[should_panic(expected = "misaligned memory")]
fn misaligned_memory_is_a_mistake() {
    let sim = Sim::new(1);
    let alignment = Alignment { offset: 512, memory: 512 };
    let disk = disk(&sim, Config { alignment, ..Config::default() });
    let into = Buffer::new(1024).lend_range(8, 512);
    let _ = sim.block_on(async move { disk.read(0, into).await });
}

#[test]
fn an_operation_is_refused_once_and_not_offered_again() {
    let sim = Sim::new(1);
    let disk = disk(&sim, Config { write_zeroes: Support::FailsOnFirstUse, ..Config::default() });
    assert_eq!(disk.capabilities().write_zeroes, Offload::Available);
    let zero = disk.clone();
    let range = ByteRange::between(0, 4096);
    let error = sim.block_on(async move { zero.write_zeroes(range, Unmap::Allowed).await });
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(disk.capabilities().write_zeroes, Offload::Unavailable);
}

#[test]
fn a_flush_waits_for_one_that_was_dropped_and_tells_its_failure() {
    let sim = Sim::new(1);
    let disk = disk(&sim, Config { latency: Latency::fixed(10, 100), ..Config::default() });
    disk.fail(Fault::nth(0, errno::EIO).of(OperationKind::Flush));
    let first = disk.clone();
    let dropped = sim.spawn(async move { first.flush(SyncMode::Data).await });
    let clock = sim.clock().clone();
    sim.block_on(async move { clock.sleep(Duration::from_micros(1)).await });
    dropped.cancel();
    let (second, third) = (disk.clone(), disk.clone());
    let failed = sim.block_on(async move { second.flush(SyncMode::Data).await });
    assert_eq!(failed.unwrap_err().errno(), errno::EIO);
    assert_eq!(sim.clock().now(), Duration::from_micros(100));
    sim.block_on(async move { third.flush(SyncMode::Data).await }).unwrap();
    assert_eq!(disk.take_log(), [Operation::Flush(SyncMode::Data); 2]);
}

#[test]
fn a_dropped_write_happens_all_the_same() {
    let sim = Sim::new(1);
    let disk = disk(&sim, Config { latency: Latency::fixed(10, 100), ..Config::default() });
    let writer = disk.clone();
    let write = sim.spawn(async move {
        let mut from = Buffer::new(512).lend();
        from.fill(7);
        writer.write(0, from, Durability::None).await
    });
    assert!(sim.step());
    write.cancel();
    assert_eq!(disk.content()[0], 0);
    sim.run();
    assert_eq!(disk.content()[..512], [7; 512]);
}

/// The next process's values of two sectors: one that is written, and one whose write is in flight.
fn found_after_death(seed: u64) -> ([u8; 2], [u8; 2]) {
    let sim = Sim::new(seed);
    let disk = SimDisk::new(&sim, Config::default(), vec![0; 1024]);
    let writing = disk.clone();
    sim.block_on(async move { writing.write(0, bytes(512, 1), Durability::None).await }).unwrap();
    let writing = disk.clone();
    let written =
        sim.spawn(async move { writing.write(512, bytes(512, 2), Durability::None).await });
    while disk.counts().0 < 2 {
        assert!(sim.step());
    }
    sim.kill();
    assert!(!sim.step() && written.output().is_none(), "a dead process answers nothing");
    let (next, mut random) = (Sim::new(seed), Rng::with_seed(seed));
    let found = disk.after_death(&next, &mut random);
    let content = found.content();
    let image = found.crash(&mut random);
    ([content[0], content[512]], [image[0], image[512]])
}

#[test]
fn a_death_keeps_what_has_ended_and_a_loss_of_power_may_still_take_it() {
    let found: Vec<_> = (0..100).map(found_after_death).collect();
    assert!(found.iter().all(|(content, _)| content[0] == 1));
    assert!([0, 2].iter().all(|byte| found.iter().any(|(content, _)| content[1] == *byte)));
    assert!([0, 1].iter().all(|byte| found.iter().any(|(_, image)| image[0] == *byte)));
    // Bytes that the death did not leave do not come back.
    assert!(found.iter().all(|(content, image)| image[1] == 0 || image[1] == content[1]));
}

#[test]
fn the_process_dies_between_two_operations() {
    let sim = Sim::new(3);
    let disk = SimDisk::new(&sim, Config::default(), vec![0; 1024]);
    let writing = disk.clone();
    // The first operation starts and ends; the second one does not start.
    sim.kill_at(2);
    let task = sim.spawn(async move {
        writing.write(0, bytes(512, 1), Durability::None).await?;
        writing.write(512, bytes(512, 2), Durability::None).await
    });
    sim.run();
    assert!(sim.is_dead() && task.output().is_none());
    assert_eq!(disk.counts(), (1, 1));
}
