//! The process that takes over.
//!
//! Guarantees: before it has said that it took over, it changes nothing: no image, no lock, no flag of a socket, no file of
//! a socket. From that moment on it is the owner, whether the source hears of it or is over. Where it ends before, the
//! source goes on.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blockhouse_disk::{HandedFile, HandedOverDisk, ImageDisk, open_handed_over};
use blockhouse_engine::{OpenFiles, Stream, peer_process};
use blockhouse_nbd::{BoundSocket, PausedSession, SocketFile};
use blockhouse_vhost_user::PreparedFrontend;
use rustix::fs::{Mode, OFlags};

use super::channel::{Channel, Frame, version};
use super::fault::{Step, reach};
use super::format::{
    Address, Connection, File, Frontend, Listening, Message, Offer, Socket, Yours,
};
use super::frontends::front_end;
use crate::offers::Offer as ExportOffer;
use crate::open::{image_options, state_use};
use crate::setup::Setup;
use crate::sockets::ListenSocket;
use crate::vhost_user::{DeviceSocket, registered_memory};
use crate::workers::Workers;

/// How long the source may take to make its offer.
const OFFER_TIME: Duration = Duration::from_secs(10);

/// What was taken over.
pub struct TakenOver {
    /// The loops.
    pub workers: Workers,
    /// The images.
    pub disks: Vec<Arc<ImageDisk>>,
    /// The listening sockets, with their connections.
    pub sockets: Vec<ListenSocket>,
    /// The sockets of devices, with their front-ends.
    pub devices: Vec<DeviceSocket>,
    /// The control socket.
    pub control: Option<BoundSocket>,
    /// The process that served before, where its id can be known.
    pub source: Option<i32>,
}

/// What the source offers, with its descriptors.
struct Offered {
    images: Vec<Vec<HandedFile>>,
    sockets: Vec<(Socket, OwnedFd, Option<OwnedFd>)>,
    devices: Vec<(Listening, OwnedFd, Option<OwnedFd>)>,
    control: Option<(Listening, OwnedFd, Option<OwnedFd>)>,
}

/// Takes over what the server serves that has had this process started.
///
/// # Errors
/// Why not, in one line, which the source has been told: nothing was changed.
pub fn take_over(setup: &Setup) -> Result<TakenOver> {
    let channel = channel_at_stdin().context("--hand-over is for 'blockhouse upgrade' alone")?;
    prepare(&channel, setup).inspect_err(|error| {
        // It may be over.
        let _ = channel.send(&Message::Refused { why: format!("{error:#}") }, &[], &[]);
    })
}

fn prepare(channel: &Channel, setup: &Setup) -> Result<TakenOver> {
    let frame = next(channel, Some(Instant::now() + OFFER_TIME))?;
    let Message::Offer(offer) = frame.message else { bail!("no offer came") };
    reach(Step::DestinationOffered);
    let offered = Offered::new(offer, frame.descriptors.into())?;
    if offered.images.len() != setup.disks.len() {
        bail!("other images are served than the command line names");
    }
    if offered.devices.len() != setup.devices.len() {
        bail!("other vhost-user-blk sockets are served than the command line names");
    }
    let workers = Workers::start(setup.workers, setup.loops)?;
    channel.send(&Message::Ready, &[], &[]).context("cannot answer the source")?;
    reach(Step::DestinationReady);
    // For as long as it takes: the source drains its requests, and flushes.
    let Frame { message, descriptors, bytes } = next(channel, None)?;
    let Message::Yours(yours) = message else { bail!("the source does not hand over") };
    reach(Step::DestinationMay);
    let Offered { images, sockets, devices, control } = offered;
    let Yours { flush_failures, connections, frontends } = yours;
    if flush_failures.len() != images.len() || frontends.len() != devices.len() {
        bail!("the source hands over something else than it offered");
    }
    let opened = open_all(&workers, setup, images)?;
    let mut descriptors = descriptors.into();
    let connections = paused_sessions(&connections, &mut descriptors, &bytes, sockets.len())?;
    let frontends = prepare_all(&workers, setup, frontends, &mut descriptors)?;
    reach(Step::DestinationOpened);
    // It may be over by now: then there is no other owner.
    let _ = channel.send(&Message::Mine, &[], &[]);
    reach(Step::DestinationTook);
    let take_over = |(disk, failures): (HandedOverDisk, _)| {
        Arc::new(workers.run(move || async move { disk.take_over(failures).await }))
    };
    let disks = opened.into_iter().zip(flush_failures).map(take_over).collect();
    let sockets =
        sockets.into_iter().zip(connections).map(|((socket, descriptor, file), paused)| {
            let offers = socket.exports.into_iter();
            ListenSocket {
                bound: bound(socket.address, descriptor, file),
                offers: offers.map(|(name, image)| ExportOffer { name, image }).collect(),
                connections: paused,
            }
        });
    let listening =
        |(listening, socket, file): (Listening, _, _)| bound(listening.address, socket, file);
    let device = |(socket, frontend)| DeviceSocket { bound: listening(socket), frontend };
    Ok(TakenOver {
        sockets: sockets.collect(),
        devices: devices.into_iter().zip(frontends).map(device).collect(),
        control: control.map(listening),
        source: peer_process(channel).ok().flatten(),
        workers,
        disks,
    })
}

