//! The server that hands over.
//!
//! Guarantee: [`hand_over`] returns an error only if this process still owns images and
//! connections, and continues with both. The destination process has then ended, or can no longer
//! report that it took over, so it can change nothing later. If [`hand_over`] returns without an
//! error, this process owns nothing.

use std::ffi::OsString;
use std::fmt;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blockhouse_config::offers::{ExportOptions, Offer as ExportOffer};
use blockhouse_core::{SyncMode, rare};
use blockhouse_disk::{Access, FlushedAhead, flush_ahead, is_inactive};
use blockhouse_engine::timeout;
use blockhouse_images::first_files;
use blockhouse_nbd::PausedConnection;
use blockhouse_nbd::uri::Security;
use blockhouse_vhost_user::PausedFrontend;
use futures_util::future::join_all;

use super::channel::Channel;
use super::fault::{Step, reach};
use super::format::counters::Counts;
use super::format::disk::{Configured, Disk, File, Limits, MovedTo, Opened, StandsOn};
use super::format::{
    Address, Connection, Device, Listening, Message, Offer, Socket, Ublk, VERSION, Yours,
};
use super::frontends;
use crate::control::Closed;
use crate::control::upgrades::EncryptedClients;
use crate::launcher::{Launched, Launcher};
use crate::process::service_manager;
use crate::running::{RunningDevice, RunningDisk, ServedSocket};
use crate::service::Service;

/// How long the destination may take to be ready, and to take over.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// How long clients may take for their handshakes. Other clients do not wait meanwhile.
const HANDSHAKE_TIME: Duration = Duration::from_secs(1);
/// How long clients may take to receive their last replies, and requests to complete.
const DRAIN_TIME: Duration = Duration::from_secs(2);
/// How long images may take to write and flush everything before clients wait.
const AHEAD_TIME: Duration = Duration::from_secs(60);
/// How long images may take to write and flush everything while clients wait.
const SETTLE_TIME: Duration = Duration::from_secs(2);
/// How long requests in progress at the control socket may take.
const CONTROL_TIME: Duration = Duration::from_secs(5);

/// The outcome of a hand-over after which this server ends.
pub enum Outcome {
    /// Another process serves.
    HandedOver(HandedOver),
    /// No process serves. The state of the images is unknown, so this process must not access them.
    /// The reason in one line.
    Lost(anyhow::Error),
}

/// An upgrade that succeeded.
pub struct HandedOver {
    /// The process that serves now.
    pub process: u32,
    /// How long nothing was served.
    pub gap: Gap,
}

/// The time in which nothing is served, and its parts.
#[derive(Clone, Copy, Debug)]
pub struct Gap {
    /// The whole gap.
    pub length: Duration,
    /// The time until requests in flight had completed.
    drained: Duration,
    /// The time after that, until the images were settled.
    settled: Duration,
    /// The flushes before the gap.
    ahead: FlushedAhead,
}

impl fmt::Display for Gap {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { length, drained, settled, ahead } = *self;
        let FlushedAhead { rounds, length: flushing, last } = ahead;
        let rest = length.saturating_sub(drained + settled);
        write!(
            formatter,
            "{length:?}: {drained:?} for those in flight, {settled:?} for what {rounds} flushes before it ({flushing:?}, \
             the last {last:?}) had left to write, {rest:?} for the new process"
        )
    }
}

/// The destination process and the channel to it. Dropping this kills the process and waits for its
/// end, or refuses its report if the launcher has ended.
struct Destination<'a> {
    launcher: &'a Launcher,
    launched: Launched,
    channel: Channel,
    /// Whether [`Message::Yours`] was sent as a whole. The process cannot take over before.
    has_yours: bool,
}

