//! The serving side of the control socket.
//!
//! It has a loop of its own, so that counting an image's clusters keeps no guest's read waiting. No client can
//! take more than [`MAX_CLIENTS`] times [`MAX_LINE`] bytes and an answer each. What was begun is
//! finished before the server ends, or is handed over.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockhouse_disk::{ImageDisk, Pause};
use blockhouse_engine::{EngineChoice, FixedFiles, IoPoll, Listener, Stream, Submission, sleep};
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{BoundSocket, SocketFile};
use futures_channel::oneshot;
use futures_util::future::{Either, FutureExt, LocalBoxFuture, Shared, select};
use futures_util::stream::{FuturesUnordered, StreamExt, unfold};
use serde_json::Value;

use super::gate::{Closed, Gate};
use super::line_stream::{Frame, LineStream};
use super::{
    CreateReply, Listed, MAX_LINE, PauseReply, RenameArgs, Reply, Request, SnapshotArgs,
    UpgradeArgs,
};
use crate::hand_over::requests::UpgradeRequests;
use crate::workers::{LoopOptions, Workers};

/// Connections at the same time; further ones are refused.
const MAX_CLIENTS: usize = 16;
/// The delay after a connection could not be accepted.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// A control socket that is served.
pub struct Control {
    workers: Workers,
    stop: oneshot::Sender<()>,
    over: Submission<()>,
    listener: Listener,
    address: Address,
    /// Removed at the end.
    file: Option<SocketFile>,
    gate: Arc<Gate>,
}

/// What requests are about.
struct Served {
    images: Vec<ServedImage>,
    upgrades: UpgradeRequests,
    gate: Arc<Gate>,
}

/// An image and its canonical path.
struct ServedImage {
    path: PathBuf,
    disk: Arc<ImageDisk>,
}

impl Control {
    /// Answers at a socket what is asked of the images.
    ///
    /// # Errors
    /// When no thread can be had for it, or an image's path is gone.
    pub fn start(
        bound: BoundSocket,
        engine: EngineChoice,
        images: &[impl AsRef<Path>],
        disks: &[Arc<ImageDisk>],
        upgrades: UpgradeRequests,
    ) -> Result<Self> {
        let listener = Listener::new(bound.socket).context("cannot use the control socket")?;
        let served = |(path, disk): (&_, &Arc<ImageDisk>)| {
            let path = AsRef::<Path>::as_ref(path);
            let path = match disk.file() {
                Some(_) => path.canonicalize().with_context(|| format!("{}", path.display()))?,
                None => path.to_owned(),
            };
            Ok(ServedImage { path, disk: Arc::clone(disk) })
        };
        let images = images.iter().zip(disks).map(served).collect::<Result<Vec<_>>>()?;
        let (polling, fixed_files, io_poll) = (Duration::ZERO, FixedFiles::Off, IoPoll::Off);
        let workers = Workers::start(1, LoopOptions { engine, polling, fixed_files, io_poll })?;
        let (stop, stopped) = oneshot::channel();
        let gate = Arc::new(Gate::default());
        let served = Served { images, upgrades, gate: Arc::clone(&gate) };
        let accepting = listener.clone();
        let over = workers.first().spawn(move || serve(accepting, served, stopped.shared()));
        let BoundSocket { address, file, .. } = bound;
        Ok(Self { workers, stop, over, listener, address, file, gate })
    }

    /// The socket.
    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Its file, if this process is to remove that.
    pub fn file(&self) -> Option<&SocketFile> {
        self.file.as_ref()
    }

    /// Holds requests off, but for upgrades, if none is carried out now.
    pub fn try_pause(&self) -> Option<Closed<'_>> {
        self.gate.try_close()
    }

    /// Takes no more requests, finishes those that were begun, and ends.
    pub fn stop(mut self) {
        // While it still listens: see `SocketFile`.
        self.file = None;
        self.finish();
    }

    /// As [`stop`](Self::stop), where another process goes on with the socket and its file.
    pub fn leave(mut self) {
        std::mem::forget(self.file.take());
        self.finish();
    }

    fn finish(self) {
        // It may have ended already.
        let _ = self.stop.send(());
        let _ = self.over.wait();
        self.workers.stop();
    }
}

type Stopped = Shared<oneshot::Receiver<()>>;

