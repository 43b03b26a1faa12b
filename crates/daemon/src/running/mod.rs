//! The running disks by name, and their exports at listening sockets.
//!
//! Guarantees: names are unique. An export's disk is open as long as the export is served. Changes
//! of different disks do not wait for each other ([`claims`](crate::running::claims)), and a change
//! that fails leaves what runs as it was. What is listed is what runs: a thing is listed from when
//! it is served until nothing of it is.

mod backups;
pub(crate) mod claims;
mod devices;
mod disks;
mod export;
mod forks;
mod images;
pub(crate) mod io_poll;
mod limits;
mod nbd_sockets;
pub(crate) mod open;
mod recording;
mod reload;
mod rollbacks;
mod room;
pub(crate) mod scratch;
mod transactions;
mod ublk_devices;

use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use anyhow::{Result, bail};
use blockhouse_core::WriteCache;
use blockhouse_disk::{CacheMode, ImageDisk, ImageFormat, LayerInfo, StateUse};
use blockhouse_engine::{EngineReport, Handle, HostFile, IoPoll};
use blockhouse_nbd::{ExportBitmap, Server, SocketPermissions};
use blockhouse_vhost_user::RegisteredMemory;
use parking_lot::Mutex;
use rustix::fs::OFlags;
use serde_json::Value;

use crate::config::ConfiguredDisk;
use crate::endpoints::tls::Tls;
use crate::endpoints::vhost_user::registered_memory;
use crate::events::Events;
use crate::events::room_watch::RoomWatch;
use crate::jobs::Jobs;
use crate::metrics::{MeasuredDisk, Samples, StartTime, gather, to_json};
use crate::options::limit_options::DiskThrottle;
use crate::options::threshold::Threshold;
use crate::running::claims::Claims;
use crate::running::open::state_use;
use crate::sandbox::SandboxReport;
use crate::setup::{DiskSetup, Setup, StateSetup};
use backups::Backups;
pub(crate) use backups::{BackupDisk, BackupSetup, RunningBackup};
pub(crate) use devices::RunningDevice;
pub(crate) use disks::Refreshed;
pub(crate) use export::{ExportAddress, RunningExport};
pub(crate) use forks::ForkReport;
pub(crate) use nbd_sockets::{ServedSocket, SocketOffer};
pub(crate) use reload::Reloaded;
pub(crate) use transactions::{BackupKind, BackupPart};
pub(crate) use ublk_devices::RunningUblk;

/// The parts that run.
pub(crate) struct Running {
    loops: Vec<Handle>,
    server: Server,
    options: Options,
    tls: Option<Tls>,
    sandbox: SandboxReport,
    list: Arc<Mutex<List>>,
    claims: Claims,
    events: Events,
    jobs: Jobs,
    backups: Backups,
    measured_since: StartTime,
}

/// How disks are opened and served, whatever their names.
struct Options {
    state: StateSetup,
    /// The user of the server after it gave up its own.
    user: Option<u32>,
    /// The permissions of Unix sockets.
    permissions: SocketPermissions,
    queues: u16,
    memory: RegisteredMemory,
    /// Whether completions must be polled for.
    io_poll: IoPoll,
    config: Option<PathBuf>,
    /// Whether exports can be added later.
    can_grow: bool,
    /// Counts NBD clients where the server ends with the last one.
    clients: Option<Arc<AtomicUsize>>,
}

/// An entry of a list.
#[derive(Default)]
struct List {
    /// In the order in which they were opened.
    disks: Vec<Arc<RunningDisk>>,
    sockets: Vec<Arc<ServedSocket>>,
    /// How many sockets were served so far.
    served_sockets: usize,
    /// In the order in which they were added.
    exports: Vec<RunningExport>,
    devices: Vec<Arc<RunningDevice>>,
    ublk: Vec<Arc<RunningUblk>>,
    /// The disks that the command line or the configuration asks for.
    configured: Vec<ConfiguredDisk>,
}

/// The list, from which disks go that have become the images of others.
pub(crate) struct TakenDisks(Arc<Mutex<List>>);

impl TakenDisks {
    /// Lists this disk no longer. It stays open.
    pub(crate) fn forget(&self, disk: &str) {
        self.0.lock().disks.retain(|other| other.name() != disk);
    }
}

/// A disk that is open.
pub(crate) struct RunningDisk {
    /// How it was opened.
    pub(crate) setup: DiskSetup,
    /// The canonical path of the image that it was opened with.
    path: PathBuf,
    /// Where a mirror had moved it before another process handed it over.
    moved: Option<Moved>,
    /// The disk.
    pub(crate) disk: Arc<ImageDisk>,
    /// The bitmaps that its NBD clients may ask for.
    bitmaps: Vec<ExportBitmap>,
    /// How little room may be left.
    room: Arc<RoomWatch>,
    /// The name of the group whose limits it shares. Changed where the list is locked.
    group: Mutex<Option<String>>,
}