/// Starts another process and hands over to it everything that this one serves.
///
/// # Errors
/// The reason of the failure in one line; this server then continues.
pub fn hand_over(
    service: &Service,
    launcher: &Launcher,
    binary: Option<PathBuf>,
    encrypted: EncryptedClients,
) -> Result<Outcome> {
    if encrypted == EncryptedClients::Keep {
        check_not_encrypted(service)?;
    }
    let mut destination = Destination::start(launcher, binary.as_deref())?;
    let Some(control) = service.pause_control(CONTROL_TIME) else {
        bail!(
            "a request at the control socket, a reload, or other work on disks is still being carried out; try again when it is done"
        );
    };
    check_keys(service)?;
    check_jobs(service)?;
    check_held(service)?;
    check_backups(service)?;
    let (disks, sockets, devices) = (service.disks(), service.sockets(), service.devices());
    let (offer, descriptors) = offer_of(service, &disks, &sockets, &devices)?;
    destination.send(&Message::Offer(offer), &descriptors, &[])?;
    reach(Step::SourceOffered);
    destination.expect(Message::Ready, "get ready")?;
    let outcome = give(service, &mut destination, encrypted);
    match outcome {
        Ok(gap) => {
            reach(Step::SourceGaveUp);
            let process = destination.launched.process;
            service_manager::tell(&[sd_notify::NotifyState::MainPid(process)]);
            // Requests that wait at the control socket would change images that now belong to the
            // destination.
            control.into_iter().for_each(Closed::seal);
            destination.leave();
            Ok(Outcome::HandedOver(HandedOver { process, gap }))
        }
        Err(error) => {
            if destination.end() {
                // The destination took over before it was killed, or may still take over: the
                // images no longer belong to this process.
                return Ok(Outcome::Lost(anyhow::anyhow!(
                    "the new server took over late, or cannot be ended: {error:#}; this one ends, because it \
                     does not know what was changed: start it again if the new server does not serve"
                )));
            }
            service.server().resume();
            service.ublk_devices().iter().for_each(|device| device.server().resume());
            devices.iter().for_each(|device| device.served().server().resume());
            Err(error)
        }
    }
}

/// Refuses if a client uses TLS: the keys and sequence numbers of its connection are inside
/// OpenSSL, which cannot give them to another process.
fn check_not_encrypted(service: &Service) -> Result<()> {
    match service.server().encrypted_clients() {
        0 => Ok(()),
        count => bail!(
            "{count} clients use TLS, and an encrypted connection cannot be handed over; with --disconnect-tls ('blockhouse \
             upgrade') they are disconnected first, and may connect to the new server"
        ),
    }
}

/// Refuses if an image is encrypted: its key is not handed over, and deriving it again takes longer
/// than clients wait.
fn check_keys(service: &Service) -> Result<()> {
    let needs_key = |disk: &Arc<RunningDisk>| {
        disk.disk.image().has_encrypted_layer() || !disk.setup.keys().is_empty()
    };
    match service.disks().iter().find(|disk| needs_key(disk)) {
        None => Ok(()),
        Some(disk) => bail!(
            "the disk {:?} is encrypted, and its key is not handed over; stop this server and start the new one",
            disk.name()
        ),
    }
}

/// Refuses if a disk holds writes that got ENOSPC, because these writes could not complete while
/// clients wait.
fn check_held(service: &Service) -> Result<()> {
    let held = |disk: &Arc<RunningDisk>| disk.disk.hold().count();
    match service.disks().iter().find(|disk| held(disk) > 0) {
        None => Ok(()),
        Some(disk) => bail!(
            "{} requests of the disk {:?} wait for room on the host; make room, and upgrade when they are done",
            held(disk),
            disk.name()
        ),
    }
}

