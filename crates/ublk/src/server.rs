//! A device from its start to its end.
//!
//! Guarantees: a device that was made and is not started is removed again. A server that stops
//! answers every request that it has taken, and its block device is removed when the stop returns.
//! A server that is killed leaves the block device: requests, including those in flight, wait until
//! a server for the same image takes over the same number. If another process removes the device, a
//! callback is called once.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use blockhouse_core::{Storage, errno, rare};
use blockhouse_disk::{ClientGuard, Disk, ExportKind, takes_kernel_pages};
use blockhouse_engine::{Handle, Submission, UblkControl, UblkDevice, UblkInfo, ublk_flag};
use parking_lot::Mutex;

use crate::error::Error;
use crate::gate::Gate;
use crate::lifecycle::{self, Acquired, Origin, Wanted, note_of};
use crate::parameters::{Parameters, SECTOR};
use crate::queue::{self, DeviceQueue, Served};
use crate::unexpected_end::UnexpectedEnd;

/// Maximum bytes of a request. Each tag has as much memory, whose pages are allocated at first use.
const MAX_IO_BYTES: u32 = 512 << 10;

/// The options of a device.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// The number, N of `/dev/ublkbN`; `None` for the lowest free one. A device with this number
    /// that waits for a server of the same image is continued, with its existing queues.
    pub id: Option<u32>,
    /// The number of queues of a new device: at least one, and at most the number of processors.
    pub queues: u16,
    /// How many requests each queue may have in flight, from 1 to 4096.
    pub depth: u16,
    /// The identity of the image, different for each image.
    pub image: String,
}

/// Checks whether this process can make devices.
///
/// # Errors
/// The reason why it cannot: no driver, an old driver, or no rights.
pub fn check_driver() -> Result<(), Error> {
    lifecycle::check_driver(&mut UblkControl::open().map_err(Error::opening)?).map(drop)
}

/// A device whose queues wait for requests. A new device has no block device yet.
pub struct PreparedDevice<S: Storage> {
    owner: Owner,
    info: UblkInfo,
    disk: Arc<Disk<S>>,
    image: String,
    end: Arc<UnexpectedEnd>,
    /// Whether another process has handed the device over, and has counted it as a client.
    is_handed_over: bool,
}

/// A device that another process serves and hands over.
pub struct HandedOverDevice {
    control: UblkControl,
    options: DeviceOptions,
}

impl HandedOverDevice {
    /// Checks whether this process could take over device `id` of an image. Changes nothing.
    ///
    /// # Errors
    /// The reason why it cannot: no rights, no such device, a device of another image, or one that
    /// transfers data in a way that this program does not know.
    pub fn new(id: u32, image: String) -> Result<Self, Error> {
        let mut control = UblkControl::open().map_err(Error::opening)?;
        lifecycle::check_device(&mut control, id, note_of(&image))?;
        // The counts are not used: the device has its queues already.
        let options = DeviceOptions { id: Some(id), queues: 1, depth: 1, image };
        Ok(Self { control, options })
    }

    /// Takes the device over as soon as the other process has ended. Blocks until then: two seconds
    /// at most while that process exists, ten seconds at most while its I/O in flight completes.
    /// Waiting requests continue with [`PreparedDevice::start`]. The loops are as for
    /// [`PreparedDevice::new`].
    ///
    /// # Errors
    /// The reason why the device cannot be served. The device continues to wait for a server.
    pub fn take_over<S: Storage + Send + Sync>(
        self,
        disk: &Arc<Disk<S>>,
        loops: &[Handle],
    ) -> Result<PreparedDevice<S>, Error> {
        let device = PreparedDevice::acquire(self.control, self.options, disk, loops)?;
        Ok(PreparedDevice { is_handed_over: true, ..device })
    }
}

/// A device that this process has acquired. Dropping this removes the device, unless it was started
/// or taken over from a former server, because removal would fail its waiting requests. Those
/// requests continue to wait when the process ends.
struct Owner {
    control: UblkControl,
    acquired: Acquired,
    /// The character device, once it is open. Only this field and the running queues keep it open.
    device: Option<Arc<UblkDevice>>,
    queues: Vec<Queue>,
    is_started: bool,
}

