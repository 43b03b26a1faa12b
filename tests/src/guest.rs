//! A guest of a vhost-user-blk device that reads and writes blocks, one or many at a time.

use std::path::Path;
use std::time::Duration;

use blockhouse_vhost_user::driver::{DescriptorSpec, Options, TestDriver};
use blockhouse_vhost_user::ring::WRITE;

/// The longest time until a request completes, on a busy machine.
pub const LONG: Duration = Duration::from_secs(30);
/// Bytes of a block.
pub const BLOCK: usize = 4096;
/// A request that reads (virtio 1.2, section 5.2.6).
pub const IN: u32 = 0;
/// A request that writes.
pub const OUT: u32 = 1;

/// A guest with 16 slots in each queue.
pub struct Guest {
    /// The driver.
    pub driver: TestDriver,
}

impl Guest {
    /// Connects to a device.
    ///
    /// # Panics
    /// When no device listens there.
    #[track_caller]
    pub fn connect(socket: &Path, options: Options) -> Self {
        Self { driver: TestDriver::connect(socket, options).expect("the device is there") }
    }

    fn place(&self, queue: usize, slot: u16) -> usize {
        self.driver.requests() + (queue * 16 + usize::from(slot)) * 2 * BLOCK
    }

    /// Posts a request for one block from or into a slot.
    pub fn post(&mut self, queue: usize, slot: u16, kind: u32, block: u64) {
        let place = self.place(queue, slot);
        let mut header = [0; 17];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..16].copy_from_slice(&(block * BLOCK as u64 / 512).to_le_bytes());
        header[16] = 0xee;
        self.driver.memory.write(place, &header);
        let flags = if kind == IN { WRITE } else { 0 };
        let chain = [
            DescriptorSpec::at(place, 16, 0),
            DescriptorSpec::at(place + BLOCK, BLOCK as u32, flags),
            DescriptorSpec::at(place + 16, 1, WRITE),
        ];
        let queue = &mut self.driver.queues[queue];
        queue.chain(3 * slot, &chain);
        queue.add_available(3 * slot);
        queue.publish();
    }

    /// Whether the device still answers messages.
    pub fn is_connected(&mut self) -> bool {
        self.driver.capacity().is_ok()
    }

    /// Waits until a request completes, with success; returns its slot.
    pub fn finish(&mut self, queue: usize, limit: Duration) -> Option<u16> {
        let (slot, status) = self.outcome(queue, limit)?;
        assert_eq!(status, 0, "the status");
        Some(slot)
    }

    /// Waits until a request completes; returns its slot and its status (`VIRTIO_BLK_S_...`).
    pub fn outcome(&mut self, queue: usize, limit: Duration) -> Option<(u16, u8)> {
        let (head, _) = self.driver.queues[queue].wait_used(limit)?;
        let mut status = [0];
        self.driver.memory.read(self.place(queue, head / 3) + 16, &mut status);
        Some((head / 3, status[0]))
    }

    /// Fills a slot's memory with a number.
    pub fn fill(&self, queue: usize, slot: u16, number: u64) {
        let bytes = number.to_le_bytes().repeat(BLOCK / 8);
        self.driver.memory.write(self.place(queue, slot) + BLOCK, &bytes);
    }

    /// Writes a block full of a number.
    pub fn write(&mut self, queue: usize, block: u64, number: u64) {
        self.fill(queue, 0, number);
        self.post(queue, 0, OUT, block);
        assert_eq!(self.driver.queues[queue].wait_used(LONG).map(|(head, _)| head), Some(0));
    }

    /// Reads a block.
    pub fn read(&mut self, queue: usize, block: u64) -> Vec<u8> {
        self.post(queue, 0, IN, block);
        assert_eq!(self.driver.queues[queue].wait_used(LONG).map(|(head, _)| head), Some(0));
        let mut bytes = vec![0; BLOCK];
        self.driver.memory.read(self.place(queue, 0) + BLOCK, &mut bytes);
        bytes
    }
}

/// A block full of a number.
pub fn content(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK / 8)
}
