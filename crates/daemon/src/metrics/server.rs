//! The socket of `--metrics`: HTTP clients get the metrics, or the page.
//!
//! It has its own event loop, so that formatting the text does not delay guests' requests.
//! Guarantees: at most [`MAX_CLIENTS`] clients at once, each with one request and one answer, for
//! [`TIMEOUT`] each. A further client replaces the oldest client that has not sent its request; or
//! else the oldest client that has not received its answer, if it is older than [`GRACE`]. So
//! silent and slow clients block a scrape for [`GRACE`] at most. If there is no such client, the
//! further one is disconnected. At most [`MAX_STREAMS`] clients read a stream, so that scrapes can
//! connect.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockhouse_config::metrics_address::MetricsAddress;
use blockhouse_core::{Buffer, IoVectorList};
use blockhouse_engine::{Listener, Stream, sleep, timeout};
use blockhouse_nbd::BoundSocket;
use blockhouse_nbd::uri::Address;
use futures_channel::oneshot;
use futures_util::future::{Either, FutureExt, LocalBoxFuture, select};
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::http::{self, Hosts, Request, Resource};
use super::json::to_json;
use super::stream::{Observed, TIMEOUT, send, serve_stream};
use super::text::to_text;
use crate::process::clients::accepted;
use crate::process::kept_sockets;
use crate::process::workers::Workers;

/// The maximum number of connections at a time.
const MAX_CLIENTS: usize = 8;
/// The maximum number of streams at a time.
const MAX_STREAMS: usize = 4;
/// For how long a client that has sent its request cannot be replaced by another client, counted
/// from its connection.
const GRACE: Duration = Duration::from_secs(1);
/// The delay before another attempt to bind the address.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Bytes that one system call receives.
const RECEIVE_SIZE: usize = 4096;

/// Listens at an address, and has the service manager keep the socket.
///
/// # Errors
/// The kernel's error, for example because another process listens at the address.
pub(crate) fn bind(address: &MetricsAddress) -> Result<BoundSocket> {
    let bound = kept_sockets::bind(&address.address(), address.permissions());
    bound.with_context(|| format!("--metrics {address}"))
}

/// The server of the metrics.
pub struct MetricsServer {
    workers: Workers,
    stop: oneshot::Sender<()>,
}

impl MetricsServer {
    /// Serves the metrics at a listening socket, on its own event loop.
    pub fn start(bound: BoundSocket, workers: Workers, observed: Arc<dyn Observed>) -> Self {
        Self::start_at(workers, observed, async move || bound)
    }

    /// As [`start`](Self::start), as soon as the address is free: the process before the hand-over,
    /// which serves there, is about to end.
    pub fn start_when_free(
        address: MetricsAddress,
        workers: Workers,
        observed: Arc<dyn Observed>,
    ) -> Self {
        Self::start_at(workers, observed, async move || {
            loop {
                match bind(&address) {
                    Ok(bound) => return bound,
                    Err(error) => tracing::debug!("metrics have to wait: {error:#}"),
                }
                // The service manager may still keep the earlier process's socket, which then
                // listens. The manager accepts this message only after the earlier process has told
                // it the new main process.
                kept_sockets::give_up_left(&address.address());
                sleep(RETRY_DELAY).await;
            }
        })
    }

    fn start_at(
        workers: Workers,
        observed: Arc<dyn Observed>,
        bind: impl AsyncFnOnce() -> BoundSocket + Send + 'static,
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        drop(workers.first().spawn(move || async move {
            let serving = async {
                let bound = bind().await;
                if let Err(error) = serve(bound, &*observed).await {
                    tracing::error!("metrics are not served: {error}");
                }
            };
            // Answers in flight are dropped: they only read, so nothing is lost.
            select(pin!(serving), stopped).await;
        }));
        Self { workers, stop }
    }

    /// Stops the server, and removes the socket's file unless the service manager keeps the socket.
    pub fn stop(self) {
        // The server may have ended already.
        let _ = self.stop.send(());
        self.workers.stop();
    }
}

/// Accepts clients and answers them; returns only on an error.
async fn serve(bound: BoundSocket, observed: &dyn Observed) -> io::Result<()> {
    let BoundSocket { socket, file, address } = bound;
    let listener = Listener::new(socket)?;
    // `_file` is declared after the listener, so it is dropped first, while the socket still
    // listens: see `SocketFile`.
    let _file = file;
    let hosts = match address {
        Address::Tcp { host, port } => {
            let host = if host.contains(':') { format!("[{host}]") } else { host };
            tracing::info!(
                "metrics at http://{host}:{port}/metrics, a page at http://{host}:{port}/"
            );
            Hosts::Loopback
        }
        // Browsers cannot connect to a Unix socket.
        Address::Unix(_) => Hosts::Any,
    };
    let mut accepted = pin!(accepted(listener.clone()).fuse());
    // Each stream holds a clone, so the reference count tells the number of streams.
    let streams = Rc::new(());
    let mut clients: FuturesUnordered<LocalBoxFuture<'_, ()>> = FuturesUnordered::new();
    let mut unfinished = Unfinished::default();
    loop {
        futures_util::select! {
            () = clients.select_next_some() => {}
            connection = accepted.select_next_some() => match connection {
                Ok(stream) => {
                    if clients.len() >= MAX_CLIENTS && unfinished.end_one() {
                        // The client that was told to end is ready, so this does not wait.
                        clients.next().await;
                    }
                    if clients.len() < MAX_CLIENTS {
                        let (silent, slow) = unfinished.join();
                        let client = Client { stream, hosts, silent, slow };
                        clients.push(client.serve((observed, &streams)).boxed_local());
                    }
                }
                Err(error) => tracing::warn!("cannot accept a metrics connection: {error}"),
            },
        }
    }
}

