//! A front-end with a virtio driver, for tests and measurements.
//!
//! The driver implements the protocol and drives rings in shared memory as a guest does. The caller
//! builds the requests, which may be invalid. Only compiled with the feature `driver`.

mod queue;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use blockhouse_engine::{FaultDomain, SharedMemory};
pub use queue::{DescriptorSpec, DriverQueue, write_chain};
use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};

use crate::block::config::{EVENT_INDEX, LOG_ALL, PROTOCOL_FEATURES, WRITEBACK};

/// The guest's address of the first byte of the shared memory.
pub const GUEST: u64 = 1 << 32;
/// The address that the front-end reports for the memory in its own address space.
const USER: u64 = 0x7000_0000_0000;

/// The options of a driver.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The number of queues.
    pub queues: u16,
    /// Entries of each queue.
    pub entries: u16,
    /// Bytes of memory after the rings, for requests.
    pub memory: usize,
    /// Features that are not negotiated although the device offers them.
    pub without: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { queues: 1, entries: 64, memory: 4 << 20, without: LOG_ALL }
    }
}

/// A connected driver.
pub struct TestDriver {
    options: Options,
    stream: UnixStream,
    frontend: Frontend,
    /// The memory, at [`GUEST`] for the device.
    pub memory: Arc<SharedMemory>,
    file: OwnedFd,
    features: u64,
    tracking: Option<(VhostUserInflight, File)>,
    /// The queues, running.
    pub queues: Vec<DriverQueue>,
}

fn failed(error: vhost::Error) -> io::Error {
    io::Error::other(error)
}

