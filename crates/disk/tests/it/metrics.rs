//! The counters of a disk, against the log of the simulated storage beneath it and the requests
//! that were made.

use std::collections::BTreeMap;

use blockhouse_core::{Durability, Request, errno};
use blockhouse_disk::{DiskMetrics, ExportKind, Operation, Options, Stage};
use blockhouse_format::qcow2::CreateOptions;
use blockhouse_sim::Operation as Logged;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::{Rig, blocks_of, discard, memory, span, steady, write, zeroes};

const SIZE: u64 = 1 << 20;

/// A request: an operation, where and how much, in sectors.
type Asked = (Operation, u64, u64);

fn asked() -> impl Strategy<Value = Asked> {
    let operation = proptest::sample::select(vec![
        Operation::Read,
        Operation::Write,
        Operation::WriteFua,
        Operation::WriteZeroes,
        Operation::Discard,
        Operation::Flush,
        Operation::Prefetch,
    ]);
    // Some of it is past the end.
    (operation, 0..SIZE / 512 + 8, 1..300_u64)
}

fn request((operation, offset, length): Asked) -> Request {
    let (offset, length) = (offset * 512, length * 512);
    match operation {
        Operation::Read => Request::Read { offset, into: memory(length as usize, 0) },
        Operation::Write => write(offset, length as usize, 1, Durability::None),
        Operation::WriteFua => write(offset, length as usize, 1, Durability::Data),
        Operation::WriteZeroes => zeroes(offset, length, Durability::None),
        Operation::Discard => discard(offset, length),
        Operation::Prefetch => Request::Prefetch { range: span(offset, length) },
        Operation::Flush | Operation::BlockStatus => Request::Flush,
    }
}

/// How many operations of each kind reached the storage, and their bytes.
fn logged(log: &[Logged]) -> BTreeMap<&'static str, (u64, u64)> {
    let mut counts = BTreeMap::new();
    for operation in log {
        let (label, bytes) = match operation {
            Logged::Read(range) => ("read", range.length()),
            Logged::Write(range, Durability::None) => ("write", range.length()),
            Logged::Write(range, _) => ("write_fua", range.length()),
            Logged::WriteZeroes(range, _) => ("write_zeroes", range.length()),
            Logged::Discard(range) => ("discard", range.length()),
            Logged::Flush(_) => ("flush", 0),
            _ => continue,
        };
        let count: &mut (u64, u64) = counts.entry(label).or_default();
        *count = (count.0 + 1, count.1 + bytes);
    }
    counts
}

/// The same, as the disk has measured it.
fn measured(metrics: &DiskMetrics) -> BTreeMap<&'static str, (u64, u64)> {
    let mut counts = BTreeMap::new();
    for one in metrics.stages.iter().filter(|one| one.stage != Stage::Queue) {
        let count: &mut (u64, u64) = counts.entry(one.operation).or_default();
        *count = (count.0 + one.durations.count(), count.1 + one.bytes);
    }
    counts
}

fn difference(
    after: BTreeMap<&'static str, (u64, u64)>,
    before: &BTreeMap<&'static str, (u64, u64)>,
) -> BTreeMap<&'static str, (u64, u64)> {
    let less = |(label, (count, bytes)): (&'static str, (u64, u64))| {
        let (was, of) = before.get(label).copied().unwrap_or_default();
        (label, (count - was, bytes - of))
    };
    after.into_iter().map(less).filter(|(_, (count, _))| *count > 0).collect()
}

