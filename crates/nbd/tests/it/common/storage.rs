//! A storage in memory that can be slow and can fail.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, Error, IoVector, Offload, Result, Storage,
    SyncMode, Unmap,
};
use blockhouse_engine::sleep;
use blockhouse_sim::PLAIN_CAPABILITIES;

/// Blocks of this many zero bytes are holes.
pub const HOLE: usize = 4096;

/// The storage. Clones are the same one.
#[derive(Clone)]
pub struct Memory(Arc<Inner>);

struct Inner {
    bytes: Mutex<Vec<u8>>,
    /// Microseconds that every operation takes.
    delay: AtomicU64,
    /// Where operations fail, and how.
    fault: Mutex<Option<(ByteRange, i32)>>,
    running: AtomicUsize,
    most_running: AtomicUsize,
    flushes: AtomicUsize,
    holds_writes: AtomicBool,
    held_writes: AtomicUsize,
}

impl Memory {
    /// `size` zero bytes.
    pub fn new(size: usize) -> Self {
        Self(Arc::new(Inner {
            bytes: Mutex::new(vec![0; size]),
            delay: AtomicU64::new(0),
            fault: Mutex::new(None),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            flushes: AtomicUsize::new(0),
            holds_writes: AtomicBool::new(false),
            held_writes: AtomicUsize::new(0),
        }))
    }

    /// From now on every operation takes this long.
    pub fn delay(&self, delay: Duration) {
        self.0.delay.store(delay.as_micros() as u64, Ordering::Relaxed);
    }

    /// From now on operations in this range fail with this errno.
    pub fn fail(&self, range: ByteRange, errno: i32) {
        *self.0.fault.lock().unwrap() = Some((range, errno));
    }

    /// All bytes.
    pub fn content(&self) -> Vec<u8> {
        self.0.bytes.lock().unwrap().clone()
    }

    /// The operations in flight, and the most that were.
    pub fn running(&self) -> (usize, usize) {
        let Inner { running, most_running, .. } = &*self.0;
        (running.load(Ordering::Relaxed), most_running.load(Ordering::Relaxed))
    }

    /// How many flushes there were.
    pub fn flushes(&self) -> usize {
        self.0.flushes.load(Ordering::Relaxed)
    }

    /// From now on writes wait until this is called with `false`.
    pub fn hold_writes(&self, hold: bool) {
        self.0.holds_writes.store(hold, Ordering::Relaxed);
    }

    /// How many writes wait for [`hold_writes`](Self::hold_writes) to let them go on.
    pub fn held_writes(&self) -> usize {
        self.0.held_writes.load(Ordering::Relaxed)
    }

    async fn wait_while_held(&self) {
        let Inner { holds_writes, held_writes, .. } = &*self.0;
        held_writes.fetch_add(1, Ordering::Relaxed);
        while holds_writes.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(1)).await;
        }
        held_writes.fetch_sub(1, Ordering::Relaxed);
    }

    async fn begin(&self, range: ByteRange) -> Result<Running> {
        let running = self.0.running.fetch_add(1, Ordering::Relaxed) + 1;
        self.0.most_running.fetch_max(running, Ordering::Relaxed);
        let guard = Running(Arc::clone(&self.0));
        let delay = Duration::from_micros(self.0.delay.load(Ordering::Relaxed));
        if !delay.is_zero() {
            sleep(delay).await;
        }
        match *self.0.fault.lock().unwrap() {
            Some((fault, errno)) if fault.overlaps(range) => {
                Err(Error::host("cannot do it", std::io::Error::from_raw_os_error(errno)))
            }
            _ => Ok(guard),
        }
    }

    fn zero(&self, range: ByteRange) {
        let (start, end) = (range.offset() as usize, range.end() as usize);
        self.0.bytes.lock().unwrap()[start..end].fill(0);
    }
}

/// Counts an operation as long as it lives.
struct Running(Arc<Inner>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

fn range_of(offset: u64, vector: &IoVector) -> ByteRange {
    ByteRange::new(offset, vector.len() as u64).unwrap()
}

impl Storage for Memory {
    fn name(&self) -> &str {
        "memory"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            write_zeroes: Offload::Available,
            discard: Offload::Available,
            ..PLAIN_CAPABILITIES
        }
    }

    fn size(&self) -> u64 {
        self.0.bytes.lock().unwrap().len() as u64
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let range = range_of(offset, &into);
        let _running = self.begin(range).await?;
        let bytes = self.0.bytes.lock().unwrap();
        into.copy_from(&bytes[range.offset() as usize..range.end() as usize]);
        Ok(())
    }

    async fn write(&self, offset: u64, from: IoVector, _: Durability) -> Result<()> {
        let range = range_of(offset, &from);
        self.wait_while_held().await;
        let _running = self.begin(range).await?;
        let mut bytes = self.0.bytes.lock().unwrap();
        from.copy_to(&mut bytes[range.offset() as usize..range.end() as usize]);
        Ok(())
    }

    async fn write_zeroes(&self, range: ByteRange, _: Unmap) -> Result<()> {
        let _running = self.begin(range).await?;
        self.zero(range);
        Ok(())
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        let _running = self.begin(range).await?;
        self.zero(range);
        Ok(())
    }

    async fn flush(&self, _: SyncMode) -> Result<()> {
        self.0.flushes.fetch_add(1, Ordering::Relaxed);
        let _running = self.begin(ByteRange::between(0, 0)).await?;
        Ok(())
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.0.bytes.lock().unwrap().resize(size as usize, 0);
        Ok(())
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        let _running = self.begin(range).await?;
        let bytes = self.0.bytes.lock().unwrap();
        Ok(status(&bytes, range))
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        self.begin(range).await.map(drop)
    }
}

/// The status at the start of `range`, by the blocks it touches.
pub fn status(bytes: &[u8], range: ByteRange) -> (Allocation, u64) {
    let block_at = |at: usize| {
        let start = at / HOLE * HOLE;
        let block = &bytes[start..(start + HOLE).min(bytes.len())];
        if block.iter().all(|&byte| byte == 0) { Allocation::Hole } else { Allocation::Data }
    };
    let (start, end) = (range.offset() as usize, range.end() as usize);
    let first = block_at(start);
    let mut at = start;
    while at < end && block_at(at) == first {
        at = (at / HOLE + 1) * HOLE;
    }
    (first, (at.min(end) - start) as u64)
}
