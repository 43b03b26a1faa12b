//! One client from accept to close.
//!
//! Events of a client are logged at `debug`, or at `info` if the client's operator can correct the
//! cause; only ENOMEM is logged at `warn`. Reason: an untrusted client must not fill the log with
//! warnings.

use std::cell::{Cell, RefCell};
use std::fmt::Write;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, BufferPool, IoVectorList, Storage};
use blockhouse_disk::{ClientGuard, Disk, ExportKind};
use blockhouse_engine::{Stream, timeout};

use super::exports::Exports;
use super::limits::Limits;
use super::paused::PausedSession;
use super::peer::Peer;
use super::registry::ConnectionGuard;
use crate::handshake::{
    ExportInfo, ExportLookup, Handshake, HandshakeError, NegotiatedOptions, Progress, TlsState,
};
use crate::session::{Activity, ByteLimit, End, Outcome, Session};
use crate::tls::{AcceptError, ClientIdentity, TlsChannel, TlsMode};

/// Bytes that one system call receives in the handshake. Longer options are received in pieces.
const RECEIVE_SIZE: usize = 4096;

/// Maximum number of characters of a client's export name that are logged.
const MAX_LOGGED_NAME: usize = 64;

/// The reason why no transmission phase began.
#[derive(Debug, thiserror::Error)]
enum SetupError {
    #[error("{0}")]
    Handshake(HandshakeError),
    #[error("the client closed the connection")]
    Closed,
    #[error("all connections are taken (--limit clients=N allows more)")]
    NotAdmitted,
    #[error("no TLS with the client: {0}")]
    Tls(AcceptError),
    #[error("the handshake took longer than {0:?}")]
    TimedOut(Duration),
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
    #[error("{0}")]
    NoMemory(#[from] blockhouse_core::Error),
    #[error("the export {0:?} was removed in that moment")]
    Removed(String),
}

/// An accepted connection.
pub struct Connection<S: Storage> {
    /// The socket.
    pub stream: Stream,
    /// The client.
    pub peer: Peer,
    /// The connection's entry in the registry.
    pub guard: ConnectionGuard,
    /// The exports of its socket.
    pub exports: Exports<S>,
    /// The server's limits.
    pub limits: Limits,
    /// The limit that the payloads of all connections share.
    pub byte_limit: Arc<ByteLimit>,
    /// The allocator of payloads' memory.
    pub pool: BufferPool,
}

impl<S: Storage> Connection<S> {
    /// Serves the client to its end.
    pub async fn serve(self) {
        let outcome = async {
            let Self { stream, peer, guard, exports, limits, pool, .. } = &self;
            let lookup = LoggedLookup::new(exports, *peer);
            let negotiated = set_up(stream, guard, &lookup, limits, pool).await?;
            let Negotiated { options, received, tls } = negotiated;
            let paused = PausedSession { options, received, is_used: false };
            let enter = |disk: &Disk<S>, export| disk.stats().enter_client(export);
            let outcome = self.transmit(paused, tls.as_ref(), enter).await;
            tls.inspect(|tls| tls.close(stream));
            outcome
        };
        log_end(self.peer, outcome.await);
    }

    /// Serves a client that has done its handshake with another process, until its connection ends.
    pub async fn go_on(self, session: PausedSession) {
        let enter = |disk: &Disk<S>, export| disk.stats().enter_client_again(export);
        log_end(self.peer, self.transmit(session, None, enter).await);
    }

