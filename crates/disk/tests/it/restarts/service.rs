//! A server of one image, started again and again in the simulation.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{Durability, Error, ErrorKind, Request, Result, StateMemory};
use blockhouse_disk::{CompressResult, Disk, ImageFormat, Replay};
use blockhouse_format::qcow2::{self, Qcow2};
use blockhouse_sim::{
    Host, ImageState, Report, Rng, Service, Sim, SimDisk, SimMemory, SystemUnderTest,
    explore_restarts,
};

use super::layout::{BackingImages, Layout, plain_config, read_all};
use super::space;

/// Whether the server has memory that outlives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Kept,
    Off,
}

/// The layer between the server and its host: none, or one that is wrong on purpose.
pub trait Hardware: Clone + 'static {
    type Memory: StateMemory + 'static;

    fn memory(&self, memory: Arc<SimMemory>) -> Arc<Self::Memory>;

    fn storage(&self, disk: SimDisk, memory: &Arc<Self::Memory>) -> SimDisk;
}

/// The host as it is.
#[derive(Clone, Copy)]
pub struct Sound;

impl Hardware for Sound {
    type Memory = SimMemory;

    fn memory(&self, memory: Arc<SimMemory>) -> Arc<SimMemory> {
        memory
    }

    fn storage(&self, disk: SimDisk, _: &Arc<SimMemory>) -> SimDisk {
        disk
    }
}

/// A server that is not running.
pub struct Server<H> {
    layout: Layout,
    backing: BackingImages,
    state: State,
    hardware: H,
    records: usize,
    snapshots: Rc<RefCell<Snapshots>>,
    random: RefCell<Rng>,
    /// How many entries of L2 tables were missing, and replayed.
    replayed: Rc<Cell<u64>>,
}

/// The names of snapshots of which it is known whether they exist.
type Snapshots = BTreeMap<String, bool>;

/// A running server.
pub struct Served {
    disk: Disk<SimDisk>,
    sim: Sim,
    layout: Layout,
    backing: BackingImages,
    data: Option<SimDisk>,
    snapshots: Rc<RefCell<Snapshots>>,
    random: RefCell<Rng>,
}

impl<H: Hardware> Service for Server<H> {
    type System = Served;

    fn memory_words(&self) -> usize {
        match (self.state, self.layout.format) {
            (State::Kept, ImageFormat::Qcow2) => 8 + 4 * self.records,
            _ => 0,
        }
    }

    fn keeps_answered(&self) -> bool {
        self.state == State::Kept || self.layout.format == ImageFormat::Raw
    }

    fn start(&self, host: Host) -> impl Future<Output = Result<Self::System>> + 'static {
        let (layout, backing) = (self.layout.clone(), self.backing.clone());
        let (hardware, snapshots) = (self.hardware.clone(), Rc::clone(&self.snapshots));
        let random = RefCell::new(self.random.borrow_mut().fork());
        let replayed = Rc::clone(&self.replayed);
        async move {
            let data = host.others.first().cloned();
            let memory = hardware.memory(host.memory);
            let wrap = |disk| hardware.storage(disk, &memory);
            let files = (host.disk, data.clone());
            let disk =
                layout.open_before_replay(&host.sim, files, &backing, wrap, &*memory).await?;
            if memory.words() > 0 {
                match disk.image().replay(&*memory).await? {
                    Replay::Nothing => {}
                    Replay::Applied { changes } => replayed.set(replayed.get() + changes),
                    Replay::Refused { why } => return Err(Error::new(ErrorKind::Corrupt, why)),
                }
                disk.image().attach_redo_log(memory);
            }
            let expected = snapshots.borrow().clone();
            check_snapshots(&disk, &expected).await?;
            Ok(Served { disk, sim: host.sim, layout, backing, data, snapshots, random })
        }
    }

    fn is_full(&self, host: &Host) -> bool {
        space::is_full(&host.disk.content(), &*host.memory)
    }

    fn check(&self, images: &[Vec<u8>], state: ImageState) -> std::result::Result<(), String> {
        match self.layout.format {
            ImageFormat::Raw | ImageFormat::Luks | ImageFormat::Foreign(_) => Ok(()),
            ImageFormat::Qcow2 => check(&images[0], state),
        }
    }
}

