//! `blockhouse serve`: an image as an export, from the first check to the last flush.

mod arguments;
mod open;
mod service;
mod stopper;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
pub use arguments::Arguments;
use arguments::refuse;
use blockhouse_engine::{IoPoll, raise_descriptor_limit};
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{BoundSocket, bind_private};
use open::open_image;
use rustix::process::{Pid, Signal, kill_process};
pub use service::Service;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2, SIGXFSZ};
use signal_hook::iterator::Signals;
use stopper::Stopper;

use crate::control::UpgradeReply;
use crate::hand_over::destination::{self, TakenOver};
use crate::hand_over::requests::UpgradeRequests;
use crate::hand_over::source::{self, HandedOver};
use crate::io_poll;
use crate::limits;
use crate::logging;
use crate::offers::{Offer, Offers};
use crate::sockets::{self, ListenSocket};
use crate::stop_request::StopRequest;
use crate::vhost_user;
use crate::workers::Workers;

/// Runs the command.
pub fn run(arguments: Arguments, verbose: bool) -> Result<()> {
    arguments.check();
    // Before any thread starts, so that no signal is missed.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR2]).context("cannot watch for signals")?;
    // A write beyond a limit on the size of files is to fail, not to end everything.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).context("cannot watch for signals")?;
    if let Err(error) = raise_descriptor_limit() {
        tracing::warn!("cannot raise the limit on open files: {error}");
    }
    let upgrades = UpgradeRequests::default();
    let service = match arguments.hand_over {
        true => take_over(&arguments, &upgrades)?,
        false => start(&arguments, &upgrades, verbose)?,
    };
    let stopper = Stopper::start(signals.handle())?;
    loop {
        match signals.forever().next() {
            Some(SIGHUP) => service.refresh_sizes(),
            Some(SIGUSR2) => {
                if let Some(process) = upgrade(&service, &upgrades) {
                    // What came meanwhile is meant for the one that serves.
                    let stops =
                        signals.pending().filter(|signal| [SIGTERM, SIGINT].contains(signal));
                    stops.for_each(|signal| forward(process, signal));
                    service.leave();
                    return Ok(());
                }
            }
            _ => break,
        }
    }
    let request = StopRequest::at(Instant::now());
    tracing::debug!("finishing what is in flight");
    // It was there before: at a limit on threads there might be none now.
    stopper.stop(service);
    let mut stops = signals.forever().filter(|signal| ![SIGHUP, SIGUSR2].contains(signal));
    if stops.any(|_| !request.is_repeated_at(Instant::now())) {
        bail!("quit at once on a second signal; what was in flight may be lost");
    }
    stopper.outcome().context("the server ended badly")?
}

/// Starts to serve, and says so.
fn start(arguments: &Arguments, upgrades: &UpgradeRequests, verbose: bool) -> Result<Service> {
    let (offers, plan) = arguments.plan();
    let passed = sockets::from_systemd()?;
    let workers = Workers::start(arguments.workers.into(), arguments.loop_options())?;
    if arguments.io_poll == IoPoll::On {
        io_poll::check(workers.report(), &arguments.images, arguments.create)?;
    }
    // Before the image: an address in use must not leave a new image behind.
    let sockets = listen(arguments, &offers, plan, passed)?;
    let devices = vhost_user::listen(&arguments.vhost_user_blk)?;
    let control = arguments.control.as_deref().map(bind_private).transpose()?;
    let options = arguments.image_options()?;
    let open =
        |image: &PathBuf| open_image(&workers, image, arguments, options.clone()).map(Arc::new);
    let disks = arguments.images.iter().map(open).collect::<Result<Vec<_>>>()?;
    let mut service = Service::start(workers, disks, sockets, limits::limits(&arguments.limits))?;
    service.add_devices(devices, arguments.queues(), arguments.register_memory, &offers)?;
    if let Some(socket) = control {
        let upgrades = upgrades.clone();
        service.add_control(socket, arguments.engine, &arguments.images, upgrades)?;
    }
    // What was found in the images is told before anything is served, also by a server that is killed at once.
    logging::flush();
    service.report_ready(verbose);
    if arguments.nbd.is_empty() {
        service.print_hint();
    }
    Ok(service)
}

/// Goes on with what another process serves. It says nothing on standard output: that process has.
fn take_over(arguments: &Arguments, upgrades: &UpgradeRequests) -> Result<Service> {
    let source = std::os::unix::process::parent_id();
    let TakenOver { workers, disks, sockets, control } = destination::take_over(arguments)?;
    let mut service = Service::start(workers, disks, sockets, limits::limits(&arguments.limits))?;
    if let Some(socket) = control {
        let upgrades = upgrades.clone();
        service.add_control(socket, arguments.engine, &arguments.images, upgrades)?;
    }
    tracing::info!("took over from process {source}");
    Ok(service)
}

/// Carries out the upgrades that were asked for, until one succeeds. The id of the process that serves then.
fn upgrade(service: &Service, upgrades: &UpgradeRequests) -> Option<u32> {
    let mut request = upgrades.take();
    loop {
        // Without a request it was a signal that asked for it.
        let (binary, reply) =
            request.map_or((None, None), |asked| (asked.binary, Some(asked.reply)));
        let outcome = source::hand_over(service, binary);
        let answer = match &outcome {
            Ok(handed_over) => {
                let HandedOver { process, gap } = *handed_over;
                tracing::info!("process {process} serves now; requests waited for {gap:?}");
                Ok(UpgradeReply { process, gap_us: gap.as_micros() as u64 })
            }
            Err(error) => {
                tracing::warn!("not upgraded, this server goes on: {error:#}");
                Err(format!("not upgraded, the server goes on: {error:#}"))
            }
        };
        // The client may have gone.
        let _ = reply.map(|reply| reply.send(answer));
        if let Ok(HandedOver { process, .. }) = outcome {
            return Some(process);
        }
        request = Some(upgrades.take()?);
    }
}

/// Sends a signal on.
fn forward(process: u32, signal: i32) {
    let (process, signal) = (Pid::from_raw(process as i32), Signal::from_named_raw(signal));
    if let (Some(process), Some(signal)) = (process, signal) {
        // It may have ended meanwhile.
        let _ = kill_process(process, signal);
    }
}

/// Listens for NBD clients: at the sockets of the service manager, of the URIs, or at one named after the image.
fn listen(
    arguments: &Arguments,
    offers: &Offers,
    plan: Vec<(Address, Vec<Offer>)>,
    passed: Vec<BoundSocket>,
) -> Result<Vec<ListenSocket>> {
    let all = || offers.all().unwrap_or_else(|why| refuse(&why));
    if !passed.is_empty() {
        let sockets = match plan.is_empty() {
            true => sockets::passed_for_all(passed, &all()),
            false => sockets::passed_for(passed, plan),
        };
        return Ok(sockets.unwrap_or_else(|why| refuse(&why)));
    }
    if plan.is_empty() && arguments.vhost_user_blk.is_empty() {
        return Ok(vec![sockets::at_default(&arguments.images[0], all())?]);
    }
    sockets::bind_uris(plan)
}
