//! Tasks, timers, sockets, and submissions from foreign threads, on every engine.

use std::cell::Cell;
use std::future::poll_fn;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use blockhouse_core::{Buffer, InFlightLimits, IoVectorList, yield_now};
use blockhouse_engine::{EventLoop, Handle, Listener, Stream, sleep, spawn, spawn_detached};

use crate::common::{PATIENCE, for_every_choice, on_every_engine};

#[test]
fn tasks_run_and_give_their_results() {
    on_every_engine(|event_loop| {
        let sum = event_loop.block_on(async {
            let tasks: Vec<_> = (0..100).map(|n| spawn(async move { n })).collect();
            let mut sum = 0;
            for task in tasks {
                sum += task.await;
            }
            sum
        });
        assert_eq!(sum, 4950);
    });
}

#[test]
fn timers_fire_in_order_and_not_early() {
    on_every_engine(|event_loop| {
        event_loop.block_on(async {
            let order = Rc::new(Cell::new(Vec::new()));
            let begin = Instant::now();
            let tasks: Vec<_> = [30u64, 10, 20]
                .map(|milliseconds| {
                    let order = Rc::clone(&order);
                    spawn(async move {
                        sleep(Duration::from_millis(milliseconds)).await;
                        let mut list = order.take();
                        list.push(milliseconds);
                        order.set(list);
                    })
                })
                .into();
            for task in tasks {
                task.await;
            }
            assert_eq!(order.take(), [10, 20, 30]);
            assert!(begin.elapsed() >= Duration::from_millis(30));
        });
    });
}

#[test]
fn the_longest_sleep_disturbs_nobody() {
    on_every_engine(|event_loop| {
        event_loop.block_on(async {
            spawn_detached(sleep(Duration::MAX));
            sleep(Duration::from_millis(2)).await;
        });
    });
}

/// The loop has no timer and nothing in flight: only the wake-up can end its sleep. Without it this
/// test waits in vain.
#[test]
fn a_submission_wakes_a_sleeping_loop() {
    for_every_choice(|choice| {
        let (give_handle, handle) = mpsc::channel::<Handle>();
        let (stop, stopped) = futures_channel::oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let mut event_loop = EventLoop::new(choice).unwrap();
            give_handle.send(event_loop.handle()).unwrap();
            event_loop.block_on(async { stopped.await.unwrap() });
        });
        let handle = handle.recv().unwrap();
        let (done, outcome) = mpsc::channel();
        for round in 0..20 {
            // Time for the loop to fall asleep.
            std::thread::sleep(Duration::from_millis(2));
            for number in 0..16 {
                let done = done.clone();
                let number = round * 16 + number;
                handle.spawn(move || async move { done.send(number).unwrap() });
            }
            for number in 0..16 {
                let next = outcome.recv_timeout(PATIENCE).expect("the loop was never woken");
                assert_eq!(next, round * 16 + number);
            }
        }
        assert_eq!(handle.spawn(|| async { 42 }).wait(), Some(42));
        handle.spawn(move || async move { stop.send(()).unwrap() });
        thread.join().unwrap();
        let late = handle.spawn(|| async { 42 });
        let (done, outcome) = mpsc::channel();
        std::thread::spawn(move || done.send(late.wait()));
        let nothing = outcome.recv_timeout(PATIENCE).expect("waits for a loop that is gone");
        assert_eq!(nothing, None);
    });
}

fn list_of(buffer: &mut Buffer) -> IoVectorList {
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    list
}

#[test]
fn a_connection_carries_large_messages_both_ways() {
    on_every_engine(|event_loop| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let peer = std::thread::spawn(move || {
            let mut stream = UnixStream::connect(path).unwrap();
            let mut bytes = vec![0; 3 << 20];
            stream.read_exact(&mut bytes).unwrap();
            stream.write_all(&bytes).unwrap();
            bytes
        });
        let received = event_loop.block_on(async move {
            let stream = Listener::new(listener.into()).unwrap().accept().await.unwrap();
            let mut first = Buffer::new(1 << 20);
            let mut second = Buffer::new(2 << 20);
            first.bytes_mut().fill(1);
            second.bytes_mut().fill(2);
            let mut list = list_of(&mut first);
            list.push(second.lend());
            let (result, list) = stream.send(list).await;
            result.unwrap();
            assert!(list.is_empty());
            let mut received = Vec::new();
            loop {
                let mut buffer = Buffer::new(1 << 20);
                let (result, list) = stream.receive(list_of(&mut buffer)).await;
                drop(list);
                match result.unwrap() {
                    0 => return received,
                    count => received.extend_from_slice(&buffer.bytes()[..count]),
                }
            }
        });
        assert_eq!(peer.join().unwrap(), received);
        assert_eq!(received[(1 << 20) - 1..=1 << 20], [1, 2]);
    });
}

#[test]
fn a_shutdown_ends_a_receive_under_way() {
    on_every_engine(|event_loop| {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        event_loop.block_on(async move {
            let stream = Stream::new(ours.into()).unwrap();
            let closer = stream.clone();
            spawn_detached(async move {
                sleep(Duration::from_millis(5)).await;
                closer.shutdown();
            });
            let mut buffer = Buffer::new(10);
            let (result, _) = stream.receive(list_of(&mut buffer)).await;
            assert_eq!(result.unwrap(), 0);
        });
    });
}

