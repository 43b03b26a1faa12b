//! The process that serves: its start, its signals, and its orderly end.
//!
//! SIGTERM and SIGINT stop the server; a second one, a second or more later, quits at once. SIGHUP
//! adopts the new sizes of images that have grown, and reads the configuration and the files of TLS
//! again; it stops a server whose setup has `ends_at_hangup`. SIGUSR2 hands over to another
//! process.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use blockhouse_config::control_socket::ControlSocket;
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::setup::{Setup, WrongUsage};
use blockhouse_disk::ImageDisk;
use blockhouse_engine::{keep_descriptors_from_children, raise_descriptor_limit};
use blockhouse_images::StateUse;
use blockhouse_nbd::BoundSocket;
use blockhouse_nbd::uri::Address;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::control::upgrades::{EncryptedClients, REQUESTED, UpgradeRequest, UpgradeRequests};
use crate::control::{MonitorProtocol, UpgradeReply};
use crate::endpoints::sockets::{self, ListenSocket};
use crate::endpoints::tls::Tls;
use crate::endpoints::ublk::{self, UblkOfDisk};
use crate::endpoints::vhost_user::{self, DeviceOfDisk};
use crate::hand_over::destination::{self, TakenOver};
use crate::hand_over::source::{self, HandedOver, Outcome};
use crate::launcher::{LaunchRules, Launcher};
use crate::metrics::{self, StartTime};
use crate::process::kept_sockets;
use crate::process::pid_file::PidFile;
use crate::process::service_manager;
use crate::process::stop_request::StopRequest;
use crate::process::watchdog::{self, Started};
use crate::process::workers::Workers;
use crate::running::OpenedDisk;
use crate::running::io_poll;
use crate::running::open::{open_all, state_use};
use crate::sandbox::{self, FileRules, SandboxReport};
use crate::server::stopper::Stopper;
use crate::server::warnings;
use crate::service::Service;

/// Serves until a signal asks for the end, or another process takes over. `ready` is called when
/// everything listens, except after a takeover, because the previous process has announced the
/// exports.
///
/// # Errors
/// The reason why it cannot start, or did not end in order. [`WrongUsage`] where `setup`
/// contradicts what the service manager passed.
pub fn run(
    setup: &Setup,
    protocol: &dyn MonitorProtocol,
    ready: impl FnOnce(&Service),
) -> Result<()> {
    // The handlers are installed before any thread starts, so that no signal is missed.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR2, REQUESTED])
        .context("cannot watch for signals")?;
    // With a handler, a write beyond the limit on file sizes fails with EFBIG and does not kill the
    // process.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).context("cannot watch for signals")?;
    if let Err(error) = raise_descriptor_limit() {
        tracing::warn!("cannot raise the limit on open files: {error}");
    }
    if let Err(error) = keep_descriptors_from_children() {
        tracing::debug!("the launcher inherits what this process has inherited: {error}");
    }
    let launcher = Launcher::start();
    service_manager::prepare();
    let upgrades = UpgradeRequests::default();
    let (service, pid_file) = begin(setup, protocol, &launcher, &upgrades, ready)?;
    let stopper = match Stopper::start(signals.handle()) {
        Ok(stopper) => stopper,
        Err(error) => {
            // The first error is returned.
            let _ = service.end();
            return Err(error);
        }
    };
    loop {
        match signals.forever().next() {
            Some(SIGHUP) if !setup.ends_at_hangup => {
                service.reload_tls();
                service.refresh_sizes();
                service.reload();
            }
            Some(by @ (SIGUSR2 | REQUESTED)) => match upgrade(&service, &launcher, &upgrades, by) {
                Upgrade::GoesOn => {}
                Upgrade::Done => {
                    // A stop signal that came meanwhile is passed to the process that serves now.
                    let stops =
                        signals.pending().filter(|signal| [SIGTERM, SIGINT].contains(signal));
                    stops.for_each(|signal| launcher.signal(signal));
                    service.leave();
                    pid_file.into_iter().for_each(PidFile::leave);
                    return Ok(());
                }
                Upgrade::Lost(error) => {
                    // The service is not dropped, because dropping it would access images that may
                    // belong to another process.
                    std::mem::forget(service);
                    return Err(error);
                }
            },
            _ => break,
        }
    }
    let request = StopRequest::at(Instant::now());
    tracing::debug!("finishing what is in flight");
    // The thread was started early, because at a limit on threads none might be available now.
    stopper.stop(service);
    let mut stops =
        signals.forever().filter(|signal| ![SIGHUP, SIGUSR2, REQUESTED].contains(signal));
    if stops.any(|_| !request.is_repeated_at(Instant::now())) {
        bail!("quit at once on a second signal; what was in flight may be lost");
    }
    stopper.outcome().context("the server ended badly")?
}

