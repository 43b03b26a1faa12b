//! The serving side of the control socket.
//!
//! The server has its own loop, so counting an image's clusters does not delay guests' reads. At
//! most [`MAX_CLIENTS`] clients each have at most two lines of [`MAX_LINE`] bytes, one answer and
//! their unread events in memory. Requests in progress complete before the server ends, or before a
//! hand-over.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockhouse_config::control_socket::Answers;
use blockhouse_engine::{Listener, Stream, Submission, sleep};
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{BoundSocket, SocketFile};
use futures_channel::oneshot;
use futures_util::future::{Either, FutureExt, LocalBoxFuture, Shared, pending, select};
use futures_util::stream::{self, FuturesUnordered, Peekable, StreamExt, unfold};
use serde_json::Value;

use super::MAX_LINE;
use super::dispatch::call;
use super::gate::Gate;
use super::line_stream::{Frame, LineWriter, line_stream};
use super::methods::{Done, NoParams, SubscribeParams, UpgradeParams, UpgradeReply};
use super::outcome::{params, result};
use super::rpc::{
    self, Call, Failure, INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR, UNKNOWN_METHOD,
    notification, response,
};
use super::upgrades::{EncryptedClients, UpgradeRequests};
use crate::events::{Event, Subscription};
use crate::process::clients::accepted;
use crate::process::workers::Workers;
use crate::running::Running;

/// Connections at the same time; further ones are refused.
const MAX_CLIENTS: usize = 16;
/// How often the server checks for a client that sends no more.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The answer to requests to a server that has handed over.
const REPLACED: &str = "another process serves now: ask again";

/// A control socket that is served.
pub struct Control {
    workers: Workers,
    stop: oneshot::Sender<()>,
    over: Submission<()>,
    listener: Listener,
    address: Address,
    /// The socket's file, which is removed at the end.
    file: Option<SocketFile>,
    gate: Arc<Gate>,
    upgrades: UpgradeRequests,
}

/// The server that requests are about.
struct Served {
    running: Arc<Running>,
    answers: Answers,
    upgrades: UpgradeRequests,
    gate: Arc<Gate>,
}

impl Control {
    /// Answers requests about the server at a socket, on a loop of its own, if their method is in
    /// `answers`.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn start(
        bound: BoundSocket,
        workers: Workers,
        running: Arc<Running>,
        answers: Answers,
        upgrades: UpgradeRequests,
    ) -> Result<Self> {
        let listener = Listener::new(bound.socket).context("cannot use the control socket")?;
        let (stop, stopped) = oneshot::channel();
        let gate = Arc::new(Gate::default());
        let served =
            Served { running, answers, upgrades: upgrades.clone(), gate: Arc::clone(&gate) };
        let accepting = listener.clone();
        let over = workers.first().spawn(move || serve(accepting, served, stopped.shared()));
        let BoundSocket { address, file, .. } = bound;
        Ok(Self { workers, stop, over, listener, address, file, gate, upgrades })
    }

    /// The socket.
    pub fn listener(&self) -> &Listener {
        &self.listener
    }

    /// The address of the socket.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The file of the socket, if this process must remove it.
    pub fn file(&self) -> Option<&SocketFile> {
        self.file.as_ref()
    }

    /// The gate that holds off all requests except upgrades.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Accepts no more requests, and completes the requests in progress. Returns the loop, because
    /// disks may have connections on the loop that they need until they are closed.
    pub fn stop(mut self) -> Workers {
        // Remove the file while the socket still listens: see `SocketFile`.
        self.file = None;
        self.finish()
    }

    /// Stops as [`stop`](Self::stop) does, but leaves the socket's file to the process that
    /// continues with the socket.
    pub fn leave(mut self) {
        std::mem::forget(self.file.take());
        self.finish().stop();
    }

    fn finish(self) -> Workers {
        // The main thread executes upgrades, and executes none from now on. So waiting upgrades are
        // cancelled.
        self.upgrades.end();
        // The accept loop may have ended already.
        let _ = self.stop.send(());
        let _ = self.over.wait();
        self.workers
    }
}

type Stopped = Shared<oneshot::Receiver<()>>;

/// The receiver of an answer.
struct Caller {
    stopped: Stopped,
    is_gone: Cell<bool>,
}

impl Caller {
    /// Whether the request was cancelled: the client has disconnected, or the server ends.
    fn is_cancelled(&self) -> bool {
        self.is_gone.get() || self.stopped.peek().is_some()
    }
}

/// Accepts and answers until the server ends.
async fn serve(listener: Listener, served: Served, stopped: Stopped) {
    accept_clients(listener, stopped.clone(), |stream| {
        serve_client(&served, stream, stopped.clone()).boxed_local()
    })
    .await;
}

/// Accepts clients until the server ends, and serves a fixed number at once. Returns when all
/// clients have ended.
pub async fn accept_clients<'a>(
    listener: Listener,
    stopped: Stopped,
    serve_client: impl Fn(Stream) -> LocalBoxFuture<'a, ()>,
) {
    let mut accepted = pin!(accepted(listener).fuse());
    let mut clients: FuturesUnordered<LocalBoxFuture<'_, ()>> = FuturesUnordered::new();
    let mut ending = stopped;
    loop {
        futures_util::select! {
            _ = ending => break,
            () = clients.select_next_some() => {}
            connection = accepted.select_next_some() => match connection {
                Ok(stream) if clients.len() < MAX_CLIENTS => clients.push(serve_client(stream)),
                Ok(stream) => drop(stream),
                Err(error) => tracing::warn!("cannot accept a control connection: {error}"),
            },
        }
    }
    while clients.next().await.is_some() {}
}

/// A client's connection.
#[derive(Default)]
struct Client {
    events: Option<(Subscription, SubscribeParams)>,
}

