//! A queue's ring together with what must be told of every request: the in-flight book, the log of
//! changed pages, the driver.

use std::collections::VecDeque;
use std::sync::Arc;

use blockhouse_engine::GuestMemory;

use crate::call::Call;
use crate::chain::{Chain, Status};
use crate::dirty_log::DirtyLog;
use crate::inflight::Book;
use crate::ring::{Addresses, Broken, Ring};

/// The used ring's index is updated at least this often: a store, by which a driver that is awake goes
/// on while we go on.
const INDEX_EVERY: u16 = 4;

/// Of up to so many requests at hand the driver is notified a quarter at a time, so that it goes on while
/// we go on. More are told together: waking a driver that sleeps costs as much as several requests.
const FEW: u16 = 16;

/// The most requests that the driver is notified of together.
const LARGEST_BATCH: u16 = 64;

/// The most bytes that it is notified of together, unless one request has more: some 40 microseconds of
/// copying.
const LARGEST_BATCH_BYTES: u64 = 256 << 10;

/// Everything of a queue that is in the guest's hands.
pub struct RingSide {
    ring: Ring,
    memory: Arc<GuestMemory>,
    book: Option<Book>,
    /// Requests that an earlier server had begun.
    again: VecDeque<u16>,
    call: Option<Call>,
    log: Option<DirtyLog>,
    /// The guest's address of the used ring, if its changes are logged.
    logged_used: Option<u64>,
    /// How many requests were answered since the driver was last notified.
    untold: u16,
    untold_bytes: u64,
    /// After how many that ended on the spot it is notified again.
    batch: u16,
}

/// Whether a request was over on the spot.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// It was.
    AtOnce,
    /// Others could be taken meanwhile.
    Waited,
}

/// A request that was taken from the ring.
pub struct Taken {
    /// Its first descriptor.
    pub head: u16,
    /// The memory that its addresses belong to.
    pub memory: Arc<GuestMemory>,
}

impl RingSide {
    /// A ring in this memory, with the requests to be done again.
    pub fn new(ring: Ring, memory: Arc<GuestMemory>, book: Option<Book>, again: Vec<u16>) -> Self {
        let (call, log, logged_used) = (None, None, None);
        let (again, untold, untold_bytes, batch) = (again.into(), 0, 0, 1);
        Self { ring, memory, book, again, call, log, logged_used, untold, untold_bytes, batch }
    }

    /// Another way to notify the driver. It is notified, lest something got lost on the change.
    pub fn set_call(&mut self, call: Option<Call>) {
        self.call = call;
        self.call.iter().for_each(Call::signal);
    }

    /// Another log, and the used ring's address in it.
    pub fn set_log(&mut self, log: Option<DirtyLog>, used: Option<u64>) {
        (self.log, self.logged_used) = (log, used);
    }

    /// Other memory, or another place in it.
    pub fn move_to(
        &mut self,
        memory: Arc<GuestMemory>,
        addresses: Addresses,
    ) -> Result<(), Broken> {
        self.ring.move_to(&memory, addresses)?;
        self.memory = memory;
        Ok(())
    }

    /// How many requests there can be at once.
    pub fn entries(&self) -> usize {
        self.ring.size().into()
    }

    /// The number of the next available entry.
    pub fn next_available(&self) -> u16 {
        self.ring.next_available()
    }

    /// How many requests are known to wait.
    pub fn known(&self) -> usize {
        self.again.len() + usize::from(self.ring.known())
    }

    /// How many requests wait.
    pub fn available(&mut self) -> Result<usize, Broken> {
        let count = usize::from(self.ring.look()?) + self.again.len();
        if count > 0 {
            self.ring.disarm();
        }
        Ok(count)
    }

    /// Whether requests wait.
    pub fn has_news(&self) -> bool {
        self.ring.has_news()
    }

    /// Has the guest kick from now on. Says whether requests wait already.
    pub fn arm(&mut self) -> bool {
        if let (Some(log), Some(used)) = (&self.log, self.logged_used) {
            log.mark(used + self.ring.wish_offset() as u64, 2);
        }
        self.ring.arm()
    }

    /// Takes the next request, if there is one.
    pub fn take(&mut self, chain: &mut Chain) -> Result<Option<Taken>, Broken> {
        let head = match self.again.pop_front() {
            Some(head) => head,
            None => {
                if self.ring.known() == 0 {
                    self.batch = batch_of(self.ring.look()?);
                }
                let Some(head) = self.ring.pop()? else { return Ok(None) };
                self.book.iter_mut().for_each(|book| book.begin(head));
                head
            }
        };
        chain.walk(&self.memory, self.ring.descriptors(), head)?;
        Ok(Some(Taken { head, memory: Arc::clone(&self.memory) }))
    }

    /// Answers a request. The driver is told together with others.
    pub fn answer(&mut self, taken: &Taken, chain: &Chain, status: Status, pace: Pace) {
        // It was found there when the request was taken, in memory that the request has kept.
        let _ = taken.memory.write(chain.status, &[status.byte()]);
        if let Some(log) = &self.log {
            log.mark(chain.status, 1);
            chain.writable.iter().for_each(|range| log.mark(range.address, range.length.into()));
            if let Some(used) = self.logged_used {
                log.mark(used + 4 + 8 * u64::from(self.ring.used_slot()), 8);
            }
        }
        self.book.iter_mut().for_each(|book| book.end(taken.head));
        self.ring.push_used(taken.head, chain.writable_length());
        self.untold += 1;
        self.untold_bytes += chain.length();
        let batch = match pace {
            Pace::AtOnce => self.batch,
            // Others end in the same round, and the pump comes after them. Storage works meanwhile, so
            // the driver had better have more for it soon.
            Pace::Waited => FEW,
        };
        if self.untold >= batch || self.untold_bytes >= LARGEST_BATCH_BYTES {
            self.publish();
        } else if pace == Pace::AtOnce && self.ring.unpublished() >= INDEX_EVERY {
            self.update_index();
        }
    }

    /// Whether requests were answered that the driver was not notified of.
    pub fn has_untold(&self) -> bool {
        self.untold > 0
    }

    /// Publishes what was answered, and notifies the driver if it wants to be.
    pub fn publish(&mut self) {
        if self.untold == 0 {
            return;
        }
        (self.untold, self.untold_bytes) = (0, 0);
        self.update_index();
        if self.ring.wants_notification() {
            self.call.iter().for_each(Call::signal);
        }
    }

    fn update_index(&mut self) {
        self.ring.publish();
        if let (Some(log), Some(used)) = (&self.log, self.logged_used) {
            log.mark(used + 2, 2);
        }
        let next_used = self.ring.next_used();
        self.book.iter_mut().for_each(|book| book.published(next_used));
    }
}

/// Of how many requests the driver is notified together when so many are at hand.
fn batch_of(count: u16) -> u16 {
    match count {
        ..=FEW => (count / 4).max(1),
        _ => count.min(LARGEST_BATCH),
    }
}
