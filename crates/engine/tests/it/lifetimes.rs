//! Operations, futures and loops may end in any order, on every engine.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use blockhouse_core::{Buffer, Durability, IoVectorList, Storage, SyncMode};
use blockhouse_engine::{
    EventLoop, HostFile, Listener, PageCache, Stream, sleep, spawn, spawn_detached,
};
use fastrand::Rng;
use futures_util::FutureExt as _;

use crate::common::seeds::for_seeds;
use crate::common::{for_every_choice, in_time};

/// Polls a future once, on the loop; it is not ready.
fn start<F: Future + ?Sized>(event_loop: &mut EventLoop, mut future: Pin<&mut F>) {
    let is_pending = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending()));
    assert!(event_loop.block_on(is_pending), "there is nothing to receive or to read yet");
}

/// A receive that never gets an answer, its buffer, and the other end.
fn endless_receive() -> (Pin<Box<dyn Future<Output = ()>>>, Arc<()>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let stream = Stream::new(ours.into()).unwrap();
    let guard = Arc::new(());
    let mut list = IoVectorList::new();
    list.push(Buffer::new(16).lend().with_guard(Arc::clone(&guard)));
    let receive = async move {
        let _ = stream.receive(list).await;
    };
    (Box::pin(receive), guard, theirs)
}

#[test]
fn a_future_may_be_dropped_outside_of_its_loop() {
    for_every_choice(|choice| {
        in_time(move || {
            let mut event_loop = EventLoop::new(choice).unwrap();
            let (mut receive, guard, _theirs) = endless_receive();
            start(&mut event_loop, receive.as_mut());
            drop(receive);
            event_loop.block_on(sleep(Duration::from_millis(5)));
            assert_eq!(Arc::strong_count(&guard), 1, "the operation was given up");
        });
    });
}

#[test]
fn a_loop_may_end_before_the_futures_that_it_ran() {
    for_every_choice(|choice| {
        in_time(move || {
            let mut event_loop = EventLoop::new(choice).unwrap();
            let (mut receive, guard, _theirs) = endless_receive();
            start(&mut event_loop, receive.as_mut());
            drop(event_loop);
            drop(receive);
            assert_eq!(Arc::strong_count(&guard), 1, "nobody holds the memory any more");
        });
    });
}

#[test]
fn a_loop_may_end_inside_of_another() {
    for_every_choice(|choice| {
        in_time(move || {
            let mut outer = EventLoop::new(choice).unwrap();
            let inner = EventLoop::new(choice).unwrap();
            let outcome = outer.block_on(async move {
                drop(inner);
                spawn(async { 42 }).await
            });
            assert_eq!(outcome, 42);
        });
    });
}

fn new_file(cache: PageCache) -> (Rc<HostFile>, tempfile::TempDir) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = HostFile::create(&folder.path().join("disk"), 1 << 20, cache).unwrap();
    (Rc::new(file), folder)
}

/// More of them than a loop has places for operations.
#[test]
fn operations_given_up_outside_of_the_loop_cost_no_places() {
    for_every_choice(|choice| {
        in_time(move || {
            let (file, _folder) = new_file(PageCache::Bypassed);
            let mut event_loop = EventLoop::new(choice).unwrap();
            for _ in 0..3000 {
                let mut read = Box::pin(file.read(0, Buffer::new(4096).lend()));
                start(&mut event_loop, read.as_mut());
            }
            event_loop.block_on(file.read(0, Buffer::new(4096).lend())).unwrap();
        });
    });
}

/// Tasks that always have another read to do take all places of the loop; one that comes later has
/// its turn all the same.
#[test]
fn whoever_waits_for_a_place_gets_one() {
    for_every_choice(|choice| {
        in_time(move || {
            let (file, _folder) = new_file(PageCache::Bypassed);
            let mut event_loop = EventLoop::new(choice).unwrap();
            let running = Rc::new(Cell::new(true));
            event_loop.block_on(async {
                for _ in 0..2048 {
                    let (file, running) = (Rc::clone(&file), Rc::clone(&running));
                    spawn_detached(async move {
                        while running.get() {
                            file.read(0, Buffer::new(4096).lend()).await.unwrap();
                        }
                    });
                }
                let late: Vec<_> = (0..10)
                    .map(|_| {
                        let file = Rc::clone(&file);
                        spawn(async move {
                            for _ in 0..3 {
                                file.read(0, Buffer::new(4096).lend()).await.unwrap();
                            }
                        })
                    })
                    .collect();
                for task in late {
                    task.await;
                }
                running.set(false);
            });
        });
    });
}