impl TestDriver {
    /// Connects to a server and starts all queues.
    ///
    /// # Errors
    /// The server's errors; an error if the device lacks a needed feature.
    pub fn connect(socket: &Path, options: Options) -> io::Result<Self> {
        let rings = usize::from(options.queues) * DriverQueue::ring_bytes(options.entries);
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, (rings + options.memory) as u64)?;
        let domain = FaultDomain::unconnected();
        let memory = Arc::new(SharedMemory::map(&file, 0, rings + options.memory, &domain)?);
        let stream = UnixStream::connect(socket)?;
        let frontend = Frontend::from_stream(stream.try_clone()?, options.queues.into());
        let (features, tracking, queues) = (0, None, Vec::new());
        let mut driver =
            Self { options, stream, frontend, memory, file, features, tracking, queues };
        driver.negotiate()?;
        driver.queues = (0..options.queues)
            .map(|index| {
                let start = usize::from(index) * DriverQueue::ring_bytes(options.entries);
                let memory = Arc::clone(&driver.memory);
                let event_index = driver.features & EVENT_INDEX != 0;
                DriverQueue::new(memory, start, options.entries, event_index)
            })
            .collect::<io::Result<_>>()?;
        driver.start()?;
        Ok(driver)
    }

    /// Connects again after the server was restarted. The rings keep their content.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn reconnect(&mut self, socket: &Path) -> io::Result<()> {
        self.stream = UnixStream::connect(socket)?;
        self.frontend = Frontend::from_stream(self.stream.try_clone()?, self.options.queues.into());
        self.negotiate()?;
        self.start()
    }

    /// Start of the memory for requests, as an offset in [`memory`](Self::memory).
    pub fn requests(&self) -> usize {
        usize::from(self.options.queues) * DriverQueue::ring_bytes(self.options.entries)
    }

    /// The negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Truncates the file of the shared memory, as a faulty front-end may do. The removed part then
    /// reads as zeros in this process too.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn cut_memory(&self, length: usize) -> io::Result<()> {
        Ok(rustix::fs::ftruncate(&self.file, length as u64)?)
    }

    /// The front-end, for single messages.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// The connection, for messages that [`frontend`](Self::frontend) does not send.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// The description of the shared memory for the server.
    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST,
            memory_size: self.memory.len() as u64,
            userspace_addr: USER,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    fn negotiate(&mut self) -> io::Result<()> {
        let Self { options, frontend, .. } = self;
        frontend.set_owner().map_err(failed)?;
        let offered = frontend.get_features().map_err(failed)?;
        self.features = offered & !options.without;
        frontend.set_features(self.features).map_err(failed)?;
        if self.features & PROTOCOL_FEATURES != 0 {
            use VhostUserProtocolFeatures as Feature;
            let offered = frontend.get_protocol_features().map_err(failed)?;
            let wanted = Feature::MQ
                | Feature::REPLY_ACK
                | Feature::CONFIG
                | Feature::INFLIGHT_SHMFD
                | Feature::LOG_SHMFD
                | Feature::CONFIGURE_MEM_SLOTS
                | Feature::BACKEND_REQ
                | Feature::RESET_DEVICE;
            frontend.set_protocol_features(offered & wanted).map_err(failed)?;
            if offered.contains(Feature::REPLY_ACK) {
                frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
        }
        Ok(())
    }

    fn start(&mut self) -> io::Result<()> {
        let region = self.region();
        self.frontend.set_mem_table(&[region]).map_err(failed)?;
        if let Some((inflight, file)) = &self.tracking {
            self.frontend.set_inflight_fd(inflight, file.as_raw_fd()).map_err(failed)?;
        }
        for index in 0..self.queues.len() {
            self.start_queue(index)?;
        }
        Ok(())
    }

    /// Starts one queue. Its rings keep their content.
    ///
    /// # Errors
    /// Errors of the server.
    pub fn start_queue(&mut self, index: usize) -> io::Result<()> {
        let (queue, frontend) = (&self.queues[index], &mut self.frontend);
        let entries = self.options.entries;
        frontend.set_vring_num(index, entries).map_err(failed)?;
        let [descriptors, available, used] = queue.offsets().map(|offset| USER + offset as u64);
        let config = VringConfigData {
            queue_max_size: entries,
            queue_size: entries,
            flags: u32::from(self.features & LOG_ALL != 0),
            desc_table_addr: descriptors,
            used_ring_addr: used,
            avail_ring_addr: available,
            log_addr: (self.features & LOG_ALL != 0).then(|| used - USER + GUEST),
        };
        frontend.set_vring_addr(index, &config).map_err(failed)?;
        frontend.set_vring_base(index, queue.base()).map_err(failed)?;
        frontend.set_vring_call(index, &queue.call).map_err(failed)?;
        frontend.set_vring_kick(index, &queue.kick).map_err(failed)?;
        if self.features & PROTOCOL_FEATURES != 0 {
            frontend.set_vring_enable(index, true).map_err(failed)?;
        }
        Ok(())
    }

    /// Stops one queue, as a front-end does when its machine is paused: when this returns, every
    /// request that was begun is answered.
    ///
    /// # Errors
    /// Errors of the server.
    pub fn stop_queue(&mut self, index: usize) -> io::Result<()> {
        self.frontend.get_vring_base(index).map(drop).map_err(failed)
    }

    /// Starts one stopped queue with empty rings.
    ///
    /// # Errors
    /// Errors of the server.
    pub fn reset_queue(&mut self, index: usize) -> io::Result<()> {
        self.queues[index].reset();
        self.start_queue(index)
    }

    /// Makes the device track requests in flight, so that another server can take over. The queues
    /// start again.
    ///
    /// # Errors
    /// Errors of the server.
    pub fn track(&mut self) -> io::Result<()> {
        let Options { queues, entries, .. } = self.options;
        for index in 0..self.queues.len() {
            self.frontend.get_vring_base(index).map_err(failed)?;
        }
        let wanted = VhostUserInflight::new(0, 0, queues, entries);
        self.tracking = Some(self.frontend.get_inflight_fd(&wanted).map_err(failed)?);
        self.start()
    }

    /// Bytes of the configuration space.
    ///
    /// # Errors
    /// Errors of the server.
    pub fn config(&mut self, offset: u32, length: u32) -> io::Result<Vec<u8>> {
        let empty = vec![0; length as usize];
        let flags = VhostUserConfigFlags::empty();
        let answer = self.frontend.get_config(offset, length, flags, &empty);
        Ok(answer.map_err(failed)?.1)
    }

    /// The size of the disk in bytes.
    ///
    /// # Errors
    /// Errors of the server.
    pub fn capacity(&mut self) -> io::Result<u64> {
        let bytes = self.config(0, 8)?;
        let sectors: [u8; 8] = bytes.try_into().map_err(|_| io::Error::other("a short answer"))?;
        Ok(u64::from_le_bytes(sectors) * 512)
    }

    /// Turns the volatile write cache on (1) or off (0).
    ///
    /// # Errors
    /// Errors of the server.
    pub fn set_writeback(&mut self, on: u8) -> io::Result<()> {
        // No flag is set, which means that the guest changes the mode, and not a migration.
        let flags = VhostUserConfigFlags::empty();
        self.frontend.set_config(WRITEBACK, flags, &[on]).map_err(failed)
    }

    /// Whether the device reports a volatile write cache.
    ///
    /// # Errors
    /// Errors of the server.
    pub fn writeback(&mut self) -> io::Result<bool> {
        Ok(self.config(WRITEBACK, 1)? == [1])
    }
}
