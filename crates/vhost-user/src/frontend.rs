//! One front-end's connection: its messages change rings and memory.
//!
//! All of it runs on the device's own thread, which may wait. What concerns a running queue is an
//! order to its loop, and the answer is awaited before the front-end gets its own, so that a reply
//! means that the change is in force.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhouse_core::{Storage, WriteCache};
use blockhouse_engine::{FaultDomain, GuestMemory, GuestRegion, SharedMemory, View, is_eventfd};
use futures_channel::mpsc;

use crate::call::Call;
use crate::config;
use crate::device::{Cache, Device, Understood};
use crate::dirty_log::DirtyLog;
use crate::inflight::{self, Book};
use crate::limits::RequestLimits;
use crate::listener::Listener;
use crate::lost_memory;
use crate::queue::{self, Kick, Manner, Order, RingSide, Setup};
use crate::registration::Registration;
use crate::ring::{Broken, EventIndex, MAX_ENTRIES, Ring};
use crate::vring::{Running, UserAddresses, Vring};

/// Result of handling a message.
pub type Result<T, E = Refusal> = std::result::Result<T, E>;

/// The most regions of memory that a front-end may share; QEMU's limit for hot-plugged memory.
pub const MAX_REGIONS: u64 = 509;

/// A region's address and size are multiples of it: the smallest page of any guest's.
const REGION_ALIGNMENT: u64 = 4096;

/// What a front-end has said so far.
pub struct Frontend<S: Storage> {
    device: Arc<Device<S>>,
    stream: UnixStream,
    features: u64,
    /// Of all memory that the front-end shares.
    domain: Arc<FaultDomain>,
    memory: GuestMemory,
    registration: Registration,
    pub(crate) vrings: Vec<Vring>,
    tracking: Option<Tracking>,
    log: Option<DirtyLog>,
    log_call: Option<OwnedFd>,
    protocol_features: u64,
    has_refused: bool,
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

/// Why a message is refused, for the log.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

/// A refusal with this reason.
pub fn refused(why: impl std::fmt::Display) -> Refusal {
    Refusal(why.to_string())
}

/// A part of a front-end's memory, as messages name it.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// The guest's address of the first byte.
    pub guest: u64,
    /// Bytes.
    pub size: u64,
    /// The front-end's own address of the first byte.
    pub user: u64,
    /// Where in the file it is.
    pub offset: u64,
}