/// Refuses if a job runs, because jobs cannot be handed over. Also refuses if a commit that did not
/// complete has left a backing file open for writing.
fn check_jobs(service: &Service) -> Result<()> {
    let has_base = |disk: &Arc<RunningDisk>| disk.disk.jobs().base().is_some();
    if let Some(disk) = service.running().disks().all().into_iter().find(has_base)
        && service.running().jobs().check_free(disk.name()).is_ok()
    {
        bail!(
            "the backing file of the disk {:?} is open for writing since a commit that did not complete, and cannot be handed \
             over; commit it again and complete that, or close the disk and open it again",
            disk.name()
        );
    }
    check_layers(service)?;
    match service.running().jobs().find_running() {
        None => Ok(()),
        Some(job) => bail!(
            "the job {:?}, a {} of the disk {:?}, goes on, and cannot be handed over; complete it or cancel it first \
             ('blockhouse ctl SOCKET job {} complete', or 'cancel')",
            job.name,
            job.kind,
            job.disk,
            job.name
        ),
    }
}

/// Refuses if a fork has left a layer that could not be made durable.
fn check_layers(service: &Service) -> Result<()> {
    for disk in service.running().disks().all() {
        if disk.disk.image().has_unstable_layer() {
            bail!(
                "what the disk {:?} stands on since its fork is not durable, and cannot be handed over; stop this server and start the new one",
                disk.name()
            );
        }
    }
    Ok(())
}

/// Refuses if a backup runs: only this process knows the content of its disks at the moment of the
/// backup. An export that has got bitmaps of its own is refused, too.
fn check_backups(service: &Service) -> Result<()> {
    if let Some(backup) = service.running().backups().list().first() {
        bail!(
            "the backup {:?} goes on, and cannot be handed over; end it first ('blockhouse ctl SOCKET backup end')",
            backup.name
        );
    }
    let exports = service.running().exports().list();
    match exports.iter().find(|export| !export.added_bitmaps.is_empty()) {
        None => Ok(()),
        Some(export) => bail!(
            "{} offers bitmaps that its disk was not opened with, and cannot be handed over; remove it first ('blockhouse ctl SOCKET unexport')",
            export.address
        ),
    }
}

/// Stops serving, and hands over to the destination. Returns how long nothing was served.
fn give(
    service: &Service,
    destination: &mut Destination<'_>,
    encrypted: EncryptedClients,
) -> Result<Gap> {
    let (workers, server) = (service.workers(), service.server().clone());
    workers.run(move || async move {
        server.pause_accepting(HANDSHAKE_TIME).await;
        if encrypted == EncryptedClients::Disconnect {
            // Clients that reconnect wait in the backlog.
            server.end_encrypted_clients(DRAIN_TIME).await;
        }
    });
    // A client may have completed a TLS handshake since the first check.
    check_not_encrypted(service)?;
    let ahead = flush_disks_ahead(service)?;
    let begin = Instant::now();
    let (connections, frontends) = pause(service, begin + DRAIN_TIME)?;
    let drained = begin.elapsed();
    settle(service)?;
    let settled = begin.elapsed().saturating_sub(drained);
    reach(Step::SourceSettled);
    let mut descriptors: Vec<_> = connections.iter().map(|paused| paused.stream.as_fd()).collect();
    let sockets = service.sockets();
    let frontends = frontends.iter().map(|paused| {
        let (record, own) = frontends::record(paused.as_ref()?);
        descriptors.extend(own);
        Some(record)
    });
    let yours = Yours {
        flush_failures: service
            .disks()
            .iter()
            .map(|disk| disk.disk.image().flush_failures())
            .collect(),
        counts: service
            .disks()
            .iter()
            .map(|disk| Counts::from(&disk.disk.stats().earlier_counts()))
            .collect(),
        connections: connections
            .iter()
            .map(|paused| record(paused, &sockets))
            .collect::<Result<_>>()?,
        frontends: frontends.collect(),
    };
    let bytes: Vec<&[u8]> = connections.iter().map(|paused| &paused.session.received[..]).collect();
    destination.send(&Message::Yours(yours), &descriptors, &bytes.concat())?;
    destination.has_yours = true;
    reach(Step::SourceGave);
    destination.expect(Message::Mine, "take over")?;
    Ok(Gap { length: begin.elapsed(), drained, settled, ahead })
}

