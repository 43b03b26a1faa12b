//! Pausing a front-end, and resuming it in this process or in another.
//!
//! Guarantees: after [`Frontend::pause`] no request is in flight, and this process stores nothing
//! in rings or logs until [`Frontend::resume`], so another process may use the guest's memory. A
//! [`PreparedFrontend`] has stored nothing in rings or logs either, and sends no signal. The other
//! process continues exactly as this process would.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use blockhouse_core::Storage;
use blockhouse_engine::FaultDomain;

use super::Frontend;
use super::dirty_logging::DirtyLogging;
use super::inflight_area::InflightArea;
use super::memory::MemoryTable;
use super::paused::{PauseError, PausedFrontend, PausedWriteCache};
use super::vring::Vring;
use crate::block::{DriverFlushes, WriteCacheMode, config};
use crate::device::{Device, RegisteredMemory};
use crate::protocol::{BackendChannel, Result, feature, refused};

impl<S: Storage + Send + Sync> Frontend<S> {
    /// Ends all running queues by the deadline, and describes the current state.
    /// [`resume`](Self::resume) follows, also after an error. `None` if the front-end's memory can
    /// no longer be accessed, so that its connection is about to end; then no `resume` follows.
    pub fn pause(&mut self, deadline: Instant) -> Result<Option<PausedFrontend>, PauseError> {
        let running = |vring: &Vring| vring.is_running();
        self.paused = (0..self.vrings.len()).filter(|&at| running(&self.vrings[at])).collect();
        self.vrings.iter().for_each(Vring::begin_end);
        let mut ended = true;
        for vring in &mut self.vrings {
            ended &= vring.wait_ended(deadline);
        }
        match ended {
            _ if self.lost_memory().is_some() => Ok(None),
            true => Ok(Some(self.describe()?)),
            false => Err(PauseError::Requests),
        }
    }

    /// Resumes the queues that a pause has ended.
    pub fn resume(&mut self) {
        for index in std::mem::take(&mut self.paused) {
            self.vrings[index].take_back_end();
            if let Err(why) = self.start_queue(index) {
                let disk = self.device.export.disk.name();
                tracing::error!(disk, "front-end dropped: queue {index} cannot go on: {why}");
                // The shutdown fails only if the connection has ended already.
                let _ = self.stream.shutdown(Shutdown::Both);
            }
        }
    }

    fn describe(&self) -> io::Result<PausedFrontend> {
        let channel = self.device.backend_channel.lock();
        let vring = |(index, vring): (usize, &Vring)| vring.describe(self.paused.contains(&index));
        Ok(PausedFrontend {
            connection: self.stream.try_clone()?.into(),
            features: self.features,
            protocol_features: self.protocol_features,
            memory: self.memory.describe()?,
            inflight: self.inflight.as_ref().map(InflightArea::describe).transpose()?,
            log: self.log.describe()?,
            log_call: self.log.duplicate_call()?,
            backend_channel: channel.as_ref().map(BackendChannel::duplicate).transpose()?,
            write_cache: PausedWriteCache {
                reported: self.cache.reported(),
                driver_flushes: self.cache.driver_flushes() == DriverFlushes::Yes,
                is_restored: self.is_cache_restored,
            },
            vrings: self.vrings.iter().enumerate().map(vring).collect::<io::Result<_>>()?,
        })
    }

    /// Takes over a front-end that paused in another process. The caller then calls
    /// [`resume`](Self::resume).
    pub fn restore(device: Arc<Device<S>>, prepared: PreparedFrontend) -> Self {
        let PreparedFrontend { stream, features, protocol_features, .. } = prepared;
        let PreparedFrontend { memory, inflight, log, vrings, paused, .. } = prepared;
        let cache = WriteCacheMode::of(&*device.export.disk);
        cache.set(prepared.write_cache.reported);
        cache.set_driver_flushes(if prepared.write_cache.driver_flushes {
            DriverFlushes::Yes
        } else {
            DriverFlushes::No
        });
        *device.backend_channel.lock() = prepared.backend_channel;
        let is_cache_restored = prepared.write_cache.is_restored;
        Self {
            device,
            stream,
            features,
            protocol_features,
            memory,
            vrings,
            inflight,
            log,
            cache: Arc::new(cache),
            is_cache_restored,
            has_logged_refusal: false,
            paused,
        }
    }
}

/// A front-end that paused in another process. Its memory is mapped and its state is checked, so
/// the steps that remain fail only if no more descriptors are available.
pub struct PreparedFrontend {
    stream: UnixStream,
    features: u64,
    protocol_features: u64,
    memory: MemoryTable,
    inflight: Option<InflightArea>,
    log: DirtyLogging,
    backend_channel: Option<BackendChannel>,
    write_cache: PausedWriteCache,
    vrings: Vec<Vring>,
    /// The queues that were running before the pause, and run again after it.
    paused: Vec<usize>,
}

impl PreparedFrontend {
    /// Maps a front-end's memory, and checks another process's description of it, for a device of
    /// this many queues. Memory to be registered is populated first.
    ///
    /// # Errors
    /// Memory that cannot be mapped, a queue outside of the memory, or a part that this version
    /// does not know.
    pub fn new(
        paused: PausedFrontend,
        queues: u16,
        registered: RegisteredMemory,
    ) -> io::Result<Self> {
        Self::prepare(paused, queues, registered).map_err(io::Error::other)
    }

    /// The connection.
    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    fn prepare(paused: PausedFrontend, queues: u16, registered: RegisteredMemory) -> Result<Self> {
        let PausedFrontend { features, protocol_features, write_cache, .. } = paused;
        if protocol_features & !feature::OFFERED != 0 {
            return Err(refused(format_args!("protocol features {protocol_features:#x}")));
        }
        if paused.vrings.len() != usize::from(queues) {
            let count = paused.vrings.len();
            return Err(refused(format_args!("{count} queues, where a device has {queues}")));
        }
        let stream = UnixStream::from(paused.connection);
        let domain = FaultDomain::of_connection(stream.try_clone().map_err(refused)?);
        let mut memory = MemoryTable::new(domain, registered);
        memory.adopt(memory.replaced(paused.memory)?);
        let inflight = paused.inflight;
        let inflight =
            inflight.map(|(given, file)| InflightArea::map(given, file, &memory)).transpose()?;
        let mut log = DirtyLogging::default();
        log.set_enabled(features & config::LOG_ALL != 0);
        if let Some((given, file)) = paused.log {
            log.set_log(given, file, &memory)?;
        }
        paused.log_call.map(|call| log.set_call(call)).transpose()?;
        let backend_channel = paused.backend_channel.map(BackendChannel::new).transpose();
        let backend_channel = backend_channel.map_err(refused)?;
        let mut running = Vec::new();
        let mut vrings = Vec::new();
        for (index, vring) in paused.vrings.into_iter().enumerate() {
            running.extend(vring.is_running.then_some(index));
            vrings.push(Vring::restore(vring, memory.guest())?);
        }
        Ok(Self {
            stream,
            features,
            protocol_features,
            memory,
            inflight,
            log,
            backend_channel,
            write_cache,
            vrings,
            paused: running,
        })
    }
}
