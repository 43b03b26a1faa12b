//! Starts the queue of a ring on its event loop.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhouse_core::{Storage, rare};
use blockhouse_engine::GuestMemory;
use futures_channel::mpsc;

use super::dirty_logging::DirtyLogging;
use super::inflight_area::InflightArea;
use super::memory::MemoryTable;
use super::vring::{RunningQueue, Vring};
use crate::block::{RequestLimits, WriteCacheMode, config};
use crate::device::Device;
use crate::protocol::{Result, refused};
use crate::queue::{self, Call, Setup, Virtqueue};
use crate::ring::{Broken, EventIndex, SplitRing};

/// The parameters that the queues of a front-end are started with.
pub struct QueueStart<'a, S: Storage> {
    /// The device.
    pub device: &'a Device<S>,
    /// The connection. It is shut down if the driver breaks a queue that has no eventfd for errors,
    /// or if the front-end's memory is unmapped.
    pub stream: &'a UnixStream,
    /// The negotiated features.
    pub features: u64,
    /// The front-end's memory.
    pub memory: &'a mut MemoryTable,
    /// The front-end's in-flight area; `None` if it has none.
    pub inflight: Option<&'a InflightArea>,
    /// The log of the guest pages that the queues write.
    pub log: &'a DirtyLogging,
    /// The state of the write cache.
    pub cache: &'a Arc<WriteCacheMode>,
}

impl<S: Storage + Send + Sync> QueueStart<'_, S> {
    /// Starts the queue with this number.
    pub fn start(self, index: usize, vring: &mut Vring) -> Result<()> {
        let export = &self.device.export;
        // Each queue has a copy of its own, so that the threads of queues do not contend for one
        // reference count.
        let memory = Arc::new(self.memory.guest().clone());
        // File descriptors are duplicated first: if none is free, the call fails before it opens
        // the ring and its in-flight area.
        let call = vring.duplicate_call()?;
        let Some(kick) = vring.duplicate_kick()? else { return Ok(()) };
        let mut virtqueue = self.virtqueue(index, vring, &memory).map_err(refused)?;
        virtqueue.set_call(call);
        let (disk, serial) = (Arc::clone(&export.disk), self.device.serial());
        let (cache, access) = (Arc::clone(self.cache), export.access);
        let limits = RequestLimits::of(self.features);
        let error_handler = error_handler(index, self.stream, vring, disk.name().to_owned());
        let (requests, receiver) = mpsc::unbounded();
        let event_loop = export.loop_of(index);
        self.memory.register(event_loop, disk.name());
        let (ended, end) = std::sync::mpsc::channel();
        drop(event_loop.spawn(move || async move {
            let error_handler = Box::new(error_handler);
            let setup =
                Setup { disk, access, serial, cache, virtqueue, kick, limits, error_handler };
            // The send fails only if the receiver was dropped; then the result is not needed.
            let _ = ended.send(rare(queue::run(setup, receiver)).await);
        }));
        vring.set_running(RunningQueue { requests, end });
        Ok(())
    }

    /// The ring with the state that its in-flight area and the dirty log have for it.
    fn virtqueue(
        &self,
        index: usize,
        vring: &Vring,
        memory: &Arc<GuestMemory>,
    ) -> Result<Virtqueue, Broken> {
        let event_index = match self.features & config::EVENT_INDEX {
            0 => EventIndex::Absent,
            _ => EventIndex::Negotiated,
        };
        let addresses = vring.guest_addresses(memory)?;
        let open = |base| SplitRing::new(memory, addresses, vring.size(), base, event_index);
        let mut ring = open(vring.base())?;
        let used = ring.last_used_idx();
        let tracked = self.inflight.and_then(|area| area.open_queue(index, vring.size(), used));
        let (inflight, resubmit) = match tracked {
            Some((inflight, recovery)) => {
                if let Some(base) = recovery.last_avail_idx {
                    ring = open(base)?;
                }
                (Some(inflight), recovery.resubmit)
            }
            None => (None, Vec::new()),
        };
        let resubmit = resubmit.into_iter().filter(|&head| head < vring.size()).collect();
        let (memory, domain) = (Arc::clone(memory), Arc::clone(self.memory.domain()));
        let mut virtqueue = Virtqueue::new(ring, memory, domain, inflight, resubmit);
        let (log, used, call) = self.log.for_queue(vring.logged_used());
        virtqueue.set_log(log, used, call);
        Ok(virtqueue)
    }
}

/// Handles the end of queue `index` after an error. The error is logged, and signalled to the
/// front-end by the queue's eventfd for errors. Other queues continue; this queue runs again when
/// its ring is set up again. The connection is shut down if the front-end gave no such eventfd, or
/// if the front-end's memory can no longer be accessed.
fn error_handler(
    index: usize,
    stream: &UnixStream,
    vring: &Vring,
    disk: String,
) -> impl Fn(&Broken) + Send + use<> {
    let stream = stream.try_clone();
    let error = vring.duplicate_error().ok().flatten();
    move |why| {
        error.iter().for_each(Call::signal);
        match why {
            // The device's thread logs lost memory, once for all queues.
            Broken::MemoryLost => {}
            _ if error.is_some() => {
                tracing::error!(
                    disk,
                    "queue {index} is broken, and rests until it is reset: {why}"
                );
                return;
            }
            _ => tracing::error!(disk, "front-end dropped: queue {index} is broken: {why}"),
        }
        // The shutdown fails only if the connection has ended already.
        let _ = stream.as_ref().map(|stream| stream.shutdown(Shutdown::Both));
    }
}
