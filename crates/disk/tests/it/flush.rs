//! Flushes: the requests that make one, wait for one, are spared one, and the effect of a failure
//! on later ones.

use std::rc::Rc;

use blockhouse_core::SyncMode::{Data as DataSync, Full as FullSync};
use blockhouse_core::{Durability, ErrorKind, Fua, GroupCommit, Request, errno};
use blockhouse_disk::{Access, Disk, FlushPolicy, Options, quiesce_flushed};
use blockhouse_format::qcow2::{CreateOptions, Switch};
use blockhouse_sim::Operation::{Close, Flush, Resize, Write};
use blockhouse_sim::{Config, Fault, Operation, OperationKind, Rng};

use crate::common::{DATA, FLUSH, Rig, span, steady, write};

const SIZE: usize = 1 << 20;

fn rig() -> Rig {
    Rig::new(steady(), SIZE, Options::default())
}

/// A disk with something to flush, its log empty.
fn dirty() -> Rig {
    let rig = rig();
    rig.submit(write(0, 512, 1, Durability::None)).unwrap();
    rig.log();
    rig
}

fn plain_write() -> Request {
    write(4096, 512, 2, Durability::None)
}

#[test]
fn flushes_at_the_same_time_share_one() {
    let rig = dirty();
    let flushes: Vec<_> = (0..10).map(|_| rig.start(Request::Flush)).collect();
    rig.sim.run();
    assert!(flushes.iter().all(|flush| flush.output().unwrap().is_ok()));
    assert_eq!(rig.log(), [Flush(DataSync)]);
    assert_eq!(rig.disk.stats().counters().flushes_shared, 9);
}

#[test]
fn durable_writes_in_a_crowd_share_a_flush_where_that_is_cheaper() {
    let config = Config { group_commit: GroupCommit::From(2), ..steady() };
    let rig = Rig::new(config, SIZE, Options::default());
    let durable = |block: u64| write(block * 4096, 512, 3, Durability::Data);
    let writes: Vec<_> = (0..4).map(|block| rig.start(durable(block))).collect();
    rig.sim.run();
    assert!(writes.iter().all(|write| write.output().unwrap().is_ok()));
    let log = rig.log();
    let count = |wanted: fn(&Operation) -> bool| log.iter().filter(|one| wanted(one)).count();
    assert_eq!(count(|one| matches!(one, Write(_, Durability::Data))), 1, "the first: {log:?}");
    assert_eq!(count(|one| matches!(one, Write(_, Durability::None))), 3, "{log:?}");
    // One for the first of them to arrive, one for those that arrived meanwhile.
    assert_eq!(count(|one| *one == Flush(DataSync)), 2, "{log:?}");
    rig.submit(durable(9)).unwrap();
    assert_eq!(rig.log(), [Write(span(9 * 4096, 512), Durability::Data)], "alone again");
}

#[test]
fn those_who_come_after_a_write_share_the_next_one() {
    let rig = dirty();
    let first = rig.start(Request::Flush);
    rig.wait(1);
    rig.submit(plain_write()).unwrap();
    let later: Vec<_> = (0..5).map(|_| rig.start(Request::Flush)).collect();
    rig.wait(FLUSH - DATA - 5);
    assert!(first.output().is_none() && later.iter().all(|flush| flush.output().is_none()));
    rig.wait(10);
    assert!(first.output().is_some(), "not held up by later ones");
    assert!(later.iter().all(|flush| flush.output().is_none()), "not covered by the first");
    rig.sim.run();
    assert!(later.iter().all(|flush| flush.output().unwrap().is_ok()));
    let write = Write(span(4096, 512), Durability::None);
    assert_eq!(rig.log(), [Flush(DataSync), write, Flush(DataSync)]);
}

#[test]
fn a_write_that_completes_during_a_flush_leaves_something_to_flush() {
    let rig = dirty();
    let flush = rig.start(Request::Flush);
    rig.wait(FLUSH / 2);
    rig.submit(plain_write()).unwrap();
    rig.sim.run();
    assert!(flush.output().unwrap().is_ok());
    rig.log();
    rig.submit(Request::Flush).unwrap();
    assert_eq!(rig.log(), [Flush(DataSync)]);
}

