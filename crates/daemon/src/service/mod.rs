//! The serving parts: workers, their devices, the control socket, and their orderly end.

mod finishing;

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use blockhouse_config::control_socket::Answers;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::offers::Offer;
use blockhouse_config::setup::Setup;
use blockhouse_engine::Handle;
use blockhouse_nbd::uri::NbdUri;
use blockhouse_nbd::{BoundSocket, Server};
use futures_util::future::{FutureExt, LocalBoxFuture};
use sd_notify::NotifyState;

use self::finishing::{Finishing, close_all};
use crate::control::upgrades::UpgradeRequests;
use crate::control::{Closed, Control, Gate, Monitor, MonitorProtocol, listed_jobs};
use crate::endpoints::sockets::ListenSocket;
use crate::endpoints::tls::Tls;
use crate::endpoints::ublk::UblkOfDisk;
use crate::endpoints::vhost_user::DeviceOfDisk;
use crate::events::Subscription;
use crate::jobs::begin_prefetch;
use crate::metrics::{MetricsServer, Observed, Samples, StartTime};
use crate::process::service_manager;
use crate::process::workers::Workers;
use crate::running::reload;
use crate::running::room::watch_use;
use crate::running::{
    EarlierLife, OpenedDisk, Running, RunningDevice, RunningDisk, RunningExport, RunningUblk,
    ServedSocket, SocketOffer,
};
use crate::sandbox::SandboxReport;

/// The interval of attempts to close a gate between requests.
const CONTROL_RETRY: Duration = Duration::from_millis(5);

/// How long the end of the server waits for work of its own.
const MAX_OWN_WORK: Duration = Duration::from_secs(5);

/// Everything that serves.
pub struct Service {
    workers: Workers,
    running: Arc<Running>,
    control: Option<Control>,
    monitor: Option<Box<dyn Monitor>>,
    metrics: Option<MetricsServer>,
    /// The loop that reads the configuration again, if there is one, so that no guest waits while
    /// disks are opened.
    reloads: Option<Workers>,
    /// The gate for work that no request asks for: the start of prefetches, and reloads and
    /// refreshes after a signal. The main thread does not wait for this work, because the storage
    /// of a disk may hang.
    own_work: Arc<Gate>,
}

impl Service {
    /// Serves open disks at NBD sockets.
    ///
    /// # Errors
    /// Limits that cannot be applied, or a socket that cannot be used.
    pub(crate) fn start(
        workers: Workers,
        disks: Vec<OpenedDisk>,
        sockets: Vec<ListenSocket>,
        setup: &Setup,
        secrets: (Option<Tls>, SandboxReport),
        measured_since: StartTime,
    ) -> Result<Self> {
        let running =
            Running::new(workers.handles(), workers.report(), setup, secrets, measured_since);
        let running = Arc::new(running);
        let disks = adopt_all(&running, disks)?;
        for ListenSocket { bound, security, offers, connections, added } in sockets {
            let offers = offers.into_iter();
            let offers = offers.map(|offer| SocketOffer {
                name: offer.name,
                disk: Arc::clone(&disks[offer.image]),
                options: offer.options,
            });
            let (address, exports) = (bound.address.clone(), running.exports());
            exports.serve_socket(bound, security, offers.collect(), connections)?;
            added.into_iter().for_each(|added| exports.keep_socket(&address, added));
        }
        let (control, monitor, metrics, reloads) = (None, None, None, None);
        let own_work = Arc::default();
        Ok(Self { workers, running, control, monitor, metrics, reloads, own_work })
    }

    /// Serves vhost-user-blk devices at their sockets.
    ///
    /// # Errors
    /// A thread cannot be started for one of them.
    pub(crate) fn add_devices(&mut self, sockets: Vec<DeviceOfDisk>) -> Result<()> {
        let disks = self.running.disks().all();
        let mut sockets = sockets.into_iter();
        sockets.try_for_each(|(socket, disk)| {
            self.running.exports().serve_device(socket, &disks[disk])
        })
    }

    /// Serves block devices of this host.
    pub(crate) fn add_ublk(&self, devices: Vec<UblkOfDisk>) -> Result<()> {
        let disks = self.running.disks().all();
        let mut devices = devices.into_iter();
        devices
            .try_for_each(|(device, disk)| self.running.exports().serve_ublk(device, &disks[disk]))
    }

