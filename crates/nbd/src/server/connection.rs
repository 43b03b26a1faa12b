//! One client from accept to close.
//!
//! The log tells what a client does at `debug`, or at `info` where its operator can mend it: a stranger
//! cannot fill a log with warnings.

use std::cell::Cell;
use std::fmt::Write;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, BufferPool, IoVectorList, Storage};
use blockhouse_engine::Stream;

use super::exports::Exports;
use super::limits::Limits;
use super::paused::PausedSession;
use super::peer::Peer;
use super::registry::ConnectionGuard;
use super::timeout::timeout;
use crate::handshake::{
    ExportInfo, ExportLookup, Handshake, HandshakeError, NegotiatedOptions, Progress,
};
use crate::session::{Activity, ByteLimit, End, Outcome, Session};

/// Bytes that one system call receives in the handshake; longer options come in pieces.
const RECEIVE_SIZE: usize = 4096;

/// Characters of a name made up by a client that go into the log.
const MAX_LOGGED_NAME: usize = 64;

/// Why no transmission phase began.
#[derive(Debug, thiserror::Error)]
enum SetupError {
    #[error("{0}")]
    Handshake(HandshakeError),
    #[error("the client closed the connection")]
    Closed,
    #[error("all connections are taken (--limit clients=N allows more)")]
    NotAdmitted,
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
    /// Who connected.
    pub peer: Peer,
    /// Its entry in the registry.
    pub guard: ConnectionGuard,
    /// The exports of its socket.
    pub exports: Exports<S>,
    /// The server's limits.
    pub limits: Limits,
    /// What the payloads of all connections share.
    pub byte_limit: Arc<ByteLimit>,
    /// Where memory comes from.
    pub pool: BufferPool,
}

impl<S: Storage> Connection<S> {
    /// Serves the client to its end.
    pub async fn serve(self) {
        let outcome = async {
            let Self { stream, peer, guard, exports, limits, pool, .. } = &self;
            let lookup = LoggedLookup { exports, peer: *peer, has_logged: Cell::new(false) };
            let (options, received) = set_up(stream, guard, &lookup, limits, pool).await?;
            self.transmit(PausedSession { options, received, is_used: false }).await
        };
        log_end(self.peer, outcome.await);
    }

    /// Serves a client, which has done its handshake with another process, to its end.
    pub async fn go_on(self, session: PausedSession) {
        log_end(self.peer, self.transmit(session).await);
    }

    /// The transmission phase: a session from pause to pause.
    async fn transmit(&self, mut paused: PausedSession) -> Result<End, SetupError> {
        let Some((export, id)) = self.exports.get(&paused.options.export) else {
            return Err(SetupError::Removed(paused.options.export));
        };
        let activity = Arc::new(match paused.is_used {
            true => Activity::of_used(),
            false => Activity::new(),
        });
        let shutdown = self.guard.start_transmission(id, &activity);
        // Who removes the export from now on ends this connection.
        if !self.exports.has(id) {
            return Err(SetupError::Removed(paused.options.export));
        }
        let _client = self.exports.observe(&export.name, self.peer.to_string());
        loop {
            let session = Session {
                stream: self.stream.clone(),
                disk: Arc::clone(&export.disk),
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
        Err(error @ SetupError::NoMemory(_)) => {
            tracing::warn!(%peer, "client dropped in its handshake: {error}");
        }
        Err(error) => tracing::debug!(%peer, "handshake over: {error}"),
    }
}

/// Waits until the connection is admitted, and does the handshake. What was negotiated, and the bytes that
/// arrived after it.
async fn set_up(
    stream: &Stream,
    guard: &ConnectionGuard,
    exports: &dyn ExportLookup,
    limits: &Limits,
    pool: &BufferPool,
) -> Result<(NegotiatedOptions, Vec<u8>), SetupError> {
    if timeout(limits.handshake, guard.admitted()).await != Some(true) {
        return Err(SetupError::NotAdmitted);
    }
    let negotiated = timeout(limits.handshake, handshake(stream, exports, pool)).await;
    negotiated.ok_or(SetupError::TimedOut(limits.handshake))?
}

async fn handshake(
    stream: &Stream,
    exports: &dyn ExportLookup,
    pool: &BufferPool,
) -> Result<(NegotiatedOptions, Vec<u8>), SetupError> {
    let mut handshake = Handshake::new();
    let mut received = pool.get(RECEIVE_SIZE)?;
    send(stream, pool, &Handshake::greeting()).await?;
    let mut count = receive(stream, &mut received).await?;
    let mut output = Vec::new();
    loop {
        let progress = handshake.feed(&received.bytes()[..count], exports, &mut output);
        send(stream, pool, &output).await?;
        output.clear();
        count = match progress {
            Progress::More => receive(stream, &mut received).await?,
            Progress::Again => 0,
            Progress::Transmit(options) => return Ok((options, handshake.into_rest())),
            Progress::Close(error) => return Err(SetupError::Handshake(error)),
        };
    }
}

async fn send(stream: &Stream, pool: &BufferPool, bytes: &[u8]) -> Result<(), SetupError> {
    if bytes.is_empty() {
        return Ok(());
    }
    let mut buffer = pool.get(bytes.len())?;
    buffer.bytes_mut().copy_from_slice(bytes);
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    Ok(stream.send_directly(list).await.0?)
}

async fn receive(stream: &Stream, buffer: &mut Buffer) -> Result<usize, SetupError> {
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    let (result, list) = stream.receive(list).await;
    drop(list);
    match result? {
        0 => Err(SetupError::Closed),
        count => Ok(count),
    }
}

/// The exports of a socket, for one client. A name that does not exist is logged, once.
struct LoggedLookup<'a, S: Storage> {
    exports: &'a Exports<S>,
    peer: Peer,
    has_logged: Cell<bool>,
}

impl<S: Storage> ExportLookup for LoggedLookup<'_, S> {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        let found = self.exports.find(name);
        if found.is_none() && !self.has_logged.replace(true) {
            tracing::info!(peer = %self.peer, "no export is called {}", quoted(name));
        }
        found
    }

    fn list(&self) -> Vec<ExportInfo> {
        self.exports.list()
    }
}

/// A name for the log: in quotes, on one line, and cut where it is long.
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
