//! A storage in memory that holds callers to the contract and ends operations in any order.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::Duration;

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Error, Fua, IoVector, Offload,
    Result, Storage, SyncMode, Unmap, errno,
};
use blockhouse_sim::PLAIN_CAPABILITIES;
use blockhouse_sim::{Rng, Sim};

/// No file of a host is longer here: writes beyond fail for want of room.
const MAX_BYTES: u64 = 8 << 20;
/// So many operations are more than any sequence of requests of the targets needs.
const MAX_OPERATIONS: u64 = 1 << 20;

/// A file in memory. Clones are the same file.
#[derive(Clone)]
pub struct Memory(Rc<Shared>);

struct Shared {
    sim: Sim,
    alignment: Alignment,
    fua: Fua,
    bytes: RefCell<Vec<u8>>,
    random: RefCell<Rng>,
    operations: Cell<u64>,
    was_full: Cell<bool>,
}

impl Memory {
    /// A file with that content and blocks of `block` bytes.
    pub fn new(sim: &Sim, block: u32, fua: Fua, content: Vec<u8>) -> Self {
        Self(Rc::new(Shared {
            sim: sim.clone(),
            alignment: Alignment { offset: block, memory: block.min(512) },
            fua,
            bytes: RefCell::new(content),
            random: RefCell::new(sim.fork_prng()),
            operations: Cell::new(0),
            was_full: Cell::new(false),
        }))
    }

    /// The content of the file.
    pub fn content(&self) -> Vec<u8> {
        self.0.bytes.borrow().clone()
    }

    /// Whether an operation failed for want of room.
    pub fn was_full(&self) -> bool {
        self.0.was_full.get()
    }

    /// Takes some time.
    ///
    /// # Panics
    /// When there have been more operations than anything needs that ends.
    async fn delay(&self) {
        let count = self.0.operations.get() + 1;
        self.0.operations.set(count);
        assert!(count < MAX_OPERATIONS, "{count} operations: it does not end");
        let delay = self.0.random.borrow_mut().u64(..4);
        self.0.sim.sleep(Duration::from_micros(delay)).await;
    }

    fn assert_aligned(&self, range: ByteRange) {
        let block = u64::from(self.0.alignment.offset);
        let is_last = range.offset().is_multiple_of(block) && range.end() == self.size();
        assert!(range.is_aligned(block) || is_last, "misaligned: {range}");
    }

    fn make_room(&self, end: u64) -> Result<()> {
        if end > MAX_BYTES {
            self.0.was_full.set(true);
            let source = io::Error::from_raw_os_error(errno::ENOSPC);
            return Err(Error::host("cannot write", source).on(self.name()).at(end));
        }
        let mut bytes = self.0.bytes.borrow_mut();
        if end > bytes.len() as u64 {
            bytes.resize(end as usize, 0);
        }
        Ok(())
    }

    fn clear(&self, range: ByteRange) {
        self.0.bytes.borrow_mut()[range.offset() as usize..range.end() as usize].fill(0);
    }
}

impl Storage for Memory {
    fn name(&self) -> &str {
        "memory"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fua: self.0.fua,
            alignment: self.0.alignment,
            write_zeroes: Offload::Available,
            discard: Offload::Available,
            ..PLAIN_CAPABILITIES
        }
    }

    fn size(&self) -> u64 {
        self.0.bytes.borrow().len() as u64
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let range = ByteRange::new(offset, into.len() as u64).expect("the end of a read");
        self.assert_aligned(range);
        self.delay().await;
        let bytes = self.0.bytes.borrow();
        let start = offset.min(bytes.len() as u64) as usize;
        let stored = &bytes[start..range.end().min(bytes.len() as u64) as usize];
        into.split_off(stored.len()).fill(0);
        into.copy_from(stored);
        Ok(())
    }

    async fn write(&self, offset: u64, from: IoVector, _durability: Durability) -> Result<()> {
        let range = ByteRange::new(offset, from.len() as u64).expect("the end of a write");
        self.assert_aligned(range);
        self.delay().await;
        self.make_room(range.end())?;
        let mut bytes = self.0.bytes.borrow_mut();
        from.copy_to(&mut bytes[offset as usize..range.end() as usize]);
        Ok(())
    }

    async fn write_zeroes(&self, range: ByteRange, _unmap: Unmap) -> Result<()> {
        self.assert_aligned(range);
        assert!(range.end() <= self.size(), "zeros past the end: {range}");
        self.delay().await;
        self.clear(range);
        Ok(())
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        self.assert_aligned(range);
        assert!(range.end() <= self.size(), "a discard past the end: {range}");
        self.delay().await;
        self.clear(range);
        Ok(())
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        self.delay().await;
        Ok(())
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.delay().await;
        self.make_room(size)?;
        self.0.bytes.borrow_mut().truncate(size as usize);
        Ok(())
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        self.delay().await;
        Ok((Allocation::Data, range.length()))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        self.delay().await;
        Ok(())
    }
}
