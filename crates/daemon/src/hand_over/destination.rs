//! The process that takes over.
//!
//! Guarantees: before it reports that it took over, it changes nothing: no image, no lock, no flag
//! of a socket, no file of a socket. After the report it is the owner, even if the source has ended
//! and does not receive the report. If it ends before the report, or the source refuses the report,
//! the source continues.
//!
//! The source may be controlled by an attacker. So the process enters its sandbox, which its own
//! command line defines, before it reads the first byte. A location in an offer is only a name: the
//! process neither opens it nor connects to it.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::offers::{ExportOptions, Offer as ExportOffer};
use blockhouse_config::setup::Setup;
use blockhouse_disk::Access;
use blockhouse_engine::{OpenFiles, Stream, peer_process};
use blockhouse_images::{HandedFile, HandedOverDisk, StateUse};
use blockhouse_nbd::uri::Security;
use blockhouse_nbd::{BACKLOG, BoundSocket, PausedSession, SocketFile};
use blockhouse_ublk::HandedOverDevice;
use blockhouse_vhost_user::{PreparedFrontend, RegisteredMemory};

use super::channel::{Channel, Frame, version};
use super::fault::{Step, reach};
use super::format::counters::Counts;
use super::format::disk::{Configured, Disk, File, Limits, MovedTo, StandsOn};
use super::format::{
    Address, Connection, Device, Frontend, Listening, Message, Offer, Socket, Ublk, Yours,
};
use super::frontends::front_end;
use crate::endpoints::sockets::ListenSocket;
use crate::endpoints::ublk::HandedOverUblk;
use crate::endpoints::vhost_user::{DeviceOfDisk, DeviceSocket, registered_memory};
use crate::metrics::StartTime;
use crate::process::stdin::take_stdin;
use crate::process::workers::Workers;
use crate::running::open::{image_options, state_use};
use crate::running::{EarlierLife, Moved, OpenedDisk};
use crate::sandbox;

/// How long the source may take to make its offer.
const OFFER_TIME: Duration = Duration::from_secs(10);

/// The maximum number of queues of a device in [`read_offer`].
const MAX_QUEUES: u16 = 4;

/// The server that was taken over.
pub struct TakenOver {
    /// The loops.
    pub workers: Workers,
    /// The disks.
    pub disks: Vec<OpenedDisk>,
    /// The disks that the source's command line or configuration asks for.
    pub configured: Vec<DiskConfig>,
    /// The listening sockets, with their connections.
    pub sockets: Vec<ListenSocket>,
    /// The sockets of devices, with their front-ends.
    pub devices: Vec<DeviceOfDisk>,
    /// The ublk devices, which belong to the source until its process has ended.
    pub ublk: Vec<HandedOverUblk>,
    /// The control socket.
    pub control: Option<BoundSocket>,
    /// The time at which the counters started.
    pub measured_since: StartTime,
    /// The process id of the source, if known.
    pub source: Option<i32>,
}

/// The source's offer, with its descriptors.
struct Offered {
    disks: Vec<OfferedDisk>,
    configured: Vec<DiskConfig>,
    sockets: Vec<Handed<Socket>>,
    devices: Vec<OfferedDevice>,
    ublk: Vec<HandedOverUblk>,
    control: Option<Handed<Listening>>,
    measured_since: StartTime,
}

/// The description of a socket, the socket, and the socket's file.
type Handed<T> = (T, OwnedFd, Option<OwnedFd>);

/// A disk that the source has open.
struct OfferedDisk {
    setup: DiskConfig,
    earlier: EarlierLife,
    is_protected: bool,
    files: Vec<HandedFile>,
    stands_on: Option<StandsOn>,
}

/// A device that the source serves.
struct OfferedDevice {
    socket: Handed<Listening>,
    disk: usize,
    access: Access,
}

impl OfferedDevice {
    fn path(&self) -> PathBuf {
        match &self.socket.0.address {
            Address::Unix(path) => PathBuf::from(OsString::from_vec(path.clone())),
            Address::Tcp { .. } => PathBuf::new(),
        }
    }
}

/// Takes over the disks and exports of the server that started this process.
///
/// # Errors
/// The reason of the failure in one line. It was sent to the source, and nothing was changed.
pub fn take_over(setup: &Setup) -> Result<TakenOver> {
    let channel = take_stdin().and_then(|socket| Channel::new(socket, version()));
    let channel = channel.context("--hand-over is for 'blockhouse upgrade' alone")?;
    let taken =
        confined(setup).and_then(|(workers, state)| prepare(&channel, setup, workers, &state));
    taken.inspect_err(|error| {
        // The source may have ended.
        let _ = channel.send(&Message::Refused { why: format!("{error:#}") }, &[], &[]);
    })
}

