//! A server in this process and a driver for it.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blockhouse_disk::{Access, Disk, ImageDisk, Options as DiskOptions};
use blockhouse_engine::{
    EngineChoice, EventLoop, FaultDomain, Handle, HostFile, OpenMode, PageCache, SharedMemory,
};
use blockhouse_storage::ImageStorage;
use blockhouse_vhost_user::driver::{DescriptorSpec, DriverQueue, GUEST, Options, TestDriver};
use blockhouse_vhost_user::ring::WRITE;
use blockhouse_vhost_user::{Device, Export, PreparedFrontend, RegisteredMemory, Server};
use rustix::fs::MemfdFlags;
use tempfile::TempDir;
use vhost::vhost_user::VhostUserFrontendReqHandler;
use vhost::{VhostBackend, VhostUserDirtyLogRegion};

/// Longer than anything takes on a busy machine.
pub const LONG: Duration = Duration::from_secs(20);

/// Bytes of a test's disk.
pub const SIZE: u64 = 16 << 20;

/// Types of requests (virtio 1.2, section 5.2.6).
pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

/// Outcomes.
pub const OK: u8 = 0;
pub const FAILED: u8 = 1;
pub const UNSUPPORTED: u8 = 2;
/// Stored in a status byte beforehand: not written by the device.
pub const UNTOUCHED: u8 = 0xee;

