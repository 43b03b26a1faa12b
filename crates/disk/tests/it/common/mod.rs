//! A disk over a simulated storage, for tests that say what happens when.

pub mod crash_points;

use std::rc::Rc;
use std::time::Duration;

use blockhouse_core::{
    Alignment, Buffer, ByteRange, Durability, Fallback, IoVector, Request, Result, Storage,
    SyncMode, Unmap,
};
use blockhouse_disk::{Disk, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions};
use blockhouse_sim::{Config, Latency, Operation, Sim, SimDisk, Task};

/// How long a read or write takes on a [`steady`] disk, and a flush, in microseconds.
pub const DATA: u64 = 10;
pub const FLUSH: u64 = 100;

/// A disk, the storage below it and the simulation around it.
pub struct Rig {
    pub sim: Sim,
    pub storage: SimDisk,
    pub disk: Rc<Disk<SimDisk>>,
}

/// A storage whose operations always take the same time.
pub fn steady() -> Config {
    Config { latency: Latency::fixed(DATA, FLUSH), ..Config::default() }
}

/// The same with blocks of `block` bytes.
pub fn blocks_of(block: u32) -> Config {
    Config { alignment: Alignment { offset: block, memory: block.min(512) }, ..steady() }
}

impl Rig {
    /// A disk of `size` bytes of 0xee, whose first flush is done: it is never skipped, because of
    /// what another process may have written.
    pub fn new(config: Config, size: usize, options: Options) -> Self {
        let rig = Self::with_past(config, size, options);
        rig.submit(Request::Flush).expect("no failure");
        rig.log();
        rig
    }

    /// As [`new`](Self::new), where nothing was flushed yet.
    pub fn with_past(config: Config, size: usize, options: Options) -> Self {
        let sim = Sim::new(1);
        let storage = SimDisk::new(&sim, config, vec![0xee; size]);
        let disk = Rc::new(Disk::raw(storage.clone(), options).expect("a disk"));
        Self { sim, storage, disk }
    }

    /// A disk over a new qcow2 image on a storage of those properties.
    pub fn qcow2(config: Config, image: CreateOptions) -> Self {
        Self::qcow2_with_room(config, image, 0)
    }

    /// As [`qcow2`](Self::qcow2), in a file that is this many bytes longer than its tables.
    pub fn qcow2_with_room(config: Config, image: CreateOptions, room: u64) -> Self {
        Self::qcow2_in(Sim::new(1), config, image, room)
    }

    /// As [`qcow2`](Self::qcow2), where things happen as `seed` says.
    pub fn qcow2_by(seed: u64, config: Config, image: CreateOptions) -> Self {
        Self::qcow2_in(Sim::new(seed), config, image, 0)
    }

    fn qcow2_in(sim: Sim, config: Config, image: CreateOptions, room: u64) -> Self {
        let storage = SimDisk::new(&sim, config, Vec::new());
        let opened = storage.clone();
        let disk = sim.block_on(async move {
            qcow2::create(&opened, &image).await.expect("a new image");
            opened.resize(opened.size() + room).await.expect("no failure");
            opened.flush(SyncMode::Full).await.expect("no failure");
            Disk::open(opened, ImageFormat::Qcow2, Options::default()).await.expect("the new image")
        });
        storage.take_log();
        Self { sim, storage, disk: Rc::new(disk) }
    }

    /// Begins a request: it makes progress while anything else is waited for.
    pub fn start(&self, request: Request) -> Task<Result<()>> {
        let disk = Rc::clone(&self.disk);
        self.sim.spawn(async move { disk.submit(request).await })
    }

    /// Carries out a request.
    pub fn submit(&self, request: Request) -> Result<()> {
        let disk = Rc::clone(&self.disk);
        self.sim.block_on(async move { disk.submit(request).await })
    }

    /// The bytes of a range, as a guest reads them.
    pub fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut buffer = Buffer::new(length);
        let into = buffer.lend();
        self.submit(Request::Read { offset, into }).expect("a read");
        buffer.bytes().to_vec()
    }

    /// Lets virtual time pass.
    pub fn wait(&self, microseconds: u64) {
        let clock = self.sim.clock().clone();
        self.sim.block_on(async move { clock.sleep(Duration::from_micros(microseconds)).await });
    }

    /// Microseconds since the beginning.
    pub fn now(&self) -> u64 {
        self.sim.clock().now().as_micros() as u64
    }

    /// The storage operations since the last call.
    pub fn log(&self) -> Vec<Operation> {
        self.storage.take_log()
    }
}

/// `length` bytes from `offset` on.
pub fn span(offset: u64, length: u64) -> ByteRange {
    ByteRange::between(offset, offset + length)
}

/// Aligned memory of `length` bytes.
pub fn memory(length: usize, byte: u8) -> IoVector {
    let mut vector = Buffer::new(length).lend();
    vector.fill(byte);
    vector
}

/// A write of `length` times `byte`.
pub fn write(offset: u64, length: usize, byte: u8, durability: Durability) -> Request {
    Request::Write { offset, from: memory(length, byte), durability }
}

/// A zero write that may unmap and may be slow.
pub fn zeroes(offset: u64, length: u64, durability: Durability) -> Request {
    let range = span(offset, length);
    Request::WriteZeroes { range, unmap: Unmap::Allowed, fallback: Fallback::Allowed, durability }
}

/// A discard.
pub fn discard(offset: u64, length: u64) -> Request {
    Request::Discard { range: span(offset, length), durability: Durability::None }
}

/// Compares long arrays and says where they differ first, instead of printing both.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len());
    if let Some(at) = found.iter().zip(expected).position(|(one, other)| one != other) {
        panic!("byte {at} is {}, not {}", found[at], expected[at]);
    }
}