/// Memory for in-flight tracking, as messages name it.
#[derive(Clone, Copy, Debug)]
pub struct Tracked {
    /// Bytes.
    pub size: u64,
    /// Where in the file it is.
    pub offset: u64,
    /// Queues, and entries of each.
    pub queues: u16,
    /// See `queues`.
    pub entries: u16,
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
            domain: FaultDomain::of_connection(stream.try_clone()?),
            memory: GuestMemory::new(),
            registration,
            vrings,
            tracking: None,
            log: None,
            log_call: None,
            protocol_features: 0,
            has_refused: false,
            cache,
            is_cache_restored: false,
        })
    }

    /// The device.
    pub fn device(&self) -> &Device<S> {
        &self.device
    }

    /// What memory of the front-end has vanished, if any has: a line for the log. The connection is over
    /// then.
    pub fn lost_memory(&self) -> Option<String> {
        let tracking = self.tracking.as_ref().map(|tracking| &*tracking.memory);
        self.domain.fault().map(|fault| lost_memory::describe(fault, &self.memory, tracking))
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
        (self.features, self.is_cache_restored) = (0, false);
        (self.log, self.log_call) = (None, None);
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
            self.start(index as usize)?;
        }
        Ok(())
    }

    fn start(&mut self, index: usize) -> Result<()> {
        let device = Arc::clone(&self.device);
        let export = &device.export;
        // Of its own for each queue, so that their threads count references apart.
        let memory = Arc::new(self.memory.clone());
        // What may fail for lack of descriptors comes before the ring is taken over.
        let call = duplicate_call(self.vrings[index].call.as_ref())?;
        let Some(kick) = self.vrings[index].kick.as_ref() else { return Ok(()) };
        let kick = kick.try_clone().map_err(refused)?;
        let mut ring = self.open_ring(index, &memory).map_err(refused)?;
        ring.set_call(call);
        let vring = &mut self.vrings[index];
        let (disk, serial) = (Arc::clone(&export.disk), device.serial());
        let cache = Arc::clone(&self.cache);
        let limits = RequestLimits::of(self.features);
        let broken = breaker(index, &self.stream, vring, disk.name().to_owned());
        let (errands, orders) = mpsc::unbounded();
        let home = export.home(index);
        self.registration.register(&self.memory, home, disk.name());
        let end = home.spawn(move || {
            let broken = Box::new(broken);
            queue::run(Setup { disk, serial, cache, ring, kick, limits, broken }, orders)
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
        let (memory, domain) = (Arc::clone(memory), Arc::clone(&self.domain));
        let mut side = RingSide::new(ring, memory, domain, book, again);
        let (log, log_call) = (self.active_log(), self.log_call.as_ref());
        side.set_log(log, addresses.log, duplicate_call(log_call).ok().flatten());
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

    /// The order to log as is wanted now.
    fn logging(&self, used: Option<u64>) -> Order {
        let call = duplicate_call(self.log_call.as_ref()).ok().flatten();
        Order::Log(self.active_log(), used, call)
    }

    /// Has all running queues log as is wanted now.
    fn spread_log(&mut self) -> Result<()> {
        // Each order has a call of its own, which only a running queue needs.
        for vring in self.vrings.iter().filter(|vring| vring.running.is_some()) {
            let used = vring.addresses.and_then(|addresses| addresses.log);
            vring.tell(self.logging(used)).map_err(refused)?;
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
        vring.tell(self.logging(addresses.log)).map_err(refused)
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

    /// The protocol's features that the front-end took.
    pub(crate) fn protocol_features(&self) -> u64 {
        self.protocol_features
    }

    pub(crate) fn set_protocol_features(&mut self, features: u64) {
        self.protocol_features = features;
    }

    /// Says in the log that a message was refused, once: a guest can have many refused.
    pub(crate) fn note_refusal(&mut self, why: &str) {
        let disk = self.device.export.disk.name();
        match std::mem::replace(&mut self.has_refused, true) {
            false => tracing::warn!(disk, "a front-end's {why}"),
            true => tracing::debug!(disk, "a front-end's {why}"),
        }
    }

    pub(crate) fn replace_memory(&mut self, regions: &[Region], files: &[OwnedFd]) -> Result<()> {
        let mut memory = GuestMemory::new();
        let mut added = Vec::with_capacity(regions.len());
        for (region, file) in regions.iter().zip(files) {
            added.push(add_region(&mut memory, region, file, &self.domain)?);
        }
        self.check_rings(&memory)?;
        added.iter().for_each(|shared| self.registration.prepare(shared));
        self.memory = memory;
        self.spread_memory()
    }

    pub(crate) fn add_memory(&mut self, region: &Region, file: &OwnedFd) -> Result<()> {
        if self.memory.regions().len() as u64 >= MAX_REGIONS {
            return Err(refused("too many regions of memory"));
        }
        let shared = add_region(&mut self.memory, region, file, &self.domain)?;
        self.registration.prepare(&shared);
        self.spread_memory()
    }

    pub(crate) fn remove_memory(&mut self, region: &Region) -> Result<()> {
        let mut memory = self.memory.clone();
        if !memory.remove(region.guest, region.user, region.size) {
            return Err(refused("there is no such region of memory"));
        }
        self.check_rings(&memory)?;
        self.memory = memory;
        self.spread_memory()
    }

    /// Whether all running queues have their rings in this memory.
    fn check_rings(&self, memory: &GuestMemory) -> Result<()> {
        for vring in self.vrings.iter().filter(|vring| vring.running.is_some()) {
            if let Some(addresses) = vring.addresses {
                let place = addresses.in_guest(memory).map_err(refused)?;
                Ring::check(memory, place, vring.size).map_err(refused)?;
            }
        }
        Ok(())
    }

    pub(crate) fn set_size(&mut self, index: u32, count: u32) -> Result<()> {
        let vring = self.vring(index)?;
        if vring.running.is_some() {
            return Err(refused("another size for a queue that runs"));
        }
        // Whether it makes sense is checked when the queue starts.
        vring.size = u16::try_from(count).map_err(refused)?;
        Ok(())
    }

    pub(crate) fn set_base(&mut self, index: u32, base: u32) -> Result<()> {
        let vring = self.vring(index)?;
        if vring.running.is_some() {
            return Err(refused("another base for a queue that runs"));
        }
        vring.next_available = u16::try_from(base).map_err(refused)?;
        Ok(())
    }

    pub(crate) fn set_addresses(&mut self, index: u32, addresses: UserAddresses) -> Result<()> {
        let memory = self.memory.clone();
        let vring = self.vring(index)?;
        if vring.running.is_some() {
            let place = addresses.in_guest(&memory).map_err(refused)?;
            Ring::check(&memory, place, vring.size).map_err(refused)?;
        }
        vring.addresses = Some(addresses);
        self.move_ring(index as usize)
    }

    pub(crate) fn enable(&mut self, index: u32) -> Result<()> {
        self.vring(index)?.enabled = true;
        self.start_if_complete(index)
    }

    pub(crate) fn set_kick(&mut self, index: u32, kick: Kick) -> Result<()> {
        if let Kick::Event(event) = &kick {
            check_eventfd(Some(event), "kicks")?;
        }
        let vring = self.vring(index)?;
        let copy = kick.try_clone().map_err(refused)?;
        vring.tell(Order::Kick(copy)).map_err(refused)?;
        vring.kick = Some(kick);
        self.start_if_complete(index)
    }

    pub(crate) fn set_call(&mut self, index: u32, call: Option<OwnedFd>) -> Result<()> {
        check_eventfd(call.as_ref(), "calls")?;
        let vring = self.vring(index)?;
        if vring.running.is_some() {
            let order = Order::Call(duplicate_call(call.as_ref())?);
            vring.tell(order).map_err(refused)?;
        }
        vring.call = call;
        Ok(())
    }

    pub(crate) fn set_error(&mut self, index: u32, error: Option<OwnedFd>) -> Result<()> {
        check_eventfd(error.as_ref(), "errors")?;
        self.vring(index)?.error = error;
        Ok(())
    }

    /// How the front-end is told that the log has changed.
    pub(crate) fn set_log_call(&mut self, call: OwnedFd) -> Result<()> {
        check_eventfd(Some(&call), "the log's changes")?;
        self.log_call = Some(call);
        self.spread_log()
    }

    /// A socket for messages of ours.
    pub(crate) fn set_listener(&mut self, socket: OwnedFd) -> Result<()> {
        *self.device.listener.lock() = Some(Listener::new(socket).map_err(refused)?);
        Ok(())
    }

    /// The driver turns the write cache on or off.
    pub(crate) fn change_cache(&mut self, cache: WriteCache) -> Result<()> {
        let before = self.cache.reported();
        self.cache.set(cache);
        // From now on the driver takes all its writes for durable, also those of before.
        if (before, self.cache.reported()) == (WriteCache::Volatile, WriteCache::None)
            && let Err(error) = self.flush()
        {
            self.cache.set(before);
            return Err(error);
        }
        self.keep_cache();
        Ok(())
    }

    /// New memory for in-flight tracking, for the front-end to keep.
    pub(crate) fn make_tracking(&self, wanted: &Tracked) -> Result<(Tracked, OwnedFd)> {
        check_tracking(wanted)?;
        let Tracked { queues, entries, .. } = *wanted;
        let size = inflight::size(queues, entries) as u64;
        let file = inflight::new_file(size)
            .map_err(|error| refused(format_args!("no memory for in-flight tracking: {error}")))?;
        Ok((Tracked { size, offset: 0, queues, entries }, file))
    }

    pub(crate) fn take_tracking(&mut self, given: &Tracked, file: &OwnedFd) -> Result<()> {
        check_tracking(given)?;
        let Tracked { queues, entries, .. } = *given;
        let memory = map(file, given.offset, given.size, "in-flight tracking", &self.domain)?;
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

    pub(crate) fn take_log(&mut self, file: &OwnedFd, offset: u64, size: u64) -> Result<()> {
        let memory = Arc::new(map(file, offset, size, "the log", &self.domain)?);
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
}

/// What to do when the driver breaks queue `index`: say so, tell the front-end, and end the connection.
fn breaker(
    index: usize,
    stream: &UnixStream,
    vring: &Vring,
    disk: String,
) -> impl Fn(&Broken) + Send + use<> {
    let stream = stream.try_clone();
    let error = duplicate_call(vring.error.as_ref()).ok().flatten();
    move |why| {
        // The device's thread tells of lost memory, once for all queues.
        if !matches!(why, Broken::MemoryLost) {
            tracing::error!(disk, "front-end dropped: queue {index} is broken: {why}");
        }
        error.iter().for_each(Call::signal);
        // It fails only for a connection that is over already.
        let _ = stream.as_ref().map(|stream| stream.shutdown(Shutdown::Both));
    }
}

/// Refuses what cannot be signalled or watched, and makes nothing: what is sent costs the front-end little.
fn check_eventfd(descriptor: Option<&OwnedFd>, purpose: &str) -> Result<()> {
    match descriptor.is_none_or(is_eventfd) {
        true => Ok(()),
        false => Err(refused(format_args!("a descriptor for {purpose} that is no eventfd"))),
    }
}

fn duplicate_call(descriptor: Option<&OwnedFd>) -> Result<Option<Call>> {
    let duplicate = |descriptor: &OwnedFd| descriptor.try_clone().and_then(Call::new);
    descriptor.map(duplicate).transpose().map_err(refused)
}

fn check_tracking(wanted: &Tracked) -> Result<()> {
    let Tracked { queues, entries, .. } = *wanted;
    if !(1..=1024).contains(&queues) || !(1..=MAX_ENTRIES).contains(&entries) {
        return Err(refused(format_args!("{queues} queues of {entries} entries")));
    }
    Ok(())
}

/// Maps a region and takes it in.
fn add_region(
    memory: &mut GuestMemory,
    region: &Region,
    file: &OwnedFd,
    domain: &Arc<FaultDomain>,
) -> Result<Arc<SharedMemory>> {
    let Region { guest, size, user, offset } = *region;
    // Many tiny regions would cut a guest's buffers into as many pieces.
    if (guest | size) & (REGION_ALIGNMENT - 1) != 0 {
        return Err(refused(format_args!(
            "a region of memory that is not of whole pages: {size} bytes at {guest:#x}"
        )));
    }
    let shared = Arc::new(map(file, offset, size, "guest memory", domain)?);
    match memory.add(GuestRegion { guest, user, memory: Arc::clone(&shared) }) {
        true => Ok(shared),
        false => Err(refused("regions of memory that overlap")),
    }
}

fn map(
    file: &OwnedFd,
    offset: u64,
    size: u64,
    what: &str,
    domain: &Arc<FaultDomain>,
) -> Result<SharedMemory> {
    let length = usize::try_from(size).map_err(refused)?;
    SharedMemory::map(file, offset, length, domain).map_err(|error| {
        refused(format_args!("cannot map {what}, {size} bytes at {offset}: {error}"))
    })
}