/// Starts to serve or takes over, and announces it: to the user, in the pid file, to the service
/// manager.
fn begin(
    setup: &Setup,
    protocol: &dyn MonitorProtocol,
    launcher: &Launcher,
    upgrades: &UpgradeRequests,
    ready: impl FnOnce(&Service),
) -> Result<(Service, Option<PidFile>)> {
    if setup.hand_over {
        // The process was executed by a descriptor, so its name would be the descriptor's number.
        let _ = rustix::thread::set_name(c"blockhouse");
        let (service, pid_file) = take_over(setup, protocol, launcher, upgrades)?;
        watchdog::start(service.workers().handles(), Started::Before);
        return Ok((service, pid_file));
    }
    warnings::about(setup).iter().for_each(|warning| tracing::warn!("{warning}"));
    let (service, pid_file) = start(setup, protocol, launcher, upgrades)?;
    watchdog::start(service.workers().handles(), Started::Here);
    ready(&service);
    Ok((service, pid_file))
}

fn write_pid(setup: &Setup) -> Result<Option<PidFile>> {
    setup.server.pid_file.as_deref().map(PidFile::write).transpose()
}

/// Writes the pid file of a storage daemon, after its first commands.
fn write_pid_of_daemon(setup: &Setup) -> Result<Option<PidFile>> {
    if setup.storage_daemon.is_some() { write_pid(setup) } else { Ok(None) }
}

/// The event loops that serve no guests. They start before the sandbox forbids the creation of
/// rings.
struct LoopsAside {
    control: Option<Workers>,
    jobs: Option<Workers>,
    metrics: Option<Workers>,
    qmp: Option<Workers>,
    reloads: Option<Workers>,
}

impl LoopsAside {
    fn start(setup: &Setup) -> Result<Self> {
        let start = |is_wanted: bool| {
            is_wanted.then(|| Workers::start_aside(setup.server.engine)).transpose()
        };
        let has_prefetch = setup.disks.iter().any(|disk| disk.prefetch.is_some());
        // A request, or a configuration that is read again, may start jobs later.
        let is_asked = setup.server.control.is_some() || setup.has_qmp();
        let has_jobs = has_prefetch || is_asked || setup.config.is_some();
        Ok(Self {
            control: start(setup.server.control.is_some())?,
            jobs: start(has_jobs)?,
            metrics: start(setup.server.metrics.is_some())?,
            qmp: start(setup.has_qmp())?,
            reloads: start(setup.config.is_some())?,
        })
    }
}

/// Disks that are open, and not served yet.
struct Opened {
    workers: Workers,
    disks: Vec<OpenedDisk>,
    /// The configured disks; `None`: the disks that are going to be served.
    configured: Option<Vec<DiskConfig>>,
    sockets: Vec<ListenSocket>,
    devices: Vec<DeviceOfDisk>,
    ublk: Vec<UblkOfDisk>,
    control: Option<BoundSocket>,
    tls: Option<Tls>,
    /// The time at which the counters started.
    since: StartTime,
    /// The rules about files that apply since before the disks were opened.
    rules_of_writing: Option<FileRules>,
}

