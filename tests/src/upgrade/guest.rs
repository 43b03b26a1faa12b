//! A guest that verifies a vhost-user-blk device while its server is upgraded.

use std::path::Path;
use std::time::{Duration, Instant};

use blockhouse_vhost_user::driver::{DescriptorSpec, Options, TestDriver};
use blockhouse_vhost_user::ring::WRITE;
use fastrand::Rng;

use super::{BLOCK, DEPTH, Load, Seen, Slot, slots};
use crate::guest::{IN, LONG, OUT};
use crate::nbd::pattern;

const QUEUES: usize = 2;
/// Descriptors of a request: header, data, status.
const CHAIN: u16 = 3;
const STATUS: usize = 16;
const UNTOUCHED: u8 = 0xee;
/// The front-end sends a message after this many requests.
const MESSAGE_INTERVAL: u64 = 100;
const WAIT: Duration = Duration::from_millis(1);

/// A guest with its slots, half of them in each queue.
struct Guest {
    driver: TestDriver,
    slots: Vec<Slot>,
    random: Rng,
    generation: u64,
}

/// Writes and reads blocks at depth 64 in two queues, from byte `start` of the disk, until told to
/// stop; `is_tracked` enables in-flight tracking. Every block that is read must hold what was
/// written last.
///
/// # Panics
/// At the first error, wrong byte or end of the connection, and when a request does not complete.
pub fn verify_guest(socket: &Path, start: u64, is_tracked: bool, random: Rng, load: &Load) -> Seen {
    let memory = DEPTH * 2 * BLOCK as usize;
    let options = Options { queues: QUEUES as u16, entries: 128, memory, ..Options::default() };
    let mut driver = TestDriver::connect(socket, options).expect("the device is there");
    if is_tracked {
        driver.track().expect("in-flight tracking");
    }
    let size = driver.capacity().expect("an answer");
    let mut guest = Guest { driver, slots: slots(start), random, generation: 0 };
    (0..DEPTH).for_each(|slot| guest.post(slot));
    let (mut seen, mut last, mut in_flight) = (Seen::default(), Instant::now(), DEPTH);
    while in_flight > 0 {
        let mut is_idle = true;
        for queue in 0..QUEUES {
            while let Some((head, _)) = guest.driver.queues[queue].next_used() {
                is_idle = false;
                let now = Instant::now();
                seen.reply(now - last, load);
                last = now;
                let slot = queue + QUEUES * usize::from(head / CHAIN);
                guest.check(slot);
                if load.is_over(&seen) {
                    in_flight -= 1
                } else {
                    guest.post(slot)
                }
                if seen.replies.is_multiple_of(MESSAGE_INTERVAL) {
                    assert_eq!(guest.driver.capacity().expect("no end is seen"), size);
                }
            }
        }
        if is_idle {
            guest.sleep();
            assert!(last.elapsed() < LONG, "{in_flight} requests have no answer");
        }
    }
    assert_eq!(guest.driver.capacity().expect("no end is seen"), size);
    seen
}

impl Guest {
    /// The offset of a slot's page with header and status; its data follows.
    fn place(&self, slot: usize) -> usize {
        self.driver.requests() + slot * 2 * BLOCK as usize
    }

    fn post(&mut self, slot: usize) {
        let place = self.place(slot);
        let is_read = self.slots[slot].choose(&mut self.random, &mut self.generation);
        let offset = self.slots[slot].offset();
        let mut header = [0; STATUS + 1];
        header[..4].copy_from_slice(&if is_read { IN } else { OUT }.to_le_bytes());
        header[8..16].copy_from_slice(&(offset / 512).to_le_bytes());
        header[STATUS] = UNTOUCHED;
        let memory = &self.driver.memory;
        memory.write(place, &header);
        let data = place + BLOCK as usize;
        let mut block = vec![0; BLOCK as usize];
        if !is_read {
            pattern::fill(&mut block, offset, self.generation);
        }
        memory.write(data, &block);
        let flags = if is_read { WRITE } else { 0 };
        let chain = [
            DescriptorSpec::at(place, 16, 0),
            DescriptorSpec::at(data, BLOCK as u32, flags),
            DescriptorSpec::at(place + STATUS, 1, WRITE),
        ];
        let head = CHAIN * (slot / QUEUES) as u16;
        let queue = &mut self.driver.queues[slot % QUEUES];
        queue.chain(head, &chain);
        queue.add_available(head);
        queue.publish();
    }

    fn check(&self, slot: usize) {
        let place = self.place(slot);
        let (mut status, mut data) = ([0], vec![0; BLOCK as usize]);
        self.driver.memory.read(place + STATUS, &mut status);
        assert_eq!(status, [0], "the status of a request");
        self.driver.memory.read(place + BLOCK as usize, &mut data);
        self.slots[slot].check(&data);
    }

    /// Waits for a notification of the first queue, for a short time only, because only the second
    /// queue may have one.
    fn sleep(&self) {
        let armed = self.driver.queues.iter().map(|queue| queue.arm());
        if !armed.fold(false, |any, has_used| any | has_used) {
            self.driver.queues[0].sleep(WAIT);
        }
    }
}
