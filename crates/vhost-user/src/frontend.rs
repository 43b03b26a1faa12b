//! One front-end's connection: its messages change rings and memory.
//!
//! All of it runs on the device's own thread, which may wait. What concerns a running queue is an
//! order to its loop, and the answer is awaited before the front-end gets its own, so that a reply
//! means that the change is in force.

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhouse_core::{Storage, WriteCache};
use blockhouse_engine::{GuestMemory, GuestRegion, SharedMemory, View, is_eventfd};
use futures_channel::mpsc;
use vhost::vhost_user::Error;
use vhost::vhost_user::message::{
    VhostUserInflight, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserVringAddrFlags,
};

use crate::call::Call;
use crate::config;
use crate::device::{Cache, Device, Understood};
use crate::dirty_log::DirtyLog;
use crate::inflight::{self, Book};
use crate::queue::{self, Manner, Order, RingSide, Setup};
use crate::registration::Registration;
use crate::ring::{Broken, EventIndex, MOST_ENTRIES, Ring};
use crate::vring::{Running, UserAddresses, Vring};

/// Result of handling a message. An error ends the connection, with its line in the log.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The most regions of memory that a front-end may share; QEMU's limit for hot-plugged memory.
pub const MOST_REGIONS: u64 = 509;

/// What a front-end has said so far.
pub struct Frontend<S: Storage> {
    device: Arc<Device<S>>,
    stream: UnixStream,
    features: u64,
    memory: GuestMemory,
    registration: Registration,
    pub(crate) vrings: Vec<Vring>,
    tracking: Option<Tracking>,
    log: Option<DirtyLog>,
    pub(crate) cache: Arc<Cache>,
    /// Whether the state of the write cache is that which an earlier server left.
    is_cache_restored: bool,
}

/// In-flight tracking of this front-end.
struct Tracking {
    memory: Arc<SharedMemory>,
    entries: u16,
    device: Option<View>,
}

/// An error with a reason for the log.
pub fn refused(why: impl std::fmt::Display) -> Error {
    Error::ReqHandlerError(std::io::Error::other(why.to_string()))
}

impl<S: Storage + Send + Sync> Frontend<S> {
    /// A front-end that has not said anything yet.
    ///
    /// # Errors
    /// The kernel's, when the connection cannot be duplicated.
    pub fn new(device: Arc<Device<S>>, stream: &UnixStream) -> std::io::Result<Self> {
        let vrings = (0..device.export.queues).map(|_| Vring::default()).collect();
        let cache = Arc::new(Cache::of(&*device.export.disk));
        let registration = Registration::new(device.export.memory);
        Ok(Self {
            stream: stream.try_clone()?,
            device,
            features: 0,
            memory: GuestMemory::new(),
            registration,
            vrings,
            tracking: None,
            log: None,
            cache,
            is_cache_restored: false,
        })
    }

    /// The device.
    pub fn device(&self) -> &Device<S> {
        &self.device
    }

