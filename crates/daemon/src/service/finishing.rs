//! The end of requests in flight, in bounded time.
//!
//! Accepted requests complete and are answered. A request whose storage does not answer cannot
//! complete: the server waits for it for a limited time, and then closes the other disks. The disk
//! of such a request is flushed, so that all acknowledged changes are durable, but not closed,
//! because requests in flight may still change it. So the image looks as after a kill.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use blockhouse_engine::{Handle, timeout};
use futures_util::future::join_all;
use parking_lot::Mutex;

use crate::control::{Control, Monitor};
use crate::process::workers::Workers;
use crate::running::{Running, RunningDisk};

/// The maximum time without a completed request while requests are in flight. After that time these
/// are dropped.
const MAX_STUCK: Duration = Duration::from_secs(10);
/// The interval of the checks whether a request has completed.
const LOOK: Duration = Duration::from_millis(250);
/// How long the last flush of a disk may take.
const MAX_CLOSE: Duration = Duration::from_secs(60);
/// The maximum time for the flush of a disk whose storage seems not to answer.
const MAX_FLUSH: Duration = Duration::from_secs(15);

/// A part of the server that has requests in flight.
pub(crate) struct Finishing {
    /// The server's disks and exports.
    pub(crate) running: Arc<Running>,
    /// The loop on which the server waits for the end of its clients.
    pub(crate) handle: Handle,
    /// The control socket.
    pub(crate) control: Option<Control>,
    /// The monitor.
    pub(crate) monitor: Option<Box<dyn Monitor>>,
}

/// The server after the end of its loops.
pub(crate) struct Finished {
    /// The loops of the control socket and of the monitor, on which disks may have connections.
    pub(crate) asked: Vec<Workers>,
}

impl Finishing {
    /// Accepts nothing more, and completes the requests in flight. `None` if they do not complete.
    pub(crate) fn finish(self) -> Option<Finished> {
        let (running, finishing) = (Arc::clone(&self.running), Arc::new(Mutex::new(Some(self))));
        let (sender, finished) = channel();
        let begun = Arc::clone(&finishing);
        let work = move || {
            let finished = begun.lock().take().map(Self::complete);
            // The receiver may have been dropped.
            let _ = sender.send(finished);
        };
        let thread = std::thread::Builder::new().name("blockhouse-finish".into()).spawn(work);
        if thread.is_err() {
            // If no thread can be started, the work runs here, without a time limit.
            return finishing.lock().take().map(Self::complete);
        }
        let (mut last, mut since) = (Progress::of(&running), Instant::now());
        loop {
            match finished.recv_timeout(LOOK) {
                Ok(finished) => return finished,
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = Progress::of(&running);
            if now != last {
                (last, since) = (now, Instant::now());
            }
            let patience = match now.in_flight {
                // Clients are receiving their replies, or something is being opened.
                0 => running.exports().server().drain_time() + MAX_STUCK,
                _ => MAX_STUCK,
            };
            if since.elapsed() >= patience {
                return None;
            }
        }
    }

    fn complete(self) -> Finished {
        let Self { running, handle, control, monitor } = self;
        // All devices begin to stop before any of them is waited for.
        let mut devices = running.exports().begin_stop_devices();
        // The files are removed while the sockets still listen: see `SocketFile`.
        running.exports().forget_sockets();
        let draining = running.exports().server().clone();
        draining.begin_drain();
        let control = control.map(Control::stop);
        let asked = control.into_iter().chain(monitor.map(Monitor::stop)).collect();
        // A request in progress may have added an export until here.
        devices.extend(running.exports().begin_stop_devices());
        running.exports().forget_sockets();
        devices.into_iter().for_each(|device| device.stop());
        running.exports().stop_ublk();
        let drained = handle.spawn(move || async move { draining.drain().await });
        // The loop runs until all has ended.
        let _ = drained.wait();
        Finished { asked }
    }
}

/// How many requests of all disks have completed, and how many have not.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Progress {
    completed: u64,
    in_flight: u64,
}

impl Progress {
    fn of(running: &Running) -> Self {
        let mut progress = Self { completed: 0, in_flight: 0 };
        for disk in running.disks().all() {
            let stats = disk.disk.stats().counters();
            let changes = stats.writes + stats.zero_writes + stats.discards;
            let all = stats.reads + stats.flushes + changes;
            progress.completed += all.saturating_sub(stats.in_flight);
            progress.in_flight += stats.in_flight;
        }
        progress
    }
}

/// Makes all disks durable, concurrently, and closes those that have nothing in flight. Returns
/// whether all disks were closed, and the first error.
pub(crate) async fn close_all(
    disks: Vec<Arc<RunningDisk>>,
    is_finished: bool,
) -> (bool, Result<()>) {
    let closing = disks.iter().map(|disk| async move {
        let in_flight = disk.disk.stats().counters().in_flight;
        if is_finished || in_flight == 0 {
            close(disk).await
        } else {
            (false, give_up(disk, in_flight).await)
        }
    });
    let outcomes = join_all(closing).await;
    let are_closed = outcomes.iter().all(|(is_closed, _)| *is_closed);
    (are_closed, outcomes.into_iter().try_for_each(|(_, outcome)| outcome))
}

async fn close(disk: &RunningDisk) -> (bool, Result<()>) {
    match timeout(MAX_CLOSE, disk.disk.close()).await {
        Some(outcome) => (true, outcome.map_err(Into::into)),
        None => (false, late(disk, MAX_CLOSE)),
    }
}

/// Flushes a disk without closing it, so its image looks as after a kill.
async fn give_up(disk: &RunningDisk, in_flight: u64) -> Result<()> {
    let name = disk.name();
    let cause = match disk.disk.stats().backing_wait() {
        Some(wait) => wait.to_string(),
        None => format!("{} does not answer", disk.disk.image().image_name()),
    };
    tracing::error!("{name}: {in_flight} requests in flight are given up: {cause}");
    match timeout(MAX_FLUSH, disk.disk.flush()).await {
        Some(outcome) => outcome?,
        None => return late(disk, MAX_FLUSH),
    }
    bail!("{name}: ended with requests in flight; all that was answered is durable ({cause})")
}

fn late(disk: &RunningDisk, limit: Duration) -> Result<()> {
    bail!(
        "{}: the last flush has not ended in {limit:?}, as {} does not answer; what was answered is left as by a kill",
        disk.name(),
        disk.disk.image().image_name()
    )
}