fn check(rig: &Rig, list: &[Asked]) {
    rig.log();
    let before = rig.disk.stats().metrics();
    let mut model: BTreeMap<&'static str, (u64, u64, u64)> = BTreeMap::new();
    for &asked in list {
        let (operation, _, length) = asked;
        let entry = model.entry(operation.as_str()).or_default();
        let bytes = if operation == Operation::Flush { 0 } else { length * 512 };
        let outcome = rig.submit(request(asked));
        *entry = (entry.0 + 1, entry.1 + bytes, entry.2 + u64::from(outcome.is_err()));
    }
    let after = rig.disk.stats().metrics();
    assert_eq!(difference(measured(&after), &measured(&before)), logged(&rig.log()));
    let was = |operation| {
        let found = before.requests.iter().find(|one| one.operation == operation);
        found.map_or((0, 0), |one| (one.started, one.bytes))
    };
    let mut found = BTreeMap::new();
    for one in &after.requests {
        assert_eq!(one.export, ExportKind::Local);
        assert_eq!(one.durations.count(), one.started, "all have ended");
        let failed = one.errors.iter().map(|error| error.count).sum::<u64>();
        let (started, bytes) = was(one.operation);
        if one.started > started {
            let label = one.operation.as_str();
            found.insert(label, (one.started - started, one.bytes - bytes, failed));
        }
    }
    assert_eq!(found, model);
    assert_eq!(after.in_flight, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn what_is_measured_is_what_was_asked_and_what_reached_the_storage(
        list in vec(asked(), 0..30),
        block in proptest::sample::select(vec![512_u32, 4096]),
    ) {
        check(&Rig::new(blocks_of(block), SIZE as usize, Options::default()), &list);
        check(&Rig::qcow2(blocks_of(block), CreateOptions::new(SIZE)), &list);
    }
}

#[test]
fn errors_are_counted_by_errno() {
    let rig = Rig::new(steady(), SIZE as usize, Options::default());
    for _ in 0..3 {
        rig.submit(write(SIZE, 512, 1, Durability::None)).unwrap_err();
    }
    rig.submit(Request::Read { offset: SIZE, into: memory(512, 0) }).unwrap_err();
    let errors = |operation| {
        let metrics = rig.disk.stats().metrics();
        let one = metrics.requests.into_iter().find(|one| one.operation == operation);
        let errors = one.expect("there were some").errors;
        errors.iter().map(|error| (error.errno, error.count)).collect::<Vec<_>>()
    };
    assert_eq!(errors(Operation::Write), [(errno::ENOSPC, 3)]);
    assert_eq!(errors(Operation::Read), [(errno::EINVAL, 1)]);
}

#[test]
fn a_change_that_waits_for_another_has_waited_in_the_queue() {
    let rig = Rig::new(blocks_of(4096), SIZE as usize, Options::default());
    // Both change a part of the same block.
    let tasks = [0, 512].map(|offset| rig.start(write(offset, 512, 1, Durability::None)));
    rig.sim.run();
    tasks.into_iter().for_each(|task| task.output().expect("it ran").expect("no failure"));
    let metrics = rig.disk.stats().metrics();
    let waits: Vec<_> = metrics.stages.iter().filter(|one| one.stage == Stage::Queue).collect();
    assert_eq!(waits.len(), 1);
    assert_eq!((waits[0].operation, waits[0].durations.count()), ("write", 1));
}

#[test]
fn a_request_that_is_dropped_has_started_and_not_ended() {
    let rig = Rig::new(steady(), SIZE as usize, Options::default());
    drop(rig.start(write(0, 512, 1, Durability::None)));
    rig.sim.run();
    let begun = rig.disk.stats().measure(ExportKind::Nbd, Operation::BlockStatus, 7);
    assert_eq!(rig.disk.stats().metrics().in_flight, 1);
    drop(begun);
    let metrics = rig.disk.stats().metrics();
    let one = metrics.requests.iter().find(|one| one.operation == Operation::BlockStatus);
    let one = one.expect("it was begun");
    assert_eq!((one.export, one.started, one.bytes), (ExportKind::Nbd, 1, 7));
    assert_eq!((one.durations.count(), metrics.in_flight), (0, 0));
}

#[test]
fn clients_are_counted_until_they_leave() {
    let rig = Rig::new(steady(), SIZE as usize, Options::default());
    let clients = || {
        let read = |one: &blockhouse_disk::ClientMetrics| (one.connected, one.connections);
        rig.disk.stats().metrics().clients.iter().map(read).collect::<Vec<_>>()
    };
    let first = rig.disk.stats().enter_client(ExportKind::Nbd);
    let second = rig.disk.stats().enter_client(ExportKind::Nbd);
    drop(first);
    assert_eq!(clients(), [(1, 2)]);
    drop(second);
    assert_eq!(clients(), [(0, 2)]);
}