/// Writes and flushes all images while they are served, so that little is left to do during the
/// gap.
fn flush_disks_ahead(service: &Service) -> Result<FlushedAhead> {
    let disks = service.disks();
    let flushed = service.workers().run(move || async move {
        let disks: Vec<_> = disks.iter().map(|disk| &*disk.disk).collect();
        timeout(AHEAD_TIME, rare(flush_ahead(&disks, SyncMode::Data))).await
    });
    // A failure is ignored: `settle` flushes the images again and reports it.
    let ahead = flushed.map(Result::unwrap_or_default);
    ahead.with_context(|| {
        format!("a flush of the disks did not complete within {AHEAD_TIME:?}; see that their storage answers, or try again")
    })
}

/// Settles all images (writes and flushes everything) concurrently, because clients wait for the
/// slowest one.
fn settle(service: &Service) -> Result<()> {
    let disks = service.disks();
    let settled = service.workers().run(move || async move {
        let settle = |disk: &Arc<RunningDisk>| {
            let disk = Arc::clone(&disk.disk);
            async move {
                let settled = timeout(SETTLE_TIME, disk.image().settle()).await;
                let settled = settled.with_context(|| {
                    format!(
                        "{}: what was left to write did not complete within {SETTLE_TIME:?}",
                        disk.name()
                    )
                })?;
                settled.with_context(|| format!("{}: cannot be handed over", disk.name()))
            }
        };
        join_all(disks.iter().map(settle)).await
    });
    settled.into_iter().collect()
}

/// Pauses all connections and devices. Returns for each vhost-user-blk device its front-end's
/// state, if it has a front-end.
fn pause(
    service: &Service,
    deadline: Instant,
) -> Result<(Vec<PausedConnection>, Vec<Option<PausedFrontend>>)> {
    // Limits are lifted, so that the pause does not wait for requests that limits delay.
    let _lifted: Vec<_> = service.disks().iter().map(|disk| disk.disk.throttle().lift()).collect();
    // All devices pause concurrently, so that their requests in flight complete at the same time.
    let devices = service.devices();
    let devices = devices.iter().map(|device| device.served());
    let pending: Vec<_> = devices.map(|device| (device, device.server().pause(deadline))).collect();
    let server = service.server().clone();
    let connections = service.workers().run(move || async move { server.pause(DRAIN_TIME).await });
    pause_ublk(service, deadline)?;
    let connections = connections.map_err(|busy| {
        anyhow::anyhow!(
            "{} clients did not take their replies, or their requests did not complete, within \
             {DRAIN_TIME:?}: {}",
            busy.len(),
            busy.join(", ")
        )
    })?;
    let mut frontends = Vec::new();
    for (device, pending) in pending {
        let cannot = || format!("{}: the device cannot pause", device.path().display());
        frontends.push(pending.wait().with_context(cannot)?);
    }
    Ok((connections, frontends))
}

/// Pauses all ublk devices. The kernel's driver keeps requests that were not begun for the
/// destination.
fn pause_ublk(service: &Service, deadline: Instant) -> Result<()> {
    for device in service.ublk_devices() {
        let (paused, left) = (Arc::clone(&device), deadline.duration_since(Instant::now()));
        let outcome = service
            .workers()
            .run(move || async move { timeout(left, paused.server().pause()).await.is_some() });
        if !outcome {
            bail!("{:?}: its requests did not complete within {DRAIN_TIME:?}", device.server());
        }
    }
    Ok(())
}

fn record(paused: &PausedConnection, sockets: &[Arc<ServedSocket>]) -> Result<Connection> {
    let PausedConnection { socket: number, session, .. } = paused;
    let socket = sockets.iter().position(|socket| socket.number() == *number);
    Ok(Connection {
        // A socket is closed only after its connections have ended.
        socket: socket.context("a client's socket is no longer served")?,
        export: session.options.export.clone(),
        framing: session.options.framing,
        contexts: session.options.contexts.clone(),
        is_used: session.is_used,
        received: session.received.len() as u64,
    })
}