impl Opened {
    /// Confines the process. `others` are further sockets that are bound already.
    fn confine(
        &self,
        setup: &Setup,
        launcher: &Launcher,
        others: &[BoundSocket],
    ) -> Result<SandboxReport> {
        let bound = self.sockets.iter().map(|socket| &socket.bound);
        let bound = bound.chain(self.devices.iter().map(|(device, _)| &device.bound));
        let opened = sandbox::Opened {
            devices: self.devices.len(),
            sockets: sandbox::socket_files(bound.chain(&self.control).chain(others)),
            rules_of_writing: self.rules_of_writing.clone(),
        };
        let sandbox = sandbox::enter(setup, &self.workers, &opened)?;
        launcher.tell(launch_rules(setup, &sandbox));
        Ok(sandbox)
    }

    /// Serves everything except metrics and QMP.
    fn serve(
        self,
        setup: &Setup,
        sandbox: SandboxReport,
        loops: LoopsAside,
        upgrades: &UpgradeRequests,
    ) -> Result<Service> {
        let Self {
            workers, disks, configured, sockets, devices, ublk, control, tls, since, ..
        } = self;
        let mut service = Service::start(workers, disks, sockets, setup, (tls, sandbox), since)?;
        service.add_devices(devices)?;
        match service.add_ublk(ublk) {
            // After a takeover, everything else is served even if a device fails.
            Err(error) if setup.hand_over => tracing::error!("{error:#}"),
            outcome => outcome?,
        }
        match configured {
            Some(configured) => service.running().set_configured(configured),
            None => service.running().set_all_configured(),
        }
        service.add_jobs(loops.jobs);
        service.add_reloads(loops.reloads);
        // The control socket comes last: a reload before the configuration is known would close no
        // disk.
        if let (Some(socket), Some(own)) = (control, loops.control) {
            let answers = setup.server.control.as_ref().map(|control| control.answers.clone());
            service.add_control(socket, answers.unwrap_or_default(), own, upgrades.clone())?;
        }
        Ok(service)
    }
}

/// Starts to serve.
fn start(
    setup: &Setup,
    protocol: &dyn MonitorProtocol,
    launcher: &Launcher,
    upgrades: &UpgradeRequests,
) -> Result<(Service, Option<PidFile>)> {
    let passed = sockets::from_systemd()?;
    let workers = Workers::start(setup.server.workers.into(), setup.loops())?;
    if setup.server.io_poll {
        io_poll::check(workers.report(), &setup.disks)?;
    }
    ublk::check(setup, &workers)?;
    let tls = setup.tls.as_ref().map(Tls::load).transpose()?;
    // Sockets are bound before images are opened: if an address is in use, no new image must have
    // been made.
    let sockets = listen(setup, passed)?;
    let devices = vhost_user::listen(setup)?;
    let bind = |control: &ControlSocket| {
        kept_sockets::bind(&Address::Unix(control.path.clone()), control.permissions)
    };
    let control = setup.server.control.as_ref().map(bind).transpose()?;
    let mut others = protocol.bind_all(setup)?;
    let metrics = setup.server.metrics.as_ref().map(metrics::bind).transpose()?;
    let qmp_count = others.len();
    others.extend(metrics);
    kept_sockets::give_up_unused();
    let mut loops = LoopsAside::start(setup)?;
    let state = state_use(&setup.server.state, &setup.disks, setup.user.map(|ids| ids.user))?;
    let rules_of_writing = sandbox::enter_before_ceph(setup);
    let disks = open_disks(&workers, setup, &state)?;
    let ublk =
        ublk::prepare(setup, &workers, &disks).inspect_err(|_| close_all(&workers, &disks))?;
    // A storage daemon writes the pid file after its first commands.
    let pid_file = if setup.storage_daemon.is_some() { Ok(None) } else { write_pid(setup) };
    let pid_file = pid_file.inspect_err(|_| close_all(&workers, &disks))?;
    let disks = setup.disks.iter().cloned().zip(disks);
    let disks = disks.map(|(setup, disk)| OpenedDisk { setup, disk, earlier: None }).collect();
    let (configured, since) = (None, StartTime::now());
    let opened = Opened {
        workers,
        disks,
        configured,
        sockets,
        devices,
        ublk,
        control,
        tls,
        since,
        rules_of_writing,
    };
    let sandbox = opened.confine(setup, launcher, &others);
    let sandbox = sandbox.inspect_err(|_| {
        let disks: Vec<_> = opened.disks.iter().map(|disk| Arc::clone(&disk.disk)).collect();
        close_all(&opened.workers, &disks);
    })?;
    let (metrics_loop, qmp_loop) = (loops.metrics.take(), loops.qmp.take());
    let mut service = opened.serve(setup, sandbox, loops, upgrades)?;
    let metrics = others.split_off(qmp_count).pop();
    if let Some(own) = qmp_loop
        && let Err(error) = service.add_monitor(protocol, setup, others, own)
    {
        // The first error is returned.
        let _ = service.end();
        return Err(error);
    }
    let pid_file = match write_pid_of_daemon(setup) {
        Ok(own) => own.or(pid_file),
        Err(error) => {
            let _ = service.end();
            return Err(error);
        }
    };
    if let (Some(bound), Some(own)) = (metrics, metrics_loop) {
        service.add_metrics(bound, own);
    }
    Ok((service, pid_file))
}

