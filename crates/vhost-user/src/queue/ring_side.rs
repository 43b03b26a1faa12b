//! A queue's ring together with what must be told of every request: the in-flight book, the log of
//! changed pages, the driver.

use std::collections::VecDeque;
use std::sync::Arc;

use blockhouse_engine::{FaultDomain, GuestMemory};

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
const MAX_BATCH: u16 = 64;

/// The most bytes that it is notified of together, unless one request has more: some 40 microseconds of
/// copying.
const MAX_BATCH_BYTES: u64 = 256 << 10;

/// Everything of a queue that is in the guest's hands.
pub struct RingSide {
    ring: Ring,
    memory: Arc<GuestMemory>,
    /// Of the memory, the ring and the book.
    domain: Arc<FaultDomain>,
    book: Option<Book>,
    /// Requests that an earlier server had begun.
    again: VecDeque<u16>,
    call: Option<Call>,
    log: Option<DirtyLog>,
    /// The guest's address of the used ring, if its changes are logged.
    logged_used: Option<u64>,
    /// How the front-end is told that the log has changed, if it wants to be.
    log_call: Option<Call>,
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

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What the guest is told.
    pub status: Status,
    /// How many bytes of its writable buffers, from the first one on, may have changed.
    pub written: u64,
}

impl RingSide {
    /// A ring in this memory, with the requests to be done again.
    pub fn new(
        ring: Ring,
        memory: Arc<GuestMemory>,
        domain: Arc<FaultDomain>,
        book: Option<Book>,
        again: Vec<u16>,
    ) -> Self {
        Self {
            ring,
            memory,
            domain,
            book,
            again: again.into(),
            call: None,
            log: None,
            logged_used: None,
            log_call: None,
            untold: 0,
            untold_bytes: 0,
            batch: 1,
        }
    }

    /// Whether everything that was read from the memory so far was there.
    ///
    /// # Errors
    /// When some of it has vanished.
    pub fn check_memory(&self) -> Result<(), Broken> {
        if self.domain.has_failed() { Err(Broken::MemoryLost) } else { Ok(()) }
    }

    /// Another way to notify the driver. It is notified, lest something got lost on the change.
    pub fn set_call(&mut self, call: Option<Call>) {
        self.call = call;
        self.call.iter().for_each(Call::signal);
    }

    /// Another log, the used ring's address in it, and how the front-end is told of changes.
    pub fn set_log(&mut self, log: Option<DirtyLog>, used: Option<u64>, call: Option<Call>) {
        (self.log, self.logged_used, self.log_call) = (log, used, call);
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
        if count > 0 && self.ring.disarm() {
            self.log_used(self.ring.wish_offset(), 2);
        }
        Ok(count)
    }

    /// Whether requests wait.
    pub fn has_news(&self) -> bool {
        self.ring.has_news()
    }

    /// Has the guest kick from now on. Says whether requests wait already.
    pub fn arm(&mut self) -> bool {
        let stores = !self.ring.is_armed();
        let is_news = self.ring.arm();
        if stores {
            self.log_used(self.ring.wish_offset(), 2);
        }
        is_news
    }

    /// Logs a change of `length` bytes of the used ring, after it was stored: a migration that takes the
    /// mark first would copy the page as it was before.
    fn log_used(&self, offset: usize, length: u64) {
        if let (Some(log), Some(used)) = (&self.log, self.logged_used)
            // The front-end names the address; one that wraps has no page.
            && let Some(address) = used.checked_add(offset as u64)
        {
            log.mark(address, length);
        }
    }

    /// Takes the next request, if there is one.
    pub fn take(&mut self, chain: &mut Chain) -> Result<Option<Taken>, Broken> {
        if let Some(taken) = self.resubmit(chain)? {
            return Ok(Some(taken));
        }
        if self.ring.known() == 0 {
            self.batch = batch_of(self.ring.look()?);
        }
        let Some(head) = self.ring.pop()? else { return Ok(None) };
        // Before the entry in the in-flight memory: a server that takes over would carry out a request that
        // does not exist.
        self.check_memory()?;
        self.book.iter_mut().for_each(|book| book.begin(head));
        self.walk(head, chain).map(Some)
    }

    /// Takes the next request that an earlier server had begun, if one is left.
    pub fn resubmit(&mut self, chain: &mut Chain) -> Result<Option<Taken>, Broken> {
        let head = self.again.pop_front();
        head.map(|head| self.walk(head, chain)).transpose()
    }

    /// How many requests that an earlier server had begun were not taken again yet.
    pub fn to_resubmit(&self) -> usize {
        self.again.len()
    }

    fn walk(&self, head: u16, chain: &mut Chain) -> Result<Taken, Broken> {
        chain.walk(&self.memory, self.ring.descriptors(), head)?;
        self.check_memory()?;
        Ok(Taken { head, memory: Arc::clone(&self.memory) })
    }

