//! What the tasks of one connection share.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{BufferPool, Storage};
use blockhouse_disk::Disk;
use blockhouse_engine::Stream;

use super::flow::Flow;
use super::job::Lane;
use super::outbox::{Answer, Outbox};
use super::peer_wait::PeerWait;
use crate::handshake::Terms;
use crate::proto::reply::ReplyTo;

/// One connection in its transmission phase. Its tasks (the reader, the lanes and the writer) run on
/// one thread.
pub struct Link<S: Storage> {
    pub stream: Stream,
    pub disk: Arc<Disk<S>>,
    pub terms: Terms,
    pub pool: BufferPool,
    pub flow: Flow,
    pub outbox: Outbox,
    /// Whether the peer has to move, and when it did.
    pub peer_wait: PeerWait,
    /// The lanes without a request.
    pub idle: RefCell<Vec<Rc<Lane>>>,
    /// Requests that the host failed.
    pub failures: Cell<u64>,
}

impl<S: Storage> Link<S> {
    /// Answers a request that is in the flow.
    pub fn reply(&self, to: ReplyTo, answer: Answer) {
        self.outbox.push(self.terms.framing, to, answer);
    }

    /// Gives the connection up: nothing more is sent or received, and whoever waits for the socket
    /// wakes up. Requests in flight finish without a reply.
    pub fn break_off(&self) {
        self.outbox.break_off();
        self.stream.shutdown();
    }
}