    /// The block devices of this host, in the order in which they were added.
    pub(crate) fn ublk_devices(&self) -> Vec<Arc<RunningUblk>> {
        self.running.exports().ublk_devices()
    }

    /// Runs jobs on this loop: requested jobs, and the prefetches of disks.
    pub(crate) fn add_jobs(&self, workers: Option<Workers>) {
        let Some(workers) = workers else { return };
        let handle = workers.first().clone();
        self.running.jobs().run_on(workers);
        self.do_own_work(&handle, async |running| {
            for disk in running.disks().all() {
                begin_prefetch(running, &disk).await;
            }
        });
    }

    /// Serves the methods in `answers` at a control socket.
    pub(crate) fn add_control(
        &mut self,
        socket: BoundSocket,
        answers: Answers,
        workers: Workers,
        upgrades: UpgradeRequests,
    ) -> Result<()> {
        let running = Arc::clone(&self.running);
        self.control = Some(Control::start(socket, workers, running, answers, upgrades)?);
        Ok(())
    }

    /// Serves a monitor at sockets that listen, after its first commands.
    ///
    /// # Errors
    /// The errors of [`MonitorProtocol::start`], and of the first command that fails.
    pub(crate) fn add_monitor(
        &mut self,
        protocol: &dyn MonitorProtocol,
        setup: &Setup,
        bound: Vec<BoundSocket>,
        workers: Workers,
    ) -> Result<()> {
        let (monitor, outcome) =
            protocol.start(setup, bound, workers, Arc::clone(&self.running))?;
        self.monitor = Some(monitor);
        outcome
    }

    /// As [`add_monitor`](Self::add_monitor), once the previous process has ended.
    pub(crate) fn add_monitor_when_free(
        &mut self,
        protocol: &dyn MonitorProtocol,
        setup: &Setup,
        workers: Option<Workers>,
    ) {
        if let (Some(socket), Some(workers)) = (setup.server.qmp.clone(), workers) {
            let running = Arc::clone(&self.running);
            self.monitor = Some(protocol.start_when_free(socket, workers, running));
        }
    }

    /// Serves metrics at a listening socket.
    pub(crate) fn add_metrics(&mut self, bound: BoundSocket, workers: Workers) {
        self.metrics = Some(MetricsServer::start(bound, workers, self.running.clone()));
    }

    /// As [`add_metrics`](Self::add_metrics), once the previous process has ended.
    pub(crate) fn add_metrics_when_free(&mut self, setup: &Setup, workers: Option<Workers>) {
        if let (Some(address), Some(workers)) = (setup.server.metrics.clone(), workers) {
            self.metrics =
                Some(MetricsServer::start_when_free(address, workers, self.running.clone()));
        }
    }

    /// Sets the loop on which the configuration is read again on request.
    pub(crate) fn add_reloads(&mut self, workers: Option<Workers>) {
        self.reloads = workers;
    }

    /// The loops.
    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// The disks, in the order in which they were opened.
    pub(crate) fn disks(&self) -> Vec<Arc<RunningDisk>> {
        self.running.disks().all()
    }

    /// The server of NBD clients.
    pub(crate) fn server(&self) -> &Server {
        self.running.exports().server()
    }

    /// Reads the files of TLS again.
    pub(crate) fn reload_tls(&self) {
        self.running.exports().reload_tls();
    }

    /// The listening sockets of NBD clients, in the order in which they were first served.
    pub(crate) fn sockets(&self) -> Vec<Arc<ServedSocket>> {
        self.running.exports().sockets()
    }

    /// The exports at a socket. Their `image` is the index of the disk in [`disks`](Self::disks).
    pub(crate) fn exports_at(&self, socket: &ServedSocket) -> Vec<Offer> {
        let disks = self.disks();
        let place = |name: &str| disks.iter().position(|disk| disk.name() == name);
        let exports = self.running.exports().exports_at(socket).into_iter();
        let offer = |(name, export): (String, RunningExport)| {
            Some(Offer { name, image: place(&export.disk)?, options: export.options })
        };
        exports.filter_map(offer).collect()
    }