/// Accepts and answers until the server ends.
async fn serve(listener: Listener, served: Served, stopped: Stopped) {
    let accepted = unfold(listener, |listener| async move {
        let accepted = listener.accept().await;
        if accepted.is_err() {
            sleep(RETRY_DELAY).await;
        }
        Some((accepted, listener))
    });
    let mut accepted = pin!(accepted.fuse());
    let mut clients: FuturesUnordered<LocalBoxFuture<'_, ()>> = FuturesUnordered::new();
    let mut ending = stopped.clone();
    loop {
        futures_util::select! {
            _ = ending => break,
            () = clients.select_next_some() => {}
            connection = accepted.select_next_some() => match connection {
                Ok(stream) if clients.len() < MAX_CLIENTS => {
                    clients.push(serve_client(&served, stream, stopped.clone()).boxed_local());
                }
                Ok(stream) => drop(stream),
                Err(error) => tracing::warn!("cannot accept a control connection: {error}"),
            },
        }
    }
    while clients.next().await.is_some() {}
}

/// Answers one client until it or the server ends.
async fn serve_client(served: &Served, stream: Stream, mut stopped: Stopped) {
    let mut lines = LineStream::new(stream);
    loop {
        let line = match select(&mut stopped, pin!(lines.next())).await {
            Either::Left(_) => return,
            Either::Right((line, _)) => line,
        };
        let (reply, is_last) = match line {
            // A client that is gone needs no answer.
            Err(_) | Ok(None) => return,
            Ok(Some(Frame::TooLong)) => {
                (error(format!("a request has more than {MAX_LINE} bytes")), true)
            }
            Ok(Some(Frame::Whole(line))) => (answer(served, &line).await, false),
        };
        let text = serde_json::to_vec(&reply).expect("values are JSON");
        if lines.send(&text).await.is_err() || is_last {
            return;
        }
    }
}

fn error(desc: String) -> Reply {
    Reply::Error { desc }
}

async fn answer(served: &Served, line: &[u8]) -> Reply {
    let outcome = match serde_json::from_slice(line) {
        Ok(Request::Upgrade(UpgradeArgs { binary })) => upgrade(served, binary).await,
        Ok(request) => match served.gate.enter().await {
            Some(_inside) => execute(&served.images, request).await,
            None => Err(anyhow::anyhow!("another process serves now: ask again")),
        },
        Err(why) => Err(anyhow::anyhow!("cannot understand the request: {why}")),
    };
    match outcome {
        Ok(value) => Reply::Return(value),
        Err(why) => error(format!("{why:#}")),
    }
}

/// Waits until another process goes on, or cannot.
async fn upgrade(served: &Served, binary: Option<PathBuf>) -> Result<Value> {
    match served.upgrades.ask(binary).await {
        Ok(Ok(reply)) => Ok(serde_json::to_value(reply)?),
        Ok(Err(why)) => bail!(why),
        Err(_) => bail!("the server ends"),
    }
}

async fn execute(images: &[ServedImage], request: Request) -> Result<Value> {
    let ServedImage { path, disk } = find(images, request.image())?;
    let image = path.display();
    let done = |pause: Pause, what: String| {
        tracing::info!("{image}: {what}; changes were held off for {:?}", pause.length);
        pause.length.as_micros().try_into().unwrap_or(u64::MAX)
    };
    Ok(match request {
        Request::Upgrade(_) => bail!("an upgrade is of the server as a whole"),
        Request::List(_) => {
            let snapshots = disk.snapshots().list().await?;
            serde_json::to_value(snapshots.iter().map(Listed::from).collect::<Vec<_>>())?
        }
        Request::Create(SnapshotArgs { name, .. }) => {
            let (snapshot, pause) = disk.snapshots().create(&name).await?;
            let pause_us = done(pause, format!("took the snapshot {name:?}"));
            serde_json::to_value(CreateReply { id: snapshot.id, pause_us })?
        }
        Request::Apply(SnapshotArgs { name, .. }) => bail!(
            "{image}: is being served, and its bytes must not change while guests use them; stop the \
             server, then apply {name:?}"
        ),
        Request::Delete(SnapshotArgs { name, .. }) => {
            let pause = disk.snapshots().delete(&name).await?;
            let pause_us = done(pause, format!("deleted the snapshot {name:?}"));
            serde_json::to_value(PauseReply { pause_us })?
        }
        Request::Rename(RenameArgs { name, new_name, .. }) => {
            let pause = disk.snapshots().rename(&name, &new_name).await?;
            let pause_us = done(pause, format!("the snapshot {name:?} is {new_name:?} now"));
            serde_json::to_value(PauseReply { pause_us })?
        }
    })
}

/// The image that is meant.
fn find<'a>(images: &'a [ServedImage], wanted: Option<&Path>) -> Result<&'a ServedImage> {
    let names = || {
        let paths = images.iter().map(|image| image.path.display().to_string());
        paths.collect::<Vec<_>>().join(", ")
    };
    match (wanted, images) {
        (None, [only]) => Ok(only),
        (None, _) => bail!("several images are served; say which: {}", names()),
        (Some(path), _) => {
            let found = images.iter().find(|image| image.path == path);
            found.with_context(|| {
                format!("{}: is not served here; these are: {}", path.display(), names())
            })
        }
    }
}