/// A read of a file in memory is ready at once, every time. Others have their turn all the same.
#[test]
fn a_task_that_never_has_to_wait_keeps_nobody_from_running() {
    let memory = PathBuf::from("/dev/shm");
    if !memory.is_dir() {
        eprintln!("skipped, there is no /dev/shm");
        return;
    }
    for_every_choice(|choice| {
        let folder = tempfile::tempdir_in(&memory).unwrap();
        in_time(move || {
            let path = folder.path().join("disk");
            let file = HostFile::create(&path, 1 << 20, PageCache::Used).unwrap();
            let mut event_loop = EventLoop::new(choice).unwrap();
            event_loop.block_on(async {
                let running = Rc::new(Cell::new(true));
                let stop = Rc::clone(&running);
                spawn_detached(async move {
                    sleep(Duration::from_millis(1)).await;
                    stop.set(false);
                });
                let mut buffer = Buffer::new(4096);
                while running.get() {
                    file.write(0, buffer.lend(), Durability::None).await.unwrap();
                }
            });
        });
    });
}

/// Futures of operations of all kinds are dropped before, while and after the kernel has them. In
/// the end no memory, slot or connection is held.
#[test]
fn operations_given_up_at_any_time_give_everything_back() {
    const TEST: &str = "operations_given_up_at_any_time_give_everything_back";
    for_every_choice(|choice| {
        for_seeds("lifetimes", TEST, 3, |rng| {
            let mut rng = rng.fork();
            in_time(move || {
                let guard = Arc::new(());
                let (file, _folder) = new_file(PageCache::Bypassed);
                let mut event_loop = EventLoop::new(choice).unwrap();
                event_loop.block_on(give_up_many(&mut rng, &file, &guard));
                assert_eq!(Arc::strong_count(&guard), 1, "an operation kept its memory");
                // All places are free: each of these takes one at the same time.
                event_loop.block_on(async {
                    let file = &file;
                    let read = |_| file.read(0, Buffer::new(4096).lend());
                    let reads = futures_util::future::join_all((0..2048).map(read)).await;
                    assert!(reads.iter().all(Result::is_ok));
                });
            });
        });
    });
}

async fn give_up_many(rng: &mut Rng, file: &Rc<HostFile>, guard: &Arc<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let [ours, theirs] = [ours, theirs].map(|socket| Stream::new(socket.into()).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = Listener::new(UnixListener::bind(&path).unwrap().into()).unwrap();
    let memory = || Buffer::new(4096).lend().with_guard(Arc::clone(guard));
    for _ in 0..500 {
        let mut list = IoVectorList::new();
        list.push(memory());
        let operation: Pin<Box<dyn Future<Output = ()> + '_>> = match rng.u8(..7) {
            0 => Box::pin(file.read(0, memory()).map(drop)),
            1 => Box::pin(file.write(0, memory(), Durability::None).map(drop)),
            2 => Box::pin(file.write(4096, memory(), Durability::Data).map(drop)),
            3 => Box::pin(file.flush(SyncMode::Data).map(drop)),
            4 => Box::pin(ours.receive(list).map(drop)),
            5 => Box::pin(theirs.send(list).map(drop)),
            _ => Box::pin(listener.accept().map(drop)),
        };
        if rng.u8(..4) == 0 {
            drop(UnixStream::connect(&path).unwrap());
        }
        let patience = sleep(Duration::from_micros(rng.u64(..300)));
        futures_util::future::select(operation, patience).await;
    }
    // The last reference may need a moment.
    while Arc::strong_count(guard) > 1 {
        sleep(Duration::from_millis(1)).await;
    }
}
