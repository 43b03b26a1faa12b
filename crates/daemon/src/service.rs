//! What runs while images are served: workers, disks, exports, and their orderly end.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockhouse_disk::ImageDisk;
use blockhouse_engine::Listener;
use blockhouse_nbd::uri::{Address, NbdUri};
use blockhouse_nbd::{BoundSocket, Export, Exports, Limits, Server, SocketFile};
use blockhouse_storage::ImageStorage;
use sd_notify::NotifyState;

use crate::control::{Closed, Control};
use crate::hand_over::requests::UpgradeRequests;
use crate::metrics::{self, DiskList, MetricsServer};
use crate::offers::Offer;
use crate::setup::Setup;
use crate::sockets::ListenSocket;
use crate::vhost_user::{self, DeviceSocket, ServedDevice};
use crate::workers::Workers;

type HostDisk = Arc<ImageDisk>;

/// How often what the control socket does is asked for.
const CONTROL_RETRY: Duration = Duration::from_millis(5);

/// Everything that serves.
pub struct Service {
    workers: Workers,
    disks: Vec<HostDisk>,
    server: Server,
    sockets: Vec<ServedSocket>,
    devices: Vec<ServedDevice>,
    control: Option<Control>,
    metrics: Option<MetricsServer>,
    /// The addresses of the exports.
    ready: Vec<ReadyLine>,
}

/// A listening socket of NBD clients.
pub struct ServedSocket {
    listener: Listener,
    address: Address,
    offers: Vec<Offer>,
    /// Removed at the end.
    file: Option<SocketFile>,
}

impl ServedSocket {
    /// The socket.
    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// What its clients find.
    pub fn offers(&self) -> &[Offer] {
        &self.offers
    }

    /// Its file, if this process is to remove that.
    pub fn file(&self) -> Option<&SocketFile> {
        self.file.as_ref()
    }
}

/// The address of an export, as the line that announces it has it.
enum ReadyLine {
    Nbd(NbdUri),
    VhostUser(PathBuf),
}

impl fmt::Display for ReadyLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nbd(uri) => uri.fmt(f),
            Self::VhostUser(path) => path.display().fmt(f),
        }
    }
}

/// A disk under a name. It has no description: clients need not know where the image lies on the host.
fn export(name: String, disk: &HostDisk) -> Export<ImageStorage> {
    Export { name, description: String::new(), disk: Arc::clone(disk) }
}

impl Service {
    /// Serves disks at NBD sockets.
    pub(crate) fn start(
        workers: Workers,
        disks: Vec<HostDisk>,
        sockets: Vec<ListenSocket>,
        limits: Limits,
    ) -> Result<Self> {
        let server = Server::new(limits);
        let mut served = Vec::new();
        let mut ready = Vec::new();
        for ListenSocket { bound, offers, connections } in sockets {
            // Of this socket alone: clients of others do not find them.
            let exports = Exports::new();
            for Offer { name, image } in &offers {
                exports.add(export(name.clone(), &disks[*image]))?;
            }
            let listener = Listener::new(bound.socket).context("cannot use the socket")?;
            let (serving, loops, accepting) = (server.clone(), workers.handles(), listener.clone());
            drop(workers.first().spawn(move || async move {
                let serving = serving.serve_with(&accepting, &exports, &loops, connections);
                if let Err(error) = serving.await {
                    tracing::error!("cannot accept connections any more: {error}");
                }
            }));
            let BoundSocket { address, file, .. } = bound;
            let uri =
                |offer: &Offer| NbdUri { address: address.clone(), export: offer.name.clone() };
            ready.extend(offers.iter().map(uri).map(ReadyLine::Nbd));
            served.push(ServedSocket { listener, address, offers, file });
        }
        let (devices, control, metrics) = (Vec::new(), None, None);
        Ok(Self { workers, disks, server, sockets: served, devices, control, metrics, ready })
    }

    /// Serves vhost-user-blk devices: the first socket has the first image and so on, or
    /// all have the only one.
    pub(crate) fn add_devices(&mut self, sockets: Vec<DeviceSocket>, setup: &Setup) -> Result<()> {
        for (index, socket) in sockets.into_iter().enumerate() {
            let index = index.min(self.disks.len() - 1);
            let name = setup.offers.label(index);
            if let Address::Unix(path) = &socket.bound.address {
                self.ready.push(ReadyLine::VhostUser(path.clone()));
            }
            let disk = &self.disks[index];
            self.devices.push(vhost_user::serve(socket, disk, name, &self.workers, setup)?);
        }
        Ok(())
    }

    /// Serves requests of this user at a control socket.
    pub(crate) fn add_control(
        &mut self,
        socket: BoundSocket,
        setup: &Setup,
        upgrades: UpgradeRequests,
    ) -> Result<()> {
        let images: Vec<_> = setup.disks.iter().map(|disk| &*disk.path).collect();
        let engine = setup.loops.engine;
        self.control = Some(Control::start(socket, engine, &images, &self.disks, upgrades)?);
        Ok(())
    }

    /// Serves metrics at a listening socket.
    pub(crate) fn add_metrics(&mut self, bound: BoundSocket, setup: &Setup) -> Result<()> {
        let disks = self.measured(setup);
        self.metrics = Some(MetricsServer::start(bound, setup.loops.engine, disks)?);
        Ok(())
    }

