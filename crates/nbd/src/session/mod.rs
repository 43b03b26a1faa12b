//! The transmission phase of one connection.
//!
//! A reader understands requests, lanes carry them out, a writer sends the replies; all are tasks of
//! one thread. Promises: a request that fails, fails alone; what one connection holds is bounded,
//! and a client that wants more waits; at the end every request that was read is finished, and its
//! reply sent if anybody is there to receive it.

mod budget;
mod condition;
mod flow;
mod job;
mod lane;
mod leave;
mod link;
mod outbox;
mod reader;
mod staging;
mod status;
mod writer;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{BufferPool, Storage};
use blockhouse_disk::Disk;
use blockhouse_engine::{Stream, spawn};
pub use budget::Budget;
pub use leave::Leave;
pub use reader::End;

use flow::Flow;
use link::Link;
use outbox::Outbox;
use reader::Reader;

use crate::handshake::Terms;

/// What one connection may have in flight.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Requests.
    pub requests: usize,
    /// Bytes of their payloads.
    pub bytes: usize,
}

/// A connection that has been through its handshake.
pub struct Session<S: Storage> {
    /// The socket.
    pub stream: Stream,
    /// What it serves.
    pub disk: Arc<Disk<S>>,
    /// What was agreed on.
    pub terms: Terms,
    /// Where payloads live.
    pub pool: BufferPool,
    /// How much may be in flight.
    pub allowance: Allowance,
    /// What the payloads of all connections draw from.
    pub budget: Arc<Budget>,
}

impl<S: Storage> Session<S> {
    /// Serves the connection to its end. `first` was received already; `leave` ends it early.
    pub async fn run(self, first: &[u8], leave: Arc<Leave>) -> End {
        let Self { stream, disk, terms, pool, allowance, budget } = self;
        let link = Rc::new(Link {
            stream,
            disk,
            terms,
            pool,
            flow: Flow::new(allowance.requests, allowance.bytes, budget),
            outbox: Outbox::new(allowance.requests),
            idle: RefCell::new(Vec::with_capacity(allowance.requests)),
            failures: Cell::new(0),
        });
        let writer = spawn(writer::run(Rc::clone(&link), allowance.requests));
        let end = Reader::new(Rc::clone(&link), leave, first).run().await;
        if let End::Failed(_) | End::BadMagic(_) | End::PayloadTooLong(_) = end {
            link.break_off();
        }
        link.flow.quiet().await;
        link.outbox.close();
        link.idle.take().iter().for_each(|lane| lane.end());
        writer.await;
        link.stream.shutdown();
        end
    }
}