    /// The control socket.
    pub(crate) fn control(&self) -> Option<&Control> {
        self.control.as_ref()
    }

    /// The vhost-user-blk devices, in the order in which they were added.
    pub(crate) fn devices(&self) -> Vec<Arc<RunningDevice>> {
        self.running.exports().devices()
    }

    /// The running disks and exports.
    pub(crate) fn running(&self) -> &Running {
        &self.running
    }

    /// Begins work that no request asks for on a loop. The main thread calls this, and closes the
    /// gate only during an upgrade and at the end.
    fn do_own_work(&self, handle: &Handle, work: impl AsyncFnOnce(&Running) + Send + 'static) {
        let Some(inside) = Arc::clone(&self.own_work).try_enter() else { return };
        let running = Arc::clone(&self.running);
        drop(handle.spawn(move || async move {
            work(&running).await;
            drop(inside);
        }));
    }

    /// Holds off requests of the control socket and of QMP, and the server's own work, once those
    /// in progress have completed. `None` if these take longer than `time`.
    pub(crate) fn pause_control(&self, time: Duration) -> Option<Vec<Closed<'_>>> {
        let deadline = Instant::now() + time;
        let control = self.control.iter().map(Control::gate);
        let gates = control.chain(self.monitor.iter().map(|monitor| monitor.gate()));
        let gates = gates.chain([&*self.own_work]);
        gates.map(|gate| pause(gate, deadline)).collect()
    }

    /// Ends without touching the sockets and images that another process has taken over: removes no
    /// socket file, releases no lock, closes no connection. The exit of this process does that.
    pub(crate) fn leave(mut self) {
        // The client that requested the upgrade gets its reply.
        self.control.take().into_iter().for_each(Control::leave);
        // The other process waits for the addresses of QMP and of the metrics.
        self.monitor.take().into_iter().for_each(|monitor| monitor.stop().stop());
        self.metrics.take().into_iter().for_each(MetricsServer::stop);
        std::mem::forget(self);
    }

    /// Adopts the sizes of images that became longer, notifies guests, and retries held writes.
    pub(crate) fn refresh_sizes(&self) {
        for disk in self.disks() {
            let name = disk.name().to_owned();
            self.do_own_work(self.workers.first(), async move |running| {
                // A reload may close the disk first.
                if let Err(error) = running.refresh(&name).await
                    && running.disks().find(&name).is_some()
                {
                    tracing::error!("{error:#}");
                }
            });
        }
    }

    /// Reads the configuration again, if there is one, and logs the changes.
    pub(crate) fn reload(&self) {
        let Some(path) = self.running.configuration().path().map(ToOwned::to_owned) else { return };
        let Some(workers) = &self.reloads else { return };
        self.do_own_work(workers.first(), async move |running| {
            match reload::reload(running, &path).await {
                Ok(done) => done.log(),
                Err(error) => tracing::error!("not reloaded, everything stays as it is: {error:#}"),
            }
        });
    }

    /// A line with the address of each export, for when everything listens; with engine, FUA and
    /// sandbox if `is_verbose`.
    pub fn ready_lines(&self, is_verbose: bool) -> Vec<String> {
        let report = self.workers.report();
        if report.refused.is_empty() {
            tracing::debug!("engine {report}");
        } else {
            tracing::info!("engine {report}");
        }
        let exports = self.running.exports().list();
        let line = |export: &RunningExport| {
            if is_verbose {
                let disk =
                    self.running.disks().find(&export.disk).map(|disk| Arc::clone(&disk.disk));
                let fua = disk.map(|disk| {
                    self.workers.run(move || async move { disk.capabilities().fua }).as_str()
                });
                let fua = fua.unwrap_or_default();
                let (engine, sandbox) = (report.engine, self.running.sandbox());
                format!("ready {} engine={engine} fua={fua} sandbox={sandbox}", export.address)
            } else {
                format!("ready {}", export.address)
            }
        };
        exports.iter().map(line).collect()
    }

    /// Tells the service manager that everything listens.
    pub fn notify_ready(&self) {
        let count = |number: usize, one: &str, more: &str| match number {
            1 => format!("1 {one}"),
            _ => format!("{number} {more}"),
        };
        let disks = count(self.running.disks().all().len(), "disk", "disks");
        let addresses = count(self.running.exports().list().len(), "address", "addresses");
        let engine = self.workers.report().engine;
        let status = format!("serving {disks} at {addresses} by {engine}");
        service_manager::tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
    }

    /// The URI of the first export, if that is an NBD export.
    pub fn first_uri(&self) -> Option<NbdUri> {
        match self.running.exports().list().into_iter().next()?.address {
            ExportAddress::Nbd(uri) => Some(uri),
            ExportAddress::VhostUser(_) | ExportAddress::Ublk(_) => None,
        }
    }

    /// Stops accepting, completes what is in flight, and flushes. Requests whose storage does not
    /// answer are dropped.
    pub(crate) fn end(self) -> Result<()> {
        let Self { workers, running, control, monitor, metrics, reloads, own_work } = self;
        let own_work = pause(&own_work, Instant::now() + MAX_OWN_WORK).map(Closed::seal);
        // The metrics server holds the disks, so it ends first.
        metrics.into_iter().for_each(MetricsServer::stop);
        // Requests that the limits delay are admitted, so that the end does not wait for the
        // limits.
        let disks = running.disks().all();
        let _lifted: Vec<_> = disks.iter().map(|disk| disk.disk.throttle().lift()).collect();
        // The end does not wait for space on the host either.
        disks.iter().for_each(|disk| disk.disk.hold().end());
        // Jobs stop while the workers still run, because jobs may wait for their operations. They
        // stop first, because requests may wait for jobs.
        let jobs = running.jobs().stop();
        let handle = workers.first().clone();
        let finished =
            Finishing { running: Arc::clone(&running), handle, control, monitor }.finish();
        let (disks, is_finished) = (running.disks().all(), finished.is_some());
        let (are_closed, outcome) = workers.run(move || close_all(disks, is_finished));
        let asked = finished.map(|finished| finished.asked).unwrap_or_default();
        let loops = [jobs, reloads].into_iter().flatten().chain(asked).chain([workers]);
        if !(is_finished && are_closed && own_work.is_some()) {
            tracing::warn!(
                "ends beside what does not: requests, clients, or what the control socket was asked for"
            );
            // A request in flight on a loop may never complete.
            loops.for_each(std::mem::forget);
            return outcome;
        }
        drop(running);
        // The loops stop after the last flush: a disk may have connections on the loop that opened
        // or moved it.
        loops.for_each(Workers::stop);
        outcome
    }
}