#[test]
fn a_failed_flush_is_remembered() {
    let rig = dirty();
    rig.storage.fail(Fault::nth(0, errno::EIO).of(OperationKind::Flush));
    let together: Vec<_> = (0..3).map(|_| rig.start(Request::Flush)).collect();
    rig.sim.run();
    for flush in together {
        assert_eq!(flush.output().unwrap().unwrap_err().errno(), errno::EIO);
    }
    rig.log();
    assert_eq!(rig.submit(Request::Flush).unwrap_err().errno(), errno::EIO);
    let durable = rig.submit(write(0, 512, 1, Durability::Data)).unwrap_err();
    assert_eq!((durable.kind(), durable.errno()), (ErrorKind::Io, errno::EIO));
    assert!(durable.to_string().contains("reopen"), "{durable}");
    rig.submit(plain_write()).unwrap();
    let resize = {
        let disk = rig.disk.clone();
        async move { disk.resize(2 << 20).await }
    };
    assert_eq!(rig.sim.block_on(resize).unwrap_err().errno(), errno::EIO);
    let close = {
        let disk = rig.disk.clone();
        async move { disk.close().await }
    };
    assert_eq!(rig.sim.block_on(close).unwrap_err().errno(), errno::EIO);
    let plain = Write(span(4096, 512), Durability::None);
    assert_eq!(rig.log(), [plain, Close], "no flush is tried again, and the size stays");
}

#[test]
fn the_errno_of_a_failed_flush_is_kept() {
    let rig = dirty();
    rig.storage.fail(Fault::nth(0, errno::ENOSPC).of(OperationKind::Flush));
    for _ in 0..2 {
        let error = rig.submit(Request::Flush).unwrap_err();
        assert_eq!((error.kind(), error.errno()), (ErrorKind::NoSpace, errno::ENOSPC));
    }
}

#[test]
fn a_failed_flush_fails_durable_writes_on_emulated_fua() {
    let config = Config { fua: Fua::Emulated, ..steady() };
    let rig = Rig::new(config, SIZE, Options::default());
    rig.storage.fail(Fault::nth(0, errno::EIO).of(OperationKind::Flush));
    for _ in 0..2 {
        let error = rig.submit(write(0, 512, 1, Durability::Data)).unwrap_err();
        assert_eq!(error.errno(), errno::EIO);
    }
}

#[test]
fn a_failed_durable_write_counts_as_a_failed_flush() {
    let rig = rig();
    rig.storage.fail(Fault::nth(0, errno::EIO).of(OperationKind::DurableWrite));
    rig.submit(write(0, 512, 1, Durability::Data)).unwrap_err();
    assert_eq!(rig.submit(Request::Flush).unwrap_err().errno(), errno::EIO);
}

#[test]
fn a_durable_write_that_found_no_room_is_not_held_against_the_disk() {
    let rig = rig();
    rig.storage.fail(Fault::nth(0, errno::ENOSPC).of(OperationKind::DurableWrite));
    let error = rig.submit(write(0, 512, 1, Durability::Data)).unwrap_err();
    assert_eq!(error.errno(), errno::ENOSPC);
    rig.submit(write(0, 512, 1, Durability::Data)).unwrap();
    rig.submit(Request::Flush).unwrap();
}

/// Through a page cache the errno of a durable write may be that of an older write that could not
/// be written back, and the host reports it once.
#[test]
fn a_durable_write_that_reports_the_loss_of_older_writes_is_a_failed_flush_whatever_its_errno() {
    for errno in [errno::ENOSPC, errno::EDQUOT, errno::EFBIG, errno::EIO] {
        let rig = dirty();
        let fault = Fault::nth(0, errno).of(OperationKind::DurableWrite);
        rig.storage.fail(fault.losing_older_writes());
        rig.submit(write(8192, 512, 3, Durability::Data)).unwrap_err();
        rig.storage.clear_faults();
        let error = rig.submit(Request::Flush).expect_err("what was acknowledged is lost");
        assert_eq!(error.errno(), errno);
    }
}

#[test]
fn those_who_wait_for_a_dropped_flush_go_on_themselves() {
    let rig = dirty();
    let given_up = rig.start(Request::Flush);
    rig.wait(1);
    let waiting: Vec<_> = (0..3).map(|_| rig.start(Request::Flush)).collect();
    rig.wait(1);
    given_up.cancel();
    rig.sim.run();
    assert!(waiting.iter().all(|flush| flush.output().unwrap().is_ok()));
    assert_eq!(rig.log(), [Flush(DataSync), Flush(DataSync)]);
}

