//! Watched eventfds, on every engine: no event is lost, whatever signals it and however often, and
//! a loop that looks for itself is signalled only when it sleeps.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use blockhouse_engine::{PollSource, Watch, sleep};
use rustix::event::{EventfdFlags, eventfd};

use crate::common::on_every_engine;

fn event() -> OwnedFd {
    // Blocking, as a front-end may send them.
    eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")
}

fn signal(event: &OwnedFd) {
    rustix::io::write(event, &1u64.to_ne_bytes()).expect("room in the counter");
}

#[test]
fn events_of_another_thread_end_the_wait() {
    on_every_engine(|event_loop| {
        let event = event();
        let other = event.try_clone().unwrap();
        let (told, heard) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            for _ in 0..200 {
                signal(&other);
                heard.recv_timeout(Duration::from_secs(10)).expect("each event is seen");
            }
        });
        event_loop.block_on(async {
            let watch = Watch::new(event, Rc::new(())).unwrap();
            for _ in 0..200 {
                watch.event().await;
                told.send(()).unwrap();
            }
        });
        thread.join().unwrap();
    });
}

#[test]
fn an_event_before_the_watch_counts() {
    on_every_engine(|event_loop| {
        let event = event();
        signal(&event);
        event_loop.block_on(async {
            Watch::new(event, Rc::new(())).unwrap().event().await;
        });
    });
}

#[test]
fn watches_come_and_go() {
    on_every_engine(|event_loop| {
        event_loop.block_on(async {
            for _ in 0..50 {
                let (one, two) = (event(), event());
                let other = two.try_clone().unwrap();
                let gone = Watch::new(one, Rc::new(())).unwrap();
                let watch = Watch::new(two, Rc::new(())).unwrap();
                drop(gone);
                sleep(Duration::ZERO).await;
                signal(&other);
                watch.event().await;
            }
        });
    });
}

#[test]
fn only_eventfds_are_watched() {
    on_every_engine(|event_loop| {
        event_loop.block_on(async {
            let file = std::fs::File::open("/dev/null").unwrap();
            assert!(Watch::new(file.into(), Rc::new(())).is_err());
        });
    });
}

/// A count that another thread raises, and signals only if it was asked to.
#[derive(Default)]
struct Shared {
    count: AtomicU64,
    wanted: AtomicU64,
}

struct SharedCounter {
    shared: Arc<Shared>,
    seen: Cell<u64>,
}

impl PollSource for SharedCounter {
    fn is_ready(&self) -> bool {
        self.shared.count.load(SeqCst) > self.seen.get()
    }

    fn enable_notify(&self) -> bool {
        self.shared.wanted.store(self.seen.get() + 1, SeqCst);
        self.is_ready()
    }
}

#[test]
fn a_loop_that_looks_for_itself_misses_nothing() {
    on_every_engine(|event_loop| {
        const COUNT: u64 = 2000;
        let (event, shared) = (event(), Arc::<Shared>::default());
        let (other, theirs) = (event.try_clone().unwrap(), Arc::clone(&shared));
        let thread = std::thread::spawn(move || {
            let mut random = fastrand::Rng::with_seed(1);
            let mut signals = 0;
            for number in 1..=COUNT {
                theirs.count.store(number, SeqCst);
                if theirs.wanted.load(SeqCst) == number {
                    signal(&other);
                    signals += 1;
                }
                if random.u8(..4) == 0 {
                    std::thread::sleep(Duration::from_micros(random.u64(..100)));
                }
            }
            signals
        });
        event_loop.block_on(async {
            let looker = Rc::new(SharedCounter { shared, seen: Cell::new(0) });
            let watch = Watch::new(event, Rc::clone(&looker) as Rc<dyn PollSource>).unwrap();
            while looker.seen.get() < COUNT {
                watch.event().await;
                looker.seen.set(looker.shared.count.load(SeqCst));
            }
        });
        assert!(thread.join().unwrap() <= COUNT);
    });
}