#[test]
fn a_loop_ends_with_receives_and_accepts_under_way() {
    on_every_engine(|event_loop| {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        event_loop.block_on(async move {
            let stream = Stream::new(ours.into()).unwrap();
            spawn_detached(async move {
                let mut buffer = Buffer::new(10);
                let _ = stream.receive(list_of(&mut buffer)).await;
            });
            spawn_detached(async move {
                let _ = Listener::new(listener.into()).unwrap().accept().await;
            });
            sleep(Duration::from_millis(1)).await;
        });
        // The loop itself is dropped by the caller, which waits for the kernel.
        drop(theirs);
    });
}

/// A thread that knows nothing of the loop wakes a task that waits for a number. Whenever the loop
/// sleeps over a number that it was woken for, the test waits in vain.
#[test]
fn a_waker_wakes_from_any_thread_and_no_wake_up_is_lost() {
    const NUMBERS: u64 = 10_000;
    for_every_choice(|choice| {
        let called = Arc::new(AtomicU64::new(0));
        let answered = Arc::new(AtomicU64::new(0));
        let waker = Arc::new(Mutex::new(None::<Waker>));
        let (done, outcome) = mpsc::channel();
        let shared = (Arc::clone(&called), Arc::clone(&answered), Arc::clone(&waker));
        let thread = std::thread::spawn(move || {
            let (called, answered, waker) = shared;
            EventLoop::new(choice).unwrap().block_on(spawn_and_wait(poll_fn(move |cx| {
                if answered.load(Ordering::Relaxed) == 0 {
                    *waker.lock().unwrap() = Some(cx.waker().clone());
                }
                let number = called.load(Ordering::Relaxed);
                answered.store(number + 1, Ordering::Relaxed);
                if number == NUMBERS { Poll::Ready(()) } else { Poll::Pending }
            })));
            done.send(()).unwrap();
        });
        let waker = loop {
            if let Some(waker) = waker.lock().unwrap().take() {
                break waker;
            }
            std::thread::yield_now();
        };
        for number in 1..=NUMBERS {
            let begin = Instant::now();
            // The first wake-up is for nothing: so the second comes when the task is about to run.
            waker.wake_by_ref();
            called.store(number, Ordering::Relaxed);
            waker.wake_by_ref();
            let mut spins = 0;
            while answered.load(Ordering::Relaxed) <= number {
                assert!(begin.elapsed() < PATIENCE, "number {number} of {NUMBERS} was slept over");
                spins += 1;
                // The loop's thread may need this processor.
                if spins < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
        }
        outcome.recv_timeout(PATIENCE).expect("the loop was woken for the last number");
        thread.join().unwrap();
    });
}

/// In a task of its own, not in the loop's main future.
async fn spawn_and_wait(future: impl Future<Output = ()> + 'static) {
    spawn(future).await;
}

/// A party that computes all the time beside one that goes from task to task: between two steps of
/// the second one the first gets a turn, not as many polls as it has tasks.
#[test]
fn a_party_that_computes_lets_others_go_first() {
    const TASKS: u64 = 256;
    const STEPS: u64 = 30;
    on_every_engine(|event_loop| {
        let computed = Arc::new(AtomicU64::new(0));
        let stepped = Arc::new(AtomicU64::new(0));
        let handle = event_loop.handle();
        let (counted, stop) = (Arc::clone(&computed), Arc::clone(&stepped));
        drop(handle.spawn(move || async move {
            for _ in 0..TASKS {
                let (counted, stop) = (Arc::clone(&counted), Arc::clone(&stop));
                spawn_detached(async move {
                    while stop.load(Ordering::Relaxed) < STEPS {
                        counted.fetch_add(1, Ordering::Relaxed);
                        // As long as a turn, so that a turn is one poll.
                        let begin = Instant::now();
                        while begin.elapsed() < InFlightLimits::DEFAULT.turn {}
                        yield_now().await;
                    }
                });
            }
        }));
        let (counted, stop) = (Arc::clone(&computed), Arc::clone(&stepped));
        let between = event_loop.block_on(handle.spawn(move || async move {
            // The first round is over: the other party is known for what it is.
            sleep(Duration::from_millis(1)).await;
            let before = counted.load(Ordering::Relaxed);
            for _ in 0..STEPS {
                let (send, receive) = futures_channel::oneshot::channel();
                spawn_detached(async move { send.send(()).unwrap() });
                receive.await.unwrap();
                stop.fetch_add(1, Ordering::Relaxed);
            }
            counted.load(Ordering::Relaxed) - before
        }));
        let between = between.expect("the loop runs");
        assert!(between <= STEPS, "{between} polls of the other party in {STEPS} steps");
    });
}

/// Two parties that compute all the time get about as many turns each, and a third that waits for
/// nothing but timers is served.
#[test]
fn parties_that_compute_take_turns() {
    on_every_engine(|event_loop| {
        let handle = event_loop.handle();
        let counts = [0; 2].map(|_| Arc::new(AtomicU64::new(0)));
        for (count, tasks) in counts.iter().zip([1, 100]) {
            let count = Arc::clone(count);
            drop(handle.spawn(move || async move {
                for _ in 0..tasks {
                    let count = Arc::clone(&count);
                    spawn_detached(async move {
                        loop {
                            count.fetch_add(1, Ordering::Relaxed);
                            let begin = Instant::now();
                            while begin.elapsed() < InFlightLimits::DEFAULT.turn {}
                            yield_now().await;
                        }
                    });
                }
            }));
        }
        event_loop.block_on(sleep(Duration::from_millis(20)));
        let [few, many] = counts.map(|count| count.load(Ordering::Relaxed));
        // But for the polls before a party is known for what it is.
        assert!(few > 0 && many <= few + 100, "{few} and {many} turns");
    });
}