/// Checks that each snapshot exists that was taken, and none that was deleted.
async fn check_snapshots(disk: &Disk<SimDisk>, expected: &Snapshots) -> Result<()> {
    if expected.is_empty() {
        return Ok(());
    }
    let found = disk.snapshots().list().await?;
    for (name, &exists) in expected {
        if found.iter().any(|snapshot| snapshot.name == *name) != exists {
            let what = format!("the snapshot {name} should exist: {exists}; there are {found:?}");
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
    }
    Ok(())
}

/// Our own check: no corruption, and no leak in an image that was closed.
fn check(image: &[u8], state: ImageState) -> std::result::Result<(), String> {
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain_config(), image.to_vec());
    sim.block_on(async move {
        // Opened for writing, so that refcounts that are late are repaired.
        let image = Qcow2::open(storage, qcow2::OpenOptions::default()).await;
        let image = image.map_err(|error| format!("cannot be opened: {error}"))?;
        let report = qcow2::check(&image).await.map_err(|error| error.to_string())?;
        if report.corruptions > 0 || (state == ImageState::Closed && report.leaks > 0) {
            let problems: Vec<_> = report.problems.iter().take(8).collect();
            return Err(format!("{state:?}: {} leaks, {problems:?}", report.leaks));
        }
        Ok(())
    })
}

impl SystemUnderTest for Served {
    /// Some writes of a whole cluster become compressed ones.
    async fn submit(&self, request: Request) -> Result<()> {
        let Request::Write { offset, from, durability } = request else {
            return self.disk.submit(request).await;
        };
        let cluster = self.disk.image().cluster_size().unwrap_or(u64::MAX);
        let is_cluster = offset.is_multiple_of(cluster) && from.len() as u64 == cluster;
        if !self.layout.compresses || !is_cluster || self.random.borrow_mut().bool() {
            return self.disk.submit(Request::Write { offset, from, durability }).await;
        }
        let mut bytes = vec![0; from.len()];
        from.copy_to(&mut bytes);
        if self.disk.write_compressed(offset, &bytes).await? == CompressResult::Incompressible {
            return self.disk.submit(Request::Write { offset, from, durability }).await;
        }
        match durability {
            Durability::None => Ok(()),
            _ => self.disk.flush().await,
        }
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn min_durability(&self) -> Durability {
        self.layout.min_durability()
    }

    fn grow(&self, size: u64) -> impl Future<Output = Result<()>> {
        self.disk.resize(size)
    }

    /// Takes a snapshot, or deletes one.
    async fn maintain(&self, mut random: Rng) -> Result<()> {
        let name = format!("s{}", random.u8(..3));
        let found = self.disk.snapshots().list().await?;
        let exists = found.iter().any(|snapshot| snapshot.name == name);
        self.snapshots.borrow_mut().remove(&name);
        let outcome = if exists {
            self.disk.snapshots().delete(&name).await.map(|_| ())
        } else {
            self.disk.snapshots().create(&name).await.map(|_| ())
        };
        if outcome.is_ok() && !self.sim.is_dead() {
            self.snapshots.borrow_mut().insert(name, !exists);
        }
        outcome
    }

    fn close(&self) -> impl Future<Output = Result<()>> {
        self.disk.close()
    }

    fn others(&self) -> Vec<SimDisk> {
        self.data.iter().cloned().collect()
    }

    fn recover(&self, image: Vec<u8>, state: ImageState) -> std::result::Result<Vec<u8>, String> {
        if self.layout.format == ImageFormat::Raw {
            return Ok(image);
        }
        check(&image, state)?;
        let sim = Sim::new(0);
        let storage = SimDisk::new(&sim, plain_config(), image);
        let mut random = self.random.borrow_mut();
        let data = self.data.as_ref().map(|data| data.crash(&mut random));
        let data = data.map(|data| SimDisk::new(&sim, plain_config(), data));
        let (layout, backing) = (self.layout.clone(), self.backing.clone());
        let opened_in = sim.clone();
        sim.block_on(async move {
            let disk = layout.open(&opened_in, storage, data, &backing, |disk| disk).await;
            let disk = disk.map_err(|error| format!("cannot be opened again: {error}"))?;
            read_all(&disk).await.map_err(|error| format!("cannot be read: {error}"))
        })
    }
}

/// Explores one seed of processes that serve an image of that layout. Returns also how many changes
/// were replayed.
///
/// # Errors
/// In words, the first violation of the model.
pub fn explore<H: Hardware>(
    seed: u64,
    layout: &Layout,
    state: State,
    hardware: H,
) -> std::result::Result<(Report, u64), String> {
    let replayed = Rc::new(Cell::new(0));
    let explored = explore_restarts(seed, &layout.workload(), |config, content, random| {
        let images = layout.images(&content, config.alignment.offset, random);
        let server = Server {
            layout: layout.clone(),
            backing: images.backing,
            state,
            hardware,
            records: [32, 64, 1024][random.usize(..3)],
            snapshots: Rc::default(),
            random: RefCell::new(random.fork()),
            replayed: Rc::clone(&replayed),
        };
        (server, [images.image].into_iter().chain(images.data).collect())
    });
    match explored {
        Ok(report) => Ok((report, replayed.get())),
        Err(violation) => Err(format!("{layout:?}, state {state:?}: {violation}")),
    }
}