/// Creates everything that the sandbox forbids to create, then enters the sandbox.
fn confined(setup: &Setup) -> Result<(Workers, StateUse)> {
    let workers = Workers::start(setup.server.workers.into(), setup.loops())?;
    let state = state_use(&setup.server.state, &setup.disks, setup.user.map(|ids| ids.user))?;
    sandbox::enter_to_take_over(setup, &workers)?;
    Ok((workers, state))
}

fn prepare(
    channel: &Channel,
    setup: &Setup,
    workers: Workers,
    state: &StateUse,
) -> Result<TakenOver> {
    let frame = next(channel, Some(Instant::now() + OFFER_TIME))?;
    let Message::Offer(offer) = frame.message else { bail!("no offer came") };
    reach(Step::DestinationOffered);
    let offered = Offered::new(offer, frame.descriptors.into())?;
    if !offered.ublk.is_empty() && setup.ublk.is_empty() {
        bail!("the command line of the new server has no ublk device, and that of the old one has");
    }
    channel.send(&Message::Ready, &[], &[]).context("cannot answer the source")?;
    reach(Step::DestinationReady);
    // No deadline: the source first completes its requests and flushes.
    let Frame { message, descriptors, bytes } = next(channel, None)?;
    let Message::Yours(yours) = message else { bail!("the source does not hand over") };
    reach(Step::DestinationMay);
    offered.check(&yours)?;
    let Offered { disks, configured, sockets, devices, ublk, control, measured_since } = offered;
    let Yours { flush_failures, counts, connections, frontends } = yours;
    let opened = open_all(&workers, state, disks)?;
    let mut descriptors = descriptors.into();
    let connections = paused_sessions(&connections, &mut descriptors, &bytes, sockets.len())?;
    let frontends = prepare_all(&workers, setup, frontends, &devices, &mut descriptors)?;
    reach(Step::DestinationOpened);
    report_ownership(channel)?;
    reach(Step::DestinationTook);
    let learnt = flush_failures.into_iter().zip(counts);
    let disks = opened
        .into_iter()
        .zip(learnt)
        .map(|(disk, (failures, counts))| disk.take_over(&workers, failures, &counts));
    Ok(TakenOver {
        disks: disks.collect(),
        configured,
        sockets: sockets.into_iter().zip(connections).map(listen_socket).collect(),
        devices: devices.into_iter().zip(frontends).map(device_socket).collect(),
        ublk,
        control: control.map(listening),
        measured_since,
        source: peer_process(channel).ok().flatten(),
        workers,
    })
}

