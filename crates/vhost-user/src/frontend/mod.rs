//! One front-end: its settings, and the effects of its messages on rings and memory.
//!
//! This code runs on the device's own thread, which may block. It sends a change of a running queue
//! to the queue's loop, and waits for the outcome before it replies to the front-end. So a reply
//! means that the change is applied.

mod dirty_logging;
mod eventfd;
mod handing_over;
mod inflight_area;
mod lost_memory;
mod memory;
mod messages;
mod paused;
mod queue_start;
mod registration;
mod vring;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhouse_core::{Storage, WriteCache};
use blockhouse_engine::FaultDomain;
use dirty_logging::DirtyLogging;
pub use handing_over::PreparedFrontend;
use inflight_area::InflightArea;
use memory::{ChangedMemory, MemoryTable};
pub use messages::handle;
pub use paused::{PauseError, PausedFrontend, PausedVring, PausedWriteCache};
use queue_start::QueueStart;
use vring::Vring;

use crate::block::{DriverFlushes, WriteCacheMode, config};
use crate::device::Device;
use crate::protocol::{
    BackendChannel, InflightDescription, LogDescription, MemoryRegion, Result, UserAddresses,
    refused,
};
use crate::queue::StopMode;

/// A connected front-end.
pub struct Frontend<S: Storage> {
    device: Arc<Device<S>>,
    stream: UnixStream,
    features: u64,
    protocol_features: u64,
    memory: MemoryTable,
    vrings: Vec<Vring>,
    inflight: Option<InflightArea>,
    log: DirtyLogging,
    cache: Arc<WriteCacheMode>,
    /// Whether the state of the write cache was restored from an earlier server.
    is_cache_restored: bool,
    /// Whether a refused message was logged.
    has_logged_refusal: bool,
    /// The queues that ran before a pause.
    paused: Vec<usize>,
}

impl<S: Storage + Send + Sync> Frontend<S> {
    /// A front-end that has sent no message yet.
    ///
    /// # Errors
    /// If the connection cannot be duplicated.
    pub fn new(device: Arc<Device<S>>, stream: &UnixStream) -> std::io::Result<Self> {
        let domain = FaultDomain::of_connection(stream.try_clone()?);
        let memory = MemoryTable::new(domain, device.export.memory);
        Ok(Self {
            stream: stream.try_clone()?,
            features: 0,
            protocol_features: 0,
            memory,
            vrings: (0..device.export.queues).map(|_| Vring::default()).collect(),
            inflight: None,
            log: DirtyLogging::default(),
            cache: Arc::new(WriteCacheMode::of(&*device.export.disk)),
            is_cache_restored: false,
            has_logged_refusal: false,
            paused: Vec::new(),
            device,
        })
    }

    /// The device.
    pub fn device(&self) -> &Device<S> {
        &self.device
    }

    /// The log line about lost memory of the front-end, which ends the connection; `None` if all
    /// memory can be accessed.
    pub fn lost_memory(&self) -> Option<String> {
        self.memory.lost(self.inflight.as_ref().map(InflightArea::memory))
    }

    /// Logs a refused message. Only the first one is a warning, because a guest can cause many.
    pub fn log_refusal(&mut self, why: &str) {
        let disk = self.device.export.disk.name();
        if std::mem::replace(&mut self.has_logged_refusal, true) {
            tracing::debug!(disk, "a front-end's {why}")
        } else {
            tracing::warn!(disk, "a front-end's {why}")
        }
    }

    /// Ends all queues.
    pub fn stop_all(&mut self, mode: StopMode) {
        self.vrings.iter_mut().for_each(|vring| vring.stop(mode));
    }

    /// Resets the front-end to the state of a new connection, except its memory, in-flight area,
    /// protocol features and write cache: QEMU goes on to report the mode that it set last.
    pub fn reset(&mut self) {
        self.stop_all(StopMode::Graceful);
        self.vrings.iter_mut().for_each(|vring| *vring = Vring::default());
        (self.features, self.is_cache_restored) = (0, false);
        self.log = DirtyLogging::default();
        self.cache.set_driver_flushes(DriverFlushes::Yes);
    }