/// Closes a gate when no request runs; `None` if one runs at every attempt up to `deadline`.
fn pause(gate: &Gate, deadline: Instant) -> Option<Closed<'_>> {
    loop {
        if let Some(closed) = gate.try_close() {
            return Some(closed);
        }
        if Instant::now() >= deadline {
            return None;
        }
        sleep(CONTROL_RETRY);
    }
}

/// Lists the disks that were opened, and applies their limits.
fn adopt_all(running: &Running, disks: Vec<OpenedDisk>) -> Result<Vec<Arc<RunningDisk>>> {
    let adopt = |OpenedDisk { setup, disk, earlier }| {
        let moved = earlier.as_ref().and_then(|earlier: &EarlierLife| earlier.moved.clone());
        (running.adopt(setup, disk, moved), earlier)
    };
    let adopted: Vec<_> = disks.into_iter().map(adopt).collect();
    for (disk, earlier) in &adopted {
        match earlier {
            None => running.disks().limit(disk, &disk.setup.limits)?,
            Some(earlier) => {
                running.disks().limit_as_before(disk, &earlier.limits)?;
                watch_use(running, disk, earlier.write_threshold);
            }
        }
    }
    Ok(adopted.into_iter().map(|(disk, _)| disk).collect())
}

impl Observed for Running {
    fn samples(&self) -> LocalBoxFuture<'_, Vec<Samples>> {
        self.gathered().boxed_local()
    }

    fn jobs(&self) -> serde_json::Value {
        serde_json::json!(listed_jobs(self))
    }

    fn subscribe(&self) -> Subscription {
        self.events().subscribe()
    }
}