impl RunningDisk {
    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.setup.name
    }

    /// How it would be opened to be as it is now, but for its limits.
    pub(crate) fn setup_now(&self) -> DiskSetup {
        DiskSetup { threshold: self.threshold(), ..self.setup.clone() }
    }

    /// The image at a depth of the chain, but none in the place of a backing file that is left out:
    /// that has no name.
    pub(crate) fn layer_at(&self, depth: usize) -> Option<LayerInfo<'_>> {
        self.disk.layer_at(depth).filter(|layer| !layer.name.starts_with("/proc/self/fd/"))
    }

    /// Whether NBD clients may ask for the bitmap of this name.
    pub(crate) fn offers_bitmap(&self, name: &str) -> bool {
        self.setup.bitmaps.iter().any(|offered| offered == name)
    }

    /// Refuses to remove a bitmap that NBD clients may ask for.
    pub(crate) fn check_bitmap_unused(&self, name: &str) -> Result<()> {
        if self.offers_bitmap(name) {
            bail!(
                "the disk {:?} offers the bitmap {name:?} to NBD clients; open the disk without it first",
                self.name()
            );
        }
        Ok(())
    }

    /// How little room may be left before that is told.
    pub(crate) fn threshold(&self) -> Option<Threshold> {
        self.room.threshold()
    }

    /// Up to which byte of its storage the image is used before that is told.
    pub(crate) fn write_threshold(&self) -> Option<u64> {
        self.room.write_threshold()
    }

    /// The canonical path of the image, or where it was moved since.
    pub(crate) fn path(&self) -> PathBuf {
        self.moved().map_or_else(|| self.path.clone(), |moved| moved.path)
    }

    /// The image that has taken the place of the one that it was opened with.
    pub(crate) fn moved(&self) -> Option<Moved> {
        if !self.disk.is_replaced() {
            return self.moved.clone();
        }
        let is_cached = self.disk.file().is_some_and(uses_page_cache);
        // An overlay of a device without a write cache makes every write durable.
        let is_durable = self.disk.capabilities().write_cache == WriteCache::None;
        let is_overlay = is_durable && self.disk.backing_file().is_some();
        let with_sync = |cache: CacheMode| if is_overlay { cache.write_through() } else { cache };
        Some(Moved {
            path: PathBuf::from(self.disk.image_name()),
            format: self.disk.image_format_name().parse().ok()?,
            // A target that cannot be opened around the page cache goes through it.
            cache: match self.setup.cache {
                CacheMode::None if is_cached => with_sync(CacheMode::Writeback),
                cache => with_sync(cache),
            },
        })
    }
}

/// An image that has taken the place of the one that a disk was opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// Its format.
    pub(crate) format: ImageFormat,
    /// The host's cache.
    pub(crate) cache: CacheMode,
}

/// A disk that is going to run.
pub(crate) struct OpenedDisk {
    /// How it was opened.
    pub(crate) setup: DiskSetup,
    /// The disk.
    pub(crate) disk: Arc<ImageDisk>,
    /// Its past in the process that has handed it over.
    pub(crate) earlier: Option<EarlierLife>,
}

/// The past of a disk in another process.
#[derive(Clone, Debug)]
pub(crate) struct EarlierLife {
    /// Where it was moved.
    pub(crate) moved: Option<Moved>,
    /// The limits that it has.
    pub(crate) limits: Option<DiskThrottle>,
}

fn uses_page_cache(file: &HostFile) -> bool {
    let flags = rustix::fs::fcntl_getfl(file.descriptor());
    flags.is_ok_and(|flags| !flags.contains(OFlags::DIRECT))
}

impl Running {
    /// Nothing yet, to be served on these loops.
    pub(crate) fn new(
        loops: Vec<Handle>,
        report: &EngineReport,
        setup: &Setup,
        (tls, sandbox): (Option<Tls>, SandboxReport),
        measured_since: StartTime,
    ) -> Self {
        Self {
            loops,
            server: Server::new(setup.limits),
            options: Options {
                user: setup.user.map(|ids| ids.user),
                state: setup.state.clone(),
                permissions: setup.permissions,
                queues: setup.queues,
                memory: registered_memory(report, setup),
                io_poll: setup.loops.io_poll,
                config: setup.config.clone(),
                can_grow: setup.takes_changes(),
                clients: setup.ends_with_clients.then(Arc::default),
            },
            tls,
            sandbox,
            list: Arc::default(),
            claims: Claims::default(),
            jobs: Jobs::default(),
            backups: Backups::default(),
            events: Events::default(),
            measured_since,
        }
    }