    /// The transmission phase: one session after the other, with a pause between them.
    async fn transmit(
        &self,
        mut paused: PausedSession,
        tls: Option<&Rc<TlsChannel>>,
        enter: impl FnOnce(&Disk<S>, ExportKind) -> ClientGuard,
    ) -> Result<End, SetupError> {
        let Some((export, id)) = self.exports.get(&paused.options.export) else {
            return Err(SetupError::Removed(paused.options.export));
        };
        let activity = Arc::new(if paused.is_used { Activity::of_used() } else { Activity::new() });
        let credential = tls.map(|tls| Arc::clone(tls.credential()));
        let shutdown = self.guard.start_transmission(id, credential.clone(), &activity);
        // From now on, a reload of the TLS files ends this connection if they refuse the client.
        // The files may already have been reloaded since the handshake, so this is checked here.
        if let (Some(shown), Some(tls)) = (&credential, self.exports.tls())
            && !tls.server.still_admits(shown)
        {
            let why = "what it has shown was revoked meanwhile".to_owned();
            return Err(SetupError::Tls(AcceptError::Refused(why)));
        }
        // From now on, a removal of the export ends this connection; an earlier removal is detected
        // here.
        if !self.exports.has(id) {
            return Err(SetupError::Removed(paused.options.export));
        }
        let _observed = self.exports.observe(&export.name, self.peer.to_string());
        // The client is counted also while the connection is paused, because it remains the same
        // client after the pause, here or in another process.
        let _client = enter(&export.disk, ExportKind::Nbd);
        loop {
            let session = Session {
                stream: self.stream.clone(),
                tls: tls.cloned(),
                disk: Arc::clone(&export.disk),
                bitmaps: export.bitmaps.clone(),
                access: export.access,
                options: paused.options.clone(),
                pool: self.pool.clone(),
                limits: self.limits.of_connection(),
                byte_limit: Arc::clone(&self.byte_limit),
                activity: Arc::clone(&activity),
            };
            paused.received = match session.run(&paused.received, Arc::clone(&shutdown)).await {
                Outcome::Ended(end) => return Ok(end),
                Outcome::Paused(received) => received,
            };
            paused.is_used = !activity.is_unused();
            match self.guard.paused(paused).await {
                Some(resumed) => paused = resumed,
                None => return Ok(End::Drained),
            }
        }
    }
}

fn log_end(peer: Peer, outcome: Result<End, SetupError>) {
    match outcome {
        Ok(end @ (End::Disconnected | End::Closed | End::Drained)) => {
            tracing::debug!(%peer, "connection over: {end}");
        }
        Ok(end @ End::NoMemory(_)) => tracing::warn!(%peer, "client dropped: {end}"),
        Ok(end) => tracing::info!(%peer, "client dropped: {end}"),
        Err(error @ SetupError::NotAdmitted) => {
            tracing::info!(%peer, "client refused: {error}");
        }
        Err(SetupError::Tls(error @ AcceptError::Refused(_))) => {
            tracing::info!(%peer, "client refused by TLS: {error}");
        }
        Err(SetupError::Handshake(error @ HandshakeError::DataBeforeTls)) => {
            tracing::info!(%peer, "client refused: {error}");
        }
        Err(error @ SetupError::NoMemory(_)) => {
            tracing::warn!(%peer, "client dropped in its handshake: {error}");
        }
        Err(error) => tracing::debug!(%peer, "handshake over: {error}"),
    }
}

/// The outcome of a handshake.
struct Negotiated {
    options: NegotiatedOptions,
    /// The bytes that arrived after the handshake.
    received: Vec<u8>,
    tls: Option<Rc<TlsChannel>>,
}

/// Waits until the connection is admitted, and does the handshake.
async fn set_up<S: Storage>(
    stream: &Stream,
    guard: &ConnectionGuard,
    exports: &LoggedLookup<'_, S>,
    limits: &Limits,
    pool: &BufferPool,
) -> Result<Negotiated, SetupError> {
    if timeout(limits.handshake, guard.admitted()).await != Some(true) {
        return Err(SetupError::NotAdmitted);
    }
    let negotiated = timeout(limits.handshake, handshake(stream, exports, pool)).await;
    negotiated.ok_or(SetupError::TimedOut(limits.handshake))?
}

async fn handshake<S: Storage>(
    stream: &Stream,
    exports: &LoggedLookup<'_, S>,
    pool: &BufferPool,
) -> Result<Negotiated, SetupError> {
    let socket_tls = exports.exports.tls();
    let mut handshake = Handshake::with_tls(match socket_tls.map(|tls| tls.mode) {
        None => TlsState::Off,
        Some(TlsMode::Optional) => TlsState::Optional,
        Some(TlsMode::Required) => TlsState::Required,
    });
    let mut tls = None;
    let mut received = pool.get(RECEIVE_SIZE)?;
    send(stream, None, pool, &Handshake::greeting()).await?;
    let mut count = receive(stream, None, &mut received).await?;
    let mut output = Vec::new();
    loop {
        let progress = handshake.feed(&received.bytes()[..count], exports, &mut output);
        send(stream, tls.as_deref(), pool, &output).await?;
        output.clear();
        count = match progress {
            Progress::More => receive(stream, tls.as_deref(), &mut received).await?,
            Progress::Again => 0,
            Progress::StartTls => {
                // STARTTLS is offered only if the socket has TLS, so this does not happen.
                let Some(crate::tls::SocketTls { server, .. }) = socket_tls else {
                    return Err(io::Error::from(io::ErrorKind::Unsupported).into());
                };
                let accepted = TlsChannel::accept(stream, server, pool).await;
                let channel = Rc::new(accepted.map_err(SetupError::Tls)?);
                tracing::debug!(peer = %exports.peer, "TLS with {:?}: {}", channel.identity().names, channel.describe());
                exports.client.replace(Some(channel.identity().clone()));
                tls = Some(channel);
                handshake.tls_started();
                0
            }
            Progress::Transmit(options) => {
                return Ok(Negotiated { options, received: handshake.into_rest(), tls });
            }
            Progress::Close(error) => return Err(SetupError::Handshake(error)),
        };
    }
}

async fn send(
    stream: &Stream,
    tls: Option<&TlsChannel>,
    pool: &BufferPool,
    bytes: &[u8],
) -> Result<(), SetupError> {
    if bytes.is_empty() {
        return Ok(());
    }
    if let Some(tls) = tls {
        return Ok(tls.send(stream, bytes).await?);
    }
    let mut buffer = pool.get(bytes.len())?;
    buffer.bytes_mut().copy_from_slice(bytes);
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    Ok(stream.send_directly(list).await.0?)
}

async fn receive(
    stream: &Stream,
    tls: Option<&TlsChannel>,
    buffer: &mut Buffer,
) -> Result<usize, SetupError> {
    let result = match tls {
        Some(tls) => tls.read(stream, buffer.bytes_mut(), |_| false, || ()).await,
        None => {
            let mut list = IoVectorList::new();
            list.push(buffer.lend());
            stream.receive(list).await.0
        }
    };
    match result? {
        0 => Err(SetupError::Closed),
        count => Ok(count),
    }
}

/// The exports of a socket, for one client. The first refusal is logged: an unknown name, a client
/// that is not allowed, or missing TLS.
struct LoggedLookup<'a, S: Storage> {
    exports: &'a Exports<S>,
    peer: Peer,
    /// The client's identity by TLS.
    client: RefCell<Option<ClientIdentity>>,
    has_logged: Cell<bool>,
}