#[test]
fn the_failure_of_a_dropped_flush_is_not_lost() {
    let rig = dirty();
    rig.storage.fail(Fault::nth(0, errno::EIO).of(OperationKind::Flush));
    let given_up = rig.start(Request::Flush);
    rig.wait(1);
    given_up.cancel();
    assert_eq!(rig.submit(Request::Flush).unwrap_err().errno(), errno::EIO);
}

#[test]
fn a_dropped_write_leaves_something_to_flush() {
    let rig = rig();
    let given_up = rig.start(plain_write());
    rig.wait(1);
    given_up.cancel();
    rig.sim.run();
    rig.submit(Request::Flush).unwrap();
    assert_eq!(rig.log(), [Write(span(4096, 512), Durability::None), Flush(DataSync)]);
}

#[test]
fn a_flush_believes_its_success_after_the_durable_writes_beside_it() {
    let rig = dirty();
    rig.storage.fail(Fault::nth(0, errno::EIO).of(OperationKind::DurableWrite));
    let flush = rig.start(Request::Flush);
    rig.wait(1);
    // It ends after the flush, and what it took along is what the flush calls stable.
    let durable = rig.start(write(0, 512, 2, Durability::Data));
    rig.wait(FLUSH + 2);
    assert!(flush.output().is_none(), "the outcome of the write is not known yet");
    rig.sim.run();
    assert!(durable.output().unwrap().is_err());
    assert_eq!(flush.output().unwrap().unwrap_err().errno(), errno::EIO);
}

#[test]
fn a_new_size_is_fully_synced() {
    let rig = rig();
    let resize = {
        let disk = rig.disk.clone();
        async move { disk.resize(2 << 20).await }
    };
    rig.sim.block_on(resize).unwrap();
    assert_eq!(rig.disk.size(), 2 << 20);
    assert_eq!(rig.log(), [Resize(2 << 20), Flush(FullSync)]);
}

/// A process that wrote and was killed leaves its data in the disk's cache. The next one has
/// written nothing, but its client may have been told by the first that the write is done, and asks
/// for the flush now.
#[test]
fn a_flush_covers_what_a_killed_process_wrote_before() {
    for seed in 0..20 {
        let rig = rig();
        rig.submit(write(0, 4096, 1, Durability::None)).unwrap();
        let Rig { sim, storage, disk } = rig;
        drop(disk);
        let disk = Rc::new(Disk::raw(storage.clone(), Options::default()).expect("a disk"));
        let rig = Rig { sim, storage, disk };
        rig.log();
        rig.submit(Request::Flush).unwrap();
        assert_eq!(rig.log(), [Flush(DataSync)]);
        assert_eq!(rig.storage.crash(&mut Rng::with_seed(seed))[..4096], [1; 4096]);
        rig.submit(Request::Flush).unwrap();
        assert_eq!(rig.log(), [], "once is enough");
    }
}

#[test]
fn the_first_flush_is_skipped_where_nothing_can_be_flushed() {
    for options in [
        Options { access: Access::ReadOnly, ..Options::default() },
        Options { flush: FlushPolicy::Ignore, ..Options::default() },
    ] {
        let rig = Rig::with_past(steady(), SIZE, options);
        rig.submit(Request::Flush).unwrap();
        assert_eq!(rig.log(), []);
    }
}

#[test]
fn nothing_is_left_to_a_pause_in_which_nothing_changes() {
    for lazy_refcounts in [Switch::Off, Switch::On] {
        let image = CreateOptions { lazy_refcounts, ..CreateOptions::new(SIZE as u64) };
        let rig = Rig::qcow2(steady(), image);
        rig.submit(write(0, 4096, 1, Durability::None)).unwrap();
        let (disk, storage) = (Rc::clone(&rig.disk), rig.storage.clone());
        rig.sim.block_on(async move {
            let quiesced = quiesce_flushed(&disk, DataSync).await.unwrap();
            storage.take_log();
            disk.format().flush_all(DataSync).await.unwrap();
            assert!(storage.take_log().is_empty(), "nothing is written or flushed again");
            drop(quiesced);
        });
    }
}
