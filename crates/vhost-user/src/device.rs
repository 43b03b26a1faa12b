//! A device: a disk as front-ends see it, one after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::{Storage, WriteCache};
use blockhouse_disk::Disk;
use blockhouse_engine::Handle;
use parking_lot::Mutex;

use crate::listener::Listener;
use crate::registration::RegisteredMemory;

/// A disk to be served, and by whom.
pub struct Export<S: Storage> {
    /// The disk.
    pub disk: Arc<Disk<S>>,
    /// What guests call it: the first 20 bytes of its name.
    pub name: String,
    /// How many queues a guest may use, at least one.
    pub queues: u16,
    /// The loops that serve them, at least one: queue `i` is served by loop `i` modulo their number.
    pub loops: Vec<Handle>,
    /// Whether guests' memory is registered with their rings.
    pub memory: RegisteredMemory,
}

impl<S: Storage> Export<S> {
    /// The loop of a queue.
    pub(crate) fn home(&self, queue: usize) -> &Handle {
        &self.loops[queue % self.loops.len()]
    }
}

/// A device for one disk.
pub struct Device<S: Storage> {
    pub(crate) export: Export<S>,
    /// How the front-end, if there is one that wants to know, is told of changes.
    pub(crate) listener: Mutex<Option<Listener>>,
}

impl<S: Storage> Device<S> {
    /// A device without a front-end.
    pub fn new(export: Export<S>) -> Self {
        Self { export, listener: Mutex::new(None) }
    }

    /// The disk has another size: tells the front-end, which asks for the configuration again and
    /// tells the guest.
    pub fn resized(&self) {
        if let Some(Err(error)) = self.listener.lock().as_ref().map(Listener::tell) {
            let disk = self.export.disk.name();
            tracing::warn!(disk, "cannot tell the front-end of the new size: {error}");
        }
    }

    /// What the disk answers when a guest asks who it is.
    pub(crate) fn serial(&self) -> [u8; 20] {
        let mut serial = [0; 20];
        serial.iter_mut().zip(self.export.name.bytes()).for_each(|(to, from)| *to = from);
        serial
    }
}

/// The state of the write cache: what the guest is told, and what its writes are. Always the same.
pub struct Cache {
    /// Whether writes need no flush whatever the driver says.
    always_durable: bool,
    volatile: AtomicBool,
    /// Whether the driver knows of write caches at all.
    understood: AtomicBool,
}

impl Cache {
    /// As the disk has it.
    pub fn of<S: Storage>(disk: &Disk<S>) -> Self {
        let volatile = disk.capabilities().write_cache == WriteCache::Volatile;
        let (volatile, understood) = (AtomicBool::new(volatile), AtomicBool::new(true));
        Self { always_durable: !volatile.load(Ordering::Relaxed), volatile, understood }
    }

    /// What is reported.
    pub fn reported(&self) -> WriteCache {
        match self.volatile.load(Ordering::Acquire) {
            true => WriteCache::Volatile,
            false => WriteCache::None,
        }
    }

    /// What a write must do: as reported, but a driver that knows of no cache cannot flush it.
    pub fn state(&self) -> WriteCache {
        match self.understood.load(Ordering::Acquire) {
            true => self.reported(),
            false => WriteCache::None,
        }
    }

    /// The driver changes it. A disk without a volatile cache stays as it is, and says so.
    pub fn set(&self, cache: WriteCache) {
        let volatile = cache == WriteCache::Volatile && !self.always_durable;
        self.volatile.store(volatile, Ordering::Release);
    }

    /// Whether the driver took a feature that makes it flush.
    pub fn set_understood(&self, understood: Understood) {
        self.understood.store(understood == Understood::Yes, Ordering::Release);
    }
}

/// Whether a driver knows that there may be a volatile write cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Understood {
    /// It flushes, or turns the cache off.
    Yes,
    /// It takes every write for durable.
    No,
}