/// Reports that this process is the owner.
///
/// # Errors
/// The source refuses the report, and continues.
pub(super) fn report_ownership(channel: &Channel) -> Result<()> {
    if channel.send(&Message::Mine, &[], &[]).is_ok() {
        return Ok(());
    }
    // A source that has ended sends nothing. In that case there is no other owner.
    match channel.receive(None) {
        Ok(Some(_)) => bail!("the source goes on, because this took too long"),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// Parses and checks the messages of a source without taking anything over: for fuzz targets.
///
/// # Errors
/// The reason why the messages would be refused.
pub fn read_offer(socket: OwnedFd) -> Result<()> {
    let channel = Channel::new(socket, version())?;
    let frame = next(&channel, None)?;
    let Message::Offer(offer) = frame.message else { bail!("no offer came") };
    let offered = Offered::new(offer, frame.descriptors.into())?;
    let Frame { message, descriptors, bytes } = next(&channel, None)?;
    let Message::Yours(yours) = message else { bail!("the source does not hand over") };
    offered.check(&yours)?;
    let mut descriptors = descriptors.into();
    paused_sessions(&yours.connections, &mut descriptors, &bytes, offered.sockets.len())?;
    for record in yours.frontends.into_iter().flatten() {
        let paused = front_end(record, &mut descriptors)?;
        PreparedFrontend::new(paused, MAX_QUEUES, RegisteredMemory::Off)?;
    }
    Ok(())
}

fn listen_socket(
    (handed, connections): (Handed<Socket>, Vec<(Stream, PausedSession)>),
) -> ListenSocket {
    let (socket, descriptor, file) = handed;
    let Socket {
        address,
        has_file: _,
        needs_tls,
        exports,
        read_only,
        without_depth,
        descriptions,
        added,
    } = socket;
    let mut descriptions: BTreeMap<_, _> = descriptions.into_iter().collect();
    let offers = exports.into_iter().map(|(name, image)| {
        let access = access(read_only.contains(&name));
        let has_depth = !without_depth.contains(&name);
        let description = descriptions.remove(&name).unwrap_or_default();
        let options = ExportOptions { access, has_depth, description };
        ExportOffer { name, image, options }
    });
    ListenSocket {
        bound: bound(address, descriptor, file),
        security: if needs_tls { Security::Tls } else { Security::Plain },
        offers: offers.collect(),
        connections,
        added,
    }
}

fn device_socket(
    (OfferedDevice { socket, disk, access }, frontend): (OfferedDevice, Option<PreparedFrontend>),
) -> DeviceOfDisk {
    (DeviceSocket { bound: listening(socket), frontend, access }, disk)
}

fn access(is_read_only: bool) -> Access {
    if is_read_only { Access::ReadOnly } else { Access::ReadWrite }
}

fn listening((listening, socket, file): Handed<Listening>) -> BoundSocket {
    bound(listening.address, socket, file)
}

/// The next frame.
fn next(channel: &Channel, deadline: Option<Instant>) -> Result<Frame> {
    channel.receive(deadline)?.context("the server that has started this process has ended")
}

impl Offered {
    fn new(offer: Offer, mut descriptors: VecDeque<OwnedFd>) -> Result<Self> {
        let mut take = |is_there: bool| {
            if is_there {
                descriptors.pop_front().map(Some).context("a descriptor is missing")
            } else {
                Ok(None)
            }
        };
        let mut disks = Vec::new();
        for disk in offer.disks {
            if disk.stands_on.is_some_and(|below| below.disk >= disks.len()) {
                bail!("a disk stands on an image of one that comes later");
            }
            disks.push(OfferedDisk::new(disk, &mut take)?);
        }
        let check_disk = |disk: usize| {
            if disk < disks.len() {
                Ok(())
            } else {
                bail!("an export of a disk that is not offered")
            }
        };
        let mut sockets = Vec::new();
        for socket in offer.sockets {
            socket.exports.iter().try_for_each(|(_, disk)| check_disk(*disk))?;
            let descriptor = take(true)?.context("a descriptor is missing")?;
            let file = take(socket.has_file)?;
            sockets.push((socket, descriptor, file));
        }
        let mut listening = |listening: Listening| {
            let descriptor = take(true)?.context("a descriptor is missing")?;
            let file = take(listening.has_file)?;
            Ok::<_, anyhow::Error>((listening, descriptor, file))
        };
        let device = |Device { socket, disk, read_only }| {
            check_disk(disk)?;
            Ok(OfferedDevice { socket: listening(socket)?, disk, access: access(read_only) })
        };
        let devices = offer.devices.into_iter().map(device).collect::<Result<_>>()?;
        let ublk = |Ublk { id, disk, image }| {
            check_disk(disk)?;
            let image = String::from_utf8(image).context("the name of an image")?;
            Ok((HandedOverDevice::new(id, image)?, disk))
        };
        let ublk = offer.ublk.into_iter().map(ublk).collect::<Result<_>>()?;
        let control = offer.control.map(&mut listening).transpose()?;
        let configured = offer.configured.into_iter().map(Configured::disk);
        let configured = configured.collect::<Result<_>>()?;
        let measured_since = StartTime::from_seconds(offer.measured_since);
        Ok(Self { disks, configured, sockets, devices, ublk, control, measured_since })
    }

    /// Refuses a `Yours` whose lists do not match the offer.
    fn check(&self, yours: &Yours) -> Result<()> {
        let disks = [yours.flush_failures.len(), yours.counts.len()];
        if disks != [self.disks.len(); 2] || yours.frontends.len() != self.devices.len() {
            bail!("the source hands over something else than it offered");
        }
        Ok(())
    }
}

impl OfferedDisk {
    /// Takes the descriptors of the disk's files, in their order.
    fn new(disk: Disk, take: &mut impl FnMut(bool) -> Result<Option<OwnedFd>>) -> Result<Self> {
        let Disk {
            opened,
            moved,
            is_protected,
            limits,
            write_threshold,
            files: records,
            stands_on,
        } = disk;
        let mut files = Vec::new();
        for File { path, has_tail, has_flushed } in records {
            let file = take(true)?.context("a descriptor is missing")?;
            let (tail, flushed) = (take(has_tail)?, take(has_flushed)?);
            files.push(HandedFile { path, files: OpenFiles { file, tail, flushed } });
        }
        let earlier = EarlierLife {
            moved: moved.map(MovedTo::moved).transpose()?,
            limits: limits.map(Limits::config).transpose()?.unwrap_or_default(),
            write_threshold,
        };
        Ok(Self { setup: opened.config()?, earlier, is_protected, files, stands_on })
    }

    /// The configuration for opening the disk's image: at its present path, and only through the
    /// files that were handed over.
    fn image_setup(&self) -> DiskConfig {
        let setup =
            DiskConfig { allow_paths: Vec::new(), allow_remote: false, ..self.setup.clone() };
        match self.earlier.moved.clone() {
            None => setup,
            Some(Moved { path, format, cache }) => setup.moved_to(path, format, cache),
        }
    }
}

/// A disk that this process has opened and that the source still owns.
struct PreparedDisk {
    setup: DiskConfig,
    earlier: EarlierLife,
    is_protected: bool,
    disk: HandedOverDisk,
}

impl PreparedDisk {
    fn take_over(
        self,
        workers: &Workers,
        failures: [Option<i32>; 2],
        counts: &Counts,
    ) -> OpenedDisk {
        let Self { setup, earlier, is_protected, disk } = self;
        let disk = workers.run(move || async move { disk.take_over(failures).await });
        disk.stats().count_from(counts.earlier());
        if is_protected {
            disk.protect_unused();
        }
        OpenedDisk { setup, disk: Arc::new(disk), earlier: Some(earlier) }
    }
}

fn open_all(
    workers: &Workers,
    state: &StateUse,
    offered: Vec<OfferedDisk>,
) -> Result<Vec<PreparedDisk>> {
    let mut prepared: Vec<PreparedDisk> = Vec::with_capacity(offered.len());
    for offered in offered {
        let image = offered.image_setup();
        let options = image_options(&image, state, image.keys().read()?)?;
        let OfferedDisk { setup, earlier, is_protected, files, stands_on } = offered;
        let behind = stands_on.map(|StandsOn { disk, depth }| {
            let layer = prepared[disk].disk.layer_at(depth);
            layer.with_context(|| format!("{}: nothing is there to stand on", setup.name()))
        });
        let behind = behind.transpose()?;
        let disk = workers.run(move || async move {
            let snapshot = image.snapshot.as_deref();
            HandedOverDisk::open(&image.path, options.at_snapshot(snapshot), files, behind).await
        })?;
        prepared.push(PreparedDisk { setup, earlier, is_protected, disk });
    }
    Ok(prepared)
}

/// The connections of each socket.
fn paused_sessions(
    records: &[Connection],
    descriptors: &mut VecDeque<OwnedFd>,
    mut bytes: &[u8],
    sockets: usize,
) -> Result<Vec<Vec<(Stream, PausedSession)>>> {
    let mut connections: Vec<Vec<_>> = (0..sockets).map(|_| Vec::new()).collect();
    for record in records {
        let descriptor = descriptors.pop_front().context("a connection's descriptor is missing")?;
        let Connection { socket, is_used, received, .. } = *record;
        let received = bytes.split_off(..received as usize).context("bytes are missing")?.to_vec();
        let session = PausedSession { options: record.options(), received, is_used };
        let of_socket = connections.get_mut(socket).context("a connection of no socket")?;
        of_socket.push((Stream::new(descriptor)?, session));
    }
    Ok(connections)
}

/// The front-ends of all devices, with their memory mapped.
fn prepare_all(
    workers: &Workers,
    setup: &Setup,
    frontends: Vec<Option<Frontend>>,
    devices: &[OfferedDevice],
    descriptors: &mut VecDeque<OwnedFd>,
) -> Result<Vec<Option<PreparedFrontend>>> {
    let memory = registered_memory(workers.report(), setup);
    let mut prepared = Vec::new();
    for (record, device) in frontends.into_iter().zip(devices) {
        let paused = record.map(|record| front_end(record, descriptors)).transpose()?;
        let prepare = |paused| PreparedFrontend::new(paused, setup.server.queues(), memory);
        let cannot = || format!("{}: cannot take over the front-end", device.path().display());
        prepared.push(paused.map(prepare).transpose().with_context(cannot)?);
    }
    Ok(prepared)
}

/// A listening socket of the source; called after this process has reported that it is the owner.
fn bound(address: Address, socket: OwnedFd, file: Option<OwnedFd>) -> BoundSocket {
    let address = match address {
        Address::Tcp { host, port } => blockhouse_nbd::uri::Address::Tcp { host, port },
        Address::Unix(path) => {
            blockhouse_nbd::uri::Address::Unix(PathBuf::from(OsString::from_vec(path)))
        }
    };
    let file = match (&address, file) {
        (blockhouse_nbd::uri::Address::Unix(path), Some(file)) => {
            Some(SocketFile::adopt(path.clone(), file))
        }
        _ => None,
    };
    if matches!(address, blockhouse_nbd::uri::Address::Unix(_)) {
        // The kernel names this process to clients from now on (SO_PEERCRED), no longer the source.
        // The socket listens already, so a failure loses only that.
        let _ = rustix::net::listen(&socket, BACKLOG);
    }
    BoundSocket { socket, address, file }
}