    /// The ring of that number.
    pub fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        let count = self.vrings.len();
        let vring = self.vrings.get_mut(index as usize);
        vring.ok_or_else(|| refused(format_args!("there is no queue {index}, but {count} in all")))
    }

    /// Ends all queues.
    pub fn stop_all(&mut self, manner: Manner) {
        self.vrings.iter_mut().for_each(|vring| vring.stop(manner));
    }

    /// Back to the state of a new connection.
    pub fn reset(&mut self) {
        self.stop_all(Manner::Orderly);
        self.vrings.iter_mut().for_each(|vring| *vring = Vring::default());
        (self.features, self.log, self.is_cache_restored) = (0, None, false);
        self.cache.set(WriteCache::Volatile);
        self.cache.set_understood(Understood::Yes);
        self.keep_cache();
    }

    /// Starts the queue of a ring if everything that it needs is there.
    pub fn start_if_complete(&mut self, index: u32) -> Result<()> {
        let protocol = self.features & config::PROTOCOL_FEATURES != 0;
        let vring = self.vring(index)?;
        // Without the protocol's features, rings are enabled from the start.
        if vring.running.is_none() && vring.kick.is_some() && (vring.enabled || !protocol) {
            self.start(index as usize).map_err(refused)?;
        }
        Ok(())
    }

    fn start(&mut self, index: usize) -> std::result::Result<(), Broken> {
        let device = Arc::clone(&self.device);
        let export = &device.export;
        // Of its own for each queue, so that their threads count references apart.
        let memory = Arc::new(self.memory.clone());
        let ring = self.open_ring(index, &memory)?;
        let vring = &mut self.vrings[index];
        let Some(kick) = vring.kick.as_ref().and_then(|kick| kick.try_clone().ok()) else {
            return Ok(());
        };
        let (disk, serial) = (Arc::clone(&export.disk), device.serial());
        let cache = Arc::clone(&self.cache);
        let broken = breaker(index, &self.stream, vring, disk.name().to_owned());
        let (errands, orders) = mpsc::unbounded();
        let home = export.home(index);
        self.registration.register(&self.memory, home, disk.name());
        let end = home.spawn(move || {
            let broken = Box::new(broken);
            queue::run(Setup { disk, serial, cache, ring, kick, broken }, orders)
        });
        vring.running = Some(Running { errands, end });
        Ok(())
    }

    /// The ring with all that belongs to it.
    fn open_ring(
        &mut self,
        index: usize,
        memory: &Arc<GuestMemory>,
    ) -> std::result::Result<RingSide, Broken> {
        let vring = &self.vrings[index];
        let addresses = vring.addresses.ok_or(Broken::Misplaced("ring", 0))?;
        let event_index = match self.features & config::EVENT_INDEX {
            0 => EventIndex::Absent,
            _ => EventIndex::Negotiated,
        };
        let place = addresses.in_guest(memory)?;
        let ring = Ring::new(memory, place, vring.size, vring.next_available, event_index)?;
        let (ring, book, again) = match self.book(index, ring.next_used()) {
            Some((book, recovery)) => {
                let next = recovery.next_available.unwrap_or(vring.next_available);
                let ring = Ring::new(memory, place, vring.size, next, event_index)?;
                (ring, Some(book), recovery.again)
            }
            None => (ring, None, Vec::new()),
        };
        let again = again.into_iter().filter(|&head| head < vring.size).collect();
        let mut side = RingSide::new(ring, Arc::clone(memory), book, again);
        side.set_log(self.active_log(), addresses.log);
        side.set_call(vring.call.as_ref().and_then(duplicate_call));
        Ok(side)
    }

    fn book(&self, index: usize, used: u16) -> Option<(Book, inflight::Recovery)> {
        let tracking = self.tracking.as_ref()?;
        let part = inflight::queue(&tracking.memory, index as u16, tracking.entries)?;
        Book::open(part, tracking.entries.max(self.vrings[index].size), used)
    }

    /// The log, if the front-end wants changes to be logged.
    fn active_log(&self) -> Option<DirtyLog> {
        self.log.clone().filter(|_| self.features & config::LOG_ALL != 0)
    }

    /// Has all running queues log as is wanted now.
    fn spread_log(&mut self) -> Result<()> {
        let log = self.active_log();
        for vring in &self.vrings {
            let used = vring.addresses.and_then(|addresses| addresses.log);
            vring.tell(Order::Log(log.clone(), used)).map_err(refused)?;
        }
        Ok(())
    }

    /// Has all running queues use the memory as it is now.
    fn spread_memory(&mut self) -> Result<()> {
        for index in 0..self.vrings.len() {
            self.move_ring(index)?;
        }
        self.register_memory();
        Ok(())
    }

    /// Registers memory that came with the rings of running queues. Only now, when no queue uses any more
    /// what it replaces: that need not be pinned at the same time.
    fn register_memory(&mut self) {
        let export = &self.device.export;
        for (index, _) in
            self.vrings.iter().enumerate().filter(|(_, vring)| vring.running.is_some())
        {
            self.registration.register(&self.memory, export.home(index), export.disk.name());
        }
    }

    fn move_ring(&mut self, index: usize) -> Result<()> {
        let vring = &self.vrings[index];
        let (Some(addresses), Some(_)) = (vring.addresses, &vring.running) else { return Ok(()) };
        let memory = Arc::new(self.memory.clone());
        let place = addresses.in_guest(&memory).map_err(refused)?;
        vring.tell(Order::Move(memory, place)).map_err(refused)?;
        vring.tell(Order::Log(self.active_log(), addresses.log)).map_err(refused)
    }

    pub(crate) fn take_features(&mut self, features: u64) -> Result<()> {
        let offered = config::features(&*self.device.export.disk);
        let unknown = features & !offered;
        if unknown != 0 {
            return Err(refused(format_args!("features that were not offered: {unknown:#x}")));
        }
        let was_negotiated = self.features & config::KNOWS_WRITE_CACHE;
        self.features = features;
        // Another driver, as opposed to one that goes on after its server was restarted.
        if was_negotiated != features & config::KNOWS_WRITE_CACHE && !self.is_cache_restored {
            self.cache.set(config::initial_cache(features));
            self.keep_cache();
        }
        self.cache.set_understood(match features & config::KNOWS_WRITE_CACHE {
            0 => Understood::No,
            _ => Understood::Yes,
        });
        self.spread_log()
    }

    pub(crate) fn replace_memory(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
    ) -> Result<()> {
        let mut memory = GuestMemory::new();
        for (region, file) in regions.iter().zip(files) {
            let shared = add_region(&mut memory, region, &file)?;
            self.registration.prepare(&shared);
        }
        self.memory = memory;
        self.spread_memory()
    }

    pub(crate) fn add_memory(&mut self, region: &VhostUserMemoryRegion, file: &File) -> Result<()> {
        if self.memory.regions().len() as u64 >= MOST_REGIONS {
            return Err(refused("too many regions of memory"));
        }
        let shared = add_region(&mut self.memory, region, file)?;
        self.registration.prepare(&shared);
        self.spread_memory()
    }

    pub(crate) fn remove_memory(&mut self, region: &VhostUserMemoryRegion) -> Result<()> {
        let VhostUserMemoryRegion { guest_phys_addr, user_addr, memory_size, .. } = *region;
        if !self.memory.remove(guest_phys_addr, user_addr, memory_size) {
            return Err(refused("there is no such region of memory"));
        }
        self.spread_memory()
    }

    pub(crate) fn set_addresses(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        mut addresses: UserAddresses,
    ) -> Result<()> {
        if !flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG) {
            addresses.log = None;
        }
        self.vring(index)?.addresses = Some(addresses);
        self.move_ring(index as usize)
    }

    pub(crate) fn set_kick(&mut self, index: u32, kick: Option<File>) -> Result<()> {
        let kick = kick.map(OwnedFd::from).filter(|kick| is_eventfd(kick));
        let kick = kick.ok_or_else(|| refused("a queue without an eventfd for kicks"))?;
        let vring = self.vring(index)?;
        if let Ok(copy) = kick.try_clone() {
            vring.tell(Order::Kick(copy)).map_err(refused)?;
        }
        vring.kick = Some(kick);
        self.start_if_complete(index)
    }

    pub(crate) fn set_call(&mut self, index: u32, call: Option<File>) -> Result<()> {
        let call = call.map(OwnedFd::from);
        if call.as_ref().is_some_and(|call| !is_eventfd(call)) {
            return Err(refused("a descriptor for calls that is no eventfd"));
        }
        let vring = self.vring(index)?;
        vring.tell(Order::Call(call.as_ref().and_then(duplicate_call))).map_err(refused)?;
        vring.call = call;
        Ok(())
    }

    /// New memory for in-flight tracking, for the front-end to keep.
    pub(crate) fn make_tracking(
        &self,
        wanted: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        check_tracking(wanted)?;
        let (queues, entries) = (wanted.num_queues, wanted.queue_size);
        let size = inflight::size(queues, entries) as u64;
        let file = inflight::new_file(size)
            .map_err(|error| refused(format_args!("no memory for in-flight tracking: {error}")))?;
        Ok((VhostUserInflight::new(size, 0, queues, entries), File::from(file)))
    }

    pub(crate) fn take_tracking(&mut self, given: &VhostUserInflight, file: &File) -> Result<()> {
        check_tracking(given)?;
        let (queues, entries) = (given.num_queues, given.queue_size);
        let memory = map(file, given.mmap_offset, given.mmap_size, "in-flight tracking")?;
        let memory = Arc::new(memory);
        let device = inflight::device(&memory, queues, entries);
        // The guest set it once, and does not again because the server was restarted.
        if let Some(cache) = device.as_ref().and_then(inflight::write_cache) {
            self.cache.set(cache);
            self.is_cache_restored = true;
        }
        self.tracking = Some(Tracking { memory, entries, device });
        self.keep_cache();
        Ok(())
    }

    /// Notes the state of the write cache for whoever takes over.
    pub(crate) fn keep_cache(&self) {
        if let Some(device) = self.tracking.as_ref().and_then(|tracking| tracking.device.as_ref()) {
            inflight::keep_write_cache(device, self.cache.reported());
        }
    }

    pub(crate) fn take_log(&mut self, file: &File, offset: u64, size: u64) -> Result<()> {
        let memory = Arc::new(map(file, offset, size, "the log")?);
        let length = memory.len();
        self.log = View::new(memory, 0, length).map(DirtyLog::new);
        self.spread_log()
    }

    /// Has everything written so far made durable.
    pub(crate) fn flush(&self) -> Result<()> {
        let disk = Arc::clone(&self.device.export.disk);
        let flushed = self.device.export.loops[0].spawn(move || async move { disk.flush().await });
        let outcome = flushed.wait().ok_or_else(|| refused("the server ends"))?;
        outcome.map_err(refused)
    }

    pub(crate) fn protocol_features() -> VhostUserProtocolFeatures {
        use VhostUserProtocolFeatures as Feature;
        Feature::MQ
            | Feature::LOG_SHMFD
            | Feature::REPLY_ACK
            | Feature::BACKEND_REQ
            | Feature::CONFIG
            | Feature::INFLIGHT_SHMFD
            | Feature::RESET_DEVICE
            | Feature::CONFIGURE_MEM_SLOTS
    }
}

