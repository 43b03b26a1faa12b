//! A device: a disk as front-ends see it, one after the other.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhouse_core::Storage;
use blockhouse_disk::{Access, Disk};
use blockhouse_engine::{Handle, peer_process};
use parking_lot::Mutex;

use crate::block::SERIAL_BYTES;
use crate::protocol::BackendChannel;

/// Whether a guest's memory is registered with the rings of its queues' loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisteredMemory {
    /// All memory is registered as long as the front-end shares it. It is pinned, and counted
    /// against `RLIMIT_MEMLOCK` once for each loop. Memory that the guest returns to the host
    /// (balloon, free page reporting, virtio-mem) stays pinned. If the guest uses such memory
    /// again, it gets new pages, but reads still store their data in the pinned pages.
    On,
    /// No memory is registered.
    Off,
}

/// A disk to be served, and the loops that serve it.
pub struct Export<S: Storage> {
    /// The disk.
    pub disk: Arc<Disk<S>>,
    /// The disk's name; guests see its first 20 bytes as the serial.
    pub name: String,
    /// How many queues a guest may use, at least one.
    pub queues: u16,
    /// The loops that serve the queues, at least one. Queue `i` is served by loop `i` modulo the
    /// number of loops.
    pub loops: Vec<Handle>,
    /// Whether guests' memory is registered with their rings.
    pub memory: RegisteredMemory,
    /// The access of guests. If the disk is read-only, guests can only read in any case.
    pub access: Access,
}

impl<S: Storage> Export<S> {
    /// The loop of a queue.
    pub(crate) fn loop_of(&self, queue: usize) -> &Handle {
        &self.loops[queue % self.loops.len()]
    }
}

/// A device for one disk. The [crate's documentation](crate) has a complete program.
pub struct Device<S: Storage> {
    pub(crate) export: Export<S>,
    /// The channel that notifies the front-end of changes, if it set one up.
    pub(crate) backend_channel: Mutex<Option<BackendChannel>>,
    observer: Option<FrontendObserver>,
}

/// A front-end of a device connected or disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrontendEvent {
    /// The front-end has connected.
    Came,
    /// The connection has ended, and none of its requests is in flight.
    Left,
}

/// The observer of front-ends. Its arguments are the front-end's process, if the kernel reports it,
/// and the event. Called on the device's thread.
pub type FrontendObserver = Box<dyn Fn(&str, FrontendEvent) + Send + Sync>;

/// A front-end of a device, until it is dropped.
pub(crate) struct FrontendGuard<'a, S: Storage> {
    device: &'a Device<S>,
    peer: String,
}

impl<S: Storage> Drop for FrontendGuard<'_, S> {
    fn drop(&mut self) {
        self.device.tell(&self.peer, FrontendEvent::Left);
    }
}

impl<S: Storage> Device<S> {
    /// A device without a front-end.
    pub fn new(export: Export<S>) -> Self {
        Self { export, backend_channel: Mutex::new(None), observer: None }
    }

    /// As [`new`](Self::new); `observer` is called when front-ends connect and disconnect.
    pub fn observed(export: Export<S>, observer: FrontendObserver) -> Self {
        Self { observer: Some(observer), ..Self::new(export) }
    }

    fn tell(&self, peer: &str, event: FrontendEvent) {
        if let Some(observer) = &self.observer {
            observer(peer, event);
        }
    }

    /// Reports to the observer that a front-end connected, and when the guard is dropped that it
    /// disconnected.
    pub(crate) fn observe(&self, stream: &UnixStream) -> FrontendGuard<'_, S> {
        let process = peer_process(stream).ok().flatten();
        let peer = process.map_or_else(|| "unknown".into(), |id| format!("process {id}"));
        self.tell(&peer, FrontendEvent::Came);
        FrontendGuard { device: self, peer }
    }

    /// Notifies the front-end that the size of the disk has changed. The front-end then reads the
    /// configuration again and notifies the guest.
    pub fn resized(&self) {
        let channel = self.backend_channel.lock();
        if let Some(Err(error)) = channel.as_ref().map(BackendChannel::notify_config_change) {
            let disk = self.export.disk.name();
            tracing::warn!(disk, "cannot tell the front-end of the new size: {error}");
        }
    }

    /// The disk's serial: the first 20 bytes of its name.
    pub(crate) fn serial(&self) -> [u8; SERIAL_BYTES] {
        let mut serial = [0; SERIAL_BYTES];
        serial.iter_mut().zip(self.export.name.bytes()).for_each(|(to, from)| *to = from);
        serial
    }
}
