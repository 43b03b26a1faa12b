//! Limits on the rates of whole disks: what waits for them, what does not, and that no request
//! waits for ever.

use std::cell::Cell;
use std::future::Future;
use std::num::NonZeroU64;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Request, Result, Unmap};
use blockhouse_disk::{Disk, Options, RateLimits, ThrottleGroup};
use blockhouse_engine::{Clock, EngineChoice, EventLoop, HostFile, OpenMode, PageCache};
use blockhouse_format::qcow2::CreateOptions;

use blockhouse_sim::SimDisk;

use crate::common::{Rig, steady};

/// A clock that stands still: what waits, waits until something else lets it go.
struct StoppedClock;

impl Clock for StoppedClock {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep(&self, _time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(std::future::pending())
    }
}

fn iops(rate: u64) -> RateLimits {
    RateLimits { iops: NonZeroU64::new(rate), ..RateLimits::default() }
}

/// Limits the rig's disk.
fn limit(rig: &Rig, limits: RateLimits) {
    rig.disk.throttle().set_group(Some(ThrottleGroup::with_clock(limits, Arc::new(StoppedClock))));
}

/// A write of 4 KiB.
fn write(rig: &Rig, durability: Durability) -> impl Future<Output = Result<()>> + 'static {
    let disk = Rc::clone(&rig.disk);
    async move {
        let mut buffer = Buffer::new(4096);
        let from = buffer.lend();
        disk.submit(Request::Write { offset: 0, from, durability }).await
    }
}

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Uses up what the disk may do.
fn exhaust(rig: &Rig) {
    limit(rig, RateLimits { bps: NonZeroU64::new(1000), ..RateLimits::default() });
    rig.sim.block_on(write(rig, Durability::None)).expect("the first is let go");
}

#[test]
fn flushes_never_wait() {
    let rig = Rig::new(steady(), 1 << 20, Options::default());
    exhaust(&rig);
    let mut waiting = pin!(write(&rig, Durability::Data));
    assert!(poll(waiting.as_mut()).is_pending());
    rig.submit(Request::Flush).expect("no failure");
    assert!(poll(waiting.as_mut()).is_pending());
    let stats = rig.disk.stats().throttle();
    assert_eq!((stats.waiting, stats.delayed), (1, 1));
}

#[test]
fn what_waits_is_no_change_in_flight() {
    let rig = Rig::qcow2(steady(), CreateOptions::new(1 << 20));
    exhaust(&rig);
    let mut waiting = pin!(write(&rig, Durability::None));
    assert!(poll(waiting.as_mut()).is_pending());
    let disk = Rc::clone(&rig.disk);
    let taken = rig.sim.block_on(async move { disk.snapshots().create("now").await.map(|_| ()) });
    taken.expect("a snapshot");
    assert!(poll(waiting.as_mut()).is_pending());
}

#[test]
fn lifted_limits_let_all_go_and_are_in_force_again_afterwards() {
    let rig = Rig::new(steady(), 1 << 20, Options::default());
    exhaust(&rig);
    let waiting: Vec<_> = (0..50).map(|_| rig.sim.spawn(write(&rig, Durability::None))).collect();
    rig.sim.run();
    assert_eq!(rig.disk.stats().throttle().waiting, 50);
    let lifted = rig.disk.throttle().lift();
    rig.sim.block_on(async move {
        for task in waiting {
            task.join().await.expect("no failure");
        }
    });
    rig.sim.block_on(write(&rig, Durability::None)).expect("no failure");
    drop(lifted);
    assert!(poll(pin!(write(&rig, Durability::None))).is_pending());
}

#[test]
fn what_moves_no_data_is_an_operation_without_bytes() {
    let rig = Rig::new(steady(), 1 << 20, Options::default());
    limit(&rig, RateLimits { bps: NonZeroU64::new(1000), ..RateLimits::default() });
    let (durability, range) = (Durability::None, ByteRange::between(0, 1 << 20));
    let (unmap, fallback) = (Unmap::Allowed, Fallback::Allowed);
    for _ in 0..100 {
        rig.submit(Request::Discard { range, durability }).expect("no failure");
        rig.submit(Request::WriteZeroes { range, unmap, fallback, durability }).expect("zeros");
    }
    assert_eq!(rig.disk.stats().throttle().delayed, 0);
    limit(&rig, iops(1));
    rig.submit(Request::Discard { range, durability }).expect("the first is let go");
    let discard = Request::Discard { range, durability };
    assert!(poll(pin!(rig.disk.submit(discard))).is_pending());
}

#[test]
fn a_disk_whose_limits_are_taken_away_goes_on() {
    let rig = Rig::new(steady(), 1 << 20, Options::default());
    exhaust(&rig);
    let waiting: Vec<_> = (0..50).map(|_| rig.sim.spawn(write(&rig, Durability::None))).collect();
    rig.sim.run();
    rig.disk.throttle().set_limits(RateLimits::default());
    rig.sim.block_on(async move {
        for task in waiting {
            task.join().await.expect("no failure");
        }
    });
    rig.disk.throttle().set_group(None);
    assert!(rig.disk.throttle().group().is_none());
    rig.sim.block_on(write(&rig, Durability::None)).expect("no failure");
}

