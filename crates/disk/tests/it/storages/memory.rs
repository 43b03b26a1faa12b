//! Bytes in memory, for many threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Fua, IoVector, Result, Storage,
    SyncMode, Unmap,
};
use blockhouse_sim::PLAIN_CAPABILITIES;

/// Bytes in memory, and the bytes that flushes made stable. Clones are the same memory.
#[derive(Clone)]
pub struct Memory(Arc<State>);

struct State {
    visible: Mutex<Vec<u8>>,
    stable: Mutex<Vec<u8>>,
    flushes: AtomicU64,
    block: u32,
}

impl Memory {
    /// `content`, all of it stable.
    pub fn new(content: Vec<u8>, block: u32) -> Self {
        Self(Arc::new(State {
            visible: Mutex::new(content.clone()),
            stable: Mutex::new(content),
            flushes: AtomicU64::new(0),
            block,
        }))
    }

    /// The bytes that are stable.
    pub fn stable(&self) -> Vec<u8> {
        self.0.stable.lock().unwrap().clone()
    }

    /// How many flushes there were.
    pub fn flushes(&self) -> u64 {
        self.0.flushes.load(Ordering::Relaxed)
    }
}

impl Storage for Memory {
    fn name(&self) -> &str {
        "memory"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fua: Fua::Emulated,
            alignment: Alignment { offset: self.0.block, memory: 1 },
            ..PLAIN_CAPABILITIES
        }
    }

    fn size(&self) -> u64 {
        self.0.visible.lock().unwrap().len() as u64
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        thread::yield_now();
        into.copy_from(&self.0.visible.lock().unwrap()[offset as usize..]);
        Ok(())
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        assert_eq!(durability, Durability::None, "it has no FUA");
        thread::yield_now();
        let (start, end) = (offset as usize, offset as usize + from.len());
        let mut visible = self.0.visible.lock().unwrap();
        let length = visible.len().max(end);
        visible.resize(length, 0);
        from.copy_to(&mut visible[start..end]);
        Ok(())
    }

    async fn write_zeroes(&self, _range: ByteRange, _unmap: Unmap) -> Result<()> {
        unreachable!("not offered")
    }

    async fn discard(&self, _range: ByteRange) -> Result<()> {
        unreachable!("not offered")
    }

    async fn flush(&self, _depth: SyncMode) -> Result<()> {
        let seen = self.0.visible.lock().unwrap().clone();
        thread::yield_now();
        self.0.flushes.fetch_add(1, Ordering::Relaxed);
        *self.0.stable.lock().unwrap() = seen;
        Ok(())
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.0.visible.lock().unwrap().resize(size as usize, 0);
        Ok(())
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        Ok((Allocation::Data, range.length()))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}
