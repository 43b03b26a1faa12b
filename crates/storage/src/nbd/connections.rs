//! The connections of a storage: which one a request takes, and what a flush covers.
//!
//! Guarantees:
//! - Each loop has a connection of its own where the export allows that (`CAN_MULTI_CONN`), up to a limit. Otherwise all
//!   loops share the first one.
//! - A flush goes to the connection with the oldest stream, of whichever loop: `storage/nbd/unflushed` says why. That loop
//!   must run.
//! - A flush fails from the first time on that the oldest stream ended with writes that were answered and not flushed,
//!   also one that was in flight then and was answered by the server that came back.

use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Instant;

use blockhouse_core::Result;
use blockhouse_engine::sleep;
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

/// Connections of one storage.
const MAX_CONNECTIONS: usize = 16;

/// Connections, by the loops that have made them.
type List = Vec<(ThreadId, Arc<Transmission>)>;

/// The connections to one export.
pub(super) struct Connections {
    dial: Arc<Dial>,
    /// Those of each loop; never empty. Of an export without `CAN_MULTI_CONN`, the only one.
    list: Mutex<List>,
    detached: Arc<DetachedSyncs>,
    unflushed: Arc<UnflushedWrites>,
}

impl Connections {
    /// The first one, over `stream`, on the current thread's loop.
    ///
    /// # Errors
    /// ENOMEM where memory runs out.
    pub(super) fn new(dial: Arc<Dial>, stream: Link) -> Result<Self> {
        let has_flush = dial.export().flags.contains(TransmissionFlags::SEND_FLUSH);
        let unflushed = Arc::new(UnflushedWrites::new(dial.name(), has_flush));
        let connections =
            Self { dial, list: Mutex::default(), detached: Arc::default(), unflushed };
        connections.add(&mut connections.list.lock(), stream)?;
        Ok(connections)
    }

    /// Adds a connection of this loop over `stream`.
    fn add(&self, list: &mut List, stream: Link) -> Result<Arc<Transmission>> {
        let (dial, detached) = (Arc::clone(&self.dial), Arc::clone(&self.detached));
        let unflushed = Arc::clone(&self.unflushed);
        let connection = connection::start(dial, detached, unflushed, list.len(), stream)?;
        list.push((std::thread::current().id(), Arc::clone(&connection)));
        Ok(connection)
    }

    /// The connection of this loop.
    ///
    /// # Errors
    /// As [`Dial::again`], once it has been tried for as long as requests wait for a server.
    pub(super) async fn own(&self) -> Result<Arc<Transmission>> {
        let thread = std::thread::current().id();
        if let Some(connection) = self.known(thread) {
            return Ok(connection);
        }
        let stream = self.connect().await?;
        let mut list = self.list.lock();
        // Several requests of one loop may have come here.
        if let Some((_, known)) = list.iter().find(|(of, _)| *of == thread) {
            stream.shutdown();
            return Ok(Arc::clone(known));
        }
        self.add(&mut list, stream)
    }

    /// Another stream. A server that is gone is waited for as long as requests of a connection that has failed wait.
    async fn connect(&self) -> Result<Link> {
        let end = Instant::now() + self.dial.reconnect_time();
        loop {
            match self.dial.again().await {
                Err(_) if Instant::now() < end => sleep(RETRY_DELAY).await,
                outcome => return outcome,
            }
        }
    }

    /// Ends all of them, when nothing uses the storage any more.
    pub(super) fn close(&self) {
        self.unflushed.close();
        self.list.lock().iter().for_each(|(_, connection)| connection.close());
    }

    fn known(&self, thread: ThreadId) -> Option<Arc<Transmission>> {
        let list = self.list.lock();
        let is_multi = self.dial.export().flags.contains(TransmissionFlags::CAN_MULTI_CONN);
        let is_shared = !is_multi || list.len() >= MAX_CONNECTIONS;
        let own = list.iter().find(|(of, _)| *of == thread);
        let found = own.or_else(|| list.first().filter(|_| is_shared));
        found.map(|(_, connection)| Arc::clone(connection))
    }

    /// Waits for flushes and durable writes whose future was dropped.
    ///
    /// # Errors
    /// The failure of one of them that was not reported yet.
    pub(super) async fn drained(&self) -> Result<()> {
        self.detached.drained().await
    }

    /// Makes all writes durable that were answered before the call.
    ///
    /// # Errors
    /// Those of the server; and EIO, for good, where answered writes may be lost.
    pub(super) async fn flush(&self) -> Result<()> {
        self.unflushed.check()?;
        let (oldest, mark) = self.unflushed.begin_flush();
        let connection = match oldest.and_then(|number| self.numbered(number)) {
            Some(connection) => connection,
            None => self.own().await?,
        };
        let (kind, flags, body) = (kind::FLUSH, CommandFlags::empty(), Body::Flush(mark));
        let flushed = connection.submit(Command { kind, flags, offset: 0, length: 0, body }).await;
        // Where the stream ended meanwhile, the flush was sent again over another one, and its success means nothing.
        self.unflushed.check()?;
        flushed.map(drop)
    }

    fn numbered(&self, number: usize) -> Option<Arc<Transmission>> {
        self.list.lock().get(number).map(|(_, connection)| Arc::clone(connection))
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.close();
    }
}