    /// Sets the driver's features.
    pub fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !config::acceptable_features(&*self.device.export.disk);
        if unknown != 0 {
            return Err(refused(format_args!("features that were not offered: {unknown:#x}")));
        }
        let was_negotiated = self.features & config::KNOWS_WRITE_CACHE;
        let is_negotiated = features & config::KNOWS_WRITE_CACHE;
        self.features = features;
        // The driver is a new one. If the cache's state was restored, the earlier driver continues
        // after a restart of the server, and the state stays. Only SET_CONFIG turns a cache on:
        // a driver under QEMU that finds writethrough never flushes.
        let is_new = was_negotiated != is_negotiated && !self.is_cache_restored;
        if is_new && config::starts_writethrough(features) {
            self.cache.set(WriteCache::None);
            self.keep_cache();
        }
        self.cache.set_driver_flushes(match is_negotiated {
            0 => DriverFlushes::No,
            _ => DriverFlushes::Yes,
        });
        self.log.set_enabled(features & config::LOG_ALL != 0);
        self.update_log()
    }

    /// The protocol's features that the front-end accepted.
    pub fn protocol_features(&self) -> u64 {
        self.protocol_features
    }

    /// Sets the protocol's features.
    pub fn set_protocol_features(&mut self, features: u64) {
        self.protocol_features = features;
    }

    /// The ring with this index.
    pub fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        let count = self.vrings.len();
        let vring = self.vrings.get_mut(index as usize);
        vring.ok_or_else(|| refused(format_args!("there is no queue {index}, but {count} in all")))
    }

    /// Sets the addresses of a ring, also of a running queue.
    pub fn set_addresses(&mut self, index: u32, addresses: UserAddresses) -> Result<()> {
        self.vring(index)?;
        let vring = &mut self.vrings[index as usize];
        vring.set_addresses(addresses, self.memory.guest())?;
        vring.move_to(self.memory.guest(), &self.log)
    }

    /// Starts the queue of a ring if the ring's setup is complete.
    pub fn start_if_complete(&mut self, index: u32) -> Result<()> {
        let has_protocol_features = self.features & config::PROTOCOL_FEATURES != 0;
        if self.vring(index)?.can_start(has_protocol_features) {
            self.start_queue(index as usize)
        } else {
            Ok(())
        }
    }

    /// Starts the queue of a ring with a complete setup, unless the queue runs.
    fn start_queue(&mut self, index: usize) -> Result<()> {
        if self.vrings[index].is_running() {
            return Ok(());
        }
        let start = QueueStart {
            device: &self.device,
            stream: &self.stream,
            features: self.features,
            memory: &mut self.memory,
            inflight: self.inflight.as_ref(),
            log: &self.log,
            cache: &self.cache,
        };
        start.start(index, &mut self.vrings[index])
    }

    /// Replaces all regions of memory.
    pub fn replace_memory(
        &mut self,
        regions: impl IntoIterator<Item = (MemoryRegion, OwnedFd)>,
    ) -> Result<()> {
        let changed = self.memory.replaced(regions)?;
        self.change_memory(changed)
    }

    /// Adds a region of memory.
    pub fn add_memory(&mut self, region: MemoryRegion, file: OwnedFd) -> Result<()> {
        let changed = self.memory.with(region, file)?;
        self.change_memory(changed)
    }

    /// Removes a region of memory.
    pub fn remove_memory(&mut self, region: &MemoryRegion) -> Result<()> {
        let changed = self.memory.without(region)?;
        self.change_memory(changed)
    }

    /// Applies a change of the memory if the new memory has the rings of all running queues.
    fn change_memory(&mut self, changed: ChangedMemory) -> Result<()> {
        for vring in &self.vrings {
            vring.check(changed.guest())?;
        }
        self.memory.adopt(changed);
        for vring in &self.vrings {
            vring.move_to(self.memory.guest(), &self.log)?;
        }
        // The new regions are registered only now, when no queue uses the replaced regions, so that
        // old and new regions are not pinned at the same time.
        let export = &self.device.export;
        for (index, vring) in self.vrings.iter().enumerate() {
            if vring.is_running() {
                self.memory.register(export.loop_of(index), export.disk.name());
            }
        }
        Ok(())
    }

    /// Sets the log of changed pages.
    pub fn set_log(&mut self, given: LogDescription, file: OwnedFd) -> Result<()> {
        self.log.set_log(given, file, &self.memory)?;
        self.update_log()
    }

    /// Sets the eventfd that notifies the front-end of changes of the log.
    pub fn set_log_call(&mut self, call: OwnedFd) -> Result<()> {
        self.log.set_call(call)?;
        self.update_log()
    }

    /// Updates the dirty logging of all running queues.
    fn update_log(&self) -> Result<()> {
        self.vrings.iter().try_for_each(|vring| vring.update_log(&self.log))
    }

    /// Sets the socket for messages to the front-end.
    pub fn set_backend_channel(&mut self, socket: OwnedFd) -> Result<()> {
        *self.device.backend_channel.lock() = Some(BackendChannel::new(socket).map_err(refused)?);
        Ok(())
    }

    /// The write cache as it is reported to the guest.
    pub fn reported_cache(&self) -> WriteCache {
        self.cache.reported()
    }

    /// Turns the write cache on or off, as the driver requests.
    pub fn set_write_cache(&mut self, cache: WriteCache) -> Result<()> {
        let before = self.cache.reported();
        self.cache.set(cache);
        // From now on the driver assumes that all its writes are durable, including earlier writes,
        // so these are flushed.
        if (before, self.cache.reported()) == (WriteCache::Volatile, WriteCache::None)
            && let Err(error) = self.flush()
        {
            self.cache.set(before);
            return Err(error);
        }
        self.keep_cache();
        Ok(())
    }

    /// Makes everything written so far durable.
    fn flush(&self) -> Result<()> {
        let disk = Arc::clone(&self.device.export.disk);
        let flushed = self.device.export.loops[0].spawn(move || async move { disk.flush().await });
        let outcome = flushed.wait().ok_or_else(|| refused("the server ends"))?;
        outcome.map_err(refused)
    }

    /// Maps memory for in-flight tracking, with the state that an earlier server stored there.
    pub fn set_inflight(&mut self, given: InflightDescription, file: OwnedFd) -> Result<()> {
        let area = InflightArea::map(given, file, &self.memory)?;
        // The mode is restored, because the guest does not set it again after the server has
        // restarted.
        if let Some(cache) = area.write_cache() {
            self.cache.set(cache);
            self.is_cache_restored = true;
        }
        self.inflight = Some(area);
        self.keep_cache();
        Ok(())
    }

    /// Stores the state of the write cache for the next server.
    fn keep_cache(&self) {
        if let Some(area) = &self.inflight {
            area.keep_write_cache(self.cache.reported());
        }
    }
}
