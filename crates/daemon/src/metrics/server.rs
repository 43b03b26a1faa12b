//! The socket of `--metrics`: who connects and asks by HTTP gets the metrics.
//!
//! It has a loop of its own, so that writing the text keeps no guest's read waiting. Guarantees: at most [`MAX_CLIENTS`]
//! clients at once, each with one request and one answer, for [`TIMEOUT`] each; further ones are disconnected.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use blockhouse_core::{Buffer, IoVectorList};
use blockhouse_engine::{Listener, Stream, Submission, sleep, timeout};
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{BoundSocket, SocketPermissions};
use futures_channel::oneshot;
use futures_util::future::{FutureExt, LocalBoxFuture, select};
use futures_util::stream::{FuturesUnordered, StreamExt, unfold};

use super::gather::Samples;
use super::http::{self, Request, Resource};
use super::json::to_json;
use super::text::to_text;
use crate::kept_sockets;
use crate::workers::Workers;

/// Connections at the same time.
const MAX_CLIENTS: usize = 8;
/// How long a client may take to send its request, and again to receive its answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The delay after a connection could not be accepted.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Bytes that one system call receives.
const RECEIVE_SIZE: usize = 4096;

/// Where metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A TCP port of this machine itself.
    Loopback(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl std::str::FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("a path is missing: unix:PATH".into()),
                path => Ok(Self::Unix(path.into())),
            };
        }
        let what = "use 127.0.0.1:PORT, [::1]:PORT or unix:PATH";
        let address: SocketAddr = text.parse().map_err(|_| what.to_owned())?;
        match address.ip().is_loopback() {
            true => Ok(Self::Loopback(address)),
            false => Err(format!("{what}; for other machines put a server with TLS before it")),
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loopback(address) => write!(f, "http://{address}/metrics"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl MetricsAddress {
    /// Listens there, and has the service manager keep the socket; a Unix socket is for those whom `permissions` names.
    ///
    /// # Errors
    /// The kernel's, and where another process listens there.
    pub fn bind(&self, permissions: SocketPermissions) -> Result<BoundSocket> {
        let bound = kept_sockets::bind(&self.address(), permissions);
        bound.with_context(|| format!("--metrics {self}"))
    }

    fn address(&self) -> Address {
        match self {
            Self::Unix(path) => Address::Unix(path.clone()),
            Self::Loopback(address) => {
                Address::Tcp { host: address.ip().to_string(), port: address.port() }
            }
        }
    }
}

/// Tells the values of all metrics at the moment.
pub type Reading = Arc<dyn Fn() -> Vec<Samples> + Send + Sync>;

/// Metrics that are served.
pub struct MetricsServer {
    workers: Workers,
    stop: oneshot::Sender<()>,
    over: Submission<()>,
}

impl MetricsServer {
    /// Serves the metrics at a listening socket, by a loop of its own.
    pub fn start(bound: BoundSocket, workers: Workers, reading: Reading) -> Self {
        Self::start_at(workers, reading, async move || bound)
    }

    /// As [`start`](Self::start), as soon as the address is free: the process that served there before is about to end.
    pub fn start_when_free(
        address: MetricsAddress,
        permissions: SocketPermissions,
        workers: Workers,
        reading: Reading,
    ) -> Self {
        Self::start_at(workers, reading, async move || {
            loop {
                match address.bind(permissions) {
                    Ok(bound) => return bound,
                    Err(error) => tracing::debug!("metrics have to wait: {error:#}"),
                }
                // The service manager may go on to listen for the process before. It hears of this only once that has told
                // it which process serves now.
                kept_sockets::give_up_left(&address.address());
                sleep(RETRY_DELAY).await;
            }
        })
    }

    fn start_at(
        workers: Workers,
        reading: Reading,
        bind: impl AsyncFnOnce() -> BoundSocket + Send + 'static,
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        let over = workers.first().spawn(move || async move {
            let serving = async {
                let bound = bind().await;
                if let Err(error) = serve(bound, &reading).await {
                    tracing::error!("metrics are not served: {error}");
                }
            };
            // What is in flight is dropped: it is only read, so nothing is lost.
            select(pin!(serving), stopped).await;
        });
        Self { workers, stop, over }
    }

    /// Ends, and removes the socket's file, unless the service manager keeps the socket.
    pub fn stop(self) {
        // It may have ended already.
        let _ = self.stop.send(());
        let _ = self.over.wait();
        self.workers.stop();
    }
}

/// Accepts and answers for ever.
async fn serve(bound: BoundSocket, reading: &Reading) -> io::Result<()> {
    let BoundSocket { socket, file, address } = bound;
    let listener = Listener::new(socket)?;
    // Declared after the listener, so dropped while that still listens: see `SocketFile`.
    let _file = file;
    if let Address::Tcp { host, port } = address {
        tracing::info!("metrics at http://{host}:{port}/metrics");
    }
    let accepted = unfold(listener.clone(), |listener| async move {
        let accepted = listener.accept().await;
        if accepted.is_err() {
            sleep(RETRY_DELAY).await;
        }
        Some((accepted, listener))
    });
    let mut accepted = pin!(accepted.fuse());
    let mut clients: FuturesUnordered<LocalBoxFuture<'_, ()>> = FuturesUnordered::new();
    loop {
        futures_util::select! {
            () = clients.select_next_some() => {}
            connection = accepted.select_next_some() => match connection {
                Ok(stream) if clients.len() < MAX_CLIENTS => {
                    clients.push(serve_client(stream, reading).boxed_local());
                }
                Ok(stream) => drop(stream),
                Err(error) => tracing::warn!("cannot accept a metrics connection: {error}"),
            },
        }
    }
}

/// Answers one request. A client that is gone or too slow gets none.
async fn serve_client(stream: Stream, reading: &Reading) {
    let received = timeout(TIMEOUT, receive_request(&stream)).await;
    let answer = match received.flatten() {
        Some(Ok(request)) => answer(request, reading),
        Some(Err(refusal)) => http::refuse(refusal),
        None => return,
    };
    let Ok(mut buffer) = Buffer::try_new(answer.len()) else { return };
    buffer.bytes_mut().copy_from_slice(&answer);
    drop(answer);
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    let _ = timeout(TIMEOUT, stream.send(list)).await;
    stream.shutdown();
}

/// Receives a request; `None` where the client has gone.
async fn receive_request(stream: &Stream) -> Option<Result<Request, http::Refusal>> {
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
        match http::parse(&received) {
            Ok(None) => {}
            Ok(Some(request)) => return Some(Ok(request)),
            Err(refusal) => return Some(Err(refusal)),
        }
    }
}

fn answer(request: Request, reading: &Reading) -> Vec<u8> {
    let Request { resource, wants_body } = request;
    let gathered = reading();
    let (content_type, body) = match resource {
        Resource::Text(form) => (form.content_type(), to_text(&gathered, form)),
        Resource::Json => ("application/json", to_json(&gathered).to_string()),
    };
    http::answer(content_type, &body, wants_body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_can_be_asked_for() {
        let unix = MetricsAddress::Unix("/run/x".into());
        assert_eq!("unix:/run/x".parse(), Ok(unix));
        for address in ["127.0.0.1:9100", "[::1]:0"] {
            assert!(address.parse::<MetricsAddress>().is_ok(), "{address}");
        }
        for address in ["0.0.0.0:1", "10.0.0.1:80", "localhost:1", "9100", "unix:", ""] {
            let error = address.parse::<MetricsAddress>().expect_err(address);
            assert!(error.contains("unix:PATH"), "{error}");
        }
    }
}