/// The socket pair, which is standard input. What takes its place there reads as empty.
fn channel_at_stdin() -> Result<Channel> {
    let stdin = std::io::stdin();
    let socket = stdin.as_fd().try_clone_to_owned()?;
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(null)?;
    Ok(Channel::new(socket, version())?)
}

/// The next frame.
fn next(channel: &Channel, deadline: Option<Instant>) -> Result<Frame> {
    channel.receive(deadline)?.context("the server that has started this process has ended")
}

impl Offered {
    fn new(offer: Offer, mut descriptors: VecDeque<OwnedFd>) -> Result<Self> {
        let mut take = |is_there: bool| match is_there {
            true => descriptors.pop_front().map(Some).context("a descriptor is missing"),
            false => Ok(None),
        };
        let mut images = Vec::new();
        for image in offer.images {
            let mut files = Vec::new();
            for File { path, has_tail, has_flushed } in image.files {
                let file = take(true)?.context("a descriptor is missing")?;
                let (tail, flushed) = (take(has_tail)?, take(has_flushed)?);
                files.push(HandedFile { path, files: OpenFiles { file, tail, flushed } });
            }
            images.push(files);
        }
        let mut sockets = Vec::new();
        for socket in offer.sockets {
            if socket.exports.iter().any(|(_, image)| *image >= images.len()) {
                bail!("an export of an image that is not offered");
            }
            let descriptor = take(true)?.context("a descriptor is missing")?;
            let file = take(socket.has_file)?;
            sockets.push((socket, descriptor, file));
        }
        let mut listening = |listening: Listening| {
            let descriptor = take(true)?.context("a descriptor is missing")?;
            let file = take(listening.has_file)?;
            Ok::<_, anyhow::Error>((listening, descriptor, file))
        };
        let devices = offer.devices.into_iter().map(&mut listening).collect::<Result<_>>()?;
        let control = offer.control.map(listening).transpose()?;
        Ok(Self { images, sockets, devices, control })
    }
}

fn open_all(
    workers: &Workers,
    setup: &Setup,
    images: Vec<Vec<HandedFile>>,
) -> Result<Vec<HandedOverDisk>> {
    let mut disks = Vec::new();
    let state = state_use(&setup.state, &setup.disks, setup.user.map(|ids| ids.user))?;
    for (disk, files) in setup.disks.iter().zip(images) {
        let (path, options) = (disk.path.clone(), image_options(disk, &state)?);
        let snapshot = disk.snapshot.clone();
        let disk = workers.run(move || async move {
            open_handed_over(&path, options, snapshot.as_deref(), files).await
        })?;
        disks.push(disk);
    }
    Ok(disks)
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
    descriptors: &mut VecDeque<OwnedFd>,
) -> Result<Vec<Option<PreparedFrontend>>> {
    let memory = registered_memory(workers.report(), setup);
    let mut prepared = Vec::new();
    for (record, socket) in frontends.into_iter().zip(&setup.devices) {
        let paused = record.map(|record| front_end(record, descriptors)).transpose()?;
        let prepare = |paused| PreparedFrontend::new(paused, setup.queues, memory);
        let cannot = || format!("{}: cannot go on with the front-end", socket.0.display());
        prepared.push(paused.map(prepare).transpose().with_context(cannot)?);
    }
    Ok(prepared)
}

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
    BoundSocket { socket, address, file }
}
