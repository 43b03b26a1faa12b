//! Disks of random kinds.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Alignment, Buffer, Durability, Fua, Request, Result, WriteCache};
use blockhouse_disk::{Disk, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions};
use blockhouse_jobs::{ClockSleep, JobClock};
use blockhouse_sim::{Config, Rng, Sim, SimDisk};

/// The clock of a simulation.
pub struct SimClock(pub Sim);

impl JobClock for SimClock {
    fn now(&self) -> Duration {
        self.0.clock().now()
    }

    fn sleep(&self, time: Duration) -> ClockSleep {
        let sim = self.0.clone();
        Box::pin(async move { sim.sleep(time).await })
    }
}

/// As one of those for a job.
pub fn clock(sim: &Sim) -> Rc<dyn JobClock> {
    Rc::new(SimClock(sim.clone()))
}

/// A disk, and the storage below it.
pub struct Scene {
    pub storage: SimDisk,
    pub disk: Arc<Disk<SimDisk>>,
    pub format: ImageFormat,
}

/// A disk of any kind with these bytes.
pub async fn disk(sim: &Sim, random: &mut Rng, content: &[u8]) -> Result<Scene> {
    // A disk that needs no flush has no mirror that needs one.
    let config = Config { write_cache: WriteCache::Volatile, ..Config::random(random) };
    let options = Options::default();
    if random.bool() {
        let storage = SimDisk::new(sim, config, content.to_vec());
        let disk = Arc::new(Disk::raw(storage.clone(), options)?);
        return Ok(Scene { storage, disk, format: ImageFormat::Raw });
    }
    let block = u64::from(config.alignment.offset).max(512);
    let image = CreateOptions {
        cluster_size: [block, 4096, 65536][random.usize(..3)],
        ..CreateOptions::new(content.len() as u64)
    };
    let storage = SimDisk::new(sim, config, Vec::new());
    qcow2::create(&storage, &image).await?;
    let disk = Disk::open(storage.clone(), ImageFormat::Qcow2, options).await?;
    if content.iter().any(|byte| *byte != 0) {
        let mut buffer = Buffer::new(content.len());
        buffer.bytes_mut().copy_from_slice(content);
        let (from, durability) = (buffer.lend(), Durability::Data);
        disk.submit(Request::Write { offset: 0, from, durability }).await?;
    }
    disk.flush().await?;
    Ok(Scene { storage, disk: Arc::new(disk), format: ImageFormat::Qcow2 })
}

/// What a disk of this format reads that was left in these bytes.
pub fn recover(bytes: Vec<u8>, format: ImageFormat) -> std::result::Result<Vec<u8>, String> {
    let sim = Sim::new(0);
    let config = Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() };
    let storage = SimDisk::new(&sim, config, bytes);
    let read = sim.block_on(async move {
        let disk = Disk::open(storage, format, Options::default()).await?;
        crate::guests::read(&disk).await
    });
    read.map_err(|error| error.to_string())
}