/// The disks and exports that are served, and their descriptors in the order of `format`.
///
/// # Errors
/// An image cannot be handed over.
fn offer_of<'a>(
    service: &'a Service,
    disks: &'a [Arc<RunningDisk>],
    sockets: &'a [Arc<ServedSocket>],
    devices: &'a [Arc<RunningDevice>],
) -> Result<(Offer, Vec<BorrowedFd<'a>>)> {
    let mut descriptors = Vec::new();
    let mut offered = Vec::new();
    for (index, disk) in disks.iter().enumerate() {
        let (record, own) = disk_record(disk, &disks[..index])?;
        offered.push(record);
        descriptors.extend(own);
    }
    let mut listening = Vec::new();
    for socket in sockets {
        descriptors.push(socket.listener().as_fd());
        descriptors.extend(socket.file().map(AsFd::as_fd));
        let exports = service.exports_at(socket);
        let names = |is_meant: fn(&ExportOptions) -> bool| {
            let meant = exports.iter().filter(|export| is_meant(&export.options));
            meant.map(|export| export.name.clone()).collect()
        };
        let described = exports.iter().filter(|export| !export.options.description.is_empty());
        let description =
            |export: &ExportOffer| (export.name.clone(), export.options.description.clone());
        listening.push(Socket {
            address: socket.address().into(),
            has_file: socket.file().is_some(),
            needs_tls: socket.security() == Security::Tls,
            read_only: names(|options| options.access == Access::ReadOnly),
            without_depth: names(|options| !options.has_depth),
            descriptions: described.map(description).collect(),
            added: socket.added(),
            exports: exports.into_iter().map(|export| (export.name, export.image)).collect(),
        });
    }
    let mut guests = Vec::new();
    for device in devices {
        let served = device.served();
        descriptors.push(served.server().listener());
        descriptors.extend(served.file().map(AsFd::as_fd));
        let address = Address::Unix(served.path().as_os_str().as_bytes().to_vec());
        let disk = disks.iter().position(|disk| disk.name() == device.disk());
        let disk = disk.context("a device's disk is no longer open")?;
        let socket = Listening { address, has_file: served.file().is_some() };
        let read_only = device.access() == Access::ReadOnly;
        guests.push(Device { socket, disk, read_only });
    }
    let ublk = service.ublk_devices();
    let ublk = ublk.iter().map(|device| {
        let disk = disks.iter().position(|disk| disk.name() == device.disk());
        let disk = disk.context("a block device's disk is no longer open")?;
        let server = device.server();
        Ok(Ublk { id: server.id(), disk, image: server.image().as_bytes().to_vec() })
    });
    let ublk = ublk.collect::<Result<_>>()?;
    let control = service.control().map(|control| {
        descriptors.push(control.listener().as_fd());
        descriptors.extend(control.file().map(AsFd::as_fd));
        Listening { address: control.address().into(), has_file: control.file().is_some() }
    });
    let configured = service.running().configured();
    let offer = Offer {
        disks: offered,
        configured: configured.iter().map(Configured::of).collect::<Result<_>>()?,
        sockets: listening,
        devices: guests,
        ublk,
        control,
        measured_since: service.running().measured_since().seconds(),
    };
    Ok((offer, descriptors))
}

