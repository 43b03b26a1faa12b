//! A throttle group with a test clock, and tasks whose requests the group admits.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use blockhouse_engine::Clock;
use futures_executor::{LocalPool, LocalSpawner};
use futures_util::task::LocalSpawnExt;
use parking_lot::Mutex;

use super::super::admission::Admission;
use super::super::buckets::{Cost, Direction};
use super::super::group::Begin;
use super::super::queue::{Class, MemberKey, Outcome, PartyKey};
use super::super::{RateLimits, ThrottleGroup};

/// A clock that advances only while no task runs. Each timer fires late by a random time.
#[derive(Clone)]
pub(super) struct TestClock(Arc<Mutex<Timeline>>);

struct Timeline {
    now: Duration,
    timers: BTreeMap<(Duration, u64), Waker>,
    timer_count: u64,
    random: fastrand::Rng,
    max_lateness: Duration,
}

impl TestClock {
    fn new(seed: u64, max_lateness: Duration) -> Self {
        let random = fastrand::Rng::with_seed(seed);
        let (now, timers) = (Duration::ZERO, BTreeMap::new());
        Self(Arc::new(Mutex::new(Timeline { now, timers, timer_count: 0, random, max_lateness })))
    }

    fn fire_next(&self, end: Duration) -> bool {
        let mut timeline = self.0.lock();
        let next = timeline.timers.first_key_value().map(|(&key, _)| key);
        let Some(key) = next.filter(|(due, _)| *due <= end) else {
            timeline.now = end;
            return false;
        };
        timeline.now = timeline.now.max(key.0);
        let waker = timeline.timers.remove(&key);
        drop(timeline);
        waker.into_iter().for_each(Waker::wake);
        true
    }
}

struct TestSleep {
    clock: TestClock,
    key: (Duration, u64),
}

impl Future for TestSleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut timeline = self.clock.0.lock();
        if timeline.now >= self.key.0 {
            return Poll::Ready(());
        }
        timeline.timers.insert(self.key, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for TestSleep {
    fn drop(&mut self) {
        let timer = self.clock.0.lock().timers.remove(&self.key);
        drop(timer);
    }
}

impl Clock for TestClock {
    fn now(&self) -> Duration {
        self.0.lock().now
    }

    fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        let mut timeline = self.0.lock();
        timeline.timer_count += 1;
        let most = timeline.max_lateness.as_nanos() as u64;
        let lateness = Duration::from_nanos(timeline.random.u64(..=most));
        let key = (timeline.now + time + lateness, timeline.timer_count);
        drop(timeline);
        Box::pin(TestSleep { clock: self.clone(), key })
    }
}

/// A request that was admitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gone {
    pub(super) at: Duration,
    pub(super) party: (MemberKey, PartyKey),
    pub(super) direction: Direction,
    pub(super) bytes: u64,
}

/// A group, and the requests that it admitted. Clones share both.
#[derive(Clone)]
pub(super) struct Lab {
    pub(super) group: Arc<ThrottleGroup>,
    pub(super) clock: TestClock,
    pub(super) gone: Rc<RefCell<Vec<Gone>>>,
    pool: Rc<RefCell<LocalPool>>,
    spawner: LocalSpawner,
}

impl Lab {
    /// Timers are late by two milliseconds at most.
    pub(super) fn new(limits: RateLimits, seed: u64) -> Self {
        let clock = TestClock::new(seed, Duration::from_millis(2));
        let group = ThrottleGroup::with_clock(limits, Arc::new(clock.clone()));
        let pool = LocalPool::new();
        let spawner = pool.spawner();
        Self { group, clock, gone: Rc::default(), pool: Rc::new(RefCell::new(pool)), spawner }
    }

    pub(super) fn begin(
        &self,
        party: (MemberKey, PartyKey),
        class: Class,
        bytes: u64,
    ) -> Option<Admission> {
        let cost = Cost { direction: direction(class), bytes };
        match self.group.begin(party, (class, cost)) {
            Begin::Admitted => None,
            Begin::Waiting(ticket) => Some(Admission::new(&self.group, ticket)),
        }
    }

    pub(super) fn note(&self, party: (MemberKey, PartyKey), class: Class, bytes: u64) {
        let at = self.clock.now();
        self.gone.borrow_mut().push(Gone { at, party, direction: direction(class), bytes });
    }

    /// Waits until the group admits one request.
    pub(super) async fn take(&self, party: (MemberKey, PartyKey), class: Class, bytes: u64) {
        if let Some(admission) = self.begin(party, class, bytes) {
            assert_eq!(admission.await, Outcome::Admitted);
        }
        self.note(party, class, bytes);
    }

    /// Spawns a client with `depth` requests at a time, each of which takes about 100 microseconds.
    pub(super) fn client(
        &self,
        party: (MemberKey, PartyKey),
        depth: usize,
        class: Class,
        bytes: u64,
    ) {
        for _ in 0..depth {
            let lab = self.clone();
            self.spawn(async move {
                loop {
                    lab.take(party, class, bytes).await;
                    lab.clock.sleep(Duration::from_micros(100)).await;
                }
            });
        }
    }

    /// Runs tasks and timers until `time` has passed.
    pub(super) fn run(&self, time: Duration) {
        let end = self.clock.now() + time;
        loop {
            self.pool.borrow_mut().run_until_stalled();
            if !self.clock.fire_next(end) {
                return;
            }
        }
    }

    pub(super) fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.spawner.spawn_local(future).expect("the pool exists");
    }

    /// The number of admitted requests of one kind.
    pub(super) fn count(&self, is_of: impl Fn(&Gone) -> bool) -> u64 {
        self.gone.borrow().iter().filter(|gone| is_of(gone)).count() as u64
    }
}

pub(super) fn direction(class: Class) -> Direction {
    match class {
        Class::Read => Direction::Read,
        Class::Write | Class::DurableWrite => Direction::Write,
    }
}
