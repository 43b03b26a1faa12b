//! One queue of a guest on one event loop.
//!
//! Lanes, long-lived tasks, take requests from the ring and carry them out. A lane whose request is
//! over on the spot takes the next one, with no task in between; one that has to wait wakes as many
//! others as there are requests. The pump looks after the ring: it is told of new requests and of the
//! front-end's orders, and publishes what was done. While the loop is awake it looks at the ring by
//! itself, and the guest need not kick.
//!
//! Promises: every request taken is carried out to its end; one notification for all that ended
//! together, and none of them waits for it longer than for other requests that end on the spot; no
//! request waits in the ring while the loop sleeps (the ring is looked at once more after the kick was
//! asked for), but for those beyond what a queue may have in flight ([`limits`]).

mod kicks;
mod lane;
mod ring_side;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use blockhouse_core::{Durability, Storage, WriteCache};
use blockhouse_disk::Disk;
use blockhouse_engine::{GuestMemory, Lookout, spawn_detached};
use futures_channel::{mpsc, oneshot};
use futures_util::StreamExt;
pub use kicks::Kick;
use kicks::Kicks;
use lane::Lane;
pub use ring_side::RingSide;

use crate::call::Call;
use crate::device::Cache;
use crate::dirty_log::DirtyLog;
use crate::limits::{self, RequestLimits};
use crate::request::Terms;
use crate::ring::{Addresses, Broken};

/// What a queue is told while it runs.
pub enum Order {
    /// The guest's memory, or the place of the ring in it, has changed.
    Move(Arc<GuestMemory>, Addresses),
    /// Another way to be kicked.
    Kick(Kick),
    /// Another way to notify the driver.
    Call(Option<Call>),
    /// Where changed pages are noted, the used ring's address for that, and how the front-end is told.
    Log(Option<DirtyLog>, Option<u64>, Option<Call>),
    /// No more requests from the ring. The queue ends when those in flight have ended, in an orderly
    /// stop those that an earlier server had begun among them: the returned base counts them as taken.
    Stop(Manner),
}

/// How a queue ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// The driver learns of all that was done.
    Orderly,
    /// Nobody is there any more to learn of it: the ring and the in-flight book stay as they are, so
    /// that a later front-end has what is not published done again.
    Abandoned,
}

/// An order and whom to tell that it is in force.
pub type Errand = (Order, oneshot::Sender<Result<(), Broken>>);

/// What a queue needs.
pub struct Setup<S: Storage> {
    /// The disk.
    pub disk: Arc<Disk<S>>,
    /// What the disk says when it is asked who it is.
    pub serial: [u8; 20],
    /// How durable writes are, at each moment.
    pub cache: Arc<Cache>,
    /// The ring and what belongs to it.
    pub ring: RingSide,
    /// How the guest kicks.
    pub kick: Kick,
    /// How large a request may be.
    pub limits: RequestLimits,
    /// Told once, when the driver has broken the queue.
    pub broken: Box<dyn Fn(&Broken)>,
}

/// A running queue; all its tasks share it.
struct Queue<S: Storage> {
    disk: Arc<Disk<S>>,
    serial: [u8; 20],
    cache: Arc<Cache>,
    ring: RefCell<RingSide>,
    limits: RequestLimits,
    broken: Box<dyn Fn(&Broken)>,
    /// Lanes without work.
    idle: RefCell<Vec<Rc<Lane>>>,
    /// How many lanes there are, at most one for each entry of the ring.
    lanes: Cell<usize>,
    in_flight: Cell<usize>,
    /// Bytes of their data.
    bytes_in_flight: Cell<u64>,
    /// Whether requests have had to wait lately: then all lanes that have work are woken at once.
    waits: Cell<bool>,
    stop: Cell<Option<Manner>>,
    /// Whether the end has come, for lanes.
    ended: Cell<bool>,
    /// Whether a failure of the host was noted.
    failed: Cell<bool>,
    /// Whether the guest does not kick.
    is_polled: Cell<bool>,
    /// Whether the pump has been asked for, and its task.
    wanted: Cell<bool>,
    pump: RefCell<Option<Waker>>,
}

/// Runs a queue until it is told to stop, or nobody is left who could tell it. Gives the number of the
/// next available entry.
pub async fn run<S: Storage>(setup: Setup<S>, mut errands: mpsc::UnboundedReceiver<Errand>) -> u16 {
    let Setup { disk, serial, cache, ring, kick, limits, broken } = setup;
    let queue = Rc::new(Queue {
        disk,
        serial,
        cache,
        ring: RefCell::new(ring),
        limits,
        broken,
        idle: RefCell::default(),
        lanes: Cell::new(0),
        in_flight: Cell::new(0),
        bytes_in_flight: Cell::new(0),
        waits: Cell::new(false),
        stop: Cell::new(None),
        ended: Cell::new(false),
        failed: Cell::new(false),
        is_polled: Cell::new(false),
        // There may be requests already.
        wanted: Cell::new(true),
        pump: RefCell::default(),
    });
    let mut kicks = Kicks::new(&queue, kick);
    poll_fn(|context| {
        queue.register(context);
        while let Poll::Ready(errand) = errands.poll_next_unpin(context) {
            match errand {
                Some((order, done)) => {
                    let outcome = queue.obey(order, &mut kicks);
                    // Whoever sent it may have gone.
                    let _ = done.send(outcome);
                }
                None => {
                    queue.stop.set(queue.stop.get().or(Some(Manner::Abandoned)));
                    break;
                }
            }
        }
        if kicks.poll(context, || queue.look()) {
            queue.wanted.set(true);
        }
        if queue.wanted.take() {
            queue.settle();
        }
        match queue.stop.get() {
            Some(_) if queue.in_flight.get() == 0 && queue.left_to_resubmit() == 0 => {
                Poll::Ready(())
            }
            _ => Poll::Pending,
        }
    })
    .await;
    queue.ended.set(true);
    queue.idle.take().iter().for_each(|lane| lane.wake());
    // The lanes still hold the queue for a moment, so the answer is copied out of it.
    let ring = queue.ring.borrow();
    ring.next_available()
}