/// Closes disks that were never served. Failures are ignored: the caller reports the error that
/// came before.
fn close_all(workers: &Workers, disks: &[Arc<ImageDisk>]) {
    for disk in disks {
        let disk = Arc::clone(disk);
        let _ = workers.run(move || async move { disk.close().await });
    }
}

/// Opens all disks, several at a time.
///
/// # Errors
/// The error of the first disk that cannot be opened. The disks that were opened are closed again.
fn open_disks(workers: &Workers, setup: &Setup, state: &StateUse) -> Result<Vec<Arc<ImageDisk>>> {
    let (disks, state) = (setup.disks.clone(), state.clone());
    let outcomes = workers.run(move || async move { open_all(&disks, &state).await });
    let (opened, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    let opened: Vec<_> = opened.into_iter().flatten().map(Arc::new).collect();
    match failed.into_iter().find_map(Result::err) {
        None => Ok(opened),
        Some(error) => {
            close_all(workers, &opened);
            Err(error)
        }
    }
}

/// Takes over what another process serves.
fn take_over(
    setup: &Setup,
    protocol: &dyn MonitorProtocol,
    launcher: &Launcher,
    upgrades: &UpgradeRequests,
) -> Result<(Service, Option<PidFile>)> {
    // Loading the TLS files may fail, so it comes before anything is taken over.
    let tls = setup.tls.as_ref().map(Tls::load).transpose()?;
    let mut loops = LoopsAside::start(setup)?;
    let taken = destination::take_over(setup)?;
    let TakenOver { workers, disks, configured, sockets, devices, ublk, control, .. } = taken;
    sockets.iter().for_each(|socket| kept_sockets::keep(&socket.bound));
    devices.iter().for_each(|(device, _)| kept_sockets::keep(&device.bound));
    control.iter().for_each(kept_sockets::keep);
    // Clients are served even without the pid file.
    let pid_file = write_pid(setup).inspect_err(|error| tracing::warn!("{error:#}"));
    let since = taken.measured_since;
    let configured = Some(configured);
    let images: Vec<_> = disks.iter().map(|disk| Arc::clone(&disk.disk)).collect();
    // The devices' files cannot be opened after `confine`.
    let ublk = ublk::take_over(ublk, &workers, &images);
    let opened = Opened {
        workers,
        disks,
        configured,
        sockets,
        devices,
        ublk,
        control,
        tls,
        since,
        // Not needed, because the sandbox that `destination::take_over` has entered applies.
        rules_of_writing: None,
    };
    let sandbox = opened.confine(setup, launcher, &[])?;
    let (metrics_loop, qmp_loop) = (loops.metrics.take(), loops.qmp.take());
    let mut service = opened.serve(setup, sandbox, loops, upgrades)?;
    service.add_monitor_when_free(protocol, setup, qmp_loop);
    service.add_metrics_when_free(setup, metrics_loop);
    tracing::info!("took over from process {}", taken.source.unwrap_or_default());
    Ok((service, pid_file.unwrap_or_default()))
}

/// The process that serves after the requested upgrades.
enum Upgrade {
    /// This process.
    GoesOn,
    /// The process that was launched last.
    Done,
    /// No process can serve the disks.
    Lost(anyhow::Error),
}

/// Executes the requested upgrades until one succeeds. The signal `by` has asked for them.
fn upgrade(service: &Service, launcher: &Launcher, upgrades: &UpgradeRequests, by: i32) -> Upgrade {
    let mut request = upgrades.take();
    if request.is_none() && by == REQUESTED {
        // An earlier call has executed the request.
        return Upgrade::GoesOn;
    }
    loop {
        // Without a request, a signal asked for the upgrade.
        let (binary, encrypted, reply) = match request {
            Some(UpgradeRequest { binary, encrypted, reply }) => (binary, encrypted, Some(reply)),
            None => (None, EncryptedClients::Keep, None),
        };
        // The client may have disconnected.
        let answer = |text| drop(reply.map(|reply| reply.send(text)));
        match source::hand_over(service, launcher, binary, encrypted) {
            Ok(Outcome::HandedOver(HandedOver { process, gap })) => {
                tracing::info!("process {process} serves now; requests waited for {gap}");
                answer(Ok(UpgradeReply { process, gap_us: gap.length.as_micros() as u64 }));
                return Upgrade::Done;
            }
            Ok(Outcome::Lost(error)) => return Upgrade::Lost(error),
            Err(error) => {
                tracing::warn!("not upgraded, this server goes on: {error:#}");
                answer(Err(format!("not upgraded, the server goes on: {error:#}")));
            }
        }
        match upgrades.take() {
            Some(next) => request = Some(next),
            None => return Upgrade::GoesOn,
        }
    }
}

/// The rules by which the launcher of this server starts programs.
fn launch_rules(setup: &Setup, sandbox: &SandboxReport) -> LaunchRules {
    LaunchRules {
        arguments: source::arguments(),
        user: setup.user,
        programs: setup.upgrade_to.clone(),
        reach: sandbox.reach().clone(),
        capabilities: sandbox::capabilities_of_successor(setup),
    }
}

/// Listens for NBD clients: at the sockets of the service manager, of the setup, or at one named
/// after the image.
fn listen(setup: &Setup, passed: Vec<BoundSocket>) -> Result<Vec<ListenSocket>> {
    let all = || match &setup.offers {
        Some(offers) => offers.all().map_err(WrongUsage),
        None => Err(WrongUsage("the configuration serves nothing at the passed sockets".into())),
    };
    if !passed.is_empty() {
        let sockets = if setup.nbd.is_empty() {
            sockets::passed_for_all(passed, &all()?)
        } else {
            sockets::passed_for(passed, setup.nbd.clone(), setup.tls.as_ref())
        };
        return Ok(sockets.map_err(WrongUsage)?);
    }
    let has_devices = !setup.devices.is_empty() || !setup.ublk.is_empty();
    let is_filled_later = setup.config.is_some() || setup.storage_daemon.is_some();
    if setup.nbd.is_empty() && !has_devices && !is_filled_later {
        return Ok(vec![sockets::at_default(
            &setup.disks[0].path,
            setup.server.permissions(),
            all()?,
        )?]);
    }
    sockets::bind_uris(setup.nbd.clone(), setup.server.permissions(), setup.tls.as_ref())
}