impl Owner {
    /// Removes the device: stops it, waits for its queues, closes its file, and deletes it. Reason
    /// for the order: while the file is open, kernels without `DEL_DEV_ASYNC` do not complete the
    /// last command. If the stop is refused, the queues do not end: this returns without waiting,
    /// and the device stays until this process ends.
    fn remove(&mut self) -> Result<(), Error> {
        let id = self.acquired.id;
        match lifecycle::stop(&mut self.control, id) {
            // A missing device was removed by another process; its queues have ended.
            Err(error) if !error.is_missing() => return Err(error),
            _ => {}
        }
        for queue in std::mem::take(&mut self.queues) {
            // An error means that the loop has ended, so it has no commands in flight.
            let _ = queue.end.wait();
        }
        drop(self.device.take());
        lifecycle::remove(&mut self.control, id)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if !self.is_started && self.acquired.origin == Origin::Added {
            // An error is ignored: the failure before it is reported.
            let _ = self.remove();
        }
    }
}

fn own_process() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

impl<S: Storage + Send + Sync> PreparedDevice<S> {
    /// Makes the device for a disk, or takes over the one that waits for its server; blocks while
    /// the rest of a killed server ends, for ten seconds at most. Queue `i` is served by loop `i`
    /// modulo the number of loops. There is at least one loop, and each accepts commands
    /// ([`DeviceCommands::Allowed`]). The privileges that this thread has now are used to stop the
    /// device later.
    ///
    /// # Errors
    /// The reason why there is no device: no driver, no permission, or the device belongs to
    /// another server or image.
    ///
    /// [`DeviceCommands::Allowed`]: blockhouse_engine::DeviceCommands::Allowed
    pub fn new(
        options: DeviceOptions,
        disk: &Arc<Disk<S>>,
        loops: &[Handle],
    ) -> Result<Self, Error> {
        let control = UblkControl::open().map_err(Error::opening)?;
        Self::acquire(control, options, disk, loops)
    }

    fn acquire(
        mut control: UblkControl,
        options: DeviceOptions,
        disk: &Arc<Disk<S>>,
        loops: &[Handle],
    ) -> Result<Self, Error> {
        let wanted = Wanted {
            id: options.id,
            queues: options.queues,
            depth: options.depth,
            max_io_bytes: MAX_IO_BYTES,
            server: own_process(),
            note: note_of(&options.image),
            parameters: Parameters::of(disk, MAX_IO_BYTES),
            takes_pages: takes_kernel_pages(disk.image()),
        };
        let acquired = lifecycle::acquire(&mut control, &wanted)?;
        let (device, queues, is_started) = (None, Vec::new(), false);
        let mut owner = Owner { control, acquired, device, queues, is_started };
        let device = UblkDevice::open(&mut owner.control, acquired.id);
        let device = Arc::new(device.map_err(|error| why_not_open(&acquired, error))?);
        let info = *device.info();
        let end = Arc::<UnexpectedEnd>::default();
        let (queues, fetched) = spawn_queues(&device, disk, loops, &acquired.parameters, &end);
        (owner.device, owner.queues) = (Some(device), queues);
        wait_until_fetched(&acquired, &fetched)?;
        let (disk, image) = (Arc::clone(disk), options.image);
        Ok(Self { owner, info, disk, image, end, is_handed_over: false })
    }

    /// The number, N of `/dev/ublkbN`.
    pub fn id(&self) -> u32 {
        self.info.id
    }

    /// The maximum number of commands that the driver has in flight on each of `loops` loops.
    pub fn commands(&self, loops: usize) -> usize {
        let UblkInfo { queues, depth, .. } = self.info;
        usize::from(queues).div_ceil(loops) * usize::from(depth)
    }

    /// Serves the device. Blocks until the block device exists and the kernel has scanned it for
    /// partitions. `removed` is called on one of the loops if another process removes the device.
    ///
    /// # Errors
    /// The reason why the device is not served. A new device is removed again; a device that was
    /// taken over waits for a server again once this process has ended.
    pub fn start(self, removed: impl FnOnce() + Send + 'static) -> Result<Server<S>, Error> {
        let Self { mut owner, info, disk, image, end, is_handed_over } = self;
        end.call(removed);
        let started = lifecycle::start(&mut owner.control, &owner.acquired, own_process());
        // After a failure this process removes a new device, so the end of its queues is expected.
        started.inspect_err(|_| end.expect())?;
        owner.is_started = true;
        let Acquired { origin, parameters, .. } = owner.acquired;
        let gates = owner.queues.iter().map(|queue| Arc::clone(&queue.gate)).collect();
        let client = match is_handed_over {
            true => disk.stats().enter_client_again(ExportKind::Ublk),
            false => disk.stats().enter_client(ExportKind::Ublk),
        };
        let owner = Mutex::new(owner);
        let server = Server { disk, info, owner, gates, image, end, _client: client };
        if origin != Origin::Added && parameters.size != server.disk.size() {
            server.resized()?;
        }
        Ok(server)
    }
}