/// The clients that have not received their answer, the oldest first.
#[derive(Default)]
struct Unfinished(VecDeque<Place>);

/// The senders of one client. Dropping them ends the client if it still waits for its request, or
/// for its answer to be sent.
struct Place {
    since: Instant,
    /// The client drops the receiver when its request was received.
    silent: oneshot::Sender<Infallible>,
    /// The client drops the receiver when its answer was sent, or when it starts to read the
    /// stream.
    slow: oneshot::Sender<Infallible>,
}

impl Unfinished {
    /// Adds a client, and returns the receivers of its [`Place`].
    fn join(&mut self) -> (oneshot::Receiver<Infallible>, oneshot::Receiver<Infallible>) {
        self.0.retain(|place| !place.slow.is_canceled());
        let (silent, is_silent) = oneshot::channel();
        let (slow, is_slow) = oneshot::channel();
        self.0.push_back(Place { since: Instant::now(), silent, slow });
        (is_silent, is_slow)
    }

    /// Ends the oldest client that is silent, or else the oldest one that is slow. Returns whether
    /// there was one.
    fn end_one(&mut self) -> bool {
        self.0.retain(|place| !place.slow.is_canceled());
        let silent = self.0.iter().position(|place| !place.silent.is_canceled());
        let is_slow = |place: &Place| place.since.elapsed() > GRACE;
        let ended = silent.or_else(|| self.0.iter().position(is_slow));
        ended.and_then(|at| self.0.remove(at)).is_some()
    }
}

/// A connection that was accepted.
struct Client {
    stream: Stream,
    hosts: Hosts,
    /// Resolves if another client replaces this one before its request was received.
    silent: oneshot::Receiver<Infallible>,
    /// Resolves if another client replaces this one before its answer was sent.
    slow: oneshot::Receiver<Infallible>,
}

impl Client {
    /// Answers one request. A client that has disconnected or is too slow gets no answer.
    async fn serve(self, (observed, streams): (&dyn Observed, &Rc<()>)) {
        let Self { stream, hosts, silent, slow } = self;
        let request = timeout(TIMEOUT, receive_request(&stream, hosts));
        let received = match select(pin!(request), silent).await {
            Either::Left((received, _)) => received.flatten(),
            Either::Right(_) => None,
        };
        let answer = match received {
            Some(Ok(Request { resource: Resource::Events, wants_body: true })) => {
                if Rc::strong_count(streams) <= MAX_STREAMS {
                    let _place = Rc::clone(streams);
                    drop(slow);
                    return serve_stream(&stream, observed).await;
                }
                http::refuse(http::TOO_MANY)
            }
            Some(Ok(request)) => answer(request, observed).await,
            Some(Err(refusal)) => http::refuse(refusal),
            None => return,
        };
        select(pin!(send(&stream, &answer)), slow).await;
        stream.shutdown();
    }
}

/// Receives a request; `None` if the client has disconnected.
async fn receive_request(stream: &Stream, hosts: Hosts) -> Option<Result<Request, http::Refusal>> {
    let mut buffer = Buffer::try_new(RECEIVE_SIZE).ok()?;
    let mut received = Vec::new();
    loop {
        let mut list = IoVectorList::new();
        list.push(buffer.lend());
        let (count, list) = stream.receive(list).await;
        drop(list);
        match count {
            Ok(0) | Err(_) => return None,
            Ok(count) => received.extend_from_slice(&buffer.bytes()[..count]),
        }
        match http::parse(&received, hosts) {
            Ok(None) => {}
            Ok(Some(request)) => return Some(Ok(request)),
            Err(refusal) => return Some(Err(refusal)),
        }
    }
}

async fn answer(Request { resource, wants_body }: Request, observed: &dyn Observed) -> Vec<u8> {
    match resource {
        Resource::Text(form) => {
            http::answer(form.content_type(), &to_text(&observed.samples().await, form), wants_body)
        }
        Resource::Json => {
            let json = to_json(&observed.samples().await).to_string();
            http::answer("application/json", &json, wants_body)
        }
        Resource::Page(file) => http::page(file, wants_body),
        Resource::Events => http::stream_head(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_further_client_takes_the_place_of_a_silent_one_or_else_of_a_slow_one() {
        let mut unfinished = Unfinished::default();
        let [mut first, mut second, mut third] = [(); 3].map(|()| Some(unfinished.join()));
        let is_over = |client: &mut Option<(oneshot::Receiver<_>, oneshot::Receiver<_>)>| {
            client.as_mut().is_some_and(|(_, slow)| !matches!(slow.try_recv(), Ok(None)))
        };
        // The first one has sent its request, the second one has not.
        first.as_mut().unwrap().0.close();
        third.as_mut().unwrap().0.close();
        assert!(unfinished.end_one() && is_over(&mut second));
        // No client has waited for long.
        assert!(!unfinished.end_one());
        for place in &mut unfinished.0 {
            place.since =
                place.since.checked_sub(2 * GRACE).expect("the machine has run for longer");
        }
        assert!(unfinished.end_one() && is_over(&mut first) && !is_over(&mut third));
        // A client that has received its answer ends by itself.
        drop(third);
        assert!(!unfinished.end_one());
    }
}