/// The record of a disk and the descriptors of its files, without the files that it shares with
/// disks in `before`.
///
/// # Errors
/// The disk cannot be handed over.
fn disk_record<'a>(
    running: &'a RunningDisk,
    before: &[Arc<RunningDisk>],
) -> Result<(Disk, Vec<BorrowedFd<'a>>)> {
    let disk = &running.disk;
    if let Some(successor) = disk.retired_to() {
        bail!(
            "the disk {:?} was moved to {successor}, and cannot be handed over; close it first",
            running.name()
        );
    }
    if is_inactive(disk) {
        bail!(
            "the disk {:?} is inactive, and cannot be handed over; make it active, or close it first",
            running.name()
        );
    }
    if running.setup.part.is_some() || running.setup.compress {
        bail!(
            "the disk {:?} is a part of a file, or compresses writes, and cannot be handed over; close it first",
            running.name()
        );
    }
    // The open file description of a layer owns the layer's locks. If two disks had it, the first
    // to close would release the locks of both. So it is handed over once.
    let shared = (0..).zip(before).filter_map(|(place, other)| {
        let (images, depth) = disk.image().shared_with(other.disk.image())?;
        Some((images, StandsOn { disk: place, depth }))
    });
    let shared = shared.min_by_key(|(images, _)| *images);
    let (mut files, mut descriptors) = (Vec::new(), Vec::new());
    let images = shared.map_or(usize::MAX, |(images, _)| images);
    let chain = first_files(disk.image(), images).map_err(|error| {
        anyhow::anyhow!(
            "{error}; close the disk {:?} first ('blockhouse ctl SOCKET close'), or stop this server and start the new one",
            running.name()
        )
    })?;
    for (path, file) in chain {
        let open = file.open_files();
        files.push(File {
            path: path.display().to_string(),
            has_tail: open.tail.is_some(),
            has_flushed: open.flushed.is_some(),
        });
        descriptors.push(open.file);
        descriptors.extend(open.tail);
        descriptors.extend(open.flushed);
    }
    let record = Disk {
        opened: Opened::of(&running.setup_now())?,
        moved: running.moved().as_ref().map(MovedTo::from),
        is_protected: disk.access() != disk.image().access(),
        limits: Limits::of(&running.limits())?,
        write_threshold: running.write_threshold(),
        files,
        stands_on: shared.map(|(_, stands_on)| stands_on),
    };
    Ok((record, descriptors))
}

impl From<&blockhouse_nbd::uri::Address> for Address {
    fn from(address: &blockhouse_nbd::uri::Address) -> Self {
        match address {
            blockhouse_nbd::uri::Address::Unix(path) => {
                Self::Unix(path.as_os_str().as_bytes().to_vec())
            }
            blockhouse_nbd::uri::Address::Tcp { host, port } => {
                Self::Tcp { host: host.clone(), port: *port }
            }
        }
    }
}

impl<'a> Destination<'a> {
    /// Starts the destination with this process's command line.
    fn start(launcher: &'a Launcher, binary: Option<&Path>) -> Result<Self> {
        let (ours, theirs) = UnixStream::pair().context("cannot make a socket pair")?;
        let launched = launcher.launch(binary, theirs.into())?;
        let channel = Channel::new(ours.into(), VERSION).context("cannot use a socket pair")?;
        Ok(Self { launcher, launched, channel, has_yours: false })
    }

    fn send(
        &mut self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
        bytes: &[u8],
    ) -> Result<()> {
        match self.channel.send(message, descriptors, bytes) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let binary = self.launched.program.display();
                bail!("{binary}: the new server does not receive what it is sent")
            }
            // The destination's last message tells more than the error.
            Err(_) => self.expect(Message::Mine, "receive what it was sent"),
        }
    }

    /// Waits for this message.
    fn expect(&mut self, wanted: Message, what: &str) -> Result<()> {
        let received = self.channel.receive(Some(Instant::now() + ANSWER_TIME));
        let binary = self.launched.program.display();
        match received {
            Ok(Some(frame)) if frame.message == wanted => Ok(()),
            Ok(Some(frame)) => match frame.message {
                Message::Refused { why } => bail!("{binary}: the new server refuses: {why}"),
                other => {
                    bail!("{binary}: the new server answered {other:?} where it was to {what}")
                }
            },
            Ok(None) => match self.launcher.wait() {
                Ok(status) => {
                    bail!("{binary}: the new server ended before it could {what}: {status}")
                }
                Err(error) => bail!("{binary}: the new server ended: {error:#}"),
            },
            Err(error) if is_timeout(&error) => {
                bail!("{binary}: the new server did not {what} within {ANSWER_TIME:?}")
            }
            Err(error) => Err(error).with_context(|| format!("{binary}: the new server's answer")),
        }
    }

    /// Kills the process, or refuses its report if the launcher has ended. Returns whether the
    /// process had taken over before, or may still do so.
    fn end(&mut self) -> bool {
        let is_killed = self.launcher.kill().is_ok();
        if !self.has_yours {
            // Further bytes could complete a message of which a part was sent, so none are sent.
            self.channel.close();
            return false;
        }
        let has_ended = is_killed || self.channel.refuse("the source keeps what it serves").is_ok();
        loop {
            match self.channel.receive(Some(Instant::now())) {
                Ok(Some(frame)) if frame.message == Message::Mine => return true,
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return !has_ended,
            }
        }
    }

    /// Lets the process continue.
    fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for Destination<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