/// Runs loops on threads until it is dropped.
pub struct Loops {
    pub handles: Vec<Handle>,
    stops: Vec<futures_channel::oneshot::Sender<()>>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Loops {
    pub fn start(count: usize) -> Self {
        let mut loops = Self { handles: Vec::new(), stops: Vec::new(), threads: Vec::new() };
        for _ in 0..count {
            let (give, made) = std::sync::mpsc::channel();
            let (stop, stopped) = futures_channel::oneshot::channel::<()>();
            loops.threads.push(std::thread::spawn(move || {
                let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
                give.send(event_loop.handle()).unwrap();
                let _ = event_loop.block_on(stopped);
            }));
            loops.handles.push(made.recv().unwrap());
            loops.stops.push(stop);
        }
        loops
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        for stop in self.stops.drain(..) {
            stop.send(()).unwrap();
        }
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// A served disk.
pub struct Served {
    server: Option<Server<ImageStorage>>,
    pub disk: Arc<ImageDisk>,
    pub socket: PathBuf,
    pub image: PathBuf,
    loops: Option<Loops>,
    queues: u16,
    memory: RegisteredMemory,
    _folder: TempDir,
}

impl Served {
    pub fn start(queues: u16, workers: usize) -> Self {
        Self::with(queues, workers, DiskOptions::default(), &std::env::temp_dir())
    }

    pub fn with(
        queues: u16,
        workers: usize,
        options: DiskOptions,
        folder: &std::path::Path,
    ) -> Self {
        Self::on(queues, workers, options, folder, RegisteredMemory::Off)
    }

    /// With guests' memory registered, and an image that the ring serves: not on tmpfs.
    pub fn registered(queues: u16, workers: usize) -> Self {
        let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
        Self::on(queues, workers, DiskOptions::default(), folder, RegisteredMemory::On)
    }

    fn on(
        queues: u16,
        workers: usize,
        options: DiskOptions,
        folder: &std::path::Path,
        memory: RegisteredMemory,
    ) -> Self {
        let folder = tempfile::Builder::new().tempdir_in(folder).unwrap();
        let image = folder.path().join("disk.img");
        std::fs::File::create(&image).unwrap().set_len(SIZE).unwrap();
        let file = HostFile::open(&image, OpenMode::ReadWrite, PageCache::Used).unwrap();
        let disk = Arc::new(Disk::raw(file.into(), options).unwrap());
        let loops = Loops::start(workers);
        let socket = folder.path().join("vu.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let loops = Some(loops);
        let mut served =
            Self { server: None, disk, socket, image, loops, queues, memory, _folder: folder };
        let device = Device::new(served.export());
        served.server = Some(Server::start(device, OwnedFd::from(listener)).unwrap());
        served
    }

    pub fn connect(&self, options: Options) -> Guest {
        Guest::new(TestDriver::connect(&self.socket, options).unwrap())
    }

    /// Keeps the first loop from running anything until the answer is dropped.
    pub fn block_loop(&self) -> std::sync::mpsc::Sender<()> {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (give, begun) = std::sync::mpsc::channel();
        let handle = &self.loops.as_ref().unwrap().handles[0];
        drop(handle.spawn(move || async move {
            give.send(()).unwrap();
            let _ = released.recv();
        }));
        begun.recv().unwrap();
        release
    }

    pub fn device(&self) -> &Device<ImageStorage> {
        self.server().device()
    }

    pub fn server(&self) -> &Server<ImageStorage> {
        self.server.as_ref().unwrap()
    }

    fn export(&self) -> Export<ImageStorage> {
        Export {
            disk: Arc::clone(&self.disk),
            name: "a disk for tests with a long name".into(),
            queues: self.queues,
            loops: self.loops.as_ref().unwrap().handles.clone(),
            memory: self.memory,
            access: Access::ReadWrite,
        }
    }

    /// Has another server go on with the device. The old one stays as it has paused, as in a
    /// process that is over.
    pub fn hand_over(&mut self) {
        let server = self.server.take().unwrap();
        let paused = server.pause(std::time::Instant::now() + LONG).wait().unwrap();
        let prepare = |paused| PreparedFrontend::new(paused, self.queues, self.memory).unwrap();
        let prepared = paused.map(prepare);
        let socket = server.listener().try_clone_to_owned().unwrap();
        let device = Device::new(self.export());
        self.server = Some(Server::restore(device, socket, prepared).unwrap());
        std::mem::forget(server);
    }

    /// Ends the server in an orderly way.
    pub fn stop(&mut self) {
        self.server.take().unwrap().stop();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop();
        }
        drop(self.loops.take());
    }
}

/// A guest that does one request at a time, or puts together what it likes.
pub struct Guest {
    pub driver: TestDriver,
}

/// Where in the memory for requests the parts of a request are.
const HEADER: usize = 0;
const STATUS: usize = 16;
pub const DATA: usize = 4096;

/// A file of `size` bytes and a mapping of it.
pub fn memory(size: usize) -> (OwnedFd, SharedMemory) {
    let file = rustix::fs::memfd_create("more", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, size as u64).unwrap();
    let memory = SharedMemory::map(&file, 0, size, &FaultDomain::unconnected()).unwrap();
    (file, memory)
}

impl Guest {
    pub fn new(driver: TestDriver) -> Self {
        Self { driver }
    }

    /// Has the device log the pages that it changes: a bit for each.
    pub fn log_changes(&mut self) -> SharedMemory {
        let pages = (GUEST as usize + self.driver.memory.len()) / 4096;
        let (file, log) = memory(pages / 8 + 1);
        let region = VhostUserDirtyLogRegion {
            mmap_size: log.len() as u64,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        self.driver.frontend().set_log_base(0, Some(region)).unwrap();
        log
    }

    pub fn base(&self) -> usize {
        self.driver.requests()
    }

    pub fn queue(&mut self, index: usize) -> &mut DriverQueue {
        &mut self.driver.queues[index]
    }

    /// Writes a header and returns its buffer.
    pub fn header(&self, kind: u32, sector: u64) -> DescriptorSpec {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.memory.write(self.base() + HEADER, &bytes);
        DescriptorSpec::at(self.base() + HEADER, 16, 0)
    }

    /// An untouched status byte and its buffer.
    pub fn status(&self) -> DescriptorSpec {
        self.driver.memory.write(self.base() + STATUS, &[UNTOUCHED]);
        DescriptorSpec::at(self.base() + STATUS, 1, WRITE)
    }

    pub fn status_byte(&self) -> u8 {
        let mut byte = [0];
        self.driver.memory.read(self.base() + STATUS, &mut byte);
        byte[0]
    }

    /// A buffer of data, `offset` bytes into its memory.
    pub fn data(&self, offset: usize, length: u32, flags: u16) -> DescriptorSpec {
        DescriptorSpec::at(self.base() + DATA + offset, length, flags)
    }

    pub fn put(&self, bytes: &[u8]) {
        self.driver.memory.write(self.base() + DATA, bytes);
    }

    pub fn get(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.driver.memory.read(self.base() + DATA, &mut bytes);
        bytes
    }

    /// Offers a chain and waits for its end. `None` when there was no answer.
    pub fn submit(
        &mut self,
        queue: usize,
        chain: &[DescriptorSpec],
        limit: Duration,
    ) -> Option<u8> {
        let queue = self.queue(queue);
        queue.chain(0, chain);
        queue.add_available(0);
        queue.publish();
        let (head, _) = queue.wait_used(limit)?;
        assert_eq!(head, 0, "the chain that was offered");
        Some(self.status_byte())
    }

    /// A request with a header, data and a status.
    pub fn request(&mut self, queue: usize, kind: u32, sector: u64, data: &[DescriptorSpec]) -> u8 {
        let mut chain = vec![self.header(kind, sector)];
        chain.extend_from_slice(data);
        chain.push(self.status());
        self.submit(queue, &chain, LONG).expect("an answer")
    }

    pub fn write(&mut self, queue: usize, sector: u64, bytes: &[u8]) -> u8 {
        self.put(bytes);
        let data = self.data(0, bytes.len() as u32, 0);
        self.request(queue, OUT, sector, &[data])
    }

    pub fn read(&mut self, queue: usize, sector: u64, length: usize) -> Result<Vec<u8>, u8> {
        self.put(&vec![0x55; length]);
        let data = self.data(0, length as u32, WRITE);
        match self.request(queue, IN, sector, &[data]) {
            OK => Ok(self.get(length)),
            status => Err(status),
        }
    }

    /// A discard or zero write of ranges of sector, count, flags.
    pub fn ranges(&mut self, queue: usize, kind: u32, ranges: &[(u64, u32, u32)]) -> u8 {
        let mut bytes = Vec::new();
        for (sector, count, flags) in ranges {
            bytes.extend_from_slice(&sector.to_le_bytes());
            bytes.extend_from_slice(&count.to_le_bytes());
            bytes.extend_from_slice(&flags.to_le_bytes());
        }
        self.put(&bytes);
        let data = self.data(0, bytes.len() as u32, 0);
        self.request(queue, kind, 0, &[data])
    }
}

/// `VHOST_USER_NEED_REPLY_MASK`.
pub const NEED_REPLY: u32 = 8;

/// Bytes of a message without descriptors.
pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [request, 1 | flags, payload.len() as u32].map(u32::to_ne_bytes).concat();
    bytes.extend_from_slice(payload);
    bytes
}

/// Sends a message by hand, and reads its reply.
pub fn exchange(mut stream: &UnixStream, request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    stream.write_all(&message(request, flags, payload)).unwrap();
    reply(stream, request)
}

/// Reads the reply to a request.
pub fn reply(mut stream: &UnixStream, request: u32) -> Vec<u8> {
    let mut header = [0; 12];
    stream.read_exact(&mut header).unwrap();
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    assert_eq!((word(0), word(4)), (request, 5));
    let mut payload = vec![0; word(8) as usize];
    stream.read_exact(&mut payload).unwrap();
    payload
}

/// A front-end that counts the messages about a new configuration.
#[derive(Default)]
pub struct Listener(pub AtomicUsize);

impl VhostUserFrontendReqHandler for Listener {
    fn handle_config_change(&self) -> Result<u64, std::io::Error> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(0)
    }
}