impl<S: Storage> Queue<S> {
    fn register(&self, context: &Context<'_>) {
        let mut pump = self.pump.borrow_mut();
        match &mut *pump {
            Some(waker) => waker.clone_from(context.waker()),
            None => *pump = Some(context.waker().clone()),
        }
    }

    fn obey(self: &Rc<Self>, order: Order, kicks: &mut Kicks) -> Result<(), Broken> {
        let mut ring = self.ring.borrow_mut();
        match order {
            Order::Move(memory, addresses) => ring.move_to(memory, addresses)?,
            Order::Kick(kick) => *kicks = Kicks::new(self, kick),
            Order::Call(call) => ring.set_call(call),
            Order::Log(log, used, call) => ring.set_log(log, used, call),
            Order::Stop(manner) => self.stop.set(Some(manner)),
        }
        self.wanted.set(true);
        Ok(())
    }

    /// Has the pump look at the ring, once everything that is ready was polled.
    fn want_pump(&self) {
        if !self.wanted.replace(true)
            && let Some(pump) = &*self.pump.borrow()
        {
            pump.wake_by_ref();
        }
    }

    /// Publishes what was done, and wakes lanes for what is in the ring.
    fn settle(self: &Rc<Self>) {
        if self.stop.get() == Some(Manner::Abandoned) {
            return;
        }
        let mut ring = self.ring.borrow_mut();
        ring.publish();
        if self.stop.get().is_some() {
            drop(ring);
            self.wake_lanes(self.left_to_resubmit());
            return;
        }
        match ring.available() {
            Ok(0) => {}
            Ok(count) => {
                drop(ring);
                self.wake_lanes(if self.waits.get() { count } else { 1 });
            }
            Err(why) => {
                drop(ring);
                self.give_up(&why);
            }
        }
    }

    /// How many requests have to be begun before an orderly stop is complete. An abandoned queue begins
    /// no more: they stay in the in-flight book for the next server.
    fn left_to_resubmit(&self) -> usize {
        match self.stop.get() {
            Some(Manner::Abandoned) => 0,
            Some(Manner::Orderly) | None => self.ring.borrow().to_resubmit(),
        }
    }

    /// Wakes up to `count` lanes.
    fn wake_lanes(self: &Rc<Self>, count: usize) {
        if !self.has_room() {
            // The lane whose request is over takes the next one.
            return;
        }
        for _ in 0..count {
            let idle = self.idle.borrow_mut().pop();
            match idle {
                Some(lane) => lane.wake(),
                None if self.lanes.get() < self.ring.borrow().entries() => {
                    self.lanes.update(|lanes| lanes + 1);
                    spawn_detached(lane::run(Rc::clone(self)));
                }
                // All have work, and look at the ring when they are through.
                None => return,
            }
        }
    }

    /// A lane has to wait: others take what is in the ring, and what was over before does not wait too.
    fn hand_over(self: &Rc<Self>) {
        self.waits.set(true);
        let ring = self.ring.borrow();
        let (known, has_untold) = (ring.known(), ring.has_untold());
        drop(ring);
        if has_untold {
            self.want_pump();
        }
        self.wake_lanes(known);
    }

    /// The driver has broken its queue: no more requests are taken.
    fn give_up(&self, why: &Broken) {
        // Zeros in the place of what was there may look like anything.
        let why = if self.has_lost_memory() { &Broken::MemoryLost } else { why };
        if self.stop.get().is_none() {
            self.stop.set(Some(Manner::Abandoned));
            (self.broken)(why);
        }
    }

    /// Whether the ring, or a request's memory, is not what the driver has put there.
    fn has_lost_memory(&self) -> bool {
        self.ring.borrow().check_memory().is_err()
    }

    fn terms(&self) -> Terms<'_> {
        let durability = match self.cache.state() {
            WriteCache::Volatile => Durability::None,
            WriteCache::None => Durability::Data,
        };
        Terms { durability, serial: &self.serial, size: self.disk.size(), limits: self.limits }
    }

    /// Whether one more request may be in flight. Its length is not known yet, so the bytes may be
    /// exceeded by one request.
    fn has_room(&self) -> bool {
        limits::QUEUE.admit(self.in_flight.get(), self.bytes_in_flight.get(), 1)
    }
}

impl<S: Storage> Lookout for Queue<S> {
    fn look(&self) -> bool {
        self.has_takers() && self.ring.borrow_mut().has_news()
    }

    fn arm(&self) -> bool {
        match self.is_polled.get() {
            true => self.look(),
            false => self.has_takers() && self.ring.borrow_mut().arm(),
        }
    }
}

impl<S: Storage> Queue<S> {
    /// Whether requests could be taken now.
    fn has_takers(&self) -> bool {
        let free =
            !self.idle.borrow().is_empty() || self.lanes.get() < self.ring.borrow().entries();
        free && self.stop.get().is_none() && self.has_room()
    }
}