fn is_timeout(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::TimedOut)
}

/// The command line for the destination: this server's, with `--hand-over`.
pub fn arguments() -> Vec<OsString> {
    arguments_of(std::env::args_os().skip(1))
}

fn arguments_of(own: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<_> = own.filter(|argument| argument != HAND_OVER).collect();
    // The option comes before a possible "--".
    let command = arguments.iter().position(|argument| argument == "serve");
    arguments.insert(command.map_or(0, |command| command + 1), HAND_OVER.into());
    arguments
}

/// The hidden option of `serve`.
const HAND_OVER: &str = "--hand-over";

#[cfg(test)]
mod tests {
    use rustix::net::sockopt;

    use super::*;
    use crate::hand_over::destination::report_ownership;

    /// The time limit of a send that cannot succeed.
    const TICK: Duration = Duration::from_millis(10);

    /// Without a launcher the process is not killed: either its report came before, or it learns
    /// that the source continues.
    #[test]
    fn a_process_that_cannot_be_killed_does_not_take_over_late() {
        let launcher = Launcher::ended();
        let destination = || {
            let (ours, theirs) = UnixStream::pair().expect("a socket pair");
            let [channel, other] = [ours, theirs]
                .map(|socket| Channel::new(socket.into(), VERSION).expect("a socket"));
            let launched = Launched { process: 0, program: "/x".into() };
            (Destination { launcher: &launcher, launched, channel, has_yours: true }, other)
        };
        let (mut late, other) = destination();
        assert!(!late.end());
        assert!(report_ownership(&other).is_err());
        let (mut early, other) = destination();
        report_ownership(&other).expect("it is in time");
        assert!(early.end());
        // A process that has only a part of `Yours`, and reads nothing, cannot take over.
        let (mut stuck, other) = destination();
        stuck.has_yours = false;
        sockopt::set_socket_timeout(&stuck.channel, sockopt::Timeout::Send, Some(TICK))
            .expect("a socket");
        let long = Message::Refused { why: "a message that is longer than the buffer".into() };
        let sent = stuck.send(&long, &[], &vec![0; 16 << 20]);
        assert!(sent.is_err_and(|error| format!("{error:#}").contains("does not receive")));
        assert!(!stuck.end());
        assert!(matches!(other.receive(None), Ok(None)));
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        drop(ours);
        let orphan = Channel::new(theirs.into(), VERSION).expect("a socket");
        report_ownership(&orphan).expect("there is no other owner");
    }

    #[test]
    fn the_command_line_is_handed_over_with_one_option_more() {
        let arguments = |text: &str| {
            let own = text.split(' ').map(OsString::from);
            arguments_of(own).join(" ".as_ref()).into_string().expect("ASCII")
        };
        assert_eq!(arguments("-v serve -- -x"), "-v serve --hand-over -- -x");
        assert_eq!(
            arguments("serve --hand-over a --name serve"),
            "serve --hand-over a --name serve"
        );
    }
}