/// A queue that runs.
struct Queue {
    gate: Arc<Gate>,
    end: Submission<()>,
}

fn spawn_queues<S: Storage + Send + Sync>(
    device: &Arc<UblkDevice>,
    disk: &Arc<Disk<S>>,
    loops: &[Handle],
    parameters: &Parameters,
    unexpected: &Arc<UnexpectedEnd>,
) -> (Vec<Queue>, Receiver<io::Result<()>>) {
    let (sender, fetched) = channel();
    let durability = parameters.durability();
    let spawn = |(index, event_loop): (u16, &Handle)| {
        let device = Arc::clone(device);
        let gate = Arc::<Gate>::default();
        let served = Served { disk: Arc::clone(disk), durability, gate: Arc::clone(&gate) };
        let (fetched, unexpected) = (sender.clone(), Arc::clone(unexpected));
        let serve = move || async move {
            rare(queue::run(DeviceQueue::new(device, index), served, fetched)).await;
            unexpected.queue_has_ended();
        };
        Queue { gate, end: event_loop.spawn(serve) }
    };
    let queues = (0..device.info().queues).zip(loops.iter().cycle());
    (queues.map(spawn).collect(), fetched)
}

/// The error for a device whose file cannot be opened or mapped. The driver ties the descriptors of
/// a device to the first process that mapped them.
fn why_not_open(acquired: &Acquired, source: io::Error) -> Error {
    let Acquired { id, origin, .. } = *acquired;
    match source.raw_os_error() {
        Some(errno::EINVAL) if origin == Origin::RecoveredAgain => {
            Error::Lost { id, cause: source }
        }
        _ => Error::refused("open the character device of", id)(source),
    }
}

/// Waits until the driver has taken each tag of each queue. Before that, a start command would
/// block forever.
fn wait_until_fetched(
    acquired: &Acquired,
    fetched: &Receiver<io::Result<()>>,
) -> Result<(), Error> {
    let Acquired { id, origin, .. } = *acquired;
    // Each queue sends one result; a loop that has ended drops its sender without one.
    fetched.iter().collect::<io::Result<()>>().map_err(|source| match origin {
        Origin::RecoveredAgain => Error::Lost { id, cause: source },
        Origin::Added | Origin::Recovered => Error::Queue { id, cause: source },
    })
}

/// A device that is served.
pub struct Server<S: Storage> {
    disk: Arc<Disk<S>>,
    info: UblkInfo,
    owner: Mutex<Owner>,
    /// The gate of each queue.
    gates: Vec<Arc<Gate>>,
    image: String,
    end: Arc<UnexpectedEnd>,
    _client: ClientGuard,
}

impl<S: Storage> Server<S> {
    /// The number, N of `/dev/ublkbN`.
    pub fn id(&self) -> u32 {
        self.info.id
    }

    /// The identity of the image, for [`HandedOverDevice::new`].
    pub fn image(&self) -> &str {
        &self.image
    }

    /// Stops executing requests, and waits for those in flight. Other requests wait until
    /// [`resume`](Self::resume), or for the process that takes the device over. Must run on a loop.
    pub async fn pause(&self) {
        for gate in &self.gates {
            gate.shut().await;
        }
    }

    /// Continues after [`pause`](Self::pause), also after one whose future was dropped.
    pub fn resume(&self) {
        self.gates.iter().for_each(|gate| gate.open());
    }

    /// Sets the size of the block device to the disk's new size.
    ///
    /// # Errors
    /// The kernel cannot change the size.
    pub fn resized(&self) -> Result<(), Error> {
        let id = self.id();
        if self.info.flags & ublk_flag::UPDATE_SIZE == 0 {
            return Err(Error::FixedSize { id });
        }
        let sectors = self.disk.size() / SECTOR;
        lifecycle::update_size(&mut self.owner.lock().control, id, sectors)
    }

    /// Removes the block device after the requests in flight have completed. The loops must still
    /// run. Writes that are still in caches above the block device fail, so no file system should
    /// be mounted from it. If the driver refuses the stop, no request is carried out from then on,
    /// and the device waits for its next server once this process has ended.
    pub fn stop(self) {
        let Self { disk, info: _, owner, gates, image: _, end, _client: _ } = self;
        end.expect();
        if let Err(error) = owner.into_inner().remove() {
            tracing::error!(disk = disk.name(), "{error}");
            gates.iter().for_each(|gate| gate.close());
        }
    }
}

impl<S: Storage> fmt::Debug for Server<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/dev/ublkb{}", self.id())
    }
}
