//! The exports that are served: at the sockets of NBD clients (`nbd_sockets`), at the sockets of
//! vhost-user-blk devices (`devices`), and as block devices of this host (`ublk_devices`).
//!
//! Guarantee: an export is listed from the start of its service until it no longer serves any
//! request. A task that adds or removes an export has claimed the export's disk and socket, except
//! when another program has removed a ublk device.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use anyhow::{Result, bail};
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::offers::ExportOptions;
use blockhouse_config::setup::Setup;
use blockhouse_engine::{EngineReport, Handle};
use blockhouse_nbd::{Server, SocketPermissions};
use blockhouse_vhost_user::RegisteredMemory;
use parking_lot::Mutex;

use super::disk::RunningDisk;
use super::export::{RunningDevice, RunningExport, RunningUblk, ServedSocket};
use crate::endpoints::tls::Tls;
use crate::endpoints::vhost_user::registered_memory;
use crate::events::{Event, Events};

/// The exports of a server, of all disks.
pub struct ExportList {
    pub(super) loops: Vec<Handle>,
    pub(super) server: Server,
    pub(super) tls: Option<Tls>,
    pub(super) events: Events,
    /// The permissions of Unix sockets.
    pub(super) permissions: SocketPermissions,
    pub(super) queues: u16,
    pub(super) memory: RegisteredMemory,
    /// Whether exports can be added later.
    pub(super) can_grow: bool,
    /// Maximum NBD clients of each socket at once, if limited.
    pub(super) max_connections: Option<NonZeroUsize>,
    /// Counts NBD clients if the server ends with the last one.
    pub(super) clients: Option<Arc<AtomicUsize>>,
    pub(super) state: Mutex<State>,
}

/// The lists.
#[derive(Default)]
pub(super) struct State {
    pub(super) sockets: Vec<Arc<ServedSocket>>,
    /// How many sockets were served so far.
    pub(super) served_sockets: usize,
    /// The exports, in the order in which they were added.
    pub(super) exports: Vec<RunningExport>,
    pub(super) devices: Vec<Arc<RunningDevice>>,
    pub(super) ublk: Vec<Arc<RunningUblk>>,
}

impl ExportList {
    /// An empty list, to be served on these loops.
    pub(super) fn new(
        loops: Vec<Handle>,
        report: &EngineReport,
        setup: &Setup,
        tls: Option<Tls>,
        events: Events,
    ) -> Self {
        Self {
            loops,
            server: Server::new(setup.server.limits),
            tls,
            events,
            permissions: setup.server.permissions(),
            queues: setup.server.queues(),
            memory: registered_memory(report, setup),
            can_grow: setup.takes_changes(),
            max_connections: setup.max_connections,
            clients: setup.ends_with_clients.then(Arc::default),
            state: Mutex::default(),
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

    /// All exports, in the order in which they were added.
    pub fn list(&self) -> Vec<RunningExport> {
        self.state.lock().exports.clone()
    }

    /// The exports of a disk.
    pub fn of_disk(&self, disk: &str) -> Vec<RunningExport> {
        self.state.lock().exports.iter().filter(|export| export.disk == disk).cloned().collect()
    }

    /// Serves a disk at an address. Returns the address, with the real port instead of port 0.
    ///
    /// # Errors
    /// The address is in use or cannot be bound.
    pub(super) async fn add(
        &self,
        disk: &Arc<RunningDisk>,
        address: ExportAddress,
        options: ExportOptions,
    ) -> Result<ExportAddress> {
        let served = Arc::clone(disk);
        let address = match address {
            ExportAddress::Nbd(uri) => {
                ExportAddress::Nbd(self.add_nbd(uri, served, options).await?)
            }
            ExportAddress::VhostUser(path) => {
                self.add_device(path.clone(), served, options.access).await?;
                ExportAddress::VhostUser(path)
            }
            ExportAddress::Ublk(_) => bail!(
                "a ublk device cannot be added to a running server, whose loops take no commands of it; start a server \
                 with --ublk"
            ),
        };
        let (export, disk) = (address.to_string(), disk.name().to_owned());
        self.events.tell(Event::ExportAdded { export, disk });
        Ok(address)
    }

    /// Ends an export. Its clients' requests in flight complete.
    pub(super) async fn end(&self, export: &RunningExport) -> Result<()> {
        match &export.address {
            ExportAddress::Nbd(uri) => self.remove_nbd(uri).await,
            ExportAddress::VhostUser(path) => self.remove_device(path).await?,
            ExportAddress::Ublk(id) => self.remove_ublk(*id).await?,
        }
        let (export, disk) = (export.address.to_string(), export.disk.clone());
        self.events.tell(Event::ExportRemoved { export, disk });
        Ok(())
    }

    /// The clients of an export; `None` if they are not known.
    pub(crate) fn peers(&self, export: &RunningExport) -> Option<Vec<String>> {
        match &export.address {
            ExportAddress::Nbd(uri) => Some(self.nbd_peers(uri)),
            ExportAddress::VhostUser(path) => {
                let devices = self.devices();
                let device = devices.iter().find(|device| device.served().path() == path);
                device.map(|device| device.frontends())
            }
            ExportAddress::Ublk(_) => None,
        }
    }
}