impl Client {
    /// Waits for the next subscribed event. If the future is dropped while it waits, no event is
    /// lost.
    async fn next_event(&self) -> Event {
        let Some((subscription, SubscribeParams { events })) = &self.events else {
            return pending().await;
        };
        loop {
            let event = subscription.next().await;
            let is_wanted = |names: &Vec<String>| names.iter().any(|name| name == event.name());
            let is_loss = matches!(event, Event::Lost { .. });
            if is_loss || events.as_ref().is_none_or(is_wanted) {
                return event;
            }
        }
    }
}

/// Answers one client until the client or the server ends.
async fn serve_client(served: &Served, stream: Stream, stopped: Stopped) {
    let caller = Caller { stopped: stopped.clone(), is_gone: Cell::new(false) };
    let (reader, writer) = line_stream(stream);
    let lines = unfold(reader, |mut reader| async move { Some((reader.next().await, reader)) });
    // One line is read ahead while a request is carried out.
    let mut lines = pin!(lines.peekable().fuse());
    let mut stopped = stopped.fuse();
    let mut client = Client::default();
    loop {
        let (message, is_last) = futures_util::select! {
            _ = stopped => return,
            event = client.next_event().fuse() => {
                let event = serde_json::to_value(event).expect("values are JSON");
                (Some(notification("event", event)), false)
            }
            line = lines.select_next_some() => match line {
                // A disconnected client needs no answer.
                Err(_) | Ok(None) => return,
                Ok(Some(Frame::TooLong)) => {
                    let why = format!("a request has more than {MAX_LINE} bytes");
                    (Some(refusal(INVALID_REQUEST, why)), true)
                }
                Ok(Some(Frame::Whole(line))) => {
                    let answering = pin!(answer(served, &mut client, &line, &caller));
                    let watching = pin!(watch(lines.as_mut().get_pin_mut(), &writer, &caller));
                    match select(answering, watching).await {
                        Either::Left((message, _)) => (message, false),
                        Either::Right((never, _)) => match never {},
                    }
                }
            },
        };
        let Some(message) = message else { continue };
        let text = serde_json::to_vec(&message).expect("values are JSON");
        if writer.send(&text).await.is_err() || is_last {
            return;
        }
    }
}

/// Detects whether a client disconnects while its request is carried out, unless the client has
/// sent another line.
async fn watch(
    lines: Pin<&mut Peekable<impl stream::Stream<Item = io::Result<Option<Frame>>>>>,
    writer: &LineWriter,
    caller: &Caller,
) -> Infallible {
    let has_more = matches!(lines.peek().await, Some(Ok(Some(_))));
    while !has_more && !caller.is_gone.get() {
        if writer.is_closed().await {
            caller.is_gone.set(true)
        } else {
            sleep(CHECK_INTERVAL).await
        }
    }
    pending().await
}

/// Carries out the request in a line. Returns the answer, if the request wants one.
async fn answer(
    served: &Served,
    client: &mut Client,
    line: &[u8],
    caller: &Caller,
) -> Option<Value> {
    match serde_json::from_slice(line) {
        Ok(Value::Object(object)) => match rpc::parse(object) {
            Ok(Call { id, method, params }) => {
                let outcome = call_method(served, client, caller, (&method, params)).await;
                id.map(|id| response(&id, outcome))
            }
            Err((id, why)) => Some(response(&id, Err(why))),
        },
        Ok(_) => Some(refusal(INVALID_REQUEST, "a request is one object on one line".into())),
        Err(why) => Some(refusal(PARSE_ERROR, format!("this is no JSON: {why}"))),
    }
}

/// The answer to a line that is not a request.
fn refusal(code: i64, why: String) -> Value {
    response(&Value::Null, Err(Failure::new(code, why)))
}

async fn call_method(
    served: &Served,
    client: &mut Client,
    caller: &Caller,
    (method, given): (&str, Value),
) -> Result<Value, Failure> {
    served.answers.check(method).map_err(|why| Failure::new(UNKNOWN_METHOD, why))?;
    if method == "server.upgrade" {
        let UpgradeParams { binary, disconnect_tls } = params(given)?;
        return result(upgrade(served, binary, disconnect_tls).await?);
    }
    let Some(_inside) = served.gate.enter().await else {
        return Err(anyhow::anyhow!(REPLACED).into());
    };
    match method {
        "event.subscribe" => {
            let wanted: SubscribeParams = params(given)?;
            let unknown = wanted.events.iter().flatten();
            let mut unknown = unknown.filter(|name| !Event::NAMES.contains(&name.as_str()));
            if let Some(unknown) = unknown.next() {
                let names = Event::NAMES.join(", ");
                let why = format!("there is no event {unknown:?}; there are {names}");
                return Err(Failure::new(INVALID_PARAMS, why));
            }
            client.events = Some((served.running.events().subscribe(), wanted));
            result(Done {})
        }
        "event.unsubscribe" => {
            let NoParams {} = params(given)?;
            client.events = None;
            result(Done {})
        }
        _ => call(&served.running, &served.answers, method, given, &|| caller.is_cancelled()).await,
    }
}

/// Requests an upgrade, and waits until another process has taken over or the upgrade has failed.
async fn upgrade(
    served: &Served,
    binary: Option<PathBuf>,
    disconnect_tls: bool,
) -> Result<UpgradeReply> {
    let encrypted =
        if disconnect_tls { EncryptedClients::Disconnect } else { EncryptedClients::Keep };
    match served.upgrades.ask(binary, encrypted).await {
        Ok(Ok(reply)) => Ok(reply),
        Ok(Err(why)) => bail!(why),
        Err(_) if served.gate.is_sealed() => bail!("{REPLACED}"),
        Err(_) => bail!("the server ends"),
    }
}
