//! The connections of a storage: the choice of one for a request, and the scope of a flush.
//!
//! Guarantees:
//! - Each loop has a connection of its own if the export allows several (`CAN_MULTI_CONN`) and the
//!   server accepts another, up to [`MAX_CONNECTIONS`]. Otherwise all loops share the first
//!   connection whose loop runs.
//! - While any connection has a running loop, no request waits for a new connection to be opened:
//!   it uses the shared connection until its own loop has a connection. Reason: a server may refuse
//!   a second connection, or not greet it before the first has been closed (`qemu-nbd`, nbdkit's
//!   `limit`).
//! - A flush is sent over the connection with the oldest stream, even if another loop serves that
//!   connection; `storage/nbd/unflushed` explains why. The flush completes only while that loop
//!   runs.
//! - Once the oldest stream has ended with writes that were answered and not flushed, every flush
//!   fails. This includes a flush that was in flight when the stream ended, and that the server
//!   answered after the reconnect.

use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use blockhouse_core::Result;
use blockhouse_engine::{sleep, spawn_detached};
use blockhouse_nbd_protocol::request::kind;
use blockhouse_nbd_protocol::{CommandFlags, TransmissionFlags};
use parking_lot::Mutex;

use super::connection::{self, RETRY_DELAY};
use super::dial::Dial;
use super::link::Link;
use super::pending::Body;
use super::transmission::{Command, Transmission};
use super::unflushed::UnflushedWrites;
use crate::detached::DetachedSyncs;

/// The most connections of one storage.
const MAX_CONNECTIONS: usize = 16;

/// A loop that did not get a connection of its own tries again after this time.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// The connections to one export.
pub(super) struct Connections {
    shared: Arc<Shared>,
}

/// State that is shared with a task that opens a connection for its loop.
struct Shared {
    dial: Arc<Dial>,
    list: Mutex<List>,
    detached: Arc<DetachedSyncs>,
    unflushed: Arc<UnflushedWrites>,
}

#[derive(Default)]
struct List {
    /// Each connection with the thread of its loop; not empty once the storage is connected. For an
    /// export without `CAN_MULTI_CONN`, all requests share the first connection whose loop runs.
    connections: Vec<(ThreadId, Arc<Transmission>)>,
    /// The loops that have tried to get a connection of their own, and the time when each may try
    /// again.
    asked: Vec<(ThreadId, Instant)>,
    is_closed: bool,
}

/// How a request gets a connection.
enum Choice {
    Known(Arc<Transmission>),
    /// The shared connection, until the loop has got its own.
    Meanwhile(Arc<Transmission>),
    /// No connection has a loop that runs.
    New,
}

impl Connections {
    /// Starts the first connection, over `stream`, on the current thread's loop.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub(super) fn new(dial: Arc<Dial>, stream: Link) -> Result<Self> {
        let has_flush = dial.export().flags.contains(TransmissionFlags::SEND_FLUSH);
        let unflushed = Arc::new(UnflushedWrites::new(dial.name(), has_flush));
        let shared = Shared { dial, list: Mutex::default(), detached: Arc::default(), unflushed };
        let shared = Arc::new(shared);
        shared.add(&mut shared.list.lock(), stream)?;
        Ok(Self { shared })
    }

    /// The connection for requests of this loop.
    ///
    /// # Errors
    /// As [`Dial::again`], after attempts for the reconnect time.
    pub(super) async fn own(&self) -> Result<Arc<Transmission>> {
        let choice = self.shared.choose();
        match choice {
            Choice::Known(connection) => Ok(connection),
            Choice::Meanwhile(connection) => {
                spawn_detached(ask(Arc::clone(&self.shared)));
                Ok(connection)
            }
            Choice::New => {
                let stream = self.connect().await?;
                let mut list = self.shared.list.lock();
                // Another request may have connected during the wait.
                let known = list.running().next().map(|(_, known)| Arc::clone(known));
                match known {
                    Some(known) => {
                        stream.shutdown();
                        Ok(known)
                    }
                    None => self.shared.add(&mut list, stream),
                }
            }
        }
    }

    /// Opens another stream. If the server cannot be reached, tries again for the reconnect time.
    async fn connect(&self) -> Result<Link> {
        let dial = &self.shared.dial;
        let end = Instant::now() + dial.reconnect_time();
        loop {
            match dial.again().await {
                Err(_) if Instant::now() < end => sleep(RETRY_DELAY).await,
                outcome => return outcome,
            }
        }
    }

    /// Ends all connections. Later requests fail.
    pub(super) fn close(&self) {
        self.shared.unflushed.close();
        let mut list = self.shared.list.lock();
        list.is_closed = true;
        list.connections.iter().for_each(|(_, connection)| connection.close());
    }

    /// Waits for the flushes and durable writes in flight whose futures were dropped.
    ///
    /// # Errors
    /// The first failure of these requests that was not reported yet.
    pub(super) async fn drained(&self) -> Result<()> {
        self.shared.detached.drained().await
    }

    /// Makes all writes durable that were answered before the call.
    ///
    /// # Errors
    /// Errors of the server. EIO from every later flush too, if answered writes may be lost.
    pub(super) async fn flush(&self) -> Result<()> {
        let unflushed = &self.shared.unflushed;
        unflushed.check()?;
        let (oldest, mark) = unflushed.begin_flush();
        let connection = match oldest.and_then(|number| self.numbered(number)) {
            Some(connection) => connection,
            None => self.own().await?,
        };
        let (kind, flags, body) = (kind::FLUSH, CommandFlags::empty(), Body::Flush(mark));
        let flushed = connection.submit(Command { kind, flags, offset: 0, length: 0, body }).await;
        // If the stream has ended meanwhile, the flush was sent again over a new stream. Its
        // success there does not prove that all writes are durable.
        unflushed.check()?;
        flushed.map(drop)
    }

    fn numbered(&self, number: usize) -> Option<Arc<Transmission>> {
        let list = self.shared.list.lock();
        list.connections.get(number).map(|(_, connection)| Arc::clone(connection))
    }
}