    /// As [`add_metrics`](Self::add_metrics), once the process that another one goes on for has ended.
    pub(crate) fn add_metrics_when_free(&mut self, setup: &Setup) -> Result<()> {
        let Some(address) = setup.metrics.clone() else { return Ok(()) };
        let (engine, disks) = (setup.loops.engine, self.measured(setup));
        self.metrics = Some(MetricsServer::start_when_free(address, engine, disks)?);
        Ok(())
    }

    /// The disks that there are, under their names.
    fn measured(&self, setup: &Setup) -> DiskList {
        let named =
            |(index, disk): (usize, &HostDisk)| (setup.offers.label(index), Arc::clone(disk));
        let disks =
            metrics::with_distinct_names(self.disks.iter().enumerate().map(named).collect());
        Arc::new(move || disks.clone())
    }

    /// The loops.
    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// The images, in the order of the command line.
    pub(crate) fn disks(&self) -> &[HostDisk] {
        &self.disks
    }

    /// The server of NBD clients.
    pub(crate) fn server(&self) -> &Server {
        &self.server
    }

    /// The listening sockets of NBD clients, in the order in which they are served.
    pub(crate) fn sockets(&self) -> &[ServedSocket] {
        &self.sockets
    }

    /// The control socket.
    pub(crate) fn control(&self) -> Option<&Control> {
        self.control.as_ref()
    }

    /// The vhost-user-blk devices.
    pub(crate) fn devices(&self) -> &[ServedDevice] {
        &self.devices
    }

    /// Holds off what is asked at the control socket, once what is carried out now has ended. `None` if that takes
    /// longer than `time`; `Some(None)` without a control socket.
    pub(crate) fn pause_control(&self, time: Duration) -> Option<Option<Closed<'_>>> {
        let Some(control) = &self.control else { return Some(None) };
        let deadline = Instant::now() + time;
        loop {
            if let Some(closed) = control.try_pause() {
                return Some(Some(closed));
            }
            if Instant::now() >= deadline {
                return None;
            }
            sleep(CONTROL_RETRY);
        }
    }

    /// Ends without touching what another process goes on with: no file of a socket is removed, no lock given back, no
    /// connection closed. All of that is left to the end of this process.
    pub(crate) fn leave(mut self) {
        // So that the client that asked for it gets its answer.
        self.control.take().into_iter().for_each(Control::leave);
        // The other process waits for its address.
        self.metrics.take().into_iter().for_each(MetricsServer::stop);
        std::mem::forget(self);
    }

    /// Takes over the sizes of images that became longer, and has guests told.
    pub(crate) fn refresh_sizes(&self) {
        for disk in &self.disks {
            let following = Arc::clone(disk);
            match self.workers.run(move || async move { following.refresh_size().await }) {
                Ok(Some(size)) => tracing::info!("{}: has {size} bytes now", disk.name()),
                Ok(None) => {}
                Err(error) => tracing::error!("{error}"),
            }
        }
        self.devices.iter().for_each(ServedDevice::resized);
    }

    /// A line for each export, of its address, when everything listens; with engine and FUA if it is to say
    /// more.
    pub fn ready_lines(&self, is_verbose: bool) -> Vec<String> {
        let report = self.workers.report();
        if report.refused.is_empty() {
            tracing::debug!("engine {report}");
        } else {
            tracing::info!("engine {report}");
        }
        let line = |address: &ReadyLine| match is_verbose {
            false => format!("ready {address}"),
            true => {
                let disk = Arc::clone(&self.disks[0]);
                let fua = self.workers.run(move || async move { disk.capabilities().fua });
                format!("ready {address} engine={} fua={}", report.engine, fua.as_str())
            }
        };
        self.ready.iter().map(line).collect()
    }

    /// Tells the service manager that everything listens.
    pub fn notify_ready(&self) {
        let count = |number: usize, one: &str, more: &str| match number {
            1 => format!("1 {one}"),
            _ => format!("{number} {more}"),
        };
        let disks = count(self.disks.len(), "disk", "disks");
        let addresses = count(self.ready.len(), "address", "addresses");
        let engine = self.workers.report().engine;
        let status = format!("serving {disks} at {addresses} by {engine}");
        // It fails where no service manager asked for it.
        let _ = sd_notify::notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
    }

    /// The URI of the first NBD export, if that is the first of all.
    pub fn first_uri(&self) -> Option<&NbdUri> {
        match &self.ready[..] {
            [ReadyLine::Nbd(uri), ..] => Some(uri),
            _ => None,
        }
    }

    /// Stops accepting, completes what is in flight, and flushes.
    pub(crate) fn end(self) -> Result<()> {
        let Self { workers, disks, server, sockets, devices, control, metrics, .. } = self;
        // So that nothing else holds the disks.
        metrics.into_iter().for_each(MetricsServer::stop);
        // What waits for its turn is let go, so that the end does not wait for it.
        let _lifted: Vec<_> = disks.iter().map(|disk| disk.lift_limits()).collect();
        // While the workers still execute what it may wait for.
        control.into_iter().for_each(Control::stop);
        devices.into_iter().for_each(ServedDevice::stop);
        let draining = server.clone();
        // While the sockets still listen: see `SocketFile`.
        drop(sockets);
        workers.run(move || async move { draining.drain().await });
        // All of them, also when one fails.
        let close = |disk: HostDisk| workers.run(move || async move { disk.close().await });
        let outcomes: Vec<_> = disks.into_iter().map(close).collect();
        drop(server);
        workers.stop();
        Ok(outcomes.into_iter().collect::<Result<(), _>>()?)
    }
}
