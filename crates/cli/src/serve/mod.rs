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
use service::Service;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use stopper::Stopper;

use crate::io_poll;
use crate::limits;
use crate::offers::{Offer, Offers};
use crate::sockets::{self, ListenSocket};
use crate::stop_request::StopRequest;
use crate::vhost_user;
use crate::workers::Workers;

/// Runs the command.
pub fn run(arguments: Arguments, verbose: bool) -> Result<()> {
    arguments.check();
    let (offers, plan) = arguments.plan();
    let passed = sockets::from_systemd()?;
    // Before any thread starts, so that no signal is missed.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot watch for signals")?;
    // A write beyond a limit on the size of files is to fail, not to end everything.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).context("cannot watch for signals")?;
    if let Err(error) = raise_descriptor_limit() {
        tracing::warn!("cannot raise the limit on open files: {error}");
    }
    let workers = Workers::start(arguments.workers.into(), arguments.loop_options())?;
    if arguments.io_poll == IoPoll::On {
        io_poll::check(workers.report(), &arguments.images, arguments.create)?;
    }
    // Before the image: an address in use must not leave a new image behind.
    let sockets = listen(&arguments, &offers, plan, passed)?;
    let devices = vhost_user::listen(&arguments.vhost_user_blk)?;
    let control = arguments.control.as_deref().map(bind_private).transpose()?;
    let open = |image: &PathBuf| open_image(&workers, image, &arguments).map(Arc::new);
    let disks = arguments.images.iter().map(open).collect::<Result<Vec<_>>>()?;
    let mut service = Service::start(workers, disks, sockets, limits::limits(&arguments.limits))?;
    service.add_devices(devices, arguments.queues(), arguments.register_memory, &offers)?;
    if let Some(socket) = control {
        service.add_control(socket, arguments.engine, &arguments.images)?;
    }
    service.report_ready(verbose);
    if arguments.nbd.is_empty() {
        service.print_hint();
    }
    let stopper = Stopper::start(signals.handle())?;
    while signals.forever().next() == Some(SIGHUP) {
        service.refresh_sizes();
    }
    let request = StopRequest::at(Instant::now());
    tracing::debug!("finishing what is in flight");
    // It was there before: at a limit on threads there might be none now.
    stopper.stop(service);
    let mut stops = signals.forever().filter(|signal| *signal != SIGHUP);
    if stops.any(|_| !request.is_repeated_at(Instant::now())) {
        bail!("quit at once on a second signal; what was in flight may be lost");
    }
    stopper.outcome().context("the server ended badly")?
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