impl Shared {
    fn choose(&self) -> Choice {
        let thread = std::thread::current().id();
        let mut list = self.list.lock();
        let own = list.running().find(|(of, _)| *of == thread);
        if let Some((_, own)) = own {
            return Choice::Known(Arc::clone(own));
        }
        // After a close, requests fail on any connection.
        let any = list.connections.first().filter(|_| list.is_closed);
        let Some((_, first)) = list.running().next().or(any) else { return Choice::New };
        let first = Arc::clone(first);
        let is_multi = self.dial.export().flags.contains(TransmissionFlags::CAN_MULTI_CONN);
        if is_multi && list.running().count() < MAX_CONNECTIONS && list.may_ask(thread) {
            Choice::Meanwhile(first)
        } else {
            Choice::Known(first)
        }
    }

    /// Adds a connection of this loop over `stream`. It replaces a connection whose loop has ended,
    /// if there is one.
    fn add(&self, list: &mut List, stream: Link) -> Result<Arc<Transmission>> {
        let (dial, detached) = (Arc::clone(&self.dial), Arc::clone(&self.detached));
        let unflushed = Arc::clone(&self.unflushed);
        let connections = &mut list.connections;
        let free = connections.iter().position(|(_, connection)| connection.has_no_loop());
        let number = free.unwrap_or(connections.len());
        let connection = connection::start(dial, detached, unflushed, number, stream)?;
        let entry = (std::thread::current().id(), Arc::clone(&connection));
        match free {
            Some(number) => connections[number] = entry,
            None => connections.push(entry),
        }
        Ok(connection)
    }

    /// Gives the loop a connection of its own over `stream`. Closes `stream` instead if the storage
    /// was closed or the maximum number of connections was reached meanwhile, or if a failed
    /// connection waits to reconnect. Reason: a server that limits its clients may serve `stream`
    /// instead of the failed connection.
    fn adopt(&self, stream: Link) -> Result<()> {
        let mut list = self.list.lock();
        let is_full = list.running().count() >= MAX_CONNECTIONS;
        let is_one_lost = list.running().any(|(_, connection)| !connection.has_stream());
        if list.is_closed || is_full || is_one_lost {
            stream.shutdown();
            return Ok(());
        }
        self.add(&mut list, stream).map(drop)
    }
}

/// Opens another connection to the server for this loop.
async fn ask(shared: Arc<Shared>) {
    let outcome = shared.dial.again().await.and_then(|stream| shared.adopt(stream));
    if let Err(error) = outcome {
        tracing::debug!("{error}; a connection that is there is shared");
    }
}

impl List {
    /// The connections whose loops run, in the order of the list.
    fn running(&self) -> impl Iterator<Item = &(ThreadId, Arc<Transmission>)> {
        self.connections.iter().filter(|(_, connection)| !connection.has_no_loop())
    }

    /// Whether a loop without a connection of its own may try to get one now. If so, it may not try
    /// again before [`ASK_AGAIN`] has passed.
    fn may_ask(&mut self, thread: ThreadId) -> bool {
        let now = Instant::now();
        self.asked.retain(|(_, again)| *again > now);
        let is_new = self.asked.iter().all(|(of, _)| *of != thread);
        if is_new {
            self.asked.push((thread, now + ASK_AGAIN));
        }
        is_new
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.close();
    }
}