    /// Reads the files of TLS again.
    pub(crate) fn reload_tls(&self) {
        self.tls.iter().for_each(|tls| tls.reload(&self.server));
    }

    /// The server of NBD clients.
    pub(crate) fn server(&self) -> &Server {
        &self.server
    }

    /// The restrictions of the process.
    pub(crate) fn sandbox(&self) -> &SandboxReport {
        &self.sandbox
    }

    /// The server's events.
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Who changes what.
    pub(crate) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// The list, for a job by which a disk becomes the image of another one.
    pub(crate) fn taken(&self) -> TakenDisks {
        TakenDisks(Arc::clone(&self.list))
    }

    /// The jobs on disks that are served.
    pub(crate) fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// The state that outlives the process, of a disk that is opened later.
    ///
    /// # Errors
    /// The directory that was asked for cannot be used.
    pub(crate) fn state_use(&self, setup: &DiskSetup) -> Result<StateUse> {
        state_use(&self.options.state, slice::from_ref(setup), self.options.user)
    }

    /// The disks, in the order in which they were opened.
    pub(crate) fn disks(&self) -> Vec<Arc<RunningDisk>> {
        self.list.lock().disks.clone()
    }

    /// The disk of this name.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<RunningDisk>> {
        self.list.lock().disks.iter().find(|disk| disk.name() == name).cloned()
    }

    /// The disk of this name.
    ///
    /// # Errors
    /// There is none; with the names that there are.
    pub(crate) fn disk(&self, name: &str) -> Result<Arc<RunningDisk>> {
        match self.find(name) {
            Some(disk) => Ok(disk),
            None => bail!(
                "no disk is called {name:?}; {} ('disk.list' tells more)",
                self.names_of_disks()
            ),
        }
    }

    /// Some names, for a message.
    fn names_of_disks(&self) -> String {
        const TOLD: usize = 8;
        let disks = self.list.lock();
        let names: Vec<_> = disks.disks.iter().map(|disk| format!("{:?}", disk.name())).collect();
        match names.len() {
            0 => "none is open".into(),
            count @ ..=TOLD => {
                format!("there {} {}", if count == 1 { "is" } else { "are" }, names.join(", "))
            }
            count => format!("there are {} and {} more", names[..TOLD].join(", "), count - TOLD),
        }
    }

    /// The disks, as they are measured.
    pub(crate) fn measured(&self) -> Vec<MeasuredDisk> {
        let measured = |disk: Arc<RunningDisk>| MeasuredDisk {
            name: disk.name().to_owned(),
            disk: Arc::clone(&disk.disk),
        };
        self.disks().into_iter().map(measured).collect()
    }

    /// Since when the counters count.
    pub(crate) fn measured_since(&self) -> StartTime {
        self.measured_since
    }

    /// The values of all metrics at this moment.
    pub(crate) fn gathered(&self) -> Vec<Samples> {
        gather(self.measured_since, &self.measured())
    }

    /// All metrics at this moment.
    pub(crate) fn metrics(&self) -> Value {
        to_json(&self.gathered())
    }

    /// The exports, in the order in which they were added.
    pub(crate) fn exports(&self) -> Vec<RunningExport> {
        self.list.lock().exports.clone()
    }

    /// The exports of a disk.
    pub(crate) fn exports_of(&self, disk: &str) -> Vec<RunningExport> {
        self.list.lock().exports.iter().filter(|export| export.disk == disk).cloned().collect()
    }

    /// The configuration that reloads read.
    pub(crate) fn config(&self) -> Option<&Path> {
        self.options.config.as_deref()
    }

    /// The disks that the command line or the configuration asks for.
    pub(crate) fn configured(&self) -> Vec<ConfiguredDisk> {
        self.list.lock().configured.clone()
    }

    /// This is what the command line or the configuration asks for.
    pub(crate) fn set_configured(&self, configured: Vec<ConfiguredDisk>) {
        self.list.lock().configured = configured;
    }

    /// As [`set_configured`](Self::set_configured), for what runs now.
    pub(crate) fn set_all_configured(&self) {
        let mut list = self.list.lock();
        let of = |disk: &Arc<RunningDisk>| {
            let exports = list.exports.iter().filter(|export| export.disk == disk.name());
            let addresses = exports.map(|export| export.address.clone()).collect();
            let setup = DiskSetup { throttle: disk.throttle(), ..disk.setup_now() };
            ConfiguredDisk { setup, addresses }
        };
        list.configured = list.disks.iter().map(of).collect();
    }
}
