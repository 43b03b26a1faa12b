//! The record that a flush tracker leaves to the next process.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use blockhouse_core::{Buffer, ErrorKind, errno};
use blockhouse_sim::{Config, Fault, Operation, OperationKind, Sim, SimDisk};

use super::*;
use crate::state::{BootId, ImageIdentity, Owner};

fn page() -> StatePage {
    let words: Vec<AtomicU64> = std::iter::repeat_with(AtomicU64::default).take(512).collect();
    let image = ImageIdentity { device: 1, inode: 2, birth: 3 };
    let boot = BootId::current().expect("a host with /proc");
    let owner = Owner { boot, image, path: "disk".into(), process: 1 };
    StatePage::create(Arc::new(words), &owner)
}

fn tracker(storage: &SimDisk, page: &StatePage) -> FlushTracker<SimDisk> {
    let tracker = FlushTracker::new(storage.clone(), FlushPolicy::Honor, Access::ReadWrite);
    tracker.keep_record(page, TrackedFile::Image);
    tracker
}

#[test]
fn a_failed_flush_is_remembered_by_the_next_process() {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, Config::default(), vec![0; 4096]);
    let page = page();
    let first = tracker(&storage, &page);
    assert!(first.restore_failure().is_none());
    storage.fail(Fault::nth(0, errno::EIO).of(OperationKind::Flush));
    let flushed = sim.block_on(async move { first.flush(SyncMode::Data).await });
    flushed.expect_err("the storage failed");
    // The first process has ended. The kernel has reported the failure, and does not report it
    // again.
    let second = tracker(&storage, &page);
    assert_eq!(second.restore_failure().expect("it is kept").errno(), errno::EIO);
    let flushed = sim.block_on(async move { second.flush(SyncMode::Data).await });
    let error = flushed.expect_err("data may be lost");
    assert_eq!(error.errno(), errno::EIO);
    assert!(error.to_string().contains("before the server's process ended"), "{error}");
    page.clear_failures();
    let third = tracker(&storage, &page);
    assert!(third.restore_failure().is_none());
    sim.block_on(async move { third.flush(SyncMode::Data).await }).expect("an orderly end");
}

#[test]
fn what_a_durable_write_leaves_that_fails_for_want_of_space_is_flushed() {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, Config::default(), vec![0; 4096]);
    let tracker = FlushTracker::new(storage.clone(), FlushPolicy::Honor, Access::ReadWrite);
    storage.fail(Fault::nth(0, errno::ENOSPC).of(OperationKind::DurableWrite));
    let flushes = sim.block_on(async move {
        tracker.flush(SyncMode::Data).await.expect("no failure");
        storage.take_log();
        let written = tracker.write(0, Buffer::new(4096).lend(), Durability::Data).await;
        assert_eq!(written.expect_err("the storage is full").kind(), ErrorKind::NoSpace);
        // Reads may see a part of the failed write. After this flush that part is durable.
        tracker.flush(SyncMode::Data).await.expect("nothing else is lost");
        storage.take_log()
    });
    let flush = Operation::Flush(SyncMode::Data);
    assert_eq!(flushes.last(), Some(&flush), "{flushes:?}");
}

/// The page's record of the last change after `act`.
fn last_write_after(act: impl AsyncFnOnce(FlushTracker<SimDisk>) -> Result<()> + 'static) -> u64 {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, Config::default(), vec![0; 8192]);
    let page = page();
    let tracker = tracker(&storage, &page);
    sim.block_on(async move { act(tracker).await }).expect("no failure");
    page.last_write()
}

#[test]
fn changes_are_stamped_and_nothing_else() {
    let buffer = || Buffer::new(512).lend();
    let range = ByteRange::between(0, 4096);
    let writes = [Durability::None, Durability::Data].map(|durability| {
        last_write_after(async move |disk| disk.write(0, buffer(), durability).await)
    });
    let zeroes = last_write_after(async move |disk| disk.write_zeroes(range, Unmap::Allowed).await);
    let discard = last_write_after(async move |disk| disk.discard(range).await);
    let resize = last_write_after(async |disk| disk.resize(4096).await);
    assert!(writes.into_iter().chain([zeroes, discard, resize]).all(|stamp| stamp > 0));
    let read = last_write_after(async move |disk| disk.read(0, buffer()).await);
    let flush = last_write_after(async |disk| disk.flush(SyncMode::Data).await);
    assert_eq!((read, flush), (0, 0));
}