/// On real loops: disks of all loops in one group, with futures that are dropped, limits that
/// change, and every request that is not dropped carried out. A lost wake-up would hang.
#[test]
fn no_wake_up_is_lost_between_loops() {
    const TASKS: usize = 24;
    const REQUESTS: u64 = 150;
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let group = ThrottleGroup::new(iops(20_000));
    let open = || {
        let file = HostFile::open(file.path(), OpenMode::ReadOnly, PageCache::Used).unwrap();
        let disk = Arc::new(Disk::raw(SimDisk::wrapping(file), Options::default()).unwrap());
        disk.throttle().set_group(Some(Arc::clone(&group)));
        disk
    };
    let (shared, done) = (open(), Arc::new(AtomicU64::new(0)));
    let loops: Vec<_> = (0..3u64)
        .map(|number| {
            let (own, shared, done) = (open(), Arc::clone(&shared), Arc::clone(&done));
            thread::spawn(move || {
                let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
                event_loop.block_on(async move {
                    let tasks: Vec<_> = (0..TASKS)
                        .map(|task| {
                            let disk = Arc::clone(if task % 2 == 0 { &own } else { &shared });
                            let done = Arc::clone(&done);
                            let seed = number * 1000 + task as u64;
                            blockhouse_engine::spawn(read_and_drop(disk, done, REQUESTS, seed))
                        })
                        .collect();
                    for task in tasks {
                        task.await;
                    }
                });
            })
        })
        .collect();
    for round in 0.. {
        if loops.iter().all(thread::JoinHandle::is_finished) {
            break;
        }
        group.set_limits(iops([20_000, 500, 50_000, 2_000][round % 4]));
        if round % 16 == 0 {
            drop(shared.throttle().lift());
        }
        thread::sleep(Duration::from_millis(5));
    }
    loops.into_iter().for_each(|one| one.join().unwrap());
    assert_eq!(done.load(Ordering::Relaxed), 3 * TASKS as u64 * REQUESTS);
    assert_eq!(shared.stats().throttle().waiting, 0);
}

/// Reads until this many reads were carried out; one of four is dropped after a while if it still
/// waits.
async fn read_and_drop(disk: Arc<Disk<SimDisk>>, done: Arc<AtomicU64>, count: u64, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut left = count;
    while left > 0 {
        let mut buffer = Buffer::new(512);
        let mut read = pin!(disk.submit(Request::Read { offset: 0, into: buffer.lend() }));
        let outcome = if random.u8(..4) == 0 {
            let patience = blockhouse_engine::sleep(Duration::from_micros(random.u64(..2000)));
            match futures_util::future::select(read.as_mut(), patience).await {
                futures_util::future::Either::Left((outcome, _)) => Some(outcome),
                futures_util::future::Either::Right(_) => None,
            }
        } else {
            Some(read.await)
        };
        if let Some(outcome) = outcome {
            outcome.expect("a read");
            left -= 1;
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_loop_that_is_held_up_delays_no_other_loop_of_the_group() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let group = ThrottleGroup::new(iops(50));
    let (group, path) = (&group, file.path());
    let is_over = &AtomicBool::new(false);
    // Reads with this many tasks at a time until the test is over. A held-up loop blocks its thread
    // now and then.
    let serve = |tasks: usize, is_held_up: bool| {
        let file = HostFile::open(path, OpenMode::ReadOnly, PageCache::Used).unwrap();
        let disk = Arc::new(Disk::raw(SimDisk::wrapping(file), Options::default()).unwrap());
        disk.throttle().set_group(Some(Arc::clone(group)));
        let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
        let longest = Rc::new(Cell::new(Duration::ZERO));
        let seen = Rc::clone(&longest);
        event_loop.block_on(async move {
            for _ in 0..tasks {
                let (disk, longest) = (Arc::clone(&disk), Rc::clone(&longest));
                drop(blockhouse_engine::spawn(async move {
                    loop {
                        let (mut buffer, begin) = (Buffer::new(512), Instant::now());
                        let into = buffer.lend();
                        disk.submit(Request::Read { offset: 0, into }).await.expect("a read");
                        longest.set(longest.get().max(begin.elapsed()));
                    }
                }));
            }
            while !is_over.load(Ordering::Relaxed) {
                blockhouse_engine::sleep(Duration::from_millis(30)).await;
                if is_held_up {
                    thread::sleep(Duration::from_secs(5));
                }
            }
        });
        seen.get()
    };
    thread::scope(|scope| {
        let held_up = scope.spawn(|| serve(4, true));
        // The requests wait and have the timer before the other's come.
        thread::sleep(Duration::from_millis(20));
        let other = scope.spawn(|| serve(1, false));
        thread::sleep(Duration::from_secs(8));
        is_over.store(true, Ordering::Relaxed);
        let longest = other.join().unwrap();
        assert!(longest < Duration::from_secs(3), "one waited for {longest:?}");
        held_up.join().unwrap();
    });
}
