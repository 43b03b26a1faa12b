//! The shared state of one connection's tasks.

use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{BufferPool, Storage};
use blockhouse_disk::{Access, Disk};
use blockhouse_engine::{PagePipes, Stream};

use super::failure::FailureLog;
use super::handler::IdleHandlers;
use super::in_flight::InFlightLimit;
use super::peer_wait::PeerWait;
use super::reply_queue::ReplyQueue;
use crate::bitmap::ExportBitmap;
use crate::handshake::NegotiatedOptions;
use crate::tls::TlsChannel;

/// One connection in its transmission phase. Its tasks (the reader, the handlers and the writer)
/// run on one thread.
pub struct SessionState<S: Storage> {
    /// The socket.
    pub stream: Stream,
    /// TLS over the socket, if it is used.
    pub tls: Option<Rc<TlsChannel>>,
    /// The disk that is served.
    pub disk: Arc<Disk<S>>,
    /// The bitmaps that the export offers.
    pub bitmaps: Vec<ExportBitmap>,
    /// Whether the client may change the disk.
    pub access: Access,
    /// The options of the handshake.
    pub options: NegotiatedOptions,
    /// The allocator of payloads' memory.
    pub pool: BufferPool,
    /// The pipes for replies whose data is in the page cache.
    pub pipes: PagePipes,
    /// The limit of requests and bytes in flight.
    pub in_flight: Rc<InFlightLimit>,
    /// Replies for the writer.
    pub replies: ReplyQueue,
    /// Whether the connection waits for the client, and the client's progress.
    pub peer_wait: PeerWait,
    /// The handlers without a request.
    pub idle_handlers: IdleHandlers,
    /// The log of requests that the host failed.
    pub failures: FailureLog,
}

impl<S: Storage> SessionState<S> {
    /// Ends the connection at once: nothing more is sent or received, and tasks that wait for the
    /// socket wake up. Requests in flight complete without a reply.
    pub fn abort(&self) {
        self.replies.abort();
        self.stream.shutdown();
    }
}
