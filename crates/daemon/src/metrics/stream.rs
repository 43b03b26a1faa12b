//! The stream of the page (Server-Sent Events), and sending to clients of the metrics.
//!
//! Guarantees: one snapshot a second, and each event of the server when it happens; without a
//! client no metrics are read. A client that does not receive a message within [`TIMEOUT`] is
//! disconnected, so each has at most one message in memory.

use std::pin::pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockhouse_core::{Buffer, IoVectorList};
use blockhouse_engine::{Stream, sleep, timeout};
use futures_util::future::{Either, LocalBoxFuture, select};
use serde_json::json;

use super::gather::Samples;
use super::http;
use super::json::to_json;
use crate::events::Subscription;

/// How long a client may take to send its request, and again to receive its answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// The time between two snapshots.
const PERIOD: Duration = Duration::from_secs(1);

/// A server as its metrics and its page show it.
pub(crate) trait Observed: Send + Sync {
    /// The values of all metrics at the moment.
    fn samples(&self) -> LocalBoxFuture<'_, Vec<Samples>>;
    /// The jobs, as the control socket lists them.
    fn jobs(&self) -> serde_json::Value;
    /// The events from now on.
    fn subscribe(&self) -> Subscription;
}

/// Sends snapshots and events until the client has disconnected.
pub(super) async fn serve_stream(stream: &Stream, observed: &dyn Observed) {
    let events = observed.subscribe();
    let mut message = http::stream_head();
    loop {
        message.extend(format!("data: {}\n\n", snapshot(observed).await).bytes());
        if !send(stream, &message).await {
            return;
        }
        let mut period = pin!(sleep(PERIOD));
        while let Either::Right((event, _)) = select(period.as_mut(), pin!(events.next())).await {
            let text = serde_json::to_string(&event).unwrap_or_default();
            if !send(stream, format!("event: happened\ndata: {text}\n\n").as_bytes()).await {
                return;
            }
        }
        message.clear();
    }
}

/// Everything that the page shows, as one line: compact JSON has no line feed between values, and
/// escapes line feeds in strings.
async fn snapshot(observed: &dyn Observed) -> serde_json::Value {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({
        "time": time.as_millis() as u64,
        "metrics": to_json(&observed.samples().await),
        "jobs": observed.jobs(),
    })
}

/// Sends bytes. Returns whether the client received them in time.
pub(super) async fn send(stream: &Stream, bytes: &[u8]) -> bool {
    let Ok(mut buffer) = Buffer::try_new(bytes.len()) else { return false };
    buffer.bytes_mut().copy_from_slice(bytes);
    let mut list = IoVectorList::new();
    list.push(buffer.lend());
    matches!(timeout(TIMEOUT, stream.send(list)).await, Some((Ok(()), _)))
}