impl<'a, S: Storage> LoggedLookup<'a, S> {
    fn new(exports: &'a Exports<S>, peer: Peer) -> Self {
        Self { exports, peer, client: RefCell::default(), has_logged: Cell::new(false) }
    }

    fn log(&self, text: std::fmt::Arguments<'_>) {
        if !self.has_logged.replace(true) {
            tracing::info!(peer = %self.peer, "{text}");
        }
    }
}

impl<S: Storage> ExportLookup for LoggedLookup<'_, S> {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        let Some(found) = self.exports.find(name) else {
            self.log(format_args!("no export is called {}", quoted(name)));
            return None;
        };
        let client = self.client.borrow();
        if self.exports.admits(&found.name, client.as_ref()) {
            return Some(found);
        }
        let names = client.as_ref().map(|client| client.names.join(", ")).unwrap_or_default();
        self.log(format_args!(
            "client refused: {} may not use the export {} (--tls-allow says who may)",
            quoted(&names),
            quoted(&found.name)
        ));
        None
    }

    fn list(&self) -> Vec<ExportInfo> {
        let client = self.client.borrow();
        let mut list = self.exports.list();
        list.retain(|export| self.exports.admits(&export.name, client.as_ref()));
        list
    }

    fn needs_tls(&self, name: &str) -> bool {
        self.client.borrow().is_none()
            && self.exports.find(name).is_some_and(|found| !self.exports.admits(&found.name, None))
    }

    fn refuse_plain(&self) {
        self.log(format_args!("client refused: it does not use TLS, which is required here"));
    }
}

/// A name for the log: in quotes, on one line, and cut if it is long.
fn quoted(name: &str) -> String {
    let mut quoted = String::from("\"");
    name.chars().take(MAX_LOGGED_NAME).for_each(|each| quoted.extend(each.escape_debug()));
    let rest = name.chars().skip(MAX_LOGGED_NAME).count();
    quoted.push('"');
    if rest > 0 {
        // Writing to a string does not fail.
        let _ = write!(quoted, " and {rest} characters more");
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_log_are_one_short_line() {
        assert_eq!(quoted("disk"), "\"disk\"");
        assert_eq!(quoted("a\nb\u{1b}[31m\"é"), r#""a\nb\u{1b}[31m\"é""#);
        let long = quoted(&"é".repeat(4096));
        assert!(long.ends_with("\" and 4032 characters more") && long.len() < 200, "{long}");
    }
}