    /// Answers a request. The driver is told together with others.
    pub fn answer(&mut self, taken: &Taken, chain: &Chain, outcome: Outcome, pace: Pace) {
        // It was found there when the request was taken, in memory that the request has kept.
        let _ = taken.memory.write(chain.status, &[outcome.status.byte()]);
        if let Some(log) = &self.log {
            log.mark(chain.status, 1);
            log.mark_first(&chain.writable, outcome.written);
        }
        self.book.iter_mut().for_each(|book| book.end(taken.head));
        let element = 4 + 8 * usize::from(self.ring.used_slot());
        self.ring.push_used(taken.head, chain.writable_length());
        self.log_used(element, 8);
        self.untold += 1;
        self.untold_bytes += chain.length();
        let batch = match pace {
            Pace::AtOnce => self.batch,
            // Others end in the same round, and the pump comes after them. Storage works meanwhile, so
            // the driver had better have more for it soon.
            Pace::Waited => FEW,
        };
        if self.untold >= batch || self.untold_bytes >= MAX_BATCH_BYTES {
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
        if self.log.is_some() {
            self.log_call.iter().for_each(Call::signal);
        }
    }

    fn update_index(&mut self) {
        self.ring.publish();
        self.log_used(2, 2);
        let next_used = self.ring.next_used();
        self.book.iter_mut().for_each(|book| book.published(next_used));
    }
}

/// Of how many requests the driver is notified together when so many are at hand.
fn batch_of(count: u16) -> u16 {
    match count {
        ..=FEW => (count / 4).max(1),
        _ => count.min(MAX_BATCH),
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_engine::{GuestRange, GuestRegion, SharedMemory, View};

    use super::*;
    use crate::ring::EventIndex;

    /// Where the ring's parts are in the memory, whose first byte has the guest's address 0.
    const AVAILABLE: u64 = 4096;
    const USED: u64 = 8192;
    const ENTRIES: u16 = 8;
    const STATUS: u64 = 12288;

    /// A ring whose log lies in the guest's memory, so that the byte with the mark for the page of the
    /// used ring is the one at `marked`. What is stored there after the mark was set removes the mark.
    fn ring_with_its_mark_at(marked: u64, event_index: EventIndex) -> (RingSide, Arc<GuestMemory>) {
        let domain = FaultDomain::unconnected();
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 16384).unwrap();
        let shared = Arc::new(SharedMemory::map(&file, 0, 16384, &domain).unwrap());
        let mut memory = GuestMemory::new();
        assert!(memory.add(GuestRegion { guest: 0, user: 0, memory: Arc::clone(&shared) }));
        let memory = Arc::new(memory);
        let addresses = Addresses { descriptors: 0, available: AVAILABLE, used: USED };
        let ring = Ring::new(&memory, addresses, ENTRIES, 0, event_index).unwrap();
        let mut side = RingSide::new(ring, Arc::clone(&memory), domain, None, Vec::new());
        // The pages of these tests are the first four: they share one byte of the log.
        let log = View::new(shared, marked as usize, 1).unwrap();
        side.set_log(Some(DirtyLog::new(log)), Some(USED), None);
        (side, memory)
    }

    /// Whether the page of the used ring is marked.
    fn is_marked(memory: &GuestMemory, at: u64) -> bool {
        let mut byte = [0];
        assert!(memory.read(at, &mut byte));
        byte[0] & 1 << (USED / 4096) != 0
    }

    fn answer(side: &mut RingSide, memory: &Arc<GuestMemory>, written: u64) {
        let mut chain = Chain::default();
        chain.status = STATUS;
        chain.writable.push(GuestRange { address: 0, length: 4096 });
        let taken = Taken { head: 3, memory: Arc::clone(memory) };
        let outcome = Outcome { status: Status::Ok, written };
        side.answer(&taken, &chain, outcome, Pace::Waited);
    }

    #[test]
    fn an_element_of_the_used_ring_is_marked_after_it_was_stored() {
        // The second byte of the element's head, which the store makes zero.
        let at = USED + 4 + 1;
        let (mut side, memory) = ring_with_its_mark_at(at, EventIndex::Absent);
        answer(&mut side, &memory, 0);
        assert!(is_marked(&memory, at));
    }

    #[test]
    fn the_index_of_the_used_ring_is_marked_after_it_was_stored() {
        let at = USED + 3;
        let (mut side, memory) = ring_with_its_mark_at(at, EventIndex::Absent);
        answer(&mut side, &memory, 0);
        side.publish();
        assert!(is_marked(&memory, at));
    }

    #[test]
    fn wishes_for_notifications_are_marked_after_they_were_stored() {
        for (event_index, offset) in
            [(EventIndex::Absent, 0), (EventIndex::Negotiated, 4 + 8 * u64::from(ENTRIES))]
        {
            // The upper byte, which every store here makes zero.
            let at = USED + offset + 1;
            let (mut side, memory) = ring_with_its_mark_at(at, event_index);
            assert!(!side.arm());
            assert!(is_marked(&memory, at), "armed, {event_index:?}");
            assert!(memory.write(at, &[0]));
            assert!(!side.arm());
            assert!(!is_marked(&memory, at), "armed before: nothing is stored");
            if event_index == EventIndex::Absent {
                // A request comes, and no more kicks are needed.
                assert!(memory.write(AVAILABLE + 2, &[1]));
                assert_eq!(side.available().unwrap(), 1);
                assert!(is_marked(&memory, at), "disarmed");
            }
        }
    }

    #[test]
    fn only_what_was_written_is_marked() {
        for (written, marks) in [(0, 0b1000), (1, 0b1001), (u64::MAX, 0b1001)] {
            let at = 2 * 4096 + 2048;
            let (mut side, memory) = ring_with_its_mark_at(at, EventIndex::Absent);
            side.set_log(side.log.clone(), None, None);
            answer(&mut side, &memory, written);
            let mut byte = [0];
            assert!(memory.read(at, &mut byte));
            assert_eq!(byte, [marks], "{written} bytes, and the status");
        }
    }
}
