//! One client from accept to close.
//!
//! What a client does is told in the log at `debug`, or at `info` where its operator can mend it: a
//! stranger must not be able to fill a log with warnings.

use std::cell::Cell;
use std::fmt::Write;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, BufferPool, IoVectorList, Storage};
use blockhouse_engine::{Stream, sleep};
use futures_util::future::{Either, select};

use super::Shared;
use super::exports::Exports;
use super::peer::Peer;
use super::registry::Seat;
use crate::handshake::{Directory, Facts, Farewell, Handshake, Progress, Terms};
use crate::session::{Activity, Allowance, End, Session};

/// Memory for what a client says in its handshake, in bytes; longer options come in pieces.
const HEARING: usize = 4096;

/// So many characters of a name that a client made up go into the log.
const SHOWN: usize = 64;

/// Why there was no transmission phase.
#[derive(Debug, thiserror::Error)]
enum Parting {
    #[error("{0}")]
    Farewell(Farewell),
    #[error("the client closed the connection")]
    Closed,
    #[error("all connections are taken (--limit clients=N allows more)")]
    NoSeat,
    #[error("the handshake took longer than {0:?}")]
    Late(Duration),
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
    #[error("{0}")]
    NoMemory(#[from] blockhouse_core::Error),
    #[error("the export {0:?} was removed in that moment")]
    Removed(String),
}

/// Serves a client to its end.
pub async fn serve<S: Storage>(
    shared: Arc<Shared>,
    exports: Exports<S>,
    stream: Stream,
    peer: Peer,
    seat: Seat,
) {
    match converse(&shared, &exports, stream, peer, &seat).await {
        Ok(end @ (End::Disconnected | End::Closed | End::Drained)) => {
            tracing::debug!(%peer, "connection over: {end}");
        }
        Ok(end @ End::NoMemory(_)) => tracing::warn!(%peer, "client dropped: {end}"),
        Ok(end) => tracing::info!(%peer, "client dropped: {end}"),
        Err(parting @ Parting::NoSeat) => tracing::info!(%peer, "client refused: {parting}"),
        Err(parting @ Parting::NoMemory(_)) => {
            tracing::warn!(%peer, "client dropped in its handshake: {parting}");
        }
        Err(parting) => tracing::debug!(%peer, "handshake over: {parting}"),
    }
    drop(seat);
}

async fn converse<S: Storage>(
    shared: &Shared,
    exports: &Exports<S>,
    stream: Stream,
    peer: Peer,
    seat: &Seat,
) -> Result<End, Parting> {
    let Shared { limits, pool, .. } = shared;
    if within(limits.handshake, seat.taken()).await != Some(true) {
        return Err(Parting::NoSeat);
    }
    let directory = Offered { exports, peer, is_told: Cell::new(false) };
    let shaken = within(limits.handshake, shake(&stream, &directory, pool)).await;
    let (terms, first) = shaken.ok_or(Parting::Late(limits.handshake))??;
    let Some(export) = exports.get(&terms.export) else {
        return Err(Parting::Removed(terms.export));
    };
    let activity = Arc::new(Activity::new());
    let leave = seat.transmit(&activity);
    let allowance = Allowance {
        requests: limits.requests,
        bytes: limits.bytes.min(limits.bytes_of_all),
        reserved: limits.reserved(),
        stall: limits.stall.unwrap_or(Duration::MAX),
        stall_at_end: STALL_AT_END.min(limits.stall.unwrap_or(STALL_AT_END)),
        idle: limits.idle,
    };
    let session = Session {
        stream,
        disk: export.disk,
        terms,
        pool: pool.clone(),
        allowance,
        budget: Arc::clone(&shared.budget),
        activity,
    };
    Ok(session.run(&first, leave).await)
}

/// How long a client that was asked to leave may stand still.
const STALL_AT_END: Duration = Duration::from_secs(2);

/// The exports of a socket, for one client. A name that is not there is told in the log, once.
struct Offered<'a, S: Storage> {
    exports: &'a Exports<S>,
    peer: Peer,
    is_told: Cell<bool>,
}

impl<S: Storage> Directory for Offered<'_, S> {
    fn find(&self, name: &str) -> Option<Facts> {
        let found = self.exports.find(name);
        if found.is_none() && !self.is_told.replace(true) {
            tracing::info!(peer = %self.peer, "no export is called {}", shown(name));
        }
        found
    }

    fn list(&self) -> Vec<Facts> {
        self.exports.list()
    }
}

/// A name for the log: in quotes, on one line, and cut where it is long.
fn shown(name: &str) -> String {
    let mut shown = String::from("\"");
    name.chars().take(SHOWN).for_each(|each| shown.extend(each.escape_debug()));
    let rest = name.chars().skip(SHOWN).count();
    shown.push('"');
    if rest > 0 {
        // Writing to a string does not fail.
        let _ = write!(shown, " and {rest} characters more");
    }
    shown
}

/// Leads the handshake. What was agreed on, and bytes that arrived beyond it.
async fn shake(
    stream: &Stream,
    exports: &dyn Directory,
    pool: &BufferPool,
) -> Result<(Terms, Vec<u8>), Parting> {
    let mut handshake = Handshake::new();
    let mut heard = pool.get(HEARING)?;
    send(stream, pool, &Handshake::greeting()).await?;
    let mut count = receive(stream, &mut heard).await?;
    let mut output = Vec::new();
    loop {
        let progress = handshake.feed(&heard.bytes()[..count], exports, &mut output);
        send(stream, pool, &output).await?;
        output.clear();
        count = match progress {
            Progress::More => receive(stream, &mut heard).await?,
            Progress::Again => 0,
            Progress::Transmit(terms) => return Ok((terms, handshake.into_rest())),
            Progress::Close(farewell) => return Err(Parting::Farewell(farewell)),
        };
    }
}

async fn send(stream: &Stream, pool: &BufferPool, bytes: &[u8]) -> Result<(), Parting> {
    if bytes.is_empty() {
        return Ok(());
    }
    let mut buffer = pool.get(bytes.len())?;
    buffer.bytes_mut().copy_from_slice(bytes);
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    Ok(stream.send_directly(list).await.0?)
}

async fn receive(stream: &Stream, buffer: &mut Buffer) -> Result<usize, Parting> {
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    let (result, list) = stream.receive(list).await;
    drop(list);
    match result? {
        0 => Err(Parting::Closed),
        count => Ok(count),
    }
}

/// Waits for the future, but not longer than `limit`.
pub async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    match select(pin!(future), sleep(limit)).await {
        Either::Left((value, _)) => Some(value),
        Either::Right(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_log_are_one_short_line() {
        assert_eq!(shown("disk"), "\"disk\"");
        assert_eq!(shown("a\nb\u{1b}[31m\"é"), r#""a\nb\u{1b}[31m\"é""#);
        let long = shown(&"é".repeat(4096));
        assert!(long.ends_with("\" and 4032 characters more") && long.len() < 200, "{long}");
    }
}