/// What to do when the driver breaks queue `index`: say so, tell the front-end, and end the connection.
fn breaker(
    index: usize,
    stream: &UnixStream,
    vring: &Vring,
    disk: String,
) -> impl Fn(&Broken) + Send + use<> {
    let stream = stream.try_clone();
    let error = vring.error.as_ref().and_then(duplicate_call);
    move |why| {
        tracing::error!(disk, "front-end dropped: queue {index} is broken: {why}");
        error.iter().for_each(Call::signal);
        // It fails only for a connection that is over already.
        let _ = stream.as_ref().map(|stream| stream.shutdown(Shutdown::Both));
    }
}

fn duplicate_call(descriptor: &OwnedFd) -> Option<Call> {
    descriptor.try_clone().and_then(Call::new).ok()
}

fn check_tracking(wanted: &VhostUserInflight) -> Result<()> {
    let VhostUserInflight { num_queues, queue_size, .. } = *wanted;
    if num_queues > 1024 || queue_size > MOST_ENTRIES {
        let what = format!("in-flight tracking of {num_queues} queues of {queue_size} entries");
        return Err(refused(what));
    }
    Ok(())
}

/// Maps a region and takes it in.
fn add_region(
    memory: &mut GuestMemory,
    region: &VhostUserMemoryRegion,
    file: &File,
) -> Result<Arc<SharedMemory>> {
    let VhostUserMemoryRegion { guest_phys_addr, memory_size, user_addr, mmap_offset } = *region;
    let shared = Arc::new(map(file, mmap_offset, memory_size, "guest memory")?);
    let (guest, user) = (guest_phys_addr, user_addr);
    match memory.add(GuestRegion { guest, user, memory: Arc::clone(&shared) }) {
        true => Ok(shared),
        false => Err(refused("regions of memory that overlap")),
    }
}

fn map(file: &File, offset: u64, size: u64, what: &str) -> Result<SharedMemory> {
    let length = usize::try_from(size).map_err(refused)?;
    SharedMemory::map(file, offset, length).map_err(|error| {
        refused(format_args!("cannot map {what}, {size} bytes at {offset}: {error}"))
    })
}
