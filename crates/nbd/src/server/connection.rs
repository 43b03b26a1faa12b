//! One client from accept to close.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, IoVectorList, Storage};
use blockhouse_engine::{Stream, sleep};
use futures_util::future::{Either, select};
use rustix::net::{AddressFamily, getpeername, sockopt};

use super::Shared;
use super::exports::Exports;
use super::registry::Seat;
use crate::handshake::{Directory, Farewell, Handshake, Progress, Terms};
use crate::session::{Allowance, End, Session};

/// Memory for what a client says in its handshake, in bytes; longer options come in pieces.
const HEARING: usize = 4096;

/// Why there was no transmission phase.
#[derive(Debug, thiserror::Error)]
enum Parting {
    #[error("{0}")]
    Farewell(Farewell),
    #[error("the client closed the connection")]
    Closed,
    #[error("the handshake took longer than {0:?}")]
    Late(Duration),
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
    #[error("the export \"{0}\" was removed in that moment")]
    Removed(String),
}

/// Serves a client to its end.
pub async fn serve<S: Storage>(
    shared: Arc<Shared>,
    exports: Exports<S>,
    stream: Stream,
    seat: Seat,
) {
    let peer = settle(&stream);
    match converse(&shared, &exports, stream, &seat).await {
        Ok(end @ (End::Disconnected | End::Closed | End::Drained)) => {
            tracing::debug!(peer, "connection over: {end}");
        }
        Ok(end) => tracing::warn!(peer, "client dropped: {end}"),
        Err(parting @ (Parting::Closed | Parting::Farewell(Farewell::Aborted))) => {
            tracing::debug!(peer, "handshake over: {parting}");
        }
        Err(parting) => tracing::warn!(peer, "client dropped in its handshake: {parting}"),
    }
    drop(seat);
}

async fn converse<S: Storage>(
    shared: &Shared,
    exports: &Exports<S>,
    stream: Stream,
    seat: &Seat,
) -> Result<End, Parting> {
    let limits = &shared.limits;
    let shaken = within(limits.handshake, shake(&stream, exports)).await;
    let (terms, first) = shaken.ok_or(Parting::Late(limits.handshake))??;
    let Some(export) = exports.get(&terms.export) else {
        return Err(Parting::Removed(terms.export));
    };
    let session = Session {
        stream,
        disk: export.disk,
        terms,
        pool: shared.pool.clone(),
        allowance: Allowance { requests: limits.requests, bytes: limits.bytes },
        budget: Arc::clone(&shared.budget),
    };
    Ok(session.run(&first, seat.transmit()).await)
}

/// Leads the handshake. What was agreed on, and bytes that arrived beyond it.
async fn shake(stream: &Stream, exports: &dyn Directory) -> Result<(Terms, Vec<u8>), Parting> {
    send(stream, &Handshake::greeting()).await?;
    let mut handshake = Handshake::new();
    let mut heard = Buffer::new(HEARING);
    let mut count = 0;
    let mut output = Vec::new();
    loop {
        let progress = handshake.feed(&heard.bytes()[..count], exports, &mut output);
        send(stream, &output).await?;
        output.clear();
        count = match progress {
            Progress::More => receive(stream, &mut heard).await?,
            Progress::Again => 0,
            Progress::Transmit(terms) => return Ok((terms, handshake.into_rest())),
            Progress::Close(farewell) => return Err(Parting::Farewell(farewell)),
        };
    }
}

async fn send(stream: &Stream, bytes: &[u8]) -> io::Result<()> {
    let mut buffer = Buffer::new(bytes.len());
    buffer.bytes_mut().copy_from_slice(bytes);
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    stream.send(list).await.0
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

/// Sets the socket up and says who is at its other end.
fn settle(stream: &Stream) -> String {
    if sockopt::socket_domain(stream) == Ok(AddressFamily::UNIX) {
        return match sockopt::socket_peercred(stream) {
            Ok(credentials) => format!("process {}", credentials.pid.as_raw_nonzero()),
            Err(_) => "a local process".into(),
        };
    }
    // Both only make things better: no waiting for acknowledgements, and a peer that vanished
    // without a word is noticed some day.
    let _ = sockopt::set_tcp_nodelay(stream, true);
    let _ = sockopt::set_socket_keepalive(stream, true);
    match getpeername(stream) {
        Ok(Some(peer)) => SocketAddr::try_from(peer).map_or("?".into(), |peer| peer.to_string()),
        _ => "?".into(),
    }
}
